"""LlamaGen XL text-to-image (256 and 512 px), and LlamaGen by class: official pickles in transformers' `LlamaModel`.

Hand-written parts: the conversion of the weights (the published layout is the authors'), the rotary table over rows and
columns of the grid (transformers has none), and the cleaning of captions before FLAN-T5 XL reads them. Difference from
the official code: the rotation is computed in the model's number format instead of float32.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from html.parser import HTMLParser
from urllib.parse import unquote_plus

import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaModel, T5Config, T5EncoderModel

from specbench.errors import SpecbenchError
from specbench.models import checkpoint_loading as stored
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.draft_head import EagleHead
from specbench.models.families.base import FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.vq_decoder import ImageDecoder
from specbench.models.family_sizes import llamagen_shape
from specbench.models.interface import DraftPrompt
from specbench.models.network_sizes import NetworkSize
from specbench.models.transformer.model import Prefix

CAPTION = 120  # Positions of the caption, including padding
HEAD_GRIDS = {"t2i": 16, "t2i2": 32}
"""By `input_type` of a published draft head's configuration, the side of the grid on which it was trained."""
TINY_SIZES = {"hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2}
_T5_XL = {
    "vocab_size": 32_128,
    "d_model": 2048,
    "d_kv": 64,
    "d_ff": 5120,
    "num_layers": 24,
    "num_heads": 32,
    "feed_forward_proj": "gated-gelu",
}
_TINY_T5 = {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4}


class LlamaGen(FamilyModel):
    """Args: network: see `Network`; encoder: T5; tokenizer: T5's tokenizer, which ends every text with </s>."""

    def __init__(
        self, request: LoadRequest, network: Network, encoder: nn.Module, tokenizer: Tokenizer, decoder: ImageDecoder
    ):
        codes = network.output.out_features
        super().__init__(request, tokenizer, network.model, network.output.weight, range(codes), decoder)
        rotary = GridRotary(self.layout.height, self.layout.width, network.model.config.head_dim)
        network.model.rotary_emb = rotary.to(request.device)
        self._network = network
        self._encoder = encoder

    def tokens_cut(self, caption: str) -> int:
        return tokens_cut(self.tokenizer, caption)

    def encode(self, prompts: Sequence[str]) -> Prefix:
        """Encode captions without their padding, which is masked everywhere but counts in positions. Unconditional
        rows have the learned vectors at the positions of the caption's elements."""
        captions = []
        for text in prompts:
            ids = torch.tensor([self.tokenizer.encode(clean_caption(text)).ids], device=self.device)
            captions.append(self._encoder(ids).last_hidden_state[0].to(self.dtype))
        lengths = [len(caption) for caption in captions] * 2
        nothing = [self._network.uncond_embedding[CAPTION - len(caption) :] for caption in captions]
        shift = CAPTION - torch.tensor(lengths, device=self.device)
        captioned = torch.arange(len(lengths), device=self.device) < len(captions)
        return Prefix([self._network.project(vectors) for vectors in captions + nothing], (captioned,), shift=shift)

    def draft_prompt(self, prompt: DraftPrompt, state: tuple[Tensor, ...]) -> DraftPrompt:
        """Return prompts padded to `CAPTION` elements, each with token id 0, as in the training of the published heads.

        Features of a caption's padding are zeros, which the network leaves at zero. In an unconditional row, they are
        the features of the learned vectors, each of which attends to itself only.
        """
        rows = []
        for length, features, captioned in zip(prompt.lengths.tolist(), prompt.features, *state, strict=True):
            padding = self._lone_features[: CAPTION - length]
            rows.append(torch.cat([padding * 0 if captioned else padding, features[: length - 1]]))
        lengths = torch.full_like(prompt.lengths, CAPTION)
        return DraftPrompt(lengths, torch.stack(rows), lengths.new_zeros(len(rows), CAPTION))

    @cached_property
    def _lone_features(self) -> Tensor:
        """[CAPTION, d] features of the learned vectors, each attending to itself only."""
        alone = self._network.project(self._network.uncond_embedding)[:, None]
        return self.backbone(inputs_embeds=alone, use_cache=False).last_hidden_state[:, 0]

    def adopt_head(self, head: EagleHead) -> EagleHead:
        """Adapt a published head (with `input_type`): it rotates adjacent pairs; its grid is one position earlier."""
        if head.published_as:
            height, width, side = self.layout.height, self.layout.width, HEAD_GRIDS.get(head.published_as)
            if not side == height == width:
                grids = ", ".join(f"{name} is {side} x {side}" for name, side in HEAD_GRIDS.items())
                made = f"--head: made for the grid of input_type '{head.published_as}' ({grids})"
                what = f"{made}; '{self.name}' decodes {height} x {width}"
                raise SpecbenchError(what, "use a head of this model, without --scale tiny")
            attention = head.layers[0].self_attn
            for matrix in (attention.q_proj.weight, attention.k_proj.weight):
                matrix.data = stored.rotary_halves(matrix.data, attention.head_dim)
            head.rotary_emb = GridRotary(height, width, attention.head_dim, caption=CAPTION - 1)
        return head


class Network(nn.Module):
    """The language model with its caption projection and learned unconditional caption [CAPTION, d_text]."""

    def __init__(self, config: LlamaConfig, text_width: int):
        super().__init__()
        width = config.hidden_size
        self.model = LlamaModel(config)
        self.output = nn.Linear(width, config.vocab_size, bias=False)
        self.fc1 = nn.Linear(text_width, width, bias=False)
        self.fc2 = nn.Linear(width, width, bias=False)
        self.uncond_embedding = nn.Parameter(torch.empty(CAPTION, text_width))

    def project(self, caption: Tensor) -> Tensor:
        """Project caption vectors [..., d_text] to inputs [..., d]."""
        return self.fc2(functional.gelu(self.fc1(caption), approximate="tanh"))


class GridRotary(nn.Module):
    """Rotation by row in one half of a head, and by column in the other half; no rotation for the caption. At caption
    positions cosine and sine are both 0, so queries and keys vanish there, and attention to captions is uniform. The
    table has `caption + height * width` positions; later positions (windows past the end) use its last entry."""

    def __init__(self, height: int, width: int, head: int, base: float = 10_000.0, caption: int = CAPTION):
        super().__init__()
        half = head // 2
        frequencies = base ** -(torch.arange(0, half, 2) / half)
        rows = torch.outer(torch.arange(height), frequencies)[:, None].expand(-1, width, -1)
        columns = torch.outer(torch.arange(width), frequencies)[None].expand(height, -1, -1)
        angles = torch.cat([rows, columns], dim=-1).reshape(height * width, half).repeat(1, 2)
        nothing = torch.zeros(caption, head)
        self.register_buffer("cos", torch.cat([nothing, angles.cos()]), persistent=False)
        self.register_buffer("sin", torch.cat([nothing, angles.sin()]), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        index = position_ids.clamp(max=len(self.cos) - 1)
        return self.cos[index].to(x.dtype), self.sin[index].to(x.dtype)


def load(request: LoadRequest) -> LlamaGen:
    # T5 overflows in float16.
    text_dtype = torch.float32 if request.dtype == torch.float16 else request.dtype
    if request.files:
        files, text_files = request.files
        language, image = files.only("t2i_*.pt"), files.only("vq_ds16_t2i.pt")
        tensors, config = converted(request, language, "uncond_embedding")
        network = stored.build_network(Network, config, tensors["uncond_embedding"].shape[-1])
        request.fill(network, tensors, language)
        encoder = stored.build_network(T5EncoderModel, stored.read_model_config(text_files, T5Config), files=text_files)
        text_tensors = stored.drop(stored.read_tensors(text_files), ["decoder.", "lm_head."])
        stored.fill(encoder, text_tensors, text_files, request.device, text_dtype)
    else:
        image, text_config = None, T5Config(**request.sized(_T5_XL, _TINY_T5))
        network = request.randomise(stored.build_network(Network, random_config(request), text_config.d_model))
        encoder = stored.build_network(T5EncoderModel, text_config)
        stored.randomise(encoder, request.device, text_dtype)
    return LlamaGen(request, network, encoder, caption_tokenizer(request.files), request.llamagen_vq(image))


class LlamaGenClass(FamilyModel):
    """LlamaGen by class (ImageNet), B to 3B: a learned vector per class replaces the caption; the unconditional row has
    another learned vector. Prompts are class labels. A label has one position, whose queries and keys are zero, as
    for a caption. Guidance applies to every slot: `cfg_interval` is off, as by default in the official code."""

    def __init__(self, request: LoadRequest, network: ClassNetwork, decoder: ImageDecoder):
        codes = range(network.output.out_features)
        unused = stand_in_tokenizer({}, first_byte=0)
        super().__init__(request, unused, network.model, network.output.weight, codes, decoder)
        rotary = GridRotary(self.layout.height, self.layout.width, network.model.config.head_dim, caption=1)
        network.model.rotary_emb = rotary.to(request.device)
        self._classes = network.embedding_table.weight

    def encode(self, prompts: Sequence[str]) -> Prefix:
        nothing = len(self._classes) - 1
        labels = torch.tensor([int(text) for text in prompts] + [nothing] * len(prompts), device=self.device)
        return Prefix(list(self._classes[labels][:, None]))


class ClassNetwork(nn.Module):
    """The language model with a vector for each of `classes` classes and a vector for the unconditional row."""

    def __init__(self, config: LlamaConfig, classes: int):
        super().__init__()
        self.model = LlamaModel(config)
        self.output = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.embedding_table = nn.Embedding(classes + 1, config.hidden_size)


def load_by_class(request: LoadRequest) -> LlamaGenClass:
    image = None
    if request.files:
        [files] = request.files
        language, image = files.only("c2i_*.pt"), files.only("vq_ds16_c2i.pt")
        tensors, config = converted(request, language, "embedding_table.weight")
        classes = len(tensors["embedding_table.weight"]) - 1
        if classes != request.info.classes:
            raise language.refusal(f" has {classes} classes, {request.info.name} has {request.info.classes}")
        network = request.fill(stored.build_network(ClassNetwork, config, classes), tensors, language)
    else:
        network = stored.build_network(ClassNetwork, random_config(request), request.info.classes)
        request.randomise(network)
    return LlamaGenClass(request, network, request.llamagen_vq(image))


def caption_tokenizer(files: Sequence[CheckpointFiles]) -> Tokenizer:
    """Return the tokenizer in the model's files, or one for random weights. It cuts captions to `CAPTION` tokens."""
    if files:
        tokenizer = stored.read_tokenizer(files[1])
    else:
        tokenizer = stand_in_tokenizer({"</s>": 1}, first_byte=3)
        tokenizer.post_processor = TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    tokenizer.no_padding()
    tokenizer.enable_truncation(CAPTION)
    return tokenizer


def tokens_cut(tokenizer: Tokenizer, caption: str) -> int:
    """Return the number of tokens of a caption that `caption_tokenizer` cuts off."""
    rest = tokenizer.encode(clean_caption(caption)).overflowing
    return sum(len(part) - tokenizer.num_special_tokens_to_add(False) for part in rest)


def random_config(request: LoadRequest) -> LlamaConfig:
    sizes, head = request.sized_network({}, TINY_SIZES), request.info.network.head_size
    heads = sizes["hidden_size"] // head
    return LlamaConfig(**sizes | {"num_attention_heads": heads, "num_key_value_heads": heads}, rms_norm_eps=1e-5)


_NAMES = stored.META_NAMES | {"cls_embedding.cap_proj.": "", "cls_embedding.": ""}


def converted(request: LoadRequest, files: CheckpointFiles, condition: str) -> tuple[dict[str, Tensor], LlamaConfig]:
    """Read the tensors of a file, convert them with `convert`, and derive the architecture."""
    tensors = stored.read_tensors(files)
    try:
        codes, width, inner, layers, head = llamagen_shape(tensors, request.info.network)
    except KeyError as error:
        raise files.refusal(f" lacks {error}") from None
    network = convert(stored.drop(tensors, ["freqs_cis"]), files, condition, head)
    size = NetworkSize(codes, width, inner, layers, width // head, width // head)
    return network, LlamaConfig(**size.config(), rms_norm_eps=1e-5)


def convert(tensors: Mapping[str, Tensor], files: CheckpointFiles, condition: str, head: int) -> dict[str, Tensor]:
    """Convert official tensors to the names and row order of `Network`. `head`: width of a head. `condition`: name of
    the learned condition, which must be among the tensors."""
    converted: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        layer, joined, _ = name.partition("attention.wqkv.weight")
        if not joined:
            converted[stored.meta_name(name, _NAMES)] = tensor
            continue
        if len(tensor) % (3 * head):
            raise files.refusal(f": {name} has {len(tensor)} rows, not three times heads of {head}")
        for part, matrix in zip("qkv", tensor.chunk(3), strict=True):
            matrix = matrix if part == "v" else stored.rotary_halves(matrix, head)
            converted[f"model.{layer}self_attn.{part}_proj.weight"] = matrix
    if condition not in converted:
        raise files.refusal(f" lacks '{condition}'")
    return converted


_Rules = tuple[tuple[re.Pattern[str], str], ...]


def _rules(*pairs: tuple[str, str]) -> _Rules:
    return tuple((re.compile(pattern), replacement) for pattern, replacement in pairs)


_FILE_SUFFIX = "(?:png|jpg|jpeg|bmp|webp|eps|pdf|apk|mp4)"
_SITE = r"[a-z0-9.-]+\.(?:com|co|ru|net|org|edu|gov|it)[\w/-]*\b/?(?!@)"
_PROTOCOL_END = r"(?:/{1,3}|[a-z0-9%])"
_DASHES = (
    r"-\u058a\u05be\u1400\u1806\u2010-\u2015\u2e17\u2e1a\u2e3a\u2e3b\u2e40"
    r"\u301c\u3030\u30a0\ufe31\ufe32\ufe58\ufe63\uff0d"
)
_ADDRESSES = _rules((rf"\b(?:https?:{_PROTOCOL_END}|{_SITE})", ""), (rf"\b(?:www:{_PROTOCOL_END}|{_SITE})", ""))
_CHARACTERS = _rules(
    (r"@\w+\b", ""),  # nicknames
    (r"[\u31c0-\u9fff]+", ""),  # Chinese strokes and characters
    (rf"[{_DASHES}]+", "-"),
    (r"[`´«»“”¨]", '"'),
    (r"[‘’]", "'"),
    (r"&quot;?|&amp", ""),
    (r"\d{1,3}(?:\.\d{1,3}){3}", " "),  # IP addresses
    (r"\d:\d\d\s+$", ""),
    (r"\\n", " "),
    (r"#(?:\d{1,3}|\d{5,})\b", ""),
    (r"\b\d{6,}\b", ""),  # article numbers
    (rf"\S+\.{_FILE_SUFFIX}", ""),
    (r"[\"']{2,}", '"'),
    (r"\.{2,}", " "),
    (r"[#®•©™&@·º½¾¿¡§~()\[\]{}|\\/*]+", " "),
    (r"\s+\.\s+", " "),
)
_WORD_JOINTS = re.compile("[-_]")
_SHOP_WORDS = _rules(
    (r"\b(?:[a-zA-Z]{1,3}\d{3,15}|[a-zA-Z]+\d+[a-zA-Z]+|\d+[a-zA-Z]+\d+)\b", ""),  # model numbers
    (r"(?:worldwide\s+)?(?:free\s+)?shipping", ""),
    (r"(?:free\s)?download(?:\sfree)?", ""),
    (r"\bclick\b\s(?:for|on)\s\w+", ""),
    (rf"\b{_FILE_SUFFIX}(?:\simages?)?", ""),
    (r"\bpage\s+\d+\b", ""),
    (r"\b\d*[a-zA-Z]+\d+[a-zA-Z]+\d+[a-zA-Z\d]*\b", " "),  # longer model numbers
    (r"\b\d+\.?\d*[xх×]\d+\.?\d*\b", ""),  # sizes; the second letter is Cyrillic
)
_SPACING = _rules((r"\b\s+:\s+", ": "), (r"(\D[,./])\b", r"\1 "), (r"\s+", " "))
_ENDS = _rules((r"^[\"']([\w\W]+)[\"']$", r"\1"), (r"^['_,\-:;]", ""), (r"['_,\-:+]$", ""), (r"^\.\S+$", ""))


def clean_caption(caption: str) -> str:
    """Clean a caption as in LlamaGen's training: lower case, and without remains of web pages and shops. The rules and
    their order are the official rules (`language/t5.py` of LlamaGen, after PixArt-alpha and DeepFloyd IF). As in the
    official code a caption is cleaned twice, because a pass may leave new text to clean. Most prompts only become lower
    case and get a missing blank after a comma or full stop."""
    return _clean_once(_clean_once(caption))


def _clean_once(caption: str) -> str:
    text = unquote_plus(caption).strip().lower().replace("<person>", "person")
    parser = _PageText()
    parser.feed(_apply_rules(_ADDRESSES, text))
    parser.close()
    text = _apply_rules(_CHARACTERS, "".join(parser.pieces))
    if len(_WORD_JOINTS.findall(text)) > 3:
        text = _WORD_JOINTS.sub(" ", text)
    if not (text.isascii() and text.isprintable() and "&" not in text):  # only other texts can have encoding errors
        import ftfy  # not needed for most captions

        text = ftfy.fix_text(text)
    text = html.unescape(html.unescape(text)).strip()
    return _apply_rules(_SHOP_WORDS + _SPACING + _ENDS, text).strip()


def _apply_rules(rules: _Rules, text: str) -> str:
    for pattern, replacement in rules:
        text = pattern.sub(replacement, text)
    return text


class _PageText(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.pieces: list[str] = []

    def handle_data(self, data: str) -> None:
        if self.cdata_elem is None:
            self.pieces.append(data)
