"""The Chameleon trunk that Lumina-mGPT and Anole share: transformers' `ChameleonForConditionalGeneration`.

Hand-written, and why: the head (the class hides all image logits), the spread of the query and key norms (stored once
per model-parallel shard, which the class cannot read), and the image decoder (the class has none; see
`specbench.models.families.vq_decoder`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import build_network, drop, read_model_config, read_tensors, read_tokenizer
from specbench.models.families import vq_decoder
from specbench.models.families.base import TINY, LoadRequest, stand_in_tokenizer
from specbench.models.families.chameleon_meta import IMAGE, TOKENIZER, convert_meta, is_meta, read_meta_config

START, END_OF_TURN, BEGIN_IMAGE, END_IMAGE = "<s>", "<reserved08706>", "<racm3:break>", "<eoss>"
FIRST_IMAGE_ID = 4
LARGEST_PLAIN_WIDTH = 4096
"""Larger Chameleon models than 7B have their norms after attention and feed-forward layers (swin norm)."""

_RESERVED = {f"<reserved{number:05d}>": number + 4 for number in range(8706, 8900)}
SPECIALS_1 = {START: 0, "<pad>": 1, "</s>": 2, END_IMAGE: 8196, BEGIN_IMAGE: 8197, **_RESERVED}
_TINY_VQ = {"latent_channels": 32, "embed_dim": 32, "base_channels": 32, "channel_multiplier": [1, 1, 1, 1, 1]}


class Trunk(NamedTuple):
    """Attributes: image_ids: vocabulary id of each image token; image_tensors: stored tensors of the image model."""

    tokenizer: Tokenizer
    backbone: nn.Module
    head: Tensor
    image_ids: range
    image_tensors: dict[str, Tensor]


def load_trunk(request: LoadRequest, image_ids: range | None = None, specials: Mapping[str, int] = SPECIALS_1) -> Trunk:
    """The language model; its tokenizer is the one of the last source that has one.

    Args:
        image_ids: vocabulary ids of the image tokens, where a checkpoint's `vocabulary_map` does not list them.
        specials: special tokens of the stand-in tokenizer of random weights.
    """
    if not request.found:
        ids = image_ids or range(FIRST_IMAGE_ID, FIRST_IMAGE_ID + request.info.v_image)
        swin = {"swin_norm": request.info.network.width > LARGEST_PLAIN_WIDTH}
        sizes = request.sized_network(swin, TINY | {"num_key_value_heads": 4})
        network = request.randomise(_language_model(ChameleonConfig(**sizes, vocabulary_map={"<image>": 8711})))
        return _trunk(network, stand_in_tokenizer(specials, first_byte=10_000), ids, {})
    main = request.found[0]
    if is_meta(main):
        weights = main.only("*.pth")
        tensors = read_tensors(weights)
        config = read_meta_config(tensors, main)
        network = _filled(request, config, convert_meta(tensors, config, main), weights)
        image_ids = _image_ids(config.vocabulary_map, main, main.named(TOKENIZER))
        return _trunk(network, read_tokenizer(main, TOKENIZER), image_ids, read_tensors(main.only(IMAGE)))
    config = read_model_config(main, ChameleonConfig)
    tensors = read_tensors(main)
    language = drop(tensors, ["model.vqmodel."])
    network = _filled(request, config, language, main)
    with_tokenizer = next(
        found for found in request.found if any(path.name == "tokenizer.json" for path in found.paths)
    )
    image_ids = image_ids or _image_ids(config.vocabulary_map, main, main.named("config.json"))
    if image_ids.stop > config.vocab_size:
        raise main.refusal(f": its vocabulary of {config.vocab_size} ends before the image token {image_ids.stop - 1}")
    image_tensors = {name: tensors[name] for name in tensors.keys() - language.keys()}
    return _trunk(network, read_tokenizer(with_tokenizer), image_ids, image_tensors)


def _filled(
    request: LoadRequest, config: ChameleonConfig, tensors: dict[str, Tensor], files: CheckpointFiles
) -> nn.Module:
    """The language model; query and key norms that are stored once per model-parallel shard go to all its heads."""
    network = _language_model(config, files)
    heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
    for name, stored in tensors.items():
        if count := heads.get(name.split(".")[-2]):
            tensors[name] = stored.repeat_interleave(max(count // len(stored), 1), dim=0)
    return request.fill(network, tensors, files)


def _trunk(network: nn.Module, tokenizer: Tokenizer, image_ids: range, image_tensors: dict[str, Tensor]) -> Trunk:
    head = network.lm_head.weight[image_ids.start : image_ids.stop].clone()
    return Trunk(tokenizer, network.model, head, image_ids, image_tensors)


def _language_model(config: ChameleonConfig, found: CheckpointFiles | None = None) -> nn.Module:
    network = build_network(ChameleonForConditionalGeneration, config, found=found)
    del network.model.vqmodel
    return network


def _image_ids(vocabulary: Mapping[str, int], found: CheckpointFiles, path: Path) -> range:
    """Vocabulary ids of the image tokens: their names spell the code with letters, A for 0."""
    digits = str.maketrans("ABCDEFGHIJ", "0123456789")
    codes = {
        int(name.removeprefix("IMGIMG")[:-1].translate(digits)): number
        for name, number in vocabulary.items()
        if name.startswith("IMGIMG")
    }
    first = codes.get(0, 0)
    if not codes or any(codes.get(code) != first + code for code in range(len(codes))):
        problem = ": its vocabulary_map does not list the image tokens in the order of their codes"
        raise found.refusal(problem if path.name == "config.json" else problem.replace("_map", ""), path)
    return range(first, first + len(codes))


def random_decoder(request: LoadRequest) -> vq_decoder.TamingDecoder:
    settings = request.sized(vq_decoder.CHAMELEON_VQ, _TINY_VQ)
    return vq_decoder.random_taming(settings, normalise=False, attention=False, device=request.device)
