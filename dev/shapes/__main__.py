"""`python -m dev.shapes`: train the tokenizer and the network, write the shipped weights, then train the scorers.

Everything goes into one folder, and an interrupted training continues from there. The default sizes are the sizes of
the shipped weights; the length and other settings of their training are in the model card.
"""

import argparse
import sys
from pathlib import Path

import torch

from dev.shapes.data import save
from dev.shapes.train_ar import Trainer, TrainingPlan
from dev.shapes.train_clip import train_clip
from dev.shapes.train_features import train_features
from dev.shapes.train_tokenizer import STEPS, train_tokenizer
from specbench.errors import INTERRUPTED
from specbench.models.shapes.network import WEIGHTS, load_tokenizer

_SAMPLING = {"guidance": 1.5, "top_k": 0, "temperature": 1.0, "top_p": 0.95}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dev.shapes", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("shapes-training"), help="checkpoints, shards and logs")
    parser.add_argument("--weights", type=Path, default=WEIGHTS, help="where the trained weights are written")
    parser.add_argument("--samples", type=int, default=TrainingPlan.samples, help="training samples of the network")
    parser.add_argument(
        "--decay", type=float, default=TrainingPlan.decay, help="share of them over which the rate falls to 0"
    )
    parser.add_argument(
        "--resume-from", type=Path, help="continue the network's run of this folder; see --export-state"
    )
    parser.add_argument("--export-state", type=Path, help="write the state of the run here, and stop")
    parser.add_argument("--rate", type=float, default=1.0, help="factor on the learning rates")
    parser.add_argument(
        "--corner-weight", type=float, default=TrainingPlan.corner_weight, help="of tokens that may start one"
    )
    parser.add_argument(
        "--relation-weight", type=float, default=TrainingPlan.relation_weight, help="of captions with one"
    )
    parser.add_argument(
        "--pair-weight", type=float, default=TrainingPlan.pair_weight, help="of scenes of two unlike objects"
    )
    parser.add_argument(
        "--beside-weight", type=float, default=TrainingPlan.beside_weight, help="factor for two in one row"
    )
    parser.add_argument(
        "--triple-weight", type=float, default=TrainingPlan.triple_weight, help="of scenes of three unlike objects"
    )
    parser.add_argument("--tokenizer-steps", type=int, default=STEPS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=0, help="CPU threads, 0 for torch's choice")
    parser.add_argument("--no-compile", action="store_true", help="train without torch.compile")
    parser.add_argument("--export-only", action="store_true", help="write the weights of the checkpoint as it is")
    parser.add_argument("--scorers-only", action="store_true", help="train the scorers, not the model")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    done = train_scorers(args) if args.scorers_only else train_model(args) and (args.export_only or train_scorers(args))
    if not done:
        print("stopped, and everything is saved: the same command continues", file=sys.stderr)
        sys.exit(INTERRUPTED)


def train_model(args: argparse.Namespace) -> bool:
    """Train the tokenizer and the network, and write the weights when both are done; return whether they are done.

    A run that continues another run keeps the tokenizer of the written weights, which has made the other run's tokens.
    """
    if args.resume_from:
        tokenizer = load_tokenizer(args.device, folder=args.weights)
    else:
        tokenizer = train_tokenizer(args.out, args.tokenizer_steps, seed=args.seed, device=args.device)
    if tokenizer is None:
        return False
    plan = TrainingPlan(
        samples=args.samples,
        decay=args.decay,
        seed=args.seed,
        muon_lr=args.rate * TrainingPlan.muon_lr,
        adam_lr=args.rate * TrainingPlan.adam_lr,
        corner_weight=args.corner_weight,
        relation_weight=args.relation_weight,
        pair_weight=args.pair_weight,
        beside_weight=args.beside_weight,
        triple_weight=args.triple_weight,
    )
    args.out.mkdir(parents=True, exist_ok=True)
    trainer = Trainer(args.out, tokenizer.eval(), plan, args.device, not args.no_compile, args.resume_from)
    if args.export_state:
        trainer.export_state(args.export_state)
        sys.exit()
    done = args.export_only or trainer.run()
    if done:
        extra = {"sampling": _SAMPLING, "trained_samples": trainer.samples}
        save(trainer.averaged, trainer.tokenizer, extra, args.weights)
    return done


def train_scorers(args: argparse.Namespace) -> bool:
    """Train the feature network, then the small CLIP; return whether both are done."""
    features = train_features(args.out, args.weights / "features.safetensors", seed=args.seed)
    return bool(features) and train_clip(args.out, args.weights / "clip", seed=args.seed)


if __name__ == "__main__":
    main()
