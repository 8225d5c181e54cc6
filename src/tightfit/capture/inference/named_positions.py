"""How many positions a model has, as far as the text of its config tells it: before transformers and torch are imported, and the model is traced."""

from collections.abc import Mapping
from typing import Any

from tightfit.errors import UsageError

# The first that engines look for; configs with others are read by transformers, which fills in defaults.
_NAMED = ("max_position_embeddings", "n_positions")


def named_positions(fields: Mapping[str, Any]) -> int | None:
    """The positions that the fields of a `config.json` name; None where they name none, or scale them."""
    text = fields.get("text_config") or fields
    found = next((text[name] for name in _NAMED if type(text.get(name)) is int), None)
    return None if text.get("rope_scaling") or text.get("rope_parameters") else found


def refuse_beyond(max_model_len: int | None, positions: int | None) -> None:
    """Refuses requests that are longer than a model of so many positions (None: it names no limit) takes.

    Raises:
        UsageError: `max_model_len` is more.
    """
    if max_model_len is not None and positions is not None and max_model_len > positions:
        raise UsageError(
            f"--max-model-len {max_model_len}: the model has {positions:,} positions, and the engine refuses more"
        )
