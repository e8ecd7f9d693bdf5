"""Builds the objects of a decoder from its `DecoderSpec`."""

from __future__ import annotations

import keyword
from dataclasses import replace
from typing import NamedTuple

from specbench.decoding.interfaces import Context, DecodeLoop, Drafter
from specbench.decoding.verification.ratio_tests import Verifier
from specbench.decoding.verification.refinement import Refinement
from specbench.models.interface import ImageModel
from specbench.specs.components import CHOICES
from specbench.specs.presets import DecoderSpec
from specbench.system.plugins import load_object, naming_plugin


class Method(NamedTuple):
    """A decoder bound to one model."""

    drafter: Drafter
    verifier: Verifier
    refinement: Refinement
    loop: type[DecodeLoop]  # class of the loop that runs it


def is_built_in(decoder: DecoderSpec) -> bool:
    """Whether all components belong to this package."""
    parts = (CHOICES[kind][getattr(decoder, kind)] for kind in CHOICES)
    return all(part.target.startswith("specbench.") for part in parts)


def build(decoder: DecoderSpec, model: ImageModel) -> Method:
    """Build the components of `decoder` for `model`'s token layout, codebook and device."""

    def part(kind: str, *arguments: object) -> object:
        component = CHOICES[kind][getattr(decoder, kind)]
        given = dict(decoder.options)
        options = {_parameter(o.name): given.get(o.name, o.default) for o in component.options}
        with naming_plugin(kind, getattr(decoder, kind), component.target):
            return load_object(component.target)(*arguments, **options)

    residual = load_object(CHOICES["residual"][decoder.residual].target)
    context = Context(model.layout, model.codebook, model.device, residual, model=model)
    drafter = part("drafter", context, part("init", context))
    context = replace(context, drafts=drafter.window - 1)
    loop = load_object(CHOICES["drafter"][decoder.drafter].loop)
    return Method(drafter, part("verifier", context), part("refine", context), loop)


def _parameter(option: str) -> str:
    """Name of the constructor parameter for an option."""
    name = option.replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name
