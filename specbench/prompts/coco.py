"""COCO 2017 validation captions as used by the papers: the longest caption of each image (the first of equally long
ones), with white space as published."""

from __future__ import annotations

import json
from pathlib import Path

from specbench.prompts.prompt_set import Prompt


def read(folder: Path) -> list[Prompt]:
    """Read one prompt per image, by ascending image id; the prompt id is the image file name without its suffix."""
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
