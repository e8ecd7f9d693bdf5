"""Plain autoregressive sampling with a KV cache, and the detector's score of the images."""

from collections import defaultdict

import numpy as np
import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

from specbench.decoding.sampling import truncate
from specbench.models.shapes import captions
from specbench.models.shapes.captions import PREFIX
from specbench.models.shapes.detector import detect, judge
from specbench.models.shapes.network import ShapesNetwork
from specbench.models.shapes.scene import CATEGORIES, SceneRequest, describe, realize, sample_request
from specbench.models.shapes.tokenizer import TOKENS, ShapesTokenizer
from specbench.specs.run_spec import Sampling

TRIAL = Sampling(guidance=3.0, top_k=256)
"""Sampling of the trials during training: equal for all weights, and harder than the default sampling."""


class FullLengthLayer(DynamicLayer):
    """KV cache of a layer, allocated once for a whole image."""

    def update(self, key_states: Tensor, value_states: Tensor, *_, **__) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            rows, heads, _, width = key_states.shape
            self.stored = key_states.new_empty(2, rows, heads, PREFIX + TOKENS, width)
            self.keys, self.values = self.stored[:, :, :, :0]
        start = self.keys.shape[2]
        end = start + key_states.shape[2]
        self.stored[0, :, :, start:end], self.stored[1, :, :, start:end] = key_states, value_states
        self.keys, self.values = self.stored[:, :, :, :end]
        return self.keys, self.values


@torch.inference_mode()
def sample(
    network: ShapesNetwork,
    ids: Tensor,
    generator: torch.Generator,
    sampling: Sampling = TRIAL,
) -> Tensor:
    """Image tokens [R, 256] for captions [R, 16], drawn one by one under classifier-free guidance."""
    rows = len(ids)
    both = torch.cat([ids, network.null_ids(rows)])
    slot_embeds = network.slot_embeds(both)
    cache = Cache(layer_class_to_replicate=FullLengthLayer)
    embeds = network.prefix_embeds(both)
    tokens = torch.empty(rows, TOKENS, dtype=torch.long, device=ids.device)
    for position in range(TOKENS):
        hidden = network.llama(inputs_embeds=embeds, past_key_values=cache, use_cache=True).last_hidden_state[:, -1]
        with_caption, without = network.head(hidden).float().chunk(2)
        logits = truncate(without + sampling.guidance * (with_caption - without), sampling)
        tokens[:, position : position + 1] = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        last = tokens[:, position : position + 1].repeat(2, 1)
        embeds = network.token_embeds(last, torch.full_like(last, position + 1), slot_embeds)
    return tokens


def held_out_requests(count: int, seed: int) -> list[SceneRequest]:
    """Held-out requests, equally many of each GenEval category up to the count."""
    rng = np.random.default_rng(seed)
    left = {name: count // len(CATEGORIES) for name in CATEGORIES}
    requests = []
    while sum(left.values()):
        request = describe(realize(sample_request(rng), rng), rng)
        if request.held_out() and left.get(request.category, 0):
            left[request.category] -= 1
            requests.append(request)
    return requests


def detector_scores(requests: list[SceneRequest], images: Tensor) -> dict[str, float]:
    """Shares of correct images (uint8 [N, 3, 64, 64]): overall (mean of the categories), per category, per tag,
    and overall against the captions shifted by a third of the list (`shuffled`)."""
    seen = [detect(image.permute(1, 2, 0).numpy()) for image in images.cpu()]
    shares, shuffled = defaultdict(list), defaultdict(list)
    for index, request in enumerate(requests):
        verdict = judge(request, seen[index])
        shares[request.category].append(verdict.correct)
        for tag in ("shape", "color", "bound", "position"):
            if getattr(verdict, tag) is not None:
                shares[f"tag_{tag}"].append(getattr(verdict, tag))
        other = seen[(index + len(seen) // 3) % len(seen)]
        shuffled[request.category].append(judge(request, other).correct)
    means = {name: round(float(np.mean(values)), 4) for name, values in sorted(shares.items())}
    overall = float(np.mean([m for name, m in means.items() if not name.startswith("tag_")]))
    chance = float(np.mean([np.mean(v) for v in shuffled.values()]))
    return {"overall": round(overall, 4), **means, "shuffled": round(chance, 4)}


def sample_images(
    network: ShapesNetwork,
    tokenizer: ShapesTokenizer,
    texts: list[str],
    seed: int = 0,
    batch: int = 64,
    sampling: Sampling = TRIAL,
) -> tuple[Tensor, Tensor]:
    """Tokens [N, 256] and images uint8 [N, 3, 64, 64] for captions; the draws depend on seed, batch and order."""
    generator = torch.Generator(network.device).manual_seed(seed)
    ids = torch.tensor([captions.encode(t) for t in texts], device=network.device)
    tokens = torch.cat([sample(network, part, generator, sampling) for part in ids.split(batch)])
    return tokens, torch.cat([tokenizer.decode(part) for part in tokens.split(batch)])
