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


def test_the_watch_sees_what_it_is_there_for(tmp_path):
    (tmp_path / "box").mkdir()
    outside = tmp_path / "outside"
    for act in (lambda: outside.write_text("x"), lambda: os.system("true"), outside.unlink):
        with pytest.raises(AssertionError), WATCH.inside(tmp_path / "box"):
            act()
    with WATCH.inside(tmp_path / "box"):
        (tmp_path / "box" / "inside").write_text("x")
