"""`generation_config.json`: changes of the logits that transformers' `generate` adds to the authors' script."""

from collections.abc import Container
from pathlib import Path

from specbench.errors import SpecbenchError
from specbench.models.checkpoint_files import CheckpointFiles
from specbench.models.facts import ModelFacts
from specbench.models.hub_model import HubModel

GENERATION_CONFIG = "generation_config.json"
_NONE = (
    "bad_words_ids begin_suppress_tokens exponential_decay_length_penalty forced_bos_token_id forced_eos_token_id "
    "sequence_bias suppress_tokens top_h watermarking_config"
)
_ZERO = "encoder_no_repeat_ngram_size epsilon_cutoff eta_cutoff min_p no_repeat_ngram_size penalty_alpha"
_ONE = "encoder_repetition_penalty guidance_scale num_beams typical_p"
_WITHOUT_EFFECT = {name: (None,) for name in _NONE.split()} | {name: (None, 0) for name in _ZERO.split()}
_WITHOUT_EFFECT |= {name: (None, 1) for name in _ONE.split()}
"""Entries that affect sampling, with the values that have no effect."""


def logits_processors(info: ModelFacts) -> dict[str, float]:
    """Return the logits processors in a model's target distribution, under their names in `generation_config.json`."""
    if not isinstance(info, HubModel) or info.choice.random or GENERATION_CONFIG not in info.source.optional:
        return {}
    penalty = read_repetition_penalty(info.checkpoint.find()[0])
    return {} if penalty == 1.0 else {"repetition_penalty": penalty}


def read_repetition_penalty(files: CheckpointFiles, set_by_script: Container[str] = ()) -> float:
    """Read the repetition penalty, 1 if absent. `set_by_script`: entries that the authors' script overrides."""
    if not files.holds(GENERATION_CONFIG):
        return 1.0
    path = files.named(GENERATION_CONFIG)
    config = files.json(GENERATION_CONFIG)
    for name, harmless in _WITHOUT_EFFECT.items():
        if name not in set_by_script and config.get(name) not in harmless:
            raise _unsupported(path, name, config[name])
    if (penalty := config.get("repetition_penalty")) is None:
        return 1.0
    if isinstance(penalty, bool) or not isinstance(penalty, int | float) or not 0 < penalty < float("inf"):
        raise files.source.damaged(path, ValueError(f"repetition_penalty = {penalty!r} is not a positive number"))
    return float(penalty)


def refuse_processors(files: CheckpointFiles) -> None:
    """Refuse any logits processor that `generate` would apply, a repetition penalty included."""
    if (penalty := read_repetition_penalty(files)) != 1.0:
        raise _unsupported(files.named(GENERATION_CONFIG), "repetition_penalty", penalty)


def _unsupported(path: Path, name: str, value: object) -> SpecbenchError:
    what = f"{path}: {name} = {value!r} changes the authors' samples and is not supported"
    return SpecbenchError(what, f"to decode without '{name}', remove it from the file")
