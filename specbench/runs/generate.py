"""Decode one batch of captions without storing anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from specbench.decoding.generation import Generation
from specbench.decoding.loop import decode
from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.prompts import Prompt, Request, text_id
from specbench.runs import compiler
from specbench.runs.decoder_args import plan_decoders
from specbench.runs.plan import plan_model, plan_sampling
from specbench.runs.preparation import load_for_run
from specbench.runs.settings import Value
from specbench.system import console


def generate_images(captions: Sequence[str], values: Mapping[str, Value]) -> list[Generation]:
    """Decode `captions` as one batch, with the settings of a run.

    Raises:
        SpecbenchError: no caption, several decoders, `--window auto`, an unknown setting, or an image that failed.
    """
    if not captions:
        raise SpecbenchError("generate: no prompt given", "pass a caption, or a list of captions")
    info = plan_model(values)
    planned, *others = plan_decoders(values["decoder"].value, values)
    if others or planned.auto_window:
        what = "generate takes one decoder, and a number as its window"
        raise SpecbenchError(what, "specbench.run takes several decoders and window='auto'")
    sampling = plan_sampling(info, values)
    info.check_prompts(Prompt(text_id(text), text) for text in captions)
    device = values["device"].value
    compile_mode = values["compile"].value
    dtype, compiled, unmet = compiler.settle_precision(values["dtype"].value, info.dtype, compile_mode, device)
    if unmet and compile_mode == "on" and not compiled:
        raise SpecbenchError(unmet[0], "omit compile", MISSING_PREREQUISITE)
    for note in unmet:
        console.warn(note)
    model = load_for_run(info, device, dtype, values["threads"].value, compiled)
    requests = [Request(text, text_id(text)) for text in captions]
    images = decode(model, requests, planned.spec, sampling, values["seed"].value, trace=values["trace"].value)
    for image in images:
        if isinstance(image, SpecbenchError):
            raise image
    return images
