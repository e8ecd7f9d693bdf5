"""Run specification: frozen dataclasses that define a run, and its hash. Imports no torch."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from specbench.specs.options import Setting, Use
from specbench.specs.presets import DecoderSpec

Mode = Literal["latency", "throughput"]
"""Purpose of a run: one image at a time on an exclusive device, or as many images per hour as possible."""


@dataclass(frozen=True)
class SamplingSetting(Setting):
    """A setting of the target distribution p. The default has no effect on p."""

    engine: str = ""  # its name in requests to vLLM and SGLang; empty if they do not offer it
    audited: float | None = None  # value in the audit of decoders; only for filters, which remove tokens
    # values that people type, which the audit of stored runs tries as causes of a deviation
    typed: tuple[float, ...] = ()


def _sampling(default: float | None, name: str, help: str, metavar: str, off: float, **more: Any) -> Any:
    """Make a field of `Sampling` with its setting. `off`: value of the setting that has no effect."""
    more |= {"panel": "Sampling", "metavar": metavar, "unset": "the model", "uses": Use.TARGET}
    setting = SamplingSetting(name, off, help, **more)
    return field(default=default, metadata={"setting": setting})


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters, from logits to the target distribution p. Order: guidance, temperature, top-k, top-n-sigma,
    top-p, min-p, all in float32. A filter that is None is off. top_k and top_p keep ties.

    Attributes:
        guidance: classifier-free guidance scale s in u + s (c - u); 1 runs the conditional rows only.
        entropy_scale: scale of the entropy-dependent temperature; entropy in nats, after top-k, at temperature 1.
        top_n_sigma: the deviation is computed over the logits that top-k keeps.
    """

    # fmt: off
    guidance: float = _sampling(3.0, "cfg",
        "classifier-free guidance scale; 1 disables guidance", "X", 1.0, minimum=0.0, maximum=1e4)
    temperature: float = _sampling(1.0, "temperature",
        "sampling temperature, applied after guidance", "X", 1.0, minimum=1e-6, maximum=1e4,
        outside="use --top-k 1, which is the same as temperature 0 (greedy)", engine="temperature")
    top_k: int = _sampling(0, "top-k",
        "sample from the K most probable tokens; 0 disables the filter", "K", 0, minimum=0,
        engine="top_k", audited=2, typed=(1, 5, 10, 20, 40, 50, 64, 100, 200, 250, 500, 1000, 1200, 2000))
    top_p: float = _sampling(1.0, "top-p",
        "sample from the smallest set of tokens with total probability P; 1 disables the filter", "P", 1.0,
        above=0.0, maximum=1.0, engine="top_p", audited=0.8,
        typed=(0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.98, 0.99))
    entropy_scale: float | None = _sampling(None, "entropy-scale",
        "multiply the temperature by 2.5 exp(-H/X) + 0.6 (H: entropy in nats after top-k); 0 disables this", "X", 0.0,
        minimum=0.0, maximum=1e4)
    min_p: float | None = _sampling(None, "min-p",
        "sample only from tokens with at least P times the largest probability; 0 disables the filter", "P", 0.0,
        minimum=0.0, maximum=1.0, engine="min_p", audited=0.4, typed=(0.01, 0.02, 0.05, 0.1, 0.2))
    top_n_sigma: float | None = _sampling(None, "top-n-sigma",
        "after top-k, sample only from logits within N standard deviations of the largest logit; 0 disables the filter",
        "N", 0.0, minimum=0.0, maximum=1e4, audited=1.2)
    # fmt: on

    @property
    def filters(self) -> list[str]:
        """Fields of the filters that are on."""
        return [name for name in FILTERS if getattr(self, name) not in (None, SAMPLING[name].default)]


SAMPLING: Mapping[str, SamplingSetting] = {part.name: part.metadata["setting"] for part in fields(Sampling)}
"""The setting of each field of `Sampling`."""
OFF_IF_NONE = tuple(part.name for part in fields(Sampling) if part.default is None)
"""Fields of `Sampling` that are off if None, and that texts name only if they are set."""
FILTERS = tuple(name for name, setting in SAMPLING.items() if setting.audited is not None)
"""Fields of `Sampling` that remove tokens from p."""
UNSERVED = tuple(name for name, setting in SAMPLING.items() if name != "guidance" and not setting.engine)
"""Fields of `Sampling` that serving engines do not offer. `guidance` is not among them, because it must be set to 1."""


@dataclass(frozen=True)
class Compute:
    """Device and decoding mode of a run. `mode` is "throughput" if images decoded one at a time shared the machine with
    other workers (no latency is measured), else None. `compiled` is True if the target's steps were compiled, else
    None."""

    batch: int
    dtype: str
    device: str
    threads: int
    mode: Mode | None = None
    compiled: bool | None = None


@dataclass(frozen=True, kw_only=True)
class RunSetting(Compute):
    """Settings shared by the rows of a table: a run's settings (`RunSpec`) without model, decoder and head. On a GPU,
    `threads` is 0. `prompts` is a set's name or a file; `prompts_sha256` is its digest."""

    weights_sha256: str
    sampling: Sampling
    prompts: str
    prompts_sha256: str
    seed: int
    model_code: str | None = None

    def content(self) -> dict[str, Any]:
        """Return nested dicts for JSON, without unset fields."""
        given = {name: value for name in _KEYS if (value := getattr(self, name, None)) is not None}
        if self.device == "cuda" and not self.threads:
            given.pop("threads", None)
        given["sampling"] = {name: value for name, value in vars(self.sampling).items() if value is not None}
        return given


@dataclass(frozen=True, kw_only=True)
class RunSpec(RunSetting):
    """Full specification of a run; two runs are the same if and only if their digests agree. On a GPU, the digest omits
    the device index and the threads of the host.

    `head_sha256` is the digest of the draft head's files, None for decoders without a head; `decoder_code` and
    `model_code` are digests of code outside specbench (`specbench.system.foreign_code`). `tokens_sha256` is the digest
    of the file with another program's tokens. The generated ids, their order and the workers are not part of the spec:
    rows are addressed by (prompt id, sample).
    """

    model: str
    decoder: DecoderSpec
    head_sha256: str | None = None
    decoder_code: str | None = None
    tokens_sha256: str | None = None

    @property
    def timed(self) -> bool:
        """Whether latency is measured: one image at a time on an exclusive device."""
        return self.batch == 1 and self.mode is None

    @property
    def anywhere(self) -> RunSpec:
        """The spec without settings that may differ between the invocations of a run."""
        return replace(self, device="cuda", threads=0) if self.device.startswith("cuda") else self

    @property
    def setting(self) -> RunSetting:
        spec = self.anywhere
        return RunSetting(**{kept.name: getattr(spec, kept.name) for kept in fields(RunSetting)})

    def content(self) -> dict[str, Any]:
        """Return nested dicts of the spec, without unset fields."""
        decoder = {**vars(self.decoder), "options": list(self.decoder.options.items())}
        return super().content() | {"decoder": decoder}

    def identity(self) -> dict[str, Any]:
        """Return `content` without settings that may differ between the invocations of a run."""
        return self.anywhere.content()

    @property
    def digest(self) -> str:
        return _hashed(self.identity())

    @property
    def run_id(self) -> str:
        """Readable slug plus a short hash, safe as a folder name."""
        return _as_id(self.model, self.decoder.full_name, self.digest)

    @property
    def earlier_ids(self) -> tuple[str, ...]:
        """Ids of the run in earlier versions, which its folder may still have: with the preset's name only, or on a GPU
        with a hash that covers GPU index and CPU threads."""
        before = _hashed(self.content())
        return (
            _as_id(self.model, self.decoder.name, self.digest),
            *(_as_id(self.model, name, before) for name in (self.decoder.full_name, self.decoder.name)),
        )


_KEYS = (
    *("model", "weights_sha256", "decoder", "sampling", "prompts", "prompts_sha256", "seed", "batch", "dtype"),
    *("device", "threads", "head_sha256", "mode", "compiled", "decoder_code", "model_code", "tokens_sha256"),
)
"""Fields of `RunSpec` in the order of `run.json`."""


def _hashed(content: Mapping[str, object]) -> str:
    """SHA-256 of canonical JSON with sorted keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _as_id(model: str, decoder: str, digest: str) -> str:
    name = f"{model}-{decoder}"[:100]
    slug = "".join(c if (c.isascii() and c.isalnum()) or c in "+-." else "-" for c in name).lstrip("+-.")
    return f"{slug or 'run'}-{digest[:8]}"
