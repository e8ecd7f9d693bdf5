"""Serve small checkpoints with vLLM on this CPU and audit them by address: without a fault, and with a single fault.

`make test-engines` installs vLLM for CPUs into a separate environment (3.4 GB) and runs the cases as tests. This
program writes the verdicts of the audits, and a report of engine and AR on the same prompts:

    python dev/engines/run.py
    python dev/engines/run.py --tokens-alone
"""

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

from safetensors.torch import load_file, save_file

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests" / "support"))
import checkpoints  # noqa: E402
from served import served  # noqa: E402

PYTHON = ROOT / ".venv-engines" / "bin" / "python"
FLAGS = "--dtype float32 --max-model-len 1024 --max-num-seqs 16 --enforce-eager --generation-config vllm"
VARIABLES = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
VARIABLES |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
IMAGES, TIMED = 128, 8
CLAIMS = {"tar-1.5b": "--top-k 20", "emu3.5": "--top-k 20 --cfg 1"}
Change = Callable[[dict], object]


@dataclass(frozen=True)
class Case:
    """A served model. `rounded`: with weights of eight bits; `change`: applied to each request on its way."""

    model: str
    wrong: str = "nothing"
    rounded: bool = False
    change: Change = field(default=lambda body: None, compare=False)

    @property
    def verdict(self) -> str:
        """The expected beginning of the audit's verdict."""
        return "consistent with samples of" if self.wrong == "nothing" else "not samples of"


def cooled(body: dict) -> None:
    body["temperature"] = 0.8


def without_system_turn(body: dict) -> None:
    start = checkpoints.tar.ROLES["<|im_start|>"]
    body["prompt"] = [ids[ids.index(start, 1) :] for ids in body["prompt"]]


CASES = (
    Case("tar-1.5b"),
    Case("tar-1.5b", "temperature 0.8, not 1", change=cooled),
    Case("tar-1.5b", "the prompt without its system turn", change=without_system_turn),
    Case("tar-1.5b", "weights of eight bits", rounded=True),
    Case("emu3.5"),
    Case("emu3.5", "temperature 0.8, not 1", change=cooled),
    Case("emu3.5", "weights of eight bits", rounded=True),
)


def write_checkpoint(model: str, folder: Path) -> None:
    """Write a small checkpoint in the published layout, with a head size that vLLM's attention on a CPU supports."""
    folder.mkdir()
    if model == "emu3.5":
        checkpoints.emu35.write(folder, head_dim=64)
    else:
        checkpoints.tar.write(folder, heads=1)


def to_serve(model: str, folder: Path, to: Path, rounded: bool) -> Path:
    """The part of a checkpoint that vLLM gets: its language model, which for Emu3.5 is a renamed Qwen3."""
    to.mkdir(parents=True)
    for path in folder.glob("*.*"):
        if path.is_file():
            shutil.copy(path, to)
    config = json.loads((folder / "config.json").read_text())
    if model == "emu3.5":
        config |= {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-5}
        config |= {"max_position_embeddings": 9216, "tie_word_embeddings": False}
    (to / "config.json").write_text(json.dumps(config))
    for path in to.glob("*.safetensors") if rounded else ():
        tensors = load_file(path)
        for name, tensor in tensors.items():
            if ".layers." in name and tensor.dim() == 2:
                scale = tensor.float().abs().amax(1, keepdim=True) / 127
                tensors[name] = ((tensor / scale).round() * scale).to(tensor.dtype)
        save_file(tensors, path, metadata={"format": "pt"})
    return to


@contextmanager
def vllm(folder: Path, name: str, log: Path) -> Iterator[str]:
    """Serve a folder under a name; yields the address once vLLM answers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", folder, "--served-model-name", name]
    command += ["--host", "127.0.0.1", "--port", str(port), *FLAGS.split()]
    command += [] if (folder / "tokenizer.json").exists() else ["--skip-tokenizer-init"]
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | VARIABLES
    with log.open("w") as out:
        process = subprocess.Popen(command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        for _ in range(300):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise SystemExit(f"vLLM ended: {log.read_text()[-2000:]}") from None
                time.sleep(1)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)


def forwarded(address: str, change: Change, logp: bool) -> Callable[[str, dict | None], object]:
    """Forward changed requests, and change the answer so that it repeats the prompt as specbench sent it. `logp`: keep
    log p in the answer."""

    def respond(path: str, body: dict | None) -> object:
        sent = json.loads(json.dumps(body))
        if sent:
            change(sent)
        data = json.dumps(sent).encode() if sent else None
        request = urllib.request.Request(address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            content = json.load(answer)
        for choice in content["choices"] if sent else ():
            choice["prompt_token_ids"] = body["prompt"][choice["index"]]
            choice["logprobs"] = choice["logprobs"] if logp else None
        return content

    return respond


def specbench(*arguments: object) -> subprocess.CompletedProcess:
    """Type a command of specbench."""
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "specbench", *map(str, arguments)]
    return subprocess.run(command, env=env, cwd=ROOT, text=True, capture_output=True)


def of_model(model: str, folder: Path) -> list[str]:
    line = f"--model {model} --weights {folder / model} --scale tiny --dtype float32 --prompts {folder / 'prompts.txt'}"
    return [*line.split(), *CLAIMS[model].split()]


def audited(case: Case, address: str, folder: Path, out: Path, logp: bool = True) -> dict[str, object]:
    """Draw by address through the change of the case, and audit; without `logp`, by the tokens only."""
    flags = [*of_model(case.model, folder), "--limit", IMAGES, "--batch", 16, "--out", out, "--json"]
    with served(forwarded(address, case.change, logp)) as between:
        done = specbench("audit", "--engine", between, *flags)
    if done.returncode not in (0, 4):
        raise SystemExit(done.stderr)
    [row] = json.loads(done.stdout)
    kept = ("sentence", "verdict", "p_value", "detectable", "images", "tokens")
    return {"model": case.model, "wrong": case.wrong, "exit": done.returncode, **{name: row[name] for name in kept}}


def prepared(folder: Path, models: Sequence[str]) -> None:
    """Write the checkpoints, and the prompts."""
    (folder / "prompts.txt").write_text("".join(f"a cat on mat {number}\n" for number in range(IMAGES)))
    for model in models:
        write_checkpoint(model, folder / model)


@contextmanager
def serving(case: Case, folder: Path) -> Iterator[str]:
    """Start vLLM with the weights of a case."""
    place = folder / ("rounded" if case.rounded else "served") / case.model
    to_serve(case.model, folder / case.model, place, case.rounded)
    with vllm(place, case.model, folder / "vllm.log") as address:
        yield address


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "engines")
    parser.add_argument("--tokens-alone", action="store_true", help="audit without log p, into a separate file")
    asked = parser.parse_args()
    out, name = asked.out, "tokens-alone.jsonl" if asked.tokens_alone else "verdicts.jsonl"
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place, (out / name).open("w") as file:
        folder = Path(place)
        prepared(folder, list(CLAIMS))
        for _, cases in groupby(CASES, lambda case: (case.model, case.rounded)):
            some = list(cases)
            with serving(some[0], folder) as address:
                for case in some:
                    row = audited(case, address, folder, folder / case.wrong, not asked.tokens_alone)
                    print(json.dumps(row), file=file, flush=True)
                    print(f"{case.model}, wrong: {case.wrong}: {row['sentence']}", flush=True)
                if some[0].wrong == "nothing" and not asked.tokens_alone:
                    flags = [*of_model(some[0].model, folder), "--limit", TIMED, "--out", folder / "timed"]
                    specbench("run", "--decoder", "ar", *flags, "--threads", 1)
                    specbench("import", "tokens", "--from", address, *flags)
                    specbench("import", "tokens", "--from", address, *flags, "--batch", TIMED)
        if not asked.tokens_alone:
            report = specbench("report", "--out", folder / "timed").stdout
            (out / "report.md").write_text(report.replace(f"{folder}/", ""))


if __name__ == "__main__":
    main()
