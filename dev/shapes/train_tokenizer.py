"""Train the VQ tokenizer: reconstruction and commitment losses, a codebook of moving averages."""

import math
from functools import cached_property
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from dev.shapes.data import render_batch
from dev.shapes.resumable import train
from specbench.models.shapes.tokenizer import ShapesTokenizer, to_float

LEARNING_RATE = 2e-3
_BATCH = 32
_IMAGES = 16_000
STEPS = 1600
WARMUP = 100
CODEBOOK_START = 150
DECAY = 0.98
RESTART_EVERY = 50


class Codebook:
    """Moving averages of the latents assigned to each code; unused codes restart at random latents."""

    def __init__(self, model: ShapesTokenizer):
        self.model = model
        self.counts = torch.ones(model.codebook.shape[0], device=model.codebook.device)
        self.sums = model.codebook.clone()
        self.use = torch.zeros_like(self.counts)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages, and the random state of the CPU, from which restarts are drawn on a CPU."""
        return {"counts": self.counts, "sums": self.sums, "use": self.use, "random": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self.counts, self.sums, self.use = (state[name].to(self.counts.device) for name in ("counts", "sums", "use"))
        torch.set_rng_state(state["random"])

    @torch.no_grad()
    def start(self, flat: Tensor) -> None:
        """A few k-means rounds over latents [N, dim]."""
        codes = flat[torch.randperm(len(flat), device=flat.device)[: len(self.counts)]].clone()
        for _ in range(8):
            ids = (flat @ codes.T - 0.5 * codes.square().sum(1)).argmax(1)
            counts = torch.bincount(ids, minlength=len(codes)).float()
            sums = torch.zeros_like(codes).index_add_(0, ids, flat)
            fresh = flat[torch.randint(len(flat), (len(codes),), device=flat.device)]
            codes = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], fresh)
        self.counts, self.sums = torch.full_like(self.counts, 4.0), codes * 4
        self.model.codebook.copy_(codes)

    @torch.no_grad()
    def update(self, flat: Tensor, ids: Tensor, restart: bool) -> None:
        """Move the codes towards the latents [N, dim] that chose them."""
        counts = torch.bincount(ids, minlength=len(self.counts)).float()
        self.counts.mul_(DECAY).add_(counts, alpha=1 - DECAY)
        self.sums.mul_(DECAY).add_(torch.zeros_like(self.sums).index_add_(0, ids, flat), alpha=1 - DECAY)
        self.use += counts
        if restart:
            dead = self.use < 2
            fresh = flat[torch.randint(len(flat), (int(dead.sum()),), device=flat.device)]
            self.counts[dead], self.sums[dead] = 0.5, 0.5 * fresh
            self.use.zero_()
        self.model.codebook.copy_(self.sums / self.counts.clamp(min=1e-4)[:, None])


def tokenizer_losses(model: ShapesTokenizer, images: Tensor, masks: Tensor, quantize: bool) -> tuple[Tensor, ...]:
    """Total loss, mean squared error, latents [N, dim] and ids [N] of a batch.

    Objects weigh three times the background, and errors of image gradients count, so that outlines stay sharp.
    """
    target = to_float(images)
    latents = model.latents(images)
    ids = model.nearest(latents.detach())
    chosen = model.quantized(ids)
    used = latents + (chosen - latents).detach() if quantize else latents
    with torch.autocast(images.device.type, torch.bfloat16):
        output = model.decoder(used).float()
    weight = (1 + 2 * masks)[:, None]
    error = (output - target) * weight.sqrt()
    edges = sum(((output - target).diff(dim=d) * weight.narrow(d, 1, 63)).abs().mean() for d in (2, 3))
    loss = error.abs().mean() + 4 * error.square().mean() + 0.5 * edges
    if quantize:
        loss = loss + 0.25 * F.mse_loss(latents, chosen.detach())
    flat = latents.detach().permute(0, 2, 3, 1).reshape(-1, latents.shape[1])
    return loss, (output - target).square().mean().detach(), flat, ids.reshape(-1)


class TokenizerTrainer:
    """Training steps. The batch of a step depends only on the seed and the step's number."""

    def __init__(self, steps: int, seed: int, device: str):
        torch.manual_seed(seed)
        self.steps, self.seed, self.device = steps, seed, device
        self.model = ShapesTokenizer().to(device, memory_format=torch.channels_last)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda s: learning_rate(s, steps))
        self.codebook = Codebook(self.model)

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        """Pictures, and which pixels show an object or its card."""
        return render_batch(_IMAGES, self.seed + 1)

    def step(self, number: int) -> dict[str, float]:
        images, masks = self.data
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        rows = torch.randint(len(images), (_BATCH,), generator=generator)
        pixels, mask = images[rows].to(self.device), masks[rows].to(self.device).float()
        quantize = number >= CODEBOOK_START
        if number == CODEBOOK_START:
            with torch.no_grad():
                latents = self.model.latents(images[:256].to(self.device))
            self.codebook.start(latents.permute(0, 2, 3, 1).reshape(-1, latents.shape[1]))
        loss, mse, flat, ids = tokenizer_losses(self.model, pixels, mask, quantize)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        if quantize:
            self.codebook.update(flat, ids, restart=number % RESTART_EVERY == 0 and number < 0.8 * self.steps)
        return {"loss": loss.item(), "psnr_db": -10 * math.log10(mse.item() / 4)}


def train_tokenizer(out: Path, steps: int = STEPS, seed: int = 0, device: str = "cpu") -> ShapesTokenizer | None:
    """Train, or continue the checkpoint in `out`; return the tokenizer after the last step, otherwise None."""
    out.mkdir(parents=True, exist_ok=True)
    trainer = TokenizerTrainer(steps, seed, device)
    parts = {
        "model": trainer.model,
        "optimizer": trainer.optimizer,
        "schedule": trainer.schedule,
        "codebook": trainer.codebook,
    }
    return trainer.model if train(out, "tokenizer", parts, steps, trainer.step) else None


def learning_rate(step: int, steps: int) -> float:
    """Warm-up, then a straight line to 2 % of the peak."""
    return min((step + 1) / WARMUP, 0.02 + 0.98 * (1 - step / steps))
