"""Seconds of serving, in numbers."""

import dataclasses

import pytest
from tests.null.test_serving_sizes import linear

from tightfit.devices.catalogue import find
from tightfit.serving.costs.seconds_range import SecondsRange
from tightfit.serving.costs.serving_speed import ServingSpeed, reductions_seconds
from tightfit.serving.costs.traced_operators import TracedLayers
from tightfit.serving.model.model_facts import ModelFacts


def test_a_traced_layer_stands_for_those_of_its_kind_that_were_left_out() -> None:
    layers = TracedLayers(path="layers", kinds=(0, 0, 1, 0, 0, 1, 0, 1), num_kept=6)
    times = [layers.times(place) for place in range(6)]
    # The last of each kind that was traced has the others.
    assert times == [1, 1, 1, 1, 2, 2]
    assert sum(times) == 8


def test_paths_are_those_within_the_module_that_was_called() -> None:
    report = {"base": "model", "layers": [{"path": "model.layers", "kinds": [0, 0, 0], "num_kept": 2}]}
    (layers,) = TracedLayers.of_report(report)
    assert layers.path == "layers"


def test_prompts_take_their_turn_between_the_tokens() -> None:
    speed = ServingSpeed(
        prompt_tokens=100,
        answer_tokens=11,
        num_requests=4,
        first_token=SecondsRange(low=0.5, high=1.0),
        each_token=SecondsRange(low=0.1, high=0.2),
    )
    # Four prompts, and ten more tokens for all four.
    assert speed.tokens_per_second == (44 / 6.0, 44 / 3.0)
    assert speed.cost_of_a_million(36.0) == pytest.approx((0.01 / (44 / 3.0) * 1e6, 0.01 / (44 / 6.0) * 1e6))


def test_each_weight_that_is_cut_along_its_inputs_is_followed_by_a_reduction() -> None:
    facts = ModelFacts(
        model_type="llama",
        dtype="bfloat16",
        weights=(
            linear(cut="rowwise"),
            linear(cut="colwise"),
            dataclasses.replace(linear(cut="rowwise"), shape=(256,)),
        ),
        cache=(),
        max_positions=None,
        is_encoder_decoder=False,
        has_parallel_plan=True,
    )
    card = find("H100")
    assert reductions_seconds(facts, card, 1, 64) == 0
    once = reductions_seconds(facts, card, 2, 64)
    twice = reductions_seconds(dataclasses.replace(facts, weights=facts.weights * 2), card, 2, 64)
    assert once > 0
    assert twice == pytest.approx(2 * once)
