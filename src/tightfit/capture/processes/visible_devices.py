"""CUDA_VISIBLE_DEVICES of a traced program: the driver finds no card, so that no context is made on a real one, and the program reads what the user has set."""

import os

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
    os.environ.pop(_NAME, None)
    if len(names) >= num_cards and all(names) and names[0] != "-1":
        os.environ[_NAME] = ",".join(names[:num_cards])
    # Of the process alone: `os.environ` does not see it.
    os.putenv(_NAME, "")
