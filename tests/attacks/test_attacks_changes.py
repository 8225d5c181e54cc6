"""Every technique is right with programs that change or fail on their way, and with those that do nothing unusual, or refuses."""

import pytest
from tests.attacks.check import check, of_kinds
from tests.attacks.registry import Attack


@pytest.mark.parametrize("attack", of_kinds("clean", "changes", "exceptions"))
def test_every_technique_is_right_or_refuses_as_the_page_says(attack: Attack) -> None:
    check(attack)
