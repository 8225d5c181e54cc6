"""How far the seconds of kernels may be off, by kind of kernel and by what is known of the card: half-widths of ranges that hold 90 %, as logarithms of the factor.

The error of a kernel has two parts. One is `shared` by all kernels of its kind on a card (the share of the peak that the card reaches), the other is its
`own`, of its size; kernels of equal size repeat it. A kind that was not measured on a card has the spread over cards besides: that of cards of one architecture, or,
where the architecture was not measured either, that of architectures. All errors of a machine (clocks, temperature, drivers) have `MACHINE` in common.
"""

import dataclasses
import enum
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from tightfit.cost.classes import operator_class
from tightfit.cost.products import ON_TENSOR_CORES
from tightfit.cost.shaped import tiling_of
from tightfit.devices.calibration import Calibration, OperatorClass
from tightfit.devices.device import Device
from tightfit.tape import CopyDirection, Tape
from tightfit.units import MIB


class ErrorKind(enum.IntEnum):
    """Work whose errors go together. `TILES` are tensor cores, `CORES` the multiply-add units."""

    PRODUCTS_ON_TILES = 0
    PRODUCTS_ON_CORES = 1
    BATCHED_ON_CORES = 2
    CONVOLUTIONS_ON_TILES = 3
    CONVOLUTIONS_ON_CORES = 4
    GROUPED_CONVOLUTIONS = 5
    ATTENTION = 6
    STREAMING = 7
    REDUCTIONS = 8
    OTHER = 9
    LINK = 10
    DISK = 11
    HOST = 12
    COLLECTIVES = 13


WORDS: Mapping[ErrorKind, str] = {
    ErrorKind.PRODUCTS_ON_TILES: "matrix products on tensor cores",
    ErrorKind.PRODUCTS_ON_CORES: "matrix products",
    ErrorKind.BATCHED_ON_CORES: "batched matrix products",
    ErrorKind.CONVOLUTIONS_ON_TILES: "convolutions on tensor cores",
    ErrorKind.CONVOLUTIONS_ON_CORES: "convolutions",
    ErrorKind.GROUPED_CONVOLUTIONS: "grouped convolutions",
    ErrorKind.ATTENTION: "attention",
    ErrorKind.STREAMING: "elementwise kernels",
    ErrorKind.REDUCTIONS: "reductions and normalisation",
    ErrorKind.OTHER: "other kernels",
    ErrorKind.LINK: "copies between host and GPU",
    ErrorKind.DISK: "copies to and from disk",
    ErrorKind.HOST: "work of the host",
    ErrorKind.COLLECTIVES: "collectives",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Doubt:
    """Of a kind: the parts of the module's docstring, and what is added where another card of the architecture was measured, or none."""

    shared: float
    own: float
    of_card: float
    of_architecture: float


MACHINE = 0.05
"""One model on two machines with the same card: other clocks, temperatures, drivers and years."""

# `own` and `shared` on multiply-add units: residuals of single kernels of kernel_times (0.9 quantile, median by card). On tensor cores, of grouped convolutions and of kernels that
# reduce: residuals of whole training steps of timm's models that the prices were not chosen on, half of them (docs/log.md); row lengths, strides and layouts are not on the tape, which is
# why streaming and reductions have so much. `of_card` and `of_architecture`: 1.6 standard deviations of what measured cards and architectures reach (`tightfit.cost.efficiency`).
DOUBTS: Mapping[ErrorKind, Doubt] = {
    ErrorKind.PRODUCTS_ON_TILES: Doubt(shared=0.15, own=0.40, of_card=0.12, of_architecture=0.23),
    ErrorKind.PRODUCTS_ON_CORES: Doubt(shared=0.06, own=0.20, of_card=0.12, of_architecture=0.25),
    ErrorKind.BATCHED_ON_CORES: Doubt(shared=0.20, own=0.45, of_card=0.12, of_architecture=0.25),
    ErrorKind.CONVOLUTIONS_ON_TILES: Doubt(shared=0.22, own=0.65, of_card=0.15, of_architecture=0.30),
    ErrorKind.CONVOLUTIONS_ON_CORES: Doubt(shared=0.20, own=0.80, of_card=0.15, of_architecture=0.30),
    ErrorKind.GROUPED_CONVOLUTIONS: Doubt(shared=1.00, own=1.30, of_card=0.15, of_architecture=0.30),
    ErrorKind.ATTENTION: Doubt(shared=0.25, own=0.25, of_card=0.15, of_architecture=0.40),
    ErrorKind.STREAMING: Doubt(shared=0.20, own=0.0, of_card=0.06, of_architecture=0.13),
    ErrorKind.REDUCTIONS: Doubt(shared=0.65, own=0.0, of_card=0.12, of_architecture=0.33),
    ErrorKind.OTHER: Doubt(shared=0.65, own=0.0, of_card=0.12, of_architecture=0.33),
    ErrorKind.LINK: Doubt(shared=0.15, own=0.0, of_card=0.0, of_architecture=0.0),
    ErrorKind.DISK: Doubt(shared=0.70, own=0.0, of_card=0.0, of_architecture=0.0),
    ErrorKind.HOST: Doubt(shared=0.50, own=0.0, of_card=0.0, of_architecture=0.0),
    # Links by topology, and ranks that come late: no collective was measured here.
    ErrorKind.COLLECTIVES: Doubt(shared=0.40, own=0.0, of_card=0.0, of_architecture=0.0),
}

# A kernel that finds in the cache what the one before has written is faster, by how much is not modelled. Steps on cards of up to 50 MiB do not show it, those of 72 MiB do.
_LARGE_CACHE_BYTES = 64 * MIB
_OF_LARGE_CACHE = 0.35

# Cards on which single kernels were measured. AMD's float32 was chosen on whole steps, so that those cards have the spread of cards besides.
_IN_FLOAT32 = frozenset(
    (
        "Tesla P100-PCIE-16GB", "Tesla V100-PCIE-32GB", "Tesla T4", "NVIDIA A100-PCIE-40GB", "NVIDIA A100 80GB PCIe", "NVIDIA L4",
        "NVIDIA H100 80GB HBM3",
    )
)  # fmt: skip
_IN_HALF = frozenset(("NVIDIA GeForce RTX 3090", "NVIDIA GeForce RTX 4090", "NVIDIA GeForce RTX 5090"))
_PRODUCTS_IN_HALF = _IN_HALF | {
    "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA B200", "NVIDIA GB200", "NVIDIA B300 SXM6 AC",
    "AMD Instinct MI250X", "AMD Instinct MI300X", "AMD Instinct MI325X", "AMD Instinct MI355X",
}  # fmt: skip
_STREAMED = _IN_FLOAT32 | _IN_HALF
_MEASURED: Mapping[ErrorKind, frozenset[str]] = {
    ErrorKind.PRODUCTS_ON_TILES: _PRODUCTS_IN_HALF,
    ErrorKind.PRODUCTS_ON_CORES: _IN_FLOAT32,
    ErrorKind.BATCHED_ON_CORES: _IN_FLOAT32,
    ErrorKind.CONVOLUTIONS_ON_TILES: _IN_HALF,
    ErrorKind.CONVOLUTIONS_ON_CORES: _IN_FLOAT32,
    ErrorKind.GROUPED_CONVOLUTIONS: _IN_HALF,
    ErrorKind.ATTENTION: _IN_HALF,
    ErrorKind.STREAMING: _STREAMED,
    ErrorKind.REDUCTIONS: _STREAMED,
    ErrorKind.OTHER: _STREAMED,
}
_ISAS_IN_FLOAT32 = frozenset(("sm_60", "sm_70", "sm_75", "sm_80", "sm_89", "sm_90", "gfx90a"))
_ISAS_IN_HALF = frozenset(("sm_86", "sm_89", "sm_120"))
_ISAS_OF_PRODUCTS = _ISAS_IN_HALF | {"sm_80", "sm_90", "sm_100", "sm_103", "gfx90a", "gfx942", "gfx950"}
_ISAS: Mapping[frozenset[str], frozenset[str]] = {
    _IN_FLOAT32: _ISAS_IN_FLOAT32,
    _IN_HALF: _ISAS_IN_HALF,
    _PRODUCTS_IN_HALF: _ISAS_OF_PRODUCTS,
    _STREAMED: _ISAS_IN_FLOAT32 | _ISAS_IN_HALF,
}
_CLASS_OF: Mapping[ErrorKind, OperatorClass] = {
    ErrorKind.PRODUCTS_ON_TILES: "matmul",
    ErrorKind.PRODUCTS_ON_CORES: "matmul",
    ErrorKind.CONVOLUTIONS_ON_TILES: "convolution",
    ErrorKind.CONVOLUTIONS_ON_CORES: "convolution",
    ErrorKind.ATTENTION: "attention",
    ErrorKind.STREAMING: "elementwise",
    ErrorKind.REDUCTIONS: "normalisation",
}
# What a calibration has measured itself is known to the spread of its readings and of sizes.
_MEASURED_SHARED = 0.05
_KIND_OF_CLASS: Mapping[OperatorClass, ErrorKind] = {
    "attention": ErrorKind.ATTENTION,
    "elementwise": ErrorKind.STREAMING,
    "copy": ErrorKind.STREAMING,
    "optimizer": ErrorKind.STREAMING,
    "reduction": ErrorKind.REDUCTIONS,
    "normalisation": ErrorKind.REDUCTIONS,
    "normalisation_backward": ErrorKind.REDUCTIONS,
    "embedding": ErrorKind.OTHER,
    "other": ErrorKind.OTHER,
}


def doubt_of(kind: ErrorKind, device: Device, calibration: Calibration | None = None) -> tuple[float, float]:
    """The shared and the own part of the error of `kind` on `device`, as half-widths of the logarithm that hold 90 %."""
    doubt = DOUBTS[kind]
    if kind is ErrorKind.STREAMING and device.l2_bytes > _LARGE_CACHE_BYTES:
        doubt = dataclasses.replace(doubt, shared=float(np.hypot(doubt.shared, _OF_LARGE_CACHE)))
    if calibration is not None and _is_calibrated(kind, calibration):
        return min(doubt.shared, _MEASURED_SHARED), doubt.own
    names = _MEASURED.get(kind)
    if names is None or device.name in names:
        return doubt.shared, doubt.own
    more = doubt.of_card if device.isa in _ISAS[names] else doubt.of_architecture
    return float(np.hypot(doubt.shared, more)), doubt.own


def _is_calibrated(kind: ErrorKind, calibration: Calibration) -> bool:
    if kind is ErrorKind.LINK:
        return bool(calibration.link)
    if kind is ErrorKind.DISK:
        return bool(calibration.disk)
    if kind is ErrorKind.HOST:
        return "issue" in calibration.seconds
    name = _CLASS_OF.get(kind)
    tables = (calibration.efficiency, *calibration.efficiency_by_dtype.values())
    return name is not None and any(name in table for table in tables)


def error_kinds(tape: Tape, arithmetic: npt.NDArray[np.str_], device: Device) -> npt.NDArray[np.int8]:
    """The `ErrorKind` of each operator, shape `(len(tape.operators),)`; `arithmetic` is the `DType` that each computes in."""
    names, name_of = np.unique(tape.operators.name, return_inverse=True)
    classes = [operator_class(tape.strings[name]) for name in names]
    kinds = np.array([_KIND_OF_CLASS.get(c, ErrorKind.OTHER) for c in classes], dtype=np.int8)[name_of]
    distinct, place = np.unique(arithmetic, return_inverse=True)
    is_on_tiles = np.array([tiling_of(device, dtype) is ON_TENSOR_CORES for dtype in distinct.tolist()])[place]
    for name, on_tiles, on_cores in (
        ("matmul", ErrorKind.PRODUCTS_ON_TILES, ErrorKind.PRODUCTS_ON_CORES),
        ("convolution", ErrorKind.CONVOLUTIONS_ON_TILES, ErrorKind.CONVOLUTIONS_ON_CORES),
    ):
        chosen = np.array([c == name for c in classes], dtype=bool)[name_of]
        kinds[chosen] = np.where(is_on_tiles[chosen], on_tiles, on_cores)
    geometry = tape.geometry
    if len(geometry):
        row = geometry.operator
        is_batched = (kinds[row] == ErrorKind.PRODUCTS_ON_CORES) & (geometry.batch > 1)
        kinds[row[is_batched]] = ErrorKind.BATCHED_ON_CORES
        kinds[row[(geometry.taps > 0) & (geometry.batch > 1)]] = ErrorKind.GROUPED_CONVOLUTIONS
    copies = tape.copies
    is_disk = (copies.direction == CopyDirection.TO_DISK) | (copies.direction == CopyDirection.FROM_DISK)
    kinds[copies.operator] = np.where(is_disk, ErrorKind.DISK, ErrorKind.LINK)
    kinds[tape.collectives.operator] = ErrorKind.COLLECTIVES
    return kinds
