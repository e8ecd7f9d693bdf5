"""Match external images to prompts, by prompt id or by the layout (rule for file names) of a paper's program. A layout
fits a folder if every file is the image of a prompt and all prompts have the same samples. Only one layout may fit."""

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specbench.errors import SpecbenchError, read_name
from specbench.metrics.scoring import OWN_CAPTIONS, Images, ScoreReporter, with_scene
from specbench.names import composed, encodable
from specbench.prompts import Prompt, PromptSet, build_prompt_set, load_prompts, text_id
from specbench.prompts.readers import read_entries
from specbench.store.schema import Key, image_name, read_meta
from specbench.system.console import counted
from specbench.system.files import blaming, read_regular
from specbench.system.images import members, picture_bytes, pictures_in, read_picture
from specbench.system.json_values import parse_json

_NUMBERED = re.compile(r"(?P<name>.+)[-_](?P<sample>\d{1,9})")
_LINE = re.compile(r"(?:prompt[-_])?(?P<name>\d{1,12})(?:[-_](?P<sample>\d{1,9}))?")
_STARTED = re.compile(r"(?P<name>.+)-\d+-init-.{1,6}-seed(?:None|(?P<sample>\d{1,19}))-img_topk\w+", re.DOTALL)
_MAX_JSON_BYTES = 2**28
_Pairs = Iterable[tuple[Key, Path]]


@dataclass(frozen=True)
class ImageLayout:
    """Layout: rule by which file names identify prompt and sample."""

    what: str  # description of the names, for messages
    match: Callable[[Path, Sequence[Prompt]], _Pairs]  # function that matches the images in a folder
    grid: bool = False  # whether a file contains 2 x 2 images


def external_images(
    folder: Path, prompts: PromptSet, out: Path, layout: str | None = None, reporter: ScoreReporter | None = None
) -> Images:
    """Match every image file to its prompt; scores go to a separate folder in `out`. `layout`: a name of
    `IMAGE_LAYOUTS`; None: the layout that fits. A note reports the layout and the first pair."""
    layout = layout or ("dataset" if _metadata(folder) else None)
    name = read_name("layout", layout, IMAGE_LAYOUTS) if layout else None
    name, matched = (name, _matched(name, folder, prompts)) if name else _fitting(folder, prompts)
    by_id, grid, first = {prompt.id: prompt for prompt in prompts.prompts}, IMAGE_LAYOUTS[name].grid, prompts.prompts[0]
    path = next(path for key, path in sorted(matched.items()) if key[0] == first.id)
    found = f"{counted(len(matched), 'image')}, layout {name} ({IMAGE_LAYOUTS[name].what})"
    pair = f"first pair: {path.relative_to(folder)} is '{first.text:.60}'"
    (reporter or ScoreReporter()).note(f"{folder}: {found}; {pair}")
    rows = []
    for (prompt_id, sample), path in sorted(matched.items()):
        prompt = by_id[prompt_id]
        meta = with_scene(prompt.text, json.dumps(prompt.meta))
        category = prompt.category or (OWN_CAPTIONS if "scene" in read_meta(meta) else None)
        about = {"prompt": prompt.text, "category": category, "meta": meta}
        # The version of an image consists of its content, and of its name if the name may later match another prompt.
        place = "" if name == "ids" else f"-{encodable(str(path.relative_to(folder)))}"
        version = f"{hashlib.sha256(picture_bytes(path)).hexdigest()[:32]}{place}"
        file = {"started_at": version, "path": path}
        rows.append({"prompt_id": prompt_id, "sample": sample, **about, **file})
    whole = Path(encodable(str(folder.resolve())))
    digest = hashlib.sha256(f"{whole}\n{prompts.sha256}{'#grid' * grid}".encode()).hexdigest()[:8]
    name = f"{whole.name.encode()[:200].decode(errors='ignore')}-{digest}"  # also the name of a folder
    return Images(name, out / name, pd.DataFrame(rows), _quarter if grid else lambda row: read_picture(row.path))


def prompts_of_images(folder: Path, prompts: str | Path | None, column: str | None = None) -> PromptSet:
    """Load the prompts of external images from a set, a file, or the folder's metadata file."""
    if prompts is not None:
        return load_prompts(prompts, column)
    if (about := _metadata(folder)) is None:
        what = f"{folder} has no metadata.jsonl or metadata.csv with its prompts"
        raise SpecbenchError(what, "name them with --prompts SET|FILE" if folder.is_dir() else "check --images")
    by_id: dict[str, Prompt] = {}
    for prompt in read_entries(about, column):
        meta = {name: value for name, value in prompt.meta.items() if name not in ("file_name", "sample", "run")}
        if by_id.setdefault(prompt.id, replace(prompt, meta=meta)).text != prompt.text:
            raise SpecbenchError(f"{about}: two prompts have the id '{prompt.id:.60}'", "make the ids unique")
    return build_prompt_set(str(about), list(by_id.values()))


def _metadata(folder: Path) -> Path | None:
    """Find the file with image names and captions in the format of Hugging Face's datasets, if any."""
    places = (place / f"metadata.{kind}" for place in (folder, folder / "train") for kind in ("jsonl", "csv"))
    return next((path for path in places if path.is_file()), None)


def _by_metadata(folder: Path, prompts: Sequence[Prompt]) -> _Pairs:
    """Match by metadata file. Images of one prompt are numbered in the order of their entries."""
    if (about := _metadata(folder)) is None:
        raise SpecbenchError(f"{folder} has no metadata.jsonl or metadata.csv")
    ids = {prompt.id for prompt in prompts}
    by_text = {composed(prompt.text).strip(): prompt.id for prompt in prompts}
    listed = cache(lambda place: {composed(path.name): path for path in members(place)})

    def on_disk(path: Path) -> Path:
        """Find an existing path whose name may have another Unicode composition (NFC or NFD)."""
        return path if path.exists() else listed(on_disk(path.parent)).get(composed(path.name), path)

    counts: Counter[str] = Counter()
    for entry in read_entries(about):
        file = str(entry.meta.get("file_name", ""))
        if not file or Path(file).is_absolute() or ".." in Path(file).parts:
            raise SpecbenchError(f"{about}: '{file:.60}' is not the file_name of an image in its folder")
        path = about.parent / file
        name = entry.id if entry.id in ids else by_text.get(composed(entry.text))
        if name is None:
            raise _no_prompt(path, f"its caption, '{entry.text:.60}', is not in the list of prompts")
        yield (name, counts[name]), on_disk(path)
        counts[name] += 1


def _fitting(folder: Path, prompts: PromptSet) -> tuple[str, dict[Key, Path]]:
    """Return the fitting layout, and its images. If none fits, raise the error of the nearest layout, else of `ids`."""
    fitting: dict[str, dict[Key, Path]] = {}
    problems: dict[str, SpecbenchError] = {}
    for name in IMAGE_LAYOUTS:
        try:
            if not IMAGE_LAYOUTS[name].grid:
                fitting[name] = _matched(name, folder, prompts)
        except SpecbenchError as error:
            problems[name] = error
    if not fitting:
        near = [[why for why in problems.values() if isinstance(why, kind)] for kind in (_Incomplete, _Unlisted)]
        raise [*near[0], *reversed(near[1]), problems["ids"]][0]
    first, *others = fitting
    if other := next((name for name in others if fitting[name] != fitting[first]), None):
        what = f"{folder} fits two layouts, '{first}' and '{other}', which assign different prompts to the images"
        raise SpecbenchError(what, f"choose --layout {first} or --layout {other}")
    return first, fitting[first]


class _Incomplete(SpecbenchError):
    """All files of a folder fit a layout, but an image is missing."""


class _Unlisted(SpecbenchError):
    """The name of a file fits a layout, but its prompt is not in the list."""


def _matched(name: str, folder: Path, prompts: PromptSet) -> dict[Key, Path]:
    images: dict[Key, Path] = {}
    for key, path in IMAGE_LAYOUTS[name].match(folder, prompts.prompts):
        if images.setdefault(key, path) != path:
            alike = composed(str(path)) == composed(str(images[key])) and path.name != images[key].name
            how = ": their names differ only in their Unicode composition" if alike else ""
            raise SpecbenchError(f"{images[key]} and {path} are both image {key[1]} of prompt '{key[0]}'{how}")
    if not images:
        raise SpecbenchError("no images")
    samples = sorted({sample for _, sample in images}) if name != "dataset" else [0]  # a metadata file lists all images
    for prompt in prompts.prompts:
        for sample in samples:
            if (prompt.id, sample) not in images:
                called = f"'{prompt.text:.60}'" if prompt.id == text_id(prompt.text) else f"prompt '{prompt.id}'"
                seen_as = f"looked for {prompt.id}-{sample}.png" if name == "ids" else f"read as layout {name}"
                fix = f"if it has no image, name a file of only the other prompts: --prompts FILE; {seen_as}"
                raise _Incomplete(f"{folder} has no image {sample} of {called}", fix)
    return images


def _by_id(folder: Path, prompts: Sequence[Prompt]) -> _Pairs:
    slugs = {image_name(prompt.id, 0).removesuffix("-0.png"): prompt.id for prompt in prompts}
    ids = slugs | {prompt.id: prompt.id for prompt in prompts}
    return _named(pictures_in(folder), {composed(name): meant for name, meant in ids.items()})


def _by_line(folder: Path, prompts: Sequence[Prompt]) -> _Pairs:
    """Match by line number, from 0 or 1, in the list of prompts, or in the captions that LANTERN's program stored."""
    paths = pictures_in(folder, _BESIDE)
    if kept := _kept_captions(folder):
        by_text = {composed(prompt.text): prompt.id for prompt in prompts}
        ids = {line: by_text[text] for line, text in kept.items() if text in by_text}
        return _numbered(paths, ids, "the program's caption {} is not in the list of prompts")
    numbers = [int(number["name"]) for path in paths if (number := _LINE.fullmatch(path.stem))]
    ids = {line: prompt.id for line, prompt in enumerate(prompts, 0 if 0 in numbers else 1)}
    return _numbered(paths, ids, f"the list has {len(prompts)} lines")


def _by_annotation(folder: Path, prompts: Sequence[Prompt]) -> _Pairs:
    if not (ids := {prompt.meta["annotation"]: prompt.id for prompt in prompts if "annotation" in prompt.meta}):
        raise SpecbenchError("no prompt has the id of a COCO caption")
    return _numbered(pictures_in(folder, _BESIDE), ids, "no caption is COCO's annotation {}")


def _by_caption(folder: Path, prompts: Sequence[Prompt]) -> _Pairs:
    inside = [place / "samples" for place in (folder, *members(folder))]
    places = [place for place in inside if place.is_dir()] or [folder]
    paths = [path for place in places for path in pictures_in(place)]
    return _ranked(_named(paths, _ids_by(_words, prompts), _words))


def _by_start(folder: Path, prompts: Sequence[Prompt]) -> _Pairs:
    ids = _ids_by(lambda text: composed(text)[:30], prompts)  # GSD's and SJD's test programs use these names

    def pairs() -> _Pairs:
        for path in pictures_in(folder):
            match = _STARTED.fullmatch(composed(path.stem))
            words = match["name"] if match else ""
            ends = (at for at, mark in enumerate(words, 1) if mark == "-")  # the model's name may also contain "-"
            if match is None or (name := next((ids[words[at:]] for at in ends if words[at:] in ids), None)) is None:
                raise _no_prompt(path)
            yield (name, int(match["sample"] or 0)), path

    return _ranked(pairs())


def _by_folder(folder: Path, prompts: Sequence[Prompt]) -> _Pairs:
    """Match GenEval's `<line>/samples/<sample>.png`, and compare the captions stored in these folders."""
    for place in members(folder):
        if not (place / "samples").is_dir() or not place.name.isdecimal() or int(place.name) >= len(prompts):
            raise _no_prompt(place)
        prompt, about = prompts[int(place.name)], place / "metadata.jsonl"
        with blaming(about, "has no caption 'prompt'", "remove it"):
            if about.is_file() and composed(_json(about)["prompt"]).strip() != composed(prompt.text).strip():
                raise SpecbenchError(f"{about} has another caption than line {place.name}, '{prompt.text:.60}'")
        for path in pictures_in(place / "samples"):
            if not path.stem.isdecimal():
                raise _no_prompt(path)
            yield (prompt.id, int(path.stem)), path


def _as_grids(folder: Path, prompts: Sequence[Prompt]) -> _Pairs:
    return (((name, sample), path) for (name, _), path in _by_id(folder, prompts) for sample in range(4))


def _named(paths: Iterable[Path], ids: Mapping[str, str], plain: Callable[[str], str] = str) -> _Pairs:
    """Match images whose file name is a key of `ids`, optionally followed by a number."""
    for path in paths:
        name = composed(path.stem)
        numbered = _NUMBERED.fullmatch(name)
        read = [(plain(name), 0), *([(plain(numbered["name"]), int(numbered["sample"]))] if numbered else [])]
        if not (fitting := sorted({(ids[name], sample) for name, sample in read if name in ids})):
            raise _no_prompt(path)
        if len(fitting) > 1:
            names = " and ".join(f"'{name}'" for name, _ in fitting)
            raise SpecbenchError(f"{path} may belong to prompts {names}", "name it <prompt id>-<sample>.png")
        yield fitting[0], path


def _numbered(paths: Iterable[Path], ids: Mapping[int, str], why: str) -> _Pairs:
    for path in paths:
        if (number := _LINE.fullmatch(path.stem)) is None or int(number["name"]) not in ids:
            raise _no_prompt(path, why.format(int(number["name"])) if number else "")
        yield (ids[int(number["name"])], int(number["sample"] or 0)), path


def _ranked(pairs: _Pairs) -> _Pairs:
    """Renumber samples from 0 in the order of the numbers in file names, which may count all images or be seeds."""
    groups: defaultdict[str, list[tuple[int, Path]]] = defaultdict(list)
    for (name, number), path in pairs:
        groups[name].append((number, path))
    return (((name, rank), path) for name, ranked in groups.items() for rank, (_, path) in enumerate(sorted(ranked)))


def _ids_by(name_of: Callable[[str], str], prompts: Sequence[Prompt]) -> dict[str, str]:
    if len(ids := {name_of(prompt.text): prompt.id for prompt in prompts}) < len(prompts):
        raise SpecbenchError("two captions would have the same file name")
    return ids


def _words(text: str) -> str:
    """Reduce a caption to letters and digits, because file names may lack other characters."""
    return " ".join(re.findall(r"\w+", composed(text).replace("_", " ").lower()))


def _kept_captions(folder: Path) -> dict[int, str]:
    """Read the numbered captions that LANTERN's program stores with its images."""
    kept: dict[int, str] = {}
    for path in sorted(folder.glob("global_statistics_*.json")):
        with blaming(path, "has no captions of 'prompt_0', 'prompt_1', ...", "remove it"):
            for name, row in _json(path).items():
                kept[int(name.removeprefix("prompt_"))] = composed(str(row["prompt"])).strip()
    return kept


def _json(path: Path) -> Any:
    return parse_json(read_regular(path, _MAX_JSON_BYTES))


def _quarter(row: Any) -> np.ndarray:
    pixels = read_picture(row.path)
    height, width = pixels.shape[0] // 2, pixels.shape[1] // 2
    if not height or not width or pixels.shape[0] % 2 or pixels.shape[1] % 2:
        raise SpecbenchError(f"{row.path} is not a grid of 2 x 2 images: {pixels.shape[1]} x {pixels.shape[0]}")
    top, left = divmod(row.sample, 2)
    return pixels[top * height : (top + 1) * height, left * width : (left + 1) * width]


_BESIDE = ("global_statistics_*.json", "generation_configs.json", "gen_img_output.log")
"""Files that LANTERN's and SJD's programs write next to their images."""
IMAGE_LAYOUTS: Mapping[str, ImageLayout] = {
    "ids": ImageLayout("<prompt id>.png or <prompt id>-<sample>.png", _by_id),
    "lines": ImageLayout("0.png, prompt_0.png or 00000.png: line in the list; LANTERN, SJD on PartiPrompts", _by_line),
    "annotations": ImageLayout("<annotation>.png: id of the caption in COCO; SJD on COCO", _by_annotation),
    "captions": ImageLayout("<caption>_<number>.png; T2I-CompBench", _by_caption),
    "starts": ImageLayout("<model>-<30 characters of the caption>-...-seed<seed>-...png; GSD", _by_start),
    "geneval": ImageLayout("<line>/samples/<sample>.png; GenEval", _by_folder),
    "dataset": ImageLayout("metadata.jsonl or .csv with file_name and prompt or text; Hugging Face", _by_metadata),
    "grids": ImageLayout("<prompt id>.png is a grid of 2 x 2 images; DPG-Bench", _as_grids, grid=True),
}
"""{name: layout}. `grids` is used only if the user requests it, because a grid is also a valid image."""


def _no_prompt(path: Path, why: str = "") -> SpecbenchError:
    fix = f"name it <prompt id>.png or <prompt id>-<sample>.png, or remove it; --layout: {', '.join(IMAGE_LAYOUTS)}"
    return (_Unlisted if why else SpecbenchError)(f"{path} belongs to no prompt" + f": {why}" * bool(why), fix)
