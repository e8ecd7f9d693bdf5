"""Match external images to prompts: by prompt id, or in the layouts in which the papers' programs write them.

A layout fits a folder where every file of it is the image of a prompt, and every prompt has the same samples. Where
several fit and say different things, none is taken.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from specbench.errors import SpecbenchError, read_name
from specbench.metrics.scoring import OWN_CAPTIONS, Images, with_scene
from specbench.prompts import Prompt, PromptSet, build_prompt_set, load_prompts
from specbench.prompts.readers import read_entries
from specbench.store.schema import Key, image_name
from specbench.system.files import read_regular
from specbench.system.images import pictures_in, read_picture
from specbench.system.json_values import parse_json

_NUMBERED = re.compile(r"(?P<name>.+)[-_](?P<sample>\d{1,9})")
_LINE = re.compile(r"(?:prompt[-_])?(?P<line>\d{1,12})(?:[-_](?P<sample>\d{1,9}))?")
_MAX_JSON_BYTES = 2**28


@dataclass(frozen=True)
class ImageLayout:
    """Names of image files.

    Attributes:
        what: which names, for messages.
        match: finds the images of a folder.
        grid: whether a file holds four images, two rows of two.
    """

    what: str
    match: Callable[[Path, Sequence[Prompt]], dict[Key, Path]]
    grid: bool = False


def external_images(
    folder: Path,
    prompts: PromptSet,
    out: Path,
    layout: str | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> Images:
    """Match every image file to its prompt. Scores go to a folder of their own in `out`.

    Args:
        layout: one of `IMAGE_LAYOUTS`; None for the one that fits.
        say: receives a line with the layout and the first pair.

    Raises:
        SpecbenchError: a file that belongs to no prompt or to two, two files for one image, a prompt without one, or
            several layouts that fit.
    """
    layout = layout or ("dataset" if _metadata(folder) else None)
    name = read_name("layout", layout, IMAGE_LAYOUTS) if layout else None
    name, found = (name, _matched(name, folder, prompts)) if name else _fitting(folder, prompts)
    known, grid = {prompt.id: prompt for prompt in prompts.prompts}, IMAGE_LAYOUTS[name].grid
    first = next(prompt for prompt in prompts.prompts if (prompt.id, 0) in found)
    pair = f"{found[first.id, 0].relative_to(folder)} is '{first.text:.60}'"
    say(f"{folder}: layout {name} ({IMAGE_LAYOUTS[name].what}); first pair: {pair}")
    rows = [
        {
            "prompt_id": prompt,
            "sample": sample,
            "prompt": known[prompt].text,
            "category": known[prompt].category,
            "meta": with_scene(known[prompt].text, json.dumps(known[prompt].meta)),
            "started_at": _version(path, folder, name),
            "path": path,
        }
        for (prompt, sample), path in sorted(found.items())
    ]
    for row in rows:
        if row["category"] is None and "scene" in parse_json(row["meta"]):
            row["category"] = OWN_CAPTIONS
    digest = hashlib.sha256(f"{folder.resolve()}\n{prompts.sha256}{'#grid' * grid}".encode()).hexdigest()[:8]
    name = f"{folder.resolve().name}-{digest}"
    return Images(name, out / name, pd.DataFrame(rows), _quarter if grid else lambda row: read_picture(row.path))


def prompts_of_images(folder: Path, prompts: str | Path | None, column: str | None = None) -> PromptSet:
    """The prompts of external images: a set or file, or those that the folder's own metadata name.

    Raises:
        SpecbenchError: neither is given, or it cannot be used.
    """
    if prompts is not None:
        return load_prompts(prompts, column)
    if (about := _metadata(folder)) is None:
        what = f"{folder} has no metadata.jsonl or metadata.csv that names its prompts"
        raise SpecbenchError(what, "--prompts SET|FILE" if folder.is_dir() else "check --images")
    known: dict[str, Prompt] = {}
    for one in read_entries(about, column):
        meta = {name: value for name, value in one.meta.items() if name not in ("file_name", "sample", "run")}
        if known.setdefault(one.id, replace(one, meta=meta)).text != one.text:
            raise SpecbenchError(f"{about}: two prompts have the id '{one.id:.60}'", "ids must be unique")
    return build_prompt_set(str(about), list(known.values()))


def _metadata(folder: Path) -> Path | None:
    """The file in which Hugging Face's datasets name images and their captions; None where there is none."""
    places = (place / f"metadata.{kind}" for place in (folder, folder / "train") for kind in ("jsonl", "csv"))
    return next((path for path in places if path.is_file()), None)


def _by_metadata(folder: Path, prompts: Sequence[Prompt]) -> dict[Key, Path]:
    """Images of one prompt are numbered in the order of their entries."""
    if (about := _metadata(folder)) is None:
        raise SpecbenchError(f"{folder} has no metadata.jsonl or metadata.csv")
    known = {prompt.id for prompt in prompts}
    by_text = {prompt.text.strip(): prompt.id for prompt in prompts}

    def pairs() -> Iterator[tuple[Key, Path]]:
        counts: Counter[str] = Counter()
        for one in read_entries(about):
            file = str(one.meta.get("file_name", ""))
            if not file or Path(file).is_absolute() or ".." in Path(file).parts:
                raise SpecbenchError(f"{about}: '{file:.60}' is no file_name of an image beside it")
            name = one.id if one.id in known else by_text.get(one.text)
            if name is None:
                raise _no_prompt(about.parent / file, f"its caption, '{one.text:.60}', is none of them")
            yield (name, counts[name]), about.parent / file
            counts[name] += 1

    return _once(pairs())


def _fitting(folder: Path, prompts: PromptSet) -> tuple[str, dict[Key, Path]]:
    """The layout that fits, and its images; that of the names by id says what is wrong where none does."""
    fitting: dict[str, dict[Key, Path]] = {}
    problems: dict[str, SpecbenchError] = {}
    for name in IMAGE_LAYOUTS:
        try:
            if not IMAGE_LAYOUTS[name].grid:
                fitting[name] = _matched(name, folder, prompts)
        except SpecbenchError as error:
            problems[name] = error
    if not fitting:
        raise next((one for one in problems.values() if isinstance(one, _Incomplete)), problems["ids"])
    first, *others = fitting
    if other := next((name for name in others if fitting[name] != fitting[first]), None):
        what = f"{folder} fits the layouts '{first}' and '{other}', which pair images and prompts differently"
        raise SpecbenchError(what, f"--layout {first} or --layout {other}")
    return first, fitting[first]


class _Incomplete(SpecbenchError):
    """A folder whose files all fit, but where an image is missing."""


def _matched(name: str, folder: Path, prompts: PromptSet) -> dict[Key, Path]:
    found = IMAGE_LAYOUTS[name].match(folder, prompts.prompts)
    samples = sorted({sample for _, sample in found}) if name != "dataset" else [0]  # whose metadata list all there is
    for prompt in prompts.prompts:
        for sample in samples:
            if (prompt.id, sample) not in found:
                raise _Incomplete(
                    f"{folder} has no image {sample} of prompt '{prompt.id}'",
                    "leave the prompt out of the file if it was not drawn"
                    + (f"; looked for {prompt.id}-{sample}.png" if name == "ids" else f"; taken as layout {name}"),
                )
    return found


def _by_id(folder: Path, prompts: Sequence[Prompt]) -> dict[Key, Path]:
    known = {prompt.id for prompt in prompts}
    slugs = {image_name(name, 0).removesuffix("-0.png"): name for name in known}
    return _once((_id_key(path, known, slugs), path) for path in pictures_in(folder))


def _id_key(path: Path, known: set[str], slugs: Mapping[str, str]) -> Key:
    stem = path.stem
    keys = {(stem, 0)} if stem in known else set()
    numbered = _NUMBERED.fullmatch(stem)
    if numbered:
        name = numbered["name"] if numbered["name"] in known else slugs.get(numbered["name"])
        keys |= {(name, int(numbered["sample"]))} if name else set()
    if not keys:
        raise _no_prompt(path)
    if len(keys) > 1:
        names = " and ".join(f"'{name}'" for name, _ in sorted(keys))
        raise SpecbenchError(f"{path} may belong to prompts {names}", "name it <prompt id>-<sample>.png")
    return keys.pop()


def _by_line(folder: Path, prompts: Sequence[Prompt]) -> dict[Key, Path]:
    """Numbers are lines of the list, from 0 or 1; those of LANTERN's program are of the captions that it has kept."""
    kept = _kept_captions(folder)
    numbered = [(path, _number(path)) for path in pictures_in(folder, _BESIDE)]
    first = 0 if kept or any(int(one["line"]) == 0 for _, one in numbered) else 1
    by_text = {prompt.text: prompt.id for prompt in prompts}

    def key(path: Path, number: re.Match) -> Key:
        line, sample = int(number["line"]), int(number["sample"] or 0)
        if kept:
            prompt = by_text.get(str(kept.get(line)).strip())
        else:
            prompt = prompts[line - first].id if line - first < len(prompts) else None
        if prompt is None:
            raise _no_prompt(path, f"caption {line} of its program" if kept else f"the list has {len(prompts)} lines")
        return prompt, sample

    return _once((key(path, number), path) for path, number in numbered)


def _kept_captions(folder: Path) -> dict[int, object]:
    """Captions by number, as LANTERN's program keeps them beside its images."""
    kept: dict[int, object] = {}
    for path in sorted(folder.glob("global_statistics_*.json")):
        try:
            held = parse_json(read_regular(path, _MAX_JSON_BYTES, folder))
            kept |= {int(name.removeprefix("prompt_")): one["prompt"] for name, one in held.items()}
        except (ValueError, KeyError, TypeError, AttributeError, OSError):
            raise SpecbenchError(f"{path} has no captions of 'prompt_0', 'prompt_1', ...", "take it out") from None
    return kept


def _by_annotation(folder: Path, prompts: Sequence[Prompt]) -> dict[Key, Path]:
    known = {prompt.meta["annotation"]: prompt.id for prompt in prompts if "annotation" in prompt.meta}
    found = []
    for path in pictures_in(folder, _BESIDE):
        number = _number(path)
        if (annotation := int(number["line"])) not in known:
            raise _no_prompt(path, f"no caption is COCO's annotation {annotation}")
        found.append(((known[annotation], int(number["sample"] or 0)), path))
    return _once(found)


def _by_caption(folder: Path, prompts: Sequence[Prompt]) -> dict[Key, Path]:
    """The number behind a caption only orders its images: it may run over all captions."""
    places = [folder / "samples"] if (folder / "samples").is_dir() else sorted(folder.glob("*/samples")) or [folder]
    ids = {_words(prompt.text): prompt.id for prompt in prompts}
    if len(ids) < len(prompts):
        raise SpecbenchError("two captions would have the same file name")
    groups: defaultdict[str, list[tuple[int, Path]]] = defaultdict(list)
    for path in (path for place in places for path in pictures_in(place)):
        numbered = _NUMBERED.fullmatch(path.stem)
        name, number = ids.get(_words(path.stem)), 0
        if name is None and numbered:
            name, number = ids.get(_words(numbered["name"])), int(numbered["sample"])
        if name is None:
            raise _no_prompt(path)
        groups[name].append((number, path))
    return _once(((name, rank), path) for name, own in groups.items() for rank, (_, path) in enumerate(sorted(own)))


def _words(text: str) -> str:
    """A caption as a file name may have it: letters and digits alone."""
    return " ".join(re.findall(r"\w+", text.replace("_", " ").lower()))


def _by_folder(folder: Path, prompts: Sequence[Prompt]) -> dict[Key, Path]:
    """GenEval's `<line>/samples/<sample>.png`, with the caption of the line beside it."""
    found = []
    for place in sorted(folder.iterdir()) if folder.is_dir() else ():
        if not (place / "samples").is_dir() or not place.name.isdecimal() or int(place.name) >= len(prompts):
            raise _no_prompt(place)
        prompt, about = prompts[int(place.name)], place / "metadata.jsonl"
        if about.is_file() and _caption(about) != prompt.text.strip():
            raise SpecbenchError(f"{about} has another caption than line {place.name}, '{prompt.text:.60}'")
        for path in pictures_in(place / "samples"):
            if not path.stem.isdecimal():
                raise _no_prompt(path)
            found.append(((prompt.id, int(path.stem)), path))
    return _once(found)


def _caption(about: Path) -> str:
    try:
        return parse_json(read_regular(about, _MAX_JSON_BYTES))["prompt"].strip()
    except (ValueError, KeyError, TypeError, AttributeError, OSError):
        raise SpecbenchError(f"{about} has no caption 'prompt'", "take it out") from None


def _as_grids(folder: Path, prompts: Sequence[Prompt]) -> dict[Key, Path]:
    return {(name, sample): path for (name, _), path in _by_id(folder, prompts).items() for sample in range(4)}


def _quarter(row: Any) -> np.ndarray:
    pixels = read_picture(row.path)
    height, width = pixels.shape[0] // 2, pixels.shape[1] // 2
    if not height or not width or pixels.shape[0] % 2 or pixels.shape[1] % 2:
        raise SpecbenchError(f"{row.path} is no grid of two rows of two images: {pixels.shape[1]} x {pixels.shape[0]}")
    top, left = divmod(row.sample, 2)
    return pixels[top * height : (top + 1) * height, left * width : (left + 1) * width]


_BESIDE = ("global_statistics_*.json", "generation_configs.json", "gen_img_output.log")
"""Files that LANTERN's and SJD's programs leave beside their images."""
IMAGE_LAYOUTS: Mapping[str, ImageLayout] = {
    "ids": ImageLayout("<prompt id>.png or <prompt id>-<sample>.png", _by_id),
    "lines": ImageLayout("0.png, prompt_0.png or 00000.png: line of the list; LANTERN, SJD on PartiPrompts", _by_line),
    "annotations": ImageLayout("<annotation>.png: COCO's number of the caption; SJD on COCO", _by_annotation),
    "captions": ImageLayout("<caption>_<number>.png; T2I-CompBench", _by_caption),
    "geneval": ImageLayout("<line>/samples/<sample>.png; GenEval", _by_folder),
    "dataset": ImageLayout("metadata.jsonl or .csv with file_name and prompt or text; Hugging Face", _by_metadata),
    "grids": ImageLayout("<prompt id>.png is a grid of 2 x 2 images; DPG-Bench", _as_grids, grid=True),
}
"""Layouts by name. `grids` is only taken where it is named: a grid looks like an image."""


def _number(path: Path) -> re.Match:
    if number := _LINE.fullmatch(path.stem):
        return number
    raise _no_prompt(path)


def _no_prompt(path: Path, why: str = "") -> SpecbenchError:
    return SpecbenchError(
        f"{path} belongs to no prompt" + (f": {why}" if why else ""),
        f"name it <prompt id>.png or <prompt id>-<sample>.png, or take it out; --layout: {', '.join(IMAGE_LAYOUTS)}",
    )


def _once(pairs: Any) -> dict[Key, Path]:
    found: dict[Key, Path] = {}
    for key, path in pairs:
        if key in found:
            raise SpecbenchError(f"{found[key]} and {path} are both image {key[1]} of prompt '{key[0]}'")
        found[key] = path
    if not found:
        raise SpecbenchError("no images")
    return found


def _version(path: Path, folder: Path, layout: str) -> str:
    """Of a file that may become that of another prompt, also its name."""
    state = path.stat()
    name = "" if layout == "ids" else f"-{path.relative_to(folder)}"
    return f"{state.st_mtime_ns}-{state.st_size}{name}"
