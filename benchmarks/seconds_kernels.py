"""Single float32 kernels of NeuSight's measurements against their predictions; nothing is traced.

A measurement begins with the launch of two events: about 25 us are in the shortest ones whatever the kernel, so rows under 0.3 ms, where that is
more than a tenth, are left out. Constants were chosen on the products of sizes that are multiples of 8, hashed to one half; the other half is `held`.
Convolutions have 0.26 to 0.56 ms in them, by card, whatever their size and algorithm: probably the memory of outputs and workspaces, which is asked of the
driver. It is part of their predictions here, and of no estimate. It and the constants of convolutions are from one half, by hash.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.seconds_rows import SecondsRow
from tightfit.cost.convolutions import Passes, Reached, pass_seconds
from tightfit.cost.efficiency import Efficiency, efficiency_of
from tightfit.cost.products import ON_CORES, Products, product_seconds
from tightfit.cost.winograd import SHARES
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.errors import UsageError

_SHORTEST_SECONDS = 3e-4
_CLASS_OF = {"ln": "normalisation", "softmax": "reduction"}
_READS_TWO = ("add", "mul", "div", "pow")
_ITEM = 4
_FIXED_SECONDS_OF_CONVOLUTIONS = {"sm_60": 5.6e-4, "sm_70": 2.6e-4, "sm_75": 2.9e-4, "sm_80": 2.7e-4}
Columns = dict[str, npt.NDArray[np.float64]]


def kernel_rows(data: Path) -> Iterator[SecondsRow]:
    """The rows of products, convolutions and row-wise kernels, by card and class."""
    for name in ("gemm", "conv", "rowwise"):
        with gzip.open(data / "kernel_times" / f"{name}.csv.gz", "rt") as file:
            rows = [row for row in csv.DictReader(file) if float(row["milliseconds"]) >= 1e3 * _SHORTEST_SECONDS]
        for device in sorted({row["device"] for row in rows}):
            card = _card(device)
            if card is None:
                continue
            for kind in sorted({row.get("op", "conv") for row in rows}):
                own = [row for row in rows if row["device"] == device and row.get("op", "conv") == kind]
                if own:
                    yield from _priced(name, kind, card, own)


def _card(name: str) -> Device | None:
    try:
        return find(name)
    except UsageError:
        return None  # P4: not in the catalogue


def _priced(name: str, kind: str, card: Device, rows: list[dict[str, str]]) -> Iterator[SecondsRow]:
    columns = {
        key: np.array([float(row[key]) for row in rows]) for key in rows[0] if key not in ("device", "op", "kernel")
    }
    efficiency = efficiency_of(card)
    priced = {"gemm": _products, "conv": _convolutions, "rowwise": _rowwise}[name]
    flops, num_bytes, seconds = priced(kind, card, efficiency, columns)
    fixed = efficiency.launch_seconds + (efficiency.ramp_seconds if name != "rowwise" else 0.0)
    if name == "conv":
        fixed += _FIXED_SECONDS_OF_CONVOLUTIONS[card.isa]
    roofline = np.maximum(flops / card.flops_per_second("float32"), num_bytes / card.dram_bytes_per_second)
    measured = columns["milliseconds"] / 1e3
    for i in range(len(rows)):
        half = _half(name, columns, i)
        yield SecondsRow(
            group=f"{kind}, {card.name}{half}",
            device=card.name,
            name=" ".join(f"{key}={value[i]:g}" for key, value in columns.items() if key != "milliseconds"),
            measured_seconds=float(measured[i]),
            predicted_seconds=float(seconds[i] + fixed),
            roofline_seconds=float(roofline[i]),
        )


def _half(name: str, columns: Columns, i: int) -> str:
    if name == "rowwise":
        return ""
    if name == "conv":
        sizes = (int(columns[key][i]) for key in ("batch", "in_channels", "out_channels", "input_size"))
        return " (held)" if zlib.crc32(" ".join(map(str, sizes)).encode()) % 2 else ""
    is_usual = all(columns[key][i] % 8 == 0 for key in "mnk")
    return ", sizes multiples of 8" if is_usual else ", other sizes (held)"


def _products(
    kind: str, card: Device, efficiency: Efficiency, columns: Columns
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    b, m, n, k = (columns[key] for key in "bmnk")
    num_bytes = _ITEM * b * (m * k + k * n + m * n)
    seconds = product_seconds(
        Products(batch=b, rows=m, columns=n, depth=k, num_bytes=num_bytes),
        ON_CORES,
        num_multiprocessors=card.num_multiprocessors,
        flops_per_second=card.flops_per_second("float32") * efficiency.of_tiles["matmul", "float32"],
        bytes_per_second=card.dram_bytes_per_second * efficiency.of_bandwidth["matmul"],
    )
    return 2 * b * m * n * k, num_bytes, seconds


def _convolutions(
    kind: str, card: Device, efficiency: Efficiency, columns: Columns
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    stride, taps = columns["stride"], columns["kernel_size"] ** 2
    size = (columns["input_size"] + 2 * columns["padding"] - columns["kernel_size"]) // stride + 1
    rows, depth, outputs = columns["batch"] * size**2, columns["in_channels"] * taps, columns["out_channels"]
    ones = np.ones_like(rows)
    passes = Passes(
        ones, rows, outputs, depth, taps, stride, images=columns["batch"], is_channels_last=ones < 0, gradient=0
    )
    reached = Reached(
        flops_per_second=card.flops_per_second("float32") * efficiency.of_tiles["convolution", "float32"],
        core_flops_per_second=card.flops_per_second("float32"),
        bytes_per_second=card.dram_bytes_per_second * efficiency.of_bandwidth["convolution"],
        num_multiprocessors=card.num_multiprocessors,
        tiling=ON_CORES,
        element_bytes=_ITEM,
        on_cores=SHARES[card.isa],
    )
    num_bytes = _ITEM * (rows * columns["in_channels"] * stride**2 + rows * outputs + outputs * depth)
    return 2 * rows * outputs * depth, num_bytes, pass_seconds(passes, reached)


def _rowwise(
    kind: str, card: Device, efficiency: Efficiency, columns: Columns
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    num_bytes = (3 if kind in _READS_TWO else 2) * _ITEM * columns["rows"] * columns["columns"]
    share = efficiency.of_bandwidth[_CLASS_OF.get(kind, "elementwise")]
    return np.zeros_like(num_bytes), num_bytes, num_bytes / (card.dram_bytes_per_second * share)
