"""How a plan says that a choice recomputes large calls only (`large_calls`), and what tells it how large calls are; without torch."""

from typing import final

from tightfit.techniques.technique import ChosenOption

SETTING = "only_above"
"""The setting of a choice: the most elements that the first tensor of a call may have to be left alone."""
TECHNIQUES = frozenset({"checkpointing", "nested_checkpointing", "selective_checkpointing", "sequential_checkpointing"})
"""Those that have it."""


@final
class CallSizes(dict[str, int]):
    """By choice (`key_of`), how many elements the first tensor of its largest call had."""


def key_of(technique: str, choice: ChosenOption) -> str:
    """What tells the choices of one plan apart: a technique may have several ranges of one container."""
    return f"{technique}@{choice.where}:{choice.settings.get('begin', '')}"
