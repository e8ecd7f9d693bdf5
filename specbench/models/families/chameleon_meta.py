"""Chameleon in Meta's layout, in which Anole's authors publish it: a pickle of the language model, `params.json`,
`text_tokenizer.json` and `vqgan.ckpt`."""

from collections.abc import Mapping

from torch import Tensor
from transformers import ChameleonConfig

from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.checkpoint_loading import META_NAMES, meta_name, rotary_halves

PARAMS, TOKENIZER, IMAGE = "params.json", "text_tokenizer.json", "vqgan.ckpt"
_IMAGE_WORD = "<reserved08707>"  # Meta's placeholder of an image inside a text, which transformers calls <image>
_HEAD, _FIRST_GATE = "output.weight", "layers.0.feed_forward.w1.weight"
_NAMES = META_NAMES | {
    "output.": "lm_head.",
    "attention.wq.": "self_attn.q_proj.",
    "attention.wk.": "self_attn.k_proj.",
    "attention.wv.": "self_attn.v_proj.",
    "attention.q_normalization.": "self_attn.q_norm.",
    "attention.k_normalization.": "self_attn.k_norm.",
}
_ROTATED = ("attention.wq.", "attention.wk.", "attention.q_normalization.", "attention.k_normalization.")


def is_meta(files: CheckpointFiles) -> bool:
    return files.holds(PARAMS)


def read_meta_config(tensors: Mapping[str, Tensor], files: CheckpointFiles) -> ChameleonConfig:
    """Convert `params.json` and the shapes of the tensors to transformers' configuration."""
    if len(shards := files.ending(".pth")) > 1:
        raise files.refusal(f": {len(shards)} model-parallel shards are not supported", shards[0].parent)
    content, listed = files.json(PARAMS), files.named(TOKENIZER)
    model = files.json(TOKENIZER).get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if not isinstance(vocabulary, dict) or _IMAGE_WORD not in vocabulary:
        raise files.source.damaged(listed, ValueError(f"no vocabulary with {_IMAGE_WORD} in it"))
    for name in (_HEAD, _FIRST_GATE):
        if name not in tensors:
            raise files.refusal(f" lacks '{name}'", files.ending(".pth")[0])
    with files.blaming(PARAMS):
        params = content.get("model", content)
        heads = params["n_heads"]
        return ChameleonConfig(
            vocab_size=len(tensors[_HEAD]),
            hidden_size=params["dim"],
            intermediate_size=len(tensors[_FIRST_GATE]),
            num_hidden_layers=params["n_layers"],
            num_attention_heads=heads,
            num_key_value_heads=params.get("n_kv_heads") or heads,
            rms_norm_eps=params["norm_eps"],
            rope_parameters={"rope_type": "default", "rope_theta": params.get("rope_theta", 10_000.0)},
            swin_norm=params.get("swin_norm", False),
            vocabulary_map={**vocabulary, "<image>": vocabulary[_IMAGE_WORD]},
        )


def convert_meta(tensors: Mapping[str, Tensor], config: ChameleonConfig, files: CheckpointFiles) -> dict[str, Tensor]:
    """Rename Meta's tensors for transformers, and reorder queries and keys to rotary pairs half a head apart."""
    head = config.hidden_size // config.num_attention_heads
    converted = {}
    for name, tensor in tensors.items():
        if name == "rope.freqs":  # rotary frequencies, which are computed and not learned
            continue
        if any(part in name for part in _ROTATED):
            if len(tensor) % head or head % 2:
                raise files.refusal(f": {name} has {len(tensor)} rows, not heads of {head}", files.ending(".pth")[0])
            # Norms are stored once for all heads.
            tensor = rotary_halves(tensor, head) if tensor.dim() > 1 else rotary_halves(tensor[:, None], head).T
        converted[meta_name(name, _NAMES)] = tensor
    return converted
