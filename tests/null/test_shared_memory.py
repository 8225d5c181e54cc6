"""GPUs with the host's memory: part of it is never free, and offload to the host is refused; and what fits instead."""

import pytest

from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.fit import planning, serving
from tightfit.fit.available import in_use, used_bytes_of
from tightfit.serving.model.smallest_change import smallest_change
from tightfit.serving.serve_settings import ServeSettings
from tightfit.units import MIB

NANO, OTHER = find("Orin Nano"), find("L4")


def test_what_the_machines_programs_hold_is_never_free() -> None:
    assert NANO.shares_host_memory and not OTHER.shares_host_memory
    # 5,818 of 7,620 MiB were free.
    assert used_bytes_of(NANO, None) == 1802 * MIB
    assert used_bytes_of(NANO, "0") == 0
    assert used_bytes_of(OTHER, None) == 0
    assert "the host's too" in in_use(NANO, 1802 * MIB)
    assert NANO.link.bytes_per_second == NANO.dram_bytes_per_second / 2


@pytest.mark.parametrize(
    "device", ["Orin Nano", "AGX Orin", "AGX Orin 32GB", "Orin NX", "Orin NX 8GB", "2060", "3050 6GB"]
)
def test_small_cards_and_modules_are_there(device: str) -> None:
    assert find(device).capacity_bytes > 5 << 30


def test_a_module_is_one_machine() -> None:
    with pytest.raises(UsageError, match="--gpus 2: NVIDIA Jetson AGX Orin 64GB is a machine of its own"):
        serving.serve("llama-3-8b", "AGX Orin", asked=ServeSettings(num_gpus=2))


def test_offload_to_the_host_is_refused() -> None:
    with pytest.raises(UsageError, match="--host: NVIDIA Jetson Orin Nano 8GB has the host's memory"):
        planning.planner("gpt2", "Orin Nano", host="4GiB")
    for asked, engine in (
        (ServeSettings(cache="offloaded"), "transformers"),
        (ServeSettings(kv_offload="1GiB"), "vllm"),
    ):
        with pytest.raises(UsageError, match="has the host's memory, where a cache takes the same bytes"):
            serving.serve("llama-3-8b", "Orin Nano", asked=asked, engine=engine)


def test_the_smallest_change_is_the_longest_request_or_the_format_with_the_most_bits() -> None:
    words = smallest_change(1000, lambda n: n <= 700, ["fp8", "awq"], lambda name: name == "awq", "it starts")
    assert (
        words
        == "it starts with requests of up to 700 tokens, or with awq weights (--quantization awq; changes answers)"
    )
    assert smallest_change(1000, lambda _: False, ["fp8"], lambda _: False, "it fits") == ""
    assert (
        smallest_change(1000, lambda n: n < 999, [], lambda _: True, "it fits")
        == "it fits with requests of up to 998 tokens"
    )
