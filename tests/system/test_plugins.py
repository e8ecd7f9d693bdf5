"""Plug-ins add names and flags; broken ones are skipped with a warning; modules in the current folder need no
installation."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from forked import forked_command

from specbench.metrics import catalog
from specbench.system.plugins import PluginError, naming_plugin

POWER = (Path(__file__).parents[2] / "docs" / "examples" / "power.py").read_text()
ENTRY_POINTS = """
[specbench.decoders]
power = power:DECODER
absent = no_such_module:DECODER
failing = failing:DECODER
leaving = leaving:DECODER
wrong = power:POWER
partial = power:PARTIAL

[specbench.models]
absent = no_such_module:MODEL

[specbench.metrics]
absent = no_such_module:Metric

[specbench.prompts]
pets = pets:path
absent = no_such_module:path
"""
PARTIAL = 'PARTIAL = Preset("power", "-", paper="-", equation="-", choices={"drafter": "jacobi"})\n'


@pytest.fixture
def site(tmp_path):
    """A folder of installed plug-ins, good and bad."""
    info = tmp_path / "site" / "plugs-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: plugs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    (info.parent / "power.py").write_text(POWER + PARTIAL)
    (info.parent / "failing.py").write_text("1 / 0\n")
    (info.parent / "leaving.py").write_text("import sys; sys.exit(0)\n")
    (info.parent / "pets.txt").write_text("a red circle\n")
    (info.parent / "pets.py").write_text("import os\npath = os.path.join(os.path.dirname(__file__), 'pets.txt')\n")
    return info.parent


def specbench(folder: Path, *arguments: str, site: Path | None = None) -> subprocess.CompletedProcess:
    env = os.environ | {"COLUMNS": "200"}
    return forked_command(arguments, cwd=folder, env=env, path=[folder, *([site] if site else [])])


def test_good_plugins_join_and_broken_ones_are_named(site, tmp_path):
    done = specbench(tmp_path, "list", "decoders", "--json", site=site)
    assert done.returncode == 0 and "power" in [row["name"] for row in json.loads(done.stdout)]
    named = ("no_such_module", "ZeroDivisionError", "is not a Preset", "partial (power:PARTIAL) is not", "SystemExit")
    assert all(text in done.stderr for text in named), done.stderr
    assert all(line.startswith("warning: ") for line in done.stderr.splitlines())


@pytest.mark.parametrize(("line", "problem"), [
    ("self._power = power", "verifier 'power' (power.py:"), ("return ratio(p, q, x) ** self._power", "SystemExit"),
], ids=["made", "used"])  # fmt: skip
def test_a_part_of_a_decoder_that_leaves_the_program_is_a_failed_image(tmp_path, line, problem):
    (tmp_path / "power.py").write_text(POWER.replace(line, "raise SystemExit"))
    done = specbench(tmp_path, "run", "--decoder", "power:DECODER", "--limit", "1", "--quiet")
    assert done.returncode == 3 and problem in done.stderr, done.stderr


MODEL = """
import sys
from types import SimpleNamespace as Object
import torch
from specbench.models.catalog import ModelInfo, _SHAPES
from specbench.models.shapes.adapter import load as shapes

class Drawing:
    def __init__(self, pixels, **parts):
        self._model, self._pixels = shapes("cpu", torch.float32), pixels
        vars(self).update(parts)
    def __getattr__(self, name): return getattr(self._model, name)
    def render(self, tokens, prompts, seeds): return self._pixels(len(tokens))

def leave(*_, **__): sys.exit(0)
def numbers(device, dtype): return Drawing(lambda n: torch.zeros(n, 3, 8, 8))
def empty(device, dtype): return Drawing(lambda n: torch.zeros(n, 3, 0, 0, dtype=torch.uint8))
def leaving(device, dtype): return Drawing(leave)
def undigested(device, dtype): return Drawing(leave, weights_sha256=5)
def nothing(device, dtype): return None
def full(*_, **__): raise torch.cuda.OutOfMemoryError("CUDA out of memory")
def filled(device, dtype): return Drawing(full)

def of(target, name=None, config=_SHAPES / "config.json"):
    return ModelInfo(name or target, "", f"mine:{target}", (64, 64), 256, "-", config)
NUMBERS, EMPTY, LEAVING, UNDIGESTED = map(of, "numbers empty leaving undigested".split())
NOTHING, FULL, FILLED = map(of, "nothing full filled".split())
LEAVE, OUTSIDE = of("leave"), of("empty", "../../outside")
CONFIG = of("leaving", "config", _SHAPES / "network.safetensors")
"""


FAULTY = ("NUMBERS", "EMPTY", "LEAVING", "LEAVE", "UNDIGESTED", "NOTHING", "CONFIG", "FULL", "FILLED", "OUTSIDE")


@pytest.mark.parametrize("name", FAULTY)
def test_a_foreign_model_is_named_for_its_faults(name, tmp_path):
    (tmp_path / "mine.py").write_text(MODEL)
    where = ("--prompts", "shapes", "--limit", "1", "--out", "runs")
    answer = specbench(tmp_path, "run", "--model", f"mine:{name}", "--decoder", "sjd", *where)
    assert answer.returncode == (2 if name == "OUTSIDE" else 3) and "a bug" not in answer.stderr, answer.stderr
    texts = (f"model '{name.lower()}'", "mine.py:", "the model rendered", "is called")
    assert any(text in answer.stderr for text in texts), (name, answer.stderr)
    assert not list(tmp_path.rglob("outside*"))


def test_an_option_of_a_plugin_is_a_flag(site, tmp_path):
    command = [sys.executable, "-m", "specbench", "run", "--help", "all"]  # flags are made when the command is imported
    env = os.environ | {"COLUMNS": "200", "PYTHONPATH": str(site)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=env, timeout=300)
    assert "--power" in done.stdout


def test_a_prompt_set_may_come_from_a_plugin(site, tmp_path):
    done = specbench(tmp_path, "run", "--prompts", "pets", "--decoder", "power", "--dry-run", "--json", site=site)
    assert json.loads(done.stdout)[0]["images"] == 1, done.stderr
    assert "absent" in specbench(tmp_path, "run", "--prompts", "absent", site=site).stderr


def test_the_decoder_of_the_guide_is_lossy_unless_its_power_is_1(tmp_path):
    (tmp_path / "power.py").write_text(POWER)
    decoders = ("power:DECODER", "power:DECODER:power=1")
    done = specbench(tmp_path, "audit", *decoders, "--samples", "12000", "--json")
    found = [(row["decoder"], row["verdict"]) for row in json.loads(done.stdout)]
    assert found == [(decoders[0], "lossy"), ("power:power=1", "no deviation seen")]


def test_help_of_a_decoder_in_a_file_lists_its_options(tmp_path):
    (tmp_path / "power.py").write_text(POWER)
    shown = specbench(tmp_path, "run", "--help", "power:DECODER").stdout
    assert "--fresh-q" in shown and "--tau" not in shown
    assert "power:DECODER:NAME=VALUE: power: exponent on p/q" in " ".join(shown.split())


def test_the_option_of_a_file_is_read_as_the_file_has_it(tmp_path):
    """The built-in `add` also has an `eps`, which is at most 1."""
    text = POWER.replace('"power", 0.5', '"eps", 2.0').replace("power):", "eps):").replace("= power", "= eps")
    (tmp_path / "keep.py").write_text(text.replace("above=0.0, maximum=1.0", "minimum=1.0, maximum=5.0"))
    (tmp_path / "power.py").write_text(POWER.replace('"power", 0.5', '"thr", 0.5'))
    for arguments, code, answer in [
        (("keep:DECODER", "--eps", "3"), 0, ""),
        (("keep:DECODER", "--eps", "0.5"), 2, "--eps 0.5: must be at least 1 and at most 5 (exponent on p/q"),
        (("keep:DECODER", "--eps", "abc"), 2, "--eps abc: expected a number (exponent on p/q"),
        (("keep:DECODER:eps=2:fresh-q=onehot",), 2, "a colon between options"),
        (("power:DECODER", "--thr", "0.2"), 2, "write it inline: --decoder power:DECODER:thr=VALUE"),
        (("ar,power:DECODER", "--sweep", "thr=0.2,0.4"), 0, ""),
    ]:
        done = specbench(tmp_path, "run", "--dry-run", "--decoder", *arguments)
        assert (done.returncode, answer in done.stderr) == (code, True), done.stderr


def test_a_reference_that_is_no_decoder_is_refused(tmp_path):
    (tmp_path / "five.py").write_text("DECODER = 3\n")
    for name in ("one", "two"):  # two presets with the same name, the name of a file
        (tmp_path / f"{name}.py").write_text(POWER.replace('"power"', '"one"'))
    (tmp_path / "lacks.py").write_text("from specbench.specs.presets import Preset\n" + PARTIAL)
    for decoder, problem in [
        ("five:DECODER", "is a int, not a specbench Preset"),
        ("one:DECODER,two:DECODER", "decoder 'two:DECODER' is called 'one', which is already taken"),
        ("two:DECODER,one:DECODER", "decoder 'one:DECODER' is called 'one', which is already taken"),
        ("lacks:PARTIAL", "decoder 'lacks:PARTIAL': its choices have no 'init'"),
    ]:
        done = specbench(tmp_path, "run", "--decoder", decoder)
        assert done.returncode == 2 and problem in done.stderr
    done = specbench(tmp_path, "audit", "power:DECODER")
    assert done.returncode == 2 and "there is no power.py in this folder" in done.stderr


def test_metrics_of_plugins_are_default_metrics_of_every_model(monkeypatch):
    monkeypatch.setattr(catalog, "plugins", lambda kind: {"mine": None} if kind == "metrics" else {})
    assert all("mine" in catalog.default_metrics(model) for model in ("shapes", "lumina"))


@pytest.mark.parametrize(("raised", "seen"), [(KeyboardInterrupt, KeyboardInterrupt), (SystemExit, PluginError)])
def test_in_a_plugin_ctrl_c_is_no_error_of_it(raised, seen):
    with pytest.raises(seen), naming_plugin("metric", "mine", "mine"):
        raise raised
