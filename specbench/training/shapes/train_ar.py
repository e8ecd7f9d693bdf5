"""Trains the autoregressive network on token shards.

The loss is cross-entropy, weighted more where a token's already emitted neighbours belong to an object, plus two
auxiliary tasks read from a middle layer, absent from the shipped weights: the shape and color of the next object in
raster order, and how many objects have yet to start. A tenth of the captions is dropped for guidance.
The schedule counts samples, so a paused run continues where it was; averaged weights are what is evaluated and shipped.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeRemainingColumn
from torch import Tensor, nn

from specbench.models.shapes import captions
from specbench.models.shapes.network import ShapesNetwork
from specbench.models.shapes.scene import COLORS, MAX_COUNT, SHAPES
from specbench.models.shapes.tokenizer import GRID, TOKENS, ShapesTokenizer
from specbench.training.shapes.data import SHARD, WORDINGS, Shard, make_shard
from specbench.training.shapes.muon import Muon
from specbench.training.shapes.resumable import stop_signals
from specbench.training.shapes.sample import held_out_requests, sample_images, score

AUX_LAYER = 4
DROPPED = 0.1
HELD_OUT_SHARD = 1_000_000
NOTHING = -100


@dataclass(frozen=True)
class Plan:
    """The hyper-parameters of a run.

    Attributes:
        samples: training length; the learning rate falls linearly over the last `decay` share of it.
        shards: different shards of 4096 scenes, then they repeat with other captions.
        easy_shards, plain: the first shards have this share of smooth backgrounds, so that objects are learnt first.
        context_weight: loss weight of a token next to an emitted object token.
        aux: weight of the auxiliary losses; falls with the learning rate, to a tenth.
        evaluate_every, prompts: samples between detector scores, and captions per score.
    """

    samples: int = 82_000
    batch: int = 16
    muon_lr: float = 0.02
    adam_lr: float = 3e-3
    warmup: int = 800
    decay: float = 0.5
    shards: int = 20
    easy_shards: int = 4
    plain: float = 0.7
    context_weight: float = 6.0
    aux: float = 0.3
    average: float = 0.996
    evaluate_every: int = 8192
    prompts: int = 48
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
        return sum(F.cross_entropy(p.flatten(0, 1), t.flatten(), ignore_index=NOTHING) for p, t in pairs)


def auxiliary_targets(owner: Tensor, shape: Tensor, color: Tensor) -> Tensor:
    """What is still to come at each token: [3, B, 256] shape and color of the next object, objects not yet started.

    Args:
        owner: [B, 256] 1 + object index, 0 for background.
        shape, color: [B, 4] attributes of the objects.
    """
    at = torch.arange(TOKENS, device=owner.device).expand_as(owner)
    upcoming = torch.where(owner > 0, at, TOKENS).flip(1).cummin(1).values.flip(1)
    which = owner.gather(1, upcoming.clamp(max=TOKENS - 1)).long()
    known = upcoming < TOKENS
    index = (which - 1).clamp(min=0)
    attributes = [torch.where(known, table.long().gather(1, index), NOTHING) for table in (shape, color)]
    first = torch.stack([torch.where(owner == k + 1, at, TOKENS).amin(1) for k in range(MAX_COUNT)], 1)
    first = torch.where(first == TOKENS, -1, first)
    remaining = (first[:, :, None] >= at[:, None]).sum(1)
    return torch.stack([*attributes, remaining])


def context_weights(owner: Tensor, weight: float) -> Tensor:
    """Loss weight of each token [B, 256]: `weight` where an emitted neighbour shows an object, else 1."""
    grid = F.pad((owner > 0).float().view(-1, GRID, GRID), (1, 1, 1, 0))
    left, above = grid[:, 1:, :GRID], grid[:, :GRID, 1 : GRID + 1]
    above_left, above_right = grid[:, :GRID, :GRID], grid[:, :GRID, 2:]
    near = torch.stack([left, above, above_left, above_right]).amax(0)
    return (1 + (weight - 1) * near).view(-1, TOKENS)


def hidden_states(network: ShapesNetwork, ids: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """Final and `AUX_LAYER` hidden states [B, 256, d] that predict tokens [B, 256]; as `LlamaModel`, without its mask
    construction, which keeps the graph whole for the compiler."""
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


class Trainer:
    """A run in a folder: shards, checkpoint, `ar.jsonl` log. Building it takes up the checkpoint if there is one."""

    def __init__(self, out: Path, tokenizer: ShapesTokenizer, plan: Plan, device: str = "cpu", compiled: bool = True):
        self.out, self.tokenizer, self.plan, self.device = out, tokenizer, plan, device
        torch.manual_seed(plan.seed)
        self.network = ShapesNetwork(codes=tokenizer.codebook.shape[0]).to(device)
        self.auxiliary = Auxiliary(self.network.config["width"]).to(device)
        self.averaged = ShapesNetwork(**self.network.config).to(device).eval().requires_grad_(False)
        self.averaged.load_state_dict(self.network.state_dict())
        self.forward = torch.compile(hidden_states, dynamic=False) if compiled else hidden_states
        blocks = [p for p in self.network.llama.layers.parameters() if p.ndim == 2]
        inside = {id(p) for p in blocks}
        rest = [p for m in (self.network, self.auxiliary) for p in m.parameters() if id(p) not in inside]
        self.optimizers = [
            Muon(blocks, lr=plan.muon_lr),
            torch.optim.AdamW(rest, lr=plan.adam_lr, betas=(0.9, 0.95), weight_decay=0.0, foreach=True),
        ]
        self.samples, self.cpu_s = 0, 0.0
        self.rng = torch.Generator().manual_seed(plan.seed + 1)
        self.shard_index, self.shard = -1, None
        if (out / "ar.pt").exists():
            self.resume()

    def resume(self) -> None:
        state = torch.load(self.out / "ar.pt", map_location=self.device, weights_only=True)
        for name in ("network", "auxiliary", "averaged"):
            getattr(self, name).load_state_dict(state[name])
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.rng.set_state(state["rng"].cpu())
        self.samples, self.cpu_s = state["samples"], state["cpu_s"]

    def checkpoint(self) -> None:
        state = {name: getattr(self, name).state_dict() for name in ("network", "auxiliary", "averaged")}
        state["optimizers"] = [o.state_dict() for o in self.optimizers]
        state |= {"rng": self.rng.get_state(), "samples": self.samples, "cpu_s": self.cpu_s}
        torch.save(state, self.out / "ar.pt.part")
        (self.out / "ar.pt.part").rename(self.out / "ar.pt")

    def load_shard(self, index: int) -> Shard:
        path = self.out / "shards" / f"{index:07d}.pt"
        if path.exists():
            return Shard.load(path)
        plain = self.plan.plain if index < self.plan.easy_shards else 0.0
        shard = make_shard(index, self.tokenizer, plain, device=self.device)
        path.parent.mkdir(exist_ok=True, parents=True)
        shard.save(path)
        return shard

    def batch(self) -> tuple[Tensor, ...]:
        """The next ids, tokens, owner, shape and color; every shard is walked through in a fresh order."""
        lap, within = divmod(self.samples, SHARD)
        if lap != self.shard_index:
            self.shard_index, self.shard = lap, self.load_shard(self.shard_for(lap))
            order = torch.Generator().manual_seed(self.plan.seed * 1_000_003 + lap)
            self.order = torch.randperm(SHARD, generator=order)
        rows = self.order[within : within + self.plan.batch]
        wording = torch.randint(WORDINGS, (len(rows),), generator=self.rng)
        ids = self.shard.ids[rows, wording].long()
        dropped = torch.rand(len(rows), generator=self.rng) < DROPPED
        ids[dropped] = torch.tensor(captions.null_caption())
        shard = self.shard
        parts = (ids, shard.tokens[rows].long(), shard.owner[rows], shard.shape[rows], shard.color[rows])
        return tuple(p.to(self.device) for p in parts)

    def shard_for(self, lap: int) -> int:
        """Shards in turn; once all were seen, the easy ones stay behind."""
        if lap < self.plan.shards:
            return lap
        return self.plan.easy_shards + (lap - self.plan.shards) % (self.plan.shards - self.plan.easy_shards)

    def rate(self) -> float:
        """Learning rate as a share of its peak."""
        left = 1 - self.samples / self.plan.samples
        return max(0.01, min(1.0, (self.samples + self.plan.batch) / self.plan.warmup, left / self.plan.decay))

    def step(self) -> dict[str, float]:
        """One optimizer step."""
        ids, tokens, owner, shape, color = self.batch()
        final, middle = self.forward(self.network, ids, tokens)
        logits = self.network.head(final)
        nll = F.cross_entropy(logits.transpose(1, 2), tokens, reduction="none")
        weights = context_weights(owner, self.plan.context_weight)
        aux = self.auxiliary(middle, auxiliary_targets(owner, shape, color))
        rate = self.rate()
        loss = (nll * weights).sum() / weights.sum() + self.plan.aux * max(0.1, rate) * aux
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
        return {"nll": nll.detach().mean(), "aux": aux.detach()}

    @torch.inference_mode()
    def held_out(self, rows: int = 128) -> dict[str, float]:
        """On held-out images, with the averaged weights: nats per token, share of tokens whose top-1 probability is
        below 5 %, mean entropy, and `gain`, the nats per image by which the true caption beats the null one."""
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
        return {k: round(v, 4) for k, v in self.held_out().items()} | score(requests, images)

    def log(self, row: dict) -> None:
        with open(self.out / "ar.jsonl", "a") as log:
            log.write(json.dumps({"samples": self.samples, "cpu_s": round(self.cpu_s), **row}) + "\n")

    def run(self) -> bool:
        """Train to the end of the plan, or to SIGTERM or Ctrl-C, with everything saved; whether it is the end."""
        columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "samples", TimeRemainingColumn())
        with stop_signals() as stopped, Progress(*columns, refresh_per_second=0.2) as progress:
            bar = progress.add_task("ar", total=self.plan.samples, completed=self.samples)
            sums, count = {"nll": 0.0, "aux": 0.0}, 0
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
