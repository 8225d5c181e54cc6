"""The simulation of load: seconds for a million requests, and agreement with the step-by-step reference: `python -m benchmarks.serving.load`.

The costs are those of an 8B model on one large card, in round numbers; prompts of 100 to 2,000 tokens, answers of 1 to 600.
"""

import argparse
import time

import numpy as np
from tests.null.reference_engine import ReferenceEngine

from tightfit.serving.load.load_costs import FEMTOSECONDS, AttentionTimes, CachePages, LoadCosts
from tightfit.serving.load.scheduler import SchedulerLimits, serve_requests

_BLOCK = 16


def _costs(max_tokens: int) -> LoadCosts:
    return LoadCosts(
        mixed=[round((8e-3 + 5e-5 * tokens) * FEMTOSECONDS) for tokens in range(max_tokens + 1)],
        decode=[round((8e-3 + 1e-5 * requests) * FEMTOSECONDS) for requests in range(max_tokens + 1)],
        attention=(
            AttentionTimes(window=None, chunk=10**11, pair=10**6, cached_token=7 * 10**6),
            AttentionTimes(window=512, chunk=10**11, pair=10**6, cached_token=3 * 10**6),
        ),
    )


def _pages(tokens: int) -> CachePages:
    return CachePages(
        capacity=tokens * 1000, block_tokens=_BLOCK, fixed=500, growth=((0, 1000 * _BLOCK), (33, 800 * _BLOCK))
    )


def million(number: int, rate: float, cache_tokens: int) -> str:
    """A line with the processor seconds for so many requests."""
    random = np.random.default_rng(0)
    arrivals = (np.cumsum(random.exponential(1 / rate, number)) * FEMTOSECONDS).tolist()
    prompts, answers = random.integers(100, 2000, number).tolist(), random.integers(1, 600, number).tolist()
    began = time.process_time()
    found = serve_requests(
        [int(at) for at in arrivals],
        prompts,
        answers,
        costs=_costs(2048),
        pages=_pages(cache_tokens),
        limits=SchedulerLimits(max_requests=256, max_tokens=2048, admits_whole=True),
    )
    spent = time.process_time() - began
    return f"{number:,} requests at {rate:g}/s, {cache_tokens:,} tokens of cache: {spent:.1f} s of processor time, {found.num_steps:,} steps, {sum(found.preemptions):,} preemptions, {found.most_requests} at once"


def agreement(number: int) -> str:
    """A line with how many random traces have the same times and preemptions as step by step."""
    random = np.random.default_rng(1)
    same = preempted = 0
    for _ in range(number):
        size = int(random.integers(2, 30))
        arrivals = np.sort(random.integers(0, 2 * 10**15, size)).tolist()
        prompts, answers = random.integers(1, 300, size).tolist(), random.integers(1, 60, size).tolist()
        limits = SchedulerLimits(
            max_requests=int(random.integers(1, 12)), max_tokens=256, admits_whole=bool(random.integers(2))
        )
        costs, pages = _costs(256), _pages(int(random.integers(400, 1500)))
        found = serve_requests(arrivals, prompts, answers, costs=costs, pages=pages, limits=limits)
        expected = ReferenceEngine(costs, pages, limits).serve(arrivals, prompts, answers)
        preempted += any(found.preemptions)
        same += (found.first, found.end, found.preemptions) == (
            [request.first for request in expected],
            [request.end for request in expected],
            [request.preemptions for request in expected],
        )
    return f"{same} of {number} random traces as step by step, {preempted} of them with preemptions"


def main() -> None:
    """Prints a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1_000_000)
    parser.add_argument("--traces", type=int, default=1000)
    given = parser.parse_args()
    print(agreement(given.traces), flush=True)
    for rate, tokens in ((4.0, 400_000), (8.0, 60_000)):
        print(million(given.requests, rate, tokens), flush=True)


if __name__ == "__main__":
    main()
