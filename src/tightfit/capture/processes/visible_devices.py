"""CUDA_VISIBLE_DEVICES of a traced program: the driver finds no card, so that no context is made on a real one, and the program reads what the user has set."""

import os
from typing import Any

_NAME = "CUDA_VISIBLE_DEVICES"
# How the user's own value comes to the process that hides the cards.
_OF_USER = "TIGHTFIT_CUDA_VISIBLE_DEVICES"


def hidden() -> dict[str, str]:
    """What the environment of a traced process has in place of the user's."""
    return {_NAME: "", _OF_USER: os.environ.get(_NAME, "")}


def show(num_cards: int) -> None:
    """Has the program read the user's value, of as many cards as there are virtual ones, or none if it names fewer. Programs that it starts with the
    environment of this process, and the driver, see no card."""
    names = [name.strip() for name in os.environ.pop(_OF_USER, "").split(",")]
    environ: Any = os.environ
    # Not through `os.environ[...]`, which sets the variable of the process too.
    seen, key = environ._data, environ.encodekey(_NAME)
    seen.pop(key, None)
    if len(names) >= num_cards and all(names) and names[0] != "-1":
        seen[key] = environ.encodevalue(",".join(names[:num_cards]))
