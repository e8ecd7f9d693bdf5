"""Loading of checkpoint files into networks. Every parameter and every stored tensor must be accounted for."""

import argparse
import re
import zipfile
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles, Source
from specbench.models.facts import require_torchao
from specbench.models.script_archive import read_script_tensors

_IN_LAYER = re.compile(r"(^|\.)layers\.\d+\.")


def read_tensors(files: CheckpointFiles) -> dict[str, Tensor]:
    """Read all tensors of the source's weight files, mapped into memory instead of copied if the format allows it.
    Pickled files are read with `weights_only=True`; the state dict may be the entry "model", "module", "state_dict"
    or "sd". From a TorchScript archive only the tensors are read."""
    tensors: dict[str, Tensor] = {}
    for path in files.ending(".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".jit"):
        stored = _read_file(files.source, path)
        if twice := tensors.keys() & stored.keys():
            raise SpecbenchError(f"{path}: tensor '{min(twice)}' is also in another file of {files.source.what}")
        tensors |= stored
    return tensors


def _read_file(source: Source, path: Path) -> dict[str, Tensor]:
    with source.blaming(path):
        if path.suffix == ".jit":
            return read_script_tensors(path)
        if path.suffix == ".safetensors":
            with safe_open(path, framework="pt") as file:
                return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    content = _unpickled(source, path)
    for name in ("model", "module", "state_dict", "sd"):
        if isinstance(content, dict) and isinstance(content.get(name), dict):
            content = content[name]
    if not isinstance(content, dict):
        raise source.damaged(path, TypeError("it contains no state dict"))
    return {name: tensor for name, tensor in content.items() if isinstance(tensor, Tensor)}


def _unpickled(source: Source, path: Path) -> Any:
    # Training scripts often store their parsed arguments with the weights.
    with source.blaming(path), torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))


def read_arguments(files: CheckpointFiles) -> dict[str, Any]:
    """Read the arguments of the network in a pickled file: the entry "args" of the entry "model"."""
    [path] = files.paths
    content = _unpickled(files.source, path)
    with files.source.blaming(path):
        return dict(content["model"]["args"])


def read_model_config(files: CheckpointFiles, kind: Any) -> Any:
    config = files.json("config.json")
    with files.blaming("config.json"):
        return kind.from_dict(config)


def read_tokenizer(files: CheckpointFiles, name: str = "tokenizer.json") -> Tokenizer:
    """Load a tokenizers file exactly as it describes itself, without reinterpretation by a tokenizer class."""
    with files.blaming(name):
        return Tokenizer.from_file(str(files.named(name)))


def token_id(tokenizer: Tokenizer, name: str) -> int:
    if (number := tokenizer.token_to_id(name)) is None:
        raise SpecbenchError(f"the tokenizer has no token '{name}'", "check that it is the tokenizer of this model")
    return number


def named_token(files: CheckpointFiles, *roles: str) -> str:
    """Return the token's name in `tokenizer_config.json` for the first of `roles` that the file has."""
    for entry in map(files.json("tokenizer_config.json").get, roles):
        name = entry.get("content") if isinstance(entry, dict) else entry
        if isinstance(name, str):
            return name
    raise files.refusal(f" names no {roles[0]}", files.named("tokenizer_config.json"))


def rename(tensors: Mapping[str, Tensor], names: Callable[[str], str | None]) -> dict[str, Tensor]:
    """Rename tensors by `names`. A tensor keeps its name if `names` returns None for it."""
    return {names(name) or name: tensor for name, tensor in tensors.items()}


META_NAMES = {
    "tok_embeddings.": "model.embed_tokens.",
    "norm.": "model.norm.",
    "attention.wo.": "self_attn.o_proj.",
    "attention_norm.": "input_layernorm.",
    "ffn_norm.": "post_attention_layernorm.",
    "feed_forward.w1.": "mlp.gate_proj.",
    "feed_forward.w3.": "mlp.up_proj.",
    "feed_forward.w2.": "mlp.down_proj.",
}
"""Prefixes of tensor names in Meta's Llama (without the layer number), and the prefixes in transformers."""


def meta_name(name: str, names: Mapping[str, str]) -> str:
    """Return transformers' name for a tensor name of Meta's Llama. `names`: prefixes, as in `META_NAMES`."""
    inner = re.sub(r"^layers\.\d+\.", "", name)
    layer = name.removesuffix(inner)
    old = next((old for old in names if inner.startswith(old)), "")
    return (f"model.{layer}" if layer else "") + names.get(old, "") + inner.removeprefix(old)


def drop(tensors: Mapping[str, Tensor], prefixes: Sequence[str]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(tuple(prefixes))}


def rotary_halves(matrix: Tensor, head: int) -> Tensor:
    """Reorder rows [heads * head, d]: authors store rotary pairs side by side, transformers half a head apart."""
    return matrix.view(-1, head // 2, 2, matrix.shape[1]).transpose(1, 2).reshape(-1, matrix.shape[1])


def build_network(
    kind: Callable[..., nn.Module], *arguments: object, files: CheckpointFiles | None = None
) -> nn.Module:
    """Build a network on the meta device; `fill` or `randomise` then sets its parameters. `files`: source of the
    configuration, if any; a configuration that fails to build a network is then reported as a damaged file."""
    try:
        with torch.device("meta"):
            return kind(*arguments)
    except Exception as error:
        if files is None:
            raise
        described = next((path for path in files.paths if path.suffix == ".json"), files.paths[0])
        raise files.source.damaged(described, error) from error


def fill(
    network: nn.Module,
    tensors: Mapping[str, Tensor],
    files: CheckpointFiles,
    device: str,
    dtype: torch.dtype,
    eight_bits: bool = False,
) -> nn.Module:
    """Assign its stored value to every parameter of a built network, and set evaluation mode. `tensors` must be exactly
    the parameters; shared parameters may be missing. On the device "meta" everything is checked, but no value is read.
    `eight_bits`: quantise the matrices of layers, see `quantise`."""
    built = network.state_dict()
    tied = getattr(network, "all_tied_weights_keys", None) or {}
    if missing := sorted(built.keys() - tensors.keys() - tied.keys()):
        raise _unaccounted(files, "lacks", missing)
    if unknown := sorted(tensors.keys() - built.keys()):
        raise _unaccounted(files, "holds unknown", unknown)
    for name, tensor in tensors.items():
        if tensor.shape != built[name].shape:
            shapes = f"{list(tensor.shape)}, but the network needs {list(built[name].shape)}"
            raise files.refusal(f": {name} has shape {shapes}")
    for name, source in tied.items():
        if name in tensors and not torch.equal(tensors[name], tensors[source]):
            raise files.refusal(f": the configuration ties {name} to {source}, but their values differ")
    network.load_state_dict(tensors, strict=False, assign=True)
    _finish(network, device)
    for name, module in network.named_modules() if device != "meta" else ():
        for parameter in module.parameters(recurse=False):
            parameter.data = parameter.data.to(device=device, dtype=dtype)
        if eight_bits:
            quantise(module, name)
    return network


def randomise(
    network: nn.Module, device: str, dtype: torch.dtype, seed: int = 0, eight_bits: bool = False
) -> nn.Module:
    """Draw every parameter of a built network: norms are 1, biases 0, matrices keep the variance of their input. On the
    device "meta" the network has shapes, but no values."""
    network.to(dtype)
    if device == "meta":
        return network.requires_grad_(False).eval()
    generator = torch.Generator(device).manual_seed(seed)
    for path, module in network.named_modules():
        module.to_empty(device=device, recurse=False).requires_grad_(False)
        for name, parameter in module.named_parameters(path, recurse=False):
            if parameter.dim() > 1 and "norm" not in name:
                parameter.normal_(0.0, parameter[0].numel() ** -0.5, generator=generator)
            else:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
        if eight_bits:
            quantise(module, path)
    return _finish(network, device)


def _finish(network: nn.Module, device: str) -> nn.Module:
    if hasattr(network, "tie_weights"):
        network.tie_weights()
    renew_rotary(network)
    left = [name for name, tensor in chain(network.named_parameters(), network.named_buffers()) if tensor.is_meta]
    if left:
        raise RuntimeError(f"never given a value: {left}")
    network.requires_grad_(False).eval()
    if device == "meta":
        return network
    for module in network.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # Rotary frequencies stay float32 in every dtype.
            setattr(module, name, buffer.to(device))
    return network


def renew_rotary(network: nn.Module) -> None:
    """Recompute rotary frequencies and embedding scales: they are not stored, so a network built on meta lacks them."""
    for module in list(network.modules()):
        if hasattr(module, "scalar_embed_scale"):
            module.embed_scale = torch.tensor(module.scalar_embed_scale)
        for name, child in list(module.named_children()):
            if isinstance(getattr(child, "inv_freq", None), Tensor):
                setattr(module, name, type(child)(child.config))


def _unaccounted(files: CheckpointFiles, verb: str, names: Sequence[str]) -> SpecbenchError:
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return files.refusal(f" {verb} '{names[0]}'{more}")


def quantise(module: nn.Module, name: str) -> None:
    """Store the weight of one module in eight bits, with a scale per row, if `name` is a matrix of a layer.
    Weights are converted individually, so that no device has to hold all of them in sixteen bits."""
    if not _in_layer(module, name):
        return
    require_torchao()
    from torchao.quantization import Int8WeightOnlyConfig, quantize_  # optional dependency

    quantize_(module, Int8WeightOnlyConfig())


def quantise_network(network: nn.Module) -> nn.Module:
    """Apply `quantise` to every module of a network that is already on its device."""
    for name, module in network.named_modules():
        quantise(module, name)
    return network


def round_to_eight_bits(model: Any) -> None:
    """Round a model's weights to the values of `quantise_network`, but keep their number format. Needs no torchao."""
    if not isinstance(getattr(model, "backbone", None), nn.Module):
        raise SpecbenchError(f"'{model.name}' has no transformer to round")
    for name, module in model.backbone.named_modules():
        if _in_layer(module, name):
            step = module.weight.abs().amax(1, keepdim=True) / 127
            module.weight.data = (module.weight / step.clamp(min=torch.finfo(step.dtype).tiny)).round() * step


def _in_layer(module: nn.Module, name: str) -> bool:
    return type(module) is nn.Linear and _IN_LAYER.search(name) is not None
