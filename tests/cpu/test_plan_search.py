"""How a search closes in on its limit, and what it does when the workload does not run with what was chosen."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tests.conformance.models import workload
from tests.cpu.run_arguments import run_arguments

from tightfit.allocator.settings import AllocatorSettings
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.errors import ApplyError
from tightfit.fit.searching import search as searches
from tightfit.fit.searching.allowed import Allowed, Without
from tightfit.fit.searching.bisection import Bisection
from tightfit.fit.searching.search import Search
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner.option import Change, Option
from tightfit.planner.problem import build
from tightfit.techniques.registry import techniques

# Many processes and traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

torch.set_num_threads(1)


def test_a_limit_is_lowered_by_what_was_too_much_and_raised_by_what_was_left() -> None:
    limits = Bisection(budget_bytes=1000, limit=900)
    assert limits.narrow(promised=900, traced=1100)
    assert limits.limit == 800
    assert limits.narrow(promised=790, traced=900)
    # Between 800, whose answer has fitted, and 900, whose answer has not.
    assert 800 < limits.limit < 900


def test_a_trace_that_just_fits_ends_the_search() -> None:
    assert not Bisection(budget_bytes=1000, limit=900).narrow(promised=900, traced=990)


def test_an_excess_that_does_not_shrink_is_met_with_larger_steps() -> None:
    limits = Bisection(budget_bytes=1000, limit=900)
    found = []
    for _ in range(4):
        assert limits.narrow(promised=limits.limit, traced=1004)
        found.append(limits.limit)
    assert found == [896, 888, 872, 840]


def test_limits_that_stand_close_end_the_search() -> None:
    limits = Bisection(budget_bytes=1000, limit=900)
    limits.narrow(promised=900, traced=1003)
    assert not limits.narrow(promised=897, traced=900)


class FailingRuns(TracedRuns):
    """Runs on which some techniques cannot be put."""

    def __init__(self, *failing: str, traced: TracedRuns | None = None) -> None:
        """What `traced` has traced before, by the same options, is not traced again."""
        where = workload.__globals__["__file__"]
        target = GeneratorFunction(location=where, function="workload", parameters={"model": "llama"})
        super().__init__(**run_arguments(target, "llama"))
        self.failing = failing
        if traced is not None:
            self._made, self._effects = traced._made, traced._effects

    def run_with(
        self, options: tuple[Option, ...] | list[Option], meanwhile: Callable[[], object] | None = None
    ) -> TracedRun:
        for option in options:
            if option.technique in self.failing:
                raise ApplyError(f"{option.technique}: it cannot be done here", technique=option.technique)
            if option.where in self.failing:
                said = f"{option.technique}: not at {option.where}"
                raise ApplyError(said, technique=option.technique, places=[option.where])
        return super().run_with(options, meanwhile)


@pytest.fixture(scope="module")
def runs() -> FailingRuns:
    return FailingRuns("attention", "selective_checkpointing")


def test_a_technique_that_cannot_be_put_on_is_refused_with_its_reason_and_the_rest_is_planned(
    runs: FailingRuns,
) -> None:
    plain = runs.run_with(())
    held = plain.estimate.peak
    # Attention is written out in this model, and is exact and free: the search begins with it.
    found = Search(runs, held.device_high_bytes - held.allocated_bytes // 3, Allowed()).run()
    assert ("attention", "it cannot be done here") in found.refused
    used = {option.technique for option in found.best.options}
    assert used and not used & set(runs.failing)
    assert found.fits
    assert found.best.high_bytes <= held.device_high_bytes - held.allocated_bytes // 3


def test_a_run_that_fits_is_left_alone(runs: FailingRuns) -> None:
    found = Search(runs, runs.run_with(()).high_bytes, Allowed()).run()
    assert found.fits and found.best is found.base and found.solution is None


def test_a_budget_is_no_more_than_the_program_allows_itself(runs: FailingRuns, monkeypatch: pytest.MonkeyPatch) -> None:
    plain, card = runs.run_with(()), runs.card
    assert runs.within(card.capacity_bytes) == card.capacity_bytes
    tape = dataclasses.replace(plain.tape, memory_fraction=0.25)
    monkeypatch.setattr(runs, "run_with", lambda _: dataclasses.replace(plain, tape=tape))
    allowed_bytes = card.capacity_bytes // 4 + card.context_bytes
    assert runs.within(card.capacity_bytes) == allowed_bytes
    assert runs.within(allowed_bytes - 1) == allowed_bytes - 1
    # What a run needs does not depend on it, however small it is.
    tape = dataclasses.replace(plain.tape, memory_fraction=1e-4)
    for settings in (runs.on.settings, AllocatorSettings(per_process_memory_fraction=1e-4)):
        assert runs._estimate(tape, settings).peak == plain.estimate.peak


def test_a_place_that_is_refused_leaves_the_technique_its_other_places(runs: FailingRuns) -> None:
    plain = runs.run_with(())
    held = plain.estimate.peak
    budget = held.device_high_bytes - held.allocated_bytes // 2
    block = "LlamaForCausalLM.model.layers.0"
    others = ("attention", "selective_checkpointing", "nested_checkpointing", "tiled_tokens", "micro_batches")
    found = Search(FailingRuns(*others, block, traced=runs), budget, Allowed()).run()
    assert ("checkpointing", f"{block}: not at {block}") in found.refused
    assert any(o.technique == "checkpointing" for o in found.best.options)
    assert all(o.where != block for o in found.best.options)


class TogetherFailingRuns(FailingRuns):
    """Runs that a technique can be put on alone, and not beside any other."""

    def __init__(self, alone: str, traced: TracedRuns) -> None:
        super().__init__("attention", "selective_checkpointing", traced=traced)
        self._alone = alone
        self.tried: list[frozenset[str]] = []

    def run_with(
        self, options: tuple[Option, ...] | list[Option], meanwhile: Callable[[], object] | None = None
    ) -> TracedRun:
        if {self._alone} < {option.technique for option in options}:
            self.tried.append(frozenset(option.key for option in options))
            raise ApplyError(f"{self._alone}: not beside another technique", technique=self._alone)
        return super().run_with(options, meanwhile)


@pytest.mark.parametrize("share", [2, 1000])
def test_what_is_refused_beside_others_is_not_tried_beside_others_again(share: int, runs: FailingRuns) -> None:
    """A technique that needs a trace of its own was traced alone; whatever is put beside it is refused, once."""
    plain = runs.run_with(())
    together = TogetherFailingRuns("micro_batches", runs)
    held = plain.estimate.peak
    budget = held.device_high_bytes - (share - 1) * held.allocated_bytes // share
    # Without recomputation, which would do for half of the memory.
    without = tuple(Without(technique=name) for name in ("checkpointing", "nested_checkpointing", "chunked_loss"))
    found = Search(together, budget, Allowed(without=without)).run()
    assert ("micro_batches", "not beside another technique") in found.refused
    assert len(together.tried) == 1, [sorted(keys) for keys in together.tried]
    assert found.best.high_bytes < plain.high_bytes


class InterruptedRuns(FailingRuns):
    """Runs that are interrupted at the run number `end` with options, traced before or not."""

    def __init__(self, traced: FailingRuns, end: int) -> None:
        super().__init__(*traced.failing, traced=traced)
        self._left = end

    def run_with(
        self, options: tuple[Option, ...] | list[Option], meanwhile: Callable[[], object] | None = None
    ) -> TracedRun:
        self._left -= bool(options)
        if self._left < 0:
            raise KeyboardInterrupt
        return super().run_with(options, meanwhile)


def test_wherever_a_search_is_interrupted_the_best_so_far_is_there(runs: FailingRuns) -> None:
    plain = runs.run_with(())
    budget = plain.high_bytes - plain.estimate.peak.allocated_bytes // 3
    whole = Search(runs, budget, Allowed()).run()
    assert whole.fits and not whole.is_interrupted
    with pytest.raises(KeyboardInterrupt):
        Search(InterruptedRuns(runs, 0), budget, Allowed()).run()
    found = []
    for end in range(1, 100):
        try:
            found.append(Search(InterruptedRuns(runs, end), budget, Allowed()).run())
        # Nothing was better than the plain run by then.
        except KeyboardInterrupt:
            assert not found
            continue
        if not found[-1].is_interrupted:
            break
    assert found[-1].best.run == whole.best.run
    so_far = [(each.fits, -each.best.seconds if each.fits else -each.best.high_bytes) for each in found]
    assert so_far == sorted(so_far)
    assert all(each.best.high_bytes < plain.high_bytes for each in found)


# Each trace with micro-batches proves that examples do not mix, which is most of the time.
@pytest.mark.parametrize(
    "without",
    [(Without(technique="micro_batches"),), pytest.param((), marks=pytest.mark.slow)],
    ids=["without micro-batches", "all techniques"],
)
def test_what_cannot_be_reached_is_the_same_whatever_was_asked(without: tuple[Without, ...], runs: FailingRuns) -> None:
    """A budget is told the lowest peak that there is, by one search that does not know the budget; at that peak it fits."""
    allowed = Allowed(without=without)
    lowest = Search(runs, 0, allowed).run().best
    assert lowest.high_bytes < runs.run_with(()).high_bytes
    found = Search(runs, lowest.high_bytes - 1, allowed).run()
    assert not found.fits
    assert (found.best.high_bytes, found.best.options) == (lowest.high_bytes, lowest.options)
    found = Search(runs, lowest.high_bytes, allowed).run()
    assert found.fits and found.best.high_bytes <= lowest.high_bytes


def test_a_refusal_in_the_process_that_traces_says_what_and_where(runs: FailingRuns) -> None:
    where = "LlamaForCausalLM.model.layers"
    option = Option(
        technique="sequential_checkpointing",
        where=where,
        settings={"begin": 0, "end": 1},
        changes=(),
        seconds=0.0,
        exact=True,
    )
    with pytest.raises(ApplyError, match=r"is a ModuleList, and a torch\.nn\.Sequential is needed") as caught:
        runs.run_with([option])
    assert caught.value.technique == "sequential_checkpointing"
    assert caught.value.places == (where,)


def test_one_trace_says_of_all_tiles_which_are_refused(runs: FailingRuns) -> None:
    refused = ("LlamaForCausalLM.model.layers.0", "LlamaForCausalLM.model.layers.1")
    options = [
        Option(technique="tiled_tokens", where=where, settings={"num_tiles": 2}, changes=(), seconds=0.0, exact=True)
        for where in (*refused, "LlamaForCausalLM.model.layers.0.mlp")
    ]
    with pytest.raises(ApplyError, match=r"layers\.0 is called with more than one tensor") as caught:
        runs.run_with(options)
    assert caught.value.technique == "tiled_tokens"
    assert caught.value.places == refused


def test_parts_that_are_alike_are_combined_with_the_rest_once() -> None:
    """A batch of two is the same in two parts and in eight: the lowest peak of one is that of the others."""
    left_out = techniques().keys() - {"micro_batches", "optimizer_kernel"}
    fresh = FailingRuns()
    allowed = Allowed(without=tuple(Without(technique=name) for name in sorted(left_out)))
    assert not Search(fresh, 0, allowed).run().fits
    names = [sorted(option.technique for option in run.options) for run in fresh.all()]
    assert names.count(["micro_batches"]) > 1
    assert names.count(["micro_batches", "optimizer_kernel"]) == 1


@pytest.mark.parametrize(("is_off", "may_be_faster"), [(False, False), (True, False), (False, True)])
def test_a_plan_with_host_memory_is_no_slower_than_one_without(
    is_off: bool, may_be_faster: bool, runs: FailingRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or than one that recomputes nothing; only where the prediction holds, and nothing is recomputed, neither is looked for."""

    def candidate(seconds: float, *options: SimpleNamespace) -> Any:
        return SimpleNamespace(run=SimpleNamespace(options=options, seconds=seconds, needed_bytes=1))

    moved = SimpleNamespace(technique="activation_offload", host_bytes=1, disk_bytes=0)
    again = SimpleNamespace(technique="checkpointing", host_bytes=0, disk_bytes=0)
    asked: list[tuple[int, bool]] = []

    def best(search: Any, _base: object) -> Any:
        recomputes = not any(each.technique == "checkpointing" for each in search._allowed.without)
        asked.append((search._host_bytes, recomputes))
        return candidate(2.0 if recomputes else 3.0)

    monkeypatch.setattr(Search, "_best", best)
    monkeypatch.setattr(searches, "is_doubtful", lambda _: is_off)
    monkeypatch.setattr(searches, "_may_be_faster_without_tiers", lambda *_: may_be_faster)
    search = Search(runs, 10, Allowed(), host_bytes=5)

    def chosen(*options: SimpleNamespace) -> tuple[float, list[tuple[int, bool]]]:
        asked.clear()
        found = searches._no_slower_with_tiers(search, candidate(4.0, *options), runs.run_with(()))
        return found.run.seconds, list(asked)

    near = [(0, True)] if is_off or may_be_faster else []
    # One that moves nothing, though it could, may have missed the limit of those without.
    assert chosen(again) == ((2.0, [(0, True)]) if may_be_faster else (4.0, []))
    assert chosen(moved) == ((2.0 if near else 4.0), [*near, *([(5, False)] if is_off else [])])
    assert chosen(moved, again) == ((2.0 if near else 3.0), [*near, (5, False)])


def test_a_plan_may_be_faster_without_tiers_where_all_but_the_context_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def option(name: str, seconds: float, host_bytes: int = 0) -> Option:
        change = Change(begin=0, end=1, num_bytes=-40 << 20)
        return Option(technique=name, where=name, changes=(change,), seconds=seconds, exact=True, host_bytes=host_bytes)

    options = [option("activation_offload", 1.0, host_bytes=1), option("checkpointing", 0.5)]
    problem = build(np.array([100 << 20]), options, host_bytes=1)
    monkeypatch.setattr(searches, "context_bytes", lambda _: 10 << 20)
    search: Any = SimpleNamespace(budget_bytes=70 << 20)

    def may_be_faster(seconds: float) -> bool:
        variant = SimpleNamespace(problem=problem, run=SimpleNamespace(seconds=2.0))
        best: Any = SimpleNamespace(variant=variant, solution=SimpleNamespace(seconds=seconds))
        return searches._may_be_faster_without_tiers(search, best)

    assert may_be_faster(1.0) and not may_be_faster(0.5)
    search.budget_bytes -= 1 << 20
    # Recomputation alone does not fit then.
    assert not may_be_faster(1.0)
