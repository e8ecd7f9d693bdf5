"""Mutate decoding, sampling, cache and noise by program, and see which mutations are caught.

    python dev/audit/survey.py --mutations 200        continue after the last line
    python dev/audit/survey.py --mutations 0          print the summary

A mutation changes one node of one function that a decoder declared lossless runs: an operator, a comparison, an offset,
a stream of noise, a mask or a dtype; or it drops a call, or swaps arms or operands. The kinds take turns. Each mutation
is tried in forks of this process and is a line of results/audit/survey.jsonl. The first outcomes are

    crashed, endless   an error, or no end: any use of the decoder shows it
    identical          in up to PAIRS pairs of decoder and setting that run it, some images have the clean tokens
    audit              a setting of the audit rejects at AUDIT_LEVEL, corrected for all settings, with a quarter of the
                       audit's images

All other mutations change tokens. They are tested with the settings at the audit's own number of images (`audit`), the
conformance tests of `specbench check` (`check`), and PROBES, which are not part of the audit. `tv` is the largest total
variation measured in all of these, cross-fitted so that noise adds nothing. If `tv` is above .02 and no check has
failed, quick tests of the package also run (`tests`). Other mutations have the outcome `survived`.
"""

import argparse
import ast
import contextlib
import importlib
import inspect
import io
import itertools
import json
import multiprocessing
import random
import resource
import sys
import textwrap
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import FunctionType

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "dev"))

from json_rows import read_rows  # noqa: E402 - found through the line above

from specbench.checks.audit_settings import AUDIT_SETTINGS, AuditSetting, setting_model  # noqa: E402
from specbench.checks.decoder_contract import ContractChecks  # noqa: E402
from specbench.checks.divergence import AUDIT_LEVEL, Counts, p_value, total_variation  # noqa: E402
from specbench.checks.findings import FAILED  # noqa: E402
from specbench.checks.losslessness import AUDIT_SAMPLES, observe, stream_tokens  # noqa: E402
from specbench.errors import SpecbenchError  # noqa: E402
from specbench.models.interface import TokenLayout  # noqa: E402
from specbench.prompts import Request  # noqa: E402
from specbench.specs.presets import PRESETS, resolve  # noqa: E402
from specbench.specs.run_spec import Sampling  # noqa: E402

OUT = ROOT / "results" / "audit" / "survey.jsonl"
PACKAGES = ("specbench/decoding", "specbench/models/transformer")
MEASURES = (
    "recorder",
    "recorded_step",
    "uniforms",
    "timing",
    "generation",
    "size",
    "compilation",
    "compiled_forward",
    "packaged_forward",
)
"""Modules of these packages that record and time, and never change a token."""
PROBES = (
    AuditSetting("probe: top-k", TokenLayout.plain(1, 4, 4), Sampling(1.0, 0.9, 3), window=3, shared=1.0),
    AuditSetting("probe: top-p", TokenLayout.plain(2, 2, 5), Sampling(1.5, top_p=0.7), window=2),
    AuditSetting("probe: min-p", TokenLayout.plain(1, 3, 6), Sampling(1.0, min_p=0.1), window=2),
    AuditSetting("probe: entropy", TokenLayout.plain(1, 3, 5), Sampling(1.0, entropy_scale=1.0), window=8),
    AuditSetting("probe: top-n-sigma", TokenLayout.plain(1, 3, 5), Sampling(1.0, top_n_sigma=1.0), window=3),
    AuditSetting("probe: row ends", TokenLayout.with_row_ends(3, 3, 2), Sampling(1.5), window=5, rows=33, tables=2),
    AuditSetting(
        "probe: transformer", TokenLayout.with_row_ends(2, 3, 3), Sampling(1.5, 1.2, 2), 3, 2, "transformer", rows=33
    ),
)
TESTS = [f"tests/decoding/test_{name}.py" for name in ("noise", "sampling", "chain_verification")]
FEW, PROBED = 128, 20_000
"""Number of images for the test whether a mutation changes tokens, and number of images per probe."""
PAIRS = 6
"""Number of pairs of decoder and setting per mutation; the pairs whose tokens differ are audited."""
ENOUGH = 4000
"""Number of images of a table whose total variation is measured."""
CHANGED = 0.02
SECONDS = 40
"""Maximum CPU seconds between two calls of `alive` in a fork; tests may take five times as long."""
_OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.FloorDiv: ast.Mult, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_STREAMS = ("TOKEN", "COIN", "RESIDUAL", "REDRAW", "FRESH", "SIBLING", "SIBLING_COIN")
_NAMES = {
    "minimum": "maximum", "maximum": "minimum", "amin": "amax", "amax": "amin", "argmax": "argmin", "any": "all",
    "all": "any", "double": "bfloat16", "float": "bfloat16", "float64": "float32", "zeros": "ones", "ones": "zeros",
}  # fmt: skip
_DROPPED = ("cumsum", "clamp", "flip", "roll", "abs", "cumprod", "sort")


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ways to change one node in place, each with its name."""

    def put(name: str, value: object) -> Callable[[], None]:
        return lambda: setattr(node, name, value)

    if isinstance(node, ast.BinOp | ast.BoolOp) and type(node.op) in _OTHER:
        yield "operator", put("op", _OTHER[type(node.op)]())
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitAnd | ast.BitOr):
        yield "mask", put("right", node.left)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        yield "mask", put("operand", ast.UnaryOp(ast.Invert(), node.operand))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub | ast.Div):
        yield "operands", lambda: (put("left", node.right), setattr(node, "right", node.left))[0]()
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER:
        yield "comparison", lambda: node.ops.__setitem__(0, _OTHER[type(node.ops[0])]())
    if isinstance(node, ast.If | ast.IfExp):
        yield "condition", put("test", ast.UnaryOp(ast.Not(), node.test))
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "offset", put("value", node.value + 1)
        yield "offset", put("value", node.value - 1)
    if isinstance(node, ast.Attribute) and node.attr in _STREAMS:
        yield "stream", put("attr", _STREAMS[_STREAMS.index(node.attr) - 1])
    if isinstance(node, ast.Attribute) and node.attr in _NAMES:
        kind = "dtype" if _NAMES[node.attr] in ("bfloat16", "float32") else "call"
        yield kind, put("attr", _NAMES[node.attr])
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "where" and len(node.args) == 3:
        yield "arms", put("args", [node.args[0], node.args[2], node.args[1]])
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in _DROPPED:
        yield "dropped", lambda: (setattr(node, "args", [node.func.value]), setattr(node, "keywords", []),
                                  setattr(node, "func", ast.Name("(lambda x: x)", ast.Load())))  # fmt: skip


def functions(module: str) -> Iterator[tuple[str, FunctionType]]:
    """Functions, methods and properties that are defined in the module's source, by dotted path."""
    loaded = importlib.import_module(module)

    def plain(value: object) -> FunctionType | None:
        value = getattr(value, "fget", None) or getattr(value, "func", None) or value
        value = inspect.unwrap(getattr(value, "__func__", value)) if callable(value) else None
        is_own = inspect.isfunction(value) and value.__code__.co_filename == loaded.__file__
        return value if is_own and value.__name__ != "<lambda>" and not value.__closure__ else None

    for name, value in vars(loaded).items():
        if getattr(value, "__module__", "") != module:
            continue
        members = vars(value).items() if inspect.isclass(value) else [("", value)]
        for key, member in members:
            if function := plain(member):
                yield f"{name}.{key}".rstrip("."), function


def body_nodes(function: FunctionType) -> tuple[ast.Module, list[ast.AST], int]:
    """Syntax tree of a function, nodes of its body in order, and the offset to add to the nodes' line numbers."""
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    return tree, [node for statement in tree.body[0].body for node in ast.walk(statement)], first - 1


def lines_run() -> dict[str, set[tuple[str, str]]]:
    """For each line "file:number" of PACKAGES, the pairs (lossless decoder, name of a setting) that run the line."""
    pairs: dict[str, set[tuple[str, str]]] = defaultdict(set)
    now: set[str] = set()

    def inside(frame, event, _):
        if event == "line":
            now.add(f"{frame.f_code.co_filename}:{frame.f_lineno}")
        return inside

    def outside(frame, event, _):
        return inside(frame, "line", None) if any(part in frame.f_code.co_filename for part in PACKAGES) else None

    for decoder, setting in itertools.product(exact(), (*AUDIT_SETTINGS, *PROBES)):
        now.clear()
        sys.settrace(outside)
        try:
            few_tokens(decoder, setting, 12)
        except SpecbenchError:
            continue  # the decoder refuses the setting
        finally:
            sys.settrace(None)
        for line in now:
            pairs[line].add((decoder, setting.name))
    return pairs


def mutations(run: dict[str, set[tuple[str, str]]]) -> list[dict]:
    """All mutations, shuffled once, with the kinds in turn."""
    kinds: dict[str, list[dict]] = defaultdict(list)
    for path in sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        if path.stem in MEASURES:
            continue
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for name, function in functions(module):
            _, nodes, added = body_nodes(function)
            number = 0
            for node in nodes:
                for kind, _ in changes(node):
                    last = getattr(node, "test", node).end_lineno
                    lines = [f"{path}:{line + added}" for line in range(node.lineno, last + 1)]
                    pairs = set().union(*(run.get(line, set()) for line in lines))
                    mutation = {"module": module, "function": name, "number": number, "line": node.lineno + added}
                    source = ast.unparse(getattr(node, "test", node))[:80]
                    kinds[kind].append(mutation | {"kind": kind, "what": source, "pairs": sorted(pairs)})
                    number += 1
    for mutations in kinds.values():
        mutations.sort(key=lambda mutation: (mutation["module"], mutation["function"], mutation["number"]))
        random.Random(0).shuffle(mutations)
    turns = itertools.zip_longest(*(kinds[kind] for kind in sorted(kinds)))
    return [mutation for turn in turns for mutation in turn if mutation]


def plant(mutation: dict) -> None:
    """Apply the mutation to its function for the rest of this process."""
    function = dict(functions(mutation["module"]))[mutation["function"]]
    tree, nodes, _ = body_nodes(function)
    every = [change for node in nodes for _, change in changes(node)]
    every[mutation["number"]]()
    tree.body[0].decorator_list = []
    made: dict[str, object] = {}
    source = "from __future__ import annotations\n" + ast.unparse(tree)
    exec(source, dict(function.__globals__), made)
    function.__code__ = made[function.__name__].__code__


@cache
def exact() -> list[str]:
    return [name for name in PRESETS if resolve(name).lossless]


def few_tokens(decoder: str, setting: AuditSetting, images: int) -> np.ndarray:
    """Stream tokens of a few images; of fewer images if the setting decodes one image at a time."""
    model = setting_model(setting, 0)[0]
    texts = itertools.islice(itertools.cycle(model.prompts), images if setting.batch != 1 else 12)
    requests = [Request(text, f"{setting.name} {text}", sample) for sample, text in enumerate(texts)]
    size = setting.batch or len(requests)
    parts = (requests[start : start + size] for start in range(0, len(requests), size))
    return np.concatenate([stream_tokens(model, part, resolve(decoder), setting, 0) for part in parts])


clean_tokens = cache(lambda decoder, setting: few_tokens(decoder, setting, FEW))


def chosen_pairs(mutation: dict) -> list[tuple[str, AuditSetting]]:
    """Choose PAIRS pairs that run the mutation, with as many different decoders and settings as possible."""
    settings = {setting.name: setting for setting in (*AUDIT_SETTINGS, *PROBES)}
    left, used, chosen = list(map(tuple, mutation["pairs"])), Counter(), []
    random.Random(mutation["number"]).shuffle(left)
    while left and len(chosen) < PAIRS:
        best = min(left, key=lambda pair: 2 * used[pair[1]] + used[pair[0]])
        left.remove(best)
        used.update(best)
        chosen.append((best[0], settings[best[1]]))
    return chosen


def alive(seconds: int = SECONDS) -> None:
    """End this fork after `seconds` more of CPU time."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit, resource.RLIM_INFINITY))


def try_one(mutation: dict, pairs: list[tuple[str, AuditSetting]]) -> Iterator[dict]:
    """Yield the row's parts of the first attempt: crashed, identical, audit or survived."""
    differ = []
    for decoder, setting in pairs:
        if not np.array_equal(clean_tokens(decoder, setting), few_tokens(decoder, setting, FEW)):
            differ.append((decoder, setting))
        yield {}
    yield {"differ": [f"{decoder}, {setting.name}" for decoder, setting in differ]}
    if differ:
        yield {"result": "survived"}
        yield from audited(differ, 0.25)
    else:
        yield {"result": "identical"}


def audited(pairs: list[tuple[str, AuditSetting]], share: float) -> Iterator[dict]:
    """Audit pairs with `share` of the audit's images until one rejects."""
    tv, p = 0.0, 1.0
    usual = share * AUDIT_SAMPLES / sum(setting.share for setting in AUDIT_SETTINGS)
    for decoder, setting in pairs:
        if setting in AUDIT_SETTINGS:
            counts = observe(setting, resolve(decoder), round(usual * setting.share / setting.tables), seed=0)
            tv, p = max(tv, largest(counts)), min(p, p_value(counts))
            yield {"tv": tv, "p": p}
            if p * len(AUDIT_SETTINGS) < AUDIT_LEVEL:
                tv = max(tv, *(total_variation([table])[0] for table in counts))
                yield {"result": "audit", "by": f"{decoder}, {setting.name}", "tv": tv}
                return


def largest(counts: list[Counts]) -> float:
    """Largest total variation over the tables with enough images."""
    return max((total_variation([table])[0] for table in counts if table.total.sum() >= ENOUGH), default=0.0)


def try_again(mutation: dict, pairs: list[tuple[str, AuditSetting]]) -> Iterator[dict]:
    """Yield the row's parts of a mutation that survived: check, the whole audit of its settings, probes, tests."""
    decoder = Counter(pair.partition(", ")[0] for pair in mutation["differ"]).most_common(1)[0][0]
    differ = []
    for setting in AUDIT_SETTINGS:
        clean = clean_tokens(decoder, setting) if [decoder, setting.name] in mutation["pairs"] else None
        if clean is not None and not np.array_equal(clean, few_tokens(decoder, setting, FEW)):
            differ.append((decoder, setting))
        yield {}
    tv, part = mutation.get("tv", 0.0), {}
    for part in audited(differ, 1.0):
        tv = max(tv, part.get("tv", 0.0))
        yield part | {"tv": tv}
    if part.get("result") == "audit":
        return
    for probe in PROBES:
        with contextlib.suppress(SpecbenchError):
            counts = observe(probe, resolve(decoder), PROBED // probe.tables, seed=1)
            tv = max(tv, largest(counts))
        yield {"tv": tv}
    for name, test in ContractChecks(decoder, resolve(decoder), 0).all(1000):
        alive(5 * SECONDS)
        if name not in ("exactness", "speed") and test().status == FAILED:
            yield {"result": "check", "by": f"{decoder}, {name}"}
            return
        yield {}
    if tv > CHANGED:
        alive(5 * SECONDS)
        import pytest

        with contextlib.redirect_stdout(io.StringIO()) as output:
            failed = pytest.main(["-n0", "-q", "-x", "-p", "no:cacheprovider", *(str(ROOT / test) for test in TESTS)])
        by = next((line for line in output.getvalue().splitlines() if line.startswith("FAILED")), "")[:160]
        yield {"result": "tests", "by": by} if failed == 1 else {}


def in_fork(pipe, attempt: Callable, mutation: dict, pairs: list[tuple[str, AuditSetting]]) -> None:
    alive()
    try:
        plant(mutation)
        for part in attempt(mutation, pairs):
            pipe.send(part)
            alive()
    except BaseException as error:
        pipe.send({"result": "crashed", "by": f"{type(error).__name__}: {error}"[:160]})
    pipe.send({"done": True})


def outcome(attempt: Callable, mutation: dict, row: dict) -> dict:
    """Row of one mutation after an attempt in a fork; `endless` if the attempt ended without a result."""
    pairs = chosen_pairs(mutation) if attempt is try_one else []
    for pair in pairs:
        clean_tokens(*pair)
    start = time.time()
    fork = multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    process = fork.Process(target=in_fork, args=(there, attempt, mutation | row, pairs))
    process.start()
    there.close()
    while not row.get("done"):
        try:
            row = row | here.recv()
        except EOFError:
            row = row | {"result": "endless", "done": True}
    process.kill()
    process.join()
    return {key: row[key] for key in row if key != "done"} | {"seconds": round(time.time() - start, 1)}


def summary(rows: list[dict]) -> None:
    """Print the number of each outcome, the share of distribution changes that were caught, and the survivors."""
    print(f"{len(rows)} mutations: {dict(Counter(row['result'] for row in rows))}")
    print(f"by kind: {dict(Counter(row['kind'] for row in rows))}")
    wrong = Counter(row["result"] for row in rows if row.get("tv", 0) > CHANGED)
    print(f"{wrong.total()} change a distribution by more than {CHANGED} (errors excluded): {dict(wrong)}")
    for row in rows:
        if row["result"] in ("survived", "check", "tests"):
            place = f"{row['module'].removeprefix('specbench.')}:{row['line']} {row['kind']}: {row['what']}"
            print(f"  {row['result']} tv {row.get('tv', 0):.4f} p {row.get('p', 1):.2g} {place}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {(row["module"], row["function"], row["number"]): row for row in read_rows(OUT)}
    if options.mutations:
        every = mutations(lines_run())
        able = [mutation for mutation in every if mutation["pairs"]]
        print(f"{len(every)} possible mutations, {len(able)} in lines that lossless decoders run", flush=True)
        for attempt in (try_one, try_again):
            for mutation in able[: options.mutations]:
                key = (mutation["module"], mutation["function"], mutation["number"])
                row = rows.get(key, {name: mutation[name] for name in mutation if name != "pairs"})
                if row.get("attempts", 0) >= 1 and (attempt is try_one or row["result"] != "survived"):
                    continue
                if row.get("attempts", 0) >= 2:
                    continue
                rows[key] = outcome(attempt, mutation, row) | {"attempts": row.get("attempts", 0) + 1}
                text = "".join(json.dumps(row) + "\n" for row in rows.values())
                OUT.with_suffix(".new").write_text(text)
                OUT.with_suffix(".new").replace(OUT)
    summary(list(rows.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
