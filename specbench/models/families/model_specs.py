"""The text-to-image families with official checkpoints, as facts that need no torch.

Sources of the facts: each family's official repository and its configuration on the hub.
"""

from __future__ import annotations

from specbench.models.checkpoint_files import Source
from specbench.models.hub_model import HubModel
from specbench.specs.run_spec import Sampling

_CHAMELEON = "Chameleon research licence (Meta), non-commercial"
_LM = ("config.json", "*.safetensors*")
_VQ = Source(
    "the image decoder (Chameleon's VQGAN)",
    "leloy/Anole-7b-v0.1-vqvae-hf",
    ("*.safetensors",),
    _CHAMELEON,
    beside=("vqgan.ckpt", "tokenizer/vqgan.ckpt"),
    note="Lumina-mGPT ships none; Meta's vqgan.ckpt serves as well",
)
_VQGAN_NUMBERS = 387
"""Numbers per pixel while a VQGAN draws: three maps of 128 channels, and little else."""
_T5 = Source("the text encoder", "google/flan-t5-xl", (*_LM, "tokenizer.json"), "Apache-2.0", note="11.4 GB in float32")
_COSMOS = Source(
    "the image decoder (Cosmos DV8x16x16)",
    "nvidia/Cosmos-1.0-Tokenizer-DV8x16x16",
    ("decoder.jit",),
    "NVIDIA Open Model License",
    beside=("decoder.jit",),
)


def _lumina(name: str, side: int, size: int) -> HubModel:
    holds_tokenizer = size == 768
    main = f"Alpha-VLLM/Lumina-mGPT-7B-{size}"
    tokenizer = Source(
        "the tokenizer", "Alpha-VLLM/Lumina-mGPT-7B-768", ("tokenizer.json",), _CHAMELEON, beside=("tokenizer.json",)
    )
    return HubModel(
        name=name,
        summary=f"Lumina-mGPT 7B at {size} px",
        target="specbench.models.families.lumina:load",
        source=Source("the language model", main, _LM + ("tokenizer.json",) * holds_tokenizer, _CHAMELEON),
        companions=(_VQ,) if holds_tokenizer else (_VQ, tokenizer),
        grid=(side, side),
        row_ends=True,
        v_image=8192,
        defaults=Sampling(guidance=3.0, top_k=2000),
        parameters=7_013_666_816,
        step_parameters=6_510_350_336,
        layers=32,
        kv_numbers=2 * 32 * 4096,
        attention_numbers=32 * 4096,
        other_bytes=165_831_180,
        table=65_536,
        pixel_numbers=_VQGAN_NUMBERS,
    )


def _llamagen(name: str, side: int, file: str) -> HubModel:
    return HubModel(
        name=name,
        summary=f"LlamaGen XL text-to-image at {16 * side} px",
        target="specbench.models.families.llamagen:load",
        source=Source("the language model", "peizesun/llamagen_t2i", (file, "vq_ds16_t2i.pt"), "MIT"),
        companions=(_T5,),
        grid=(side, side),
        v_image=16384,
        defaults=Sampling(guidance=7.5, top_k=1000),
        parameters=777_923_840,
        step_parameters=752_446_720,
        layers=36,
        kv_numbers=2 * 36 * 1280,
        attention_numbers=36 * 1280,
        other_bytes=170_332_684 + 2_447_054_848,
        table=16_384,
        pixel_numbers=_VQGAN_NUMBERS,
    )


MODELS = (
    _lumina("lumina-512", 32, 512),
    _lumina("lumina", 48, 768),
    _lumina("lumina-1024", 64, 1024),
    HubModel(
        name="anole",
        summary="Anole 7B at 512 px",
        target="specbench.models.families.anole:load",
        source=Source("the language model", "leloy/Anole-7b-v0.1-hf", (*_LM, "tokenizer.json"), _CHAMELEON),
        grid=(32, 32),
        v_image=8192,
        defaults=Sampling(guidance=3.0, temperature=0.7, top_p=0.9),
        parameters=7_013_666_816,
        step_parameters=6_510_350_336,
        layers=32,
        kv_numbers=2 * 32 * 4096,
        attention_numbers=32 * 4096,
        other_bytes=165_831_180,
        table=65_536,
        pixel_numbers=_VQGAN_NUMBERS,
    ),
    _llamagen("llamagen", 16, "t2i_XL_stage1_256.pt"),
    _llamagen("llamagen-512", 32, "t2i_XL_stage2_512.pt"),
    HubModel(
        name="janus",
        summary="Janus-Pro 1B at 384 px",
        target="specbench.models.families.janus:load",
        source=Source(
            "the model",
            "deepseek-community/Janus-Pro-1B",
            (*_LM, "tokenizer.json", "tokenizer_config.json"),
            "MIT code, DeepSeek model licence (use restrictions)",
        ),
        grid=(24, 24),
        v_image=16384,
        defaults=Sampling(guidance=5.0),
        parameters=1_485_053_952,
        step_parameters=1_275_207_680,
        layers=24,
        kv_numbers=2 * 24 * 2048,
        attention_numbers=24 * 2048,
        other_bytes=85_166_342,
        table=102_400 + 16_384,
        pixel_numbers=_VQGAN_NUMBERS,
    ),
    HubModel(
        name="simplear",
        summary="SimpleAR 0.5B (RL) at 1024 px",
        target="specbench.models.families.simplear:load",
        source=Source(
            "the language model",
            "Daniel0724/SimpleAR-0.5B-RL",
            (*_LM, "tokenizer.json"),
            "not stated; code MIT, base model Apache-2.0",
        ),
        companions=(_COSMOS,),
        grid=(64, 64),
        v_image=64000,
        defaults=Sampling(guidance=6.0),
        parameters=551_140_224,
        step_parameters=415_242_112,
        layers=24,
        kv_numbers=2 * 24 * 128,
        attention_numbers=24 * 14 * 64,
        other_bytes=135_000_000,
        table=151_672 + 64_000,
        pixel_numbers=0,
    ),
    HubModel(
        name="emu3",
        summary="Emu3-Gen 8B at 720 px",
        target="specbench.models.families.emu3:load",
        source=Source("the model", "BAAI/Emu3-Gen-hf", (*_LM, "tokenizer.json"), "Apache-2.0"),
        grid=(90, 90),
        patch=8,
        row_ends=True,
        v_image=32768,
        defaults=Sampling(guidance=3.0, top_k=2048),
        parameters=8_492_011_520,
        step_parameters=7_113_805_824,
        layers=32,
        kv_numbers=2 * 32 * 8 * 128,
        attention_numbers=32 * 32 * 128,
        other_bytes=645_007_932,
        table=184_622,
        pixel_numbers=10_385,
    ),
)
