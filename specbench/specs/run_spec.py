"""Specs: frozen dataclasses that say exactly what a run is, and the hash that names it. No torch here."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from specbench.specs.presets import DecoderSpec


@dataclass(frozen=True)
class Sampling:
    """How logits become the target distribution p, in this order: guidance, temperature, top-k, top-p; all float32.

    Attributes:
        guidance: classifier-free guidance scale s in u + s (c - u); 1 runs the conditional rows only.
        temperature: divides the guided logits; above 0.
        top_k: keep the k largest logits, ties included; 0 keeps all.
        top_p: keep the smallest set of tokens holding this mass; 1 keeps all.
    """

    guidance: float = 3.0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0


@dataclass(frozen=True)
class RunSpec:
    """Everything that decides what a run's rows contain. Two runs are the same run iff their `digest` agrees.

    `prompts` is a set's name or a file; `prompts_sha256` its content. `head_sha256` is the digest of the draft head's
    files, None for decoders without one. `mode` is "throughput" where images decoded one at a time shared the machine
    with other workers, so that their times are no latencies, else None. `compiled` is True where the target's steps
    were compiled, else None. Which ids are generated, in which order and by which worker is not part of a run: rows are
    addressed by (prompt id, sample).
    """

    model: str
    weights_sha256: str
    decoder: DecoderSpec
    sampling: Sampling
    prompts: str
    prompts_sha256: str
    seed: int
    batch: int
    dtype: str
    device: str
    threads: int
    head_sha256: str | None = None
    mode: str | None = None
    compiled: bool | None = None

    @property
    def timed(self) -> bool:
        """Whether the rows have latencies: one image at a time, on a device of its own."""
        return self.batch == 1 and self.mode is None

    def content(self) -> dict[str, object]:
        """The spec as nested dicts, without what this run does not have."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def canonical(self) -> str:
        """The same as JSON with sorted keys, the form that is hashed."""
        return json.dumps(self.content(), sort_keys=True, separators=(",", ":"))

    @property
    def digest(self) -> str:
        return hashlib.sha256(self.canonical().encode()).hexdigest()

    @property
    def run_id(self) -> str:
        """Readable slug plus a short hash, safe as a folder name."""
        name = f"{self.model}-{self.decoder.name}"[:100]
        slug = "".join(c if (c.isascii() and c.isalnum()) or c in "+-." else "-" for c in name).lstrip("+-.")
        return f"{slug or 'run'}-{self.digest[:8]}"
