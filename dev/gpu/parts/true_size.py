"""The user's commands at the true size and length of a model, with random weights, run as command lines."""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence

from parts.claims import Outcome, claim, failure
from parts.scales import GIB, Scale, has_graphs

_CARD_GIB = 24
"""Memory of an RTX 4090, simulated by a limit of the process."""
_SHOWN = ("nfe", "step_ms", "latency_ms", "speedup", "over_floor", "images_per_hour")
_TYPED = f"""
import json, sys, torch
gpu, budget = torch.cuda.is_available(), float(sys.argv.pop(1))
if gpu and budget:
    torch.cuda.set_per_process_memory_fraction(budget * {GIB} / torch.cuda.get_device_properties(0).total_memory)
from specbench.cli import main
try:
    main(sys.argv[1:])
finally:
    files = [one.__file__ for name, one in sys.modules.items() if name.partition(".")[0] == "specbench"]
    peak = torch.cuda.max_memory_allocated() if gpu else 0
    print(json.dumps({{"peak": peak, "files": files}}), file=sys.stderr)
"""


def one_model(name: str, decoders: str, images: int, device: str, scale: Scale) -> Outcome:
    """Decode images of a model with some decoders."""
    return _typed(name, device, ["--decoder", decoders, "--limit", str(images)])


def small_card(device: str, scale: Scale) -> Iterator[Outcome]:
    """Decode batches of Lumina-mGPT with SJD in the memory of a smaller card, and in all of it."""
    for budget in (_CARD_GIB, 0):
        for batch in scale.card_batches:
            options = ["--decoder", "sjd", "--baseline", "0", "--limit", str(batch), "--batch", str(batch)]
            options += ["--mode", "throughput"]
            claims, more = _typed("lumina", device, options, budget)
            where = f"{f'{budget} GiB' if budget else 'all memory'}, batch {batch}"
            yield [claim | {"what": f"{where}: {claim['what']}"} for claim in claims], more


def _typed(model: str, device: str, options: Sequence[str], budget: int = 0) -> Outcome:
    """Run `specbench run` for a model with random weights, then `report`; return a claim for each run."""
    size = [] if has_graphs(device) else ["--scale", "tiny"]
    with tempfile.TemporaryDirectory() as out:
        place = ["--device", device, "--out", out, "--no-progress"]
        run = ["run", "--model", model, "--random-weights", "--prompts", "shapes", *size, *place, *options]
        done = _specbench(budget, *run)
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        rows = json.loads(_specbench(0, "report", "--out", out, "--json").stdout or "[]")
    used = json.loads(lines.pop()) if lines and lines[-1].startswith("{") else {"peak": 0, "files": []}
    value = f"exit code {done.returncode}, peak {used['peak'] / GIB:.1f} GiB"
    typed = f"{model}: {' '.join(options)}"
    claims = [claim(typed, value) if done.returncode == 0 else failure(f"{typed}: {value}: {lines[-1:]}")]
    for row in rows:
        values = ", ".join(f"{name} {row[name]:.4g}" for name in _SHOWN if row[name] is not None)
        claims.append(claim(f"{model}, {row['label']}, {row['steps']}", values))
    kept = [{name: row[name] for name in (*_SHOWN, "label", "steps", "n", "failed", "environment")} for row in rows]
    return claims, [{"model": model, "typed": run, "budget_gib": budget, **used, "said": lines, "rows": kept}]


def _specbench(budget: int, *words: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", _TYPED, str(budget), *words], capture_output=True, text=True)
