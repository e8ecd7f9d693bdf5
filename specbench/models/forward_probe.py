"""Comparison of a model's decoding steps with its own forward: the same tokens by forwards of single columns, of
windows with rejected drafts and of a draft tree through the KV cache, and by one forward of the whole sequence.

Both must give the same log p within rounding, whose size is measured: by the own forward of a part of the sequence,
which is another shape, and by the own forward with every product changed by a rounding error of its number format.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from specbench.errors import SpecbenchError
from specbench.models.interface import Tree
from specbench.models.transformer.model import Prefix, TransformerModel, TransformerSession
from specbench.system.torch_state import PinnedTorch

_FEW = 24  # Slots at either end of the stream that go through short forwards
_WINDOW, _FORWARD = 4, 64  # Columns of a probed window, and of the forwards between both ends
_TREE = Tree((-1, 0, 0, 1, 2))  # Two branches of two drafts
_AHEAD = "its attention looks ahead, or its positions depend on the length: such a model cannot be decoded step by step"
_SAME = 1e-4  # Nats that are never called a difference
_HINT = "its cache, masks or positions are not as specbench needs them; probe=False decodes all the same"


class Gap(NamedTuple):
    """Difference of two log p tensors, in nats."""

    largest: float
    mean: float

    def exceeds(self, rounding: Gap) -> bool:
        """Whether it is more than rounding: the largest difference, or, which is sharper in low precision, the mean."""
        return any(mine > max(6 * other, _SAME) for mine, other in zip(self, rounding, strict=True))

    def or_more(self, other: Gap) -> Gap:
        return Gap(*map(max, self, other))


class Probe(NamedTuple):
    """Result of a comparison."""

    gap: float  # largest difference of log p, in nats
    rounding: float  # the largest difference that rounding makes
    slots: int  # stream slots compared
    branches: SpecbenchError | None = None  # why draft trees are refused though chains and windows agree


class Reference(NamedTuple):
    """A model's own forward of R prompts with N random stream tokens each."""

    prefix: Prefix  # the prompts twice, since a session without guidance decodes the first half
    tokens: Tensor  # [R, N]
    logp: Tensor  # [R, N + 1, v_image]
    rounding: Gap


@contextmanager
def refusing(name: str) -> Iterator[None]:
    """Refuse in one line a network whose modules are not as a causal language model's."""
    try:
        yield
    except SpecbenchError:
        raise
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        what = f"{name} cannot be decoded step by step: {type(error).__name__}: {first:.160}"
        hint = "decoding needs keys and values in slots that can be written again, and one logit for each word"
        raise SpecbenchError(what, hint) from error


def check_own_forward(model: TransformerModel, text: str) -> None:
    """Refuse a checkpoint of a known family whose decoding steps differ from its network's own forward."""
    try:
        with refusing(model.name):
            probe(model, own_forward(model, model.encode([text])))
    except SpecbenchError as error:
        hint = "its configuration asks for what specbench does not apply in this family of models"
        raise SpecbenchError(error.what, hint) from error


@PinnedTorch()
def own_forward(model: TransformerModel, prefix: Prefix, seed: int = 0) -> Reference:
    """Compute log p of random tokens after the prompts of `prefix`.

    Raises SpecbenchError if it depends on later tokens, or on random numbers.
    """
    slots = slots_to_compare(model, max(map(len, prefix.embeds)))
    generator = torch.Generator().manual_seed(seed)
    forced = torch.tensor(model.layout.forced[:slots])
    drawn = torch.randint(model.layout.v_image, (len(prefix.embeds), slots), generator=generator)
    tokens = torch.where(forced < 0, drawn, forced).to(model.device)
    logp, part = own_logp(model, prefix, tokens), -(-2 * slots // 3)
    with _products_rounded(model.backbone, seed):
        rounding = _gap(own_logp(model, prefix, tokens), logp)
    shapes = _gap(own_logp(model, prefix, tokens[:, :part]), logp[:, : part + 1])
    again = _gap(own_logp(model, prefix, tokens), logp) if rounding.largest > 100 * _SAME else Gap(0.0, 0.0)
    if again.mean > rounding.mean / 2:
        what = f"{model.name}: log p of the same tokens differs by {again.largest:.2g} nats between two forwards"
        raise SpecbenchError(what, "the network draws random numbers, even in eval mode")
    if shapes.exceeds(rounding):
        what = f"{model.name}: log p of a token changes by {shapes.largest:.2g} nats when other tokens follow it"
        raise SpecbenchError(f"{what} (rounding: {rounding.largest:.1g})", _AHEAD)
    return Reference(prefix.take([*range(len(tokens))] * 2), tokens, logp, rounding.or_more(shapes))


@PinnedTorch()
def probe(model: TransformerModel, reference: Reference) -> Probe:
    """Compare decoding steps with the model's own forward.

    Raises SpecbenchError if they differ by more than rounding.
    """
    gap, branches = _compared(model, _steps(model, reference), reference.rounding), None
    try:
        gap = max(gap, _compared(model, _trees(model, reference), reference.rounding))
    except SpecbenchError as error:
        branches = error
    return Probe(gap, reference.rounding.largest, reference.tokens.shape[1], branches)


def _compared(model: TransformerModel, steps: Iterable[tuple[str, Tensor, Tensor]], rounding: Gap) -> float:
    """Largest difference of log p over `steps`; one above rounding is refused."""
    largest = 0.0
    for way, expected, logits in steps:
        gap = _gap(logits.float().log_softmax(-1), expected)
        if gap.exceeds(rounding):
            what = f"{model.name}: log p {way} differs from the model's own forward by {gap.largest:.2g} nats"
            raise SpecbenchError(f"{what} (rounding: {rounding.largest:.1g})", _HINT)
        largest = max(largest, gap.largest)
    return largest


def slots_to_compare(model: TransformerModel, prompt: int) -> int:
    """Number of stream slots: as many as take seconds, and past every length in tokens that the configuration names and
    an image after a `prompt` of that length reaches."""
    work = 1e10 if model.device.type == "cpu" else 1e13  # parameters times tokens
    parameters = sum(parameter.numel() for parameter in model.backbone.parameters())
    reached = [length - prompt for length in _lengths(model.backbone.config.to_dict()) if length > prompt]
    past = [length + _FEW for length in reached if length < model.layout.length]
    return min(max(2 * _FEW, int(work / parameters), *past), model.layout.length)


def _lengths(settings: Mapping[str, object]) -> Iterator[int]:
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _lengths(value)
        elif isinstance(value, int) and re.search("window|chunk|block|local|context|position|length", name):
            yield value


def own_logp(model: TransformerModel, prefix: Prefix, tokens: Tensor) -> Tensor:
    """Log p [R, N + 1, v_image] of the slots after each prompt, by the model's own forward of each row."""
    positions = torch.arange(tokens.shape[1] + 1, device=model.device)[None]
    rows = []
    for row, line in enumerate(tokens):
        logits = model.own_logits(prefix.take([row]), line).float()
        rows.append(model.guide(logits[None], 1.0, positions)[0].log_softmax(-1))
    return torch.stack(rows)


@contextmanager
def _products_rounded(network: nn.Module, seed: int) -> Iterator[None]:
    """Change every output of a module with a matrix by up to one rounding error of its number format."""
    generators: dict[torch.device, torch.Generator] = {}

    def change(module: nn.Module, inputs: object, output: object) -> object:
        if not isinstance(output, Tensor) or not output.is_floating_point():
            return output
        if output.device not in generators:
            generators[output.device] = torch.Generator(output.device).manual_seed(seed)
        noise = torch.rand(output.shape, generator=generators[output.device], device=output.device)
        return output * (1 + torch.finfo(output.dtype).eps * (noise - 0.5)).to(output.dtype)

    matrices = [part for part in network.modules() if getattr(getattr(part, "weight", None), "ndim", 0) == 2]
    handles = [part.register_forward_hook(change) for part in matrices]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _gap(found: Tensor, expected: Tensor) -> Gap:
    """Difference of log p; infinite if only one of them is."""
    both = found.isneginf() & expected.isneginf()
    gap = (found - expected).abs().masked_fill(both, 0.0).nan_to_num(torch.inf)
    return Gap(float(gap.max()), float(gap.mean()))


def _steps(model: TransformerModel, rows: Reference) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Decode the tokens of `rows` in several ways; yields the way in words, log p by the own forward and logits, both
    [R, T, v_image]."""
    slots = rows.tokens.shape[1]
    ends = [*range(min(_FEW, slots)), *range(max(slots - _FEW, _FEW), slots)]
    singly = {slot: 1 for slot in ends}
    in_windows = {slot: _WINDOW for slot in ends[::_WINDOW]}
    for way, widths in (("of single tokens", singly), (f"in a window of {_WINDOW} drafts", in_windows)):
        session, slot = TransformerSession(model, rows.prefix, 1.0, _FORWARD), 0
        while slot < slots:
            width = min(widths.get(slot, _FORWARD), slots - slot)
            between = [other for other in widths if slot < other < slot + width]
            width = between[0] - slot if between else width
            if slot and width == _WINDOW:  # slot 0 is predicted by the first forward alone
                session.forward(*_columns(rows.tokens.flip(0, 1), slot, width))  # drafts that are all rejected
            yield way, rows.logp[:, slot : slot + width], session.forward(*_columns(rows.tokens, slot, width))
            slot += width


def _columns(tokens: Tensor, slot: int, width: int) -> tuple[Tensor, Tensor]:
    """Tokens consumed by `width` columns that predict the stream slots from `slot`, and these slots, [R, width]."""
    positions = torch.arange(slot, slot + width, device=tokens.device).expand(len(tokens), -1)
    return tokens.gather(1, (positions - 1).clamp(min=0)), positions


def _trees(model: TransformerModel, rows: Reference) -> Iterator[tuple[str, Tensor, Tensor]]:
    """The same with draft trees near both ends, whose second branch is accepted each time."""
    slots, way = rows.tokens.shape[1], "in a draft tree"
    session = TransformerSession(model, rows.prefix, 1.0, _FORWARD)
    slot, roots = 0, {1, slots - 4} if slots > 4 else set()
    depth = torch.tensor(_TREE.depth, device=rows.tokens.device)
    prompts = rows.prefix.take(range(len(rows.tokens)))
    while slot < slots:
        if slot not in roots:
            width = min([_FORWARD, slots - slot, *(root - slot for root in roots if root > slot)])
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
