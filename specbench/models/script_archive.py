"""Tensors of a TorchScript archive, read as data: its code is not run, and no object that it names is created."""

import math
import pickletools
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_DTYPES = {
    "torch DoubleStorage": torch.float64,
    "torch FloatStorage": torch.float32,
    "torch HalfStorage": torch.float16,
    "torch BFloat16Storage": torch.bfloat16,
    "torch LongStorage": torch.int64,
    "torch IntStorage": torch.int32,
    "torch ByteStorage": torch.uint8,
}
_PLAIN = ("GLOBAL", "BINUNICODE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT")
"""Opcodes whose argument is the value; names of classes and functions remain names."""
_EMPTY = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "EMPTY_LIST": None}
_PICKLE_BYTES, _MODULES, _NAME_LENGTH = 2**24, 10_000, 1_000  # Limits: a published archive needs about 1 % of them


def read_script_tensors(path: Path) -> dict[str, Tensor]:
    """Read parameters, buffers and other tensor attributes of all modules, by dotted name."""
    with zipfile.ZipFile(path) as archive:
        records = {info.filename: info for info in archive.infolist()}
        name = next((name for name in records if name.count("/") == 1 and name.endswith("/data.pkl")), None)
        stored = [info for info in records.values() if info.compress_type == zipfile.ZIP_STORED]
        if name is None or records[name].file_size > _PICKLE_BYTES:
            raise ValueError("it is not a TorchScript archive")
        if sum(info.file_size for info in stored) > path.stat().st_size:
            raise ValueError("its records overlap")
        return _named_tensors(_unpickle(archive.read(name), _Storages(archive, name.removesuffix(".pkl"))))


class _Storages:
    """Stored numbers of an archive, each record read once."""

    def __init__(self, archive: zipfile.ZipFile, folder: str):
        self._archive = archive
        self._folder = folder
        self._read: dict[str, Tensor] = {}

    def tensor(self, place: Any, offset: int, size: Any, stride: Any, *_: object) -> Tensor:
        """Return the tensor that the arguments of torch's rebuild function describe."""
        _, kind, key, _, _ = place
        if key not in self._read:
            info = self._archive.getinfo(f"{self._folder}/{key}")
            if info.compress_type != zipfile.ZIP_STORED:  # a few bytes could claim any amount of memory
                raise ValueError(f"record {key} is compressed")
            self._read[key] = torch.frombuffer(bytearray(self._archive.read(info)), dtype=torch.uint8)
        numbers = self._read[key].view(_DTYPES[kind])
        last = offset + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if min(offset, *size, *stride, 0) < 0 or max(last + 1, math.prod(size)) > len(numbers):
            raise ValueError(f"a tensor goes beyond record {key}")
        return numbers.as_strided(size, stride, offset)


def _unpickle(data: bytes, storages: _Storages) -> Any:
    """Interpret the opcodes that torch's exporter writes: modules become dictionaries of their attributes, tensors
    become tensors, every other object None. Python's unpickler would call and allocate whatever the file says."""
    stack: list[Any] = []
    outer: list[list[Any]] = []
    memo: dict[Any, Any] = {}
    for opcode, value, _ in pickletools.genops(data):
        match opcode.name:
            case "PROTO":
                pass
            case name if name in _PLAIN:
                stack.append(value)
            case name if name in _EMPTY:
                stack.append(_EMPTY[name])
            case "EMPTY_DICT":
                stack.append({})
            case "BINPUT" | "LONG_BINPUT":
                memo[value] = stack[-1]
            case "BINGET" | "LONG_BINGET":
                stack.append(memo[value])
            case "MARK":
                outer.append(stack)
                stack = []
            case "TUPLE" | "APPENDS" | "SETITEMS" as name:
                items, stack = stack, outer.pop()
                if name == "TUPLE":
                    stack.append(tuple(items))
                elif name == "SETITEMS":
                    _set(stack[-1], items)
            case "TUPLE1" | "TUPLE2" | "TUPLE3" as name:
                count = int(name[-1])
                stack[-count:] = [tuple(stack[-count:])]
            case "APPEND":
                stack.pop()
            case "SETITEM":
                items, stack = stack[-2:], stack[:-2]
                _set(stack[-1], items)
            case "NEWOBJ":
                stack[-2:] = [{}]
            case "BUILD":
                state = stack.pop()
                _set(stack[-1], [part for item in (state or {}).items() for part in item])
            case "REDUCE":
                function, arguments = stack[-2:]
                stack[-2:] = [storages.tensor(*arguments) if function == "torch._utils _rebuild_tensor_v2" else None]
            case "BINPERSID":
                pass  # the description of a storage is an argument of the rebuild function
            case "STOP":
                return stack.pop()
            case name:
                raise ValueError(f"unexpected opcode {name}")
    raise ValueError("its end is missing")


def _set(module: object, items: list[Any]) -> None:
    """Set the attributes that can lead to a tensor; drop others."""
    if isinstance(module, dict):
        pairs = zip(items[::2], items[1::2], strict=True)
        module.update({name: value for name, value in pairs if isinstance(name, str) and value is not None})


def _named_tensors(root: dict[str, object]) -> dict[str, Tensor]:
    tensors, waiting, seen = {}, [("", root)], {id(root)}
    while waiting:
        prefix, attributes = waiting.pop()
        for name, value in attributes.items():
            if isinstance(value, Tensor):
                tensors[prefix + name] = value
            elif isinstance(value, dict) and id(value) not in seen:
                seen.add(id(value))
                waiting.append((f"{prefix}{name}.", value))
        if len(seen) > _MODULES or len(prefix) > _NAME_LENGTH:
            raise ValueError("its modules do not end")
    return tensors
