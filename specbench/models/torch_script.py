"""TorchScript files, which are programs: loaded only where their digest is trusted."""

from __future__ import annotations

import hashlib
import io
import os
import warnings
from pathlib import Path

import torch

from specbench.errors import MISSING_PREREQUISITE, SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles

_VARIABLE = "SPECBENCH_TRUST"
TRUSTED: set[str] = set()
"""SHA-256 digests that need no consent. None of a publisher's is known to this project."""


def load_script(files: CheckpointFiles, path: Path, device: str) -> torch.jit.ScriptModule:
    """A TorchScript module, ready to be called.

    Raises:
        SpecbenchError: exit code 5 for a digest that nobody trusts, and for a damaged file.
    """
    try:
        data = path.read_bytes()
        digest = hashlib.sha256(data).hexdigest()
        if digest not in TRUSTED | set(os.environ.get(_VARIABLE, "").split(",")):
            raise SpecbenchError(
                f"{path} is a program (TorchScript) with the unknown SHA-256 {digest}",
                f"to run it, compare the digest with the publisher's and set {_VARIABLE} to it",
                MISSING_PREREQUISITE,
            )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            return torch.jit.load(io.BytesIO(data), map_location="cpu" if device == "meta" else device).eval()
    except (OSError, RuntimeError, ValueError, MemoryError) as error:
        raise files.source.damaged(path, error) from error
