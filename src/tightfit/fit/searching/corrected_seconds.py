"""A second look at a plan whose traced run takes another time than its options predicted: the options' seconds are corrected by what the trace says,
and the problem is solved again.

"Optimal" speaks of predicted seconds. Where those are off by more than 5 %, another choice may be the fastest one.
"""

import dataclasses

from tightfit.fit.searching.candidates import SOLVER_SECONDS, Candidate, Candidates
from tightfit.planner.option import Option
from tightfit.planner.problem import Problem, together
from tightfit.planner.sides import Sides
from tightfit.planner.solve import solve

SHARE_WORTH_A_LOOK = 0.05
MAX_LOOKS = 2
_SHARE_TO_COMPARE = 0.02
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
    return _is_off_by(candidate, SHARE_WORTH_A_LOOK)


def is_doubtful(candidate: Candidate) -> bool:
    """Whether the prediction is off by more than 2 %, so that what a solver has left for the candidate may be faster."""
    return _is_off_by(candidate, _SHARE_TO_COMPARE)


def _is_off_by(candidate: Candidate, share: float) -> bool:
    simulated = simulated_seconds(candidate)
    return abs(predicted_seconds(candidate) - simulated) > share * simulated


def looked_again(candidate: Candidate, candidates: Candidates) -> Candidate:
    """`candidate`, which fits, or a faster one that fits too; in either case its problem has seconds that the traces agree with, if that was possible."""
    for _ in range(MAX_LOOKS):
        problem = _corrected(candidate) if is_off(candidate) else None
        if problem is None:
            return candidate
        # No more than was promised for the run that fits: what holds more by prediction may hold more in a trace.
        solution = solve(problem, candidate.solution.peak_bytes, work_seconds=SOLVER_SECONDS)
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
    costly = [option for option in taken if _is_costly(option)]
    rest = problem.step + together(option for option in taken if not _is_costly(option))
    added = simulated_seconds(candidate) - candidate.variant.run.seconds
    factor = _factor(rest, together(costly), problem.step.seconds + added)
    if not 1 / _MAX_FACTOR <= factor <= _MAX_FACTOR:
        return None
    names = {option.technique for option in costly}
    options = tuple(
        dataclasses.replace(o, seconds=problem.step.added(o.added_sides * factor), sides=o.added_sides * factor)
        if o.technique in names and _is_costly(o)
        else o
        for o in problem.options
    )
    return dataclasses.replace(problem, options=options)


def _is_costly(option: Option) -> bool:
    return option.added_sides.seconds > 0


def _factor(rest: Sides, costly: Sides, seconds: float) -> float:
    """By which `costly` has to be multiplied so that a step takes `seconds` with `rest`; 0 where nothing does that."""
    of_sides = (
        (seconds - rest.on_card, costly.on_card),
        (seconds - rest.on_host, costly.on_host),
    )
    return min((missing / own for missing, own in of_sides if own > 0), default=0.0)
