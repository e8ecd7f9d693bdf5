"""Every family with random weights and every decoder without a draft head; draft heads on `shapes`."""

import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

from timing import CAPTION

from parts.claims import Outcome, claim
from parts.scales import Scale
from specbench.decoding.continuous_batching import decode_each
from specbench.decoding.loop import decode
from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model, load_model, models
from specbench.models.facts import ModelChoice
from specbench.models.hub_model import HubModel
from specbench.prompts import Request
from specbench.specs.presets import PRESETS, resolve
from specbench.specs.run_spec import Sampling


def families(device: str, scale: Scale) -> Iterator[Outcome]:
    """Decode a batch of two images with every decoder, refill and trace an image, and compare AR with `predictive`;
    yield the rows of each family.

    Calls of such small models leave a GPU waiting, so several processes share the GPU.
    """
    by_module = {model.target: name for name, model in models().items() if isinstance(model, HubModel)}
    names, rows = scale.families or tuple(by_module.values()), []
    with ProcessPoolExecutor(min(len(names), len(os.sched_getaffinity(0)) // 2 or 1), get_context("spawn")) as pool:
        for family in (map if len(names) == 1 else pool.map)(partial(_family, device=device), names):
            rows += family
            yield [], family
    shapes, sampling = load_model("shapes", device), find_model("shapes").sampling()
    heads = [name for name in PRESETS if _has_head(name)]
    decoded = [_decoded(shapes, name, sampling) for name in (heads if not scale.decoders else heads[:1])]
    yield family_claims([*rows, *decoded]), decoded


def family_claims(rows: list[dict]) -> list[dict[str, object]]:
    """Claim that all `rows` but refused ones were decoded. Equal failures of a decoder on several models are one
    claim."""
    failed: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if row["error"]:
            failed.setdefault((row["decoder"], row["error"].replace(row["model"], "MODEL")), []).append(row["model"])
    refused = [row for row in rows if row.get("refused")]
    value = f"{sum(not row['error'] for row in rows) - len(refused)} of {len(rows) - len(refused)}"
    value += "".join(f"; refused: {row['refused']}" for row in refused)
    value += "".join(f"; {decoder} on {len(models)}: {error}" for (decoder, error), models in failed.items())
    return [claim("every decoder decodes every family on the device", value, "all", not failed)]


def _family(name: str, device: str) -> list[dict[str, object]]:
    info = find_model(name).configured(ModelChoice(random=True, tiny=True))
    model, sampling = load_model(info, device, "float32"), info.sampling()
    text = "7" if info.classes else CAPTION
    tokens, rows = {}, []
    for decoder in PRESETS:
        if not _has_head(decoder):
            rows.append(_decoded(model, decoder, sampling, text))
            tokens[decoder] = rows[-1].pop("tokens", None)
    same = tokens["ar"] is not None and tokens["ar"] == tokens["predictive"]
    rows.append({"model": name, "decoder": "predictive = ar", "error": None if same else "other tokens than AR"})
    requests = [Request(text, "gpu", number) for number in range(3)]
    refilled = [image for _, image in decode_each(model, requests, 2, resolve("sjd"), sampling, 0, trace=True)]
    bad = next((str(image) for image in refilled if isinstance(image, SpecbenchError)), None)
    return [*rows, {"model": name, "decoder": "sjd, refilled and traced", "error": bad}]


def _has_head(decoder: str) -> bool:
    """Whether a decoder drafts with a trained head; only `shapes` includes such heads."""
    return bool(resolve(decoder).head_kind)


def _decoded(model, name: str, sampling: Sampling, text: str = CAPTION) -> dict[str, object]:
    """Decode a batch of two images; `error` in the result is the error, if any, and `refused` the reason why the model
    cannot be decoded so."""
    row: dict[str, object] = {"model": model.name, "decoder": name, "error": None}
    try:
        images = decode(model, [Request(text, "gpu", number) for number in range(2)], resolve(name), sampling, 0)
        if problem := next((image for image in images if isinstance(image, SpecbenchError)), None):
            return row | {"error": f"{type(problem).__name__}: {problem}"}
    except SpecbenchError as refusal:
        return row | {"refused": str(refusal)}
    except Exception as error:  # one decoder's failure is a row
        return row | {"error": f"{type(error).__name__}: {error}"}
    return row | {"nfe": [image.nfe for image in images], "tokens": [image.tokens.tolist() for image in images]}
