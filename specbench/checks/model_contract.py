"""Conformance tests of a model."""

from collections.abc import Sequence
from functools import cached_property

import torch
from torch import Tensor

from specbench.checks.findings import Finding, finding, run_tests
from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model, load_model, wrongly_declared
from specbench.models.facts import ModelFacts
from specbench.models.interface import ImageModel, Session
from specbench.prompts import load_prompts, prompt_set_names
from specbench.system.torch_state import PinnedTorch

_GUIDANCE = 3.0
_WINDOW = 4
_MOST_SLOTS = 64  # Maximum number of slots of an image that are tested
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.2, torch.float16: 0.05}
"""Largest difference of logits, relative to their standard deviation, that rounding explains."""
_TEXTS = ("a bright red circle", "a dark blue square beside a dog")


def model_findings(name: str, prompts: str | None = None) -> list[Finding]:
    """Run every conformance test on a model on the CPU. `name`: from the catalogue, or "package.module:NAME".
    `prompts`: set or file whose first two prompts are encoded; None: the model's own set, else two captions."""
    info = find_model(name)
    if prompts is None and info.name in prompt_set_names():
        prompts = info.name
    texts = [prompt.text for prompt in load_prompts(prompts).prompts[:2]] if prompts else list(_TEXTS)
    if len(texts) < 2:
        raise SpecbenchError(f"prompts '{prompts}' have only one prompt", "use two prompts: model tests need them")
    return ModelChecks(info, load_model(info), texts).all_findings()


class ModelChecks:
    """Tests of a model. Each is a method that returns a `Finding`. The logits of a slot must not depend on how slots
    are divided among forwards.

    Random tokens are fed to a batch of two prompts, as decoders feed drafts: one at a time, several at a time, after
    wrong drafts, alone, and in a row that held another image. The logits must equal the logits of one token at a time.
    """

    def __init__(self, info: ModelFacts, model: ImageModel, texts: Sequence[str]):
        self._info, self._model, self._texts = info, model, texts
        layout = model.layout
        self._slots = min(layout.length, _MOST_SLOTS)
        drawn = torch.Generator().manual_seed(0)
        free = torch.randint(layout.v_image, (2, layout.length), generator=drawn)
        forced = torch.tensor(layout.forced)
        self._tokens = torch.where(forced >= 0, forced, free).to(model.device)
        self._tolerance = _TOLERANCE[model.dtype]

    def all_findings(self) -> list[Finding]:
        names = ("facts", "render", "logits", "window", "causality", "rejection", "batch", "refill", "prompts")
        return run_tests((name, getattr(self, name)) for name in names)

    def facts(self) -> Finding:
        """The catalogue's facts about the model are true."""
        layout, info = self._model.layout, self._info
        wrong = wrongly_declared(info, self._model)
        if info.name != self._model.name:
            wrong.append(f"name: {info.name} declared, {self._model.name} found")
        return finding("facts", wrong, f"{info.tokens:,} tokens of {layout.v_image:,}, as declared")

    def render(self) -> Finding:
        """Pixels are uint8, of the declared size, and do not depend on the batch."""
        tokens = self._model.layout.image_tokens(self._tokens)
        with PinnedTorch():
            pixels, alone = self._model.render(tokens), self._model.render(tokens[:1])
        shape = (2, 3, *self._info.resolution)
        wrong = [f"pixels are {pixels.dtype}, not uint8"] * (pixels.dtype != torch.uint8)
        if tuple(pixels.shape) != shape:
            wrong.append(f"pixels are {tuple(pixels.shape)}, not {shape}")
        elif (pixels[:1].int() - alone.int()).abs().max() > 2:
            wrong.append("an image rendered alone differs from the same image rendered in a batch")
        return finding("render", wrong, f"uint8 images of {shape[2]} x {shape[3]} pixels")

    def logits(self) -> Finding:
        """Logits are finite float32 over the image vocabulary."""
        logits, shape = self._single, (2, self._slots, self._model.layout.v_image)
        wrong = [f"logits are {logits.dtype}, not float32"] * (logits.dtype != torch.float32)
        wrong += [f"logits are {tuple(logits.shape)}, not {shape}"] * (tuple(logits.shape) != shape)
        wrong += ["there are NaN or infinite logits"] * (not bool(logits.isfinite().all()))
        return finding("logits", wrong, "finite float32 over the image vocabulary")

    def window(self) -> Finding:
        """Forwards of several tokens give the same logits as forwards of one token."""
        return self._same("window", self._fed(self._begin(), _WINDOW), f"{_WINDOW} tokens a forward")

    def causality(self) -> Finding:
        """Logits do not depend on later tokens of the same forward."""
        changed = self._tokens.clone()
        changed[:, _WINDOW - 2 :] = (changed[:, _WINDOW - 2 :] + 1) % self._model.layout.v_image
        first = self._forward(self._begin(), changed, 0, _WINDOW)[:, : _WINDOW - 1]
        return self._same("causality", first, "other tokens after a slot")

    def rejection(self) -> Finding:
        """Rejected drafts do not change later logits."""
        session, wrong, logits = self._begin(), (self._tokens + 1) % self._model.layout.v_image, []
        for start in range(self._slots):
            drafts = torch.cat([self._tokens[:, :start], wrong[:, start:]], 1)
            end = min(start + _WINDOW, self._model.layout.length)
            logits.append(self._forward(session, drafts, start, end)[:, :1])
        return self._same("rejection", torch.cat(logits, 1), "wrong drafts in every forward")

    def batch(self) -> Finding:
        """An image has the same logits alone and in a batch."""
        alone = [self._fed(self._begin([text]), 1, rows=[row]) for row, text in enumerate(self._texts)]
        return self._same("batch", torch.cat(alone), "each image alone")

    def refill(self) -> Finding:
        """A row that gets a new prompt does not depend on the old prompt."""
        session = self._begin([self._texts[1]] * 2)
        self._forward(session, self._tokens.flip(0), 0, min(_WINDOW, self._slots))
        with PinnedTorch():
            session.refill(torch.tensor([0], device=self._model.device), self._model.encode([self._texts[0]]))
        return self._same("refill", self._fed(session, 1)[:1], "a batch row that held another image before", rows=1)

    def prompts(self) -> Finding:
        """Logits depend on the image's own prompt, and on no other prompt."""
        swapped = self._fed(self._begin(self._texts[::-1]), 1)
        alike = self._gap(swapped, self._single) <= self._tolerance
        return finding("prompts", ["both prompts give the same logits"] * alike, "two prompts, two logits")

    @cached_property
    def _single(self) -> Tensor:
        return self._fed(self._begin(), 1)

    def _begin(self, texts: Sequence[str] | None = None) -> Session:
        with PinnedTorch():
            return self._model.begin(self._model.encode(list(texts or self._texts)), _GUIDANCE, _WINDOW)

    def _fed(self, session: Session, width: int, rows: Sequence[int] = (0, 1)) -> Tensor:
        """Logits of all tested slots, with `width` columns per forward."""
        tokens = self._tokens[list(rows)]
        starts = range(0, self._slots, width)
        return torch.cat([self._forward(session, tokens, at, min(at + width, self._slots)) for at in starts], 1)

    def _forward(self, session: Session, tokens: Tensor, start: int, end: int) -> Tensor:
        """Logits of the slots `start` to `end`, each computed from the preceding token."""
        positions = torch.arange(start, end, device=tokens.device).expand(len(tokens), -1).contiguous()
        with PinnedTorch():
            return session.forward(tokens.gather(1, (positions - 1).clamp(min=0)), positions).clone()

    def _same(self, name: str, logits: Tensor, how: str, rows: int = 2) -> Finding:
        gap = self._gap(logits, self._single[:rows, : logits.shape[1]])
        wrong = [f"logits change by {gap:.2g} of their standard deviation with {how}"] * (not gap <= self._tolerance)
        return finding(name, wrong, f"the same logits with {how}, up to {gap:.1e} of their standard deviation")

    def _gap(self, logits: Tensor, reference: Tensor) -> float:
        return float((logits - reference).abs().max() / self._single.std().clamp(min=1e-9))
