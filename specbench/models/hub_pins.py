"""Revisions of hub repositories that this project uses unless told otherwise: a branch may change under a benchmark.

A commit of the hub names the digest of every file in it. Commits are those that several public projects use and state;
repositories without one here stay at the revision that was downloaded first, until the hub's cache is emptied.
"""

from __future__ import annotations

from collections.abc import Mapping

REVISIONS: Mapping[str, str] = {
    "Alpha-VLLM/Lumina-mGPT-7B-768": "9624463a82ea5ce814af9b561dcd08a31082c3af",
    "deepseek-ai/Janus-Pro-1B": "960ab33191f61342a4c60ae74d8dc356a39fafcb",
    "deepseek-ai/Janus-Pro-7B": "5c3eb3fb2a3b61094328465ba61fcd4272090d67",
    "google/flan-t5-xl": "7d6315df2c2fb742f0f5b556879d730926ca9001",
    "google/owlv2-base-patch16-ensemble": "cfd3195ba4ea9592eec887ded089f4c08eff231d",
    "leloy/Anole-7b-v0.1-hf": "96df52301e844d8a624a13953051ead4c008343b",
    "xswu/HPSv2": "697403c78157020a1ae59d23f111aa58ced35b0a",
}

DIGESTS: Mapping[str, Mapping[str, str]] = {
    "google/owlv2-base-patch16-ensemble": {
        "model.safetensors": "e1e130b9e404cf91a75ad45644c1da9d7fa5284085eecc864266a6923efb99e7"
    },
}
"""SHA-256 of files at those revisions, by repository and name, where one is published."""
