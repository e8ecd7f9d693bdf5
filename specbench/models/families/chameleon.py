"""Chameleon and its derived models, on transformers' `ChameleonForConditionalGeneration`: Anole 7B (512 px, in the
authors' (Meta's) or transformers' layout), Lumina-mGPT (512, 768 and 1024 px) and Lumina-mGPT 2.0 (768 px).

Hand-written parts: the head (the class hides all image logits), the repetition of query and key norms (stored once per
model-parallel shard, which the class cannot read), and the image decoder (the class has none; see
`specbench.models.families.vq_decoder`).
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import ChameleonConfig, ChameleonForConditionalGeneration

from specbench.models import checkpoint_loading as stored
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.families import vq_decoder
from specbench.models.families.base import TINY, FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.chameleon_meta import IMAGE, TOKENIZER, convert_meta, is_meta, read_meta_config
from specbench.models.transformer.forward import guide
from specbench.models.transformer.model import Prefix, TransformerSession

START, END_OF_TURN, BEGIN_IMAGE, END_IMAGE = "<s>", "<reserved08706>", "<racm3:break>", "<eoss>"
FIRST_IMAGE_ID = 4
_RESERVED = {f"<reserved{number:05d}>": number + 4 for number in range(8706, 8900)}
SPECIALS_1 = {START: 0, "<pad>": 1, "</s>": 2, END_IMAGE: 8196, BEGIN_IMAGE: 8197, **_RESERVED}
RELEASED_WORDS = "Generate an image of "  # Words that SJD's released script writes before Anole's prompt
LINE_END, _SIZE_UNIT, _FIRST_SIZE = "<reserved08799>", 32, 8800  # for Lumina-mGPT
FIRST_CODE, LEAST_GUIDANCE, _START_2 = 155_000, 4.0, "<|endoftext|>"  # for Lumina-mGPT 2.0
_SPECIALS_2 = {_START_2: 151_643, BEGIN_IMAGE: 151_665, END_IMAGE: 151_666, LINE_END: 151_670, END_OF_TURN: 151_800}
_SPECIALS_2 |= {f"<reserved{number:05d}>": 151_671 + number - 8800 for number in range(8800, 8900)}


Parts = tuple[Tokenizer, nn.Module, range]
"""Tokenizer, language model, and the vocabulary ids of the image tokens."""


def _parts(request: LoadRequest, image_ids: range | None = None, specials: Mapping[str, int] = SPECIALS_1) -> Parts:
    """Load the language model; its tokenizer is in the last source with a tokenizer. `image_ids`: vocabulary ids of
    the image tokens, if the checkpoint's `vocabulary_map` does not list them. `specials`: tokens for random weights."""
    if not request.files:
        # Models larger than 7B have norms after, not before, attention and feed-forward layers.
        swin = {"swin_norm": request.info.network.width > 4096}
        sizes = request.sized_network(swin, TINY | {"num_key_value_heads": 4})
        network = request.randomise(_language_model(ChameleonConfig(**sizes, vocabulary_map={"<image>": 8711})))
        ids = image_ids or range(FIRST_IMAGE_ID, FIRST_IMAGE_ID + request.info.v_image)
        return stand_in_tokenizer(specials, first_byte=10_000), network, ids
    main = request.files[0]
    if is_meta(main):
        weights = main.only("*.pth")
        tensors = stored.read_tensors(weights)
        config = read_meta_config(tensors, main)
        network = _filled(request, config, convert_meta(tensors, config, main), weights)
        image_ids = _image_ids(config.vocabulary_map, main, main.named(TOKENIZER))
        return stored.read_tokenizer(main, TOKENIZER), network, image_ids
    config = stored.read_model_config(main, ChameleonConfig)
    network = _filled(request, config, stored.drop(stored.read_tensors(main), ["model.vqmodel."]), main)
    with_tokenizer = next(part for part in request.files if part.holds("tokenizer.json"))
    image_ids = image_ids or _image_ids(config.vocabulary_map, main, main.named("config.json"))
    if image_ids.stop > config.vocab_size:
        raise main.refusal(f": its vocabulary of {config.vocab_size} ends before the image token {image_ids.stop - 1}")
    return stored.read_tokenizer(with_tokenizer), network, image_ids


def _filled(
    request: LoadRequest, config: ChameleonConfig, tensors: dict[str, Tensor], files: CheckpointFiles
) -> nn.Module:
    """Fill the language model. Query and key norms stored once per model-parallel shard are repeated for its heads."""
    network = _language_model(config, files)
    heads = {"q_norm": config.num_attention_heads, "k_norm": config.num_key_value_heads}
    for name, tensor in tensors.items():
        if count := heads.get(name.split(".")[-2]):
            tensors[name] = tensor.repeat_interleave(max(count // len(tensor), 1), dim=0)
    return request.fill(network, tensors, files)


def _language_model(config: ChameleonConfig, files: CheckpointFiles | None = None) -> nn.Module:
    network = stored.build_network(ChameleonForConditionalGeneration, config, files=files)
    del network.model.vqmodel
    return network


def _image_ids(vocabulary: Mapping[str, int], files: CheckpointFiles, path: Path) -> range:
    """Return the vocabulary ids of the image tokens. Their names spell the code in letters, A for 0."""
    digits = str.maketrans("ABCDEFGHIJ", "0123456789")
    codes = {
        int(name.removeprefix("IMGIMG")[:-1].translate(digits)): number
        for name, number in vocabulary.items()
        if name.startswith("IMGIMG")
    }
    first = codes.get(0, 0)
    if not codes or any(codes.get(code) != first + code for code in range(len(codes))):
        problem = ": its vocabulary_map does not list the image tokens in the order of their codes"
        raise files.refusal(problem if path.name == "config.json" else problem.replace("_map", ""), path)
    return range(first, first + len(codes))


class Anole(FamilyModel):
    """Chameleon with its image head restored. The official script mixes three rows. If the prompt is only text, its
    image-conditioned row equals the unconditional row, so plain guidance remains."""

    marks = START, END_OF_TURN, BEGIN_IMAGE

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        first = END_OF_TURN if "guidance_rows" in self.released else START
        text = RELEASED_WORDS * ("prompt_form" in self.released) + text
        return self.words(START + text + END_OF_TURN + BEGIN_IMAGE), self.words(first + BEGIN_IMAGE)


def load_anole(request: LoadRequest) -> Anole:
    parts = _parts(request)
    if request.files:
        main = request.files[0]
        tensors = stored.read_tensors(main.only(IMAGE) if is_meta(main) else main)
        decoder = vq_decoder.load_chameleon_vq(tensors, main, request.device)
    else:
        decoder = request.chameleon_vq(None)
    return Anole.of_words(request, *parts, decoder)


class Lumina(FamilyModel):
    """Lumina-mGPT: any aspect ratio; a line end closes every row. The unconditional prompt is only the beginning of the
    image, at positions from 0; in SJD's and GSD's released code it has the end-of-turn token before the image.

    Differences from the official script: it lets the model sample the begin-of-image token and the two size tokens
    without guidance. Here they are in the prompt, so that every image has the requested size. Instead of the script's
    bfloat16 autocast, the network is bfloat16.

    Attributes:
        start: name of the first token of a prompt.
        patch: side of an image token in pixels.
    """

    marks, forced, start, patch = (END_OF_TURN, BEGIN_IMAGE), (LINE_END,), START, 16

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        height, width = self.layout.height * self.patch, self.layout.width * self.patch
        asked = f"Generate an image of {width}x{height} according to the following prompt:\n{text}"
        sizes = "".join(f"<reserved{_FIRST_SIZE + side // _SIZE_UNIT:05d}>" for side in (height, width))
        image = self.words(BEGIN_IMAGE + sizes)
        unconditional = self.words(END_OF_TURN) + image if "guidance_rows" in self.released else image
        return self.words(self.start + asked + END_OF_TURN) + image, unconditional


def load_lumina(request: LoadRequest) -> Lumina:
    parts = _parts(request)
    return Lumina.of_words(request, *parts, request.chameleon_vq(request.files[1] if request.files else None))


class Lumina2(Lumina):
    """Chameleon's architecture trained from scratch on another vocabulary, with MoVQGAN's image decoder. The first
    token is the tokenizer's begin-of-text, or its end-of-text if it has no begin-of-text. In the official code and with
    `--guidance-schedule released`, guidance scales below 4 become 4, and larger scales fall to 4 during the image. The
    readme's scale of 4 stays constant."""

    patch = 8
    _scales: Tensor | None = None

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        if "guidance_schedule" in self.released:
            height, width = self.layout.height, self.layout.width
            scales = released_scales(guidance, height * width, self.layout.length)
            self._scales = torch.tensor([*scales, scales[-1]], device=self.device)
        return super().begin(prefix, guidance, columns)

    def guide(self, logits: Tensor, guidance: float, positions: Tensor) -> Tensor:
        if guidance == 1.0 or self._scales is None:
            return guide(logits, guidance)
        images = positions[: len(logits) // 2].clamp(max=len(self._scales) - 1)
        return guide(logits, self._scales[images][..., None])


def released_scales(scale: float, tokens: int, slots: int) -> list[float]:
    """Return the guidance scale of each slot in the official code, for an image of `tokens` tokens: the previous slot's
    scale times 1 - (slot + 2) / (tokens / 4), but not below 4; the 2 counts the size tokens."""
    scales = []
    for slot in range(slots):
        scale = max(LEAST_GUIDANCE, scale * (1 - (slot + 2) / (tokens // 4)))
        scales.append(scale)
    return scales


def load_lumina2(request: LoadRequest) -> Lumina2:
    if request.files:
        decoder = vq_decoder.load_movq(request.files[1], request.device)
        parts = _parts(request, range(FIRST_CODE, FIRST_CODE + len(decoder.codebook)))
    else:
        parts = _parts(request, range(FIRST_CODE, FIRST_CODE + request.info.v_image), _SPECIALS_2)
        network = vq_decoder.movq_network(request.sized(vq_decoder.MOVQ, vq_decoder.TINY_MOVQ))
        decoder = vq_decoder.MovqDecoder(stored.randomise(network, request.device, torch.float32))
    model = Lumina2.of_words(request, *parts, decoder)
    model.start = stored.named_token(request.files[0], "bos_token", "eos_token") if request.files else _START_2
    return model
