"""X-Omni's image decoder, written after a copy of the authors' code for the Chinese model. It is a FLUX transformer
that reads no text. Between its two kinds of blocks, features of the codes are added to the hidden states."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel
from diffusers.configuration_utils import register_to_config
from diffusers.models.transformers import transformer_flux as flux
from diffusers.pipelines.flux.pipeline_flux import calculate_shift, retrieve_timesteps
from torch import Tensor, nn


class ImageBlock(nn.Module):
    """A block of FLUX's first kind without the text half."""

    def __init__(self, width: int, heads: int, head_width: int):
        super().__init__()
        self.norm1 = flux.AdaLayerNormZero(width)
        processor = flux.FluxAttnProcessor()
        self.attn = flux.FluxAttention(
            width, heads, head_width, bias=True, eps=1e-6, out_dim=width, processor=processor
        )
        self.norm2 = nn.LayerNorm(width, eps=1e-6, elementwise_affine=False)
        self.ff = flux.FeedForward(width, width, activation_fn="gelu-approximate")

    def forward(self, hidden: Tensor, time: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        normed, gate, shift, scale, inner_gate = self.norm1(hidden, emb=time)
        hidden = hidden + gate[:, None] * self.attn(normed, image_rotary_emb=rotary)
        normed = self.norm2(hidden) * (1 + scale[:, None]) + shift[:, None]
        return hidden + inner_gate[:, None] * self.ff(normed)


class CodeFlux(FluxTransformer2DModel):
    """The transformer: latents [R, N, c], code features [R, N, z], time [R] and positions [N, 3] to velocities."""

    @register_to_config
    def __init__(
        self,
        patch_size: int = 1,
        in_channels: int = 64,
        out_channels: int | None = None,
        num_layers: int = 19,
        num_single_layers: int = 38,
        attention_head_dim: int = 128,
        num_attention_heads: int = 24,
        joint_attention_dim: int = 4096,
        pooled_projection_dim: int = 768,
        guidance_embeds: bool = False,
        axes_dims_rope: tuple[int, int, int] = (16, 56, 56),
        siglip_channels: int = 1536,
        drop_token_prob: float = 0.0,  # used in training only
    ):
        super().__init__(
            patch_size, in_channels, out_channels, num_layers, num_single_layers, attention_head_dim,
            num_attention_heads, joint_attention_dim, pooled_projection_dim, guidance_embeds, axes_dims_rope,
        )  # fmt: skip
        sizes = self.inner_dim, num_attention_heads, attention_head_dim
        self.transformer_blocks = nn.ModuleList(ImageBlock(*sizes) for _ in range(num_layers))
        self.pooled_embeds = nn.Parameter(torch.zeros(1, pooled_projection_dim))
        self.siglip_embed = nn.Linear(siglip_channels, self.inner_dim, bias=False)

    def forward(self, latents: Tensor, features: Tensor, time: Tensor, places: Tensor) -> Tensor:
        hidden, rotary = self.x_embedder(latents), self.pos_embed(places)
        time, pooled = time.to(hidden.dtype) * 1000, self.pooled_embeds.expand(len(hidden), -1)
        guidance = (torch.full_like(time, 1000.0),) if self.config.guidance_embeds else ()
        embedded = self.time_text_embed(time, *guidance, pooled)
        for block in self.transformer_blocks:
            hidden = block(hidden, embedded, rotary)
        hidden, text = hidden + self.siglip_embed(features), hidden[:, :0]
        for block in self.single_transformer_blocks:
            text, hidden = block(hidden, text, embedded, rotary)
        return self.proj_out(self.norm_out(hidden, embedded))


class XOmniDecoder:
    """The image decoder: FLUX pipeline and code features. `settings`: "decoder" of the model's "vision_config"."""

    def __init__(
        self,
        features: nn.Module,
        folder: Path,
        base: Path,
        settings: Mapping[str, Any],
        device: str,
        dtype: torch.dtype,
    ):
        """`folder`: folder of the transformer; `base`: folder of FLUX.1-dev, whose scheduler and VAE are used."""
        transformer, found = CodeFlux.from_pretrained(str(folder), torch_dtype=dtype, output_loading_info=True)
        if wrong := sorted(found["missing_keys"] + found["unexpected_keys"] + found["mismatched_keys"])[:1]:
            raise ValueError(f"the transformer is not X-Omni's: {wrong[0]}")
        vae = AutoencoderKL.from_pretrained(str(base / "vae"), torch_dtype=dtype)
        scheduler = FlowMatchEulerDiscreteScheduler.from_pretrained(str(base / "scheduler"))
        self._flux = FluxPipeline(scheduler, vae, None, None, None, None, transformer).to(device)
        self._features = features.to(device, dtype)
        self._steps, self._scale = int(settings["num_inference_steps"]), float(settings["cfg_scale"])
        self._unit = int(settings["upscale_factor"])

    @torch.inference_mode()
    def draw(self, codes: Tensor, seed: int) -> Tensor:
        """Return pixels [1, 3, h, w] in [0, 1] of codes [H, W], with guidance; unconditional features are zero."""
        pipe, size = self._flux, tuple(self._unit * side for side in codes.shape)
        features = self._features(codes)
        features, device = torch.cat([features, torch.zeros_like(features)]), features.device
        generator, channels = torch.Generator(device).manual_seed(seed), pipe.transformer.config.in_channels // 4
        latents, places = pipe.prepare_latents(1, channels, *size, features.dtype, device, generator)
        known = pipe.scheduler.config
        bounds = known.base_image_seq_len, known.max_image_seq_len, known.base_shift, known.max_shift
        shift, sigmas = calculate_shift(latents.shape[1], *bounds), np.linspace(1.0, 1 / self._steps, self._steps)
        for time in retrieve_timesteps(pipe.scheduler, self._steps, device, sigmas=sigmas, mu=shift)[0]:
            velocity = pipe.transformer(
                torch.cat([latents, latents]), features, time.expand(2).to(latents.dtype) / 1000, places
            )
            with_codes, without = velocity.chunk(2)
            guided = without + self._scale * (with_codes - without)
            latents = pipe.scheduler.step(guided, time, latents, return_dict=False)[0]
        latents = pipe._unpack_latents(latents, *size, pipe.vae_scale_factor)
        latents = latents / pipe.vae.config.scaling_factor + pipe.vae.config.shift_factor
        return pipe.image_processor.postprocess(pipe.vae.decode(latents, return_dict=False)[0], output_type="pt")
