"""Check that the same work gives the same numbers twice: torch lists the cumulative sum in `draw` and top-p among the
CUDA operations that may be nondeterministic."""

import torch
from timing import CAPTION

from parts.claims import Outcome, claim
from parts.scales import Scale
from specbench.decoding.loop import decode
from specbench.decoding.sampling import draw, least_of_mass
from specbench.models.catalog import find_model, load_model
from specbench.prompts import Request
from specbench.specs.presets import resolve

_ROWS = 64


def repeats(device: str, scale: Scale) -> Outcome:
    """Several times each: draw tokens, apply top-p, and decode an image of `shapes`."""
    rows = []
    for width in (scale.llama["vocabulary"], 8 * scale.llama["vocabulary"]):
        torch.manual_seed(0)
        p, uniform = torch.randn(_ROWS, width).mul(3).softmax(-1).to(device), torch.rand(_ROWS).to(device)
        works = {"draw": lambda p=p, u=uniform: draw(p, u), "top-p": lambda p=p: least_of_mass(p, 0.9)}
        rows += [{"work": f"{name} of {width}", **_differing(work, 50 * scale.rounds)} for name, work in works.items()]
    model, sampling = load_model("shapes", device), find_model("shapes").sampling()
    arguments = model, [Request(CAPTION, "gpu", 0)], resolve("sjd"), sampling, 0
    image = _differing(lambda: torch.from_numpy(decode(*arguments)[0].tokens), scale.rounds)
    rows.append({"work": "an image by sjd", **image})
    text = ", ".join(f"{row['work']}: {row['differing']} of {row['repeats']}" for row in rows)
    return [claim("repetitions that differ from the first", text, "0", not any(row["differing"] for row in rows))], rows


def _differing(work, repetitions: int) -> dict[str, int]:
    first = work()
    return {"repeats": repetitions, "differing": sum(not torch.equal(first, work()) for _ in range(repetitions))}
