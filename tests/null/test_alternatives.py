"""The simple baseline beside a plan: its figure does not contradict what was traced."""

from types import SimpleNamespace
from typing import Any

import pytest

from tightfit.fit.planning import _full_checkpointing


def _found(*, fits: bool, reached: int, margin: int = 0) -> Any:
    options = [
        SimpleNamespace(technique="checkpointing", where=f"Model.layers.{i}", slots=frozenset({str(i)}))
        for i in range(2)
    ]
    variant = SimpleNamespace(
        problem=SimpleNamespace(options=options, peak_bytes=lambda _: 900, seconds_of=lambda _: 0.1),
        gap_bytes=100 + margin,
        run=SimpleNamespace(seconds=1.0),
    )
    best = SimpleNamespace(
        estimate=SimpleNamespace(peak=SimpleNamespace(device_bytes=reached)), needed_bytes=reached + margin
    )
    return SimpleNamespace(variant=variant, fits=fits, best=best)


@pytest.mark.parametrize(("fits", "reached", "said"), [(True, 1200, 1000), (False, 800, 1000), (False, 1200, None)])
def test_where_nothing_fits_no_prediction_is_below_the_lowest_peak(fits: bool, reached: int, said: int | None) -> None:
    alternative = _full_checkpointing(_found(fits=fits, reached=reached))
    assert alternative is not None
    assert alternative.device_bytes == said
    assert ("below the lowest peak" in alternative.why) is (said is None)


def test_it_is_the_likely_peak_whatever_the_margin_asks_for() -> None:
    alternative = _full_checkpointing(_found(fits=True, reached=1200, margin=50))
    assert alternative is not None
    assert alternative.device_bytes == 1000


def test_a_pipeline_is_no_block_of_its_own_and_its_layers_are() -> None:
    found = _found(fits=True, reached=0)
    layers = found.variant.problem.options
    pipeline = SimpleNamespace(technique="checkpointing", where="Model.0", slots=frozenset({"0", "1", "more"}))
    asked: list[list[int]] = []
    found.variant.problem = SimpleNamespace(
        options=[pipeline, *layers], peak_bytes=lambda which: asked.append(list(which)) or 900, seconds_of=lambda _: 0.1
    )
    assert _full_checkpointing(found) is not None
    assert asked == [[1, 2]]
