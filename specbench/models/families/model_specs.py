"""The text-to-image families with official checkpoints, as facts that need no torch.

Sources of the facts: each family's official repository and its configuration on the hub.
"""

from __future__ import annotations

import math
from dataclasses import replace

from specbench.models import network_sizes as sizes
from specbench.models.checkpoint_files import Source
from specbench.models.checkpoint_layouts import Layout
from specbench.models.hub_model import HubModel, Sizes
from specbench.specs.run_spec import Sampling

_CHAMELEON = "Chameleon research licence (Meta), non-commercial"
_JANUS = "MIT code, DeepSeek model licence (use restrictions)"
_LM = ("config.json", "*.safetensors*")
_META_TOKENIZER = "ckpts/chameleon/tokenizer"
"""Where Lumina-mGPT's readme puts Meta's tokenizer files."""
_VQ = Source(
    "the image decoder (Chameleon's VQGAN)",
    "leloy/Anole-7b-v0.1-vqvae-hf",
    ("*.safetensors",),
    _CHAMELEON,
    beside=("vqgan.ckpt", "tokenizer/vqgan.ckpt", f"{_META_TOKENIZER}/vqgan.ckpt"),
    note="Lumina-mGPT ships none; Meta's vqgan.ckpt serves as well",
)
_VQGAN_NUMBERS = 387
"""Numbers per pixel while a VQGAN draws: three maps of 128 channels, and little else."""
_MOVQ_NUMBERS = 1569
"""The same for MoVQGAN and Emu3's decoder: three maps of 512 channels, and slices."""
_T5 = Source(
    "the text encoder",
    "google/flan-t5-xl",
    ("config.json", "*.safetensors*|pytorch_model*.bin*", "tokenizer.json"),
    "Apache-2.0",
    note="11.4 GB in float32",
    folders=("t5-ckpt/flan-t5-xl",),
)
_COSMOS = Source(
    "the image decoder (Cosmos DV8x16x16)",
    "nvidia/Cosmos-1.0-Tokenizer-DV8x16x16",
    ("decoder.jit",),
    "NVIDIA Open Model License",
    beside=("decoder.jit",),
)
_EMU3_VQ = Source("the image tokenizer", "BAAI/Emu3-VisionTokenizer", _LM, "Apache-2.0")


_EMU35_GRIDS = ((55, 73), (41, 97), (47, 85), (52, 78), (64, 64), (73, 55), (85, 47), (78, 52))
"""Height and width in tokens of the authors' aspect ratios, the default first."""


def _lumina(name: str, side: int, repo: str, size: sizes.NetworkSize) -> HubModel:
    holds_tokenizer = repo == "Lumina-mGPT-7B-768"
    tokenizer = Source(
        "the tokenizer", "Alpha-VLLM/Lumina-mGPT-7B-768", ("tokenizer.json",), _CHAMELEON, beside=("tokenizer.json",)
    )
    billions = repo.split("-")[2]
    return HubModel(
        name=name,
        summary=f"Lumina-mGPT {billions} at {16 * side} px",
        target="specbench.models.families.lumina:load",
        source=Source(
            "the language model", f"Alpha-VLLM/{repo}", _LM + ("tokenizer.json",) * holds_tokenizer, _CHAMELEON
        ),
        companions=(_VQ,) if holds_tokenizer else (_VQ, tokenizer),
        grid=(side, side),
        row_ends=True,
        v_image=8192,
        defaults=Sampling(guidance=3.0, top_k=2000),
        network=size,
        sizes=_square(16 * side),
        other_bytes=165_831_180,
        pixel_numbers=_VQGAN_NUMBERS,
    )


def _square(side: int, least: int = 0) -> Sizes:
    """Sizes up to the area of a square."""
    return Sizes(pixels=(least**2, side**2))


def _glm_preview(height: int, width: int) -> tuple[tuple[int, int], ...]:
    """Height and width of GLM-Image's preview of a grid: about 256 tokens in its ratio, rounded down as its processor
    does."""
    ratio = height / width
    return ((int(math.sqrt(ratio) * 16), int(math.sqrt(1 / ratio) * 16)),)


def _llamagen(name: str, side: int, file: str) -> HubModel:
    return HubModel(
        name=name,
        summary=f"LlamaGen XL text-to-image at {16 * side} px",
        target="specbench.models.families.llamagen:load",
        source=Source("the language model", "peizesun/llamagen_t2i", (file, "vq_ds16_t2i.pt"), "MIT"),
        companions=(_T5,),
        caption_tokens=120,
        grid=(side, side),
        v_image=16384,
        defaults=Sampling(guidance=7.5, top_k=1000),
        network=sizes.LLAMAGEN_XL,
        other_bytes=170_332_684 + 2_447_054_848,
        pixel_numbers=_VQGAN_NUMBERS,
    )


def _llamagen_class(size: str, side: int, guidance: float, only: bool = True) -> HubModel:
    """`only`: whether it is the only grid that is published for the size, or the first of two."""
    ending = "" if only else f"-{16 * side}"
    return HubModel(
        name=f"llamagen-c2i-{size}{ending}",
        summary=f"LlamaGen {size.upper()} by class at {16 * side} px",
        target="specbench.models.families.llamagen_class:load",
        source=Source(
            "the model", "FoundationVision/LlamaGen", (f"c2i_{size.upper()}_{16 * side}.pt", "vq_ds16_c2i.pt"), "MIT"
        ),
        grid=(side, side),
        v_image=16384,
        classes=1000,
        defaults=Sampling(guidance=guidance),
        network=sizes.LLAMAGEN_CLASS[size],
        other_bytes=170_332_684,
        pixel_numbers=_VQGAN_NUMBERS,
    )


def _janus(name: str, billions: str, size: sizes.NetworkSize) -> HubModel:
    tokenizer = ("tokenizer.json", "tokenizer_config.json")
    published = Source(
        "the model",
        f"deepseek-ai/Janus-Pro-{billions}",
        ("config.json", "pytorch_model*.bin*|*.safetensors*", *tokenizer),
        _JANUS,
    )
    return HubModel(
        name=name,
        summary=f"Janus-Pro {billions} at 384 px",
        target="specbench.models.families.janus:load",
        source=Source("the model", f"deepseek-community/Janus-Pro-{billions}", (*_LM, *tokenizer), _JANUS),
        also=(Layout("janus-deepseek", (published,)),),
        grid=(24, 24),
        v_image=16384,
        defaults=Sampling(guidance=5.0),
        network=size,
        other_bytes=85_166_342,
        pixel_numbers=_VQGAN_NUMBERS,
    )


def _simplear(name: str, billions: str, size: sizes.NetworkSize) -> HubModel:
    return HubModel(
        name=name,
        summary=f"SimpleAR {billions} (RL) at 1024 px",
        target="specbench.models.families.simplear:load",
        source=Source(
            "the language model",
            f"Daniel0724/SimpleAR-{billions}-RL",
            (*_LM, "tokenizer.json"),
            "not stated; code MIT, base model Apache-2.0",
            optional=("generation_config.json",),
        ),
        companions=(_COSMOS,),
        grid=(64, 64),
        v_image=64000,
        defaults=Sampling(guidance=6.0),
        network=size,
        other_bytes=222_841_792,
        pixel_numbers=116,
    )


_TAR_LICENCE = "not seen; code Apache-2.0"
_TA_TOK_PARAMETERS = 147_308_544
"""Of TA-Tok's decoder with a code table as wide as the embeddings of Qwen2.5 1.5B, which was not seen."""
_TAR_VQ = Source(
    "the image decoder (LlamaGen's VQGAN)", "peizesun/llamagen_t2i", ("vq_ds16_t2i.pt",), "MIT", ("vq_ds16_t2i.pt",)
)


def _tar_detokenizer(side: int) -> HubModel:
    files = f"ar_dtok_lp_{16 * side}px.pth", "ta_tok.pth"
    return HubModel(
        name=f"tar-dtok-{16 * side}",
        summary=f"Tar's de-tokenizer, its second stage, at {16 * side} px",
        target="specbench.models.families.tar_dtok:load",
        source=Source("the de-tokenizer", "csuhan/TA-Tok", files, _TAR_LICENCE),
        companions=(_TAR_VQ,),
        grid=(side, side),
        v_image=16384,
        codes=65536,
        defaults=Sampling(guidance=4.0),
        network=sizes.tar_detokenizer(side**2, 1280, 30, 20),
        other_bytes=170_332_684 + 2 * _TA_TOK_PARAMETERS,
        pixel_numbers=_VQGAN_NUMBERS,
    )


_TAR_DETOKENIZERS = tuple(map(_tar_detokenizer, (64, 32, 16)))


def _tar(billions: str, version: str, size: sizes.NetworkSize) -> HubModel:
    """Its memory includes the second stage, with the KV cache of one picture."""
    files, second = (*_LM, "tokenizer.json"), _TAR_DETOKENIZERS[0]
    optional = ("generation_config.json",)
    return HubModel(
        name=f"tar-{billions.lower()}",
        summary=f"Tar {billions}, then its de-tokenizer at 1024 px",
        target="specbench.models.families.tar:load",
        source=Source("the language model", f"csuhan/Tar-{billions}{version}", files, _TAR_LICENCE, optional=optional),
        companions=(second.source, *second.companions),
        grid=(27, 27),
        v_image=65536,
        codes=65536,
        guided=False,
        sizes=Sizes(tuple(one.resolution for one in _TAR_DETOKENIZERS)),
        second=_TAR_DETOKENIZERS,
        defaults=Sampling(guidance=1.0, top_k=1200, top_p=0.95),
        network=size,
        other_bytes=second.fixed_bytes() + 2 * 2 * (27 * 27 + second.stream) * second.network.kv_numbers,
        pixel_numbers=_VQGAN_NUMBERS,
    )


MODELS = (
    _lumina("lumina-512", 32, "Lumina-mGPT-7B-512", sizes.CHAMELEON_7B),
    _lumina("lumina", 48, "Lumina-mGPT-7B-768", sizes.CHAMELEON_7B),
    _lumina("lumina-1024", 64, "Lumina-mGPT-7B-1024", sizes.CHAMELEON_7B),
    _lumina("lumina-34b", 32, "Lumina-mGPT-34B-512", sizes.CHAMELEON_34B),
    HubModel(
        name="lumina2",
        summary="Lumina-mGPT 2.0 7B at 768 px",
        target="specbench.models.families.lumina2:load",
        source=Source(
            "the language model",
            "Alpha-VLLM/Lumina-mGPT-2.0",
            (*_LM, "tokenizer.json", "tokenizer_config.json"),
            "Apache-2.0",
        ),
        companions=(
            Source(
                "the image decoder (MoVQGAN 270M)",
                "ai-forever/MoVQGAN",
                ("movqgan_270M.ckpt",),
                "not seen",
                beside=("movqgan_270M.ckpt", "movqgan/270M/movqgan_270M.ckpt"),
            ),
        ),
        grid=(96, 96),
        patch=8,
        row_ends=True,
        sizes=_square(768),
        v_image=16384,
        defaults=Sampling(guidance=4.0, top_k=4096),
        network=sizes.LUMINA2_7B,
        other_bytes=644_735_068,
        pixel_numbers=_MOVQ_NUMBERS,
    ),
    HubModel(
        name="anole",
        summary="Anole 7B at 512 px",
        target="specbench.models.families.anole:load",
        source=Source("the language model", "leloy/Anole-7b-v0.1-hf", (*_LM, "tokenizer.json"), _CHAMELEON),
        also=(
            Layout(
                "anole-meta",
                (
                    Source(
                        "the model",
                        "GAIR/Anole-7b-v0.1",
                        (
                            "models/7b/consolidated*.pth|consolidated*.pth",
                            "models/7b/params.json|params.json",
                            "tokenizer/text_tokenizer.json|text_tokenizer.json",
                            "tokenizer/vqgan.ckpt|vqgan.ckpt",
                        ),
                        _CHAMELEON,
                    ),
                ),
            ),
        ),
        grid=(32, 32),
        v_image=8192,
        defaults=Sampling(guidance=3.0, temperature=0.7, top_p=0.9),
        network=sizes.CHAMELEON_7B,
        other_bytes=165_831_180,
        pixel_numbers=_VQGAN_NUMBERS,
    ),
    _llamagen("llamagen", 16, "t2i_XL_stage1_256.pt"),
    _llamagen("llamagen-512", 32, "t2i_XL_stage2_512.pt"),
    _llamagen_class("b", 24, 2.0),
    _llamagen_class("b", 16, 2.0, only=False),
    _llamagen_class("l", 24, 2.0),
    _llamagen_class("l", 16, 2.0, only=False),
    _llamagen_class("xl", 24, 1.75),
    _llamagen_class("xxl", 24, 1.75),
    _llamagen_class("3b", 24, 1.65),
    _janus("janus", "1B", sizes.JANUS_1B),
    _janus("janus-7b", "7B", sizes.JANUS_7B),
    _simplear("simplear", "0.5B", sizes.SIMPLEAR_05B),
    _simplear("simplear-1.5b", "1.5B", sizes.SIMPLEAR_15B),
    _tar("1.5B", "", sizes.TAR_15B),
    _tar("7B", "-v0.1", sizes.TAR_7B),
    *_TAR_DETOKENIZERS,
    HubModel(
        name="liquid",
        summary="Liquid 7B at 512 px",
        target="specbench.models.families.liquid:load",
        source=Source(
            "the language model", "Junfeng5/Liquid_V1_7B", (*_LM, "tokenizer.json"), "MIT, Gemma terms of use"
        ),
        companions=(
            replace(_VQ, beside=("vqgan.ckpt", "chameleon/vqgan.ckpt"), note="Meta's vqgan.ckpt serves as well"),
        ),
        grid=(32, 32),
        v_image=8192,
        defaults=Sampling(guidance=7.0, temperature=0.99, top_k=4096, top_p=0.96),
        network=sizes.LIQUID_7B,
        other_bytes=165_831_180,
        pixel_numbers=_VQGAN_NUMBERS,
    ),
    HubModel(
        name="glm-image",
        summary="GLM-Image 9B at 1024 px, a preview first",
        target="specbench.models.families.glm:load",
        source=Source(
            "the language model",
            "zai-org/GLM-Image",
            (
                "vision_language_encoder/config.json",
                "vision_language_encoder/*.safetensors*",
                "processor/tokenizer.json",
                "processor/tokenizer_config.json",
                "processor/chat_template.jinja",
            ),
            "not seen; code Apache-2.0",
            optional=("vision_language_encoder/generation_config.json",),
        ),
        grid=(32, 32),
        patch=32,
        before=_glm_preview,
        sizes=_square(2048, 512),
        v_image=16512,
        guided=False,
        defaults=Sampling(guidance=1.0, temperature=0.9, top_k=50, top_p=0.75),
        network=sizes.GLM_9B,
        other_bytes=134_217_728,
        pixel_numbers=0,
    ),
    HubModel(
        name="emu3",
        summary="Emu3-Gen 8B at 720 px",
        target="specbench.models.families.emu3:load",
        source=Source("the model", "BAAI/Emu3-Gen-hf", (*_LM, "tokenizer.json"), "Apache-2.0"),
        also=(
            Layout(
                "emu3-baai",
                (
                    Source(
                        "the language model",
                        "BAAI/Emu3-Gen",
                        (*_LM, "emu3.tiktoken", "emu3_vision_tokens.txt"),
                        "Apache-2.0",
                    ),
                    _EMU3_VQ,
                ),
            ),
        ),
        grid=(90, 90),
        patch=8,
        row_ends=True,
        v_image=32768,
        defaults=Sampling(guidance=3.0, top_k=2048),
        network=sizes.EMU3_8B,
        other_bytes=645_007_932,
        pixel_numbers=_MOVQ_NUMBERS,
    ),
    HubModel(
        name="emu3.5",
        summary="Emu3.5-Image 34B, 4:3 at 1 megapixel",
        target="specbench.models.families.emu35:load",
        source=Source("the language model", "BAAI/Emu3.5-Image", _LM, "Apache-2.0"),
        companions=(
            Source(
                "the tokenizer",
                "BAAI/Emu3.5-Image",
                ("emu3.tiktoken", "emu3_vision_tokens.txt"),
                "Apache-2.0",
                note="the authors' code has it in src/tokenizer_emu3_ibq",
                folders=("tokenizer_emu3_ibq", "src/tokenizer_emu3_ibq"),
            ),
            Source(
                "the image decoder (IBQ)", "BAAI/Emu3.5-VisionTokenizer", ("model.ckpt|*.safetensors",), "Apache-2.0"
            ),
        ),
        grid=(55, 73),
        row_ends=True,
        sizes=Sizes(tuple((16 * height, 16 * width) for height, width in _EMU35_GRIDS)),
        v_image=131_072,
        defaults=Sampling(guidance=5.0, top_k=5120),
        network=sizes.EMU35_34B,
        other_bytes=350_000_000,
        pixel_numbers=_VQGAN_NUMBERS,
    ),
)
