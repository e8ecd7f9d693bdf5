"""Build the components and the decode loop of a decoder from its `DecoderSpec`."""

import keyword
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from specbench.decoding.interfaces import Context, DecodeLoop
from specbench.decoding.verification.ratio_tests import Verifier
from specbench.decoding.verification.refinement import Refinement
from specbench.errors import PARTIAL, SpecbenchError
from specbench.models.interface import ImageModel
from specbench.specs.components import CHOICES
from specbench.specs.presets import DecoderSpec
from specbench.system.plugins import load_object, naming_plugin


class Method(NamedTuple):
    """A decoder bound to one model."""

    drafter: Any  # a `Drafter` of a type that the loop can use
    verifier: Verifier
    refinement: Refinement
    loop: Callable[..., DecodeLoop]  # class of the decode loop


def is_built_in(decoder: DecoderSpec) -> bool:
    """Return whether all components belong to this package."""
    parts = (CHOICES[kind][getattr(decoder, kind)] for kind in CHOICES)
    return all(part.target.startswith("specbench.") for part in parts)


def build(decoder: DecoderSpec, model: ImageModel) -> Method:
    """Build the components of `decoder` for `model`'s token layout, codebook and device."""

    def part(kind: str, *arguments: object) -> Any:
        component = CHOICES[kind][getattr(decoder, kind)]
        options = {_parameter(o.name): decoder.options.get(o.name, o.default) for o in component.options}
        with naming_plugin(kind, getattr(decoder, kind), component.target):
            built = load_object(component.target)(*arguments, **options)
        who = f"decoder '{decoder.name}': {kind} '{getattr(decoder, kind)}'"
        # No wrapping class, which would miss calls within the component (`verify` calls `self.acceptance`).
        for name in _RETURNS.keys() & dir(built):
            if hasattr(built, "__dict__") and _is_foreign(getattr(built, name)):
                vars(built)[name] = _checked(getattr(built, name), name, who)
        return built

    if model.codebook is None:
        decoder.refuse_without_codebook(model.name)
    residual = load_object(CHOICES["residual"][decoder.residual].target)
    if _is_foreign(residual):
        residual = _checked(residual, "residual", f"decoder '{decoder.name}': residual '{decoder.residual}'")
    context = Context(model.layout, model.codebook, model.device, residual, model=model)
    drafter = part("drafter", context, part("init", context))
    context = replace(context, drafts=drafter.window - 1)
    loop = load_object(CHOICES["drafter"][decoder.drafter].loop)
    return Method(drafter, part("verifier", context), part("refine", context), loop)


def _is_foreign(method: Any) -> bool:
    return not str(getattr(method, "__module__", None)).startswith("specbench.")


_RETURNS: dict[str, Callable[..., tuple[Any, tuple[int, ...], str]]] = {
    "acceptance": lambda a, p, q, x, *_: (a, x.shape, "float"),
    "verify": lambda verdict, tests, *_: (verdict.accepted, tests.draft.shape, "bool"),
    "residual": lambda weights, p, *_: (weights, p.shape, "float"),
    "refine": lambda tokens, p, tests, noise, positions, *_: (tokens, positions.shape, "int64"),
    "fill": lambda filled, slots, *_: (filled[0], slots.positions.shape, "int64"),
    "propose": lambda proposal, *_: (proposal.tokens, proposal.positions.shape, "int64"),
}
"""For each method of a component: the returned tensor, the expected shape, and the prefix of the expected dtype."""


def _checked(method: Callable[..., Any], name: str, who: str) -> Callable[..., Any]:
    """Wrap a method of a plug-in's component: it gets copies of p and q, and its result is checked."""

    def call(*arguments: Any, **more: Any) -> Any:
        returned = method(*map(_copied, arguments), **more)
        wrong = f" {type(returned).__name__}"
        with suppress(AttributeError, TypeError, IndexError):
            value, shape, dtype = _RETURNS[name](returned, *arguments)
            actual = f" {value.dtype} {[*value.shape]}".replace("torch.", "")
            wrong = "" if value.shape == shape and actual[1:].startswith(dtype) else f"{actual}, not {dtype} {[*shape]}"
            if not wrong and dtype == "float":
                wrong = _bad_weight(value, *arguments[:3])
            if not wrong and name == "propose" and returned.tree.is_chain:
                wrong = _bad_q(returned.q)
        if wrong:
            raise SpecbenchError(f"{who}: {name} returned{wrong}", exit_code=PARTIAL)
        return returned

    return call


def _bad_weight(value: Tensor, p: Tensor, q: Tensor, x: Tensor) -> str:
    """Describe an invalid acceptance probability or weight of a draft. NaN that comes from the model is allowed."""
    drafted = q.gather(-1, x) > 0 if value.shape[-1] == 1 else (q > 0).any(-1, keepdim=True)
    bad = ~(value >= -1e-6) & drafted & ~p.isnan().any(-1, keepdim=True)
    return f" {value[bad][0].item():g}, not a number from 0" if bad.any() else ""


def _bad_q(q: Tensor) -> str:
    """Describe the fault of a q [B, C, V]; empty for a valid q. Rounding errors, and 0 without a draft, are valid."""
    total = q.float().sum(-1)
    bad = ~((q >= 0).all(-1) & (total < 1.01))
    return f" a q that sums to {total[bad][0].item():g}, or has negative values" if bad.any() else ""


def _copied(value: Any) -> Any:
    if isinstance(value, tuple) and hasattr(value, "_replace"):
        return value._replace(**{name: getattr(value, name).clone() for name in ("p", "q") if hasattr(value, name)})
    return value.clone() if isinstance(value, Tensor) else value


def _parameter(option: str) -> str:
    """Return the name of the constructor parameter for an option."""
    name = option.replace("-", "_")
    return f"{name}_" if keyword.iskeyword(name) else name
