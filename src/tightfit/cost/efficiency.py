"""Which fraction of a GPU's peak each class of operators reaches, and the fixed costs of an operator.

`matmul`, `convolution` and `attention` have a fraction of the FLOP/s, the others of the memory bandwidth. Sources:

* matmul, bfloat16, best shapes alone: A100 0.869, H100 0.803 (H200 the same), GH200 0.838, B200 0.776, B300 0.786, GB200 0.729, MI355X 0.68, MI325X
  0.604, MI300X 0.514 to 0.601, MI250X 0.767 (stas00/ml-engineering, "Maximum Achievable Matmul FLOPS"); a gated feed-forward layer of
  8B size on an A100 0.83 (Liger-Kernel benchmarks); H200 on random data 788 of 989 TFLOP/s. Over whole training steps the power limit takes more: 0.65 of an H200 (a step of eight
  layers of 4,096 took 193 and 202 ms, docs/log.md), 0.79 of an A100 (llm-foundry's recomputed runs, nine tenths of which are products). Ada 0.88 to 0.96 (cuBLAS on an L20).
* attention: FlashAttention-2 reaches 0.5 to 0.73 of an A100 (Dao 2023) and 0.35 of an H100 (Shah et al. 2024), which is what torch uses there.
* matmul, float32: linear layers of kernel_times (NeuSight: Lee et al., ASPLOS 2025), best shapes; cards that their power limit holds back further say so
  themselves (`Device.reached`). bfloat16 and float16 on sm_86: steps of timm's models on an RTX 3090 (its results/), less the clock.
* convolution: without sizes 0.5, cuDNN's usual 0.4 to 0.6; with sizes the tiles of a product (`of_tiles`).
* elementwise, copy, optimizer: the largest elementwise kernels of kernel_times, and timm's steps for GDDR6X and GDDR7; 0.86 on an H100 (relu then square on 4096 x
  16384, Liger-Kernel benchmarks). reduction: softmax of kernel_times. normalisation: layer norm of kernel_times; 0.55 of an H100 at 4096 x 4096 and
  beyond, its backward 0.37 (Liger-Kernel benchmarks).
* embedding: torch's lookup 0.3 of an A100 (same). other: between copy and normalisation, by judgement.
* launch 3 us: what is left of those H100 times at tiny sizes. ramp 3.5 us: a cuBLAS product of 512^3 to 2048^3 costs 6 to 7 us more than its
  share of the peak (waynehacking8/blackwell-tensorcore-kernels). issue 5 us: eager dispatch on the host, usually 4 to 6 us.
"""

import dataclasses
from collections.abc import Mapping
from typing import cast

from tightfit.cost.classes import TENSOR_CORE_CLASSES
from tightfit.cost.host_python import REFERENCE_SECONDS
from tightfit.devices.calibration import OPERATOR_CLASSES, Calibration, OperatorClass
from tightfit.devices.device import DTYPES, Device, DType

# Of tensor cores in half precision.
_MATMUL = {
    "sm_80": 0.79,
    "sm_86": 0.93,
    "sm_89": 0.88,
    "sm_90": 0.65,
    "sm_100": 0.77,
    "sm_103": 0.78,
    "gfx90a": 0.76,
    "gfx942": 0.60,
    "gfx950": 0.68,
}
_MATMUL_ELSEWHERE = 0.8
# Of multiply-add units in float32.
_MATMUL_FLOAT32 = {
    "sm_60": 0.78,
    "sm_61": 0.82,
    "sm_70": 0.95,
    "sm_75": 0.85,
    "sm_80": 0.94,
    "sm_86": 0.85,
    "sm_89": 0.85,
    "sm_90": 0.77,
    "gfx90a": 0.58,
}
# GeForce cards run above the boost clock that their peak is stated at; this much is what timm's steps on an RTX 3090 and 4090 need.
_BOOST_OF_DESKTOP = 1.12
_ATTENTION = {"sm_80": 0.6, "sm_86": 0.6, "sm_89": 0.6, "sm_90": 0.38}
_ATTENTION_ELSEWHERE = 0.4
_CONVOLUTION = 0.5
# Streaming: what elementwise kernels, copies and optimizers reach of the memory's limit.
_STREAMING = {
    "sm_60": 0.75,
    "sm_61": 0.75,
    "sm_70": 0.91,
    "sm_75": 0.75,
    "sm_80": 0.88,
    "sm_86": 0.80,
    "sm_89": 0.78,
    "sm_90": 0.86,
    "gfx90a": 0.75,
}
_STREAMING_OF_DRAM = {"GDDR6X": 0.85, "GDDR7": 0.92}
# With the same memory as Ampere's, but twelve times its L2 cache: what timm's inference steps on an RTX 4090 need. That a kernel finds there what the one before has
# written does not explain it: their tensors are larger (docs/log.md).
_STREAMING_OF_CARDS = {("sm_89", "GDDR6X"): 0.95}
_STREAMING_ELSEWHERE = 0.86
# Softmax and other reductions.
_REDUCTION = {"sm_60": 0.40, "sm_61": 0.63, "sm_70": 0.63, "sm_75": 0.62, "sm_80": 0.70, "sm_86": 0.50, "sm_89": 0.78}
_NORMALISATION = {
    "sm_60": 0.46,
    "sm_61": 0.53,
    "sm_70": 0.58,
    "sm_75": 0.53,
    "sm_80": 0.62,
    "sm_86": 0.70,
    "sm_89": 0.78,
}
_BANDWIDTH: Mapping[OperatorClass, float] = {
    "normalisation": 0.55,
    "normalisation_backward": 0.37,
    "reduction": 0.7,
    "embedding": 0.3,
    "other": 0.7,
}
_SECONDS = {"launch": 3e-6, "ramp": 3.5e-6, "issue": 5e-6, "python": REFERENCE_SECONDS}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Fractions of the peak FLOP/s, by class and type of arithmetic, and of the bandwidth by class; `of_tiles` of kernels whose
    tiles are known, which lose the rest of `of_flops` by their tiles. Above 1 where a card runs above its stated clock. Fixed costs are per kernel, per matrix
    product, and per issue on the host; `python_seconds` is what `host_python.reference_work` takes there. `measured_convolutions`: types whose convolutions a calibration has measured."""

    of_flops: Mapping[tuple[OperatorClass, DType], float]
    of_tiles: Mapping[tuple[OperatorClass, DType], float]
    of_bandwidth: Mapping[OperatorClass, float]
    measured_convolutions: frozenset[DType]
    launch_seconds: float
    ramp_seconds: float
    issue_seconds: float
    python_seconds: float


def efficiency_of(device: Device, calibration: Calibration | None = None) -> Efficiency:
    """The efficiencies of `device`, with those that `calibration` measured in place of the published ones."""
    isa = device.isa
    streaming = _STREAMING_OF_CARDS.get(
        (isa, device.dram), _STREAMING_OF_DRAM.get(device.dram, _STREAMING.get(isa, _STREAMING_ELSEWHERE))
    )
    fractions: dict[OperatorClass, float] = {
        **_BANDWIDTH,
        "elementwise": streaming,
        "copy": streaming,
        "optimizer": streaming,
        "reduction": _REDUCTION.get(isa, _BANDWIDTH["reduction"]),
        "normalisation": _NORMALISATION.get(isa, _BANDWIDTH["normalisation"]),
        "matmul": _MATMUL.get(isa, _MATMUL_ELSEWHERE),
        "attention": _ATTENTION.get(isa, _ATTENTION_ELSEWHERE),
        "convolution": _CONVOLUTION,
    }
    boost = _BOOST_OF_DESKTOP if device.kind == "desktop" else 1.0
    fractions["matmul"] *= boost
    published = {"float32": boost * _MATMUL_FLOAT32.get(isa, _MATMUL_ELSEWHERE), **device.reached}
    seconds = dict(_SECONDS)
    if calibration is not None:
        fractions |= {name: calibration.efficiency[name] for name in OPERATOR_CLASSES if name in calibration.efficiency}
        seconds |= calibration.seconds
    measured = {} if calibration is None else calibration.efficiency_by_dtype
    types = cast(tuple[DType, ...], DTYPES)
    by_dtype: dict[str, dict[str, float]] = {str(dtype): {**fractions} for dtype in types}
    # What a calibration has measured without a type holds for all of them.
    if calibration is None or "matmul" not in calibration.efficiency:
        for dtype, share in published.items():
            by_dtype[dtype]["matmul"] = share
    for dtype, figures in measured.items():
        by_dtype[dtype] |= figures
    of_flops = {(name, dtype): by_dtype[dtype][_arithmetic_of(name)] for name in OPERATOR_CLASSES for dtype in types}
    # A measured convolution counts as it is; the published figure is of whole convolutions, their tiles included.
    is_measured = {
        dtype: calibration is not None and "convolution" in {**calibration.efficiency, **measured.get(dtype, {})}
        for dtype in types
    }
    of_tiles = {
        (name, dtype): by_dtype[dtype]["matmul"] if name == "convolution" and not is_measured[dtype] else share
        for (name, dtype), share in of_flops.items()
    }
    # A matrix product streams its operands as a copy does; a kernel that is no matrix product is hardly ever bound by its arithmetic.
    return Efficiency(
        of_flops=of_flops,
        of_tiles=of_tiles,
        of_bandwidth={name: fractions["copy" if name in TENSOR_CORE_CLASSES else name] for name in OPERATOR_CLASSES},
        measured_convolutions=frozenset(dtype for dtype in types if is_measured[dtype]),
        launch_seconds=seconds["launch"],
        ramp_seconds=seconds["ramp"],
        issue_seconds=seconds["issue"],
        python_seconds=seconds["python"],
    )


def _arithmetic_of(kind: OperatorClass) -> OperatorClass:
    return kind if kind in TENSOR_CORE_CLASSES else "matmul"
