"""How far plans are from the best that there is, found by trying everything; and how long the solver takes for models that are too deep for that.

Three comparisons: the solver against all combinations of a problem's options, by their predictions; a search, traces and corrections included,
against the traces of all combinations of choices for a model of three blocks; and the solver's time on synthetic deep models.
"""

import dataclasses
import itertools
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from benchmarks.plans.bench import StoredRuns, bench_of
from benchmarks.plans.workloads import Workload
from tightfit.fit.searching.allowed import Allowed
from tightfit.fit.searching.search import Search
from tightfit.planner import problem as problems
from tightfit.planner.option import Change, Option
from tightfit.planner.problem import Problem
from tightfit.planner.solve import solve

NUM_BUDGETS = 8
# What is enumerated: with every technique there would be more combinations than can be tried.
ENUMERATED = frozenset({"optimizer_kernel", "update_in_backward", "selective_checkpointing", "checkpointing"})
MIB = 1 << 20

SMALL: tuple[Workload, ...] = (
    Workload(
        name="transformer-3",
        source=":small",
        batch_size=16,
        device="RTX 4090",
        settings={"num_blocks": 3, "width": 512, "num_tokens": 1024},
    ),
    Workload(
        name="transformer-4-amp",
        source=":small",
        batch_size=16,
        device="RTX 4090",
        settings={"num_blocks": 4, "width": 768, "num_tokens": 512, "autocast": "bfloat16"},
    ),
    Workload(
        name="resnet-3",
        source=":resnet",
        batch_size=64,
        device="RTX 4090",
        settings={"depths": (1, 1, 1), "width": 64, "side": 224},
    ),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Under one budget: the seconds of a step that were found, the least of all combinations that fit, and how many there are."""

    name: str
    budget_bytes: int
    seconds: float
    min_seconds: float
    num_combinations: int

    @property
    def above(self) -> float:
        """The share by which what was found takes longer."""
        return self.seconds / self.min_seconds - 1


def part_of(problem: Problem, techniques: frozenset[str]) -> Problem:
    """The problem with the options of `techniques` alone."""
    kept = [index for index, option in enumerate(problem.options) if option.technique in techniques]
    place = {index: at for at, index in enumerate(kept)}
    conflicts = [tuple(place[i] for i in group if i in place) for group in problem.conflicts]
    return dataclasses.replace(
        problem,
        options=tuple(problem.options[index] for index in kept),
        changes=problem.changes[kept],
        conflicts=tuple(group for group in conflicts if len(group) > 1),
    )


def combinations(problem: Problem) -> Iterator[tuple[int, ...]]:
    """Every choice of options that is free of conflicts."""
    rivals: list[set[int]] = [set() for _ in problem.options]
    for group in problem.conflicts:
        for index in group:
            rivals[index] |= set(group) - {index}

    def extend(chosen: tuple[int, ...], first: int) -> Iterator[tuple[int, ...]]:
        yield chosen
        for index in range(first, len(problem.options)):
            if rivals[index].isdisjoint(chosen):
                yield from extend((*chosen, index), index + 1)

    return extend((), 0)


def against_all_promises(bench: StoredRuns) -> Iterator[Comparison]:
    """The solver's answer against all combinations, by the options' predictions; `seconds` are those of the whole step."""
    plain = bench.run_with(())
    problem = part_of(Search(bench, 0, Allowed()).candidates.variant(plain).problem, ENUMERATED)
    found = list(combinations(problem))
    peaks = np.array([problem.peak_bytes(chosen) for chosen in found])
    seconds = np.array([plain.seconds + problem.seconds_of(chosen) for chosen in found])
    for budget in np.linspace(peaks.min(), peaks.max(), NUM_BUDGETS).astype(int).tolist():
        solution = solve(problem, budget)
        assert solution.fits
        yield Comparison(
            name=bench.label,
            budget_bytes=budget,
            seconds=plain.seconds + solution.seconds,
            min_seconds=float(seconds[peaks <= budget].min()),
            num_combinations=len(found),
        )


def against_all_traces(bench: StoredRuns) -> Iterator[Comparison]:
    """The search's answer, any technique allowed, against the traces of all choices for the blocks, with the optimizer as is fastest."""
    plain = bench.run_with(())
    search = Search(bench, 0, Allowed())
    problem = part_of(search.candidates.variant(plain).problem, ENUMERATED)
    optimizers = [i for i, o in enumerate(problem.options) if o.where == "optimizer"]
    always = min(optimizers, key=lambda i: (problem.seconds_of((i,)), problem.peak_bytes((i,))))
    blocks = {i for i, o in enumerate(problem.options) if not any(o.slots < other.slots for other in problem.options)}
    found = [chosen for chosen in combinations(problem) if always in chosen and set(chosen) <= blocks]
    settings = search.offers.of_the_allocator(plain.profile)
    needs, seconds = [], []
    for chosen in found:
        trial = bench.run_with(problem.options[i] for i in chosen)
        needs.append(min(t.high_bytes for t in (trial, *(bench.with_settings(trial, o) for o in settings))))
        seconds.append(trial.seconds)
    high, all_seconds = np.array(needs), np.array(seconds)
    for budget in np.linspace(high.min(), plain.high_bytes, NUM_BUDGETS, dtype=np.int64).tolist()[:-1]:
        best = Search(bench, budget, Allowed()).run()
        yield Comparison(
            name=bench.label,
            budget_bytes=budget,
            seconds=best.best.seconds if best.fits else float("inf"),
            min_seconds=float(all_seconds[high <= budget].min()),
            num_combinations=len(found),
        )


def deep(num_blocks: int, num_options: int, *, is_regular: bool) -> Problem:
    """A made-up training step of blocks with options each: forward piles activations up, backward takes them down."""
    random = np.random.default_rng(0)
    sizes = np.full(num_blocks, 300) if is_regular else random.integers(20, 600, num_blocks)
    costs = np.full(num_blocks, 5.0) if is_regular else random.uniform(0.5, 12.0, num_blocks)
    shares = np.tile(np.linspace(0.15, 0.95, num_options), (num_blocks, 1))
    if not is_regular:
        shares = np.sort(random.uniform(0.1, 0.98, shares.shape), axis=1)
    kept = np.cumsum(sizes)
    working = sizes * 0.4
    forward, backward = kept + working, kept[::-1] + working[::-1]
    timeline = ((np.concatenate([forward, backward]) + 2_000) * MIB).astype(np.int64)
    options = [
        Option(
            technique="made-up",
            where=f"block.{block}",
            equivalence_class=f"{option}" if is_regular else "",
            settings={"option": option},
            changes=(
                Change(begin=block + 1, end=2 * num_blocks - 1 - block, num_bytes=-int(sizes[block] * share * MIB)),
            ),
            seconds=float(costs[block] * share**1.7 * 1e-3),
            exact=True,
            slots=frozenset({f"block.{block}"}),
        )
        for block, option in itertools.product(range(num_blocks), range(num_options))
        for share in (shares[block, option],)
    ]
    return problems.build(timeline, options)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Solved:
    """How long the solver took for a made-up model under a budget, and how far the answer may be from the best."""

    name: str
    share: float
    elapsed_seconds: float
    processor_seconds: float
    is_proven: bool
    fits: bool
    gap: float


def solver_times(work_seconds: float = 10.0) -> Iterator[Solved]:
    """96 blocks alike and 256 of all sizes, eight options each, under budgets from 90 % to 20 % of the peak."""
    cases = (("96 alike", deep(96, 8, is_regular=True)), ("256 irregular", deep(256, 8, is_regular=False)))
    for name, problem in cases:
        most = problem.peak_bytes(())
        for share in (0.9, 0.7, 0.5, 0.35, 0.2):
            started, processor = time.monotonic(), time.process_time()
            solution = solve(problem, int(share * most), work_seconds=work_seconds)
            yield Solved(
                name=name,
                share=share,
                elapsed_seconds=time.monotonic() - started,
                processor_seconds=time.process_time() - processor,
                is_proven=solution.is_proven,
                fits=solution.fits,
                gap=1 - solution.bound_seconds / solution.seconds if solution.seconds > 0 else 0.0,
            )


def lines(folder: Path | None, names: Sequence[str]) -> Iterator[str]:
    """All three comparisons as text; `names` are workloads of `SMALL`, or none for all."""
    for solved in solver_times():
        yield (
            f"{solved.name:18} {solved.share:4.0%} of the peak  {solved.elapsed_seconds:6.2f} s, {solved.processor_seconds:5.2f} s of the processor  "
            f"{'proven' if solved.is_proven else f'within {solved.gap:.2%}'}{'' if solved.fits else ', does not fit'}"
        )
    benches = [bench_of(w, folder) for w in SMALL if not names or w.name in names]
    for bench in benches:
        yield from _table("promised", against_all_promises(bench))
    if benches:
        yield from _table("traced", against_all_traces(benches[0]))


def _table(kind: str, comparisons: Iterator[Comparison]) -> Iterator[str]:
    for c in comparisons:
        yield (
            f"{c.name:18} {kind:8} {c.budget_bytes / 2**30:6.2f} GiB  {c.seconds * 1e3:8.3f} ms, least of "
            f"{c.num_combinations:,} {c.min_seconds * 1e3:8.3f} ms  {c.above:+.2%}"
        )
