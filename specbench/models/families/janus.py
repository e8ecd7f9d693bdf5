"""Janus-Pro 1B and 7B (384 px): transformers' `JanusModel`, whose image tokens have separate layers.

Two layouts are read: deepseek-ai's, and the layout converted for transformers. The vision tower, the text head and the
encoding half of the image tokenizer serve image understanding only and are not loaded.

Difference from the official script: guidance and softmax are computed in float32 instead of bfloat16.
"""

from collections.abc import Mapping

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import JanusConfig, LlamaConfig
from transformers.models.janus.modeling_janus import JanusModel

from specbench.models import checkpoint_loading as stored
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.families import vq_decoder
from specbench.models.families.base import TINY, FamilyModel, LoadRequest, stand_in_tokenizer

BEGIN_IMAGE = "<begin_of_image>"

_SPECIALS = {"<｜begin▁of▁sentence｜>": 100_000, "<｜▁pad▁｜>": 100_002, BEGIN_IMAGE: 100_016}
_TEXT = {"model_type": "llama", "rms_norm_eps": 1e-6, "max_position_embeddings": 16_384}


class Janus(FamilyModel):
    """Args: start, pad: names of the tokenizer's first and padding token."""

    def __init__(self, request: LoadRequest, tokenizer: Tokenizer, network: nn.Module, start: str, pad: str):
        codes = network.generation_embeddings.num_embeddings
        decoder = vq_decoder.TamingDecoder(network.vqmodel, normalise=True)
        head = network.generation_head.vision_head.weight
        super().__init__(request, tokenizer, network.language_model, head, range(codes), decoder)
        self._network = network
        self._start = start
        self._kept = {stored.token_id(tokenizer, start), stored.token_id(tokenizer, BEGIN_IMAGE)}
        self._pad = stored.token_id(tokenizer, pad)

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        """Return both prompts. In the unconditional prompt, padding tokens replace the text and are attended to."""
        ids = self.words(f"{self._start}<|User|>: {text}\n\n<|Assistant|>:{BEGIN_IMAGE}")
        return ids, [number if number in self._kept else self._pad for number in ids]

    def token_table(self) -> Tensor:
        """Return embeddings of words, then of image tokens, which Janus embeds with a separate network."""
        codes = torch.arange(self.layout.v_image, device=self.device)
        return torch.cat([self.backbone.embed_tokens.weight, self.embed(codes, codes, ())])

    def table_ids(self, tokens: Tensor) -> Tensor:
        return tokens + self.backbone.embed_tokens.num_embeddings

    def embed(self, tokens: Tensor, positions: Tensor, state: tuple[Tensor, ...]) -> Tensor:
        return self._network.generation_aligner(self._network.generation_embeddings(tokens))

    def head(self, hidden: Tensor) -> Tensor:
        return self._network.generation_head(hidden)

    def before_output(self, hidden: Tensor) -> Tensor:
        head = self._network.generation_head
        return head.activation_fn(head.proj_out(hidden))

    def output_matrix(self) -> tuple[Tensor, Tensor]:
        last = self._network.generation_head.vision_head
        return last.weight, last.bias


def load(request: LoadRequest) -> Janus:
    if not request.files:
        text = request.sized_network(_TEXT, TINY | {"num_key_value_heads": 4})
        width, vision = text["hidden_size"], {"projection_dim": text["hidden_size"]}
        image = request.sized(vq_decoder.LLAMAGEN_VQ, vq_decoder.TINY_VQ) | vision | {"image_token_embed_dim": width}
        network = request.randomise(_network(JanusConfig(text_config=text, vq_config=image, vision_config=vision)))
        start, pad, _ = _SPECIALS
        return Janus(request, stand_in_tokenizer(_SPECIALS, first_byte=0), network, start, pad)
    files = request.files[0]
    if files.json("config.json").get("model_type") == "multi_modality":  # deepseek-ai's layout
        unused = ("vision_model.", "aligner.", "gen_vision_model.quantize.codebook_used")
        tensors = stored.rename(stored.drop(stored.read_tensors(files), unused), _converted_name)
        config, (start, pad, _) = _published_config(tensors, files), _SPECIALS
    else:
        tensors = {name.removeprefix("model."): tensor for name, tensor in stored.read_tensors(files).items()}
        config = stored.read_model_config(files, JanusConfig)
        start, pad = (stored.named_token(files, role) for role in ("bos_token", "pad_token"))
    network = _network(config, files)
    understanding = ("lm_head.", "vision_model.", "aligner.", "vqmodel.encoder.", "vqmodel.quant_conv.")
    request.fill(network, stored.drop(tensors, understanding), files)
    return Janus(request, stored.read_tokenizer(files), network, start, pad)


def _converted_name(name: str) -> str:
    """Return transformers' name for a tensor name of deepseek-ai."""
    head, _, rest = name.partition(".")
    if head == "gen_vision_model":
        return "vqmodel." + vq_decoder.llamagen_name(rest)
    if head == "language_model":
        return rest.replace("model.", "language_model.", 1)
    if head == "gen_aligner":
        # The stored module alternates layers and activations: 0 is the first layer; 2, 4 ... are hidden layers.
        number, _, rest = rest.removeprefix("layers.").partition(".")
        layer = f"hidden_layers.{int(number) // 2 - 1}" if int(number) else "fc1"
        return f"generation_aligner.{layer}.{rest}"
    renamed = {"gen_embed": "generation_embeddings", "gen_head": "generation_head"}.get(head, head)
    return f"{renamed}.{rest}".replace("generation_head.output_mlp_projector", "generation_head.proj_out")


def _published_config(tensors: Mapping[str, Tensor], files: CheckpointFiles) -> JanusConfig:
    """Convert deepseek-ai's configuration to transformers'. Missing entries have the defaults of a Llama."""
    config = files.json("config.json")
    with files.blaming("config.json"):
        text = LlamaConfig.from_dict(config["language_config"])
        stored = {name.removeprefix("vqmodel."): part for name, part in tensors.items() if name.startswith("vqmodel.")}
        image = vq_decoder.taming_config(stored).to_dict()
        width = config["gen_head_config"]["params"]["image_token_embed"]
        depth = config["gen_aligner_config"]["params"]["depth"]
    image |= {"projection_dim": text.hidden_size, "image_token_embed_dim": width, "num_hidden_layers": depth}
    vision = {"projection_dim": text.hidden_size}
    return JanusConfig(text_config=text.to_dict(), vq_config=image, vision_config=vision)


def _network(config: JanusConfig, files: CheckpointFiles | None = None) -> nn.Module:
    network = stored.build_network(JanusModel, config, files=files)
    del network.vision_model, network.aligner, network.vqmodel.encoder, network.vqmodel.quant_conv
    return network
