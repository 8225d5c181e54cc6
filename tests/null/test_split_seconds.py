"""Seconds of llama.cpp with layers at the host: a layer there is never faster, and prompts copy its weights for each micro-batch."""

import itertools
from typing import Any

import pytest

from tightfit.cost.copies import copy_seconds
from tightfit.devices.catalogue import find
from tightfit.serving.batches.split_layers import SplitModel
from tightfit.serving.batches.split_seconds import SplitClock
from tightfit.serving.costs.seconds_range import SecondsRange
from tightfit.serving.costs.serving_speed import ServingSpeed

CARD = find("3060")
LAYER, CACHE, OUTPUT, NUMBER = 200_000_000, 10_000_000, 500_000_000, 8


class Costs:
    """A millisecond and a bit for each token."""

    def of_prompt(self, num_tokens: int, context: int = 0) -> SecondsRange:
        return SecondsRange(low=1e-3 + 1e-4 * num_tokens, high=2e-3 + 1e-4 * num_tokens)

    def of_decoding(self, contexts: list[int]) -> SecondsRange:
        return SecondsRange(low=5e-3 + 1e-4 * len(contexts), high=6e-3 + 1e-4 * len(contexts))


def speed(on_card: int, prompt: int, *, slots: int = 1, output_first: bool = True) -> ServingSpeed:
    costs: Any = Costs()
    split = SplitModel(
        layers=(LAYER,) * NUMBER, caches=(CACHE,) * NUMBER, output=OUTPUT, embedding=OUTPUT, compute=0, output_first=output_first
    )  # fmt: skip
    clock = SplitClock(
        costs=costs, device=CARD, split=split, on_card=on_card, parameters=NUMBER * LAYER, slots=slots, micro_batch=512
    )
    return clock.speed(prompt, 100)


@pytest.mark.parametrize("output_first", [True, False])
@pytest.mark.parametrize(("prompt", "slots"), [(20, 1), (31, 8), (512, 1), (4000, 1), (530, 40)])
def test_fewer_layers_on_the_card_are_never_faster(prompt: int, slots: int, output_first: bool) -> None:
    found = [speed(n, prompt, slots=slots, output_first=output_first) for n in range(NUMBER + 2)]
    for fewer, more in itertools.pairwise(found):
        for one, other in ((fewer.first_token, more.first_token), (fewer.each_token, more.each_token)):
            assert one.low > other.low
            assert one.high > other.high


def test_each_micro_batch_of_a_prompt_copies_the_weights_again() -> None:
    def beyond(prompt: int) -> float:
        return speed(5, prompt).first_token.low - speed(NUMBER + 1, prompt).first_token.low

    each = copy_seconds(4 * LAYER, CARD, is_pinned=False)
    assert each < beyond(512) < 1.1 * each
    assert 8 * each < beyond(4096) < 8.3 * each
    # Below 32 tokens nothing is copied, and the host computes its layers: 2 FLOPs for each weight and token.
    assert beyond(31) == pytest.approx(2 * 31 * 4 * LAYER / 0.6e12, rel=0.1)
