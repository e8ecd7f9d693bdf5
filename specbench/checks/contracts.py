"""Conformance tests of whatever a plug-in may bring: a model, a metric, a prompt set, and through
`specbench.checks.decoder_contract` decoders."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pandas as pd
import pyarrow as pa
import torch
from torch import Tensor

from specbench.checks.findings import SKIPPED, Finding, finding, run_tests
from specbench.errors import SpecbenchError
from specbench.metrics.base import Metric, Sample
from specbench.metrics.catalog import metric
from specbench.models.catalog import find_model, load_model
from specbench.models.facts import ModelFacts
from specbench.models.interface import ImageModel, Session
from specbench.prompts import PromptSet, load_prompts, prompt_set_names

_GUIDANCE = 3.0
_WINDOW = 4
_MOST_SLOTS = 64
"""Slots of an image that are tested."""
_TOLERANCE = {"float32": 1e-3, "bfloat16": 0.2, "float16": 0.05}
"""Largest difference of logits, over their standard deviation, that rounding explains."""
_TEXTS = ("a bright red circle", "a dark blue square beside a dog")
_IMAGES = 6
_PIXELS = 64
_RELATIVE = 1e-3
"""Difference between an image's feature alone and in a batch that rounding explains."""


def check_all(
    decoders: Sequence[str],
    model: str | None,
    metric: str | None,
    prompts: str | None,
    samples: int,
    announce: Callable[[str], None] | None = None,
) -> Iterator[dict[str, object]]:
    """Yield `name, kind, check, status, detail` of every test.

    Args:
        prompts: tested, and used for the tests of the model and the metric.
        samples: images for the losslessness test of decoders.
        announce: called with each name before its tests.

    Raises:
        SpecbenchError: a name that is unknown, or something that must be installed first.
    """
    announce = announce or (lambda name: None)
    if decoders:
        from specbench.checks.decoder_contract import check_named  # brings transformers and the decode loop

        for row in check_named(decoders, samples, announce):
            yield {"name": row["decoder"], "kind": "decoder", **row}
    if model:
        announce(model)
        yield from ({"name": model, "kind": "model", **vars(one)} for one in model_findings(model, prompts))
    if metric:
        announce(metric)
        yield from ({"name": metric, "kind": "metric", **vars(one)} for one in metric_findings(metric, prompts))
    if prompts:
        announce(prompts)
        yield from ({"name": prompts, "kind": "prompts", **vars(one)} for one in prompt_findings(prompts, model))


def model_findings(name: str, prompts: str | None = None) -> list[Finding]:
    """Run every conformance test on a model on the CPU.

    Args:
        name: of the catalogue, or "package.module:NAME".
        prompts: the set or file whose first two prompts are encoded; the set of the model's name, else two captions.

    Raises:
        SpecbenchError: there is no such model, its weights are missing, or it cannot read the prompts.
    """
    info = find_model(name)
    if prompts is None and info.name in prompt_set_names():
        prompts = info.name
    texts = [prompt.text for prompt in load_prompts(prompts).prompts[:2]] if prompts else list(_TEXTS)
    if len(texts) < 2:
        raise SpecbenchError(f"prompts '{prompts}': one prompt", "two are needed")
    return ModelChecks(info, load_model(info), texts).all_findings()


class ModelChecks:
    """The tests of a model, each a method that returns its `Finding`: the logits of one forward must not depend on how
    the forwards are cut up.

    Random tokens are fed to a batch of two prompts, as decoders feed drafts: one at a time, several at a time, after
    wrong drafts, alone, and in a row that held another image. The logits must be those of one token at a time.
    """

    def __init__(self, info: ModelFacts, model: ImageModel, texts: Sequence[str]):
        self._info, self._model, self._texts = info, model, texts
        layout = model.layout
        self._slots = min(layout.length, _MOST_SLOTS)
        drawn = torch.Generator().manual_seed(0)
        free = torch.randint(layout.v_image, (2, layout.length), generator=drawn)
        forced = torch.tensor(layout.forced)
        self._tokens = torch.where(forced >= 0, forced, free).to(model.device)
        self._tolerance = _TOLERANCE[str(model.dtype).removeprefix("torch.")]

    def all_findings(self) -> list[Finding]:
        return run_tests(self.all())

    def all(self) -> Iterator[tuple[str, Callable[[], Finding]]]:
        names = ("facts", "render", "logits", "window", "causality", "rejection", "batch", "refill", "prompts")
        return ((name, getattr(self, name)) for name in names)

    def facts(self) -> Finding:
        """What the catalogue says of the model is so."""
        layout, info = self._model.layout, self._info
        pairs = {
            "image tokens": (info.tokens, layout.height * layout.width),
            "stream slots": (info.stream, layout.length),
            "image vocabulary": (info.v_image, layout.v_image),
            "name": (info.name, self._model.name),
        }
        wrong = [f"{what}: {said} declared, {found} found" for what, (said, found) in pairs.items() if said != found]
        return finding("facts", wrong, f"{layout.height} x {layout.width} tokens of {layout.v_image:,}, as declared")

    def render(self) -> Finding:
        """Pixels are uint8, of the declared size, and do not depend on the batch."""
        tokens = self._model.layout.image_tokens(self._tokens)
        with torch.inference_mode():
            pixels, alone = self._model.render(tokens), self._model.render(tokens[:1])
        wanted = (2, 3, *self._info.resolution)
        wrong = [f"pixels are {pixels.dtype}, not uint8"] * (pixels.dtype != torch.uint8)
        if tuple(pixels.shape) != wanted:
            wrong.append(f"pixels are {tuple(pixels.shape)}, not {wanted}")
        elif (pixels[:1].int() - alone.int()).abs().max() > 2:
            wrong.append("an image rendered alone differs from the same image rendered in a batch")
        return finding("render", wrong, f"uint8 images of {wanted[2]} x {wanted[3]} pixels")

    def logits(self) -> Finding:
        """Logits are finite float32 over the image vocabulary."""
        found, wanted = self._single, (2, self._slots, self._model.layout.v_image)
        wrong = [f"logits are {found.dtype}, not float32"] * (found.dtype != torch.float32)
        wrong += [f"logits are {tuple(found.shape)}, not {wanted}"] * (tuple(found.shape) != wanted)
        wrong += ["there are NaN or infinite logits"] * (not bool(found.isfinite().all()))
        return finding("logits", wrong, "finite float32 over the image vocabulary")

    def window(self) -> Finding:
        """Forwards of several tokens give the logits of one token at a time."""
        return self._same("window", self._fed(self._begin(), _WINDOW), f"{_WINDOW} tokens a forward")

    def causality(self) -> Finding:
        """Logits do not depend on later tokens of the same forward."""
        changed = self._tokens.clone()
        changed[:, _WINDOW - 2 :] = (changed[:, _WINDOW - 2 :] + 1) % self._model.layout.v_image
        first = self._forward(self._begin(), changed, 0, _WINDOW)[:, : _WINDOW - 1]
        return self._same("causality", first, "other tokens behind a slot")

    def rejection(self) -> Finding:
        """Rejected drafts leave nothing behind."""
        session, wrong, found = self._begin(), (self._tokens + 1) % self._model.layout.v_image, []
        for start in range(self._slots):
            drafts = torch.cat([self._tokens[:, :start], wrong[:, start:]], 1)
            end = min(start + _WINDOW, self._model.layout.length)
            found.append(self._forward(session, drafts, start, end)[:, :1])
        return self._same("rejection", torch.cat(found, 1), "wrong drafts in every forward")

    def batch(self) -> Finding:
        """An image alone has the logits that it has in a batch."""
        alone = [self._fed(self._begin([text]), 1, rows=[row]) for row, text in enumerate(self._texts)]
        return self._same("batch", torch.cat(alone), "each image alone")

    def refill(self) -> Finding:
        """A row that is given to a new prompt forgets the old one."""
        session = self._begin([self._texts[1]] * 2)
        self._forward(session, self._tokens.flip(0), 0, min(_WINDOW, self._slots))
        with torch.inference_mode():
            session.refill(torch.tensor([0], device=self._model.device), self._model.encode([self._texts[0]]))
        return self._same("refill", self._fed(session, 1)[:1], "a row that held another image", rows=1)

    def prompts(self) -> Finding:
        """The prompt matters, and an image depends on its own alone."""
        swapped = self._fed(self._begin(self._texts[::-1]), 1)
        alike = self._gap(swapped, self._single) <= self._tolerance
        return finding("prompts", ["both prompts give the same logits"] * alike, "another prompt, other logits")

    @property
    def _single(self) -> Tensor:
        if not hasattr(self, "_reference"):
            self._reference = self._fed(self._begin(), 1)
        return self._reference

    def _begin(self, texts: Sequence[str] | None = None) -> Session:
        with torch.inference_mode():
            return self._model.begin(self._model.encode(list(texts or self._texts)), _GUIDANCE, _WINDOW)

    def _fed(self, session: Session, width: int, rows: Sequence[int] = (0, 1)) -> Tensor:
        """Logits of all tested slots, `width` columns a forward."""
        tokens = self._tokens[list(rows)]
        starts = range(0, self._slots, width)
        return torch.cat([self._forward(session, tokens, at, min(at + width, self._slots)) for at in starts], 1)

    def _forward(self, session: Session, tokens: Tensor, start: int, end: int) -> Tensor:
        """Logits of the slots `start` to `end`, each from the token before it."""
        positions = torch.arange(start, end, device=tokens.device).expand(len(tokens), -1).contiguous()
        with torch.inference_mode():
            return session.forward(tokens.gather(1, (positions - 1).clamp(min=0)), positions).clone()

    def _same(self, name: str, found: Tensor, how: str, rows: int = 2) -> Finding:
        gap = self._gap(found, self._single[:rows, : found.shape[1]])
        wrong = [f"logits change by {gap:.2g} of their standard deviation with {how}"] * (not gap <= self._tolerance)
        return finding(name, wrong, f"the same logits with {how}, within {gap:.1e} of their standard deviation")

    def _gap(self, found: Tensor, wanted: Tensor) -> float:
        return float((found - wanted).abs().max() / self._single.std().clamp(min=1e-9))


def metric_findings(name: str, prompts: str | None = None) -> list[Finding]:
    """Run every conformance test on a metric, with random images of the first prompts that it accepts.

    Args:
        name: of the catalogue, or "package.module:NAME".
        prompts: the set or file of the prompts; "shapes" if None.

    Raises:
        SpecbenchError: there is no such metric or prompt set.
    """
    made = metric(name)()
    missing = made.missing()
    if missing:
        return [Finding("ready", SKIPPED, f"{missing[0][0]} ({missing[0][1]})")]
    accepted = [one for one in load_prompts(prompts or "shapes").prompts if made.accepts(one.category, one.meta)]
    if not accepted:
        return [Finding("ready", SKIPPED, f"it accepts no prompt of '{prompts or 'shapes'}'; name others")]
    draw = np.random.default_rng(0)
    samples = [
        Sample(one.id, 0, one.text, one.category, one.meta, draw.integers(0, 256, (_PIXELS, _PIXELS, 3), np.uint8))
        for one in accepted[:_IMAGES]
    ]
    made.prepare()
    return MetricChecks(made, lambda: metric(name)(), samples).all_findings()


class MetricChecks:
    """The tests of a metric, each a method that returns its `Finding`: features of an image depend on that image alone,
    and scores follow the interface."""

    def __init__(self, made: Metric, make: Callable[[], Metric], samples: list[Sample]):
        self._metric, self._make, self._samples = made, make, samples

    def all_findings(self) -> list[Finding]:
        return run_tests(self.all())

    def all(self) -> Iterator[tuple[str, Callable[[], Finding]]]:
        return ((name, getattr(self, name)) for name in ("identity", "features", "batch", "scores", "difference"))

    def identity(self) -> Finding:
        """The identity is a mapping of texts, the same whenever the metric is made."""
        found, again = dict(self._metric.identity()), dict(self._make().identity())
        texts = all(isinstance(part, str) for pair in found.items() for part in pair)
        wrong = ["identity() must map texts to texts"] * (not texts)
        wrong += ["identity() differs when the metric is made again"] * (found != again)
        shown = re.sub(r"(sha256:[0-9a-f]{12})[0-9a-f]+", r"\1…", json.dumps(found, default=str))
        return finding("identity", wrong, f"stable: {shown[:80]}")

    def features(self) -> Finding:
        """One dict per image, with the declared columns, whose values have the declared types; pixels stay."""
        before = [sample.pixels.copy() for sample in self._samples]
        found = self._metric.features(self._samples)
        if len(found) != len(self._samples):
            return finding("features", [f"{len(found)} dicts for {len(self._samples)} images"], "")
        declared = set(self._metric.columns)
        wrong = [f"columns {sorted(row)} instead of {sorted(declared)}" for row in found if set(row) != declared]
        changed = any((old != one.pixels).any() for old, one in zip(before, self._samples, strict=True))
        wrong += ["it changes the pixels that it is given"] * changed
        pa.Table.from_pylist(found, schema=pa.schema(list(self._metric.columns.items())))
        return finding("features", wrong, f"{', '.join(sorted(declared))} of each image")

    def batch(self) -> Finding:
        """Features of an image do not depend on the other images."""
        together = self._metric.features(self._samples)
        alone = [self._metric.features([sample])[0] for sample in reversed(self._samples)][::-1]
        gap = max(_gap(one, other) for one, other in zip(together, alone, strict=True))
        wrong = [f"an image's features change by {gap:.2g} of their size with the images beside it"] * (gap > _RELATIVE)
        return finding("batch", wrong, "alone or with others, the same features")

    def scores(self) -> Finding:
        """The overall score comes first, parts are named after it, values lie within their intervals."""
        found = self._metric.scores(self._metric.statistics(self._frame()))
        if not found:
            return finding("scores", ["no score of several images"], "")
        wrong = [f"the first score is called '{found[0].name}'"] * (found[0].name != self._metric.name)
        for one in found:
            low, value, high = one.estimate.low, one.estimate.value, one.estimate.high
            if low is not None and not low <= value <= high:
                wrong.append(f"{one.name}: {value} lies outside its interval {low} to {high}")
            if not 0 < one.n <= len(self._samples):
                wrong.append(f"{one.name}: n = {one.n} of {len(self._samples)} images")
        return finding("scores", wrong, ", ".join(f"{one.name} {one.estimate.value:.4g}" for one in found[:3]))

    def difference(self) -> Finding:
        """A run does not differ from itself."""
        frame = self._frame()
        found = self._metric.difference(frame, frame)
        if found is None:
            return Finding("difference", SKIPPED, "this metric has no paired difference")
        wrong = [f"{found[0].value} between a run and itself"] * (found[0].value != 0)
        return finding("difference", wrong, f"0 between a run and itself, over {found[1]} images")

    def _frame(self) -> pd.DataFrame:
        features = self._metric.features(self._samples)
        keys = [{"prompt_id": one.prompt_id, "sample": one.sample, "category": one.category} for one in self._samples]
        return pd.DataFrame([key | row for key, row in zip(keys, features, strict=True)])


def _gap(one: dict, other: dict) -> float:
    """Largest relative difference of the numbers of two feature dicts; infinite where other values differ."""
    gaps = [0.0]
    for name, value in one.items():
        if isinstance(value, int | float | np.ndarray | list | tuple | np.generic) and other[name] is not None:
            mine, theirs = np.asarray(value, dtype=float), np.asarray(other[name], dtype=float)
            gaps.append(float(np.abs(mine - theirs).max(initial=0) / max(np.abs(mine).max(initial=0), 1e-9)))
        elif value != other[name]:
            gaps.append(float("inf"))
    return max(gaps)


def prompt_findings(name: str, model: str | None = None) -> list[Finding]:
    """Run every conformance test on a prompt set: ids, captions, and whether a model reads them.

    Args:
        name: of a set, a file, or "package.module:NAME".
        model: that must be able to read them; none if None.

    Raises:
        SpecbenchError: no such set or model, or an unreadable file.
    """
    found = load_prompts(name)
    tests: list[tuple[str, Callable[[], Finding]]] = [
        ("file", lambda: finding("file", [], f"{len(found.prompts):,} prompts with ids of their own")),
        ("captions", lambda: _captions(found)),
    ]
    if model:
        info = find_model(model)
        tests.append(("model", lambda: _read_by(info, found)))
    return run_tests(tests)


def _captions(found: PromptSet) -> Finding:
    """No caption stands twice: its images would count as those of two independent prompts."""
    texts = [prompt.text for prompt in found.prompts]
    repeated = len(texts) - len(set(texts))
    wrong = [f"{repeated:,} captions stand more than once: they count as independent prompts"] * bool(repeated)
    names = [prompt.category for prompt in found.prompts if prompt.category]
    fine = f"every caption once; {len(names):,} of {len(texts):,} prompts in {len(set(names))} categories"
    return finding("captions", wrong, fine)


def _read_by(info, found: PromptSet) -> Finding:
    try:
        info.check_prompts(found.prompts)
    except SpecbenchError as error:
        return finding("model", [error.what], "")
    return finding("model", [], f"{info.name} reads every prompt")
