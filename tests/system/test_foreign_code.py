"""Code of plug-ins is part of what a run and a score are: decoders, models, metrics, and what they import."""

import importlib
import json
import linecache
import os
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import tiny
from refusals import refused
from synthetic import folder, sjd

import specbench
from specbench.decoding.drafters.jacobi import Jacobi
from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model, models
from specbench.reporting import report_rows
from specbench.runs.needs import fetch_command
from specbench.specs.components import VERIFIERS
from specbench.specs.presets import PRESETS
from specbench.store.run_folders import find_runs
from specbench.system.foreign_code import changed_modules, code_of, refuse_edited, require_code

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder on the path of imports whose modules are removed after the test."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    before, presets = set(sys.modules), dict(PRESETS)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]
    PRESETS.clear()
    PRESETS.update(presets)
    models.cache_clear()


def digest(target="mine:THING", imported=False, files=()):
    for name in [name for name in sys.modules if name.partition(".")[0] in ("mine", "rules", "other", "deep")]:
        del sys.modules[name]
    if imported:
        importlib.import_module(target.partition(":")[0])
    return code_of([target], files).digest


@pytest.mark.parametrize("imported", [False, True])
def test_code_is_the_syntax_of_the_module_and_of_all_that_it_imports(place, imported):
    (place / "deep" / "plain").mkdir(parents=True)  # the inner folder without __init__.py
    inner = "import importlib\nfrom . import level\nimportlib.import_module('.plain.low', __package__)\n"
    text = '"""Doc."""\nimport json\nimport rules\n\ndef late():\n    """Doc."""\n    import deep.inner\nTHING = 1\n'
    files = {"deep/__init__.py": "", "deep/inner.py": inner, "deep/plain/low.py": "N = 1\n", "deep/level.py": "N = 1\n"}
    files |= {"rules.py": "def rule(x):\n    return x\n", "other.py": "1\n", "mine.py": text}
    for name, content in files.items():
        (place / name).write_text(content)
    first = digest(imported=imported)
    (place / "mine.py").write_text(text.replace("Doc", "Other").replace("\n\n", "\n\n\n# a comment\n"))
    (place / "other.py").write_text("2  # nobody imports it\n")
    assert digest(imported=imported) == first, "comments, white space and docstrings change nothing"
    digests = {first}
    for name, old, new in (
        ("mine.py", "THING = 1", "THING = 2"),
        ("rules.py", "return x", "return -x"),
        ("deep/level.py", "N = 1", "N = True"),
        ("deep/__init__.py", "", "x = 1\n"),
        ("deep/plain/low.py", "N = 1", "N = 2"),
    ):
        path = place / name
        path.write_text(path.read_text().replace(old, new))
        digests.add(digest(imported=imported))
    assert len(digests) == 6
    names = {"mine", "rules", "deep", "deep.inner", "deep.level", "deep.plain.low"}
    assert set(code_of(["mine:THING"]).modules) == names


def test_what_runs_is_the_text_that_was_imported(place):
    (place / "mine.py").write_text("THING = 1\n")
    first = digest(imported=True)
    refuse_edited(code_of(["mine:THING"]))
    (place / "mine.py").write_text("THING = 10\n")
    assert code_of(["mine:THING"]).digest == first, "a process keeps the module that it has imported"
    refused(r"mine\.py was edited .*old code", refuse_edited, code_of(["mine:THING"]))
    importlib.reload(sys.modules["mine"])
    assert code_of(["mine:THING"]).digest != first and code_of(["specbench.decoding.loop:Loop", None]) is None


def test_an_object_without_a_file_is_known_by_its_instructions(place, monkeypatch):
    module = type(sys)("cell")
    monkeypatch.setitem(sys.modules, "cell", module)
    rule = "def helper(x): return x * {}\nclass Rule:\n    '''{}'''\n    def accept(self, x): return helper(x)\n"

    def of(*filled):
        exec(compile(rule.format(*filled), "<cell>", "exec"), vars(module))
        return code_of(["cell:Rule"])

    first = of(2, "a")
    assert first.edited is None and of(2, "b").digest == first.digest
    assert of(3, "a").digest != first.digest, "a function that its method calls"


CELL = """
import specbench
from specbench.decoding.verification.ratio_tests import RatioTest, ratio

def softened(p, q, x, power):
    return ratio(p, q, x) ** power

@specbench.decoder("soft", like="sjd", power=0.5)
class Soft(RatioTest):
    def __init__(self, context, power):
        super().__init__(context)
        self.power = power

    def acceptance(self, p, q, x, depth=1):
        return softened(p, q, x, self.power)
"""


@pytest.fixture
def typed(monkeypatch):
    """Run a cell as a notebook does: its source is kept, there is no file. Its decoder, here named "soft", is taken out
    after the test."""
    monkeypatch.setattr("specbench.specs.presets._defined", set())
    for table in (VERIFIERS, PRESETS):
        monkeypatch.setitem(table, "soft", None)
        monkeypatch.delitem(table, "soft")

    def run(cell: str, number: int = 7) -> None:
        name, module = f"<cell {number}>", sys.modules.setdefault("cells", ModuleType("cells"))
        monkeypatch.setitem(linecache.cache, name, (len(cell), None, cell.splitlines(True), name))
        exec(compile(cell, name, "exec"), vars(module))

    return run


@pytest.mark.parametrize(("returned", "problem"), [
    ("ratio(p, q, x) * float('nan')", "returned nan, not a number from 0"),
    ("ratio(p, q, x) - 9", r"returned -\d\S*, not a number from 0"),
    ("ratio(p, q, x)[..., 0]", r"returned float32 \[1, \d+\], not float \[1, \d+, 1\]"),
    ("ratio(p, q, x) > 1", r"returned bool \[.*\], not float"), ("None", "returned NoneType"),
])  # fmt: skip
def test_what_a_component_returns_wrongly_is_an_error_that_names_it(returned, problem, typed):
    typed(CELL.replace("ratio(p, q, x) ** power", returned))
    with pytest.raises(SpecbenchError, match=f"decoder 'soft': verifier 'soft': acceptance {problem}"):
        specbench.generate("a red circle", decoder="soft", threads=1)


@pytest.mark.parametrize(("factor", "problem"), [
    (2, "sums to [12]"), (float("nan"), "sums to nan"), (-1, "sums to -"), (1 + 2**-8, None),  # the last is rounded
])  # fmt: skip
def test_a_drafters_q_that_is_no_distribution_is_an_error_that_names_it(factor, problem, monkeypatch):
    propose = Jacobi.propose

    def changed(self, *given):
        proposal = propose(self, *given)
        return proposal._replace(q=factor * proposal.q)

    monkeypatch.setattr(Jacobi, "propose", changed)
    text = f"decoder 'sjd': drafter 'jacobi': propose returned a q that {problem}"
    with pytest.raises(SpecbenchError, match=text) if problem else nullcontext():
        assert specbench.generate("a red circle", decoder="sjd", threads=1).nfe


def test_an_error_of_a_cells_code_is_named_with_its_line_and_its_options_are_plain_values(typed):
    typed(CELL.replace("ratio(p, q, x) ** power", "p.absent"), 9)
    refused(r"AttributeError at <cell 9>:6: .*absent", specbench.generate, "a red circle", decoder="soft", threads=1)
    refused(r"decoder 'mine': option eps=\[1, 2\] is a list .*a number, a text", specbench.decoder, "mine", eps=[1, 2])


def test_what_a_component_changes_of_p_and_q_in_place_is_a_copy(typed):
    images = []
    for rule in ("ratio(p, q, x)", "ratio(p, q, x) + 0 * p.mul_(0.5).sum() * q.zero_().sum()"):
        typed(CELL.replace("ratio(p, q, x) ** power", rule))
        images.append(specbench.generate("a red circle", decoder="soft", threads=1))
    plain, changed = images
    assert (plain.logp == changed.logp).all() and (plain.tokens == changed.tokens).all()


@pytest.mark.slow
def test_a_decoder_of_a_cell_runs_without_a_file_and_its_source_is_part_of_the_run(place, typed):
    runs = []
    same = CELL.replace("    return ratio", "    # the same\n    return ratio")
    cells = (CELL, same, CELL.replace("** power", "/ (1 + power)"))
    for number, cell in enumerate(cells):
        typed(cell, number)
        runs += specbench.run(decoder="soft", limit=1, threads=1, out="here", progress=False, baseline=0).folders
    assert runs[0] == runs[1] != runs[2] and len(specbench.report(out="here")) == 2
    other = specbench.run(decoder="soft:power=1", limit=1, threads=1, out="here", progress=False, baseline=0)
    assert other.samples()["path"].map(os.path.isfile).all()
    assert dict(other.report()["options"])[0].count('"power": 1.0')
    refused("'sjd': the name is already taken", specbench.decoder, "sjd")
    refused("unknown kind 'verifyer'", specbench.decoder, "mine", kind="verifyer")


def test_installed_packages_count_by_version_and_a_worker_with_other_code_is_refused(place):
    site = place / "site-packages"
    (site / "plugs-1.0.dist-info").mkdir(parents=True)
    (site / "plugs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugs\nVersion: 1.0\n")
    (site / "plugs-1.0.dist-info" / "top_level.txt").write_text("plugs\n")
    (site / "plugs.py").write_text("import numpy, huggingface_hub, yaml_of_nobody\nTHING = 1\n")
    sys.path.insert(0, str(site))
    try:
        code = code_of(["plugs:THING"])
    finally:
        sys.path.remove(str(site))
    assert code.packages == {"plugs": "1.0"} and set(code.modules) == {"plugs"}
    newer = replace(code, packages={"plugs": "1.1"})
    assert newer.digest != code.digest and changed_modules(code.to_json(), newer.to_json()) == ["plugs"]
    require_code("decoder 'x'", code.digest, code)
    refused("decoder 'x': its code on this worker", require_code, "decoder 'x'", code.digest, newer)


def copy(place, *names):
    """Copy examples into a folder, as modules without a package; the text of the first."""
    texts = {name: (EXAMPLES / name).read_text().replace("toy_plugin.greys", "greys") for name in names}
    for name, text in texts.items():
        (place / Path(name).name).write_text(text)
    return texts[names[0]]


GREYS = ("plugin/toy_plugin/greys.py", "plugin/toy_plugin/greys.json")


def test_the_command_that_fetches_for_a_model_of_a_file_names_the_file(place, cli, monkeypatch):
    copy(place, *GREYS)
    monkeypatch.setenv("SPECBENCH_CACHE", str(place / "cache"))
    monkeypatch.setenv("SPECBENCH_OFFLINE", "1")
    command = fetch_command(find_model("greys:MODEL"), None)
    assert command == "specbench fetch greys:MODEL"
    assert "PartiPrompts.tsv is not on this disk" in cli(*command.split()[1:]).err
    models().pop("greys")


def test_an_edited_decoder_and_an_edited_model_are_other_runs(place, cli):
    power, greys = copy(place, "power.py"), copy(place, *GREYS)
    (place / "p.txt").write_text("bright\ndark\n")

    def run(*more):
        for name in ("power", "greys"):
            sys.modules.pop(name, None)
        arguments = ("--model", "greys:MODEL", "--prompts", "p.txt", "--decoder", "ar,power:DECODER", "--out", "o")
        done = cli("run", *arguments, *more)
        assert done.code == 0, done.err
        return done.err, sorted(path.name for path in Path("o").iterdir())

    _, first = run("--limit", 1)
    models().pop("greys")
    audit = "audit", "--run", "greys-ar", "--out", "o", "--recompute"
    assert "'greys' is a plug-in that is not installed" in cli(*audit).err
    assert "fewer than 200 tokens to test" in cli(*audit, "--model", "greys:MODEL").err  # after recomputing p
    verified = ("verify", Path("o", first[0]), "--recompute")
    models().pop("greys")
    assert "is a plug-in that is not installed" in cli(*verified).out
    assert "fewer than 200 tokens to test" in cli(*verified, "--model", "greys:MODEL").out
    models().pop("greys")
    refused("fewer than 200 tokens", specbench.audit_runs, "greys-ar", "o", recompute=True, model="greys:MODEL")
    (place / "power.py").write_text(power.replace("** self._power", "** (self._power / 2)"))
    errors, second = run("--limit", 2)
    assert len(first) == 2 and len(second) == 3 and set(first) < set(second), "AR goes on in its own run"
    old = next(name for name in first if "power" in name)
    assert "the code of power has changed (power)" in errors and f"images stay in {old}" in " ".join(errors.split())
    rows = report_rows(find_runs("o"))
    assert [row.n for row in rows if row.decoder == "ar"] == [2]
    assert all("model edited " in row["decoder"] for row in specbench.status("o"))
    labels = [row.label for row in rows if row.decoder == "power"]
    assert len(set(labels)) == 2 and all(label.startswith("power, edited ") for label in labels)
    (place / "power.py").unlink()
    sys.modules.pop("power")
    del PRESETS["power"]
    assert [row.label for row in report_rows(find_runs("o")) if row.decoder == "power"] == labels

    copy(place, "power.py")
    (place / "greys.json").write_text((place / "greys.json").read_text() + " ")
    errors, third = run("--limit", 1)
    assert len(third) == 5 and "the code of ar has changed (file greys.json)" in errors
    (place / "greys.py").write_text(greys.replace("/ 8", "/ 9"))
    assert len(run("--limit", 1)[1]) == 7


def test_rows_whose_code_was_edited_in_the_same_minute_are_distinguished(tmp_path):
    at = {"decoder": {"modules": {}, "edited": "2026-11-26T14:02:00+00:00"}}
    for number in "12":
        place = folder(tmp_path, replace(tiny.spec("sjd"), decoder_code=number * 64), sjd(2))
        info = json.loads((place / "run.json").read_text())
        (place / "run.json").write_text(json.dumps(info | {"code": at}))
    folder(tmp_path, tiny.spec("sjd"), sjd(2))
    folder(tmp_path, replace(tiny.spec("sjd", window=2), decoder_code="3" * 64), sjd(2))
    other, unknown, first, second = sorted(row.label for row in report_rows(find_runs(tmp_path)))
    assert other == "sjd", "a row with another window is distinguished by its window"
    assert unknown == "sjd, code not recorded" and first.endswith(", code 111111") and second.endswith(", code 222222")


def test_a_model_whose_image_is_not_as_declared_is_refused(place):
    (place / "greys.py").write_text(copy(place, *GREYS).replace("tokens=64", "tokens=63"))
    problem = "model 'greys': image tokens: 63 declared, 64 found; stream slots: 63 declared, 64 found"
    refused(problem, specbench.generate, "bright", model="greys:MODEL", threads=1)
