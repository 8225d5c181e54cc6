"""Decides which options the side effects of a program permit: what a technique needs of the modules it changes, and what the trace shows.

An effect forbids a technique by its `needs`, never by its name; the rules are the tables below. A trace without effects (an old tape) forbids
nothing here: the code that applies a technique to a model checks again, and so do the first steps of a run.
"""

import re
from collections.abc import Iterable, Iterator

from tightfit.planner.option import Option
from tightfit.planner.place_words import pattern_of
from tightfit.tape import Effect, EffectKind, Tape
from tightfit.techniques.technique import Needs

_OF_PROGRAM = frozenset(
    {
        EffectKind.GRADIENT,
        EffectKind.GRADIENT_HOOK,
        EffectKind.STEP_HOOK,
        EffectKind.BACKWARD,
        EffectKind.DROPPED,
    }
)
# What forbids it for a module wherever the effect is inside of it.
_FORBIDS: dict[Needs, frozenset[EffectKind]] = {
    Needs.REPEATABLE: frozenset({EffectKind.IN_PLACE, EffectKind.REPLACED, EffectKind.CREATE_GRAPH}),
    Needs.DIVISIBLE: frozenset(
        {
            EffectKind.WRITE,
            EffectKind.DRAW,
            EffectKind.IN_PLACE,
            EffectKind.REPLACED,
            EffectKind.CREATE_GRAPH,
            # A hook that logs or collects would be called once for each part.
            EffectKind.HOOK,
        }
    ),
    Needs.GRADIENTS: _OF_PROGRAM,
    # A hook of the step would see bfloat16 parameters or quantised states where a plain run has float32.
    Needs.STEPS: frozenset({EffectKind.STEP_HOOK}),
}


def obstacle(tape: Tape, option: Option, needs: Needs) -> Effect | None:
    """The first effect on `tape` that forbids `option` of a technique with these needs; None if it is permitted."""
    if Needs.GRADIENTS not in needs and _updates_in_backward(option):
        needs |= Needs.GRADIENTS
    modules = modules_of(option)
    for effect in tape.effects:
        if effect.kind in _OF_PROGRAM:
            if any(effect.kind in _FORBIDS[need] for need in needs if need in (Needs.GRADIENTS, Needs.STEPS)):
                return effect
        elif any(_forbids(effect, option, modules, need) for need in needs):
            return effect
    return None


def _forbids(effect: Effect, option: Option, modules: frozenset[str], need: Needs) -> bool:
    if need not in (Needs.REPEATABLE, Needs.DIVISIBLE):
        return False
    if effect.kind in _FORBIDS[need]:
        return option.where == "batch" or effect.module in modules
    return effect.kind in (EffectKind.INPUT, EffectKind.OUTPUT, EffectKind.PARAMETRIZED) and _at_border(
        effect, option, need
    )


def _at_border(effect: Effect, option: Option, need: Needs) -> bool:
    """Whether the effect is at the border of the technique's region: inside of it, everything is recomputed, or run in parts, together."""
    parent, _, number = effect.module.rpartition(".")
    begin = option.settings.get("begin")
    if effect.kind == EffectKind.PARAMETRIZED:
        return need == Needs.DIVISIBLE and effect.module == option.where
    if effect.kind == EffectKind.OUTPUT:
        # Between the blocks of a segment runs code that a second run of the segment does without.
        return need == Needs.REPEATABLE and begin is not None and parent == option.where and _is_inside(number, option)
    if option.where == "batch":
        return not parent
    return effect.module == option.where if begin is None else (parent, number) == (option.where, str(begin))


def _is_inside(number: str, option: Option) -> bool:
    return number.isdigit() and option.settings["begin"] <= int(number) < option.settings["end"]


def _updates_in_backward(option: Option) -> bool:
    return bool(option.settings.get("in_backward", False))


def modules_of(option: Option) -> frozenset[str]:
    """The paths of the modules of an option: those in its slots, and the one that it is applied to."""
    inside = frozenset(slot.partition("@")[2] for slot in option.slots if "@" in slot)
    return inside if "begin" in option.settings else inside | {option.where}


def grouped(refused: Iterable[tuple[str, str, str]]) -> Iterator[tuple[str, str]]:
    """Groups (technique, place, reason) to (technique, reason), with the places named in the reason; places that differ only by a number are shown
    together."""
    together: dict[tuple[str, str], dict[str, list[str]]] = {}
    for technique, place, reason in refused:
        patterns = together.setdefault((technique, reason), {})
        patterns.setdefault(re.sub(r"\d+", "*", place), []).append(place)
    for (technique, reason), patterns in together.items():
        shown = [
            places[0] if len(places) == 1 else f"{pattern_of(places)} ({len(places)})" for places in patterns.values()
        ]
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        yield technique, f"{', '.join(shown[:3])}{more}: {reason}"
