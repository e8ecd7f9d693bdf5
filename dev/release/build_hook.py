"""Build hook: record the commit of the checkout in wheels and source distributions, for `specbench --version`.

A wheel built from an unpacked source distribution takes the record of the source distribution. An editable installation
needs no record: its checkout has the commit.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# The build environment has only hatchling, so the modules below import only the standard library.
sys.path.insert(0, str(Path(__file__).parents[2]))

from specbench.system.environment import BUILD_RECORD, checkout_state


class CommitRecord(BuildHookInterface):
    """Add `specbench/system/build.json` with the keys `revision` and `dirty`."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        state = checkout_state()
        if version == "editable" or state is None:
            return
        self._folder = tempfile.TemporaryDirectory()
        record = Path(self._folder.name) / BUILD_RECORD.name
        record.write_text(json.dumps(state) + "\n")
        build_data["force_include"][str(record)] = f"specbench/system/{BUILD_RECORD.name}"
