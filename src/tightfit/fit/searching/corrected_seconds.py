"""A second look at a plan whose traced run takes another time than its options predicted: the options' seconds are corrected by what the trace says,
and the problem is solved again.

"Optimal" speaks of predicted seconds. Where those are off by more than 5 %, another choice may be the fastest one.
"""

import dataclasses

from tightfit.fit.searching.candidates import SOLVER_SECONDS, Candidate, Candidates
from tightfit.planner.problem import Problem
from tightfit.planner.solve import solve

SHARE_WORTH_A_LOOK = 0.05
MAX_LOOKS = 2
# What one trace says of a technique is not believed beyond that.
_MAX_FACTOR = 4.0


def simulated_seconds(candidate: Candidate) -> float:
    """Seconds of a step of the traced run, without what its settings of the allocator take, which no option predicts."""
    option = candidate.run.settings_option
    return candidate.run.seconds - (0.0 if option is None else option.seconds)


def predicted_seconds(candidate: Candidate) -> float:
    """Seconds of a step as the options predict them on top of the run that they were made for."""
    return candidate.variant.run.seconds + candidate.solution.seconds


def is_off(candidate: Candidate) -> bool:
    """Whether the prediction is off by more than 5 %."""
    simulated = simulated_seconds(candidate)
    return abs(predicted_seconds(candidate) - simulated) > SHARE_WORTH_A_LOOK * simulated


def looked_again(candidate: Candidate, candidates: Candidates) -> Candidate:
    """`candidate`, which fits, or a faster one that fits too; in either case its problem has seconds that the traces agree with, if that was possible."""
    for _ in range(MAX_LOOKS):
        problem = _corrected(candidate) if is_off(candidate) else None
        if problem is None:
            return candidate
        # No more than was promised for the run that fits: what holds more by prediction may hold more in a trace.
        solution = solve(problem, candidate.solution.peak_bytes, time_limit_seconds=SOLVER_SECONDS)
        variant = dataclasses.replace(candidate.variant, problem=problem)
        if not solution.fits:
            return candidate
        if solution.chosen == candidate.solution.chosen:
            return dataclasses.replace(candidate, variant=variant, solution=solution)
        other = candidates.with_solution(variant, solution)
        if other is None or not candidates.fits(other.run) or other.run.seconds >= candidate.run.seconds:
            return candidate
        candidate = other
    return candidate


def _corrected(candidate: Candidate) -> Problem | None:
    """The problem with the seconds of the chosen techniques as much higher or lower as the trace says; None where it says nothing."""
    problem, chosen = candidate.variant.problem, candidate.solution.chosen
    taken = [problem.options[index] for index in chosen]
    costly = sum(option.seconds for option in taken if option.seconds > 0)
    missed = simulated_seconds(candidate) - predicted_seconds(candidate)
    factor = 1 + missed / costly if costly > 0 else 0.0
    if not 1 / _MAX_FACTOR <= factor <= _MAX_FACTOR:
        return None
    names = {option.technique for option in taken if option.seconds > 0}
    options = tuple(
        dataclasses.replace(o, seconds=o.seconds * factor) if o.technique in names and o.seconds > 0 else o
        for o in problem.options
    )
    return dataclasses.replace(problem, options=options)
