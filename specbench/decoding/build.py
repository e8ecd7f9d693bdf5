"""From a `DecoderSpec` to the objects the loop calls."""

from __future__ import annotations

import importlib
from typing import NamedTuple

from specbench.decoding.components import CHOICES
from specbench.decoding.context import Context
from specbench.decoding.drafters import Drafter
from specbench.decoding.presets import DecoderSpec
from specbench.decoding.refine import Resample
from specbench.decoding.verifiers import Verifier
from specbench.models.base import ImageModel


class Method(NamedTuple):
    """A decoder ready to run on one model."""

    drafter: Drafter
    verifier: Verifier
    refine: Resample


def load_target(target: str) -> object:
    """The object "module:attribute" names."""
    module, _, attribute = target.partition(":")
    return getattr(importlib.import_module(module), attribute)


def build(decoder: DecoderSpec, model: ImageModel) -> Method:
    """The parts of `decoder`, bound to `model`'s grammar, codebook and device."""

    def part(kind: str, *arguments: object) -> object:
        component = CHOICES[kind][getattr(decoder, kind)]
        given = dict(decoder.options)
        options = {o.name.replace("-", "_"): given.get(o.name, o.default) for o in component.options}
        return load_target(component.target)(*arguments, **options)

    residual = load_target(CHOICES["residual"][decoder.residual].target)
    context = Context(model.layout, model.codebook, model.device, residual)
    drafter = part("drafter", context, part("init", context))
    return Method(drafter, part("verifier", context), part("refine", context))
