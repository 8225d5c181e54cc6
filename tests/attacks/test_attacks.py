"""No attack gives a wrong result or crashes with a technique on it: it is trained right, or refused with the reason before a wrong update."""

import os
import zlib

import pytest
import torch
from tests.attacks.harness import Outcome, run
from tests.attacks.known_wrong import KNOWN_WRONG
from tests.attacks.places import VARIANTS
from tests.attacks.registry import Attack, attacks
from tests.attacks.table import MARKS, counts_of_rows, marks_on_page, on_page, summary

ATTACKS = attacks()
PAGE_MARKS = marks_on_page()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: more threads than one cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def in_shares(names: list[str]) -> list[object]:
    """The attacks, in shares that test runners of several processes can divide among them."""
    return [
        pytest.param(ATTACKS[n], id=n, marks=pytest.mark.xdist_group(f"attacks {i % 8}")) for i, n in enumerate(names)
    ]


def tried_with(attack: Attack) -> list[str]:
    """The techniques that an attack is tried with here: all that the page says are not simply right, and a third of the others.

    All of them together take ten minutes of a processor: TIGHTFIT_SLOW_TESTS=1, or `python -m tests.attacks.report`.
    """
    marks = PAGE_MARKS.get(attack.what, {})
    simple = (MARKS[Outcome.RIGHT], MARKS[Outcome.NO_PLACE])
    is_slow = bool(os.environ.get("TIGHTFIT_SLOW_TESTS"))
    return [
        name
        for name in VARIANTS
        if is_slow or marks.get(name) not in simple or zlib.crc32(f"{attack.name} {name}".encode()) % 3 == 0
    ]


@pytest.mark.parametrize("attack", in_shares(list(ATTACKS)))
def test_every_technique_is_right_or_refuses_as_the_page_says(attack: Attack) -> None:
    """Where the page says something else: python -m tests.attacks.report --write."""
    verdicts = {name: run(attack, name) for name in tried_with(attack)}
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


def test_there_are_enough_attacks() -> None:
    assert sum(attack.kind != "clean" for attack in ATTACKS.values()) >= 150
    assert {name for name, _ in KNOWN_WRONG} <= ATTACKS.keys()
    assert {name for _, name in KNOWN_WRONG} <= VARIANTS.keys()


def test_the_page_counts_its_rows() -> None:
    page = on_page()
    assert page.splitlines()[0] == summary(len(ATTACKS), counts_of_rows(page))
    assert len({line for line in page.splitlines() if line.startswith("| ")}) == len(ATTACKS) + 1
