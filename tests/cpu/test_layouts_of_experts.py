"""Experts that are multiplied group by group are found on a tape, and layouts divide them over ranks."""

import pytest
from benchmarks.shard.decoders import traced

from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of
from tightfit.layouts.answers.layout_plan import PricedLayout
from tightfit.layouts.layout import Layout
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model.heads_of_tape import Heads
from tightfit.layouts.model.model_parts import ModelParts, model_parts

WIDTH, HIDDEN, EXPERTS, CHOSEN = 512, 256, 24, 4
DEVICE = find("h100")
NODE = node_of(DEVICE)


@pytest.fixture(scope="module")
def model() -> ModelParts:
    tape = traced(
        "experts", width=WIDTH, heads=8, kv_heads=4, hidden=HIDDEN, number=EXPERTS, chosen=CHOSEN, sequence=1024,
        batch=4, vocabulary=2048,
    )  # fmt: skip
    return model_parts(Profile(tape.of_steps(), DEVICE))


@pytest.fixture(scope="module")
def search(model: ModelParts) -> LayoutSearch:
    return LayoutSearch(model, DEVICE, NODE, budget_bytes=DEVICE.capacity_bytes)


def test_experts_are_the_weights_that_are_multiplied_group_by_group(model: ModelParts) -> None:
    (block,) = model.blocks
    assert (block.num_experts, block.experts_per_token) == (EXPERTS, CHOSEN)
    assert block.expert_bytes == 2 * 3 * EXPERTS * WIDTH * HIDDEN
    assert block.parameter_bytes > block.expert_bytes
    assert not model.after.num_experts


def test_tensor_parallelism_divides_the_heads_and_the_key_value_heads(search: LayoutSearch, model: ModelParts) -> None:
    (block,) = model.blocks
    # Keys and values are repeated for attention: the products before it have them once.
    assert block.heads == Heads(number=8, key_value=4)
    assert {layout.tp for _, layout in search.candidates.of(8, 8)} == {1, 2, 4}


def test_ranks_that_divide_the_experts_hold_less_and_send_tokens(search: LayoutSearch, model: ModelParts) -> None:
    def priced(ep: int, tp: int = 1) -> PricedLayout:
        return search.priced_layout(Layout(dp=8 // tp, tp=tp, ep=ep, zero_stage=0, micro_batch=1))

    whole, divided = priced(1), priced(8)
    saved = whole.worst.by_class["parameters"] - divided.worst.by_class["parameters"]
    assert saved == pytest.approx(2 * model.blocks[0].expert_bytes * 7 / 8, rel=1e-3)
    assert divided.seconds.exposed > whole.seconds.exposed


def test_degrees_divide_the_experts_and_the_ranks(search: LayoutSearch) -> None:
    degrees = {(layout.ep, layout.tp) for _, layout in search.candidates.of(16, 16)}
    assert {ep for ep, tp in degrees if tp == 1} == {1, 2, 4, 8}
    assert {ep for ep, tp in degrees if tp > 1} == {1}
