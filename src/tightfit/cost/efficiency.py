"""Which fraction of a GPU's peak each class of operators reaches, and the fixed costs of an operator.

`matmul`, `convolution` and `attention` have a fraction of the FLOP/s, the others of the memory bandwidth. Sources:

* matmul, bfloat16, best shapes: A100 0.869, H100 0.803 (H200 the same), GH200 0.838, B200 0.776, B300 0.786, GB200 0.729, MI355X 0.68, MI325X
  0.604, MI300X 0.514 to 0.601, MI250X 0.767 (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS"); a gated feed-forward layer of
  8B size on an A100 0.83 (Liger-Kernel benchmarks); H200 on random data 788 of 989 TFLOP/s; Ada 0.88 to 0.96 (cuBLAS on an L20).
* attention: FlashAttention-2 reaches 0.5 to 0.73 of an A100 (Dao 2023) and 0.35 of an H100 (Shah et al. 2024), which is what torch uses there.
* convolution: no single published figure; 0.5 stands for cuDNN's usual 0.4 to 0.6.
* elementwise: 0.86 on an H100 (relu then square on 4096 x 16384, Liger-Kernel benchmarks), copy: 0.9 on an H200 (4.3 of 4.8 TB/s).
* normalisation: torch's layer norm 0.53 of an A100, 0.55 of an H100 at 4096 x 4096 and beyond, its backward 0.37 (same benchmarks).
* embedding: torch's lookup 0.3 of an A100 (same). reduction, optimizer, other: between copy and normalisation, by judgement.
* launch 3 us: what is left of those H100 times at tiny sizes. ramp 3.5 us: a cuBLAS product of 512^3 to 2048^3 costs 6 to 7 us more than its
  share of the peak (waynehacking8/blackwell-tensorcore-kernels). issue 5 us: eager dispatch on the host, usually 4 to 6 us.
"""

import dataclasses
from collections.abc import Mapping
from typing import cast

from tightfit.cost.classes import TENSOR_CORE_CLASSES
from tightfit.devices.calibration import OPERATOR_CLASSES, Calibration, OperatorClass
from tightfit.devices.device import DTYPES, Device, DType

_MATMUL = {
    "sm_80": 0.85,
    "sm_89": 0.88,
    "sm_90": 0.80,
    "sm_100": 0.77,
    "sm_103": 0.78,
    "gfx90a": 0.76,
    "gfx942": 0.60,
    "gfx950": 0.68,
}
_MATMUL_ELSEWHERE = 0.8
_ATTENTION = {"sm_80": 0.6, "sm_86": 0.6, "sm_89": 0.6, "sm_90": 0.38}
_ATTENTION_ELSEWHERE = 0.4
_CONVOLUTION = 0.5
_BANDWIDTH: Mapping[OperatorClass, float] = {
    "normalisation": 0.54,
    "normalisation_backward": 0.37,
    "elementwise": 0.86,
    "reduction": 0.7,
    "embedding": 0.3,
    "copy": 0.9,
    "optimizer": 0.85,
    "other": 0.7,
}
_SECONDS = {"launch": 3e-6, "ramp": 3.5e-6, "issue": 5e-6}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of the peak FLOP/s, by class and type of arithmetic, and of the bandwidth by class. Fixed costs are per kernel, per matrix
    product, and per issue on the host."""

    of_flops: Mapping[tuple[OperatorClass, DType], float]
    of_bandwidth: Mapping[OperatorClass, float]
    launch_seconds: float
    ramp_seconds: float
    issue_seconds: float


def efficiency_of(device: Device, calibration: Calibration | None = None) -> Efficiency:
    """The efficiencies of `device`, with those that `calibration` measured in place of the published ones."""
    fractions: dict[OperatorClass, float] = {
        **_BANDWIDTH,
        "matmul": _MATMUL.get(device.isa, _MATMUL_ELSEWHERE),
        "attention": _ATTENTION.get(device.isa, _ATTENTION_ELSEWHERE),
        "convolution": _CONVOLUTION,
    }
    seconds = dict(_SECONDS)
    if calibration is not None:
        fractions |= {name: calibration.efficiency[name] for name in OPERATOR_CLASSES if name in calibration.efficiency}
        seconds |= calibration.seconds
    measured = {} if calibration is None else calibration.efficiency_by_dtype
    types = cast(tuple[DType, ...], DTYPES)
    by_dtype = {dtype: {**fractions, **measured.get(dtype, {})} for dtype in types}
    # A matrix product streams its operands as a copy does; a kernel that is no matrix product is hardly ever bound by its arithmetic.
    return Efficiency(
        of_flops={(name, dtype): by_dtype[dtype][_arithmetic_of(name)] for name in OPERATOR_CLASSES for dtype in types},
        of_bandwidth={name: fractions["copy" if name in TENSOR_CORE_CLASSES else name] for name in OPERATOR_CLASSES},
        launch_seconds=seconds["launch"],
        ramp_seconds=seconds["ramp"],
        issue_seconds=seconds["issue"],
    )


def _arithmetic_of(kind: OperatorClass) -> OperatorClass:
    return kind if kind in TENSOR_CORE_CLASSES else "matmul"
