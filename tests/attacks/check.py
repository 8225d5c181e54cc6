"""What is asked of each attack: no technique gives a wrong result or crashes with it; it is trained right, or refused before a wrong update."""

import collections
import itertools
import os
import zlib
from collections.abc import Iterable

import pytest
import torch
from tests.attacks.harness import Outcome, run
from tests.attacks.known_wrong import KNOWN_WRONG
from tests.attacks.places import VARIANTS
from tests.attacks.registry import Attack, attacks
from tests.attacks.table import MARKS, marks_on_page

PAGE_MARKS = marks_on_page()
NUM_TURNS = 7
_NUM_PLACES = collections.Counter(
    name for marks in PAGE_MARKS.values() for name, mark in marks.items() if mark != MARKS[Outcome.NO_PLACE]
)


def of_kinds(*kinds: str) -> list[object]:
    """The attacks of some kinds, as parameters of a test: by turns, but for clean programs and those that are known to be wrong.

    Where no commit draws what has its turn, two in three, drawn by name, are marked as slow.
    """
    wrong = {name for name, _ in KNOWN_WRONG}
    return [
        pytest.param(attack, id=name, marks=() if name in wrong or attack.kind == "clean" else _marks(attack))
        for name, attack in attacks().items()
        if attack.kind in kinds
    ]


def _marks(attack: Attack) -> pytest.MarkDecorator:
    if os.environ.get("TIGHTFIT_COMMIT"):
        return pytest.mark.by_turns(NUM_TURNS)
    return pytest.mark.slow if is_slow(attack) else pytest.mark.by_turns(3)


def is_slow(attack: Attack) -> bool:
    """Whether the attack is left out where no commit draws what has its turn."""
    return attack.kind != "clean" and _number(f"{attack.name} is slow") % 3 != 0


def tried_with(attack: Attack) -> list[str]:
    """The techniques that an attack is tried with here: one, drawn by name and commit, and all that the page calls anything but right and refused.

    Of a program that any technique refuses, every second one is tried with one of these. All pairs together take half an hour of a processor:
    TIGHTFIT_SLOW_TESTS=1, or `python -m tests.attacks.report`.
    """
    if os.environ.get("TIGHTFIT_SLOW_TESTS"):
        return list(VARIANTS)
    marks = {name: mark for name, mark in PAGE_MARKS.get(attack.what, {}).items() if mark != MARKS[Outcome.NO_PLACE]}
    refused = [name for name in VARIANTS if marks.get(name) == MARKS[Outcome.REFUSED]]
    right = [name for name in VARIANTS if marks.get(name) == MARKS[Outcome.RIGHT]]
    # Each pair is tried with some commit, and by two runs of one commit the same.
    commit = os.environ.get("TIGHTFIT_COMMIT", "")
    draws_refused = refused and not (right and _number(f"{attack.name} {commit}") % 2)
    # What has a place on few programs is drawn more often on these.
    drawn = min(
        refused if draws_refused else right or VARIANTS,
        key=lambda name: _number(f"{attack.name} {name} {commit}") * _NUM_PLACES[name],
    )
    return [name for name in VARIANTS if name == drawn or name in marks.keys() - {*refused, *right}]


def _number(text: str) -> int:
    return zlib.crc32(text.encode())


def one_in_three(rows: Iterable[str], columns: Iterable[str]) -> list[object]:
    """All pairs of a row and a column as parameters of a test; two in three of each row, and of each column, are marked as slow."""
    return [
        pytest.param(row, column, id=f"{row}-{column}", marks=pytest.mark.slow if (i + j) % 3 else ())
        for (i, row), (j, column) in itertools.product(enumerate(rows), enumerate(columns))
    ]


def check(attack: Attack) -> None:
    """Fails where a technique is wrong or crashes, or does not do with `attack` what the page says of it.

    Where the page says something else: python -m tests.attacks.report --write.
    """
    # The tensors are small: more threads than one cost more than they bring.
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    verdicts = {name: run(attack, name) for name in tried_with(attack)}
    torch.set_num_threads(num_threads)
    bad = {
        name: f"{v.outcome}: {v.reason}"
        for name, v in verdicts.items()
        if v.outcome in (Outcome.WRONG, Outcome.CRASHED)
    }
    known = {name for attack_name, name in KNOWN_WRONG if attack_name == attack.name}
    assert {name: told for name, told in bad.items() if name not in known} == {}
    # A row whose pair is mended must be taken out of the table.
    assert known <= bad.keys()
    if attack.kind == "clean":
        assert {name: v.reason for name, v in verdicts.items() if v.outcome is Outcome.REFUSED} == {}
    on_page = PAGE_MARKS[attack.what]
    assert {name: MARKS[v.outcome] for name, v in verdicts.items()} == {name: on_page[name] for name in verdicts}
