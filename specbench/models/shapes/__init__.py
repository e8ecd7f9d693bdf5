"""The embedded model: a small text-to-image world with its renderer, captions, tokenizer, network and detector."""

from pathlib import Path

WEIGHTS = Path(__file__).parent / "weights"
FEATURE_FILE, FEATURES = WEIGHTS / "features.safetensors", 64
"""Weights of the network behind `shapes-frechet`, and its number of features."""
