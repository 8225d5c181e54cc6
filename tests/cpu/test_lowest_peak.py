"""How few traces tell the lowest peak: what cannot be lower is not traced."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from tightfit.fit.searching import candidates as candidates_module
from tightfit.fit.searching.candidates import Candidates
from tightfit.fit.searching.least_peak import LeastPeak, Prediction
from tightfit.fit.searching.variants import Variant
from tightfit.planner.solution import Solution


class TracedCandidates:
    """Variants by name with what they are traced to need."""

    def __init__(self, needed: dict[str, int]) -> None:
        self.needed, self.traced = needed, list[str]()

    def begun(self, options: Sequence[Any], _base: object) -> tuple[Any, tuple[Any, ...]]:
        strings = tuple(options)
        operators, storages, events = ({"name": 0, "num_bytes": 0, "kind": 0, "storage": 0} for _ in range(3))
        tape = {"operators": operators, "storages": storages, "events": events}
        return SimpleNamespace(
            tape=SimpleNamespace(strings=strings, **{k: SimpleNamespace(**v) for k, v in tape.items()})
        ), ()

    def least_of(self, options: Sequence[Any], _base: object, *, below: Any) -> Any:
        (name,) = options
        self.traced.append(name)
        return SimpleNamespace(run=SimpleNamespace(needed_bytes=self.needed[name], seconds=1.0))


class Predicted(LeastPeak):
    """With predictions that are given."""

    def __init__(self, candidates: TracedCandidates, predicted: dict[str, int]) -> None:
        self._candidates: Any = candidates
        self.predicted: dict[str, Any] = predicted

    def predictions(self, start: object) -> list[Prediction]:
        return [Prediction(needed_bytes=size, options=(name,)) for name, size in self.predicted.items()]


@pytest.mark.parametrize(
    ("reached", "traced"),
    [
        pytest.param(1000, ["plain", "lower"], id="as predicted: what is predicted to the byte the same is not traced"),
        pytest.param(1100, ["plain", "parts", "lower"], id="more than predicted: the others may hold less"),
    ],
)
def test_a_variant_predicted_the_same_as_one_that_was_reached_is_not_traced(reached: int, traced: list[str]) -> None:
    candidates = TracedCandidates({"plain": reached, "parts": 1050, "lower": 1010})
    least = Predicted(candidates, {"plain": 1000, "parts": 1000, "lower": 1005})
    found = least.search(None, None)  # pyrefly: ignore
    assert candidates.traced == traced
    assert found is not None and found.run.needed_bytes == min(candidates.needed[name] for name in traced)


class SolvedCandidates(Candidates):
    """One variant, whose options each take 100 of 1,000 bytes as promised, and that is traced to hold `held`, one after another."""

    def __init__(self, held: Sequence[int]) -> None:
        self._offers: Any = SimpleNamespace(refusals=SimpleNamespace(is_any_refused=lambda _: False))
        self._settings: Any = SimpleNamespace(smallest=lambda run: run)
        self._held = list(held)
        self.num_traced = 0
        change = SimpleNamespace(num_bytes=-100)
        problem: Any = SimpleNamespace(
            options=[
                SimpleNamespace(key=f"{place}{tiles}", technique="tiles", where=place, changes=(change,))
                for place in "abcde"
                for tiles in (4, 16)
            ],
            peak_bytes=lambda _: 1000,
        )
        self.variant = lambda *_: Variant(run=_run(1000), problem=problem, gap_bytes=0)

    def begun(self, options: Sequence[Any], base: Any) -> Any:
        return base, ()

    def traced(self, options: Sequence[Any], meanwhile: object = None) -> Any:
        self.num_traced += 1
        return _run(self._held[self.num_traced - 1])

    def _seen(self, run: Any, variant: Any, solution: Any) -> Any:
        return SimpleNamespace(run=run)


def _run(held: int) -> Any:
    peak = SimpleNamespace(allocated_bytes=held, device_bytes=held, reserved_bytes=held)
    return SimpleNamespace(
        options=(), needed_bytes=held, margin="likely", estimate=SimpleNamespace(peak=peak, band=()), seconds=1.0
    )


@pytest.fixture
def solved(monkeypatch: pytest.MonkeyPatch) -> None:
    def without(problem: Any, keys: set[str]) -> Any:
        return SimpleNamespace(options=[o for o in problem.options if o.key not in keys], peak_bytes=lambda _: 1000)

    def solve(problem: Any, limit: int) -> Any:
        chosen = tuple(range(0, len(problem.options), 2))
        peak = 1000 - 100 * len(chosen)
        return Solution(chosen=chosen, fits=False, seconds=0.0, peak_bytes=peak, bound_seconds=0.0, is_proven=True)

    monkeypatch.setattr(candidates_module, "without", without)
    monkeypatch.setattr(candidates_module, "_solve", solve)


@pytest.mark.parametrize(
    ("held", "num_traced"),
    [([900, 900], 2), ([900, 950], 2), ([900, 850, 840, 830], 4), ([510], 1)],
    ids=["the same without", "more without", "less each time", "as promised"],
)
def test_options_are_left_out_while_less_is_held_without_them(held: list[int], num_traced: int, solved: None) -> None:
    candidates = SolvedCandidates(held)
    found = candidates.least_of((), _run(1000))
    assert candidates.num_traced == num_traced
    assert found is not None and found.run.needed_bytes == min(held)


@pytest.mark.parametrize(("below", "num_traced"), [(500, 0), (501, 1)])
def test_what_is_promised_no_less_than_was_reached_is_not_traced(below: int, num_traced: int, solved: None) -> None:
    candidates = SolvedCandidates([510])
    candidates.least_of((), _run(1000), below=SimpleNamespace(run=_run(below)))  # pyrefly: ignore
    assert candidates.num_traced == num_traced
