"""A technique that a plan misspells is named with the one that is meant."""

import pytest

from tightfit.errors import PlanError
from tightfit.techniques.registry import technique


def test_the_nearest_technique_is_named() -> None:
    pytest.importorskip("torch")
    with pytest.raises(PlanError, match=r"there is no technique 'chekpointing' \(did you mean checkpointing\?\)"):
        technique("chekpointing")
    with pytest.raises(PlanError, match="there is no technique 'magic'; there are "):
        technique("magic")
