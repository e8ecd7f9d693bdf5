"""X-Omni (AR of 7B): a Qwen2 with a second token table, norm and head for codes; its first and last layers change only
the hidden states of codes. A FLUX model turns the codes into pixels.

The networks follow a copy of the authors' code for the Chinese model, because transformers has none. Code table and
FLUX model are read from a folder with the whole repository. The script samples with transformers' `generate`; the
repository's generation settings replace the defaults of `generate` for temperature, top-k and top-p.
"""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2RMSNorm

from specbench.errors import SpecbenchError
from specbench.models import checkpoint_loading as stored
from specbench.models.checkpoint_files import CheckpointFiles, read_json
from specbench.models.facts import BYTES
from specbench.models.families.base import LoadRequest, stand_in_tokenizer
from specbench.models.families.generation_config import read_repetition_penalty
from specbench.models.families.simplear import QWEN, TINY_QWEN, SimpleAR
from specbench.models.families.vq_decoder import to_pixels
from specbench.models.transformer.model import Prefix, TransformerSession
from specbench.system.console import warn

_SPECIALS = ("<SOM>", "<EOM>", "<IMAGE>")
_USUAL = {"mm_vocab_size": 16_448, "image_vocab_size": 16_384, "mm_special_tokens": _SPECIALS}
_USUAL |= {"num_mm_adap_layers": 4, "num_mm_head_layers": 4}
"""Entries of the authors' configuration and their defaults."""
_TINY = TINY_QWEN | {"num_hidden_layers": 4, "num_mm_adap_layers": 1, "num_mm_head_layers": 1}
_DTYPES = {name: getattr(torch, name) for name in BYTES}
_NORMS = {"model.lm_norm.weight": "model.norm.words.weight", "model.mm_norm.weight": "model.norm.codes.weight"}
_TABLES = ("model.lm_embed_tokens.weight", "model.mm_embed_tokens.weight")


class MarkedEmbedding(nn.Embedding):
    """Token ids [..., T] to vectors [..., T, d + 1], whose last number is 1 for ids after the `words`, else 0."""

    def __init__(self, words: int, codes: int, width: int):
        super().__init__(words + codes, width)
        self._words = words

    def forward(self, ids: Tensor) -> Tensor:
        vectors = super().forward(ids)
        return torch.cat([vectors, (ids >= self._words)[..., None].to(vectors.dtype)], -1)


class MarkedLayer(Qwen2DecoderLayer):
    """A layer for marked hidden states [R, T, d + 1]. Unless `for_words`, states without a mark do not change."""

    for_words = True

    def forward(self, hidden_states: Tensor, *arguments: object, **options: object) -> Tensor:
        hidden, mark = hidden_states[..., :-1], hidden_states[..., -1:]
        changed = super().forward(hidden, *arguments, **options)
        if not self.for_words:
            changed = torch.where(mark > 0, changed, hidden)
        return torch.cat([changed, mark], -1)


class MarkedNorm(nn.Module):
    """The norms of words and of codes: hidden states [R, T, d + 1] to [R, T, d]."""

    def __init__(self, width: int, eps: float):
        super().__init__()
        self.words, self.codes = Qwen2RMSNorm(width, eps=eps), Qwen2RMSNorm(width, eps=eps)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden, mark = hidden[..., :-1], hidden[..., -1:]
        return torch.where(mark > 0, self.codes(hidden), self.words(hidden))


class CodeProjector(nn.Module):
    """Second half of the authors' projector: codes [H, W] to features [1, H W, z]."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        super().__init__()
        width, (channels, *_) = tensors["quantize.embedding.weight"].shape[1], tensors["post_quant_conv.weight"].shape
        layers = {name.split(".")[1] for name in tensors if name.startswith("post_conv.")}
        self.quantize = nn.ModuleDict({"embedding": nn.Embedding(*tensors["quantize.embedding.weight"].shape)})
        self.post_quant_conv = nn.Conv2d(width, channels, 1)
        self.post_conv = nn.Sequential(*(ConvolutionBlock(channels) for _ in layers))
        used = {name: tensor for name, tensor in tensors.items() if not name.startswith("quant_conv.")}
        self.load_state_dict(used, assign=True)

    @torch.inference_mode()
    def forward(self, codes: Tensor) -> Tensor:
        vectors = self.quantize["embedding"](codes).permute(2, 0, 1)[None]
        return self.post_conv(self.post_quant_conv(vectors)).flatten(2).transpose(1, 2).contiguous()


class ConvolutionBlock(nn.Module):
    """Two 3 x 3 convolutions after norms, and a skip connection."""

    def __init__(self, channels: int):
        super().__init__()
        self.conv1, self.conv2 = (nn.Conv2d(channels, channels, 3, padding="same") for _ in range(2))
        self.norm1, self.norm2 = (nn.GroupNorm(32, channels) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        inner = self.conv1(nn.functional.gelu(self.norm1(x)))
        return x + self.conv2(nn.functional.gelu(self.norm2(inner)))


class XOmniNetwork(nn.Module):
    """The language model without its head for words."""

    def __init__(self, config: Qwen2Config):
        super().__init__()
        self.model = Qwen2Model(config)
        width, last = config.hidden_size, config.num_hidden_layers - config.num_mm_head_layers
        self.model.embed_tokens = MarkedEmbedding(config.vocab_size, config.mm_vocab_size, width)
        self.model.layers = nn.ModuleList(MarkedLayer(config, number) for number in range(config.num_hidden_layers))
        for number, layer in enumerate(self.model.layers):
            layer.for_words = config.num_mm_adap_layers <= number < last
        self.model.norm = MarkedNorm(width, config.rms_norm_eps)
        self.mm_head = nn.Linear(width, config.mm_vocab_size, bias=False)


class XOmni(SimpleAR):
    draws = False
    codebook = None
    _features: CodeProjector | None = None

    def __init__(self, request: LoadRequest, tokenizer: Tokenizer, network: XOmniNetwork):
        config = network.model.config
        start, _, image = self.marks = tuple(config.mm_special_tokens)
        words, codes = config.vocab_size, config.image_vocab_size
        super().__init__(
            request, tokenizer, network.model, network.mm_head.weight[:codes], range(words, words + codes), self
        )
        self._begin = f"{start}{self.layout.height} {self.layout.width}{image}"

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        return self.tokenizer.encode(text + self._begin).ids, self.words(self._begin)

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        if self.repetition_penalty != 1.0 and guidance != 1.0:
            what = f"--cfg {guidance:g}: '{self.name}' cannot combine guidance with its repetition penalty"
            raise SpecbenchError(what, "omit --cfg, or set repetition_penalty to 1 in generation_config.json")
        return super().begin(prefix, guidance, columns)

    def add_decoder(self, files: CheckpointFiles) -> None:
        """Read the code table, and the FLUX model if it is on this disk, else warn that no pictures are drawn."""
        config = files.named("config.json")
        folder, settings = config.parent, read_json(files.source, config).get("vision_config")
        if not isinstance(settings, dict):
            return warn(f"{self.name} cannot render pictures: {config} has no vision_config")
        with files.source.blaming(config):
            decoder, dtype = settings["decoder"], _DTYPES[settings["dtype"]]
            projector = _inside(folder, settings["encoder"]["projector_path"])
            transformer = _inside(folder, decoder["model_path"])
        if projector.is_file():
            stated = CheckpointFiles(files.source, (projector,))
            with files.source.blaming(projector):
                self._features = features = CodeProjector(stored.read_tensors(stated))
                self.codebook = features.quantize["embedding"].weight.float().to(self.device)
                if len(self.codebook) != self.layout.v_image:
                    raise ValueError(f"{len(self.codebook)} codes instead of {self.layout.v_image}")
        bases = [place / "FLUX.1-dev" for place in (folder, folder.resolve().parent)]
        base = next((base for base in bases if base.is_dir()), bases[0])
        needed = (projector, transformer, base / "vae", base / "scheduler")
        if lacking := [path for path in needed if not path.exists()]:
            warn(f"{self.name} cannot render pictures: {lacking[0]} does not exist")
        elif find_spec("diffusers") is None:
            warn(f"{self.name} cannot render pictures: its FLUX model needs diffusers (pip install diffusers)")
        else:
            from specbench.models.families.x_omni_decoder import XOmniDecoder  # imports diffusers, which is optional

            with files.source.blaming(transformer / "config.json"):
                read_json(files.source, transformer / "config.json")  # refuses code from a hub
                self._decoder = XOmniDecoder(self._features, transformer, base, decoder, str(self.device), dtype)
            self.draws = True

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        """Draw pictures with the FLUX model, which uses the image's seed and reads no prompt."""
        grids = image_tokens.view(-1, self.layout.height, self.layout.width)
        drawn = [self._decoder.draw(codes, seed % 2**63) for codes, seed in zip(grids, seeds, strict=True)]
        return to_pixels(2 * torch.cat(drawn) - 1)


def _inside(folder: Path, name: str) -> Path:
    """Return the path of a file that the configuration names; a ValueError if it is outside the repository."""
    if Path(name).is_absolute() or ".." in Path(name).parts:
        raise ValueError(f"{name} is not in the repository")
    return folder / name


def _one_table(files: CheckpointFiles, copies: bool) -> dict[str, Tensor]:
    """Read the tensors and join the tables of words and codes. Without `copies`, only the joined shape is right."""
    tensors = stored.rename(stored.drop(stored.read_tensors(files), ("lm_head.",)), _NORMS.get)
    if absent := [name for name in _TABLES if name not in tensors]:
        raise files.refusal(f" lacks '{absent[0]}'")
    words, codes = (tensors.pop(name) for name in _TABLES)
    if words.shape[1:] != codes.shape[1:]:
        raise files.refusal(f": its tables have rows of {words.shape[1:]} and {codes.shape[1:]} numbers")
    table = torch.cat([words, codes]) if copies else words[:1].expand(len(words) + len(codes), -1)
    return tensors | {"model.embed_tokens.weight": table}


def load(request: LoadRequest) -> XOmni:
    if not request.files:
        config = Qwen2Config(**_USUAL | request.sized_network(QWEN | {"tie_word_embeddings": False}, _TINY))
        first = config.vocab_size + config.image_vocab_size
        tokenizer = stand_in_tokenizer({name: first + number for number, name in enumerate(_SPECIALS)}, first_byte=0)
        model = XOmni(request, tokenizer, request.randomise(stored.build_network(XOmniNetwork, config)))
        warn(f"{model.name} cannot render pictures: random weights have no FLUX model")
    else:
        [files] = request.files
        penalty = read_repetition_penalty(files, set_by_script=("min_p",))
        config = stored.read_model_config(files, Qwen2Config)
        for name, value in _USUAL.items():
            setattr(config, name, getattr(config, name, value))
        with files.source.blaming(files.named("config.json")):
            codes, marks = config.image_vocab_size, config.mm_special_tokens
            if not 0 < codes <= config.mm_vocab_size or [type(mark) for mark in marks] != [str] * 3:
                raise ValueError(f"image_vocab_size {codes}, mm_special_tokens {marks}")
        if config.use_sliding_window:
            raise files.refusal(": sliding-window attention is not supported", files.named("config.json"))
        network = stored.build_network(XOmniNetwork, config, files=files)
        tensors = _one_table(files, copies=request.device != "meta")
        tokenizer = stored.read_tokenizer(files)
        first, last = config.vocab_size, config.image_vocab_size - 1
        if [stored.token_id(tokenizer, f"<MM-Token-{code}>") for code in (0, last)] != [first, first + last]:
            raise files.refusal(f": its tokenizer does not have <MM-Token-0> to <MM-Token-{last}> from id {first} on")
        model = XOmni(request, tokenizer, request.fill(network, tensors, files))
        model.repetition_penalty = penalty
        if request.device != "meta":
            model.add_decoder(files)
    return model
