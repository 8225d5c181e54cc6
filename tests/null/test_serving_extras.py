"""What an engine keeps beside the model: adapters, a draft, a cache at the host in powers of two, and what stays while it sleeps."""

import pytest

from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.serving.host_memory import asleep, host_cache, power_of_two
from tightfit.serving.model.adapters import AdapterSlots, with_draft
from tightfit.serving.model.model_facts import CacheTensor, ModelFacts, WeightRow
from tightfit.serving.model.weight_formats import weights_bytes
from tightfit.units import GIB


def row(name: str, shape: tuple[int, ...], cut: str = "", role: str = "linear", parts: int = 0) -> WeightRow:
    return WeightRow(name=name, shape=shape, item_bytes=2, role=role, cut=cut, kind="parameter", parts=parts)


def facts(*weights: WeightRow) -> ModelFacts:
    tensor = CacheTensor(
        path="layers.0.keys", fixed_bytes=0, token_bytes=64, max_tokens=None, encoder_token_bytes=0, heads=2, item_bytes=2
    )  # fmt: skip
    return ModelFacts(
        model_type="x", dtype="bfloat16", weights=weights, cache=(tensor,), max_positions=None, is_encoder_decoder=False, has_parallel_plan=True
    )  # fmt: skip


def test_adapters_have_two_matrices_for_each_product_one_of_which_is_cut() -> None:
    of = facts(
        row("q", (256, 128), "colwise"),
        row("o", (128, 256), "rowwise"),
        row("k", (64, 128), "colwise", parts=2),
        row("experts", (4, 32, 128)),
        row("embed", (1000, 128), role="embedding"),
    )
    slots = AdapterSlots.parsed("16:3")
    whole = (256 + 128) + (128 + 256) + (64 + 128) + 4 * (32 + 128)
    assert slots.num_bytes(of, 1) == 3 * 16 * 2 * whole
    # Keys have two heads, which four ranks share.
    cut = (64 + 128) + (128 + 64) + (32 + 128) + 4 * (32 + 128)
    assert slots.num_bytes(of, 4) == 3 * 16 * 2 * cut
    assert AdapterSlots.parsed("8") == AdapterSlots(rank=8, number=1)


@pytest.mark.parametrize("text", ["", "x", "16:0", "17", "16:x", "-1"])
def test_no_adapters(text: str) -> None:
    with pytest.raises(UsageError, match="--lora"):
        AdapterSlots.parsed(text)


def test_a_draft_adds_its_weights_and_its_cache() -> None:
    both = with_draft(facts(row("model.a", (10, 10))), facts(row("model.a", (4, 4))))
    assert weights_bytes(both, None) == 2 * (100 + 16)
    # Adapters are for the model alone.
    slots = AdapterSlots.parsed("16:4")
    assert slots.num_bytes(both, 1) == slots.num_bytes(facts(row("model.a", (10, 10))), 1)
    assert [tensor.path for tensor in both.cache] == ["layers.0.keys", "draft.layers.0.keys"]


def test_pinned_blocks_are_powers_of_two() -> None:
    assert [power_of_two(n) for n in (0, 1, 2, 3, 4, 5, 1 << 30)] == [0, 1, 2, 4, 4, 8, 1 << 30]
    found = host_cache(20 * GIB, num_layers=32, degree=2, token_bytes=65536)
    # 320 MiB for each layer and rank become 512.
    assert found.pinned_bytes == 32 * GIB
    assert found.num_tokens == 163_840


def test_a_cache_at_the_host_has_whole_pages() -> None:
    # A page of 16 tokens on two ranks is 2 MiB, of which 1 GiB and 3 MiB hold 513.
    found = host_cache(GIB + 3 * 1024**2, num_layers=32, degree=2, token_bytes=65536, block_tokens=16)
    assert found.num_tokens == 513 * 16
    # Each of 64 buffers has 513 pages of 32 KiB, one more than 16 MiB.
    assert found.pinned_bytes == 64 * 32 * 1024**2


def test_what_sleeps_keeps_its_context_and_its_graphs() -> None:
    card = find("L4")
    found = asleep(card, weights_bytes=15 * GIB, graph_bytes=GIB, outside_bytes=0)
    assert found.gpu_bytes == GIB + card.context_bytes
    assert found.host_bytes == 15 * GIB
    assert found.wake_seconds == pytest.approx(15 * GIB / card.link.bytes_per_second, rel=0.5)
