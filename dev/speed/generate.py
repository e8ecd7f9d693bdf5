"""AR decoding in specbench against `generate()` of transformers: same weights, dtype and sampling."""

import time
from collections.abc import Callable
from functools import partial

import torch
from timing import cpu_ms, in_turns, median, timed_decode
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.generation import LogitsProcessor, LogitsProcessorList

from specbench.models.transformer.compilation import FORMS
from specbench.models.transformer.model import TransformerModel
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling


class SharedDraw(LogitsProcessor):
    """Logits processor for guidance on (conditional, unconditional) rows: mix, truncate, sample one shared token."""

    def __init__(self, sampling: Sampling):
        self._guidance, self._top_k = sampling.guidance, sampling.top_k

    def __call__(self, input_ids, scores):
        conditional, unconditional = scores.chunk(2)
        mixed = unconditional + self._guidance * (conditional - unconditional)
        if self._top_k:
            kth = mixed.topk(self._top_k).values[:, -1:]
            mixed = mixed.masked_fill(mixed < kth, -torch.inf)
        token = mixed.softmax(-1).multinomial(1)
        return torch.full_like(scores, -torch.inf).scatter_(1, token.repeat(2, 1), 0.0)


def causal_lm(backbone: nn.Module, head: nn.Linear, compiled: bool) -> LlamaForCausalLM:
    """Build the transformers class with the same weights."""
    config = LlamaConfig(**{**backbone.config.to_dict(), "vocab_size": head.out_features})
    with torch.device("meta"):
        theirs = LlamaForCausalLM(config)
    theirs.model, theirs.lm_head = backbone, head
    if compiled:
        torch._dynamo.config.recompile_limit = FORMS
        graphs = backbone.device.type == "cuda"
        theirs.forward = torch.compile(
            theirs.forward, options={"triton.cudagraphs": True} if graphs else {"cpp_wrapper": True}
        )
    return theirs.eval()


@torch.inference_mode()
def timed_generate(
    theirs: LlamaForCausalLM, prompt: int, length: int, sampling: Sampling, cache: str, sample: int
) -> dict:
    """Call `generate()` for `length` tokens after `prompt` ids; guidance other than 1 uses a batch of 2."""
    torch.manual_seed(sample)
    ids = torch.arange(prompt, device=theirs.device)[None]
    options = {"do_sample": True, "top_k": sampling.top_k}
    if sampling.guidance != 1.0:
        ids = ids.repeat(2, 1)
        options = {"do_sample": False, "logits_processor": LogitsProcessorList([SharedDraw(sampling)])}
    start, cpu = time.perf_counter(), time.process_time()
    tokens = theirs.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=length,
        max_new_tokens=length,
        pad_token_id=0,
        cache_implementation=cache,
        **options,
    )
    spent = {"wall_ms": (time.perf_counter() - start) * 1e3, "cpu_ms": (time.process_time() - cpu) * 1e3}
    if tokens.shape[1] != prompt + length:
        raise RuntimeError(f"generate() made {tokens.shape[1] - prompt} tokens instead of {length}")
    return {**spent, "tokens": length}


def against_generate(
    make: Callable[[], TransformerModel],
    head: Callable,
    prompt: int,
    sampling: Sampling,
    rounds: int,
    compiles: bool = True,
) -> tuple[list[dict], list[str]]:
    """Time both sides in CPU milliseconds, eager and, if `compiles`, compiled; transformers with each suitable cache.
    Both include prefill.

    `make` loads the model, and `head` finds its output matrix. Compilation happens in the round of warm-up.
    """
    eager = make()
    length, lines = eager.layout.length, []
    contenders = {"specbench ar": partial(timed_decode, eager, resolve("ar"), sampling)}
    caches = [("dynamic", False), ("static", False)]
    if compiles:
        compiled = make()
        compiled.compile()
        contenders["specbench ar, compiled"] = partial(timed_decode, compiled, resolve("ar"), sampling)
        caches.append(("static", True))
    for cache, compile_it in caches:
        theirs = causal_lm(eager.backbone, head(eager), compile_it)
        name = f"generate() {cache}{', compiled' if compile_it else ''}"
        contenders[name] = partial(timed_generate, theirs, prompt, length, sampling, cache)
    rows = in_turns(contenders, rounds)
    spent = {name: median(rows, name, cpu_ms) for name in contenders}
    lines += [f"{name}: {ms / length:.2f} ms per token" for name, ms in spent.items()]
    ours, theirs = ([name for name in contenders if name.startswith(side)] for side in ("specbench", "generate"))
    for label, marked in (("eager", False), ("compiled", True))[: 1 + compiles]:
        [mine] = [name for name in ours if name.endswith("compiled") == marked]
        best = min((name for name in theirs if name.endswith("compiled") == marked), key=spent.__getitem__)
        lines.append(f"{label}: specbench over {best}: {spent[mine] / spent[best]:.3f}")
    best, fastest = (min(side, key=spent.__getitem__) for side in (theirs, ours))
    lines.append(f"{fastest} over the best of generate(), {best}: {spent[fastest] / spent[best]:.3f}")
    return [{**row, "guidance": sampling.guidance} for row in rows], lines
