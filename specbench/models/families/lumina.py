"""Lumina-mGPT 7B (512, 768 and 1024 px): Chameleon's vocabulary, any aspect ratio, every row closed by a line end.

Differences from the official script: the begin-of-image token and the two size tokens, which the official script lets
the model sample without guidance, stand in the prompt, so that every image has the asked size. Its bfloat16 autocast
is a plain bfloat16 network here.
"""

from __future__ import annotations

from specbench.models.checkpoint_loading import read_tensors, token_id
from specbench.models.families import vq_decoder
from specbench.models.families.base import FamilyModel, LoadRequest
from specbench.models.families.chameleon import BEGIN_IMAGE, END_OF_TURN, START, load_trunk, random_decoder

LINE_END = "<reserved08799>"
_SIZE_UNIT = 32
_FIRST_SIZE = 8800


class Lumina(FamilyModel):
    """The unconditional prompt is the image's beginning alone, at positions from 0.

    In SJD's and GSD's released code it keeps the last token of the conditional prompt before it.

    Attributes:
        start: name of the first token of a prompt.
        patch: pixels per image token, each way.
    """

    marks, start, patch = (END_OF_TURN, BEGIN_IMAGE), START, 16

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        height, width = self.layout.height * self.patch, self.layout.width * self.patch
        asked = f"Generate an image of {width}x{height} according to the following prompt:\n{text}"
        sizes = "".join(f"<reserved{_FIRST_SIZE + side // _SIZE_UNIT:05d}>" for side in (height, width))
        image = self.words(BEGIN_IMAGE + sizes)
        unconditional = self.words(END_OF_TURN) + image if self.released["rows"] else image
        return self.words(self.start + asked + END_OF_TURN) + image, unconditional


def load(request: LoadRequest) -> Lumina:
    trunk = load_trunk(request)
    if request.found:
        files = request.found[1]
        decoder = vq_decoder.load_chameleon_vq(read_tensors(files), files, request.device)
    else:
        decoder = random_decoder(request)
    stream_ids = [*trunk.image_ids, token_id(trunk.tokenizer, LINE_END)]
    return Lumina(request, trunk.tokenizer, trunk.backbone, trunk.head, stream_ids, decoder)
