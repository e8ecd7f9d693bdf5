"""Tiny checkpoints in exactly the layout of the published ones: same file names, tensor names, special tokens and
configuration fields, small sizes, and random values everywhere, norms included. `write(name, folder)` gives a `Tiny`:
the folder for `--weights`, and the library's own (or the official) computation to compare with."""

from pathlib import Path

from refusals import refused

from checkpoints import (
    baai,
    chameleon,
    deepseek,
    emu3,
    emu35,
    gair,
    glm,
    janus,
    liquid,
    llamagen,
    simplear,
    tar,
    x_omni,
)
from checkpoints.parts import Tiny
from specbench.errors import SpecbenchError
from specbench.models.catalog import check_model, load_model
from specbench.models.facts import ModelChoice
from specbench.models.hub_model import MODELS, HubModel
from specbench.models.interface import ImageModel

WRITERS = {
    "lumina-512": lambda folder: chameleon.write_lumina(folder, 512),
    "lumina": lambda folder: chameleon.write_lumina(folder, 768),
    "lumina-1024": lambda folder: chameleon.write_lumina(folder, 1024), "lumina-34b": chameleon.write_lumina_34b,
    "lumina2": chameleon.write_lumina2, "anole": chameleon.write_anole,
    "llamagen": lambda folder: llamagen.write(folder, "t2i_XL_stage1_256.pt"),
    "llamagen-512": lambda folder: llamagen.write(folder, "t2i_XL_stage2_512.pt"), "janus": janus.write,
    "janus-7b": janus.write, "simplear": simplear.write, "simplear-1.5b": simplear.write_sharded, "tar-1.5b": tar.write,
    "tar-7b": lambda folder: tar.write(folder, tied=False),
    **{f"tar-dtok-{16 * side}": lambda folder, side=side: tar.write_detokenizer(folder, side) for side in (16, 32, 64)},
    "emu3": emu3.write, "liquid": liquid.write, "glm-image": glm.write, "emu3.5": emu35.write, "x-omni": x_omni.write,
    "llamagen-c2i-b": lambda folder: llamagen.write_by_class(folder, "c2i_B_384.pt"),
}  # fmt: skip
ALIKE = ("lumina-1024", "janus-7b", "tar-dtok-512", "tar-dtok-1024")
"""Models that share the small checkpoint of another model; tests of each layout leave them out."""

AUTHORS = {
    "janus": deepseek.write, "janus-7b": lambda folder: deepseek.write(folder, sharded=True), "emu3": baai.write,
    "anole": gair.write,
    "llamagen": lambda folder: llamagen.write(folder, "t2i_XL_stage1_256.pt", "t5-ckpt/flan-t5-xl"),
    "llamagen-512": lambda folder: llamagen.write(folder, "t2i_XL_stage2_512.pt", "t5-ckpt/flan-t5-xl", pickled=True),
}  # fmt: skip
"""The authors' own layouts, where `WRITERS` has a conversion of them."""

EVERY = {name: (name, writer) for name, writer in WRITERS.items()}
EVERY |= {f"{name} by its authors": (name, writer) for name, writer in AUTHORS.items()}
KINDS = [kind for kind in EVERY if kind not in ALIKE]
"""Kinds of checkpoints; `EVERY` gives the name of a kind's model, and the writer."""


def write(name: str, folder: Path) -> Tiny:
    return WRITERS[name](folder)


INFO = {info.name: info for info in MODELS}


def configured(name: str, folder: Path | str, **choice: object) -> HubModel:
    """The model of this name with tiny weights from a folder."""
    return INFO[name].configured(ModelChoice(weights=str(folder), tiny=True, **choice))


def loaded(name: str, folder: Path | str, **choice: object) -> ImageModel:
    return load_model(configured(name, folder, **choice), "cpu", "float32")


def random_tiny(name: str, **choice: object) -> ImageModel:
    """The model of this name with random weights, tiny."""
    return load_model(INFO[name].configured(ModelChoice(random=True, tiny=True, **choice)), "cpu", "float32")


def refusal(name: str, folder: Path | str) -> SpecbenchError:
    """The error of loading a folder: a single line, also printed by the check of the folder."""
    error = refused("", loaded, name, folder)
    assert error.exit_code in (2, 5)
    assert refused("", check_model, configured(name, folder)).what == error.what
    return error
