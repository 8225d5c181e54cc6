"""Seconds that follow from sizes: tiles in waves, split depth, convolutions by layout and groups. Hand-made tapes, no trace."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.null.test_cost_roofline import a_tape

from tightfit.cost.products import ON_CORES, Products, product_seconds
from tightfit.cost.roofline import operator_seconds
from tightfit.devices.calibration import Calibration
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.tape import Geometry, Operators, Tape
from tightfit.tape.verify import verify_tape

Sizes = tuple[int, int, int, int, int, int, int, bool, int]

CARD = find("A100-PCIE-40GB")


def a_shaped_tape(name: str, dtype: str, sizes: Sizes, *, num_bytes: int = 0) -> Tape:
    batch, rows, columns, depth = sizes[:4]
    tape = a_tape([(name, dtype, 2.0 * batch * rows * columns * depth, num_bytes, 0, 0)])
    return dataclasses.replace(tape, geometry=Geometry.from_rows([(0, *sizes)]))


def seconds(name: str, dtype: str, sizes: Sizes, *, card: Device = CARD, num_bytes: int = 1, **options: bool) -> float:
    return float(operator_seconds(a_shaped_tape(name, dtype, sizes, num_bytes=num_bytes), card, **options)[0])


def product(batch: int, rows: int, columns: int, depth: int, dtype: str = "float32", **options: object) -> float:
    return seconds("aten.mm", dtype, (batch, rows, columns, depth, 0, 1, 0, False, 0), **options)


def convolution(
    channels: int,
    outputs: int,
    *,
    groups: int = 1,
    dtype: str = "float16",
    gradients: int = 0,
    last: bool = True,
    card: Device = CARD,
) -> float:
    name = "aten.convolution_backward" if gradients else "aten.convolution"
    sizes = (groups, 64 * 28 * 28, outputs // groups, channels // groups * 9, 9, 1, gradients, last, 64)
    return seconds(name, dtype, sizes, card=card)


def test_one_tile_too_many_costs_a_wave() -> None:
    tile, full = 128, CARD.num_multiprocessors
    products = Products(
        batch=np.array([full, full + 1.0]),
        rows=np.full(2, float(tile)),
        columns=np.full(2, float(tile)),
        depth=np.full(2, 100.0),
        num_bytes=np.zeros(2),
    )
    whole, more = product_seconds(
        products, ON_CORES, num_multiprocessors=full, flops_per_second=1e13, bytes_per_second=1e12
    )
    # Smaller tiles, which fill the second wave better, are slower ones.
    assert 1.2 * whole < more <= 2 * whole


def test_few_tiles_share_out_the_depth() -> None:
    flops = 2 * 128 * 128 * 65536
    assert product(1, 128, 128, 65536) < flops / (CARD.flops_per_second("float32") / CARD.num_multiprocessors) / 10


def test_a_power_limit_holds_for_the_type_that_it_was_seen_in() -> None:
    limited, other = (product(1, 8192, 8192, 8192, card=find(name)) for name in ("T4", "V100"))
    assert limited == pytest.approx(2 * 8192**3 / (8.1e12 * 0.5), rel=0.1)
    assert other == pytest.approx(2 * 8192**3 / (14e12 * 0.95), rel=0.1)


def test_tensor_cores_load_aligned_rows() -> None:
    aligned, odd = (product(512, 196, length, 64, "float16") for length in (200, 197))
    assert odd > 1.5 * aligned
    assert product(512, 196, 197, 64) == pytest.approx(product(512, 196, 200, 64), rel=0.1)


def test_the_gradient_of_a_weight_does_not_load_along_the_batch() -> None:
    def of_weight(batch: int, *, gradients: int = 2, outputs: int = 768) -> float:
        return seconds("aten.mm", "float16", (1, outputs, 768, batch, 0, 1, gradients, False, 0))

    assert of_weight(4 * 197) == pytest.approx(of_weight(4 * 198), rel=0.05)
    assert of_weight(4 * 197, gradients=0) > 1.4 * of_weight(4 * 198, gradients=0)
    assert of_weight(4 * 198, outputs=767) > 1.4 * of_weight(4 * 198)


def test_a_depthwise_convolution_is_not_priced_as_tiles() -> None:
    """On tiles of 32 columns it would take 32 times its multiplications."""
    dense, depthwise = convolution(256, 256), convolution(256, 256, groups=256)
    num_bytes = 2 * 2 * 64 * 28 * 28 * 256
    assert num_bytes / CARD.dram_bytes_per_second < depthwise < dense


@pytest.mark.parametrize(("groups", "is_slow"), [(32, False), (2, True)])
def test_the_backward_pass_of_groups_without_a_kernel_is_slow_in_channels_last(groups: int, is_slow: bool) -> None:
    first, last = (convolution(256, 256, groups=groups, gradients=3, last=layout) for layout in (False, True))
    assert (last > 1.5 * first) is is_slow


def test_channels_first_is_converted_for_tensor_cores_only() -> None:
    assert convolution(64, 64, last=False) > 1.2 * convolution(64, 64)
    card = find("P100")
    assert convolution(64, 64, last=False, card=card, dtype="float32") == convolution(
        64, 64, card=card, dtype="float32"
    )


def test_attention_computes_whole_tiles() -> None:
    long, short = ((64, length, length, 64, 0, 1, 0, False, 0) for length in (256, 129))
    name = "aten._scaled_dot_product_flash_attention"
    assert seconds(name, "float16", short) > 0.5 * seconds(name, "float16", long)


@given(st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 3000), st.integers(1, 64))
def test_no_product_beats_the_peak(rows: int, columns: int, depth: int, batch: int) -> None:
    flops = 2 * batch * rows * columns * depth
    assert product(batch, rows, columns, depth) >= flops / CARD.flops_per_second("float32")


def test_a_tape_without_sizes_is_priced_without_them(tmp_path: Path) -> None:
    tape = a_shaped_tape("aten.mm", "float32", (1, 17, 4096, 4096, 0, 1, 0, False, 0))
    tape.save(tmp_path / "tape.npz")
    assert len(Tape.load(tmp_path / "tape.npz").geometry) == 1
    old = dataclasses.replace(tape, geometry=Geometry.from_rows([]))
    old.save(tmp_path / "old.npz")
    assert not len(Tape.load(tmp_path / "old.npz").geometry)
    assert operator_seconds(old, CARD)[0] < operator_seconds(tape, CARD)[0]


def test_sizes_of_no_operator_are_a_fault() -> None:
    tape = a_shaped_tape("aten.mm", "float32", (1, 17, 4096, 4096, 0, 1, 0, False, 0))
    assert isinstance(tape.operators, Operators)
    assert verify_tape(tape) == []
    rows = [(1, 1, 17, 4096, 4096, 0, 1, 0, False, 0)]
    assert verify_tape(dataclasses.replace(tape, geometry=Geometry.from_rows(rows))) == [
        "sizes of an operator that does not exist"
    ]


def test_a_wide_convolution_takes_less_time_than_its_products_would() -> None:
    pixels, channels = 64 * 56 * 56, 256
    taps = (1, pixels, channels, channels * 9, 9, 1, 0, False, 64)
    direct = product(1, pixels, channels, channels * 9, card=find("V100"))
    # A quarter of the arithmetic is left, and the transforms take some of it back.
    assert 0.25 * direct < seconds("aten.convolution", "float32", taps, card=find("V100")) < 0.8 * direct


def test_images_that_do_not_fill_their_patches_cost_more_for_each_pixel() -> None:
    def of_size(side: int, images: int) -> float:
        sizes = (1, images * side * side, 64, 32 * 9, 9, 1, 0, False, images)
        return seconds("aten.convolution", "float32", sizes, card=find("V100"))

    assert of_size(9, 4096) / (4096 * 81) > 1.3 * of_size(64, 81) / (81 * 64 * 64)


def test_the_gradient_of_the_input_is_the_convolution_back() -> None:
    there, back = (
        seconds("aten.convolution", "float32", (1, 32 * 28 * 28, b, a * 9, 9, 1, gradients, False, 32), card=find("T4"))
        for a, b, gradients in ((64, 512, 0), (512, 64, 1))
    )
    assert there == pytest.approx(back, rel=0.01)


def test_a_calibrated_convolution_is_priced_as_it_was_measured() -> None:
    card = find("V100")
    sizes = (1, 64 * 56 * 56, 256, 256 * 9, 9, 1, 0, False, 64)
    tape = a_shaped_tape("aten.convolution", "float32", sizes, num_bytes=1)
    measured = Calibration(device=card.name, efficiency_by_dtype={"float32": {"convolution": 0.5}})
    priced = float(operator_seconds(tape, card, calibration=measured)[0])
    assert priced == pytest.approx(
        2 * sizes[1] * sizes[2] * sizes[3] / (0.5 * card.flops_per_second("float32")), rel=0.1
    )


def test_a_tape_from_before_images_were_noted_is_read(tmp_path: Path) -> None:
    sizes = (1, 64 * 56 * 56, 64, 64 * 9, 9, 1, 0, False, 64)
    a_shaped_tape("aten.convolution", "float32", sizes).save(tmp_path / "tape.npz")
    with np.load(tmp_path / "tape.npz") as arrays:
        kept = {key: arrays[key] for key in arrays if key != "geometry.images"}
    np.savez(tmp_path / "old.npz", **kept)
    old = Tape.load(tmp_path / "old.npz")
    assert old.geometry.images.tolist() == [0]
    assert float(operator_seconds(old, CARD)[0]) > 0


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("name", ["aten.mm", "aten.convolution", "aten._scaled_dot_product_flash_attention"])
def test_without_a_row_nothing_is_computed(name: str, place: int) -> None:
    is_convolution = name == "aten.convolution"
    sizes = [8, 128, 64, 32, 1 if is_convolution else 0, 1, 0, False, 8 if is_convolution else 0]
    sizes[place] = 0
    # What is left is the launch of a kernel.
    assert 0.0 <= seconds(name, "float16", tuple(sizes), num_bytes=0) < 1e-4  # type: ignore[arg-type]
