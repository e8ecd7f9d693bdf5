"""Measure the shipped weights: detector scores with intervals, token statistics, and grids to look at.

Writes `scores.json` and PNG grids into a folder; images are sampled by the plain sampler of this package.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from dev.shapes.data import pixels
from dev.shapes.sample import sample_images
from specbench.decoding.sampling import truncate
from specbench.models.shapes.detector import detect, judge
from specbench.models.shapes.network import WEIGHTS, ShapesNetwork, load_network, load_tokenizer, settings
from specbench.models.shapes.scene import CATEGORIES, TEXTURES, SceneRequest, describe, realize, sample_request
from specbench.models.shapes.tokenizer import ShapesTokenizer
from specbench.specs.run_spec import Sampling
from specbench.stats import mean_of_proportions, proportion_interval

CELL = 128
LABEL = 30


def estimates(requests: list[SceneRequest], images: Tensor, clusters: list[str]) -> dict[str, dict]:
    """Share of correct images with its 95 % interval, per category and (as the mean of the categories) overall."""
    groups: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for request, image, cluster in zip(requests, images, clusters, strict=True):
        verdict = judge(request, detect(image.permute(1, 2, 0).numpy()))
        groups[request.category].append((float(verdict.correct), cluster))
    columns = {name: tuple(zip(*rows, strict=True)) for name, rows in sorted(groups.items())}
    parts = {name: proportion_interval(*rows) for name, rows in columns.items()}
    overall = mean_of_proportions(
        [rows for name, rows in columns.items() if name in CATEGORIES] or list(columns.values())
    )
    counts = {name: len(rows) for name, rows in groups.items()} | {"overall": len(requests)}
    rounded = {n: {k: round(v, 4) for k, v in vars(e).items()} for n, e in {"overall": overall, **parts}.items()}
    return {name: {**values, "n": counts[name]} for name, values in rounded.items()}


def tags(requests: list[SceneRequest], images: Tensor) -> dict[str, float]:
    """For each tag, the share of images in which it is right, among images whose caption mentions it."""
    verdicts = defaultdict(list)
    for request, image in zip(requests, images, strict=True):
        verdict = judge(request, detect(image.permute(1, 2, 0).numpy()))
        for tag in ("shape", "color", "bound", "position"):
            if getattr(verdict, tag) is not None:
                verdicts[tag].append(getattr(verdict, tag))
    return {tag: round(float(np.mean(values)), 4) for tag, values in verdicts.items()}


def reconstructions(tokenizer: ShapesTokenizer, count: int, seed: int = 4242) -> dict[str, object]:
    """Detector scores of fresh renders and of their reconstructions, and the reconstruction error."""
    rng = np.random.default_rng(seed)
    scenes = [realize(sample_request(rng), rng) for _ in range(count)]
    requests = [describe(s, rng) for s in scenes]
    images = pixels(scenes)
    tokens = torch.cat([tokenizer.encode(part) for part in images.split(64)])
    again = torch.cat([tokenizer.decode(part) for part in tokens.split(64)])
    error = (images.float() - again.float()).square().mean((1, 2, 3)) / 255**2
    use = torch.bincount(tokens.flatten(), minlength=tokenizer.codebook.shape[0]).float()
    share = use / use.sum()
    names = [str(i) for i in range(count)]
    return {
        "renders": estimates(requests, images, names),
        "reconstructions": estimates(requests, again, names),
        "psnr_db": round(float((-10 * error.log10()).mean()), 2),
        "codes_used": int((use > 0).sum()),
        "code_perplexity": round(float(torch.special.entr(share).sum().exp()), 1),
    }


@torch.inference_mode()
def token_statistics(
    network: ShapesNetwork, captions: list[str], tokens: Tensor, sampling: Sampling
) -> dict[str, Tensor]:
    """Per image, under the truncated distribution: share of tokens whose top-1 probability is below 5 %,
    mean entropy and mean negative log-probability of the tokens, in nats."""
    values = defaultdict(list)
    for start in range(0, len(tokens), 16):
        part = tokens[start : start + 16]
        ids = network.encode(captions[start : start + 16])
        plain = network(network.null_ids(len(part)), part)
        logp = truncate(plain + sampling.guidance * (network(ids, part) - plain), sampling).log_softmax(-1)
        values["top1_below_5"].append((logp.amax(-1).exp() < 0.05).float().mean(1))
        values["entropy"].append(torch.special.entr(logp.exp()).sum(-1).mean(1))
        values["nll"].append(-logp.gather(2, part[..., None]).mean((1, 2)))
    return {name: torch.cat(values) for name, values in values.items()}


def summary(values: dict[str, Tensor]) -> dict[str, dict]:
    """Mean and the 5th, 50th and 95th percentile over images."""
    return {
        name: {"mean": round(float(v.mean()), 4)}
        | {f"p{p}": round(float(np.percentile(v.numpy(), p)), 4) for p in (5, 50, 95)}
        for name, v in values.items()
    }


def grid(images: Tensor, texts: list[str], columns: int) -> Image.Image:
    """Images enlarged twice, each above its caption."""
    rows = -(-len(texts) // columns)
    sheet = Image.new("RGB", (columns * CELL, rows * (CELL + LABEL)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(9)
    for index, (image, text) in enumerate(zip(images, texts, strict=True)):
        x, y = index % columns * CELL, index // columns * (CELL + LABEL)
        picture = Image.fromarray(image.permute(1, 2, 0).numpy()).resize((CELL - 4, CELL - 4), Image.Resampling.NEAREST)
        sheet.paste(picture, (x + 2, y + 2))
        words = text.split()
        lines = [""]
        for word in words:
            if len(lines[-1]) + len(word) > 25:
                lines.append("")
            lines[-1] += word + " "
        draw.multiline_text((x + 3, y + CELL - 1), "\n".join(lines), "black", font, spacing=0)
    return sheet.quantize(128)


def evaluate(
    network: ShapesNetwork,
    tokenizer: ShapesTokenizer,
    prompts: Path,
    folder: Path,
    seed: int,
    repeats: int,
    limit: int | None,
    sampling: Sampling,
) -> dict:
    """Score the prompt set in file `prompts`; grids go to `folder`."""
    lines = [json.loads(line) for line in prompts.read_text().splitlines()][:limit] * repeats
    requests, texts = [SceneRequest.from_json(x["scene"]) for x in lines], [x["prompt"] for x in lines]
    tokens, images = sample_images(network, tokenizer, texts, seed, sampling=sampling)
    half = len(texts) // repeats // 2
    per_image = token_statistics(network, texts, tokens, sampling)
    names = [x["id"] for x in lines]
    textured = {t: [i for i, r in enumerate(requests) if r.texture == t] for t in TEXTURES}
    for category in sorted({r.category for r in requests}):
        chosen = [i for i, r in enumerate(requests) if r.category == category][:32]
        grid(images[chosen], [texts[i] for i in chosen], 8).save(folder / f"{category}.png", optimize=True)
    return {
        "correct": estimates(requests, images, names),
        "shuffled": estimates(requests, images.roll(half, 0), names),
        "tags": tags(requests, images),
        "tags_shuffled": tags(requests, images.roll(half, 0)),
        "tokens": summary(per_image),
        "images_with_top1_below_5": round(float((per_image["top1_below_5"] >= 0.05).float().mean()), 4),
        "top1_below_5_by_texture": {
            t: round(float(per_image["top1_below_5"][rows].mean()), 4) for t, rows in textured.items() if rows
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.shapes.evaluate", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/shapes-training"))
    parser.add_argument("--prompts", type=Path, default=Path("prompts"), help="folder of the two prompt sets")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--repeats", type=int, default=1, help="images per prompt")
    parser.add_argument("--limit", type=int, help="only the first prompts of each set")
    parser.add_argument("--renders", type=int, default=1200, help="fresh renders for detector and tokenizer")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="folder of the weights")
    for name, default in settings()["sampling"].items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), help="default: as the weights say")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    shipped = settings(args.weights)
    options = {name: getattr(args, name) for name in shipped["sampling"]}
    sampling = shipped["sampling"] | {name: value for name, value in options.items() if value is not None}
    scores = {"trained_samples": shipped["trained_samples"], "sampling": sampling, "seed": args.seed}
    network, tokenizer = load_network(folder=args.weights), load_tokenizer(folder=args.weights)
    if args.renders:
        scores |= reconstructions(tokenizer, args.renders)
    for name in ("shapes", "shapes-hard"):
        file = args.prompts / f"{name}.jsonl"
        drawn = Sampling(**sampling)
        scores[name] = evaluate(network, tokenizer, file, args.out, args.seed, args.repeats, args.limit, drawn)
    (args.out / "scores.json").write_text(json.dumps(scores, indent=1) + "\n")
    print(json.dumps(scores, indent=1))


if __name__ == "__main__":
    main()
