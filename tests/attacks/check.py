"""What is asked of each attack: no technique gives a wrong result or crashes with it; it is trained right, or refused before a wrong update."""

import os
import zlib

import pytest
import torch
from tests.attacks.harness import Outcome, run
from tests.attacks.known_wrong import KNOWN_WRONG
from tests.attacks.places import VARIANTS
from tests.attacks.registry import Attack, attacks
from tests.attacks.table import MARKS, marks_on_page

PAGE_MARKS = marks_on_page()


def of_kinds(*kinds: str) -> list[object]:
    """The attacks of some kinds, as parameters of a test."""
    return [pytest.param(attack, id=name) for name, attack in attacks().items() if attack.kind in kinds]


def tried_with(attack: Attack) -> list[str]:
    """The techniques that an attack is tried with here: all that the page says are not simply right, and a tenth of the others.

    All of them together take ten minutes of a processor: TIGHTFIT_SLOW_TESTS=1, or `python -m tests.attacks.report`.
    """
    marks = PAGE_MARKS.get(attack.what, {})
    simple = (MARKS[Outcome.RIGHT], MARKS[Outcome.NO_PLACE])
    is_slow = bool(os.environ.get("TIGHTFIT_SLOW_TESTS"))
    return [
        name
        for name in VARIANTS
        if is_slow or marks.get(name) not in simple or zlib.crc32(f"{attack.name} {name}".encode()) % 10 == 0
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
