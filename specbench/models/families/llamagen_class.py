"""LlamaGen by class (ImageNet), B to 3B: the network of `specbench.models.families.llamagen` with one learned vector
per class in the place of the caption, and one for none.

Prompts are class labels. A label takes one position, whose queries and keys vanish as those of a caption do.
Guidance holds for every slot; the official `cfg_interval` is off by default, too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from transformers import LlamaConfig, LlamaModel

from specbench.models.checkpoint_loading import build_network, read_tensors
from specbench.models.families import vq_decoder
from specbench.models.families.base import FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.llamagen import TINY_SIZES, TINY_VQ, GridRotary, converted, llama_config, stored_config
from specbench.models.transformer.model import Prefix


class LlamaGenClass(FamilyModel):
    """Args: network: see `ClassNetwork`."""

    def __init__(self, request: LoadRequest, network: ClassNetwork, decoder: vq_decoder.ImageDecoder):
        codes = range(network.output.out_features)
        unused = stand_in_tokenizer({}, first_byte=0)
        super().__init__(request, unused, network.model, network.output.weight, codes, decoder)
        head = network.model.config.head_dim
        rotary = GridRotary(self.layout.height, self.layout.width, head, caption=1)
        network.model.rotary_emb = rotary.to(request.device)
        self._classes = network.embedding_table.weight

    def encode(self, prompts: Sequence[str]) -> Prefix:
        nothing = len(self._classes) - 1
        labels = torch.tensor([int(text) for text in prompts] + [nothing] * len(prompts), device=self.device)
        return Prefix(list(self._classes[labels][:, None]))


class ClassNetwork(nn.Module):
    """The language model, with the vectors of `classes` and of no class."""

    def __init__(self, config: LlamaConfig, classes: int):
        super().__init__()
        self.model = LlamaModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.embedding_table = nn.Embedding(classes + 1, config.hidden_size)


def load(request: LoadRequest) -> LlamaGenClass:
    if not request.found:
        config = llama_config(request.sized_network({}, TINY_SIZES), request.info.network.one_head)
        network = request.randomise(build_network(ClassNetwork, config, request.info.classes))
        settings = request.sized(vq_decoder.LLAMAGEN_VQ, TINY_VQ)
        decoder = vq_decoder.random_taming(settings, normalise=True, attention=True, device=request.device)
        return LlamaGenClass(request, network, decoder)
    [files] = request.found
    language, image = files.only("c2i_*.pt"), files.only("vq_ds16_c2i.pt")
    tensors, head = converted(request, language, "embedding_table.weight")
    classes = len(tensors["embedding_table.weight"]) - 1
    if classes != request.info.classes:
        raise language.refusal(f" has {classes} classes, {request.info.name} has {request.info.classes}")
    network = build_network(ClassNetwork, stored_config(tensors, language, head), classes)
    request.fill(network, tensors, language)
    decoder = vq_decoder.load_llamagen_vq(read_tensors(image), image, request.device)
    return LlamaGenClass(request, network, decoder)
