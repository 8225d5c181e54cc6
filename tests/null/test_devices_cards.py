"""Every card of the catalogue is plausible by itself and beside the others."""

import pytest

from tightfit.devices.catalogue import all_devices, find
from tightfit.devices.context import modelled_context
from tightfit.devices.device import DTYPES, Device
from tightfit.units import MIB

CARDS = all_devices()


@pytest.fixture(params=CARDS, ids=[card.name for card in CARDS])
def card(request: pytest.FixtureRequest) -> Device:
    return request.param


def test_usable_memory_is_a_little_less_than_nominal(card: Device) -> None:
    assert 0.9 * card.nominal_bytes < card.capacity_bytes <= card.nominal_bytes


def test_context_lies_within_its_range_and_leaves_the_card_usable(card: Device) -> None:
    assert card.context_low_bytes <= card.context_bytes <= card.context_high_bytes
    assert 64 * MIB < card.context_bytes < 0.05 * card.capacity_bytes


def test_readings_of_contexts_fall_into_the_range_of_the_model(card: Device) -> None:
    model = modelled_context(
        vendor=card.vendor,
        compute_capability=card.compute_capability,
        num_multiprocessors=card.num_multiprocessors,
        max_threads_per_multiprocessor=card.max_threads_per_multiprocessor,
    )
    assert model.low_bytes <= card.context_bytes <= model.high_bytes
    if card.context.is_measured:
        assert abs(model.num_bytes - card.context_bytes) < 0.22 * card.context_bytes


def test_float32_is_what_the_multiprocessors_and_the_clock_give(card: Device) -> None:
    if card.vendor == "nvidia":
        lanes = 64 if card.compute_capability in ((6, 0), (7, 0), (7, 5), (8, 0)) else 128
        peak = 2 * lanes * card.num_multiprocessors * card.max_clock_hertz
        assert card.flops["float32"] == pytest.approx(peak, rel=0.08)


def test_narrower_types_are_not_slower(card: Device) -> None:
    order = [dtype for dtype in ("float32", "tf32", "float16", "float8") if dtype in card.flops]
    peaks = [card.flops[dtype] for dtype in order]
    assert peaks == sorted(peaks)
    assert card.flops.get("bfloat16", card.flops.get("float16")) == card.flops.get("float16")


def test_types_follow_the_architecture(card: Device) -> None:
    assert set(card.flops) <= set(DTYPES)
    if card.vendor == "nvidia":
        assert ("bfloat16" in card.flops) == ("tf32" in card.flops) == (card.compute_capability >= (8, 0))
        assert ("float8" in card.flops) == (card.compute_capability >= (8, 9))


def test_balance_of_arithmetic_and_bandwidth_is_that_of_a_card(card: Device) -> None:
    assert 9 < card.flops["float32"] / card.dram_bytes_per_second < 140
    assert card.link.bytes_per_second < card.dram_bytes_per_second
    # Modules have the memory of a laptop.
    assert (100e9 if card.shares_host_memory else 150e9) < card.dram_bytes_per_second < 10e12


def test_caches_shrink_towards_the_multiprocessor(card: Device) -> None:
    assert card.l2_bytes < card.capacity_bytes
    assert card.shared_memory_bytes < card.l2_bytes
    assert card.l2_bytes_per_second is None or card.l2_bytes_per_second > card.dram_bytes_per_second


def test_sources_are_named(card: Device) -> None:
    assert len(card.source) >= 2
    assert all(source.strip() for source in card.source)


@pytest.mark.parametrize(
    ("slower", "faster"),
    [
        ("T4", "V100"),
        ("3060", "3090"),
        ("3090", "4090"),
        ("4090 laptop", "4090"),
        ("4090", "5090"),
        ("V100", "A100"),
        ("A100 40GB", "A100 80GB"),
        ("A100", "H100"),
        ("H100 PCIe", "H100"),
        ("H200", "B200"),
        ("MI210", "MI300X"),
    ],
)
def test_newer_and_larger_cards_are_faster(slower: str, faster: str) -> None:
    left, right = find(slower), find(faster)
    assert left.dram_bytes_per_second < right.dram_bytes_per_second
    assert left.flops["float16"] <= right.flops["float16"]


def test_a_type_that_a_card_lacks_is_computed_in_a_wider_one() -> None:
    assert find("T4").flops_per_second("bfloat16") == find("T4").flops["float32"]
    assert find("A100").flops_per_second("float8") == find("A100").flops["bfloat16"]
    assert find("1080 Ti").flops_per_second("tf32") == find("1080 Ti").flops["float32"]


def test_capacities_that_were_read_off_cards() -> None:
    assert find("3060").capacity_bytes == 12_622_168_064
    assert find("4060").capacity_bytes == 8_318_222_336
    assert find("H200").capacity_bytes // MIB == 143_156


def test_links_know_their_speed() -> None:
    assert str(find("H100").link) == "PCIe 5 x16"
    assert find("H100").link.bytes_per_second == pytest.approx(63e9, rel=0.01)
    assert str(find("GH200").link) == "NVLink-C2C"
    assert find("GH200").link.bytes_per_second == 450e9
