"""GLM-Image (AR of 9B): transformers' `GlmImageTextModel` writes a preview and then the large grid, both with the same
codes, without guidance. A diffusion model of 7B, run by diffusers, turns the large grid into pixels.
The stream is not masked: the end-of-image token and other ids outside the codes can be drawn. The authors' pipeline
fails on an end-of-image token anywhere, and on another id outside the codes in the large grid. Here a failing image is
decoded to its last slot and recorded as failed. Later tokens are not drawn, because the pipeline does not read them.
"""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn
from transformers import GlmImageConfig, GlmImageForConditionalGeneration
from transformers.utils.chat_template_utils import render_jinja_template

from specbench.models import checkpoint_loading as stored
from specbench.models.checkpoint_files import CheckpointFiles, read_json
from specbench.models.families.base import TINY, FamilyModel, LoadRequest, stand_in_tokenizer
from specbench.models.families.generation_config import refuse_processors
from specbench.models.families.vq_decoder import to_pixels
from specbench.models.interface import TokenLayout
from specbench.models.transformer.model import Prefix
from specbench.system.console import warn

CODEBOOK = "model.vqmodel.quantize.embedding.weight"
PIPELINE_PARTS = ("transformer", "vae", "text_encoder", "tokenizer", "scheduler")
"""Folders of the repository that only the diffusion model needs."""
_ROLES = ("grid_bos_token", "grid_eos_token", "bos_token")
_SPECIALS = {"<sop>": 167_843, "<eop>": 167_844, "<|image|>": 16_384}
_ROTARY = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.5}
_TINY = TINY | {"num_key_value_heads": 2}


class GridsRotary(nn.Module):
    """Rotation by temporal position, row and column. A grid's tokens share the temporal position at which the grid
    begins; the next grid begins after the longer side of this grid. Positions count from the first image token. Words
    have negative positions, equal in all three coordinates. `rotary`: the network's rotation by [3, R, T] positions."""

    def __init__(self, rotary: nn.Module, layout: TokenLayout):
        super().__init__()
        self._rotary, places, start = rotary, [], 0
        for height, width in layout.grids:
            cell = torch.cartesian_prod(torch.arange(height), torch.arange(width))
            places.append(start + torch.cat([torch.zeros(len(cell), 1, dtype=torch.long), cell], dim=1))
            start += max(height, width)
        self.register_buffer("_places", torch.cat([*places, torch.full((1, 3), start)]).T, persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        slots = position_ids.expand(3, -1, -1)[0]
        placed = self._places[:, slots.clamp(0, self._places.shape[1] - 1)]
        return self._rotary(x, torch.where(slots < 0, slots, placed))


class GlmImage(FamilyModel):
    """GLM-Image. `draws`: whether the diffusion model is on this disk; without it no pictures are drawn."""

    draws = False
    _pipeline: Any = None

    def __init__(
        self,
        request: LoadRequest,
        tokenizer: Tokenizer,
        network: nn.Module,
        codebook: Tensor,
        names: Sequence[str],
        template: str | None,
    ):
        """`names`: names of the tokens of `_ROLES`; `template`: Jinja source that converts a conversation to text."""
        head = network.lm_head.weight
        codes = nn.functional.normalize(codebook.float(), dim=-1)
        # Ids that are not codes get vectors far from all codes.
        others = codes.new_full((len(head) - len(codes), codes.shape[1]), 10.0)
        self._codes, self.codebook = len(codes), torch.cat([codes, others]).to(request.device)
        super().__init__(request, tokenizer, network.model.language_model, head, range(len(head)), self)
        self.backbone.rotary_emb = GridsRotary(self.backbone.rotary_emb, self.layout).to(request.device)
        self._names, self._template, self._is_random = names, template, not request.files
        ends = self.backbone.config.eos_token_id
        self._ends = ends if isinstance(ends, list) else [ends]

    def prompt_ids(self, text: str) -> tuple[list[int], list[int]]:
        start, end, image = self._names
        if self._template:
            asked = [{"role": "user", "content": [{"type": "text", "text": text}]}]
            (text,), _ = render_jinja_template([asked], chat_template=self._template)
        sizes = "".join(f"{start}{height} {width}{end}" for height, width in reversed(self.layout.grids))
        ids = self.tokenizer.encode(text + sizes + image, add_special_tokens=not text.startswith(image)).ids
        return ids, ids

    def encode(self, prompts: Sequence[str]) -> Prefix:
        prefix = super().encode(prompts)
        shift = torch.tensor([-len(row) for row in prefix.embeds], device=self.device)
        return Prefix(prefix.embeds, prefix.state, shift, prefix.ids)

    def problem(self, tokens: np.ndarray) -> str | None:
        """Return the reason why the authors' pipeline fails on stream tokens [N]; None if it makes a picture."""
        if self._is_random:
            return None
        if len(ends := np.flatnonzero(np.isin(tokens, self._ends))):
            return f"token {ends[0]} is the end-of-image token, at which GLM-Image's pipeline stops and fails"
        first = len(tokens) - self.layout.height * self.layout.width
        if len(others := np.flatnonzero(tokens[first:] >= self._codes)):
            slot = first + int(others[0])
            return f"token {slot} is {tokens[slot]}, which is not an image code, so GLM-Image's pipeline fails"
        return None

    def add_diffusion(self, files: CheckpointFiles) -> None:
        """Load the diffusion model next to the language model; if it is absent, warn that no pictures are drawn."""
        folder = files.named("config.json").parent.parent
        if lacking := [part for part in PIPELINE_PARTS if not (folder / part).is_dir()]:
            warn(f"{self.name} cannot render pictures: {folder} has no {lacking[0]} of its diffusion model")
        elif find_spec("diffusers") is None:
            warn(f"{self.name} cannot render pictures: its diffusion model needs diffusers (pip install diffusers)")
        else:
            from diffusers import GlmImagePipeline  # optional dependency

            without = {"vision_language_encoder": None, "processor": None, "dtype": torch.bfloat16}
            with files.source.blaming(folder / "model_index.json"):
                for path in folder.glob("*/config.json"):
                    read_json(files.source, path)  # refuses code from a hub
                self._pipeline = GlmImagePipeline.from_pretrained(str(folder), **without).to(self.device)
            self._pipeline.set_progress_bar_config(disable=True)
            self.draws = True

    def render(self, image_tokens: Tensor, prompts: Sequence[str] = (), seeds: Sequence[int] = ()) -> Tensor:
        """Draw pictures with the image's seed. Every code covers 2 x 2 positions of the diffusion model."""
        height, width = self.layout.height, self.layout.width
        grids = image_tokens[:, -height * width :].clamp(max=self._codes - 1).view(-1, height, width)
        pictures = []
        for codes, prompt, seed in zip(grids, prompts, seeds, strict=True):
            prior = codes.repeat_interleave(2, 0).repeat_interleave(2, 1).view(1, -1)
            drawn = self._pipeline(
                prompt=prompt,
                height=32 * height,
                width=32 * width,
                prior_token_ids=prior,
                generator=torch.Generator(self.device).manual_seed(seed % 2**63),
                output_type="pt",
            )
            pictures.append(to_pixels(2 * drawn.images - 1))
        return torch.cat(pictures)


def load(request: LoadRequest) -> GlmImage:
    if not request.files:
        text = request.sized_network({}, _TINY)
        section = [2, 1, 1] if request.info.choice.tiny else [8, 12, 12]
        config = GlmImageConfig(text_config={**text, "rope_parameters": {**_ROTARY, "mrope_section": section}})
        network = request.randomise(_network(config))
        codebook = torch.randn(config.vq_config.num_embeddings, 8, generator=torch.Generator().manual_seed(0))
        tokenizer = stand_in_tokenizer(_SPECIALS, first_byte=17_000)
        model = GlmImage(request, tokenizer, network, codebook, tuple(_SPECIALS), None)
        warn(f"{model.name} cannot render pictures: random weights have no diffusion model")
        return model
    files = request.files[0]
    refuse_processors(files)
    config, tensors = stored.read_model_config(files, GlmImageConfig), stored.read_tensors(files)
    network, codebook = _network(config, files), tensors.get(CODEBOOK)
    if codebook is None:
        raise files.refusal(f" lacks '{CODEBOOK}'")
    request.fill(network, stored.drop(tensors, ("model.visual.", "model.vqmodel.")), files)
    names = [stored.named_token(files, role) for role in _ROLES]
    path = files.named("chat_template.jinja")
    with files.source.blaming(path):
        template = path.read_text(encoding="utf-8")
        model = GlmImage(request, stored.read_tokenizer(files), network, codebook, names, template)
        model.prompt_ids("")
    model.add_diffusion(files)
    return model


def _network(config: GlmImageConfig, files: CheckpointFiles | None = None) -> nn.Module:
    network = stored.build_network(GlmImageForConditionalGeneration, config, files=files)
    del network.model.visual, network.model.vqmodel
    return network
