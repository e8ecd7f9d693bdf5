"""The embedded `shapes` model as an `ImageModel`."""

import hashlib
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from specbench.models.draft_head import EagleHead, load_head
from specbench.models.draft_head_files import head_in
from specbench.models.interface import TokenLayout
from specbench.models.shapes import WEIGHTS, captions
from specbench.models.shapes import network as shapes
from specbench.models.shapes.render import render
from specbench.models.shapes.scene import describe, realize_in_order, sample_request, worded_in_reading_order
from specbench.models.shapes.tokenizer import GRID, ShapesTokenizer
from specbench.models.transformer.model import Prefix, TransformerModel
from specbench.models.vertical_head import VerticalHead, load_vertical_head
from specbench.system.matrix_products import linear_output


class ShapesModel(TransformerModel):
    """A 16 x 16-token model of 64 x 64 images, conditioned by caption slots and a pooled caption vector."""

    name = "shapes"

    def __init__(self, network: shapes.ShapesNetwork, tokenizer: ShapesTokenizer, weights_sha256: str):
        self._network = network
        self._tokenizer = tokenizer
        self.backbone = network.llama
        self.layout = TokenLayout.plain(GRID, GRID, network.codes)
        self.codebook = torch.nn.functional.normalize(tokenizer.codebook.float(), dim=-1)
        self.weights_sha256 = weights_sha256

    def encode(self, prompts: Sequence[str]) -> Prefix:
        ids = torch.cat([self._network.encode(prompts), self._network.null_ids(len(prompts))])
        table_ids = ids + self._network.codes
        return Prefix(self._network.prefix_embeds(ids), (self._network.slot_embeds(ids),), ids=table_ids)

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self._network.token_embeds(tokens, positions, state[0])

    def head(self, hidden: Tensor) -> Tensor:
        return linear_output(self._network.head, hidden)

    def output_matrix(self) -> tuple[Tensor, Tensor | None]:
        return self._network.head.weight, self._network.head.bias

    def own_head(self) -> EagleHead:
        return load_head(head_in(WEIGHTS / "eagle"))

    def own_eagle3_head(self) -> EagleHead:
        return load_head(head_in(WEIGHTS / "eagle3"), tapped=True)

    def own_vertical_head(self) -> VerticalHead:
        return load_vertical_head(head_in(WEIGHTS / "vertical"))

    def draft_data(self, count: int, seed: int) -> tuple[tuple[str, ...], Tensor]:
        """Return captions and tokens [count, 256] of rendered scenes, as training data of a draft head."""
        rng = np.random.default_rng([8, seed])
        texts, tokens = list[str](), []
        while len(texts) < count:
            scenes = [realize_in_order(sample_request(rng), rng) for _ in range(min(64, count - len(texts)))]
            requests = [worded_in_reading_order(describe(scene, rng), scene) for scene in scenes]
            texts += [captions.caption(request) for request in requests]
            pixels = torch.from_numpy(np.stack([render(scene) for scene in scenes])).permute(0, 3, 1, 2)
            tokens.append(self._tokenizer.encode(pixels.to(self.device)))
        return tuple(texts), torch.cat(tokens)

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        return self._tokenizer.decode(image_tokens)


def load(device: str = "cpu", dtype: torch.dtype = torch.float32) -> ShapesModel:
    """Load the shipped weights. The tokenizer always runs in float32."""
    files = b"".join((WEIGHTS / name).read_bytes() for name in ("network.safetensors", "tokenizer.safetensors"))
    digest = hashlib.sha256(files).hexdigest()
    return ShapesModel(shapes.load_network(device, dtype), shapes.load_tokenizer(device), digest)
