"""Seconds of operators: hand-computed cases, published measurements, and what must hold of any card and any size."""

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.cost.classes import operator_class
from tightfit.cost.copies import copy_seconds, link_bytes_per_second
from tightfit.cost.disks import disk_seconds
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import operator_seconds
from tightfit.cost.steps import step_operators
from tightfit.devices.calibration import OPERATOR_CLASSES, Calibration
from tightfit.devices.catalogue import all_devices, find
from tightfit.devices.device import DTYPES, Device
from tightfit.simulate.timeline import step_seconds
from tightfit.tape import EventKind, Events, Operators, SpanKind, Spans, Storages, Table, Tape

Row = tuple[str, str, float, int, int, int]  # name, dtype, flops, bytes read, bytes written, stream

LAUNCH, RAMP, ISSUE = 3e-6, 3.5e-6, 5e-6


def empty(table: type[Table]) -> Any:
    return table.from_columns({field.name: [] for field in dataclasses.fields(table)})


def a_tape(
    rows: list[Row], events: list[int] | None = None, spans: list[tuple[SpanKind, int, int]] | None = None
) -> Tape:
    """A tape of operators; `events` says how many operators each event comes after, `spans` are ranges of events."""
    strings = sorted({text for row in rows for text in row[:2]} | {""})
    index = {text: i for i, text in enumerate(strings)}
    nothing = [index[""]] * len(rows)
    operators = Operators.from_columns(
        {
            "name": [index[row[0]] for row in rows],
            "module": nothing,
            "line": nothing,
            "dtype": [index[row[1]] for row in rows],
            "phase": [0] * len(rows),
            "stream": [row[5] for row in rows],
            "flops": [row[2] for row in rows],
            "bytes_read": [row[3] for row in rows],
            "bytes_written": [row[4] for row in rows],
        }
    )
    events = events or []
    spans = spans or []
    return Tape(
        target="test",
        versions={},
        traced_for="",
        strings=tuple(strings),
        operators=operators,
        storages=empty(Storages),
        events=Events.from_columns(
            {
                "kind": [EventKind.SYNCHRONIZE] * len(events),
                "storage": [-1] * len(events),
                "operator": events,
                "value": [0] * len(events),
            }
        ),
        spans=Spans.from_columns(
            {
                "name": [index[""]] * len(spans),
                "kind": [kind for kind, _, _ in spans],
                "begin": [begin for _, begin, _ in spans],
                "end": [end for _, _, end in spans],
            }
        ),
        assumptions=(),
        host_peak_bytes=0,
    )


def seconds_of(name: str, dtype: str, *, flops: float, num_bytes: int, device: Device, **options: Any) -> float:
    [seconds] = operator_seconds(a_tape([(name, dtype, flops, num_bytes, 0, 0)]), device, **options)
    return float(seconds)


def product(size: int, dtype: str, device: Device, **options: Any) -> float:
    item = {"float32": 4, "bfloat16": 2, "float16": 2, "float64": 8}[dtype]
    return seconds_of("aten.mm", dtype, flops=2.0 * size**3, num_bytes=3 * size**2 * item, device=device, **options)


def test_a_large_product_is_bound_by_arithmetic() -> None:
    assert product(8192, "bfloat16", find("H200")) == pytest.approx(2 * 8192**3 / (989.4e12 * 0.65) + LAUNCH + RAMP)
    assert product(8192, "float32", find("A100")) == pytest.approx(2 * 8192**3 / (19.5e12 * 0.94) + LAUNCH + RAMP)


def test_a_thin_product_is_bound_by_bandwidth() -> None:
    weight = 2 * 8192 * 8192
    seconds = seconds_of("aten.mm", "bfloat16", flops=2.0 * 8192 * 8192, num_bytes=weight, device=find("H200"))
    assert seconds == pytest.approx(weight / (4.8e12 * 0.86) + LAUNCH + RAMP)


def test_elementwise_work_is_bound_by_bandwidth() -> None:
    seconds = seconds_of("aten.add.Tensor", "float16", flops=1e6, num_bytes=6_000_000, device=find("4090"))
    assert seconds == pytest.approx(6e6 / (1008e9 * 0.95) + LAUNCH)


def test_tf32_follows_the_defaults_of_torch() -> None:
    card = find("A100")
    assert product(4096, "float32", card) > 5 * product(4096, "float32", card, tf32_matmul=True)
    flops = {"flops": 1e12, "num_bytes": 0, "device": card}
    on = seconds_of("aten.convolution", "float32", **flops)
    off = seconds_of("aten.convolution", "float32", **flops, tf32_convolution=False)
    assert on == pytest.approx(1e12 / (156e12 * 0.5) + LAUNCH + RAMP)
    assert off == pytest.approx(1e12 / (19.5e12 * 0.5) + LAUNCH + RAMP)


def test_a_row_that_does_nothing_costs_nothing() -> None:
    assert seconds_of("aten.view", "float32", flops=0, num_bytes=0, device=find("T4")) == 0.0
    assert seconds_of("aten.empty_like", "float32", flops=0, num_bytes=10**9, device=find("T4")) == 0.0
    assert operator_seconds(a_tape([]), find("T4")).shape == (0,)


def test_a_lookup_reads_only_the_rows_it_wants() -> None:
    table, rows = 10**9, 10**6
    [seconds] = operator_seconds(a_tape([("aten.embedding", "float32", 0.0, table, rows, 0)]), find("A100"))
    assert seconds == pytest.approx(2 * rows / (2.039e12 * 0.3) + LAUNCH)


def test_a_scatter_writes_only_what_it_is_given() -> None:
    table, rows, indices = 10**9, 10**6, 10**5
    read = table + rows + indices
    [in_place] = operator_seconds(a_tape([("aten.scatter_.src", "float32", 0.0, read, table, 0)]), find("A100"))
    assert in_place == pytest.approx(2 * (rows + indices) / (2.039e12 * 0.3) + LAUNCH)
    # Out of place, the table is copied.
    [copied] = operator_seconds(a_tape([("aten.scatter.src", "float32", 0.0, read, table, 0)]), find("A100"))
    assert copied == pytest.approx((read + table) / (2.039e12 * 0.3) + LAUNCH)


def test_a_loss_over_classes_reads_one_number_per_target_and_its_gradient_is_only_written() -> None:
    logits, targets = 10**9, 10**4
    rows: list[Row] = [
        ("aten.nll_loss_forward", "float32", 0.0, logits + targets, 8, 0),
        ("aten.nll_loss_backward", "float32", 0.0, logits + targets, logits, 0),
    ]
    forward, backward = operator_seconds(a_tape(rows), find("A100"))
    assert forward < 2 * LAUNCH
    assert backward == pytest.approx(logits / (2.039e12 * efficiency_of(find("A100")).of_bandwidth["other"]) + LAUNCH)


# Medians that Liger-Kernel publishes for torch's own kernels (benchmark data of its repository).
# Bytes are those that the operator must read and write. The efficiencies were set from these, so this says that one fraction fits all sizes.
PUBLISHED = [
    ("H100", "aten.relu", "bfloat16", 2 * 4096 * 16384 * 2, 0.0, 0.1855e-3 / 2),
    ("H100", "aten.relu", "bfloat16", 2 * 4096 * 4096 * 2, 0.0, 0.0532e-3 / 2),
    ("H100", "aten.relu", "bfloat16", 2 * 4096 * 1024 * 2, 0.0, 0.0169e-3 / 2),
    ("H100", "aten.relu", "bfloat16", 2 * 4096 * 128 * 2, 0.0, 0.0087e-3 / 2),
    ("A100", "aten.native_layer_norm", "float32", 2 * 4096 * 16384 * 4, 0.0, 0.5067e-3),
    ("A100", "aten.native_layer_norm", "float32", 2 * 4096 * 2048 * 4, 0.0, 0.0573e-3),
    ("H100", "aten.native_layer_norm", "float32", 2 * 4096 * 16384 * 4, 0.0, 0.3068e-3),
    ("H100", "aten.native_layer_norm_backward", "float32", 3 * 4096 * 16384 * 4, 0.0, 0.6424e-3),
    ("A100", "aten.mm", "bfloat16", 0, 2.0 * 65536 * 4096 * 11008 * 3, 72.67e-3),
]


@pytest.mark.parametrize(("card", "name", "dtype", "num_bytes", "flops", "measured"), PUBLISHED)
def test_published_measurements_are_met(
    card: str, name: str, dtype: str, num_bytes: int, flops: float, measured: float
) -> None:
    assert seconds_of(name, dtype, flops=flops, num_bytes=num_bytes, device=find(card)) == pytest.approx(
        measured, rel=0.2
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("aten.addmm", "matmul"),
        ("aten._scaled_mm", "matmul"),
        ("aten.convolution_backward", "convolution"),
        ("aten.cudnn_convolution", "convolution"),
        ("aten._scaled_dot_product_flash_attention_backward", "attention"),
        ("aten.native_layer_norm", "normalisation"),
        ("aten.native_batch_norm_backward", "elementwise"),
        ("aten.add_.Tensor", "elementwise"),
        ("aten.threshold_backward", "elementwise"),
        ("aten._softmax_backward_data", "reduction"),
        ("aten.sum.dim_IntList", "reduction"),
        ("aten.embedding_dense_backward", "embedding"),
        ("aten._index_put_impl_", "embedding"),
        ("aten._to_copy", "copy"),
        ("aten.zero_", "copy"),
        ("aten._foreach_addcdiv_.ScalarList", "optimizer"),
        ("aten._fused_adamw_", "optimizer"),
        ("aten._foreach_copy_", "copy"),
        ("aten._cudnn_rnn", "matmul"),
        ("aten.slice_backward", "copy"),
        ("mylibrary.mystery", "other"),
    ],
)
def test_classes_by_name(name: str, kind: str) -> None:
    assert operator_class(name) == kind


def test_batch_normalisation_in_training_waits_for_its_sums_where_memory_is_fast_for_the_multiprocessors() -> None:
    """Measured on an H200: 53 layers of a residual net in 7.3 ms forward and 12.4 ms backward, of which these are the bytes."""
    for card, limit in (("H200", 10.4e9 * 132), ("RTX 4090", 0.95 * 1008e9)):
        device = find(card)
        forward, backward = ("aten.native_batch_norm", "aten.native_batch_norm_backward")
        tape = a_tape([(forward, "float16", 0.0, 3 << 30, 3 << 30, 0), (backward, "float16", 0.0, 6 << 30, 3 << 30, 0)])
        found = operator_seconds(tape, device)
        assert found == pytest.approx([1.6 * (6 << 30) / limit, 2.0 * (9 << 30) / limit], rel=0.02)
        alone = a_tape([(forward, "float16", 0.0, 3 << 30, 3 << 30, 0)])
        assert operator_seconds(alone, device)[0] <= found[0]


def test_a_calibration_replaces_what_it_measured() -> None:
    card = find("H200")
    calibration = Calibration(device=card.name, efficiency={"matmul": 0.4}, seconds={"launch": 0.0, "ramp": 0.0})
    assert product(8192, "bfloat16", card, calibration=calibration) == pytest.approx(2 * 8192**3 / (989.4e12 * 0.4))
    assert efficiency_of(card, calibration).of_bandwidth == efficiency_of(card).of_bandwidth


def test_every_class_has_an_efficiency_on_every_card() -> None:
    for card in all_devices():
        efficiency = efficiency_of(card)
        for kind in OPERATOR_CLASSES:
            # GeForce cards run up to an eighth above the clock that their peak is stated at.
            limit = 1.125 if card.kind == "desktop" else 1.0
            assert all(0 < efficiency.of_flops[kind, dtype] <= limit for dtype in DTYPES)
            assert 0 < efficiency.of_bandwidth[kind] <= 1


names = st.sampled_from(["aten.mm", "aten.convolution", "aten.add.Tensor", "aten.native_layer_norm", "aten.mystery"])
dtypes = st.sampled_from(["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "int8", "int64", "complex64"])
counts = st.integers(0, 10**14)
cards = st.sampled_from(all_devices())


@given(names, dtypes, counts, counts, counts, counts, cards)
def test_more_work_never_takes_less_time(
    name: str, dtype: str, flops: int, more_flops: int, num_bytes: int, more_bytes: int, device: Device
) -> None:
    less = seconds_of(name, dtype, flops=flops, num_bytes=num_bytes, device=device)
    more = seconds_of(name, dtype, flops=flops + more_flops, num_bytes=num_bytes + more_bytes, device=device)
    assert 0 <= less <= more
    assert np.isfinite(more)


@given(names, dtypes, counts, counts, cards, st.floats(1.0, 10.0))
def test_a_card_that_is_better_in_everything_is_never_slower(
    name: str, dtype: str, flops: int, num_bytes: int, device: Device, factor: float
) -> None:
    better = dataclasses.replace(
        device,
        dram_bytes_per_second=device.dram_bytes_per_second * factor,
        flops={key: value * factor for key, value in device.flops.items()},
    )
    work = {"flops": flops, "num_bytes": num_bytes}
    assert seconds_of(name, dtype, **work, device=better) <= seconds_of(name, dtype, **work, device=device)


@given(st.lists(st.tuples(names, dtypes, st.floats(0, 1e13), counts, counts, st.integers(0, 2)), max_size=12), cards)
def test_operators_are_priced_one_by_one(rows: list[Row], device: Device) -> None:
    together = operator_seconds(a_tape(rows), device)
    alone = [float(operator_seconds(a_tape([row]), device)[0]) for row in rows]
    assert together.dtype == np.float64
    assert together.tolist() == pytest.approx(alone)


def test_a_step_is_the_work_of_its_own_operators() -> None:
    rows: list[Row] = [("aten.mm", "bfloat16", flops, 0, 0, 0) for flops in (1e15, 2e15, 4e15, 8e15)]
    spans = [(SpanKind.SETUP, 0, 1), (SpanKind.STEP, 1, 3), (SpanKind.ASIDE, 3, 4), (SpanKind.STEP, 4, 5)]
    tape = a_tape(rows, events=[0, 1, 1, 2, 3], spans=spans)
    card = find("H200")
    assert step_operators(tape) == [(1, 2), (3, 4)]
    seconds = operator_seconds(tape, card)
    assert step_seconds(tape, card) == pytest.approx([seconds[1], seconds[3]])


def test_streams_overlap_and_the_busiest_counts() -> None:
    rows: list[Row] = [("aten.mm", "bfloat16", 1e15, 0, 0, stream) for stream in (0, 0, 1)]
    tape = a_tape(rows, events=[0], spans=[(SpanKind.STEP, 0, 1)])
    seconds = operator_seconds(tape, find("H200"))
    assert step_seconds(tape, find("H200")) == pytest.approx([seconds[0] + seconds[1]])


def test_many_small_kernels_wait_for_the_host() -> None:
    rows: list[Row] = [("aten.add.Tensor", "float32", 0, 4, 4, 0)] * 100 + [("aten.view", "float32", 0, 0, 0, 0)] * 100
    tape = a_tape(rows, events=[0], spans=[(SpanKind.STEP, 0, 1)])
    assert step_seconds(tape, find("H200")) == pytest.approx([100 * ISSUE])
    calibration = Calibration(device="NVIDIA H200", seconds={"issue": 1e-6})
    assert step_seconds(tape, find("H200"), calibration) == pytest.approx([100 * LAUNCH], rel=1e-3)


def test_a_tape_without_steps_has_no_step_seconds() -> None:
    assert step_seconds(a_tape([]), find("T4")) == []


def test_copies_reach_what_links_were_seen_to_reach() -> None:
    assert link_bytes_per_second(find("A100").link) == pytest.approx(24.8e9, rel=0.02)
    assert link_bytes_per_second(find("H100").link) == pytest.approx(55.6e9, rel=0.02)
    assert link_bytes_per_second(find("GH200").link) == pytest.approx(350e9, rel=0.02)


@given(st.integers(0, 10**12), st.integers(0, 10**12), cards)
def test_copies_grow_with_their_size(num_bytes: int, more: int, device: Device) -> None:
    assert copy_seconds(num_bytes, device) <= copy_seconds(num_bytes + more, device)
    assert copy_seconds(num_bytes, device) <= copy_seconds(num_bytes, device, is_pinned=False)


def test_the_disk_takes_what_was_measured_of_it() -> None:
    measured = Calibration(device="NVIDIA H200", disk={"read_bytes_per_second": 10e9, "write_bytes_per_second": 5e9})
    assert disk_seconds(10**10, to_disk=False, calibration=measured) == pytest.approx(1.0, rel=1e-3)
    assert disk_seconds(10**10, to_disk=True, calibration=measured) == pytest.approx(2.0, rel=1e-3)
    # One drive of a server, where nothing was measured; many small writes take longer than a large one.
    assert disk_seconds(10**10, to_disk=True) == pytest.approx(8.0, rel=1e-3)
    assert 1000 * disk_seconds(10**5, to_disk=True) > 2 * disk_seconds(10**8, to_disk=True)
