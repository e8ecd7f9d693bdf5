"""COCO 2017 validation captions as the papers use them: of each image the longest caption, the first one of several
that long; the text as published, stray white space and all."""

from __future__ import annotations

import json
from pathlib import Path

from specbench.prompts.prompt_set import Prompt


def read(folder: Path) -> list[Prompt]:
    """One prompt per image in ascending image id; the id is the image file's name without its suffix."""
    content = json.loads((folder / "captions_val2017.json").read_text(encoding="utf-8"))
    longest: dict[int, dict] = {}
    for annotation in content["annotations"]:
        best = longest.get(annotation["image_id"])
        if best is None or len(annotation["caption"]) > len(best["caption"]):
            longest[annotation["image_id"]] = annotation
    return [
        Prompt(
            f"{image:012d}", annotation["caption"], None, {"annotation": annotation["id"], "image": f"{image:012d}.jpg"}
        )
        for image, annotation in sorted(longest.items())
    ]
