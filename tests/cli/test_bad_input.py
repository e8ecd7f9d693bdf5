"""Bad input: exit code 2, one line on stderr that names the error, nothing on stdout, nothing written. It concerns
several modules: every command, and the modules that refuse its input."""

import os
import re
import shlex

import pytest

from specbench.cli.commands import COMMANDS
from specbench.models import catalog
from specbench.runs.settings import OTHER_VARIABLES, check_environment, merge, run_settings

FILES = {
    "empty.txt": b"", "cats.txt": b"three cats\n", "val2017.zip": b"PK", "bad.toml": b"sede = 3\n",
    "switch.toml": b"seed = true\n", "file": b"",
}  # fmt: skip

BAD = [
    ("score --metric fdi", "unknown metric 'fdi'", "did you mean 'fid["),
    ("show nothing", "unknown run 'nothing'", "valid: none"),
    ("pack --to x.rar", "cannot write .rar files", ".zip"),
    ("report --html x.pdf", "cannot write .pdf files", ".html or .htm"),
    ("run --model shaps", "unknown model 'shaps'", "did you mean 'shapes'"),
    ("run --decoder gsdd", "unknown decoder 'gsdd'", "did you mean 'gsd'"),
    ("run --decoder gsd --GG 5", "unknown option '--GG'", "did you mean '--G'"),
    ("run --decoder gsd:GG=5", "unknown gsd option 'GG'", "did you mean 'G'"),
    ("run --decoder sjd --G 5", "--G: not an option of the chosen decoders", "belongs to gsd"),
    ("run --decoder gsd --G 0", "--G 0: must be at least 1", ""),
    ("run --decoder gsd --G many", "--G many: expected a whole number", ""),
    ("run --decoder gsd --cluster red", "--cluster red: not a valid choice", "target"),
    ("run --decoder sjd++ --tau -0.5", "--tau -0.5: must be at least 0", ""),
    ("run --verifier grupped", "--verifier grupped", "grouped"),
    ("run --top-k 100000", "--top-k 100000", "image tokens"), ("run --temperature 0", "--temperature 0", ""),
    ("run --temperature 1e-38", "--temperature 1e-38: must be at least 1e-06", "--top-k 1"),
    ("run --top-p 0", "--top-p 0.0: must be above 0 and at most 1", ""),
    ("run --decoder cool-sd --nu 1e4", "--nu 10000.0: must be at least 0 and at most 700", ""),
    ("run --seed -1", "--seed -1: must be at least 0", ""), ("run --dtype float31", "--dtype float31", "float32"),
    ("run --device tpu", "--device tpu", "cuda"), ("run --ids no-such-id", "no-such-id", ""),
    ("run --prompts shaps", "unknown prompt set 'shaps'", "did you mean 'shapes'"),
    ("run --prompts absent.txt", "prompt file 'absent.txt' does not exist", "list prompts"),
    ("run --prompts shapes/colors", "unknown prompt set 'shapes/colors'", "--prompts shapes --category colors"),
    ("run --prompts empty.txt", "no prompts", ""), ("run --prompts cats.txt", "cats", ""),
    ("run --out file", "--out file", "name a folder"), ("run --out file/inside", "--out file/inside", ""),
    ("run --out /proc/specbench", "--out /proc/specbench: cannot write there", ""),
    ("run --config bad.toml", "'sede'", "did you mean 'seed'"),
    ("run --config switch.toml", "--seed True: expected a whole number", ""),
    ("run --samples 1000000 --dry-run", "--samples 1000000", "--limit"), ("run extra", "extra", ""),
    ("run --seed", "--seed", ""), ("list modls", "unknown thing to list 'modls'", "did you mean 'models'"),
    ("list", "WHAT", "models, decoders, metrics, prompts, tables, runs"), ("rnu", "rnu", "run"),
    ("score --metric fid", "'fid' has 9 variants", "--protocol sjd"),
    ("run ar,sjd", "flags only", "specbench run --decoder ar,sjd"),
    ("run --decoder ar sjd gsd --limit 1", "flags only", "specbench run --decoder ar,sjd,gsd)"),
    ("run --hlep", "unknown option '--hlep'", "did you mean '--help'"),
    ("run --metric fid", "unknown option '--metric'", "specbench score --metric"),
    ("score --window 4", "unknown option '--window'", "it is an option of specbench run"),
    ("score clip", "unknown run 'clip'", "score --metric clip"),
    ("report --figure=time-per-step", "unknown option", "specbench figure"),
    ("report --methods", "unknown option", "specbench methods"), ("fetch parti --images", "parti", "coco"),
    ("bench gsd", "unknown table 'gsd'", "gsd-1, gsd-2"), ("run janus", "flags only", "specbench run --model janus"),
    ("run --decoder gsd:G:50", "NAME=VALUE", "gsd:G=50"), ("score", "no runs in results", "specbench run"),
    ("report x gsd-1 --over seed", "--over takes runs, and gsd-1 is", ""),
    ("report gsd-1 --all", "--all takes runs, and gsd-1 is", ""),
    ("report gsd-1 --explain", "--explain takes runs, and gsd-1 is", ""),
    ("report gsd-1 --long --format csv", "--long takes runs, and gsd-1 is", ""),
    ("report --format exel", "unknown format 'exel'", "markdown"),
    ("audit nothing", "unknown decoder 'nothing'", "specbench list decoders"),
    ("audit ar --samples 5", "--samples: must be at least 1000 (", ""),
    ("audit no.such.module:Thing", "no.such.module:Thing", ""),
    ("audit nomod:X", "no module named 'nomod'", "(there is no nomod.py in this folder)"),
    ("doctor --model shaps", "unknown model 'shaps'", "did you mean 'shapes'"),
    ("demo --limit 0", "--limit: must be at least 1 (", ""),
    ("score --images x", "x has no metadata.jsonl or metadata.csv", ""),
    ("score --prompts shapes", "--prompts requires --images", ""),
    ("score a-run --images x --prompts shapes", "cannot be combined", ""),
    ("score --protocol sdj", "did you mean 'sjd'", ""), ("score --metric clip[b61]", "did you mean 'clip[b16]'", ""),
    ("score --device tpu9", "--device tpu9", ""), ("score --reference /nowhere", "/nowhere does not exist", ""),
    ("score --reference val2017.zip", "unpack it", "fetch coco --images --from"),
    ("score --batch 0", "--batch: must be at least 1 (", ""),
    ("score --batch x", "--batch: expected a whole number", ""),
    ("train-head --images 4 --out x --model shapes", "--batch 16: more than --images 4", "add --batch 4"),
    ("bench gsd-3", "unknown table 'gsd-3'", ""), ("bench gsd-1 --model shaps", "did you mean 'shapes'", ""),
    ("bench gsd-1 --model shapes --limit 0", "--limit 0", ""), ("bench gsd-1 --format xls", "unknown format 'xls'", ""),
    ("bench gsd-1 --format parquet", "cannot be printed", ""),
    ("bench gsd-1 --model shapes --notes", "--notes: not in markdown", "--format latex"),
    ("bench gsd-1 --columns shapes-clip --dry-run", "unknown column 'shapes-clip'", "valid: clip"),
    ("report --html page.html --format latex --caption Mine", "--caption: not in html", "--to FILE.tex"),
    ("report --caption X --json", "--caption: not in json", "--format latex"),
    ("bench sjd-1 --model shapes --limit 1 --baseline sdj", "unknown baseline 'sdj'", "did you mean 'sjd'"),
    ("bench cool-sd-1 --model shapes --limit 1 --baseline eagle", "several seeds", "--seed N"),
    ("bench gsd-1 --with nothing", "unknown decoder 'nothing'", ""),
    ("bench gsd-1 --decoder sjd", "to add a decoder, use --with", ""), ("run --decoder gsd --sweep G", "no values", ""),
    ("run --decoder gsd --sweep H=3", "unknown setting to sweep 'H'", ""),
    ("run --decoder gsd --sweep G=3,-1", "--G -1", ""),
    ("run --decoder gsd --sweep limit=3,4", "its values would not give different runs", ""),
    ("run --decoder gsd --sweep tau=0.1,0.2", "--tau", ""),
    ("run --decoder gsd:G=5 --sweep G=3,4", "its values have no effect", ""),
    ("run --decoder vvs:interval=1 --limit 1", "interval", ""),
    ("run --mode latency --batch 2", "--mode latency", ""), ("run --mode latency --workers 2", "--mode latency", ""),
    ("run --device cuda:1 --workers 2", "its own GPU", ""), ("run --mode fast", "--mode fast", ""),
    ("run --workers 0", "--workers 0", ""), ("audit sjd --run x", "", ""), ("audit --recompute", "", ""),
    ("audit --weights x", "", ""), ("audit --run nothing-of-this-name", "", ""),
    ("export genval x --to y", "did you mean 'geneval'", ""),
    ("export geneval nothing --to y", "unknown run 'nothing'", ""),
    ("import t2i-compbench nothing --from y", "unknown run 'nothing'", ""), ("forecast gsd-1", "--on is missing", ""),
    ("forecast gsd-1 --on A1000", "valid: ", ""),
    ("forecast gsd-1 --on 0GB/s,3TFLOP/s", "two rates above 0", ""),
    ("forecast gsd-1 --on 1.2.3GB/s,3TFLOP/s", "two rates above 0 are needed", ""),
    ("forecast gsd-1 --on 2039GB/s", "not two rates", ""),
    ("forecast gsd-1 --on '312 TFLOPS, 2039 GB/s'", "not two rates", ""),
    ("forecast gsd-1 --on A100 --bandwidth-share 0.9,0.6", "invalid shares", ""),
    ("forecast gsd-1 --on A100 --flops-share nan", "not finite", ""),
    ("forecast gsd-1 --on A100 --overhead-ms some", "not a range", ""),
    ("forecast gsd-1 --on A100 --batch 0", "at least 1", ""),
    ("forecast gsd-1 --on A100 --batch 100000", "at most 65,536", ""),
    ("forecast gsd-1 --on A100 --overhead-ms 1,1e9", "invalid range", ""),
    ("forecast gsd-1 --on A100 --window-factor 0.9,1.2", "--window-factor 0.9,1.2: invalid range", "1 <= LOW"),
    ("forecast gsd-1 --on 'NVIDIA A100-60GB'", "unknown device", ""),
    ("forecast gsd-1 --on A100 --dtype int4", "--dtype int4", ""),
    ("forecast gsd-1 --on A100 --model lumena", "did you mean 'lumina'", ""),
    ("forecast sjdpp-1 --on A100", "choose one with --model", ""),
    ("forecast gsd-fig2 --on A100", "prints no steps", ""), ("forecast no-such-run --on A100", "no-such-run", ""),
    ("forecast gsd-99 --on A100", "unknown table 'gsd-99'", ""), ("report gsd", "tables of this paper: gsd-1", ""),
    ("report lantern", "specbench list tables", ""), ("figure feild", "did you mean 'field'", ""),
    ("figure field gsd-1", "gsd-1 is a paper's table", ""), ("compare sjd-1 sjd-pac-1", "is a paper's table", ""),
]  # fmt: skip


@pytest.fixture(scope="module")
def box(tmp_path_factory):
    """A folder with `FILES`."""
    folder = tmp_path_factory.mktemp("box")
    for name, content in FILES.items():
        (folder / name).write_bytes(content)
    return folder


@pytest.mark.parametrize(("line", "what", "hint"), BAD, ids=[line for line, _, _ in BAD])
def test_bad_input_is_refused_in_one_line(line, what, hint, cli, box, monkeypatch):
    monkeypatch.chdir(box)
    outcome = cli(*shlex.split(line))
    outcome.refused(what, hint, alone=True)
    assert outcome.out == ""
    assert sorted(os.listdir(box)) == sorted(FILES)


def test_a_bad_variable_and_a_bad_value_of_a_variable_are_named(cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SPECBENCH_SEDE", "1")
    assert "SPECBENCH_SEDE" in cli("run", "--dry-run").err
    monkeypatch.delenv("SPECBENCH_SEDE")
    monkeypatch.setenv("SPECBENCH_G", "0")
    cli("run", "--dry-run", "--decoder", "gsd").refused("environment SPECBENCH_G")
    monkeypatch.setenv("SPECBENCH_JSON", "maybe")
    cli("list", "prompts").refused("(environment SPECBENCH_JSON=maybe)")
    monkeypatch.setenv("SPECBENCH_LIMIT", "8")
    assert "environment" not in cli("demo", "--limit", "0").err, "the option was typed"


def test_an_unforeseen_error_is_one_line_unless_debugging(cli, monkeypatch):
    def broken():
        raise RuntimeError("two\nlines")

    monkeypatch.setattr(catalog, "models", broken)
    outcome = cli("list", "models")
    expected = r"error: RuntimeError: two lines \(a bug at test_bad_input\.py:\d+; --debug shows the traceback\)\n"
    assert outcome.code == 1 and re.fullmatch(expected, outcome.err)
    assert "Traceback" in cli("list", "models", "--debug").err


_TYPED = {
    "run": ("--dry-run",), "list": ("models",), "prompts": ("show", "shapes", "--limit", "1"), "fetch": ("shapes",),
    "demo": ("--limit", "none"), "train-head": ("--model", "nobody", "--out", "head"),
    "check-head": ("--model", "nobody"), "doctor": ("--scale", "none"), "forecast": ("--decoder", "nobody"),
    "compare": ("a", "b"),
}  # fmt: skip


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_accepts_every_variable_of_the_documentation(command, cli, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.toml").touch()
    values = {"SPECBENCH_CONFIG": "empty.toml", "SPECBENCH_REVISIONS": "owner/name@main", "SPECBENCH_DEBUG": "0"}
    for name in OTHER_VARIABLES:
        monkeypatch.setenv(name, values.get(name, str(tmp_path / "cache") if name.endswith("CACHE") else "1"))
    for setting in run_settings():
        monkeypatch.delenv(setting.env, raising=False)
    outcome = cli(command, *_TYPED.get(command, ("nothing",)))
    assert "variable" not in outcome.err and "a bug" not in outcome.err, outcome.err


@pytest.mark.parametrize("setting", run_settings(), ids=lambda setting: setting.name)
def test_every_setting_is_read_from_the_environment(setting):
    named = {"tree": "chain", "size": "768x512"}.get(setting.name) or (setting.choices or ("x",))[0]
    value = {bool: "true", int: "2", float: "1.0"}.get(setting.type, named)
    check_environment({setting.env: value})
    assert merge(run_settings(), {}, {setting.env: value}).is_given(setting.name)
