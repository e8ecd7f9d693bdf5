"""SimpleAR 0.5B and 1.5B (1024 px): transformers' `Qwen2ForCausalLM` whose vocabulary ends with the 64000 Cosmos codes.

The official loop may sample text tokens inside an image and later clamps them to codes; here only codes can be sampled.
A repetition penalty in `generation_config.json` is part of the target, because the official script inherits it.
"""

import torch
from torch import Tensor, nn
from transformers import Qwen2Config, Qwen2ForCausalLM

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import build_network, drop, read_model_config, read_tensors, read_tokenizer
from specbench.models.families import cosmos
from specbench.models.families.base import TINY, FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.generation_config import read_repetition_penalty
from specbench.models.interface import DraftPrompt, Tree
from specbench.models.transformer.llama_layer import use_grouped_attention
from specbench.models.transformer.model import Prefix, TransformerModel, TransformerSession

BEGIN, BEGIN_IMAGE = "<|t2i|>", "<|soi|>"
_NEGATIVE = (
    "An image of aerial view, overexposed, low quality, deformation, a poor composition, bad hands, bad teeth, "
    "bad eyes, bad limbs, distortion"
)
_WORDS = 151_672
_SPECIALS = {BEGIN: 151_665, BEGIN_IMAGE: 151_667}
QWEN = {
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
}
TINY_QWEN = TINY | {"num_key_value_heads": 2}


class SimpleAR(FamilyModel):
    """SimpleAR. `repetition_penalty`: penalty on image tokens that the image already contains; 1 means no penalty."""

    marks: tuple[str, ...] = (BEGIN, BEGIN_IMAGE)
    repetition_penalty = 1.0

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        if self.repetition_penalty == 1.0:
            return super().begin(prefix, guidance, columns)
        use_grouped_attention(self.backbone)
        return PenalisedSession(self, prefix, guidance, columns, self.repetition_penalty)

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        asked = f"{BEGIN}A highly realistic image of {text}{BEGIN_IMAGE}"
        return self.words(asked), self.words(BEGIN + _NEGATIVE + BEGIN_IMAGE)


def load(request: LoadRequest) -> SimpleAR:
    if request.files:
        files, decoder_files = request.files
        network, penalty = load_qwen(request, files)
        tokenizer = read_tokenizer(files)
        decoder = cosmos.load_cosmos(decoder_files, request.device)
        words = tokenizer.get_vocab_size(with_added_tokens=True)
    else:
        config = Qwen2Config(**request.sized_network(QWEN, TINY_QWEN))
        network, penalty = request.randomise(build_network(Qwen2ForCausalLM, config)), 1.0
        decoder = cosmos.random_cosmos(cosmos.SMALL if request.info.choice.tiny else cosmos.PUBLISHED, request.device)
        tokenizer, words = stand_in_tokenizer(_SPECIALS, first_byte=0), _WORDS
    ids = range(words, network.config.vocab_size)
    model = SimpleAR.of_words(request, tokenizer, network, ids, decoder)
    model.repetition_penalty = penalty
    return model


def load_qwen(request: LoadRequest, files: CheckpointFiles, *unused: str) -> tuple[nn.Module, float]:
    """Load a stored Qwen2 without tensors whose names start with `unused`; also return its repetition penalty."""
    penalty = read_repetition_penalty(files)
    config = read_model_config(files, Qwen2Config)
    if config.use_sliding_window:
        raise files.refusal(": sliding-window attention is not supported", files.named("config.json"))
    network = build_network(Qwen2ForCausalLM, config, files=files)
    return request.fill(network, drop(read_tensors(files), unused), files), penalty


class PenalisedSession(TransformerSession):
    """Session for chains of drafts whose target has a repetition penalty (Keskar et al., CTRL, arXiv 1909.05858).
    Before guidance, conditional logits of image tokens that the image already contains are divided by the penalty if
    positive, else multiplied; transformers' `generate` uses the same order. Every column of a window is also penalised
    for the drafts before it, so lossless decoders stay lossless."""

    def __init__(self, model: TransformerModel, prefix: Prefix, guidance: float, columns: int, penalty: float):
        super().__init__(model, prefix, guidance, columns)
        self._penalty = penalty
        images = len(self._last) // (1 if guidance == 1.0 else 2)
        # One more slot for columns without an image token: before the image's start and past its end.
        self._stream = torch.zeros(images, model.layout.length + 1, dtype=torch.long, device=model.device)

    def forward(self, tokens: Tensor, positions: Tensor, tree: Tree | None = None) -> Tensor:
        if tree is not None:
            raise self._refusal("draft trees")
        guided = super().forward(tokens, positions)
        conditional = self._model.head(self.features[: len(tokens)]).float()
        used = self._used(tokens, positions)
        return guided + self._guidance * torch.where(used, penalised(conditional, self._penalty) - conditional, 0.0)

    def forward_scattered(self, tokens: Tensor, positions: Tensor, fed: Tensor, aside: Tensor) -> Tensor:
        raise self._refusal("rows decoded in parallel")

    def draft_prompt(self) -> DraftPrompt:
        raise self._refusal("draft heads")

    def _refusal(self, what: str) -> SpecbenchError:
        return SpecbenchError(
            f"{what} are not supported with the repetition penalty {self._penalty:g} of '{self._model.name}'",
            "use a decoder that drafts a chain, such as sjd, or set repetition_penalty to 1 in generation_config.json",
        )

    def _used(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """Return [B, T, v_image] whether a column's prefix contains a token. A column consumes slot position - 1."""
        last, words = self._stream.shape[1] - 1, self._model.layout.v_image
        slots = positions - 1
        within = (slots >= 0) & (slots < last)
        self._stream.scatter_(1, torch.where(within, slots, last), tokens)
        committed = torch.arange(last, device=tokens.device) < slots[:, :1]
        consumed = torch.where(committed, self._stream[:, :last].clamp(max=words), words)
        before = torch.zeros(len(tokens), words + 1, dtype=torch.bool, device=tokens.device).scatter_(1, consumed, True)
        fed = torch.zeros(*tokens.shape, words + 1, dtype=torch.int16, device=tokens.device)
        fed.scatter_(2, torch.where(within, tokens.clamp(max=words), words)[..., None], 1)
        return (before[:, None] | (fed.cumsum(1, dtype=torch.int16) > 0))[..., :words]


def penalised(logits: Tensor, penalty: float) -> Tensor:
    """Penalise the logits of tokens that were used before."""
    return torch.where(logits > 0, logits / penalty, logits * penalty)
