"""Run steps under fake CUDA tensors on a torch that is built without CUDA; print what each decoder did, as JSON.

Fake tensors need a guard that switches devices, which such a torch lacks. One that does nothing is compiled (seconds)
and loaded into this process only.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from one_device import give_host_reads, step
from tiny_llama import Tiny
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from specbench.decoding.drafters import eagle
from specbench.decoding.loop import Decoding, begin
from specbench.decoding.sampling import Target
from specbench.decoding.timing import Spans
from specbench.decoding.verification import lantern
from specbench.models.transformer.model import Prefix
from specbench.prompts import Request
from specbench.specs.presets import resolve
from specbench.specs.run_spec import Sampling

CUDA = "cuda:0"
DECODERS = ("ar", "sjd", "sjd++", "gsd", "scd-mc", "scd-gs", "sjd-pac", "eagle", "lantern", "zipar", "pjd")
_GUARD = """#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""
_TENSOR, _CALL = torch.tensor, Target.__call__


class FakeModel(Tiny):
    """Every tensor of it is a fake one; build it under `FakeTensorMode`."""

    def encode(self, prompts):
        lengths = [*map(len, prompts), *[2] * len(prompts)]
        rows = [torch.zeros(length, dtype=torch.long, device=CUDA) for length in lengths]
        ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
        return Prefix([self.backbone.embed_tokens(row) for row in rows], ids=ids)

    def own_head(self):
        return self.kept_head


def load_guard(folder: Path) -> None:
    source, library = folder / "guard.cpp", folder / "guard.so"
    source.write_text(_GUARD)
    torch_folder = Path(torch.__file__).parent
    flags = ["-std=c++20", "-O0", "-fPIC", "-shared", f"-I{torch_folder / 'include'}", f"-L{torch_folder / 'lib'}"]
    subprocess.run(["g++", *flags, source, "-o", library, "-lc10"], check=True)
    ctypes.CDLL(str(library))


def build_fake() -> FakeModel:
    with torch.device("meta"):
        model = FakeModel()
        model.kept_head = Tiny.own_head(model)
    for module in (*model.backbone.modules(), *model.kept_head.modules()):
        for name, tensor in module._parameters.items():
            module._parameters[name] = tensor if tensor is None else nn.Parameter(like(tensor), requires_grad=False)
        module._buffers |= {name: like(tensor) for name, tensor in module._buffers.items() if tensor is not None}
    model.codebook, model.matrix = like(model.codebook), like(model.matrix)
    return model


def like(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=CUDA)


def tensor(data, dtype=None, device=None) -> torch.Tensor:
    """Make a tensor of numbers, whose constants the fake mode cannot bring to a device that is not there."""
    made = _TENSOR(data, dtype=dtype)
    return made if device is None else torch.empty(made.shape, dtype=made.dtype, device=device)


def outcome(model: FakeModel, name: str, planted=None) -> str:
    requests = [Request("four", "a"), Request("five!", "b")]
    loop = begin(Decoding(model, resolve(name), Sampling(2.0, 0.9, 5, 0.9), 0), requests, Spans(torch.device("cpu")))
    for _ in range(2):
        step(loop)
    Target.__call__ = planted or _CALL
    try:
        step(loop)
    except Exception as error:
        return type(error).__name__
    finally:
        Target.__call__ = _CALL
    return "ok"


def planted_on_cpu(self, logits, positions):
    return _CALL(self, logits + torch.zeros(logits.shape[-1]), positions)


def planted_read(self, logits, positions):
    return _CALL(self, logits + logits.amax().item(), positions)


def main() -> None:
    patches = pytest.MonkeyPatch()
    give_host_reads(patches)
    patches.setattr(eagle, "head_for", lambda model, path: model.own_head())
    patches.setattr(lantern, "neighbour_table", lambda codebook, raw: torch.zeros(len(codebook), 8, device=CUDA))
    patches.setattr(torch, "tensor", tensor)
    load_guard(Path(sys.argv[1]))
    with torch.inference_mode(), FakeTensorMode():
        model = build_fake()
        outcomes = {name: outcome(model, name) for name in DECODERS}
        outcomes["planted cpu tensor"] = outcome(model, "sjd", planted_on_cpu)
        outcomes["planted host read"] = outcome(model, "sjd", planted_read)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
