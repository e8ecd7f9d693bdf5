"""Training of draft heads: the target's features are computed once, then the head is trained on them.

Element t of an EAGLE-1 head combines feature f_t with the next token x_{t+1}, as in drafting. Its loss over image
positions is SmoothL1(f^, f) + 0.1 CE(softmax(head(f)), softmax(head(f^))), without guidance; uniform noise is added to
the input features only. Other heads: `_eagle3_losses`, `_vertical_losses`. Order, noise and learning rate are functions
of the step, so a resumed training gives the same weights as an uninterrupted training.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, LlamaConfig

from specbench.errors import SpecbenchError, read_name
from specbench.models.catalog import find_model, model_code
from specbench.models.draft_head import EagleHead, eagle3_head_for, head_for, new_head, save_head
from specbench.models.network_sizes import vertical_hidden
from specbench.models.transformer.model import TransformerModel
from specbench.models.vertical_head import (
    VerticalHead,
    new_vertical_head,
    save_vertical_head,
    slots_above,
    surroundings,
    vertical_head_for,
)
from specbench.runs.preparation import load_for_run
from specbench.specs.run_spec import Compute
from specbench.system.foreign_code import Code
from specbench.system.torch_state import PinnedTorch
from specbench.training.alignment import alignment, vertical_alignment
from specbench.training.data import Examples, FeatureStore, check_counts, corpus

_CLASSIFICATION = 0.1
_CLIP = 0.5
_NOISE = 0.2 * 512
_LONGEST_RUN = 32
_TEST_DEPTH, _STARTS, _DECAY = 5, 64, 0.8
CHECKPOINT_EVERY = 100
HeadName = Literal["eagle", "eagle3", "vertical"]
"""Kind of a draft head."""


@dataclass(frozen=True)
class HeadPlan:
    """Hyper-parameters. Invalid values raise a SpecbenchError. The defaults are for the embedded model."""

    images: int = 1024  # training images, seen `epochs` times in batches of `batch`
    epochs: int = 16
    batch: int = 16
    lr: float = 2e-3  # peak learning rate, reached after the share `warmup` of the steps; then linear decay to 0
    warmup: float = 0.03
    null: float = 0.1  # share of images trained without caption, for guidance
    seed: int = 0
    kind: HeadName = "eagle"

    def __post_init__(self) -> None:
        check_counts(images=self.images, epochs=self.epochs, batch=self.batch)
        if self.batch > self.images:
            what = f"--batch {self.batch}: more than --images {self.images}"
            raise SpecbenchError(what, f"add images, or add --batch {self.images}")
        if not self.lr > 0:
            raise SpecbenchError(f"--lr {self.lr}: must be above 0")

    @property
    def steps(self) -> int:
        return self.epochs * (self.images // self.batch)


def train(
    model: TransformerModel,
    out: Path,
    plan: HeadPlan,
    data: Path | None = None,
    tell: Callable[[str, int, int, str], object] | None = None,
    code: Code | None = None,
) -> nn.Module:
    """Train a head for `model` and store it in `out`; an interrupted training in `out` is resumed. `data`: run folder
    with the target's images; None for the model's training data. `tell`: see `train_head`. `code`: code of a plug-in's
    model."""
    tell = tell or (lambda *_: None)
    work = out / "training"
    record = {"model": model.weights_sha256, "data": str(data or ""), **asdict(plan)}
    record |= {"model_code": code.digest} if code else {}
    plan_file = work / "plan.json"
    if plan_file.is_file() and json.loads(plan_file.read_text()) != record:
        what = f"{out} contains an unfinished training of another model or with other settings"
        raise SpecbenchError(what, "choose another --out")
    images = corpus(model, plan.images, plan.seed, data)
    tapped = model.tapped(getattr(KINDS[plan.kind].untrained(model, plan.seed), "taps", ()))
    work.mkdir(parents=True, exist_ok=True)
    plan_file.write_text(json.dumps(record, indent=2))
    store = FeatureStore(work / "features")
    store.compute(tapped, images, plan.null, plan.seed, lambda done: tell("features", done, plan.images, ""))
    trainer = HeadTrainer(model, store, plan, work)
    trainer.run(lambda done, loss: tell("steps", done, plan.steps, f"loss {loss:.4f}"))
    extra = {"trained_for": model.name, "target_sha256": model.weights_sha256, **asdict(plan)}
    KINDS[plan.kind].save(trainer.head, out, extra)
    shutil.copyfile(work / "loss.jsonl", out / "loss.jsonl")
    shutil.rmtree(work)
    return trainer.head.eval()


class HeadTrainer:
    """Training in a folder. It resumes from the folder's checkpoint, if any."""

    def __init__(self, model: TransformerModel, store: FeatureStore, plan: HeadPlan, work: Path):
        self._model, self._store, self._plan, self._work = model, store, plan, work
        self._kind = KINDS[plan.kind]
        self.head = self._kind.untrained(model, plan.seed).to(model.device)
        trained = [p for p in self.head.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=plan.lr, betas=(0.9, 0.95))
        self._step = 0
        self._losses: list[dict[str, float]] = []
        if (work / "state.pt").is_file():
            state = torch.load(work / "state.pt", weights_only=True)
            self.head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            self._step, self._losses = state["step"], state["losses"]

    def run(self, tell: Callable[[int, float], object]) -> None:
        steps = self._plan.steps
        self.head.train()
        while self._step < steps:
            parts = self._train_step(self._step)
            self._step += 1
            self._losses.append({"step": self._step, **{name: round(float(v), 6) for name, v in parts.items()}})
            if self._step % CHECKPOINT_EVERY == 0 or self._step == steps:
                self._checkpoint()
            tell(self._step, float(parts["loss"]))

    def _train_step(self, step: int) -> dict[str, Tensor]:
        plan, warm = self._plan, max(1, round(self._plan.warmup * self._plan.steps))
        for group in self._optimizer.param_groups:
            group["lr"] = plan.lr * min((step + 1) / warm, (plan.steps - step) / max(1, plan.steps - warm))
        epoch, within = divmod(step, plan.images // plan.batch)
        order = torch.randperm(plan.images, generator=torch.Generator().manual_seed(plan.seed + epoch))
        batch = self._store.rows(order[within * plan.batch :][: plan.batch].tolist())
        draw = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
        parts = self._kind.losses(self._model, self.head, batch, draw)
        self._optimizer.zero_grad(set_to_none=True)
        parts["loss"].backward()
        torch.nn.utils.clip_grad_value_(self.head.parameters(), _CLIP)
        self._optimizer.step()
        return {name: value.detach() for name, value in parts.items()}

    def _checkpoint(self) -> None:
        state = {"head": self.head.state_dict(), "optimizer": self._optimizer.state_dict(), "step": self._step}
        torch.save(state | {"losses": self._losses}, self._work / "state.part")
        (self._work / "state.part").rename(self._work / "state.pt")
        (self._work / "loss.jsonl").write_text("".join(json.dumps(row) + "\n" for row in self._losses))


@PinnedTorch(False)
def train_head(
    out: str | Path,
    model: str = "shapes",
    data: str | Path | None = None,
    images: int = 1024,
    epochs: int = 16,
    batch: int = 16,
    lr: float = 2e-3,
    seed: int = 0,
    device: str = "cpu",
    threads: int = 0,
    tell: Callable[[str, int, int, str], None] | None = None,
    kind: HeadName = "eagle",
) -> Path:
    """Train a draft head (`specbench train-head`); repeat the call to resume an interrupted training.

    Args:
        out: folder of the head.
        model: the target.
        data: run folder with images of the target; None for the model's training data.
        images, epochs, batch, lr, seed: see `HeadPlan`.
        device, threads: as for `run`.
        tell: called as `tell(stage, done, total, note)`.
        kind: "eagle" for an EAGLE-1 head, "eagle3" for a head that reads several layers and is trained on its own
            outputs, "vertical" for a head that reads the image row above.

    Returns:
        The folder, for `head=` of the EAGLE decoders, or of `vertical`.

    Raises:
        SpecbenchError: a number out of range, an unknown model, no training data, or a folder with another training.
    """
    plan = HeadPlan(images, epochs, batch, lr, seed=seed, kind=head_name(kind))
    target = load_trainable(model, device, threads)
    train(target, Path(out), plan, Path(data) if data else None, tell, model_code(find_model(target.name)))
    return Path(out)


@PinnedTorch(False)
def check_head(
    model: str = "shapes",
    head: str = "",
    data: str | Path | None = None,
    images: int = 32,
    depths: int = 5,
    seed: int = 10**6,
    device: str = "cpu",
    threads: int = 0,
    kind: HeadName = "eagle",
) -> list[dict[str, object]]:
    """Measure the total variation between draft head and target by draft depth, on true images at the model's official
    sampling (`specbench check-head`).

    Args:
        model: the target.
        head: folder or hub id of the head; empty for the model's head.
        data: run folder with images of the target; None for the model's training data.
        images, depths: images to evaluate, and draft depths.
        seed: random seed of the selection of images.
        device, threads: as for `run`.
        kind: kind of head, "eagle", "eagle3" or "vertical".

    Returns:
        One dict per depth: `depth, tv, tv_low, tv_high, acceptance`; see `specbench.training.alignment`.

    Raises:
        SpecbenchError: a number below 1, an unknown model, kind or head, or too few images.
    """
    target = load_trainable(model, device, threads)
    check_counts(images=images, depths=depths)
    entry = KINDS[head_name(kind)]
    loaded = entry.load(target, head)
    evaluated = corpus(target, images, seed, Path(data) if data else None)
    return entry.distances(target, loaded, evaluated, find_model(target.name).sampling(), depths)


def load_trainable(name: str, device: str = "cpu", threads: int = 0) -> TransformerModel:
    """Load a model that draft heads can be trained for. `threads`: CPU threads; 0 uses all."""
    facts = find_model(name)
    model = load_for_run(facts, Compute(1, facts.dtype, device, threads))
    if not isinstance(model, TransformerModel):
        raise SpecbenchError(f"model '{name}' cannot be the target of a draft head")
    return model


class HeadKind(NamedTuple):
    """Functions to train, store and measure a kind of head."""

    untrained: Callable[[TransformerModel, int], nn.Module]  # `untrained(model, seed)` creates a new head
    # `losses(model, head, batch, draw)` returns the loss of a batch and its parts, by name
    losses: Callable[[TransformerModel, nn.Module, Examples, torch.Generator], dict[str, Tensor]]
    # `save(head, folder, extra)` stores a head with `extra` facts
    save: Callable[[nn.Module, Path, dict[str, object]], None]
    # `load(model, path)` loads the head from a folder or hub id; if `path` is empty, the model's head
    load: Callable[[Any, str], nn.Module]
    # `distances(model, head, images, sampling, depths)` measures the total variation to the target by depth
    distances: Callable[..., list[dict[str, object]]]


def untrained_eagle(model: TransformerModel, seed: int, taps: tuple[int, ...] | None = None) -> EagleHead:
    """Create a head with the target's layer sizes and token table; with `taps`, an EAGLE-3 head."""
    config = model.backbone.config
    names = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    if lacking := [name for name in (*names, "max_position_embeddings") if not hasattr(config, name)]:
        raise SpecbenchError(
            f"a draft head needs the sizes of a Llama; the configuration of '{model.name}' has no {lacking[0]}",
            "choose a decoder without a draft head",
        )
    sizes = {name: getattr(config, name) for name in (*names, "max_position_embeddings")}
    table = model.token_table().float()
    sizes |= {"num_hidden_layers": 1, "vocab_size": len(table), "pad_token_id": None}
    return new_head(LlamaConfig(**sizes, attn_implementation="sdpa"), table, seed, taps)


def untrained_eagle3(model: TransformerModel, seed: int) -> EagleHead:
    """Create a head that reads the target's last hidden state, and the states after a quarter, half and three quarters
    of its layers. Initially only the last state has an effect, and outputs have the target states' magnitude."""
    layers = model.backbone.config.num_hidden_layers
    taps = dict.fromkeys(min(max(1, layers * part // 4), layers - 1) for part in (1, 2, 3))
    model.tapped(tuple(taps))  # refuses models whose inner layers cannot be read
    head = untrained_eagle(model, seed, tuple(taps))
    head.fuse.weight.data.copy_(torch.eye(*head.fuse.weight.shape))
    head.norm.weight.data.copy_(model.backbone.norm.weight)
    return head


def eagle_losses(model: TransformerModel, head: EagleHead, batch: Examples, draw: torch.Generator) -> dict[str, Tensor]:
    """Compute the loss of one batch and its parts. `draw`: generator of the noise on the features."""
    noise = torch.rand(batch.features.shape, generator=draw) - 0.5
    features = batch.features.float().to(model.device)
    elements = features.shape[1]
    fed = features + noise.to(features.device) * (_NOISE / elements)
    guess = head.extrapolate(batch.ids[:, 1:elements].to(model.device), fed[:, :-1])
    mask = _drafted(batch).to(model.device)
    total = mask.sum() + 1e-5
    regression = (functional.smooth_l1_loss(guess, features[:, 1:], reduction="none").mean(-1) * mask).sum() / total
    p = model.head(features[:, 1:].to(model.dtype)).float().softmax(-1)
    guessed = model.head(guess.to(model.dtype)).float().log_softmax(-1)
    classification = -((p * guessed).sum(-1) * mask).sum() / total
    loss = regression + _CLASSIFICATION * classification
    return {"loss": loss, "regression": regression, "classification": classification}


def _drafted(batch: Examples, depth: int = 1) -> Tensor:
    """Return a mask [n, E - 1], 1 for elements that can be a draft `depth` tokens after the committed tokens.

    Drafting starts at element P - 1, which combines the prompt's last feature with the first image token."""
    place = torch.arange(batch.features.shape[1] - 1)
    return ((place >= batch.prompt[:, None] + depth - 2) & (place + 1 < batch.length[:, None])).float()


def _eagle3_losses(
    model: TransformerModel, head: EagleHead, batch: Examples, draw: torch.Generator
) -> dict[str, Tensor]:
    """Compute the mean cross-entropy between the target's distributions and the head's at `_TEST_DEPTH` draft depths,
    without guidance; each depth has 0.8 times the weight of the previous depth.

    Drafts of depth 2 and more continue from `_STARTS` random elements. Their inputs are the head's own outputs; they
    attend to target features up to the element, then to the head's outputs (EAGLE-3's training-time test)."""
    features = batch.features.float().to(model.device)
    count, width = features.shape[1] - 1, model.feature_size
    ids = batch.ids[:, 1 : count + 1].to(model.device)
    p = model.head(features[:, 1:, :width].to(model.dtype)).float().softmax(-1)
    starts = torch.randperm(count - _TEST_DEPTH, generator=draw)[:_STARTS].to(model.device)
    place = torch.arange(count, device=model.device)
    mask, seen_from_starts = place <= place[:, None], place <= starts[:, None]
    fed, seen, parts = head.fused(features[:, :-1]), DynamicCache(), {}
    for depth in range(1, _TEST_DEPTH + 1):
        every = mask.expand(len(ids), 1, -1, -1)
        state = head.extrapolate(ids[:, place], fed, head.rotary(place[None]), every, seen)
        guessed = model.head(head.read(state).to(model.dtype)).float().log_softmax(-1)
        drafted = _drafted(batch, depth).to(model.device)[:, place]
        parts[f"depth {depth}"] = -((p[:, place] * guessed).sum(-1) * drafted).sum() / (drafted.sum() + 1e-5)
        fed = state[:, starts] if depth == 1 else state
        place, own = starts + depth, torch.eye(len(starts), dtype=torch.bool, device=model.device)
        mask = torch.cat([seen_from_starts if depth == 1 else mask, own], 1)
    weights = [_DECAY**depth for depth in range(_TEST_DEPTH)]
    loss = sum((weight * part for weight, part in zip(weights, parts.values(), strict=True)), features.new_zeros(()))
    return {"loss": loss / sum(weights), **parts}


def _vertical_losses(
    model: TransformerModel, head: VerticalHead, batch: Examples, draw: torch.Generator
) -> dict[str, Tensor]:
    """Compute the loss of a batch: cross-entropy between the distributions of target and head for each slot, without
    guidance.

    `draw` splits every image at random into parts of consecutive slots, as long as a step's drafts. In a part, the head
    gets the features of slots before the part, and all earlier tokens."""
    place = batch.prompt[:, None] + torch.arange(model.layout.length)
    before = (place - 1)[..., None].expand(-1, -1, batch.features.shape[-1])
    ids = batch.ids.gather(1, place).to(model.device)
    features = batch.features.gather(1, before).float().to(model.device)
    run = torch.randint(1, _LONGEST_RUN + 1, (len(ids), 1), generator=draw)
    offset = torch.randint(0, _LONGEST_RUN, (len(ids), 1), generator=draw) % run
    slots = torch.arange(model.layout.length)
    # First slot [n, N] of each slot's run.
    starts = (slots - (slots - offset) % run).clamp(min=0).to(model.device)
    slots = slots.to(model.device).expand_as(ids)
    above = slots_above(model.layout).to(model.device)
    around = surroundings(features, ids, model.token_table().float(), above, starts, slots)
    guess = head(around, slots - starts).to(model.dtype)
    p = model.head(features.to(model.dtype)).float().softmax(-1)
    guessed = model.head(guess).float().log_softmax(-1)
    free = (torch.tensor(model.layout.forced, device=model.device) < 0).float()
    return {"loss": -((p * guessed).sum(-1) * free).sum() / (free.sum() * len(ids))}


KINDS: dict[HeadName, HeadKind] = {
    "eagle": HeadKind(untrained_eagle, eagle_losses, save_head, head_for, alignment),
    "eagle3": HeadKind(untrained_eagle3, _eagle3_losses, save_head, eagle3_head_for, alignment),
    "vertical": HeadKind(
        lambda model, seed: new_vertical_head(model.feature_size, vertical_hidden(model.feature_size), seed),
        _vertical_losses,
        save_vertical_head,
        vertical_head_for,
        vertical_alignment,
    ),
}


def head_name(typed: str) -> HeadName:
    """Return the kind of draft head that a user typed. Raise a SpecbenchError if it is unknown."""
    return read_name("kind of draft head", typed, KINDS)
