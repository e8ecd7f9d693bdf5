"""The image decoder of SimpleAR: a network of images with the tensors of NVIDIA's TorchScript program."""

import copy
import io
import pickle
import shutil
import struct
import zipfile

import pytest
import torch
from refusals import refused

from specbench.errors import MISSING_PREREQUISITE
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.families.cosmos import PUBLISHED, fsq_codebook, load_cosmos, random_cosmos
from specbench.models.hub_model import MODELS

INFO = next(info for info in MODELS if info.name == "simplear")


def files(path) -> CheckpointFiles:
    return CheckpointFiles(INFO.companions[0], (path,))


@pytest.fixture
def archive(written, tmp_path):
    return shutil.copy(written("simplear") / "decoder.jit", tmp_path / "decoder.jit")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.no_grad()
def test_the_network_computes_what_the_published_program_computes(archive, dtype):
    program = torch.jit.load(archive)
    if dtype == torch.bfloat16:
        for parameter in program.parameters():
            parameter.data = parameter.data.bfloat16()
        torch.jit.save(program, archive)
        for parameter in program.parameters():
            parameter.data = parameter.data.float()
    codes = torch.randint(0, 64_000, (2, 3, 5), generator=torch.Generator().manual_seed(0))
    expected = program(codes[:, None].int()).squeeze(2)
    decoder = load_cosmos(files(archive), "cpu")
    assert expected.shape == (2, 3, 48, 80) and expected.std() > 0.1
    torch.testing.assert_close(decoder.decode(codes), expected, atol=1e-5, rtol=0)
    codes[0, 0, 0] += 1
    assert not torch.equal(decoder.decode(codes), expected)


def test_nothing_of_an_archive_is_executed(archive, monkeypatch):
    monkeypatch.setattr(torch.jit, "load", lambda *_, **__: pytest.fail("the program was loaded"))
    monkeypatch.setattr(pickle, "Unpickler", lambda *_, **__: pytest.fail("objects are built"))
    load_cosmos(files(archive), "cpu")


def test_random_weights_have_the_published_size_and_its_memory_is_counted():
    decoder = random_cosmos(PUBLISHED, "meta")
    parameters = sum(parameter.numel() for parameter in decoder._network.parameters())
    assert INFO.other_bytes == 4 * (parameters + fsq_codebook().numel())
    assert decoder.decode(torch.zeros(1, 8, 8, dtype=torch.long, device="meta")).shape == (1, 3, 128, 128)


def rewritten(archive, change, compression=zipfile.ZIP_STORED) -> None:
    """Replace the archive's records, a dictionary of name and bytes, by those that `change` returns."""
    with zipfile.ZipFile(archive) as old:
        records = {name: old.read(name) for name in old.namelist()}
    with zipfile.ZipFile(archive, "w", compression) as new:
        for name, data in change(records).items():
            new.writestr(name, data)


def with_pickle(make):
    """Change the archive's objects from their bytes."""

    def change(records):
        name = next(name for name in records if name.endswith("/data.pkl"))
        return records | {name: make(records[name])}

    return change


class Shell:
    def __reduce__(self):
        return (print, ("executed",))


def tensor(key="0", offset=0, size=(1,), stride=(1,), kind=b"torch\nFloatStorage\n") -> bytes:
    """Objects with one tensor that is described so."""
    parts = [pickle.dumps(part, 2)[2:-1] for part in (key, "cpu", 1, offset, size, stride)]
    place = b"(" + pickle.dumps("storage", 2)[2:-1] + b"c" + kind + parts[0] + parts[1] + parts[2] + b"tQ"
    name = pickle.dumps("weight", 2)[2:-1]
    rebuilt = b"ctorch._utils\n_rebuild_tensor_v2\n(" + place + parts[3] + parts[4] + parts[5] + b"tR"
    return b"\x80\x02}" + name + rebuilt + b"s."


def nested(depth: int, width: int = 1) -> bytes:
    """Modules within modules, each under `width` names of the module before."""
    data = b"\x80\x02}q\x00"
    for level in range(depth):
        data += b"}r" + struct.pack("<I", level + 1)
        for name in range(width):
            data += b"X\x01\x00\x00\x00" + b"ab"[name : name + 1] + b"j" + struct.pack("<I", level) + b"s"
    return data + b"."


HOSTILE = {
    "deep modules": lambda _: nested(20_000), "shared modules": lambda _: nested(40, width=2),
    "a call": lambda _: pickle.dumps(Shell(), 2),
    "an object of another class": lambda _: pickle.dumps({"weight": io.BytesIO(b"x")}, 2),
    "a newer pickle": lambda data: pickle.dumps({"weight": 1}, 5),
    "a huge memo": lambda data: b"\x80\x02}r" + struct.pack("<I", 2**32 - 1) + b".",
    "a huge text": lambda data: b"\x80\x02X" + struct.pack("<I", 2**32 - 1) + b"x.",
    "a cut pickle": lambda data: data[: len(data) // 2], "no objects": lambda data: b"",
    "not a pickle": lambda data: b"weights", "an empty stack": lambda data: b"\x80\x02sss.",
    "a missing memo": lambda data: b"\x80\x02h\x07.",
    "a text instead of modules": lambda data: b"\x80\x02X\x01\x00\x00\x00x.",
    "a module within itself": lambda data: b"\x80\x02}q\x00X\x01\x00\x00\x00xh\x00s.",
    "sizes that are no numbers": lambda _: tensor(size=("a",)),
    "a record that is not there": lambda _: tensor(key="99999"),
    "a record elsewhere": lambda _: tensor(key="../version"),
    "an unknown number format": lambda _: tensor(kind=b"torch\nQInt8Storage\n"),
}  # fmt: skip
BEYOND = {
    "a tensor outside its record": lambda _: tensor(offset=10**9),
    "a negative offset": lambda _: tensor(offset=-1),
    "an expanded tensor": lambda _: tensor(size=(10**12,), stride=(0,)),
    "a negative size": lambda _: tensor(size=(-1,)),
    "a size that overflows": lambda _: tensor(size=(2**62, 2**62), stride=(2**62, 1)),
}


@pytest.mark.parametrize("attack", HOSTILE | BEYOND)
def test_a_hostile_archive_is_one_line(attack, archive, capsys):
    rewritten(archive, with_pickle((HOSTILE | BEYOND)[attack]))
    error = refused("", load_cosmos, files(archive), "cpu")
    assert ("a tensor goes beyond record 0" in error.what) == (attack in BEYOND)
    assert ("its modules do not end" in error.what) == (attack == "deep modules")
    assert str(archive) in error.what and "\n" not in error.what
    assert not capsys.readouterr().out


@pytest.mark.parametrize("damage", ["cut", "empty", "text", "no objects", "compressed", "flipped"])
def test_a_damaged_archive_is_one_line(damage, archive):
    data = bytearray(archive.read_bytes())
    if damage == "no objects":
        rewritten(archive, lambda records: {"decoder/version": b"3"})
    elif damage == "compressed":
        rewritten(archive, lambda records: records, zipfile.ZIP_DEFLATED)
    else:
        data[len(data) // 2] ^= 0xFF
        archive.write_bytes({"cut": data[: len(data) // 2], "empty": b"", "text": b"moved", "flipped": data}[damage])
    error = refused("", load_cosmos, files(archive), "cpu")
    assert error.exit_code == MISSING_PREREQUISITE and "is damaged: " in error.what


def test_records_that_overlap_are_refused(archive):
    """A directory of the archive whose entries name one place many times would read it as often."""
    size = archive.stat().st_size
    with zipfile.ZipFile(archive, "a") as file:
        largest = max(file.infolist(), key=lambda info: info.file_size)
        for number in range(size // largest.file_size + 2):
            again = copy.copy(largest)
            again.filename = again.orig_filename = f"{largest.filename[:-1]}{chr(65 + number)}"
            file.filelist.append(again)
        file._didModify = True  # the directory is written again
    refused("overlap", load_cosmos, files(archive), "cpu")
