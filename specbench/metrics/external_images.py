"""Match external images to prompts by file name."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import pandas as pd

from specbench.errors import SpecbenchError
from specbench.metrics.scoring import Images
from specbench.prompts import PromptSet
from specbench.store.schema import image_name
from specbench.system.images import pictures_in, read_picture

_NUMBERED = re.compile(r"(?P<name>.+)[-_](?P<sample>\d{1,9})")


def external_images(folder: Path, prompts: PromptSet, out: Path) -> Images:
    """Match every image file to its prompt.

    A picture is called `<prompt id>` or `<prompt id>-<sample>` (or with `_`), or as specbench names its own. Every
    prompt has the same samples. Scores go to a folder of their own in `out`.

    Raises:
        SpecbenchError: a file that belongs to no prompt or to two, two files for one image, or a prompt without one.
    """
    known = {prompt.id: prompt for prompt in prompts.prompts}
    slugs = {image_name(name, 0).removesuffix("-0.png"): name for name in known}
    found: dict[tuple[str, int], Path] = {}
    for path in pictures_in(folder):
        key = _key(path, known, slugs)
        if key in found:
            raise SpecbenchError(f"{found[key]} and {path} are both image {key[1]} of prompt '{key[0]}'")
        found[key] = path
    _require_all(folder, known, found)
    rows = [
        {
            "prompt_id": name,
            "sample": sample,
            "prompt": known[name].text,
            "category": known[name].category,
            "meta": json.dumps(known[name].meta),
            "started_at": _version(path),
            "path": path,
        }
        for (name, sample), path in sorted(found.items())
    ]
    digest = hashlib.sha256(f"{folder.resolve()}\n{prompts.sha256}".encode()).hexdigest()[:8]
    name = f"{folder.resolve().name}-{digest}"
    return Images(name, out / name, pd.DataFrame(rows), lambda row: read_picture(row.path))


def _key(path: Path, known: dict, slugs: dict[str, str]) -> tuple[str, int]:
    stem = path.stem
    keys = {(stem, 0)} if stem in known else set()
    numbered = _NUMBERED.fullmatch(stem)
    if numbered:
        name = numbered["name"] if numbered["name"] in known else slugs.get(numbered["name"])
        keys |= {(name, int(numbered["sample"]))} if name else set()
    if not keys:
        raise SpecbenchError(
            f"{path} belongs to no prompt", "name it <prompt id>.png or <prompt id>-<sample>.png, or take it out"
        )
    if len(keys) > 1:
        names = " and ".join(f"'{name}'" for name, _ in sorted(keys))
        raise SpecbenchError(f"{path} may belong to prompts {names}", "name it <prompt id>-<sample>.png")
    return keys.pop()


def _require_all(folder: Path, known: dict, found: dict[tuple[str, int], Path]) -> None:
    samples = {sample for _, sample in found}
    for name in known:
        for sample in sorted(samples):
            if (name, sample) not in found:
                raise SpecbenchError(
                    f"{folder} has no image {sample} of prompt '{name}'",
                    f"looked for {name}-{sample}.png; leave the prompt out of the file if it was not drawn",
                )


def _version(path: Path) -> str:
    state = path.stat()
    return f"{state.st_mtime_ns}-{state.st_size}"
