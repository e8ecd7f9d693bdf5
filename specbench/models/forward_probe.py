"""Compare a model's decoding steps with a reference forward. The steps are forwards through the KV cache: single
columns, windows with rejected drafts, and a draft tree. The reference forward processes the whole sequence at once.

Both must give the same log p up to rounding. Two forwards measure the size of rounding errors: a reference forward
of a part of the sequence, which has another shape, and a reference forward with a rounding error in every product.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

from specbench.errors import SpecbenchError
from specbench.models.interface import Tree
from specbench.models.transformer.model import Prefix, TransformerModel, TransformerSession
from specbench.system.digests import remember, remembered
from specbench.system.torch_state import PinnedTorch
from specbench.system.version import __version__

_ENDS = 12  # Slots at each end of the stream that are probed with short forwards
_WINDOW, _CHUNK = 4, 64  # Columns of a probed window, and of the forwards between the stream's ends
_TREE = Tree((-1, 0, 0, 1, 2))  # Two branches of two drafts
_AHEAD = "its attention is not causal, or its positions depend on the length, so it cannot be decoded step by step"
_COMPARED = "own-forward.json"  # in the cache folder: largest differences of checkpoints, in nats
_SAME = 1e-4  # Differences up to this many nats always pass
_HINT = "specbench's cache, masks, positions or head differ from the network's"


class Gap(NamedTuple):
    """Difference of two log p tensors, in nats."""

    largest: float
    mean: float

    def exceeds(self, rounding: Gap) -> bool:
        """Return whether the largest or the mean difference exceeds rounding; the mean is stricter in low precision."""
        return any(mine > max(6 * other, _SAME) for mine, other in zip(self, rounding, strict=True))


class Probe(NamedTuple):
    gap: float  # largest difference of log p, in nats
    rounding: float  # largest difference due to rounding
    slots: int  # stream slots compared
    # reason why draft trees are refused although chains and windows agree, and a hint
    no_trees: tuple[str, str] | None = None


class Reference(NamedTuple):
    """A model's reference forward of R prompts with N random stream tokens each."""

    prefix: Prefix  # the prompts twice, because a session without guidance decodes the first half
    tokens: Tensor  # [R, N]
    logp: Tensor  # [R, N + 1, v_image]
    rounding: Gap


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Turn any error of the block into a one-line error: the network cannot be decoded step by step."""
    try:
        yield
    except (SpecbenchError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        what = f"{name} cannot be decoded step by step: {type(error).__name__}: {first:.160}"
        hint = "decoding needs a KV cache whose slots can be overwritten, and one logit for each word of the vocabulary"
        raise SpecbenchError(what, hint) from error


def check_own_forward(model: TransformerModel, text: str) -> None:
    """Refuse a checkpoint of a known family if its decoding steps differ from the reference forward. The check
    runs once per machine for the same files."""
    state = model.weights_sha256, model.name, model.dtype, model.device.type, __version__
    key = " ".join(map(str, (*state, torch.__version__, transformers.__version__)))
    if key in remembered(_COMPARED):
        return
    try:
        with refusing(model.name):
            result = probe(model, own_forward(model, model.encode([text])))
    except SpecbenchError as error:
        hint = "use another checkpoint: its configuration has a feature that specbench does not support in this family"
        raise SpecbenchError(error.what, hint) from error
    with suppress(SpecbenchError, OSError):  # if the result is not stored, the next load compares again
        remember(_COMPARED, {key: result.gap})


@PinnedTorch()
def own_forward(model: TransformerModel, prefix: Prefix, seed: int = 0) -> Reference:
    """Compute log p of random tokens after `prefix`; refuse log p that depends on later tokens or is random."""
    slots = slots_to_compare(model, max(map(len, prefix.embeds)))
    generator = torch.Generator().manual_seed(seed)
    forced = torch.tensor(model.layout.forced[:slots])
    drawn = torch.randint(model.layout.v_image, (len(prefix.embeds), slots), generator=generator)
    drawn[:, 0] = (drawn[0, 0] + torch.arange(len(drawn))) % model.layout.v_image  # rows with equal prompts differ
    tokens = torch.where(forced < 0, drawn, forced).to(model.device)
    logp, part = own_logp(model, prefix, tokens), -(-2 * slots // 3)
    if logp.isnan().any():
        what = f"{model.name}: the forward of the whole sequence gives NaN"
        raise SpecbenchError(what, "try bfloat16 or float32, and check the weights")
    with _products_rounded(getattr(model, "network", model.backbone), seed):
        rounding = _gap(own_logp(model, prefix, tokens), logp)
    shapes = _gap(own_logp(model, prefix, tokens[:, :part]), logp[:, : part + 1])
    if shapes.exceeds(rounding):
        what = f"{model.name}: log p of a token changes by {shapes.largest:.2g} nats when other tokens follow it"
        raise SpecbenchError(f"{what} (rounding: {rounding.largest:.1g})", _AHEAD)
    again = _gap(own_logp(model, prefix, tokens), logp) if rounding.largest > 100 * _SAME else Gap(0.0, 0.0)
    if again.mean > rounding.mean / 2:
        what = f"{model.name}: log p of the same tokens differs by {again.largest:.2g} nats between two forwards"
        raise SpecbenchError(what, "make the network deterministic in eval mode")
    if not math.isfinite(rounding.largest):
        what = f"{model.name}: whether log p is infinite in the network's forward depends on rounding"
        raise SpecbenchError(what, "let specbench truncate (top_k, top_p) instead of the network")
    return Reference(prefix.take([*range(len(tokens))] * 2), tokens, logp, Gap(*map(max, rounding, shapes)))


@PinnedTorch()
def unchanged(model: TransformerModel, start: Reference) -> bool:
    """Return whether a new reference forward gives the log p of the stored `start`."""
    prefix = start.prefix.take(range(len(start.tokens)))
    return not _gap(own_logp(model, prefix, start.tokens), start.logp).exceeds(start.rounding)


@PinnedTorch()
def probe(model: TransformerModel, reference: Reference) -> Probe:
    """Compare decoding steps with the reference forward; an error if they differ by more than rounding."""
    gap, no_trees = _compared(model, _steps(model, reference), reference.rounding), None
    try:
        gap = max(gap, _compared(model, _trees(model, reference), reference.rounding))
    except SpecbenchError as error:
        no_trees = error.what, error.try_this
    return Probe(gap, reference.rounding.largest, reference.tokens.shape[1], no_trees)


def _compared(model: TransformerModel, steps: Iterable[tuple[str, Tensor, Tensor]], rounding: Gap) -> float:
    """Return the largest difference of log p over `steps`; a difference above rounding is refused."""
    largest = 0.0
    for way, expected, logits in steps:
        gap = _gap(logits.float().log_softmax(-1), expected)
        if gap.exceeds(rounding):
            what = f"{model.name}: log p {way} differs from a forward of the whole sequence by {gap.largest:.2g} nats"
            raise SpecbenchError(f"{what} (rounding: {rounding.largest:.1g})", _HINT)
        largest = max(largest, gap.largest)
    return largest


def slots_to_compare(model: TransformerModel, prompt: int) -> int:
    """Return the number of stream slots to compare: as many as take seconds, but enough to pass every length in tokens
    that the configuration names and that a prompt of `prompt` elements with its image reaches."""
    work = 2e10 if model.device.type == "cpu" else 1e13  # parameters times tokens
    parameters = sum(parameter.numel() for parameter in model.backbone.parameters())
    reached = [length - prompt for length in lengths_named(model.backbone.config) if length > prompt]
    past = [length + _ENDS for length in reached if length < model.layout.length]
    return min(max(4 * _ENDS, int(work / parameters), *past), model.layout.length)


def lengths_named(config: Any) -> list[int]:
    """List the whole numbers of a configuration whose names suggest lengths in tokens."""

    def numbers(name: str, value: object) -> Iterator[int]:
        if isinstance(value, Mapping):
            yield from chain(*(numbers(str(key), inside) for key, inside in value.items()))
        elif isinstance(value, list | tuple):
            yield from chain(*(numbers(name, inside) for inside in value))
        elif isinstance(value, int) and re.search(
            "window|chunk|block|local|context|position|seq|length|ctx|topk|floor", name
        ):
            yield value

    return [*numbers("", config.to_dict())]


def own_logp(model: TransformerModel, prefix: Prefix, tokens: Tensor) -> Tensor:
    """Compute log p [R, N + 1, v_image] of the slots after each prompt, by one forward of the model per row."""
    positions = torch.arange(tokens.shape[1] + 1, device=model.device)[None]
    rows = []
    for row, line in enumerate(tokens):
        logits = model.own_logits(prefix.take([row]), line).float()
        rows.append(model.guide(logits[None], 1.0, positions)[0].log_softmax(-1))
    return torch.stack(rows)


@contextmanager
def _products_rounded(network: nn.Module, seed: int) -> Iterator[None]:
    """Change every output of a module with a matrix by up to a rounding error: the larger of the number format's error
    and the difference between the first column computed alone and computed with the other columns."""
    generators: dict[torch.device, torch.Generator] = {}

    def change(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> Any:
        both = (inputs[0] if inputs else None, output)
        if not all(isinstance(value, Tensor) and value.is_floating_point() for value in both):
            return output  # an embedding does not round
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(seed)
        noise = torch.rand(output.shape, generator=generators[output.device], device=output.device) - 0.5
        computed = (kind for kind in (torch.bfloat16, torch.float16) if torch.equal(output.to(kind).to(output), output))
        size = torch.finfo(next(computed, output.dtype)).eps  # a quantised layer may compute in fewer bits
        with suppress(Exception):  # the product of a single column may round differently
            apart = module.forward(inputs[0][:, :1]) - output[:, :1]
            size = max(size, float(2 * apart.abs().max() / output.abs().max()))
        return output + (size * noise * output).to(output.dtype)

    matrices = [part for part in network.modules() if getattr(getattr(part, "weight", None), "ndim", 0) == 2]
    handles = [part.register_forward_hook(change) for part in matrices]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gap(found: Tensor, expected: Tensor) -> Gap:
    """Return the difference of log p; infinite if only one of the two is infinite."""
    both = found.isneginf() & expected.isneginf()
    gap = (found - expected).abs().masked_fill(both, 0.0).nan_to_num(torch.inf)
    return Gap(float(gap.max()), float(gap.mean()))


def _steps(model: TransformerModel, rows: Reference) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Decode the tokens of `rows` in several ways. Yield the way's name, own log p and logits, [R, T, v_image] each."""
    slots = rows.tokens.shape[1]
    ends = [*range(min(_ENDS, slots)), *range(max(slots - _ENDS, _ENDS), slots)]
    singly = {slot: 1 for slot in ends}
    in_windows = {slot: _WINDOW for slot in ends[::_WINDOW]}
    for way, widths in (("of single tokens", singly), (f"in a window of {_WINDOW} drafts", in_windows)):
        session, slot = TransformerSession(model, rows.prefix, 1.0, _CHUNK), 0
        while slot < slots:
            width = min(widths.get(slot, _CHUNK), slots - slot)
            between = [other for other in widths if slot < other < slot + width]
            width = between[0] - slot if between else width
            if slot and width == _WINDOW:  # slot 0 cannot be predicted twice
                session.forward(*_columns(rows.tokens.flip(0, 1), slot, width))  # drafts that are all rejected
            yield way, rows.logp[:, slot : slot + width], session.forward(*_columns(rows.tokens, slot, width))
            slot += width


def _columns(tokens: Tensor, slot: int, width: int) -> tuple[Tensor, Tensor]:
    """Return tokens and stream slots [R, width] of `width` columns that predict the slots from `slot` on."""
    positions = torch.arange(slot, slot + width, device=tokens.device).expand(len(tokens), -1)
    return tokens.gather(1, (positions - 1).clamp(min=0)), positions


def _trees(model: TransformerModel, rows: Reference) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Like `_steps`, with draft trees near the stream's ends; the second branch is always accepted."""
    slots, way = rows.tokens.shape[1], "in a draft tree"
    session = TransformerSession(model, rows.prefix, 1.0, _CHUNK)
    slot, roots = 0, {1, slots - 4} if slots > 4 else set()
    depth = torch.tensor(_TREE.depth, device=rows.tokens.device)
    prompts = rows.prefix.take(range(len(rows.tokens)))
    while slot < slots:
        if slot not in roots:
            width = min([_CHUNK, slots - slot, *(root - slot for root in roots if root > slot)])
            yield way, rows.logp[:, slot : slot + width], session.forward(*_columns(rows.tokens, slot, width))
            slot += width
            continue
        rejected = rows.tokens[:, : slot + 2].clone()
        rejected[:, slot:] = (rejected[:, slot:] + 1) % model.layout.v_image
        drafts = torch.stack(
            [rejected[:, slot], rows.tokens[:, slot], rejected[:, slot + 1], rows.tokens[:, slot + 1]], 1
        )
        consumed = torch.cat([rows.tokens[:, slot - 1 : slot], drafts], 1)
        logits = session.forward(consumed, (slot + depth).expand(len(consumed), -1), _TREE)
        trunk, accepted = own_logp(model, prompts, rejected)[:, slot:], rows.logp[:, slot : slot + 3]
        yield way, torch.stack([accepted[:, 0], trunk[:, 1], accepted[:, 1], trunk[:, 2], accepted[:, 2]], 1), logits
        kept = torch.tensor([[2, 4]], device=depth.device).expand(len(consumed), -1)
        session.keep(kept, slot + depth[kept])
        slot += 3
