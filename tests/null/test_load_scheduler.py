"""The simulation of load agrees with one that looks at every request in every step."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.null.reference_engine import ReferenceEngine

from tightfit.serving.load.load_costs import AttentionTimes, CachePages, LoadCosts
from tightfit.serving.load.scheduler import SchedulerLimits, serve_requests
from tightfit.serving.model.cache_size import CacheSize
from tightfit.serving.model.model_facts import CacheTensor

BLOCK = 4


def costs(*windows: int | None) -> LoadCosts:
    return LoadCosts(
        mixed=[0, *(1_000 + 37 * tokens for tokens in range(1, 200))],
        decode=[0, *(900 + 11 * requests for requests in range(1, 200))],
        attention=tuple(
            AttentionTimes(window=window, chunk=50 + at, pair=3 + at, cached_token=7 + 2 * at)
            for at, window in enumerate(windows)
        ),
    )


def pages(capacity: int, *, fixed: int = 0, window: int | None = None) -> CachePages:
    growth = ((0, 10),) if window is None else ((0, 10), (window // BLOCK + 1, 4))
    return CachePages(capacity=capacity, block_tokens=BLOCK, fixed=fixed, growth=growth)


requests = st.lists(st.tuples(st.integers(0, 60_000), st.integers(1, 60), st.integers(1, 40)), min_size=1, max_size=25)


@settings(max_examples=200, deadline=None)
@given(
    requests=requests,
    capacity=st.integers(270, 900),
    window=st.one_of(st.none(), st.integers(1, 60)),
    fixed=st.integers(0, 12),
    limits=st.builds(
        SchedulerLimits, max_requests=st.integers(1, 8), max_tokens=st.integers(8, 64), admits_whole=st.booleans()
    ),
)
def test_every_request_has_the_same_times_and_preemptions_as_step_by_step(requests, capacity, window, fixed, limits):
    ordered = sorted(requests)
    arrivals, prompts, answers = (list(part) for part in zip(*ordered, strict=True))
    of, cache = costs(None, window), pages(capacity, fixed=fixed, window=window)
    expected = ReferenceEngine(of, cache, limits).serve(arrivals, prompts, answers)
    found = serve_requests(arrivals, prompts, answers, costs=of, pages=cache, limits=limits)
    assert found.preemptions == [request.preemptions for request in expected]
    assert found.first == [request.first for request in expected]
    assert found.end == [request.end for request in expected]


def test_a_request_alone_takes_its_prompt_and_then_a_step_for_each_further_token():
    of = costs(None)
    found = serve_requests(
        [5], [20], [3], costs=of, pages=pages(900), limits=SchedulerLimits(max_requests=4, max_tokens=12)
    )
    # Twelve tokens of the prompt, then eight.
    prefill = (1_000 + 37 * 12) + (1_000 + 37 * 8) + 2 * 50 + 3 * (20 * 21 // 2)
    assert found.first == [5 + prefill]
    assert found.end == [5 + prefill + 2 * 911 + 7 * (20 + 21)]
    assert found.num_steps == 4


def test_the_youngest_is_preempted_and_computed_again_with_its_answer_so_far():
    # Two requests of 40 tokens in the end, and room for 15 pages of 4.
    found = serve_requests(
        [0, 0],
        [20, 20],
        [20, 20],
        costs=costs(None),
        pages=pages(150),
        limits=SchedulerLimits(max_requests=4, max_tokens=64),
    )
    assert found.preemptions == [0, 1]
    assert found.end[0] < found.end[1]
    assert found.most_bytes <= 150


def test_a_request_that_leaves_no_room_for_the_next_is_waited_for():
    found = serve_requests(
        [0, 1],
        [56, 8],
        [4, 1],
        costs=costs(None),
        pages=pages(150),
        limits=SchedulerLimits(max_requests=4, max_tokens=64),
    )
    assert found.preemptions == [0, 0]
    assert found.first[1] > found.end[0]


def test_pages_are_those_of_the_cache():
    def tensor(window: int | None, token_bytes: int, fixed: int = 0) -> CacheTensor:
        return CacheTensor(
            path="layers.0.keys",
            fixed_bytes=fixed,
            token_bytes=token_bytes,
            max_tokens=window,
            encoder_token_bytes=0,
            heads=1,
            item_bytes=2,
        )

    size = CacheSize(
        tensors=(tensor(None, 10), tensor(37, 6), tensor(100, 2), tensor(None, 0, fixed=55)),
        element_bytes=0,
        degree=1,
        block_tokens=16,
    )
    found = CachePages.of(size, 1 << 20)
    assert [found.num_bytes(n) for n in range(400)] == [size.request_bytes(n) for n in range(400)]


@pytest.mark.parametrize("window", [None, 16, 3])
def test_a_long_run_adds_up_to_what_its_steps_do(window):
    of = costs(window)
    found = serve_requests(
        [0], [2], [5_000], costs=of, pages=pages(1 << 20), limits=SchedulerLimits(max_requests=1, max_tokens=8)
    )
    contexts = [min(n, window or math.inf) for n in range(2, 2 + 4_999)]
    assert found.end[0] - found.first[0] == 4_999 * 911 + 7 * sum(contexts)
    assert found.num_steps == 5_000
