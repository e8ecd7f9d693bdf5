"""Small networks of every causal language model of transformers, by its name in the library's mapping."""

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

NAMES = sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
_SIZES = {
    **dict.fromkeys(
        ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size", "word_embed_proj_dim"), 32
    ),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner", "dff", "ff_dim", "ffn_hidden_size", "d_ff"), 48),
    **dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim"), 48),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"), 3),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "attention_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"), 256),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "sliding_window", "attention_chunk_size"), 16),
    **dict.fromkeys(("head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "rotary_dim"), 8),
    **dict.fromkeys(("num_key_value_heads", "n_head_kv", "num_experts_per_tok", "encoder_layers"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace"), 1),
    **{"vocab_size": 48, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
    # What several families leave out of a plain product, so that it must be found.
    **{"logits_scaling": 4.0, "logit_scale": 0.5, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 2.0},
}
_LATENT = ("axk1", "axk2", "deepseek_v2", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa")
_ENCODERS = ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "roberta", "big_bird", "xmod")
_ENCODERS += ("roberta-prelayernorm", "xlm-roberta", "xlm-roberta-xl", "roformer", "rembert", "megatron-bert")
_ENCODERS += ("roc_bert",)
_MORE = {
    **{key: {"num_key_value_heads": 4} for key in (*_LATENT, "longcat_flash", "minicpm3", "youtu")},
    **{key: {"is_decoder": True} for key in _ENCODERS}, "zaya": {"num_experts_per_tok": 1},
    "dots1": {"n_shared_experts": 1}, "falcon": {"head_dim": None}, "xlstm": {"v_head_dim": None},
    "xlnet": {"max_position_embeddings": None, "n_ctx": None, "max_seq_len": None},
    **{key: {"mamba_n_heads": 4, "mamba_d_head": "auto"} for key in ("bamba", "granitemoehybrid")},
    "mamba2": {"num_heads": 8}, "zamba2": {"num_hidden_layers": 54},
}  # fmt: skip


def configuration(name: str) -> transformers.PreTrainedConfig:
    """A small configuration; any error if the settings here do not fit the family."""
    kind = CONFIG_MAPPING[name]
    default = kind()
    text = default.get_text_config(decoder=True)
    inside = [key for key, value in vars(default).items() if value is text and text is not default]
    sizes = {key: value for key, value in (_SIZES | _MORE.get(name, {})).items() if value is not None}
    known = {key: value for key, value in sizes.items() if hasattr(text, key)}
    return kind(**{inside[0]: type(text)(**known)}) if inside else kind(**known)


def build(name: str, attention: str | None = None) -> nn.Module | None:
    """The network with random weights; None without this attention, or if it is large or does not build."""
    names = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name]
    kind = getattr(transformers, names if isinstance(names, str) else names[0])
    try:
        with torch.device("meta"):
            weights = sum(parameter.numel() for parameter in kind(configuration(name)).parameters())
        if weights > 5e6:
            return None
        torch.manual_seed(0)
        network = kind._from_config(configuration(name), **({"attn_implementation": attention} if attention else {}))
    except Exception:
        return None
    return randomise(network.eval())


@torch.no_grad()
def randomise(network: nn.Module) -> nn.Module:
    """Values large enough that what is left out changes log p by more than rounding."""
    generator = torch.Generator().manual_seed(0)
    for parameter in network.parameters():
        if parameter.is_floating_point():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    return network
