"""Some fuzzed inputs of `make drills`; FUZZ_SEED selects others. It concerns several modules: every reader of
options and files."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "dev" / "drills"))

from fuzz import Watch, drive
from targets import TARGETS

CASES = 200
WATCH = Watch()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
def test_every_input_is_accepted_rightly_or_refused_in_one_line(target):
    cases = max(10, round(CASES * target.share))
    counts = drive(target, cases, int(os.environ.get("FUZZ_SEED", 7)), WATCH)
    assert counts["accepted"] + counts["refused"] >= cases
