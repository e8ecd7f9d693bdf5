"""The target model of a draft head."""

from __future__ import annotations

from specbench.errors import SpecbenchError
from specbench.models.catalog import find_model
from specbench.models.transformer.model import TransformerModel
from specbench.runs.preparation import load_for_run


def load_trainable(name: str, device: str = "cpu", threads: int = 0) -> TransformerModel:
    """Load a model that draft heads can be trained for.

    Args:
        threads: CPU threads; 0 uses all.

    Raises:
        SpecbenchError: an unknown model, one without features for a head, or missing files.
    """
    model = load_for_run(find_model(name), device, None, threads, compiled=False)
    if not isinstance(model, TransformerModel):
        raise SpecbenchError(f"model '{name}' cannot be the target of a draft head")
    return model
