"""Measure how well cheaper forwards of the target would draft: the overlap 1 - TV(p, q) along given images.

    python dev/frontier/sources.py --images 24 --out results/frontier/sources.json

The overlap is the probability that a draft from q is accepted after true tokens. Sources: the forward without guidance
(half the rows), the first layers of the network followed by its norm and head, and a cache of the prompt and the last
rows only. `cost` is the share of the target's weights that a draft reads, and `rows` the share of its rows. `gain` is
the best number of tokens per unit of time, over the length k of a chain of such drafts, relative to AR, if only the
reading of weights takes time: (1 - a^(k + 1)) / (1 - a) / (1 + k cost).
"""

import argparse
import json
from pathlib import Path

import torch
from torch import Tensor

from specbench.decoding.sampling import Target
from specbench.models.catalog import find_model, load_model
from specbench.models.shapes.adapter import ShapesModel
from specbench.specs.run_spec import Sampling
from specbench.training.data import corpus

LONGEST = 32
KEPT_ROWS = (1, 2, 4)


@torch.inference_mode()
def overlaps(model: ShapesModel, sampling: Sampling, images: int) -> list[dict[str, object]]:
    """One row per source, on `images` images that the draft heads were not trained on."""
    examples = corpus(model, images, 10**6, None)
    prefix, network = model.encode(examples.texts), model.backbone
    tokens = torch.cat([examples.tokens, examples.tokens])
    slots = torch.arange(1, tokens.shape[1]).expand(len(tokens), -1)
    stream = model.embed(tokens[:, :-1], slots, prefix.state)
    inputs = torch.cat([torch.stack(list(prefix.embeds)), stream], dim=1)
    first, target = len(prefix.embeds[0]) - 1, Target(model.layout, sampling, model.device)
    positions = torch.arange(tokens.shape[1]).expand(images, -1)

    def guided(hidden: Tensor, guidance: float) -> Tensor:
        with_caption, without = model.head(hidden[:, first:]).float().chunk(2)
        return target(without + guidance * (with_caption - without), positions)

    def overlap(q: Tensor) -> float:
        return float(torch.minimum(p, q).sum(-1).mean())

    whole = network(inputs_embeds=inputs, use_cache=False, output_hidden_states=True)
    p, layers = guided(whole.last_hidden_state, sampling.guidance), len(network.layers)
    sources = [("without guidance", overlap(guided(whole.last_hidden_state, 1.0)), 1.0, 0.5)]
    for layer in range(1, layers):
        hidden = network.norm(whole.hidden_states[layer])
        sources.append(
            (f"first {layer} of {layers} layers", overlap(guided(hidden, sampling.guidance)), layer / layers, 1)
        )
    places = torch.arange(inputs.shape[1])
    for rows in KEPT_ROWS:
        near = places[:, None] - places < rows * model.layout.width
        mask = ((places <= places[:, None]) & (near | (places <= first)))[None, None]
        hidden = network(inputs_embeds=inputs, attention_mask=mask, use_cache=False).last_hidden_state
        sources.append((f"prompt and last {rows} rows", overlap(guided(hidden, sampling.guidance)), 1.0, 1))
    return [
        {"source": name, "overlap": round(a, 4), "cost": round(cost, 3), "rows": rows, "gain": round(gain(a, cost), 3)}
        for name, a, cost, rows in sources
    ]


def gain(accepted: float, cost: float) -> float:
    """Tokens per unit of time of the best chain of 0 to LONGEST drafts, relative to AR."""
    tokens = [sum(accepted**length for length in range(k + 1)) for k in range(LONGEST + 1)]
    return max(count / (1 + k * cost) for k, count in enumerate(tokens))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=24)
    parser.add_argument("--out", type=Path, default=Path("results/frontier/sources.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    model = load_model("shapes")
    rows = overlaps(model, find_model("shapes").sampling(), options.images)
    content = {"images": options.images, "weights_sha256": model.weights_sha256, "sources": rows}
    options.out.write_text(json.dumps(content, indent=1) + "\n")
    for row in rows:
        print(*row.values(), sep="\t")


if __name__ == "__main__":
    main()
