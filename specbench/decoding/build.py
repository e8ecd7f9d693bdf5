"""From a `DecoderSpec` to the objects the loop calls."""

from __future__ import annotations

import importlib
import keyword
from dataclasses import replace
from typing import NamedTuple

from specbench.decoding.context import Context
from specbench.decoding.interfaces import Drafter
from specbench.decoding.verification.ratio_tests import Verifier
from specbench.decoding.verification.refinement import Resample
from specbench.models.interface import ImageModel
from specbench.specs.components import CHOICES
from specbench.specs.presets import DecoderSpec


class Method(NamedTuple):
    """A decoder ready to run on one model."""

    drafter: Drafter
    verifier: Verifier
    refine: Resample


def load_target(target: str) -> object:
    """The object "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def is_built_in(decoder: DecoderSpec) -> bool:
    """Whether all its parts are this package's own."""
    parts = (CHOICES[kind][getattr(decoder, kind)] for kind in CHOICES)
    return all(part.target.startswith("specbench.") for part in parts)


def build(decoder: DecoderSpec, model: ImageModel) -> Method:
    """The parts of `decoder`, bound to `model`'s grammar, codebook and device."""

    def part(kind: str, *arguments: object) -> object:
        component = CHOICES[kind][getattr(decoder, kind)]
        given = dict(decoder.options)
        options = {_parameter(o.name): given.get(o.name, o.default) for o in component.options}
        return load_target(component.target)(*arguments, **options)

    residual = load_target(CHOICES["residual"][decoder.residual].target)
    context = Context(model.layout, model.codebook, model.device, residual, model=model)
    drafter = part("drafter", context, part("init", context))
    context = replace(context, drafts=drafter.window - 1)
    return Method(drafter, part("verifier", context), part("refine", context))


def _parameter(option: str) -> str:
    """The parameter that takes an option."""
    name = option.replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name
