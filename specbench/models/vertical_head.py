"""A vertical draft head: it predicts the token of a slot from the image row above and from the token before it.

After FlashAR (arXiv 2605.09430), whose heads run unverified. Let n tokens be committed, f_s the target's last hidden
state that predicts slot s, e the token embeddings and a the slot above s:

    x = [f_{a+1}; f_{a+2}; f_{n-1}; e(x_{s-1}); e(x_a); e(x_{a+1})]
    h = silu(mix x + depth_{s-n}),  f^_s = output(h + silu(inner h)),  logits = target.head(f^_s)

Inputs that are unknown (features of slot n and later) or outside the image are 0. There is no attention and no cache.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import MAX_JSON_BYTES, CheckpointFiles
from specbench.models.draft_head import ready_head, write_head
from specbench.models.draft_head_files import NO_HEAD
from specbench.models.interface import ImageModel, TokenLayout, VerticalHeadModel
from specbench.system.files import blaming, read_regular
from specbench.system.json_values import parse_json
from specbench.system.matrix_products import linear_output, product

KIND = "vertical"
DEPTHS = 64  # Distances from the first uncommitted slot with a separate bias; larger distances share the last bias
_FEATURES = _TOKENS = 3


class VerticalHead(nn.Module):
    """The network above. `width`: size of features and embeddings; `hidden`: units of each layer."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.width, self.hidden = width, hidden
        self.mix = nn.Linear((_FEATURES + _TOKENS) * width, hidden)
        self.depth = nn.Embedding(DEPTHS, hidden)
        self.inner = nn.Linear(hidden, hidden)
        self.output = nn.Linear(hidden, width)

    def forward(self, around: Tensor, depth: Tensor) -> Tensor:
        """Compute features [R, K, d] from `around` [R, K, 6d], see `surroundings`, and `depth` [R, K] of the slots."""
        return self.features(self.mixed(around, depth))

    def mixed(self, around: Tensor, depth: Tensor) -> Tensor:
        """Compute the first layer [R, K, hidden] before its silu. If `around` has zeros for the token before a slot,
        that token's term is missing; `mixed_before` gives it."""
        return linear_output(self.mix, around) + self.depth(depth.clamp(max=DEPTHS - 1))

    def mixed_before(self, word: Tensor) -> Tensor:
        """Compute the term of `mixed` for the embedding [R, K, d] of the token before a slot."""
        return product(word, self.mix.weight[:, _FEATURES * self.width : (_FEATURES + 1) * self.width])

    def features(self, mixed: Tensor) -> Tensor:
        """Compute features [R, K, d] from `mixed` [R, K, hidden]."""
        first = functional.silu(mixed)
        return linear_output(self.output, first + functional.silu(linear_output(self.inner, first)))


def slots_above(layout: TokenLayout) -> Tensor:
    """Return the slot above each stream slot [N + 1], -1 if there is none; the last entry is for slots past the end."""
    return torch.tensor([*layout.neighbour(1, 0), -1])


def surroundings(
    features: Tensor, ids: Tensor, table: Tensor, above: Tensor, committed: Tensor, slots: Tensor
) -> Tensor:
    """Return the head's input [R, K, 6d] for drafts of `slots` [R, K]. `features`: target features [R, S, d] by slot;
    only features before `committed` [R, 1 or K] are read. `ids`: [R, S'] token ids in `table` [V, d], by slot."""
    words = embedded(table, ids, *places_before(above, slots))
    return torch.cat([known_features(features, above, committed, slots), words], dim=-1)


def known_features(features: Tensor, above: Tensor, committed: Tensor, slots: Tensor) -> Tensor:
    """Return the first half [R, K, 3d] of `surroundings`: features above, above right, and last committed."""
    over = above[slots.clamp(max=len(above) - 1)]
    places = torch.stack([over + 1, over + 2, (committed - 1).expand_as(slots)], -1)
    exists = torch.stack([(over >= 0) & (over + 1 < committed), (over >= 0) & (over + 2 < committed)], -1)
    exists = torch.cat([exists, places[..., 2:] >= 0], -1)
    place = places.clamp(0, features.shape[1] - 1).flatten(1)[..., None].expand(-1, -1, features.shape[-1])
    gathered = features.gather(1, place).view(*places.shape, -1)
    return torch.where(exists[..., None], gathered, 0.0).flatten(2)


def places_before(above: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return the slots [R, K, 3] before, above, and above right of `slots`, and whether they exist and are earlier."""
    over = above[slots.clamp(max=len(above) - 1)]
    places = torch.stack([slots - 1, over, torch.where(over < 0, -1, over + 1)], -1)
    return places, (places >= 0) & (places < slots[..., None])


def embedded(table: Tensor, ids: Tensor, places: Tensor, exists: Tensor) -> Tensor:
    """Return embeddings [R, K, nd] of the tokens at `places` [R, K, n], 0 if a token does not exist."""
    chosen = ids.gather(1, places.clamp(0, ids.shape[1] - 1).flatten(1)).view(places.shape)
    return torch.where(exists[..., None], table[chosen], 0.0).flatten(2)


def vertical_head_for(model: ImageModel, path: str) -> VerticalHead:
    """Load the vertical head `path` (a folder or hub id; empty for the model's head) for `model`."""
    return ready_head(model, path, VerticalHeadModel, "own_vertical_head", load_vertical_head)


def new_vertical_head(width: int, hidden: int, seed: int) -> VerticalHead:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return VerticalHead(width, hidden)


def load_vertical_head(files: CheckpointFiles) -> VerticalHead:
    """Load the vertical head in these files, in float32; a SpecbenchError for damaged files or another kind of head."""
    config_file, weights = files.paths
    with blaming(config_file, *NO_HEAD):
        stored = parse_json(read_regular(config_file, MAX_JSON_BYTES))
    if not isinstance(stored, dict) or stored.get("kind") != KIND:
        what = f"{config_file}: not a draft head of kind {KIND}"
        raise SpecbenchError(what, f"train one with: specbench train-head --kind {KIND}")
    with blaming(weights, *NO_HEAD):
        tensors = {name: tensor.float() for name, tensor in load_file(weights).items()}
        with torch.device("meta"):  # no memory yet: the sizes in the file may be wrong
            head = VerticalHead(int(stored["width"]), int(stored["hidden"]))
        head.load_state_dict(tensors, assign=True)
    return head


def save_vertical_head(head: VerticalHead, folder: Path, extra: Mapping[str, object]) -> None:
    """Write `head` as float16 safetensors; `extra` entries go into config.json."""
    write_head(head, folder, {"kind": KIND, "width": head.width, "hidden": head.hidden, **extra})
