"""Readers of the files of public prompt sets."""

import csv
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from specbench.prompts.prompt_set import Prompt, text_id

COMPBENCH_CATEGORIES = ("color", "shape", "texture", "spatial", "3d_spatial", "numeracy", "non_spatial", "complex")
_NUMBERS = {"a": 1, "an": 1} | {
    word: number
    for number, word in enumerate(("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"), 1)
}
ONEIG_CATEGORIES = {"anime": "Anime_Stylization", "human": "Portrait", "object": "General_Object",
                    "text": "Text_Rendering", "reasoning": "Knowledge_Reasoning"}  # fmt: skip
"""{folder in OneIG-Bench's program: category}."""
_WISE_FIELDS = {"Cultural knowledge": "culture", "Physical Knowledge": "physics"}  # other fields differ only in case
_COMPLEX_KINDS = ("spatial", "action", "spatialaction")


def read_coco(folder: Path) -> list[Prompt]:
    """Read the only file of COCO captions in a folder as the papers do: one prompt per image, by ascending image id,
    with the longest caption (the first of equally long captions) and its white space as published. The id is the image
    file name without suffix."""
    (file,) = folder.glob("captions_*.json")
    return longest_captions(_json(file))


def read_coco_train(folder: Path) -> list[Prompt]:
    """Like `read_coco`, but `meta` does not name the image, because these images are not reference images."""
    return [replace(prompt, meta={"annotation": prompt.meta["annotation"]}) for prompt in read_coco(folder)]


def longest_captions(content: Mapping[str, Any]) -> list[Prompt]:
    """Return the longest caption of each image in a COCO captions file, see `read_coco`."""
    names = {image["id"]: image["file_name"] for image in content.get("images", ()) if "file_name" in image}
    longest: dict[int, dict[str, Any]] = {}
    for annotation in content["annotations"]:
        best = longest.get(annotation["image_id"])
        if best is None or len(annotation["caption"]) > len(best["caption"]):
            longest[annotation["image_id"]] = annotation
    files = {image: names.get(image, f"{int(image):012d}.jpg") for image in longest}
    return [
        Prompt(Path(files[image]).stem, caption["caption"], None, {"annotation": caption["id"], "image": files[image]})
        for image, caption in sorted(longest.items())
    ]


def read_parti(folder: Path) -> list[Prompt]:
    """Read PartiPrompts in file order, as published, including quotes; challenge and note become metadata."""
    prompts = []
    for row in _table(folder / "PartiPrompts.tsv", delimiter="\t", quoting=csv.QUOTE_NONE):
        meta = {"challenge": row["Challenge"]} | ({"note": row["Note"]} if row["Note"] else {})
        prompts.append(Prompt(text_id(row["Prompt"]), row["Prompt"], row["Category"], meta))
    return prompts


def read_geneval(folder: Path) -> list[Prompt]:
    """Read the GenEval prompts in file order. Keys of `meta`: the official `include` and `exclude` clauses (required or
    forbidden objects, counts, colours and positions); `line`, the official evaluator's number of the prompt."""
    return [
        Prompt(f"{row['tag']}-{text_id(row['prompt'])}", row["prompt"], row["tag"], {"line": line} | _clauses(row))
        for line, row in enumerate(_json_lines(folder / "evaluation_metadata.jsonl"))
    ]


def official_row(category: str, text: str, meta: dict[str, Any]) -> dict[str, Any]:
    """Rebuild a GenEval prompt's line of the official metadata. The evaluator reads it from the images' folder."""
    return {"tag": category, **_clauses(meta), "prompt": text}


def _clauses(row: dict[str, Any]) -> dict[str, Any]:
    return {name: row[name] for name in ("include", "exclude") if name in row}


def read_t2i_compbench(folder: Path) -> list[Prompt]:
    """Read the prompts of T2I-CompBench++: 300 validation prompts per category, in the order of `COMPBENCH_CATEGORIES`.
    Keys of `meta`: `line`, the prompt's number in its file; for complex prompts `kind`, which selects the parts of the
    score; for numeracy prompts `counts`, the requested number of each object."""
    kinds = {text: kind for kind in _COMPLEX_KINDS for text in _lines(folder / f"complex_val_{kind}.txt")}
    pairs = [line.split(" - ") for line in _lines(folder / "new_objects.txt")]
    names = {word: singular for singular, plural in pairs for word in (singular, plural)}
    prompts = []
    for category in COMPBENCH_CATEGORIES:
        for line, text in enumerate(_lines(folder / f"{category}_val.txt")):
            meta: dict[str, Any] = {"line": line}
            if category == "complex" and text in kinds:
                meta["kind"] = kinds[text]
            if category == "numeracy":
                meta["counts"] = counts(text, names)
            prompts.append(Prompt(f"{category}-{text_id(text)}", text, category, meta))
    return prompts


def read_dpg_bench(folder: Path) -> list[Prompt]:
    """Read the prompts of DPG-Bench, one for each item of the published table. The id is the name of the image file.
    Keys of `meta`: `line`, the item's position in the table; `questions`, each with its id, the ids of its parent
    questions (0: none), a tuple that begins with its category, and its text."""
    return dpg_prompts(_table(folder / "dpg_bench.csv"))


DPG_COLUMNS = {"item_id", "text", "proposition_id", "dependency", "tuple", "question_natural_language"}
"""Columns of DPG-Bench's table; a file with all of these columns is read as DPG-Bench's table."""


def dpg_prompts(rows: Iterable[Mapping[str, str]]) -> list[Prompt]:
    """Make the prompts from rows of DPG-Bench's table, see `read_dpg_bench`."""
    items: dict[str, Prompt] = {}
    for row in rows:
        name, parents = row["item_id"], [int(parent) for parent in row["dependency"].split(",")]
        new = Prompt(name, (row["text"] or "").strip(), None, {"line": len(items), "questions": []})
        about, asked = row["tuple"], row["question_natural_language"]
        question = {"id": int(row["proposition_id"]), "parents": parents, "tuple": about, "question": asked}
        items.setdefault(name, new).meta["questions"].append(question)
    return [*items.values()]


def read_geneval2(folder: Path) -> list[Prompt]:
    """Read the prompts of GenEval 2 in file order, by their number of atoms. `meta` has `vqa_list` (questions with
    their answers), `skills` (the skill that each question tests), and `line`."""
    prompts = []
    for number, row in enumerate(_json_lines(folder / "geneval2_data.jsonl")):
        meta = {"line": number, "vqa_list": row["vqa_list"], "skills": row["skills"]}
        prompts.append(Prompt(f"{number:03d}", row["prompt"], f"{row['atom_count']} atoms", meta))
    return prompts


def read_oneig(folder: Path) -> list[Prompt]:
    """Read the English prompts of OneIG-Bench in file order. An id consists of category and image number. `meta` has
    the columns `type`, `prompt_length` and `class`, without empty values."""
    prompts = []
    for row in _table(folder / "OneIG-Bench.csv"):
        meta = {name: row[name] for name in ("type", "prompt_length", "class") if row[name] not in (None, "", "None")}
        prompts.append(Prompt(f"{row['category']}-{row['id']}", row["prompt_en"], row["category"], meta))
    return prompts


def read_wise(folder: Path) -> list[Prompt]:
    """Read the prompts of a release of WISE, ordered by their numbers, which also name images; categories are the
    fields of WISE's scores. Keys of `meta`: `line` (the number), `wise` (the release), `subcategory`, `explanation`."""
    rows = [row for file in folder.glob("*.json") for row in _json(file)]
    release = "verified" if [*folder.glob("*_verified.json")] else "legacy"
    prompts = []
    for row in sorted(rows, key=lambda row: row["prompt_id"]):
        field = _WISE_FIELDS.get(row["Category"], row["Category"].lower())
        meta = {"line": row["prompt_id"], "wise": release, "subcategory": row["Subcategory"]}
        meta["explanation"] = row["Explanation"]
        prompts.append(Prompt(str(row["prompt_id"]), row["Prompt"], field, meta))
    return prompts


def read_longtext_bench(folder: Path) -> list[Prompt]:
    """Read the English prompts of LongText-Bench in file order; `meta` has the texts to show, and their kind."""
    return [
        Prompt(
            f"{row['prompt_id']:03d}", row["prompt"], row["category"], {"text": row["text"], "length": row["length"]}
        )
        for row in _json_lines(folder / "text_prompts.jsonl")
    ]


def read_coco_30k(folder: Path) -> list[Prompt]:
    """Read the 30,000 captions of COCO-30K in file order. Ids are ids of COCO's images; the images are not included."""
    return [Prompt(row["image_id"], row["prompt"].strip()) for row in _table(folder / "coco_30k.csv")]


def read_tiif(folder: Path) -> list[Prompt]:
    """Read the prompts of TIIF-Bench, a short and a long prompt per instruction. Keys of `meta`: the length, and
    `line`, the prompt's number within its type."""
    return [
        Prompt(f"{row['type']}-{line:02d}-{length}", row[f"{length}_description"], row["type"], about)
        for file in sorted(folder.glob("*_prompts.jsonl"))
        for line, row in enumerate(_json_lines(file))
        for length in ("short", "long")
        for about in [{"line": line, "length": length}]
    ]


def read_cvtg_2k(folder: Path) -> list[Prompt]:
    """Read the prompts of CVTG-2K from its files. The category consists of the file's folder and number of texts;
    `meta` has `line`, the index in the file."""
    return [
        Prompt(f"{kind}-{row['index']:03d}", row["prompt"], kind, {"line": row["index"]})
        for file in sorted(folder.glob("CVTG*/[2-5].json"))
        for kind in [f"{file.parent.name}-{file.stem}"]
        for row in _json(file)["data_list"]
    ]


def counts(text: str, names: Mapping[str, str]) -> dict[str, int]:
    """Count the objects requested by a numeracy prompt; `names` maps each singular and plural noun to its singular."""
    words = "|".join(map(re.escape, sorted(names, key=len, reverse=True)))
    numbers: dict[str, int] = {}
    for number, word in re.findall(rf"\b({'|'.join(_NUMBERS)}) ({words})\b", text.lower()):
        numbers[names[word]] = numbers.get(names[word], 0) + _NUMBERS[number]
    return numbers


def _table(path: Path, **form: Any) -> list[dict[str, str]]:
    with path.open(encoding="utf-8-sig", newline="") as file:
        return list(csv.DictReader(file, **form))


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in _lines(path)]


def _lines(path: Path) -> list[str]:
    """Read the non-empty lines of a file, stripped (files have LF or CRLF line ends)."""
    lines = (line.strip() for line in path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line]


READERS = {
    "coco": read_coco,
    "coco-train": read_coco_train,
    "parti": read_parti,
    "geneval": read_geneval,
    "geneval2": read_geneval2,
    "dpg-bench": read_dpg_bench,
    "t2i-compbench": read_t2i_compbench,
    "oneig": read_oneig,
    "longtext-bench": read_longtext_bench,
    "wise-verified": read_wise,
    "wise-legacy": read_wise,
    "coco-30k": read_coco_30k,
    "tiif": read_tiif,
    "cvtg-2k": read_cvtg_2k,
}
"""{public set: function that reads its prompts from the folder of its files}."""
