"""Function-preserving growth of the network: a trained network as the start of a wider and deeper one.

New parts read anything and write zero at first: new residual channels, heads and MLP units start at zero output, and
new layers add nothing. The grown network computes what the small one did, and its new parts learn from the first step.

`python -m specbench.training.shapes.grow FROM TO --width 192 --layers 8 --inner 576` grows the state of a run, for
`--resume-from` of `specbench.training.shapes`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from specbench.models.shapes.network import ShapesNetwork
from specbench.training.shapes.train_ar import Auxiliary

WRITERS = ("self_attn.o_proj", "mlp.down_proj", "mix_out")
EMBEDDINGS = ("embed_tokens", "row.", "column.", "place.", "slot_word")


@torch.no_grad()
def grow(network: ShapesNetwork, width: int, layers: int, inner: int) -> ShapesNetwork:
    """A network of at least the old sizes that computes the same function; heads keep their dimension.

    Raises:
        ValueError: a size is below that of `network`, or the width does not fit whole heads.
    """
    old = network.config
    head_size = old["width"] // old["heads"]
    if width < old["width"] or layers < old["layers"] or inner < old["inner"] or width % head_size:
        raise ValueError(f"cannot grow {old} to width {width}, {layers} layers, inner {inner}")
    grown = ShapesNetwork(old["codes"], width, layers, width // head_size, inner)
    grow_into(network, grown, old["width"] / width)
    return grown


@torch.no_grad()
def grow_into(small: nn.Module, large: nn.Module, share: float) -> None:
    """Copy the parameters of `small` into the upper left corners of those of `large`, and set to zero what the new
    parts write.

    Args:
        share: old over new width. Zero channels lower the mean square that an RMSNorm divides by; its weight makes up.
    """
    source = dict(small.named_parameters())
    for name, parameter in large.named_parameters():
        if any(part in name for part in (*WRITERS, *EMBEDDINGS)):
            parameter.zero_()
        if "norm" in name:
            parameter.fill_(share**0.5)
        if name in source:
            corner = parameter[tuple(slice(size) for size in source[name].shape)]
            corner.copy_(_scaled(name, source[name], share))


def _scaled(name: str, value: Tensor, share: float) -> Tensor:
    return value * share**0.5 if "norm" in name else value


def grow_state(source: Path, target: Path, width: int, layers: int, inner: int) -> None:
    """Grow a state written by `Trainer.export_state` and write it to the folder `target`, all of it in float32."""
    target.mkdir(parents=True, exist_ok=True)
    place = json.loads((source / "state.json").read_text())
    sizes = place["sizes"]
    for name in ("network", "averaged"):
        network = ShapesNetwork(**sizes)
        network.load_state_dict(_float32(source / f"{name}.safetensors"))
        grown = grow(network, width, layers, inner)
        save_file(grown.state_dict(), target / f"{name}.safetensors", metadata={"format": "pt"})
    small, large = Auxiliary(sizes["width"]), Auxiliary(width)
    small.load_state_dict(_float32(source / "auxiliary.safetensors"))
    grow_into(small, large, sizes["width"] / width)
    save_file(large.state_dict(), target / "auxiliary.safetensors", metadata={"format": "pt"})
    (target / "state.json").write_text(json.dumps(place | {"sizes": grown.config}) + "\n")


def _float32(file: Path) -> dict[str, Tensor]:
    return {name: value.float() for name, value in load_file(file).items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specbench.training.shapes.grow", description=__doc__)
    parser.add_argument("source", type=Path, help="folder written by --export-state")
    parser.add_argument("target", type=Path, help="folder to write")
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--layers", type=int, required=True)
    parser.add_argument("--inner", type=int, required=True)
    args = parser.parse_args()
    grow_state(args.source, args.target, args.width, args.layers, args.inner)


if __name__ == "__main__":
    main()
