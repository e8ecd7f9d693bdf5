"""Trains the VQ tokenizer: reconstruction and commitment losses, a codebook of moving averages."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from rich.progress import track
from torch import Tensor

from ..tokenizer import ShapesTokenizer, to_float
from .data import render_batch

LEARNING_RATE = 2e-3
BATCH = 32
IMAGES = 16_000
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


def losses(model: ShapesTokenizer, images: Tensor, masks: Tensor, quantize: bool) -> tuple[Tensor, ...]:
    """Total loss, mean squared error, latents [N, dim] and ids [N] of a batch.

    Objects weigh three times the background, and gradients count, so that outlines stay sharp.
    """
    target = to_float(images)
    latents = model.latents(images)
    ids = model.nearest(latents.detach())
    chosen = model.quantized(ids)
    used = latents + (chosen - latents).detach() if quantize else latents
    output = model.decoder(used)
    weight = (1 + 2 * masks)[:, None]
    error = (output - target) * weight.sqrt()
    edges = sum(((output - target).diff(dim=d) * weight.narrow(d, 1, 63)).abs().mean() for d in (2, 3))
    loss = error.abs().mean() + 4 * error.square().mean() + 0.5 * edges
    if quantize:
        loss = loss + 0.25 * F.mse_loss(latents, chosen.detach())
    flat = latents.detach().permute(0, 2, 3, 1).reshape(-1, latents.shape[1])
    return loss, (output - target).square().mean().detach(), flat, ids.reshape(-1)


def train_tokenizer(out: Path, steps: int = 2400, seed: int = 0, device: str = "cpu") -> ShapesTokenizer:
    """Train a tokenizer, or take up the checkpoint in `out`; the log is `out/tokenizer.jsonl`."""
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    model = ShapesTokenizer().to(device, memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: learning_rate(s, steps))
    codebook = Codebook(model)
    checkpoint = out / "tokenizer.pt"
    first = 0
    if checkpoint.exists():
        state = torch.load(checkpoint, map_location=device)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        schedule.load_state_dict(state["schedule"])
        codebook.counts, codebook.sums, codebook.use = state["counts"], state["sums"], state["use"]
        first = state["step"]
    if first >= steps:
        return model
    data, masks = render_batch(IMAGES, seed + 1)
    spent = time.process_time()
    for step in track(range(first, steps), description="tokenizer"):
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
        rows = torch.randint(len(data), (BATCH,), generator=generator)
        pixels, mask = data[rows].to(device), masks[rows].to(device).float() / 255
        quantize = step >= CODEBOOK_START
        if step == CODEBOOK_START:
            with torch.no_grad():
                flat = model.latents(data[:256].to(device)).permute(0, 2, 3, 1).reshape(-1, model.codebook.shape[1])
            codebook.start(flat)
        loss, mse, flat, ids = losses(model, pixels, mask, quantize)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        if quantize:
            codebook.update(flat, ids, restart=step % RESTART_EVERY == 0 and step < 0.8 * steps)
        if step % 50 == 0 or step == steps - 1:
            row = {
                "step": step,
                "samples": (step + 1) * BATCH,
                "loss": round(loss.item(), 5),
                "psnr_db": round(-10 * math.log10(mse.item() / 4), 2),
                "cpu_s": round(time.process_time() - spent),
            }
            with open(out / "tokenizer.jsonl", "a") as log:
                log.write(json.dumps(row) + "\n")
        if step % 500 == 499 or step == steps - 1:
            modules = {"model": model, "optimizer": optimizer, "schedule": schedule}
            state = {name: module.state_dict() for name, module in modules.items()}
            state |= {"counts": codebook.counts, "sums": codebook.sums, "use": codebook.use, "step": step + 1}
            torch.save(state, checkpoint)
    return model


def learning_rate(step: int, steps: int) -> float:
    """Warm-up, then a straight line to 2 % of the peak."""
    return min((step + 1) / WARMUP, 0.02 + 0.98 * (1 - step / steps))
