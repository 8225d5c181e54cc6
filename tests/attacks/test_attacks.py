"""No attack gives a wrong result or crashes with a technique on it: it is trained right, or refused with the reason before a wrong update."""

import pytest
import torch
from tests.attacks.harness import Outcome, run
from tests.attacks.known_wrong import KNOWN_WRONG
from tests.attacks.places import VARIANTS
from tests.attacks.registry import Attack, attacks
from tests.attacks.table import on_page, tables, without_reasons

ATTACKS = attacks()
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def one_thread():
    """The tensors are small: more threads than one cost more than they bring."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_every_technique_is_right_or_refuses(attack: Attack) -> None:
    verdicts = {name: run(attack, name) for name in VARIANTS}
    bad = {
        name: f"{v.outcome}: {v.reason}"
        for name, v in verdicts.items()
        if v.outcome in (Outcome.WRONG, Outcome.CRASHED)
    }
    known = {name for attack_name, name in KNOWN_WRONG if attack_name == attack.name}
    assert {name: told for name, told in bad.items() if name not in known} == {}
    # A row whose pair is mended must be taken out of the table.
    assert known <= bad.keys()


@pytest.mark.parametrize("name", [name for name, attack in ATTACKS.items() if attack.kind == "clean"])
def test_clean_programs_are_not_refused(name: str) -> None:
    verdicts = {variant: run(ATTACKS[name], variant) for variant in VARIANTS}
    refused = {variant: v.reason for variant, v in verdicts.items() if v.outcome is Outcome.REFUSED}
    assert refused == {}


def test_there_are_enough_attacks() -> None:
    assert sum(attack.kind != "clean" for attack in ATTACKS.values()) >= 150
    assert {name for name, _ in KNOWN_WRONG} <= ATTACKS.keys()
    assert {name for _, name in KNOWN_WRONG} <= VARIANTS.keys()


def test_the_page_has_these_verdicts() -> None:
    """Where it fails: python -m tests.attacks.table."""
    assert without_reasons(on_page()) == without_reasons(tables())
