"""Planned against peak memory."""

import torch
from memory import peak, predicted

from parts.claims import Outcome, claim
from parts.scales import GIB, Scale, has_graphs
from specbench.models.catalog import find_model, load_model
from specbench.models.facts import ModelChoice
from specbench.models.hub_model import HubModel
from specbench.specs.presets import DecoderSpec, resolve
from specbench.specs.run_spec import Sampling


def memory(device: str, scale: Scale) -> Outcome:
    """Compare the planned bytes with the bytes of live tensors, and on a GPU with the allocator's peak."""
    rows = []
    for name in scale.memory:
        info = find_model(name)
        info = info.configured(ModelChoice(random=True)) if isinstance(info, HubModel) else info
        model, sampling = load_model(info, device), info.sampling()
        for decoder in ("ar", "sjd", "gsd") if has_graphs(device) else ("ar",):
            rows.append(_remembered(info, model, resolve(decoder), sampling, device))
        del model
    return memory_claims(rows), rows


def memory_claims(rows: list[dict]) -> list[dict[str, object]]:
    """Claims on the planned memory."""
    claims = []
    for row in rows:
        share = row["planned"] / row["live"]
        value = f"{share:.2f} ({row['live'] / GIB:.3f} GiB of tensors, {row['allocated'] / GIB:.3f} by the allocator)"
        goal, within = "at least 0.95", share >= 0.95
        if row["model"] == "shapes":
            goal, within = "0.9 to 1.1", 0.9 <= share <= 1.1
        claims.append(claim(f"{row['model']}, {row['decoder']}: planned over peak", value, goal, within))
    return claims


def _remembered(info, model, decoder: DecoderSpec, sampling: Sampling, device: str) -> dict[str, object]:
    before = 0
    if has_graphs(device):
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    live = peak(model, decoder, sampling, 1)
    allocated = torch.cuda.max_memory_allocated(device) - before if has_graphs(device) else 0
    planned = predicted(info, decoder, sampling, 1, info.dtype, device)["besides"]
    return {"model": info.name, "decoder": decoder.name, "live": live, "allocated": allocated, "planned": planned}
