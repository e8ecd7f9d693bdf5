"""Anole 7B (512 px): Chameleon with its image head restored, in the authors' layout (Meta's) or transformers'.

The official script mixes three rows; for a prompt of text only, its image-conditioned row equals the unconditional
one, which leaves plain guidance.
"""

from __future__ import annotations

from specbench.models.families import vq_decoder
from specbench.models.families.base import FamilyModel, LoadRequest
from specbench.models.families.chameleon import BEGIN_IMAGE, END_OF_TURN, START, load_trunk, random_decoder

RELEASED_WORDS = "Generate an image of "  # What SJD's released script writes before the prompt


class Anole(FamilyModel):
    marks = START, END_OF_TURN, BEGIN_IMAGE

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        first = END_OF_TURN if self.released["rows"] else START
        text = RELEASED_WORDS * self.released["prompt"] + text
        return self.words(START + text + END_OF_TURN + BEGIN_IMAGE), self.words(first + BEGIN_IMAGE)


def load(request: LoadRequest) -> Anole:
    trunk = load_trunk(request)
    if request.found:
        decoder = vq_decoder.load_chameleon_vq(trunk.image_tensors, request.found[0], request.device)
    else:
        decoder = random_decoder(request)
    return Anole(request, trunk.tokenizer, trunk.backbone, trunk.head, trunk.image_ids, decoder)
