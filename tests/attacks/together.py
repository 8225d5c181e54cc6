"""Tries programs with several techniques at once, as a plan mixes them: each with some combinations that are drawn from its name.

python -m tests.attacks.together [--draws N] [--first N] [--part 0/1] [--beyond] [--dressed] [--refused] [--all] [NAME ...]
"""

import argparse
import functools
import random
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
from tests.attacks.drawn import CLASSES, Combination, combined, drawn_dresses, names_of
from tests.attacks.harness import Outcome, Verdict, runs_plainly, tried
from tests.attacks.places import VARIANTS
from tests.attacks.registry import Attack, attacks
from tests.attacks.table import MARKS, marks_on_page

BAD = (Outcome.WRONG, Outcome.CRASHED)
_WITH_STREAMING, _WITHOUT_REFUSED = 0.3, 0.85


@functools.cache
def _marks() -> dict[str, dict[str, str]]:
    return marks_on_page()


def refused_alone(what: str) -> tuple[str, ...]:
    """The techniques that a program refuses, as the page has it."""
    return tuple(name for name, mark in _marks().get(what, {}).items() if mark == MARKS[Outcome.REFUSED])


def _class_for(attack: Attack, drawn: str) -> str:
    """The class that was drawn, or the next one that has techniques which the program is tried with: others may not run in the precision of theirs."""
    only = [VARIANTS[name] for name in attack.only]
    if only and all(variant.is_bitwise for variant in only):
        return "bitwise"
    return "exact" if only and drawn == "lossy" and not any(variant.is_lossy for variant in only) else drawn


def run_drawn(
    attack: Attack,
    seed: str,
    *,
    ignores_slots: bool = False,
    is_dressed: bool = False,
    left_out: frozenset[str] = frozenset(),
) -> tuple[Verdict, list[str]]:
    """The verdict on a program with the combination of a seed, and what was taken."""
    chance = random.Random(f"{attack.name} {seed}")
    kind, freezes = _class_for(attack, chance.choice(CLASSES)), chance.random() < _WITH_STREAMING
    # What refuses a technique alone mostly refuses it beside others, and then nothing is learnt of these.
    refused = refused_alone(attack.what) if chance.random() < _WITHOUT_REFUSED else ()
    names = names_of(kind, attack.only, refused, freezes=freezes)
    combination = Combination(seed=f"{attack.name} {seed}", names=names, ignores_slots=ignores_slots, left_out=left_out)
    dresses = drawn_dresses(chance) if is_dressed else ()
    verdict = tried(attack, combined(f"{kind} {seed}", combination, kind, dresses))
    # Functions of the program's with a backward pass of their own may know one type alone, and torch's autocast ends in the same error.
    is_cast = any(":autocast@" in key for key in combination.taken)
    if verdict.outcome is Outcome.CRASHED and is_cast and not runs_plainly(attack, ("autocast",)):
        return Verdict(outcome=Outcome.NO_PLACE), []
    return verdict, combination.taken


def smallest(
    attack: Attack, seed: str, taken: Sequence[str], outcomes: Sequence[Outcome], **how: bool
) -> tuple[Verdict, list[str]]:
    """What is left of a combination with one of these outcomes, when all is left out without which it is one of them too."""
    left_out: frozenset[str] = frozenset()
    verdict, kept = run_drawn(attack, seed, **how)
    for key in dict.fromkeys(taken):
        if len(kept) < 2:
            break
        found, rest = run_drawn(attack, seed, **how, left_out=left_out | {key})
        if found.outcome in outcomes:
            left_out, verdict, kept = left_out | {key}, found, rest
    return verdict, kept


def drawn_of(names: Sequence[str], seeds: Sequence[str], **how: bool) -> Iterator[tuple[str, str, Verdict, list[str]]]:
    """The verdict on each program with each of its combinations."""
    for name in names:
        for seed in seeds:
            yield name, seed, *run_drawn(attacks()[name], seed, **how)


def main(arguments: list[str]) -> int:
    """One line for each combination that is wrong or crashed; 1 if there is one."""
    parser = argparse.ArgumentParser(prog="tests.attacks.together", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--draws", type=int, default=2, help="combinations of each program")
    parser.add_argument("--first", type=int, default=0, help="the number of the first of them")
    parser.add_argument("--part", default="0/1", help="one part of the programs: 2/5 is the third of five")
    parser.add_argument("--beyond", action="store_true", help="with one slot taken twice, as no plan does")
    parser.add_argument("--dressed", action="store_true", help="on models with autocast, frozen weights or adapters")
    parser.add_argument(
        "--refused", action="store_true", help="a line for those, too, whose parts are not refused alone"
    )
    parser.add_argument("--all", action="store_true", help="a line for those that are right or refused, too")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    part, _, num_parts = given.part.partition("/")
    names = [
        n
        for n in attacks()
        if (not given.names or n in given.names) and zlib.crc32(n.encode()) % int(num_parts) == int(part)
    ]
    seeds = [str(number) for number in range(given.first, given.first + given.draws)]
    how = {"ignores_slots": given.beyond, "is_dressed": given.dressed}
    counts: Counter[str] = Counter()
    together: Counter[int] = Counter()
    begin = time.process_time()
    for name, seed, verdict, taken in drawn_of(names, seeds, **how):
        counts[verdict.outcome] += 1
        together[len({key.partition(":")[2].partition("@")[0] for key in taken})] += (
            verdict.outcome is not Outcome.NO_PLACE
        )
        told, kept = verdict, taken
        if verdict.outcome in BAD or (given.refused and verdict.outcome is Outcome.REFUSED):
            outcomes = BAD if verdict.outcome in BAD else (Outcome.REFUSED,)
            told, kept = smallest(attacks()[name], seed, taken, outcomes, **how)
        if told.outcome in BAD or (told is not verdict and len(kept) > 1):
            print(f"{name} {seed}: {told.outcome}: {told.reason}\n    {' + '.join(kept)}", flush=True)
        elif given.all:
            print(f"{name} {seed}: {verdict.outcome}: {verdict.reason}\n    {' + '.join(taken)}", flush=True)
    mixed = ", ".join(f"{count} of {kinds}" for kinds, count in sorted(together.items()))
    print(
        f"{len(names)} programs: {dict(counts)}; techniques together: {mixed}; {time.process_time() - begin:.0f} s",
        flush=True,
    )
    return int(any(counts[outcome] for outcome in BAD))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
