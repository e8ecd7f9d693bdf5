"""A plug-in of specbench: a drafter, a metric, a model and a prompt set."""

from pathlib import Path

PROMPTS = Path(__file__).parent / "weather.jsonl"
