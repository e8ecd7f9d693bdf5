"""Train the autoregressive network on token shards.

The loss is cross-entropy, weighted by a token's position and already emitted neighbours, plus two
auxiliary tasks on a middle layer, whose weights are not shipped: the shape and color of the next object in raster
order, and the number of objects that have not started yet. A tenth of the captions is dropped for guidance.
No scene is repeated. Matrix products run in bfloat16, the weights stay in float32.
The schedule counts samples, so a paused run continues where it was; averaged weights are evaluated and shipped.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AttentionInterface

from dev.shapes.data import SHARD, Shard, shard_file, write_shard
from dev.shapes.muon import Muon
from dev.shapes.resumable import stop_signals
from dev.shapes.sample import detector_scores, held_out_requests, sample_images
from specbench.models.shapes import captions
from specbench.models.shapes.network import ShapesNetwork
from specbench.models.shapes.scene import COLORS, LATTICE, MAX_COUNT, RELATIONS, SHAPES
from specbench.models.shapes.tokenizer import GRID, PATCH, TOKENS, ShapesTokenizer

AUX_LAYER = 4
DROPPED = 0.1
ATTENTION_BLOCKS = 2
HELD_OUT_SHARD = 1_000_000
NOTHING = -100
RELATION_IDS = torch.tensor([captions.WORD_ID[name] for name in RELATIONS])


@dataclass(frozen=True)
class TrainingPlan:
    """The hyper-parameters of a run.

    Attributes:
        samples: training length; the learning rate falls linearly over the last `decay` share of it.
        warmup: samples over which the learning rate rises, at the start and after `resume_from`.
        object_weight: loss weight of a token next to an emitted object token.
        corner_weight: loss weight of other tokens at which an object can start.
        noise_weight: loss weight of other tokens next to an emitted token of noisy background.
        aux: weight of the auxiliary losses; falls with the learning rate, to a tenth.
        relation_weight: weight of a wording with a relation; a wording of the same scene without a relation has 1.
        pair_weight: weight of a scene of two different objects; another scene has 1. Unless it is 1, some scenes are
            drawn twice and some never.
        beside_weight: factor on pair_weight if one token row shows both objects.
        triple_weight: weight of a scene of three different objects; one object or several equal objects have 1.
        average: decay of the averaged weights, per step.
        evaluate_every, prompts: samples between detector scores, and captions per score.
    """

    samples: int = 800_000
    batch: int = 16
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 800
    decay: float = 0.33
    object_weight: float = 4.0
    corner_weight: float = 2.0
    noise_weight: float = 0.5
    aux: float = 0.3
    relation_weight: float = 3.0
    pair_weight: float = 1.0
    beside_weight: float = 1.0
    triple_weight: float = 1.0
    average: float = 0.998
    evaluate_every: int = 16_384
    prompts: int = 96
    seed: int = 0


class Auxiliary(nn.Module):
    """Linear read-outs of a middle layer, used in training only."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.sizes = (len(SHAPES), len(COLORS), MAX_COUNT + 1)
        self.heads = nn.Linear(width, sum(self.sizes))

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean cross-entropy of hidden [B, 256, d] against targets [3, B, 256], `NOTHING` where undefined."""
        parts = self.heads(self.norm(hidden)).split(self.sizes, dim=-1)
        pairs = zip(parts, targets, strict=True)
        return sum(F.cross_entropy(p.float().flatten(0, 1), t.flatten(), ignore_index=NOTHING) for p, t in pairs)


def auxiliary_targets(owner: Tensor, shape: Tensor, color: Tensor) -> Tensor:
    """Future at each token: [3, B, 256] shape and color of the next object, and number of objects not yet started.

    Args:
        owner: [B, 256] 1 + object index, 0 for background.
        shape, color: [B, 4] attributes of the objects.
    """
    at = torch.arange(TOKENS, device=owner.device).expand_as(owner)
    upcoming = torch.where(owner > 0, at, TOKENS).flip(1).cummin(1).values.flip(1)
    which = owner.gather(1, upcoming.clamp(max=TOKENS - 1)).long()
    is_there = upcoming < TOKENS
    index = (which - 1).clamp(min=0)
    attributes = [torch.where(is_there, table.long().gather(1, index), NOTHING) for table in (shape, color)]
    first = torch.stack([torch.where(owner == k + 1, at, TOKENS).amin(1) for k in range(MAX_COUNT)], 1)
    first = torch.where(first == TOKENS, -1, first)
    remaining = (first[:, :, None] >= at[:, None]).sum(1)
    return torch.stack([*attributes, remaining])


def loss_weights(owner: Tensor, noisy: Tensor, plan: TrainingPlan) -> Tensor:
    """Loss weight of each token [B, 256]. It depends on the position and on emitted neighbours alone, never on the
    token itself, so the minimum of the loss stays the true distribution.

    Args:
        owner: [B, 256] 1 + object index, 0 for background.
        noisy: [B, 256] whether a token shows noisy background.
    """
    weights = torch.where(_near(noisy), plan.noise_weight, 1.0)
    step = LATTICE // PATCH
    weights.view(-1, GRID, GRID)[:, ::step, ::step] = plan.corner_weight
    return torch.where(_near(owner > 0), plan.object_weight, weights)


def _near(flags: Tensor) -> Tensor:
    """Whether the left, upper left, upper or upper right neighbour of a token has the flag, bool [B, 256]."""
    grid = F.pad(flags.view(-1, GRID, GRID), (1, 1, 1, 0))
    left, above = grid[:, 1:, :GRID], grid[:, :GRID, 1 : GRID + 1]
    above_left, above_right = grid[:, :GRID, :GRID], grid[:, :GRID, 2:]
    return (left | above | above_left | above_right).reshape(-1, TOKENS)


def blocked_attention(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask, scaling: float, **_):
    """Causal attention in blocks of queries, each with the keys up to its end; half of the square is not computed.

    On a CPU in bfloat16 this is faster than `scaled_dot_product_attention`.
    """
    length = query.shape[2]
    size = -(-length // ATTENTION_BLOCKS)
    outputs = []
    for start in range(0, length, size):
        end = min(start + size, length)
        scores = query[:, :, start:end] @ key[:, :, :end].mT * scaling
        hidden = torch.ones(end - start, end, dtype=torch.bool, device=query.device).triu(start + 1)
        weights = scores.float().masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(weights.to(value.dtype) @ value[:, :, :end])
    return torch.cat(outputs, 2).transpose(1, 2), None


AttentionInterface.register("causal_blocks", blocked_attention)


def hidden_states(network: ShapesNetwork, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Final and `AUX_LAYER` hidden states [B, 256, d] that predict tokens [B, 256]; like `LlamaModel`, but no mask
    is constructed, so that the compiler gets one whole graph."""
    llama = network.llama
    hidden = network.inputs(ids, tokens)
    places = torch.arange(hidden.shape[1], device=hidden.device)[None]
    rotary = llama.rotary_emb(hidden, places)
    middle = hidden
    for index, layer in enumerate(llama.layers):
        hidden = layer(hidden, attention_mask=None, position_embeddings=rotary)
        if index + 1 == AUX_LAYER:
            middle = hidden
    start = network.prefix - 1
    return llama.norm(hidden)[:, start:], middle[:, start:]


def ar_losses(
    network: ShapesNetwork, auxiliary: Auxiliary, ids: Tensor, tokens: Tensor, weights: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Weighted cross-entropy, auxiliary loss, and plain cross-entropy per token."""
    final, middle = hidden_states(network, ids, tokens)
    nll = F.cross_entropy(network.head(final).float().flatten(0, 1), tokens.flatten(), reduction="none")
    return (nll * weights.flatten()).mean(), auxiliary(middle, targets), nll.detach().mean()


def scene_order(shard: Shard, plan: TrainingPlan, generator: torch.Generator) -> Tensor:
    """Rows of a shard in the order of training, int [N]: each once if all weigh alike, else drawn by weight."""
    if plan.pair_weight == plan.beside_weight == plan.triple_weight == 1:
        return torch.randperm(len(shard.tokens), generator=generator)
    objects = shard.owner.amax(1)
    kind = shard.shape.long() * len(COLORS) + shard.color.long()
    alike = (kind[:, 0] == kind[:, 1]) & ((objects == 2) | (kind[:, 0] == kind[:, 2]))
    rows = shard.owner.view(len(alike), GRID, GRID)
    beside = ((rows == 1).any(-1) & (rows == 2).any(-1)).any(-1)
    pair = torch.where(beside, plan.pair_weight * plan.beside_weight, plan.pair_weight)
    weights = torch.where((objects == 2) & ~alike, pair, 1.0)
    weights = torch.where((objects == 3) & ~alike, plan.triple_weight, weights)
    return torch.multinomial(weights, len(weights), replacement=True, generator=generator)


def saved_sizes(out: Path, resume_from: Path | None) -> dict | None:
    """Sizes of the network in a run's checkpoint, or else in an exported state; None if neither has them."""
    if (out / "ar.pt").exists():
        return torch.load(out / "ar.pt", map_location="cpu", weights_only=True).get("sizes")
    return json.loads((resume_from / "state.json").read_text()).get("sizes") if resume_from else None


class Trainer:
    """A run in a folder: shards, checkpoint, `ar.jsonl` log. The constructor loads the checkpoint if it exists.

    Args:
        out: folder of the run.
        resume_from: folder written by `export_state`, used if `out` has no checkpoint yet. It has no state of the
            optimizers, so the learning rate rises again from the start.
    """

    def __init__(
        self,
        out: Path,
        tokenizer: ShapesTokenizer,
        plan: TrainingPlan,
        device: str = "cpu",
        compiled: bool = True,
        resume_from: Path | None = None,
    ):
        self.out, self.tokenizer, self.plan, self.device = out, tokenizer, plan, device
        torch.manual_seed(plan.seed)
        sizes = saved_sizes(out, resume_from) or {"codes": tokenizer.codebook.shape[0]}
        self.network = ShapesNetwork(**sizes).to(device)
        self.auxiliary = Auxiliary(self.network.config["width"]).to(device)
        self.averaged = ShapesNetwork(**self.network.config).to(device).eval().requires_grad_(False)
        self.averaged.load_state_dict(self.network.state_dict())
        self.network.llama.set_attn_implementation("causal_blocks")
        self.losses = torch.compile(ar_losses, dynamic=False) if compiled else ar_losses
        blocks = [p for p in self.network.llama.layers.parameters() if p.ndim == 2]
        inside = {id(p) for p in blocks}
        rest = [p for m in (self.network, self.auxiliary) for p in m.parameters() if id(p) not in inside]
        self.optimizers = [
            Muon(blocks, lr=plan.muon_lr),
            torch.optim.AdamW(rest, lr=plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True),
        ]
        self.samples, self.cpu_s, self.started = 0, 0.0, 0
        self.rng = torch.Generator().manual_seed(plan.seed + 1)
        self.shard_index, self.shard = -1, None
        if (out / "ar.pt").exists():
            self.resume()
        elif resume_from:
            self.import_state(resume_from)

    def resume(self) -> None:
        state = torch.load(self.out / "ar.pt", map_location=self.device, weights_only=True)
        for name in ("network", "auxiliary", "averaged"):
            getattr(self, name).load_state_dict(state[name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.set_state(state["rng"].cpu())
        self.samples, self.cpu_s, self.started = state["samples"], state["cpu_s"], state["started"]

    def checkpoint(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("network", "auxiliary", "averaged")}
        state["optimizers"] = [o.state_dict() for o in self.optimizers]
        state["sizes"] = self.network.config
        state |= {"rng": self.rng.get_state(), "samples": self.samples, "cpu_s": self.cpu_s, "started": self.started}
        torch.save(state, self.out / "ar.pt.part")
        (self.out / "ar.pt.part").rename(self.out / "ar.pt")

    def export_state(self, folder: Path) -> None:
        """Write raw weights (bfloat16), averaged weights and auxiliary heads (float16), and the position in the run, as
        `resume_from` needs them."""
        folder.mkdir(parents=True, exist_ok=True)
        for name, dtype in (("network", torch.bfloat16), ("averaged", torch.float16), ("auxiliary", torch.float16)):
            state = {key: value.to(dtype).contiguous() for key, value in getattr(self, name).state_dict().items()}
            save_file(state, folder / f"{name}.safetensors", metadata={"format": "pt"})
        place = {"samples": self.samples, "cpu_s": round(self.cpu_s), "sizes": self.network.config}
        (folder / "state.json").write_text(json.dumps(place) + "\n")

    def import_state(self, folder: Path) -> None:
        for name in ("network", "averaged", "auxiliary"):
            getattr(self, name).load_state_dict(load_file(folder / f"{name}.safetensors"), strict=True)
        place = json.loads((folder / "state.json").read_text())
        self.samples = self.started = place["samples"]
        self.cpu_s = float(place["cpu_s"])

    def load_shard(self, index: int) -> Shard:
        path = shard_file(self.out, index)
        if not path.exists():
            write_shard(self.out, index, self.tokenizer, self.device)
        return Shard.load(path)

    def batch(self) -> tuple[Tensor, ...]:
        """The next ids, tokens, loss weights and auxiliary targets."""
        lap, within = divmod(self.samples, SHARD)
        if lap != self.shard_index:
            self.shard_index, self.shard = lap, self.load_shard(lap)
            order = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + lap)
            self.order = scene_order(self.shard, self.plan, order)
        rows = self.order[within : within + self.plan.batch]
        related = torch.isin(self.shard.ids[rows], RELATION_IDS).any(-1)
        preference = torch.where(related, self.plan.relation_weight, 1.0)
        wording = torch.multinomial(preference, 1, generator=self.rng)[:, 0]
        ids = self.shard.ids[rows, wording].long()
        dropped = torch.rand(len(rows), generator=self.rng) < DROPPED
        ids[dropped] = torch.tensor(captions.null_caption())
        shard = self.shard
        weights = loss_weights(shard.owner[rows], shard.noisy[rows], self.plan)
        targets = auxiliary_targets(shard.owner[rows], shard.shape[rows], shard.color[rows])
        return tuple(p.to(self.device) for p in (ids, shard.tokens[rows].long(), weights, targets))

    def rate(self) -> float:
        """Learning rate as a share of its peak."""
        rise = (self.samples - self.started + self.plan.batch) / self.plan.warmup
        fall = (1 - self.samples / self.plan.samples) / self.plan.decay
        return max(0.01, min(1.0, rise, fall))

    def step(self) -> dict[str, float]:
        """One optimizer step."""
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            weighted, aux, nll = self.losses(self.network, self.auxiliary, *self.batch())
        rate = self.rate()
        loss = weighted + self.plan.aux * max(0.1, rate) * aux
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        for optimizer, peak in zip(self.optimizers, (self.plan.muon_lr, self.plan.adam_lr), strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
            optimizer.step()
        self.samples += self.plan.batch
        steps = self.samples / self.plan.batch
        keep = min(self.plan.average, steps / (steps + 10))
        with torch.no_grad():
            torch._foreach_lerp_(list(self.averaged.parameters()), list(self.network.parameters()), 1 - keep)
        return {"nll": nll, "weighted": weighted.detach(), "aux": aux.detach()}

    @torch.inference_mode()
    def held_out(self, rows: int = 128) -> dict[str, float]:
        """On held-out images, with the averaged weights: nats per token, share of tokens whose top-1 probability is
        below 5 %, mean entropy, and `gain`, nats per image by which the true caption beats the empty caption."""
        shard = self.load_shard(HELD_OUT_SHARD)
        ids, tokens = shard.ids[:rows, 0].long().to(self.device), shard.tokens[:rows].long().to(self.device)
        network = self.averaged
        logp, lognull = (
            torch.cat([network(i, t).log_softmax(-1) for i, t in zip(c.split(16), tokens.split(16), strict=True)])
            for c in (ids, network.null_ids(rows))
        )
        picked = [p.gather(2, tokens[..., None])[..., 0] for p in (logp, lognull)]
        return {
            "held_out_nll": float(-picked[0].mean()),
            "gain": float((picked[0] - picked[1]).sum(1).mean()),
            "top1_below_5": float((logp.amax(-1).exp() < 0.05).float().mean()),
            "entropy": float(-(logp.exp() * logp).sum(-1).mean()),
        }

    def evaluate(self) -> dict[str, float]:
        """Held-out numbers and the detector's score of sampled images."""
        requests = held_out_requests(self.plan.prompts, seed=11)
        texts = [captions.caption(r) for r in requests]
        _, images = sample_images(self.averaged, self.tokenizer, texts, seed=self.plan.seed, batch=len(texts))
        return {k: round(v, 4) for k, v in self.held_out().items()} | detector_scores(requests, images)

    def log(self, row: dict) -> None:
        with open(self.out / "ar.jsonl", "a") as log:
            log.write(json.dumps({"samples": self.samples, "cpu_s": round(self.cpu_s), **row}) + "\n")

    def run(self) -> bool:
        """Train to the end of the plan, or to SIGTERM or Ctrl-C, with everything saved; return whether it is done."""
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "samples", TimeRemainingColumn())
        with stop_signals() as stopped, Progress(*columns, refresh_per_second=0.2) as progress:
            bar = progress.add_task("ar", total=self.plan.samples, completed=self.samples)
            sums, count = dict.fromkeys(("nll", "weighted", "aux"), 0.0), 0
            while self.samples < self.plan.samples and not stopped:
                began = time.process_time()
                parts = self.step()
                sums, count = {k: sums[k] + float(v) for k, v in parts.items()}, count + 1
                self.cpu_s += time.process_time() - began
                progress.update(bar, completed=self.samples)
                if self.samples % 1024 < self.plan.batch:
                    self.log({"lr": round(self.rate(), 4)} | {k: round(v / count, 4) for k, v in sums.items()})
                    sums, count = dict.fromkeys(sums, 0.0), 0
                if self.samples % self.plan.evaluate_every < self.plan.batch or self.samples >= self.plan.samples:
                    self.checkpoint()
                    self.log(self.evaluate())
            self.checkpoint()
        return self.samples >= self.plan.samples
