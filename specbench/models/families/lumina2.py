"""Lumina-mGPT 2.0 7B (768 px): Chameleon's architecture trained from scratch on a vocabulary of its own, with MoVQGAN's
image decoder, 8 pixels a token; prompts and line ends as in `specbench.models.families.lumina`.

The official code raises every guidance scale below 4 to 4, and lets one above fall back to 4; `--guidance-schedule
released` does the same. At 4, the readme's scale, both are constant.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specbench.models.checkpoint_loading import named_token, randomise, read_tensors, token_id
from specbench.models.families import vq_decoder
from specbench.models.families.base import LoadRequest
from specbench.models.families.chameleon import BEGIN_IMAGE, END_IMAGE, END_OF_TURN, load_trunk
from specbench.models.families.lumina import LINE_END, Lumina
from specbench.models.transformer.forward import guide
from specbench.models.transformer.model import Prefix, TransformerSession

FIRST_CODE, LEAST_GUIDANCE = 155_000, 4.0
_START = "<|endoftext|>"
_RESERVED = {f"<reserved{number:05d}>": 151_671 + number - 8800 for number in range(8800, 8900)}
_SPECIALS = {_START: 151_643, BEGIN_IMAGE: 151_665, END_IMAGE: 151_666, LINE_END: 151_670, END_OF_TURN: 151_800}
_TINY_VQ = {"base_channels": 32, "channel_multiplier": [1, 1, 1, 1], "hidden_size": 32}


class Lumina2(Lumina):
    """The first token is the tokenizer's begin-of-text, or its end-of-text where it has none."""

    patch = 8
    _scales: Tensor | None = None

    def begin(self, prefix: Prefix, guidance: float, columns: int) -> TransformerSession:
        if self.released["guidance"]:
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
    """Guidance scale of each slot in the official code, for an image of `tokens` tokens: it shrinks by the share of a
    quarter of them that stands before the slot, two size tokens included, never below 4, and each slot starts from the
    scale of the last."""
    scales = []
    for slot in range(slots):
        scale = max(LEAST_GUIDANCE, scale * (1 - (slot + 2) / (tokens // 4)))
        scales.append(scale)
    return scales


def load(request: LoadRequest) -> Lumina2:
    specials = _SPECIALS | _RESERVED
    if request.found:
        files, vq_files = request.found
        decoder = vq_decoder.load_movq(read_tensors(vq_files), vq_files, request.device)
        trunk = load_trunk(request, range(FIRST_CODE, FIRST_CODE + len(decoder.codebook)), specials)
    else:
        trunk = load_trunk(request, range(FIRST_CODE, FIRST_CODE + request.info.v_image), specials)
        network = vq_decoder.movq_network(request.sized(vq_decoder.MOVQ, _TINY_VQ))
        decoder = vq_decoder.MovqDecoder(randomise(network, request.device, torch.float32))
    stream_ids = [*trunk.image_ids, token_id(trunk.tokenizer, LINE_END)]
    model = Lumina2(request, trunk.tokenizer, trunk.backbone, trunk.head, stream_ids, decoder)
    model.start = named_token(files, "bos_token", "eos_token") if request.found else _START
    return model
