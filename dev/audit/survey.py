"""Mutate decoding, sampling, cache and noise by program, and see which mutations the audit catches.

    python dev/audit/survey.py --mutations 200 --images 20000        goes on where it stopped
    python dev/audit/survey.py --mutations 0                         the summary

A mutation changes one node of one function: an operator, a comparison, an index or offset, a stream of noise, a dropped
mask or minimum. Each is tried in a process of its own, on decoders that run the function. A line per mutation goes to
results/audit/survey.jsonl: `caught` (an audit setting rejects at AUDIT_LEVEL), `crashed` (an error, which any test
sees), `slow` (no end within a minute), or `survived`; `tokens_differ` says whether it changed any image at all, so that
those that did not are harmless or never run, and those that did are looked at by hand.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import inspect
import json
import multiprocessing
import random
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "dev"))

from json_rows import read_rows  # noqa: E402 - found through the line above

from specbench.checks.audit_settings import AUDIT_SETTINGS  # noqa: E402
from specbench.checks.divergence import AUDIT_LEVEL, p_value  # noqa: E402
from specbench.checks.losslessness import observe  # noqa: E402
from specbench.specs.presets import resolve  # noqa: E402

OUT = ROOT / "results" / "audit" / "survey.jsonl"
WHERE = {
    "specbench.decoding.sampling": ("ar", "sjd"),
    "specbench.decoding.noise": ("sjd", "scd-mc"),
    "specbench.decoding.loop": ("sjd", "sjd-pac"),
    "specbench.decoding.drafters.jacobi": ("sjd", "sjd-pac"),
    "specbench.decoding.verification.chain_verification": ("sjd", "scd-mc"),
    "specbench.decoding.verification.tree_verification": ("sjd-pac", "eagle"),
    "specbench.decoding.verification.residuals": ("sjd", "sjd-pac"),
    "specbench.decoding.verification.refinement": ("sjd", "scd-mc"),
    "specbench.models.transformer.kv_cache": ("sjd", "sjd-pac"),
    "specbench.models.transformer.forward": ("ar", "sjd-pac"),
}
SETTINGS = ("1x3 of 6", "2x4 of 3 with row ends", "4x4 of 2", "1x4 of 8", "2x2 of 4", "2x4 of 2 with a row end")
SECONDS = 240
_OTHER = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.Lt: ast.LtE, ast.LtE: ast.Lt,
    ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd, ast.FloorDiv: ast.Mult,
}  # fmt: skip
_STREAMS = ("TOKEN", "COIN", "REDRAW", "RESIDUAL")


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[], None]]]:
    """Ways to change one node in place, each with its name."""
    if isinstance(node, ast.BinOp) and type(node.op) in _OTHER:
        yield "operator", lambda: setattr(node, "op", _OTHER[type(node.op)]())
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _OTHER:
        yield "comparison", lambda: node.ops.__setitem__(0, _OTHER[type(node.ops[0])]())
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        yield "offset", lambda: setattr(node, "value", node.value + 1)
    if isinstance(node, ast.Attribute) and node.attr in _STREAMS:
        yield "stream", lambda: setattr(node, "attr", _STREAMS[_STREAMS.index(node.attr) - 1])
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
        yield "mask", lambda: setattr(node, "operand", ast.UnaryOp(ast.Invert(), node.operand))
    if isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("cumsum", "clamp", "float"):
        yield "dropped call", lambda: (setattr(node, "args", [node.func.value]), setattr(node, "keywords", []),
                                       setattr(node, "func", ast.Name("(lambda x: x)", ast.Load())))  # fmt: skip


def functions(module: str) -> Iterator[tuple[str, object]]:
    """Functions and methods that the module itself defines, by dotted path."""
    found = importlib.import_module(module)
    for name, value in vars(found).items():
        if getattr(value, "__module__", "") != module:
            continue
        if inspect.isfunction(value):
            yield name, value
        elif inspect.isclass(value):
            yield from ((f"{name}.{key}", each) for key, each in vars(value).items() if inspect.isfunction(each))


def mutations() -> list[tuple[str, str, int, str]]:
    """All of them, shuffled once: module, function, number of the change in it, its source in words."""
    found = []
    for module in WHERE:
        for path, function in functions(module):
            tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
            number = 0
            for node in ast.walk(tree):
                for kind, _ in changes(node):
                    found.append((module, path, number, f"{kind}: {ast.unparse(node)[:80]}"))
                    number += 1
    random.Random(0).shuffle(found)
    return found


def plant(module: str, path: str, number: int) -> None:
    """Change the function for the rest of this process."""
    owner = dict(functions(module))[path]
    function = inspect.unwrap(owner)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    every = [change for node in ast.walk(tree) for _, change in changes(node)]
    every[number]()
    tree.body[0].decorator_list = []
    source = "from __future__ import annotations\n" + ast.unparse(tree)
    made: dict[str, object] = {}
    exec(source, dict(function.__globals__), made)
    function.__code__ = made[function.__name__].__code__


def measure(module: str, images: int) -> list[tuple[float, str, list]]:
    """Smallest p-value with its setting, and the images counted, for each decoder of the module and setting."""
    found = []
    for decoder in WHERE[module]:
        for setting in AUDIT_SETTINGS:
            if setting.name.startswith(SETTINGS):
                counts = observe(setting, resolve(decoder), images // setting.tables, seed=0)
                found.append((p_value(counts), f"{decoder}, {setting.name}", [table.observed for table in counts]))
                if found[-1][0] < AUDIT_LEVEL / 100:
                    return found
    return found


def try_one(pipe, module: str, path: str, number: int, images: int) -> None:
    try:
        plant(module, path, number)
        pipe.send(measure(module, images))
    except BaseException as error:
        pipe.send(f"{type(error).__name__}: {error}"[:200])


def outcome(mutation: tuple, images: int, clean: dict) -> dict:
    """The row of one mutation."""
    module, path, number, what = mutation
    row = {"module": module, "function": path, "number": number, "what": what, "images": images}
    here, there = multiprocessing.get_context("fork").Pipe()
    process = multiprocessing.get_context("fork").Process(target=try_one, args=(there, module, path, number, images))
    process.start()
    answer = here.recv() if here.poll(SECONDS) else None
    process.kill()
    process.join()
    if answer is None or isinstance(answer, str):
        return row | {"result": "slow" if answer is None else "crashed", "error": answer}
    p, setting, _ = min(answer, key=lambda one: one[0])
    same = all(map(np.array_equal, clean[module], (table for one in answer for table in one[2])))
    result = "caught" if p < AUDIT_LEVEL else "survived"
    return row | {"result": result, "p_value": p, "setting": setting, "tokens_differ": not same}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mutations", type=int, default=200)
    parser.add_argument("--images", type=int, default=20_000, help="of each setting")
    options = parser.parse_args()
    torch.set_num_threads(1)
    done = {(row["module"], row["function"], row["number"]) for row in read_rows(OUT)}
    chosen = [one for one in mutations()[: options.mutations] if one[:3] not in done]
    clean: dict[str, list] = {}
    with OUT.open("a") as out:
        for one in chosen:
            if one[0] not in clean:
                clean[one[0]] = [table for found in measure(one[0], options.images) for table in found[2]]
            out.write(json.dumps(outcome(one, options.images, clean)) + "\n")
            out.flush()
    rows = read_rows(OUT)
    print(f"{len(rows)} of {len(mutations())} possible mutations")
    for result in ("crashed", "caught", "slow", "survived"):
        of_it = [row for row in rows if row["result"] == result]
        print(
            f"{result}: {len(of_it)}",
            f"({sum(r['tokens_differ'] for r in of_it)} change tokens)" * (result == "survived"),
        )
    for row in rows:
        if row["result"] == "survived" and row["tokens_differ"]:
            print(f"  {row['module']}:{row['function']} {row['what']} (p {row['p_value']:.2g})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
