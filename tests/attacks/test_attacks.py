"""The table of attacks is whole: enough of them, each on the page, and each known fault one of a pair that is there."""

from pathlib import Path

import pytest
from tests.attacks.check import is_slow, tried_with
from tests.attacks.known_wrong import KNOWN_WRONG
from tests.attacks.places import VARIANTS
from tests.attacks.registry import KINDS, attacks
from tests.attacks.table import counts_of_rows, on_page, summary

ATTACKS = attacks()


def test_there_are_enough_attacks() -> None:
    assert sum(attack.kind != "clean" for attack in ATTACKS.values()) >= 150
    assert {name for name, _ in KNOWN_WRONG} <= ATTACKS.keys()
    assert {name for _, name in KNOWN_WRONG} <= VARIANTS.keys()


@pytest.mark.parametrize("commit", ["", "86ff5d2b", "e08571cb"])
def test_enough_programs_are_tried_by_turns_and_each_technique(commit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TIGHTFIT_COMMIT", commit)
    tried = {attack.name: tried_with(attack) for attack in ATTACKS.values() if commit or not is_slow(attack)}
    assert all(tried.values())
    assert len(tried) >= 300
    assert {name for names in tried.values() for name in names} == VARIANTS.keys()


def test_each_commit_draws_other_techniques(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    for commit in ("86ff5d2b", "e08571cb"):
        monkeypatch.setenv("TIGHTFIT_COMMIT", commit)
        drawn.append([tried_with(attack) for attack in ATTACKS.values()])
    assert sum(one != other for one, other in zip(*drawn, strict=True)) > len(ATTACKS) / 2


def test_the_page_counts_its_rows() -> None:
    page = on_page()
    assert page.splitlines()[0] == summary(len(ATTACKS), counts_of_rows(page))
    assert len({line for line in page.splitlines() if line.startswith("| ")}) == len(ATTACKS) + 1


def test_each_kind_is_tried() -> None:
    text = "".join(path.read_text() for path in Path(__file__).parent.glob("test_attacks_*.py"))
    assert all(f'"{kind}"' in text for kind in KINDS)
