"""How a plan says that a choice recomputes large calls only (`large_calls`), and what tells it how large calls are; without torch."""

from typing import final

from tightfit.techniques.technique import ChosenOption

SETTING = "only_above"
"""The setting of a choice: the most elements that each tensor of a call may have, in order, for the call to be left alone."""
TECHNIQUES = frozenset({"checkpointing", "nested_checkpointing", "selective_checkpointing", "sequential_checkpointing"})
"""Those that have it."""


@final
class CallSizes(dict[str, list[int]]):
    """By choice (`key_of`), the most elements that each tensor of its calls had, in order."""


def key_of(technique: str, choice: ChosenOption) -> str:
    """What tells the choices of one plan apart: a technique may have several ranges of one container."""
    return f"{technique}@{choice.where}:{choice.settings.get('begin', '')}"
