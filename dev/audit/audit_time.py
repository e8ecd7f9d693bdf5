"""Measure the time of the search for likely causes and of its forwards, and compute the estimate printed before it.

    python dev/audit/audit_time.py >> results/audit/audit_time.jsonl

One line per model: `shapes` (16 images), and a language model of three layers of 128 with 65,536 codes and 729 tokens
per image (4 images; temperature 1, top-k 1,200, top-p 0.95). Times are CPU seconds of one thread.
"""

import io
import json
import re
import sys
import time
from contextlib import redirect_stderr
from pathlib import Path

import pandas as pd
import torch
from transformers import LlamaConfig, LlamaModel

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))

import planted_causes as planted  # noqa: E402 - found through the line above
import tiny_llama  # noqa: E402

from specbench.checks import likely_causes as module  # noqa: E402
from specbench.checks.teacher_forced import teacher_forced_values  # noqa: E402
from specbench.errors import SpecbenchError  # noqa: E402
from specbench.models.catalog import load_model  # noqa: E402
from specbench.models.interface import TokenLayout  # noqa: E402
from specbench.models.transformer.model import TransformerSession  # noqa: E402
from specbench.prompts import load_prompts  # noqa: E402
from specbench.specs.run_spec import Sampling  # noqa: E402
from specbench.system import console  # noqa: E402


class Codes(tiny_llama.Tiny):
    """A small language model with as many codes and tokens per image as Tar."""

    name = "3 layers of 128, 65,536 codes"

    def __init__(self, side: int = 27, codes: int = 65_536):
        torch.manual_seed(0)
        sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2}
        config = LlamaConfig(vocab_size=codes, num_hidden_layers=3, pad_token_id=None, **sizes)
        self.backbone = LlamaModel(config).eval().requires_grad_(False)
        self.backbone.embed_tokens.weight.mul_(40)
        self.layout, self.codebook = TokenLayout.plain(side, side, codes), None
        self.matrix = 0.3 * torch.randn(128, codes)


def in_format(model: tiny_llama.Tiny, dtype: str):
    model.backbone.to(getattr(torch, dtype))
    model.matrix = model.matrix.to(getattr(torch, dtype))
    return model


def measure(name: str, load, model, rows: pd.DataFrame, sampling: Sampling, guided: bool) -> dict[str, object]:
    """Measure CPU seconds of the audit's passes and of their forwards; add the estimate."""
    spent, of_causes = {"forwards": 0.0, "forward": 0}, {}

    def timed(function):
        def call(*args, **options):
            start = time.process_time()
            result = function(*args, **options)
            spent["forwards"] += time.process_time() - start
            spent["forward"] += 1
            return result

        return call

    plain = TransformerSession.__init__, TransformerSession.forward
    TransformerSession.__init__, TransformerSession.forward = map(timed, plain)
    console.progress_shown = lambda: True
    start = time.process_time()
    teacher_forced_values(model, rows, sampling)
    of_values = time.process_time() - start, spent["forwards"]
    said, start, clock = io.StringIO(), time.process_time(), time.monotonic()
    with redirect_stderr(said):
        causes, _ = module.likely_causes(load, rows, sampling, "float32", guided)
    of_causes = {"causes_s": time.process_time() - start, "clock_s": time.monotonic() - clock}
    TransformerSession.__init__, TransformerSession.forward = plain
    about = re.search(r"about ([\d.]+) (s|min)", said.getvalue())
    estimate = float(about[1]) * (60 if about[2] == "min" else 1) if about else None
    forwards = spent["forwards"] - of_values[1]
    return {"model": name, "images": len(rows), "causes": [cause.what for cause in causes]} | {
        "values_s": of_values[0], "values_forwards_s": of_values[1], "forwards_s": forwards,
        "ratio": of_causes["causes_s"] / forwards, "said_s": estimate, **of_causes,
    }  # fmt: skip


def main() -> None:
    torch.set_num_threads(1)
    texts = [prompt.text for prompt in load_prompts("shapes").prompts[::19][:16]]
    for name, sampling, texts_ in (
        ("shapes", Sampling(3.0, 0.9, 100, 0.9), texts),
        ("codes", Sampling(1.0, 1.0, 1200, 0.95), texts[:4]),
    ):
        model = load_model("shapes") if name == "shapes" else Codes()

        def load(dtype: str, name=name):
            if dtype == "int8wo":
                raise SpecbenchError("not tried")
            return load_model("shapes", "cpu", dtype) if name == "shapes" else in_format(Codes(), dtype)

        rows = planted.as_rows(model, texts_, planted.drawn(model, texts_, sampling))
        print(json.dumps(measure(model.name, load, model, rows, sampling, name == "shapes")), flush=True)


if __name__ == "__main__":
    main()
