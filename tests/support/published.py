"""Small files in the formats of the public prompt sets, and a manifest that describes them."""

import hashlib
import json
from pathlib import Path

from specbench.prompts.public import PublicSet
from specbench.system.downloads import Remote

COCO = {
    "images": [{"id": 9}, {"id": 2}],
    "annotations": [
        {"image_id": 9, "id": 1, "caption": "short"}, {"image_id": 2, "id": 2, "caption": " a cat,\nasleep "},
        *({"image_id": 9, "id": 3 + n, "caption": f"the longest {name}."} for n, name in enumerate(("one", "two"))),
    ],
}  # fmt: skip
PARTI = (
    "Prompt\tCategory\tChallenge\tNote\n"
    "bond\tAbstract\tBasic\tseveral meanings\n"
    '"G I G G L E" painted on a wall\tArts\tWriting\t\n' + "word " * 100 + "end\tArts\tLong\t\n"
)
GENEVAL = [
    {"tag": "single_object", "include": [{"class": "bench", "count": 1}], "prompt": "a photo of a bench"},
    {"tag": "counting", "include": [{"class": "cow", "count": 2}], "exclude": [{"class": "cow", "count": 3}],
     "prompt": "a photo of two cows"},
]  # fmt: skip
DPG = (
    "\ufeffitem_id,text,keywords,proposition_id,dependency,category_broad,category_detailed,tuple,"
    "question_natural_language\r\n"
    '0,"a red, ripe cup",k,1,0,entity,whole,entity - whole (cup),Is there a cup?\r\n'
    '0,"a red, ripe cup",k,2,1,attribute,color,"attribute - color (cup, red)","Is the cup, if any, red?"\r\n'
    'partiprompts7,two dogs near a cat,,1,0,other,count,"other - count (dogs, ==2)",Are there two dogs?\r\n'
    "partiprompts7,two dogs near a cat,,2,0,entity,whole,entity - whole (cat),Is there a cat?\r\n"
    'partiprompts7,two dogs near a cat,,3,"1, 2",relation,spatial,"relation - spatial (dogs, cat, near)",'
    "Are they near it?\r\n"
)
GENEVAL2 = {
    "prompt": "two metal toys", "atom_count": 3,
    "vqa_list": [["How many toys are in the image?", "two"], ["Are the toys metal?", "Yes"]],
    "skills": ["count", "attribute"],
}  # fmt: skip
ONEIG = 'category,id,prompt_en,type,prompt_length,class\nPortrait,007,"a man, old",NP,short,None\n'
LONGTEXT = {"category": "sign", "length": "short", "prompt": "a sign", "text": ["OPEN"], "prompt_id": 3}
TIIF = [
    {"type": "action+2d", "short_description": f"a cat {verb}", "long_description": f"a grey cat {verb}"}
    for verb in ("left", "right")
]
CVTG = {"data_list": [{"index": 0, "prompt": "a sign 'OPEN' and a cup 'TEA'", "carrier_list": ["sign", "cup"]}]}
WISE = [
    {"Prompt": text, "Explanation": "mooncakes", "Category": kind, "Subcategory": "Festival", "prompt_id": number}
    for text, kind, number in (("a ball falls", "Physical Knowledge", 12), ("a round pastry", "Cultural knowledge", 3))
]
COCO_30K = 'image_id,source,prompt,evaluation_seed\n000000000009,coco-30k,"a cat, asleep\n",41337\n'
CATEGORIES = ("color", "shape", "texture", "spatial", "3d_spatial", "numeracy", "non_spatial", "complex")


def files(name: str) -> dict[str, bytes]:
    """The files of a small set: COCO with a tie and white space, quotes, CRLF and missing last line ends."""
    if name == "coco-30k":
        return {"coco_30k.csv": COCO_30K.encode()}
    if name.startswith("coco"):
        return {f"captions_{'train' if name == 'coco-train' else 'val'}2017.json": json.dumps(COCO).encode()}
    if name == "parti":
        return {"PartiPrompts.tsv": PARTI.encode()}
    if name == "geneval":
        return {"evaluation_metadata.jsonl": "\n".join(json.dumps(row) for row in GENEVAL).encode()}
    if name == "dpg-bench":
        return {"dpg_bench.csv": DPG.encode()}
    if name == "geneval2":
        return {"geneval2_data.jsonl": json.dumps(GENEVAL2).encode()}
    if name == "oneig":
        return {"OneIG-Bench.csv": ONEIG.encode()}
    if name == "longtext-bench":
        return {"text_prompts.jsonl": json.dumps(LONGTEXT).encode()}
    if name.startswith("wise"):
        ending = "_verified.json" if name == "wise-verified" else ".json"
        return {f"{file}{ending}": json.dumps([row]).encode() for file, row in zip("ab", WISE, strict=True)}
    if name == "tiif":
        return {"action+2d_prompts.jsonl": "\n".join(map(json.dumps, TIIF)).encode()}
    if name == "cvtg-2k":
        return {f"{folder}/2.json": json.dumps(CVTG).encode() for folder in ("CVTG", "CVTG-Style")}
    content = {f"{category}_val.txt": f"a {category} cup\r\ntwo cups ".encode() for category in CATEGORIES}
    kinds = {"spatial": "a complex cup", "action": "two cups", "spatialaction": ""}
    content["new_objects.txt"] = b"cup - cups\nmouse - mice"
    return content | {f"complex_val_{kind}.txt": text.encode() for kind, text in kinds.items()}


def digest(content: bytes) -> str:
    return "sha256:" + hashlib.sha256(content).hexdigest()


def public_set(name: str, base: str = "http://127.0.0.1:9") -> PublicSet:
    """The manifest entry of the small set, published under `base`."""
    counts = {"coco": 2, "parti": 3, "geneval": 2, "geneval2": 1, "dpg-bench": 2, "t2i-compbench": 16}
    counts |= {"coco-train": 2, "oneig": 1, "longtext-bench": 1, "coco-30k": 1, "tiif": 4, "cvtg-2k": 2}
    counts |= {"wise-verified": 2, "wise-legacy": 2}
    remotes = {file: Remote(f"{base}/{file}", digest(content)) for file, content in files(name).items()}
    categories = dict.fromkeys(CATEGORIES, 2) if name == "t2i-compbench" else {}
    return PublicSet(name, "", counts[name], "CC BY 4.0", "", remotes, categories=categories)


def write(name: str, folder: Path) -> Path:
    for file, content in files(name).items():
        (folder / file).parent.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
    return folder
