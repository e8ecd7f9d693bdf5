"""Images per second of each metric, from PNG files to stored scores, over its bare network's forward on one batch.

    python dev/speed/metrics.py [--metric NAME ...] [--images 16] [--size 512] [--rounds 3] [--out results/speed]

Networks have their published sizes and random weights, which take as long as trained weights. Metric and bare forward
take turns, so that other load affects both; on a busy machine compare processor seconds.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from PIL import Image
from transformers import BlipTextConfig, BlipTextModel, BlipVisionConfig, BlipVisionModel, Mask2FormerConfig, SwinConfig
from transformers.models.blip.modeling_blip_text import BlipTextLMHeadModel
from transformers.models.mask2former.modeling_mask2former import Mask2FormerForUniversalSegmentation

from specbench.metrics import scoring
from specbench.metrics.base import Metric, Settings
from specbench.metrics.clip import Clip
from specbench.metrics.compbench import BlipVqa, VqaNetwork
from specbench.metrics.fid import FRONT_ENDS, INCEPTION_SIZE, Fid
from specbench.metrics.geneval import GenEval, Mask2Former
from specbench.metrics.inception_network import Inception
from specbench.metrics.openclip import import_open_clip
from specbench.metrics.preference import HPS_ARCHITECTURE, Hpsv2, ImageReward, RewardNetwork
from specbench.system import environment
from specbench.system.files import write_atomically
from specbench.system.images import read_picture

CAPTION = "a red cat and a blue dog"
META = {"include": [{"class": "cat", "count": 1}], "line": 0}
Case = tuple[Metric, Callable[[int], object]]
"""A metric, and the forward of its network on n images."""


def ready(metric: Metric) -> Metric:
    """Reduce the metric to its image preprocessing and network, without published weights, reference and score."""
    metric.prepare = lambda: None
    metric.accepts = lambda category, meta: True
    metric.identity = metric.feature_identity = dict
    metric.scores = lambda statistics: []
    return metric


def frozen(network: torch.nn.Module) -> torch.nn.Module:
    return network.eval().requires_grad_(False)


def fid(front_end: str, settings: Settings) -> Case:
    metric = ready(Fid(front_end, settings))
    metric.network = frozen(Inception())
    return metric, lambda n: metric.network(torch.rand(n, 3, INCEPTION_SIZE, INCEPTION_SIZE))


def clip(settings: Settings) -> Case:
    return _two_towers(Clip("b32", settings), "ViT-B-32-quickgelu")


def hpsv2(settings: Settings) -> Case:
    return _two_towers(Hpsv2("v2.1", settings), HPS_ARCHITECTURE)


def _two_towers(metric: Metric, architecture: str) -> Case:
    metric = ready(metric)
    metric.network = frozen(import_open_clip().create_model(architecture, pretrained=None))
    tokens = import_open_clip().tokenize([CAPTION])

    def forward(n: int) -> None:
        metric.network.encode_image(torch.rand(n, 3, 224, 224))
        metric.network.encode_text(tokens.expand(n, -1))

    return metric, forward


def _blip_vision(image: int, hidden: int, layers: int) -> BlipVisionModel:
    return BlipVisionModel(
        BlipVisionConfig(
            hidden_size=hidden, intermediate_size=4 * hidden, num_hidden_layers=layers,
            num_attention_heads=hidden // 64, image_size=image, patch_size=16,
        )
    )  # fmt: skip


def _blip_text(seen: int) -> BlipTextConfig:
    return BlipTextConfig(vocab_size=30524, encoder_hidden_size=seen, num_attention_heads=12, is_decoder=True)


class RandomReward(RewardNetwork):
    """Build the network of ImageReward: ViT-L/16 at 224 px and BERT base."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.vision = _blip_vision(224, 1024, 24)
        self.text = BlipTextModel(_blip_text(1024), add_pooling_layer=False)
        sizes = (768, 1024, 128, 64, 16, 1)
        self.head = torch.nn.Sequential(*map(torch.nn.Linear, sizes, sizes[1:]))


class RandomVqa(VqaNetwork):
    """Build the network of BLIP-VQA: ViT-B/16 at 480 px and two BERTs."""

    def __init__(self):
        torch.nn.Module.__init__(self)
        self.vision = _blip_vision(480, 768, 12)
        self.reader = BlipTextModel(_blip_text(768), add_pooling_layer=False)
        self.answerer = BlipTextLMHeadModel(_blip_text(768))


class Words:
    """Stub of BERT's tokenizer: one token per word."""

    def padded(self, texts):
        mask = torch.zeros(len(texts), 35, dtype=torch.long)
        mask[:, : len(CAPTION.split()) + 2] = 1
        return torch.full_like(mask, 1000), mask

    def ids(self, text):
        return [101, *(1000 for _ in text.split()), 102]


def imagereward(settings: Settings) -> Case:
    metric = ready(ImageReward(settings))
    metric.network, metric.tokenizer = frozen(RandomReward()), Words()
    return metric, lambda n: metric.network(torch.rand(n, 3, 224, 224), *Words().padded([CAPTION] * n))


def blip_vqa(settings: Settings) -> Case:
    metric = ready(BlipVqa(settings))
    metric.network, metric.tokenizer = frozen(RandomVqa()), Words()
    metric.phrases = lambda prompt: prompt.split(" and ")

    def forward(n: int) -> None:
        seen = metric.network.vision(torch.rand(n, 3, 480, 480)).last_hidden_state
        metric.network(seen.repeat_interleave(2, 0), torch.full((2 * n, 5), 1000))

    return metric, forward


class RandomDetector(Mask2Former):
    """Build Mask2Former with Swin-S."""

    def __init__(self):
        swin = SwinConfig(
            embed_dim=96, depths=[2, 2, 18, 2], num_heads=[3, 6, 12, 24], window_size=7,
            out_features=["stage1", "stage2", "stage3", "stage4"],
        )  # fmt: skip
        config = Mask2FormerConfig(backbone_config=swin, num_labels=80)
        self.network = frozen(Mask2FormerForUniversalSegmentation(config))
        self.device, self.labels = "cpu", {number: f"class {number}" for number in range(80)}


def geneval(settings: Settings) -> Case:
    metric = ready(GenEval(settings))
    metric.detector = RandomDetector()
    return metric, lambda n: metric.detector.network(torch.rand(n, 3, 800, 800))


CASES = {
    **{f"fid[{name}]": lambda settings, name=name: fid(name, settings) for name in FRONT_ENDS},
    "clip[b32]": clip,
    "hpsv2[v2.1]": hpsv2,
    "imagereward": imagereward,
    "compbench[blip-vqa]": blip_vqa,
    "geneval[hf-m2f]": geneval,
}


def pictures(folder: Path, n: int, size: int) -> scoring.Images:
    draw = np.random.default_rng(0)
    rows = []
    for number in range(n):
        coarse = draw.integers(0, 256, (size // 16, size // 16, 3), dtype=np.uint8)
        path = folder / f"{number}.png"
        Image.fromarray(coarse).resize((size, size), Image.Resampling.BICUBIC).save(path)
        rows.append({"prompt_id": f"p{number}", "sample": 0, "prompt": CAPTION, "category": "color",
                     "meta": json.dumps(META), "path": path, "started_at": ""})  # fmt: skip
    return scoring.Images("speed", folder, pd.DataFrame(rows), lambda row: read_picture(row.path))


@torch.inference_mode()
def seconds(work) -> tuple[float, float]:
    """Measure wall-clock and CPU seconds of `work`."""
    wall, processor = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall, time.process_time() - processor


def measure(case: Case, n: int, size: int, rounds: int) -> Iterator[dict]:
    """Measure one row per round, after a warm-up round."""
    metric, forward = case
    for turn in range(rounds + 1):
        with tempfile.TemporaryDirectory() as folder:
            images = pictures(Path(folder), n, size)
            scored = seconds(lambda images=images: scoring.score([images], metric))
        bare = seconds(lambda: [forward(metric.batch) for _ in range(n // metric.batch)])
        if turn:
            yield {
                "metric": metric.name, "images": n, "batch": metric.batch, "size": size,
                "score_wall_s": scored[0], "score_cpu_s": scored[1],
                "forward_wall_s": bare[0], "forward_cpu_s": bare[1], "cpu_ratio": bare[1] / scored[1],
            }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--metric", action="append", choices=CASES, help="measure only this metric; may be repeated")
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path("results/speed"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    kept = options.out / "metrics.json"
    chosen = options.metric or list(CASES)
    earlier = json.loads(kept.read_text()) if kept.is_file() else []
    others = [call | {"rows": [row for row in call["rows"] if row["metric"] not in chosen]} for call in earlier]
    invocation = {"provenance": environment.environment_facts(), "threads": options.threads, "rows": []}
    content = [*(call for call in others if call["rows"]), invocation]
    for name in chosen:
        for row in measure(CASES[name](Settings(batch=options.batch)), options.images, options.size, options.rounds):
            print(json.dumps(row), flush=True)
            invocation["rows"].append(row)
            write_atomically(kept, (json.dumps(content, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
