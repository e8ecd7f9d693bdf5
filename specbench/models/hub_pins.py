"""Revisions of hub repositories that are used unless told otherwise: a branch may change under a benchmark.

A commit of the hub names the digest of every file in it. Commits are those that several public projects use and state.
Others are downloaded only at a revision that the user names with `--revision` or SPECBENCH_REVISIONS.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from specbench.errors import SpecbenchError

_VARIABLE = "SPECBENCH_REVISIONS"
"""Environment variable with revisions chosen by the user: "owner/name@revision", separated by commas."""

REVISIONS: Mapping[str, str] = {
    "Alpha-VLLM/Lumina-mGPT-7B-768": "9624463a82ea5ce814af9b561dcd08a31082c3af",
    "deepseek-ai/Janus-Pro-1B": "960ab33191f61342a4c60ae74d8dc356a39fafcb",
    "deepseek-ai/Janus-Pro-7B": "5c3eb3fb2a3b61094328465ba61fcd4272090d67",
    "depth-anything/Depth-Anything-V2-Small-hf": "5426e4f0f36572d16453bbda7a8389317b1bef99",
    "google/flan-t5-xl": "7d6315df2c2fb742f0f5b556879d730926ca9001",
    "google/owlv2-base-patch16-ensemble": "cfd3195ba4ea9592eec887ded089f4c08eff231d",
    "leloy/Anole-7b-v0.1-hf": "96df52301e844d8a624a13953051ead4c008343b",
    "xswu/HPSv2": "697403c78157020a1ae59d23f111aa58ced35b0a",
    "zai-org/ImageReward": "5736be03b2652728fb87788c9797b0570450ab72",
}

DIGESTS: Mapping[str, Mapping[str, str]] = {
    "depth-anything/Depth-Anything-V2-Small-hf": {
        "config.json": "c56698d3643dde1f83ea2212759e6b31a22b8f827246a36dd007ee8a22b3ff75",
        "model.safetensors": "3152477ce0d8d6978d76b995120de97cb5b928701fd0f817769f59e249a16b70",
    },
    "google/owlv2-base-patch16-ensemble": {
        "model.safetensors": "e1e130b9e404cf91a75ad45644c1da9d7fa5284085eecc864266a6923efb99e7"
    },
}
"""SHA-256 of files at those revisions, by repository and name, where one is published."""


def revision_of(repo: str) -> str | None:
    """Revision of a repository that SPECBENCH_REVISIONS names, else the pinned one, else None.

    Raises:
        SpecbenchError: the variable is not a list of owner/name@revision.
    """
    chosen = {}
    for entry in filter(None, os.environ.get(_VARIABLE, "").split(",")):
        name, _, revision = entry.strip().partition("@")
        if not revision or name.count("/") != 1:
            raise SpecbenchError(f"{_VARIABLE}: '{entry}' is not owner/name@revision", "separate several by commas")
        chosen[name] = revision
    return chosen.get(repo) or REVISIONS.get(repo)


def how_to_pin(repo: str) -> str:
    """How to name a revision of a repository for which none is pinned."""
    return (
        f"set {_VARIABLE}={repo}@COMMIT with a commit of huggingface.co/{repo}/commits (or {repo}@main for the newest)"
    )
