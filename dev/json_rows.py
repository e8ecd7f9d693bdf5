"""Files of JSON lines that a program appends to and that a kill may cut off."""

import json
from pathlib import Path


def read_rows(path: Path) -> list[dict]:
    """Rows of the file. If a kill has cut off the last line, the line is removed from the file."""
    text = path.read_text() if path.exists() else ""
    whole = text[: text.rfind("\n") + 1]
    if whole != text:
        path.write_text(whole)
    return [json.loads(line) for line in whole.splitlines()]
