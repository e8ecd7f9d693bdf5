"""Another engine: a plain loop in torch, in the style of gpt-fast, with the weights of the random Llama.

It has a static cache and joined products; the whole step (forward of two rows, guidance, top-k, draw) is one function
compiled in mode "reduce-overhead". It records nothing and has no drafts, so it shows AR's cost without specbench. Its
rounding and draws differ, so it has a separate row and is never the denominator of a speed-up.
"""

import time
from collections.abc import Iterator

import torch
from llama import PROMPT, RandomLlama
from torch import Tensor, nn
from torch._dynamo.utils import counters

from parts.claims import Outcome, claim
from parts.scales import SIDE, Scale, filtered, floor_ms, has_graphs, random_llama
from specbench.specs.run_spec import Sampling


def engine(device: str, scale: Scale) -> Iterator[Outcome]:
    """Time one image of Lumina's length, with prefill separately."""
    compiled = has_graphs(device)
    model = random_llama(device, scale, side=SIDE if compiled else None)
    loop = PlainLoop(model, filtered(scale), compiled)
    loop.decode(min(8, model.layout.length))  # compiles, captures
    row = {"name": "plain loop"} | loop.timed(model.layout.length)
    row["graphs_skipped"] = counters["inductor"]["cudagraph_skips"]
    how = f"torch {torch.__version__}, {'reduce-overhead' if compiled else 'eager'}"
    how += ", not captured as a CUDA graph" if row["graphs_skipped"] else ""
    claims = [claim(f"another engine (plain torch, {how}): a token", f"{row['token_ms']:.3f} ms")]
    if floor := floor_ms(model, device, scale):
        claims.append(claim("another engine over the reading of weights and cache", f"{row['token_ms'] / floor:.3f}"))
    yield [*claims, claim("another engine: prefill", f"{row['prefill_ms']:.1f} ms")], [row]


class Block(nn.Module):
    """One layer, with the weights of transformers' layer."""

    def __init__(self, layer: nn.Module, slots: int):
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.width = attention.head_dim
        self.qkv = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.gate_up = _joined(mlp.gate_proj, mlp.up_proj)
        self.out, self.down = attention.o_proj.weight, mlp.down_proj.weight
        self.norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
        heads = len(self.out) // self.width
        for name in ("keys", "values"):  # two buffers: with views of one, Inductor copies the whole cache at each step
            cache = torch.zeros(2, heads, slots, self.width, device=self.out.device, dtype=self.out.dtype)
            self.register_buffer(name, cache)

    def forward(self, hidden: Tensor, at: Tensor, mask: Tensor, rotary: tuple[Tensor, Tensor], eps: float) -> Tensor:
        rows, columns, width = hidden.shape
        normed = nn.functional.rms_norm(hidden, (width,), self.norms[0], eps)
        heads = nn.functional.linear(normed, self.qkv).view(rows, columns, 3, -1, self.width).permute(2, 0, 3, 1, 4)
        self.keys[:, :, at], self.values[:, :, at] = _turned(heads[1], *rotary), heads[2]
        query = _turned(heads[0], *rotary)
        seen = nn.functional.scaled_dot_product_attention(query, self.keys, self.values, attn_mask=mask)
        hidden = hidden + nn.functional.linear(seen.transpose(1, 2).flatten(2), self.out)
        normed = nn.functional.rms_norm(hidden, (width,), self.norms[1], eps)
        gate, up = nn.functional.linear(normed, self.gate_up).chunk(2, -1)
        return hidden + nn.functional.linear(nn.functional.silu(gate) * up, self.down)


class PlainLoop:
    """Decodes one image with guidance."""

    def __init__(self, model: RandomLlama, sampling: Sampling, compiled: bool):
        backbone, slots = model.backbone, PROMPT + model.layout.length
        self._model, self._sampling = model, sampling
        self._blocks = [Block(layer, slots) for layer in backbone.layers]
        positions = torch.arange(slots, device=model.device)[None]
        cosine, sine = backbone.rotary_emb(backbone.embed_tokens.weight[:1, None], positions)
        self._cosine, self._sine, self._slots = cosine[0], sine[0], positions[0]
        self._step = torch.compile(self._next, mode="reduce-overhead", fullgraph=True) if compiled else self._next

    def _next(self, tokens: Tensor, at: Tensor) -> Tensor:
        """The token [1] after `tokens` [T] at the slots `at` [T], fed to both rows."""
        backbone, sampling = self._model.backbone, self._sampling
        hidden = backbone.embed_tokens(tokens).expand(2, -1, -1)
        mask = self._slots <= at[:, None]
        eps = backbone.config.rms_norm_eps
        for block in self._blocks:
            hidden = block(hidden, at, mask, (self._cosine[at], self._sine[at]), eps)
        hidden = nn.functional.rms_norm(hidden[:, -1], hidden.shape[-1:], backbone.norm.weight, eps)
        conditional, unconditional = self._model.output(hidden).float()
        logits = torch.lerp(unconditional, conditional, sampling.guidance) / sampling.temperature
        kept = logits.topk(sampling.top_k)
        p = kept.values.softmax(-1)
        # gpt-fast's exponential race, without the host sync of `multinomial`.
        return kept.indices[(p / torch.empty_like(p).exponential_()).argmax(-1, keepdim=True)]

    @torch.inference_mode()
    def decode(self, length: int) -> tuple[list[Tensor], float]:
        """`length` tokens, and the time at which the first token was queued."""
        token = self._next(torch.arange(PROMPT, device=self._model.device), self._slots[:PROMPT])
        _wait(self._model.device)
        tokens, start = [token], time.perf_counter()
        for slot in range(PROMPT, PROMPT + length - 1):
            torch.compiler.cudagraph_mark_step_begin()
            token = self._step(token.clone(), self._slots[slot : slot + 1].clone())
            tokens.append(token.clone())
        return tokens, start

    def timed(self, length: int) -> dict[str, float]:
        """Milliseconds of the prefill and of each token after the first."""
        begin = time.perf_counter()
        _, start = self.decode(length)
        _wait(self._model.device)
        end = time.perf_counter()
        return {"prefill_ms": (start - begin) * 1e3, "token_ms": (end - start) * 1e3 / (length - 1)}


def _joined(*layers: nn.Linear) -> Tensor:
    return torch.cat([layer.weight for layer in layers])


def _turned(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    first, second = heads.chunk(2, -1)
    return heads * cosine + torch.cat((-second, first), -1) * sine


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
