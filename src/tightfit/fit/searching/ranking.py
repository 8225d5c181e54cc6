"""Which of two runs that fit is faster, as far as estimated seconds can tell, and which is taken where they cannot.

A run is faster only where the ratio of the seconds is beyond its doubt (`tightfit.simulate.seconds_band.ratio_doubt`). Of runs that cannot be told apart from the
fastest, the simplest is taken: fewer techniques are fewer things to go wrong. What that may cost is bounded besides, because a doubtful loss is a loss in most cases.
"""

import math
from collections.abc import Iterable

from tightfit.fit.searching.candidates import Candidate
from tightfit.fit.traced_runs import TracedRun
from tightfit.simulate.seconds_band import ratio_doubt

MOST_FOR_SIMPLICITY = 0.03
"""The largest share by which the taken run may be slower than the fastest, by estimate, where the doubt is larger than that."""


def is_surely_slower(one: TracedRun, other: TracedRun) -> bool:
    """Whether `one` takes longer than `other` beyond the doubt of the ratio of their seconds; without a range, by the seconds alone."""
    band, of_other = one.estimate.seconds_band, other.estimate.seconds_band
    if band is None or of_other is None:
        return one.seconds > other.seconds
    return math.log(one.seconds / other.seconds) > ratio_doubt(band, of_other)


def simplest_of_the_fastest(best: Candidate, fitting: Iterable[Candidate]) -> Candidate:
    """`best`, the fastest, or the simplest of those `fitting` that cannot be told from it."""
    alike = [
        each
        for each in fitting
        if each.run.seconds <= (1 + MOST_FOR_SIMPLICITY) * best.run.seconds and not is_surely_slower(each.run, best.run)
    ]
    # The first of equals is `best`.
    return min([best, *alike], key=lambda each: _complexity(each.run))


def _complexity(run: TracedRun) -> tuple[bool, int, float, int]:
    """What is asked first: whether the values are others, how many techniques there are, then seconds and bytes."""
    options = run.all_options()
    techniques = {option.technique for option in options}
    return not all(option.exact for option in options), len(techniques), run.seconds, run.needed_bytes
