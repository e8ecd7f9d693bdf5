"""Image tokens from a serving engine at an address, by vLLM's `/v1/completions` or SGLang's `/generate`.

Prompts are sent as token ids, with the model's template applied. A request asks for the tokens of an image, allows only
image ids, and sets every sampling parameter, so that no default of the engine applies. If the grammar forces tokens, or
grids have different ids, each stretch of free slots with the same allowed ids is a separate request.
"""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from http.client import InvalidURL
from itertools import groupby
from typing import Any, TypeGuard

import torch

from specbench.errors import FAILURE, SpecbenchError
from specbench.models.families.base import FamilyModel
from specbench.models.interface import ImageModel, TokenLayout
from specbench.models.loaded_model import LoadedModel
from specbench.specs.run_spec import SAMPLING, UNSERVED, Sampling
from specbench.system import console
from specbench.system.downloads import DOWNLOAD_ATTEMPTS, PAUSE_S, TRANSIENT, send
from specbench.system.json_values import parse_json

_QUICK_S, _IMAGE_S = 10.0, 3600.0  # Timeouts in seconds of requests for facts, and for images
_VLLM, _SGLANG = "vLLM", "SGLang"
_PROGRAMS = {"vllm": _VLLM, "sglang": _SGLANG}  # {owner of the listed models: program}
_BARRED = -1e4  # Logit bias of forbidden ids, for engines without a list of allowed ids
_ROUNDING = 0.01  # log p may exceed 0 by this much due to rounding
_SGLANG_FACTS = ("dtype", "quantization", "kv_cache_dtype", "attention_backend", "weight_version")


@dataclass(frozen=True)
class Engine:
    """The serving engine at an address."""

    address: str
    program: str
    version: str
    model: str  # the engine's name for the model
    fingerprint: str | None = None  # fingerprint of the engine's configuration, as returned by the engine

    @property
    def label(self) -> str:
        return f"{self.program} {self.version}".strip()


@dataclass(frozen=True)
class Answer:
    """Token ids of each prompt, and their log p as returned by the engine (NaN if it returns none)."""

    tokens: list[list[int]]
    logp: list[list[float]]
    fingerprint: str | None = None


def find_engine(address: str, expected: Sequence[str], served: str | None = None) -> Engine:
    """Identify the engine at an address. `expected`: names of the model's checkpoint, compared by their last part;
    `served`: the engine's name for the model, if different."""
    address = address.rstrip("/").removesuffix("/v1")
    try:
        cards = [dict(card) for card in ask_engine(f"{address}/v1/models", None, _QUICK_S)["data"]]
        program = _PROGRAMS.get(owner := str(cards[0]["owned_by"]), owner)
        names = {str(card["id"]): {str(card["id"]), str(card.get("root"))} for card in cards}
    except (LookupError, TypeError, ValueError):
        raise SpecbenchError(f"{address} lists no models at /v1/models", "give the address of vLLM or SGLang") from None
    info: dict[str, Any] = {}
    if program == _SGLANG:
        # In older versions both names begin with "get_".
        for page in ("server_info", "model_info"):
            info |= _facts(address, page) or _facts(address, f"get_{page}")
        names = {name: {*others, str(info.get("model_path"))} for name, others in names.items()}
    elif program == _VLLM:
        info = _facts(address, "version")
    else:
        console.warn(f"{address}: models of '{owner}', not of vLLM or SGLang; it gets the same requests as vLLM")
    wanted = {_last_part(name) for name in expected}
    fitting = [name for name, others in names.items() if served == name or wanted & set(map(_last_part, others))]
    if not fitting or served not in (None, *fitting):
        what = f"{address} serves {', '.join(names)}, not {served or ' or '.join(sorted(wanted))}"
        raise SpecbenchError(what, f"if this is the engine's name for the model: --served {next(iter(names))}")
    facts = ", ".join(f"{name} {info[name]}" for name in _SGLANG_FACTS if info.get(name))
    return Engine(address, program, str(info.get("version", "")), served or fitting[0], facts or None)


def _facts(address: str, page: str) -> dict[str, Any]:
    """Return a page of facts about an engine, which are only shown in reports; empty if the page does not exist."""
    try:
        facts = ask_engine(f"{address}/{page}", None, _QUICK_S)
    except Unanswered:
        raise
    except SpecbenchError:
        return {}
    return facts if isinstance(facts, dict) else {}


def _last_part(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].casefold()


def reads_prompt_ids(model: ImageModel) -> TypeGuard[FamilyModel | LoadedModel]:
    """Return whether a prompt of the model is a list of ids."""
    if isinstance(model, FamilyModel):
        return type(model).prompt_ids is not FamilyModel.prompt_ids
    return isinstance(model, LoadedModel)


def refuse_other_prompt(model: ImageModel, text: str, ids: Any, where: str) -> None:
    """Raise a SpecbenchError if the ids of the prompt that a program has read are not the model's ids of `text`.
    Models without prompt ids accept all."""
    if ids is None or not reads_prompt_ids(model) or ids == (own := model.prompt_ids(text)[0]):
        return
    try:
        written = partial(model.tokenizer.decode, skip_special_tokens=False) if isinstance(model, FamilyModel) else str
        read, ours = written(ids), written(own)
    except (TypeError, OverflowError):
        raise SpecbenchError(f"{where}: invalid prompt_token_ids, which must be a list of ids") from None
    unseen = ", in other ids" * (read == ours)
    what = f"{where}: the program read the prompt '{read:.200}' instead of '{ours:.200}'{unseen}"
    raise SpecbenchError(what, "correct the prompt, or remove prompt_token_ids to audit the tokens under this prompt")


class EngineModel:
    """A model served by an engine. `seconds`: duration of the requests of the last `draw`."""

    def __init__(self, engine: Engine, model: ImageModel, sampling: Sampling):
        if isinstance(model, LoadedModel):
            what = f"{model.name} is a plug-in, and only models of specbench are requested from an engine"
            raise SpecbenchError(what, "store the engine's tokens in a file: import tokens --from FILE")
        if not reads_prompt_ids(model):
            raise SpecbenchError(f"an engine takes prompts as token ids, but {model.name} does not")
        self._ids: list[int] = model.table_ids(torch.arange(model.layout.vocab, device=model.device)).tolist()
        self._words = model.backbone.embed_tokens.num_embeddings
        if max(self._ids) >= self._words:
            raise SpecbenchError(f"the image tokens of {model.name} are not in the served model's vocabulary")
        if sampling.guidance != 1:
            what = f"{engine.program} does not offer guidance, but {model.name} would use {sampling.guidance:g}"
            raise SpecbenchError(what, "decode without guidance: --cfg 1")
        if any(getattr(sampling, name) for name in UNSERVED):
            missing = " nor ".join(f"--{SAMPLING[name].name}" for name in UNSERVED)
            raise SpecbenchError(f"{engine.program} offers neither {missing}", "omit them")
        self.engine, self.seconds, self._model = engine, 0.0, model
        offered = ((name, setting) for name, setting in SAMPLING.items() if setting.engine)
        self._sampling = {
            **{setting.engine: getattr(sampling, name) or setting.default for name, setting in offered},
            "top_k": sampling.top_k or -1,
            "repetition_penalty": getattr(model, "repetition_penalty", 1.0),
            **{"presence_penalty": 0.0, "frequency_penalty": 0.0, "ignore_eos": True},
        }

    def probe(self, text: str) -> str | None:
        """Generate the first tokens of an image to warm up the engine; return the engine's fingerprint."""
        slots, ids = next(stretch for stretch in _stretches(self._model.layout) if stretch[1])
        prompt = self._model.prompt_ids(text)[0]
        return self._continued([prompt], self._ids[slice(*ids)], min(4, len(slots))).fingerprint

    def draw(self, texts: Sequence[str]) -> Answer:
        """Generate an image per prompt in one batch; return whole streams, including tokens that the grammar forces."""
        layout, prompts = self._model.layout, [self._model.prompt_ids(text)[0] for text in texts]
        tokens: list[list[int]] = [[] for _ in texts]
        logp: list[list[float]] = [[] for _ in texts]
        self.seconds = 0.0
        for slots, ids in _stretches(layout):
            if ids is None:
                forced = [self._ids[layout.forced[slot]] for slot in slots]
                part = Answer([forced] * len(texts), [[float("nan")] * len(slots)] * len(texts))
            else:
                known = [[*prompt, *stream] for prompt, stream in zip(prompts, tokens, strict=True)]
                part = self._continued(known, self._ids[slice(*ids)], len(slots))
            for row in range(len(texts)):
                tokens[row] += part.tokens[row]
                logp[row] += part.logp[row]
        return Answer(tokens, logp)

    def _continued(self, prompts: list[list[int]], allowed: Sequence[int], count: int) -> Answer:
        """Request `count` tokens after each prompt, restricted to the ids `allowed`."""
        address, model = self.engine.address, self.engine.model
        if self.engine.program == _SGLANG:
            barred = dict.fromkeys(map(str, sorted({*range(self._words)} - {*allowed})), _BARRED)
            sampling = self._sampling | {"max_new_tokens": count, "logit_bias": barred or None}
            body = {"input_ids": prompts, "sampling_params": sampling, "return_logprob": True}
            path, read = "/generate", _of_sglang
        else:
            body = self._sampling | {"model": model, "prompt": prompts, "max_tokens": count, "logprobs": 0}
            body |= {"allowed_token_ids": allowed, "return_token_ids": True, "return_tokens_as_token_ids": True}
            path, read = "/v1/completions", _of_openai
        content = self._tried(address + path, body)
        try:
            answer, seen = read(content)
        except (LookupError, TypeError, ValueError, AttributeError):
            if reason := _reason(content):
                raise SpecbenchError(f"{address} returned an error: {reason}") from None
            raise SpecbenchError(f"{address}: no token ids in the answer", "vLLM returns ids since 0.10.2") from None
        if len(answer.tokens) != len(prompts):
            raise SpecbenchError(f"{address} returned {len(answer.tokens)} images for {len(prompts)} prompts")
        if wrong_ids := [number for ids in answer.tokens for number in ids if type(number) is not int]:
            raise SpecbenchError(f"{address} returned the id {wrong_ids[0]!r}, which is not a whole number")
        if seen not in (prompts, [len(prompt) for prompt in prompts]):
            raise SpecbenchError(f"{address} read a prompt that differs from the ids that were sent")
        if wrong := [len(ids) for ids in answer.tokens if len(ids) != count]:
            raise SpecbenchError(f"{address} returned {wrong[0]:,} tokens instead of the requested {count:,}")
        _check_logp(address, answer)
        return answer

    def _tried(self, url: str, body: Mapping[str, object]) -> Any:
        """Return the answer of the first successful attempt; add only its duration to `seconds`."""
        for number in range(1, DOWNLOAD_ATTEMPTS + 1):
            started = time.perf_counter()
            try:
                content = ask_engine(url, body, _IMAGE_S)
            except Unanswered as error:
                if number == DOWNLOAD_ATTEMPTS:
                    raise SpecbenchError(error.what, "run the same command again to continue", FAILURE) from None
                time.sleep(PAUSE_S * number)
            else:
                self.seconds += time.perf_counter() - started
                return content


def _stretches(layout: TokenLayout) -> list[tuple[list[int], Any]]:
    """Split the slots of an image into runs of slots with the same allowed ids. Return (slots, (first id, last id + 1))
    for each; None instead of ids for forced tokens."""
    bounds = layout.bounds
    kinds = groupby(range(layout.length), lambda slot: bounds[slot] if layout.forced[slot] < 0 else None)
    return [(list(slots), ids) for ids, slots in kinds]


def _of_openai(content: Any) -> tuple[Answer, list[list[int] | int]]:
    """Parse the answer of `/v1/completions`; also return the ids (or the number) of the prompts' tokens."""
    choices = sorted(content["choices"], key=lambda choice: choice["index"])
    tokens = [list(choice["token_ids"]) for choice in choices]
    values = [(choice.get("logprobs") or {}).get("token_logprobs") for choice in choices]
    seen = [choice.get("prompt_token_ids") or content["usage"]["prompt_tokens"] for choice in choices]
    return Answer(tokens, _numbers(tokens, values), content.get("system_fingerprint")), seen


def _of_sglang(content: Any) -> tuple[Answer, list[list[int] | int]]:
    """Parse the answer of `/generate`; also return the lengths of the prompts."""
    rows = content if isinstance(content, list) else [content]
    tokens = [list(row["output_ids"]) for row in rows]
    pairs = [row["meta_info"].get("output_token_logprobs") for row in rows]
    values = [items and [item[0] for item in items] for items in pairs]
    return Answer(tokens, _numbers(tokens, values)), [row["meta_info"]["prompt_tokens"] for row in rows]


def _numbers(tokens: Sequence[Sequence[int]], values: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """Return log p of the tokens; NaN for tokens without log p."""
    rows = zip(tokens, values, strict=True)
    return [[float("nan") if p is None else float(p) for p in row or [float("nan")] * len(ids)] for ids, row in rows]


def _check_logp(address: str, answer: Answer) -> None:
    """Reject values that cannot be log p of the answer's tokens; set values slightly above 0 (rounding) to 0."""
    for ids, row in zip(answer.tokens, answer.logp, strict=True):
        if len(row) != len(ids) or any(p > _ROUNDING for p in row):
            what = (
                f"{len(row)} log p for {len(ids)} tokens" if len(row) != len(ids) else f"log p {max(row):.3g}, above 0"
            )
            raise SpecbenchError(f"{address} returned {what}")
        row[:] = [min(p, 0.0) for p in row]


class Unanswered(SpecbenchError):
    """A request failed because of an interruption or a busy server; another attempt may succeed."""


def ask_engine(url: str, body: Mapping[str, object] | None, timeout: float) -> Any:
    """Send `body` as JSON, or a GET request if `body` is None, and return the JSON of the answer."""
    data = None if body is None else json.dumps(body).encode()
    try:
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        with send(request, timeout) as response:
            content = response.read()
    except urllib.error.HTTPError as error:
        kind = Unanswered if error.code >= 500 or error.code == 429 else SpecbenchError
        raise kind(f"{url} returned status {error.code}: {_message(error.read())}") from None
    except (ValueError, InvalidURL) as error:  # before TRANSIENT, which includes InvalidURL
        raise SpecbenchError(f"{url}: {error}") from None
    except TRANSIENT as error:
        reason = getattr(error, "reason", "") or error
        what = f"{url} does not answer: {getattr(reason, 'strerror', '') or reason}"
        raise Unanswered(what, "start the engine, or give its address", FAILURE) from None
    try:
        return parse_json(content)
    except ValueError as error:
        raise SpecbenchError(f"{url} returned no valid JSON: {error}", "give the address of an engine") from None


def _message(body: bytes) -> str:
    """Return the error message in an error response: from its JSON, or else the whole text."""
    try:
        reason = _reason(parse_json(body))
    except ValueError:
        reason = None
    return reason or body.decode(errors="replace")[:300]


def _reason(content: Any) -> str | None:
    """Return the error message in the JSON of an answer; None if it contains no error or no message."""
    fields = content if isinstance(content, dict) else {}
    error = fields.get("error") or fields.get("detail") or fields.get("message")
    reason = error.get("message") or error if isinstance(error, dict) else error
    return str(reason)[:300] if reason else None
