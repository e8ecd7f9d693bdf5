"""Authors' packages (VQAScore, HPSv3) in separate environments: their location and installation, and requests to
`specbench.metrics.authors_programs`, which runs there and exchanges JSON objects."""

import importlib.metadata
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

from PIL import Image

from specbench.errors import FAILURE, MISSING_PREREQUISITE, SpecbenchError
from specbench.metrics.base import PerImageMetric, Sample, Settings
from specbench.system.digests import cache_folder

PROGRAM = Path(__file__).with_name("authors_programs.py")


@dataclass(frozen=True)
class Package:
    """Authors' package, with the arguments of the pip commands that install it into a new environment."""

    environment: str
    install: Sequence[str]


PACKAGES: dict[str, Package] = {
    "t2v-metrics": Package("authors-vqascore", ("t2v-metrics==3.0",)),
    "hpsv3": Package("authors-hpsv3", ("hpsv3==1.0.0",)),
}


def python_of(package: str) -> Path:
    """Return a Python with the package: the running Python, or the Python of an environment in the cache folder."""
    here = any(importlib.metadata.distributions(name=package))
    return Path(sys.executable) if here else _environment(package) / "bin" / "python"


def _environment(package: str) -> Path:
    return cache_folder() / PACKAGES[package].environment


def recipe(package: str) -> str:
    """Return the commands that create an environment with a package."""
    folder = _environment(package)
    steps = [f"{folder}/bin/pip install {arguments}" for arguments in PACKAGES[package].install]
    return " && ".join([f"{Path(sys.executable).name} -m venv {folder}", *steps])


def ask(python: Path, request: Mapping[str, object], program: Path = PROGRAM) -> dict[str, Any]:
    """Send one request and return the answer: `versions` and numbers, or `missing` (a package), or `error`."""
    if not python.is_file():
        return {"missing": f"{python} (an environment)"}
    done = subprocess.run([python, "-I", program], input=json.dumps(request), capture_output=True, text=True)
    return _answer(done.stdout, done.stderr, python, done.returncode)


def _answer(text: str, talk: str, python: Path, code: int | None) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        last = (talk.strip().splitlines() or ["no output"])[-1]
        return {"error": f"{python} ended with code {code}: {last}"}


class PackageMetric(PerImageMetric):
    """Score computed by an authors' package in a separate environment, in a process that keeps the network loaded."""

    # package, model: name of the package, and its name for the network
    package: str
    model: str
    hub: Sequence[str]  # arguments of the `hf download` with which the user downloads the weights
    batch = 8
    scale: ClassVar[tuple[float, float]] = (-float("inf"), float("inf"))  # smallest and largest possible value

    def __init__(self, settings: Settings | None = None):
        super().__init__(settings)
        self.python = self.settings.python or python_of(self.package)

    @cached_property
    def _about(self) -> dict[str, Any]:
        """Answer of the program: versions in its environment and digest of the weights, or what is missing."""
        return ask(self.python, {"package": self.package, "hub": list(self.hub), "versions_only": True})

    def missing_packages(self) -> list[tuple[str, str]]:
        if "versions" in self._about and self._about.get("weights"):
            return []
        if "versions" not in self._about:
            why = self._about.get("error") or f"{self._about['missing']} is not installed"
            return [(f"metric '{self.name}' needs {self.package}: {why}", recipe(self.package))]
        tool = self.python.with_name("hf")
        steps = " && ".join(f"{tool} download {repository}" for repository in self.hub)
        return [(f"metric '{self.name}' lacks {self._about.get('lacking', 'its weights')}", steps)]

    def identity(self) -> Mapping[str, str]:
        versions = ", ".join(f"{name} {version}" for name, version in self._about["versions"].items())
        return {"package": versions, "model": self.model, "weights": self._about["weights"]}

    @cached_property
    def _process(self) -> Any:
        self._talk = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [str(self.python), "-I", str(PROGRAM)]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._talk, text=True)

    def features(self, samples: Sequence[Sample]) -> list[dict[str, object]]:
        request = {"package": self.package, "model": self.model, "device": self.settings.device}
        with tempfile.TemporaryDirectory() as folder:
            files = [str(Path(folder) / f"{place}.png") for place in range(len(samples))]
            for path, sample in zip(files, samples, strict=True):
                Image.fromarray(sample.pixels).save(path)
            answer = self._exchange({**request, "images": files, "captions": [sample.prompt for sample in samples]})
        values = answer.get("values")
        if not isinstance(values, list) or len(values) != len(samples):
            raise SpecbenchError(f"{self.name}: {answer.get('error', 'no values')}", recipe(self.package), FAILURE)
        low, high = self.scale
        for value, sample in zip(values, samples, strict=True):
            if not isinstance(value, float) or not low <= value <= high:
                what = f"{self.name} of '{sample.prompt_id}' is {value!r:.40}, not a number from {low:g} to {high:g}"
                raise SpecbenchError(what, f"check the environment: {self.python}", MISSING_PREREQUISITE)
        return [{"value": value} for value in values]

    def _exchange(self, request: Mapping[str, object]) -> dict[str, Any]:
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if line:
            return _answer(line, "", self.python, None)
        self._process.wait()
        self._talk.seek(0)
        return _answer("", self._talk.read(), self.python, self._process.returncode)


class VqaScore(PackageMetric):
    """VQAScore (Lin et al. 2024): probability that CLIP-FlanT5 answers yes to "Does this figure show the caption?"."""

    name = "vqascore[clip-flant5-xxl]"
    package, model = "t2v-metrics", "clip-flant5-xxl"
    hub = (
        "zhiqiulin/clip-flant5-xxl",
        "google/flan-t5-xxl config.json special_tokens_map.json spiece.model tokenizer.json tokenizer_config.json",
        "openai/clip-vit-large-patch14-336",
    )
    scale = (0.0, 1.0)


class Hpsv3(PackageMetric):
    """HPSv3 (Ma et al. 2025): human preference reward of Qwen2-VL-7B; unbounded."""

    name = "hpsv3"
    package, model = "hpsv3", "HPSv3_7B"
    hub = ("MizzenAI/HPSv3", "Qwen/Qwen2-VL-7B-Instruct")
