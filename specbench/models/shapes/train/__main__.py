"""`python -m specbench.models.shapes.train`: the tokenizer, the network, the shipped weights, and then the scorers.

Everything goes into one folder and is taken up from there after an interruption. The sizes and lengths that are the
defaults are those of the shipped weights; what else happened to them is in the model card.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from ..network import WEIGHTS, save
from .train_ar import Plan, Trainer
from .train_clip import train_clip
from .train_features import train_features
from .train_tokenizer import train_tokenizer

SAMPLING = {"guidance": 3.0, "top_k": 256, "temperature": 1.0}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m specbench.models.shapes.train", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("shapes-training"), help="checkpoints, shards and logs")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="where the trained weights are written")
    parser.add_argument("--samples", type=int, default=Plan.samples, help="training samples of the network")
    parser.add_argument("--tokenizer-steps", type=int, default=2400)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for torch's choice")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--export-only", action="store_true", help="write the weights of the checkpoint as it is")
    parser.add_argument("--scorers-only", action="store_true", help="train what scores, not what is scored")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    if args.scorers_only:
        return train_scorers(args.out, args.weights, args.seed)
    tokenizer = train_tokenizer(args.out, args.tokenizer_steps, seed=args.seed, device=args.device).eval()
    plan = Plan(samples=args.samples, seed=args.seed)
    trainer = Trainer(args.out, tokenizer, plan, args.device, compiled=not args.no_compile)
    network = trainer.averaged if args.export_only else trainer.run()
    save(network, tokenizer, {"sampling": SAMPLING, "trained_samples": trainer.samples}, args.weights)
    if not (args.export_only or trainer.stopped):
        train_scorers(args.out, args.weights, args.seed)


def train_scorers(out: Path, weights: Path, seed: int) -> None:
    """The feature network, then the small CLIP, unless a signal ends the first."""
    if train_features(out, weights / "features.safetensors", seed=seed):
        train_clip(out, weights / "clip", seed=seed)


if __name__ == "__main__":
    main()
