"""Every technique is right with programs whose code is not pure, or refuses."""

import pytest
from tests.attacks.check import check, of_kinds
from tests.attacks.registry import Attack


@pytest.mark.parametrize("attack", of_kinds("recomputation"))
def test_every_technique_is_right_or_refuses_as_the_page_says(attack: Attack) -> None:
    check(attack)
