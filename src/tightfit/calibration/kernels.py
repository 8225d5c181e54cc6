"""Which fraction of the GPU's peak each class of operators reaches, over the shapes of `microbenchmarks`.

    fraction = work / (peak x (seconds - fixed costs))

where work and peak are FLOPs or bytes, whichever the roofline says is the limit of that shape (Williams, Waterman and Patterson 2009). The
fraction of a class is the median over its shapes, for matmul, convolution and attention also by dtype.
"""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from tightfit.calibration.instruments import Findings, Instruments, seconds_on_card, summary
from tightfit.calibration.microbenchmarks import Work, works
from tightfit.cost.classes import TENSOR_CORE_CLASSES
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import kernel_seconds
from tightfit.devices.calibration import Calibration, Measured, OperatorClass
from tightfit.devices.device import DType

# No shape should take longer than this for one call, so that all of them together take seconds on a small GPU too.
_MAX_SECONDS = 0.05


def efficiencies(instruments: Instruments, fixed_seconds: Mapping[str, float]) -> Findings:
    """The fraction of the peak by class and, where it differs, by type; `fixed_seconds` are the costs that `launches` found."""
    card = instruments.card
    rows: list[Measured] = []
    fractions: dict[OperatorClass, list[float]] = defaultdict(list)
    by_type: dict[DType, dict[OperatorClass, list[float]]] = defaultdict(lambda: defaultdict(list))
    for work in _affordable(instruments):

        def expected(calibration: Calibration | None, work: Work = work) -> float:
            efficiency = efficiency_of(card, calibration)
            return kernel_seconds(card, efficiency, work.kind, work.dtype, flops=work.flops, num_bytes=work.num_bytes)

        with _TensorFloat32(work.dtype == "tf32"):
            run = work.make()
            row = summary(work.name, "s", seconds_on_card(instruments, run, expected), expected(None))
        rows.append(row)
        uses_flops = work.kind in TENSOR_CORE_CLASSES
        peak = card.flops_per_second(work.dtype) if uses_flops else card.dram_bytes_per_second
        fixed = fixed_seconds["launch"] + (fixed_seconds["ramp"] if uses_flops else 0.0)
        amount = work.flops if uses_flops else work.num_bytes
        # A clock above the catalogue's, or a cache, can beat the peak that is written down; a fraction of it stays one.
        fraction = min(1.0, amount / (peak * max(row.median - fixed, 1e-9)))
        # The row stays in the report, but a shape that waits for memory says nothing about the tensor cores.
        if uses_flops and _is_bound_by_bandwidth(instruments, work):
            continue
        (by_type[work.dtype][work.kind] if uses_flops else fractions[work.kind]).append(fraction)
    # The fraction without a dtype is what efficiency_of takes for dtypes that are not measured, such as float8 and int8.
    for kind in TENSOR_CORE_CLASSES:
        halves = [f for dtype in ("bfloat16", "float16") for f in by_type[dtype][kind]]
        fractions[kind] += halves
    table: dict[str, Any] = {kind: statistics.median(own) for kind, own in fractions.items() if own}
    for dtype, kinds in by_type.items():
        own = {kind: statistics.median(found) for kind, found in kinds.items() if found}
        if own:
            table[dtype] = own
    return Findings(rows=rows, tables={"efficiency": table})


def _affordable(instruments: Instruments) -> Iterator[Work]:
    """All shapes that fit a quarter of the free memory and take no more than `_MAX_SECONDS`, in dtypes that the GPU has units for."""
    card = instruments.card
    room = torch.cuda.mem_get_info()[0] // 4
    for work in works():
        # Types that a GPU computes in float32 anyway would only measure float32 once more.
        has_units = work.dtype == "float32" or work.dtype in card.flops
        efficiency = efficiency_of(card)
        seconds = kernel_seconds(card, efficiency, work.kind, work.dtype, flops=work.flops, num_bytes=work.num_bytes)
        if has_units and seconds <= _MAX_SECONDS and 2 * work.num_bytes <= room:
            yield work


def _is_bound_by_bandwidth(instruments: Instruments, work: Work) -> bool:
    card, efficiency = instruments.card, efficiency_of(instruments.card)
    arithmetic = work.flops / (card.flops_per_second(work.dtype) * efficiency.of_flops[work.kind, work.dtype])
    return work.num_bytes / (card.dram_bytes_per_second * efficiency.of_bandwidth[work.kind]) > arithmetic / 2


class _TensorFloat32:
    """`with _TensorFloat32(True)`: float32 matmuls and convolutions run on tensor cores inside; with False they do not."""

    def __init__(self, is_on: bool) -> None:
        self._is_on = is_on

    def __enter__(self) -> None:
        self._before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = self._is_on

    def __exit__(self, *_exception: object) -> None:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = map(bool, self._before)
