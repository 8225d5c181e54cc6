"""The algorithm of an optimizer and the implementation that ran, inferred from its operators.

torch.optim implements each algorithm three times: one kernel per tensor and operation (for-loop), one per operation over many tensors (foreach),
one for everything (fused); their operators have different names.
"""

from typing import Literal

import numpy as np

from tightfit.analysis.optimizer import OptimizerProfile

Implementation = Literal["fused", "foreach", "for-loop"]
Family = Literal["adam", "sgd", "adagrad", "other"]

UPDATES_EACH_ALONE = frozenset(
    ["SGD", "Adam", "AdamW", "Adagrad", "Adadelta", "Adamax", "NAdam", "RAdam", "RMSprop", "ASGD", "Rprop"]
)
"""The classes of torch.optim whose update of a parameter reads nothing of the others, and of itself each element alone."""
LOW_PRECISION = ("bfloat16", "float16")


def implementation_of(run: OptimizerProfile) -> Implementation:
    """Which of torch's three implementations ran."""
    names = [name for step_range in run.step_ranges for name in run.names(step_range)]
    if any(name.startswith("_fused_") for name in names):
        return "fused"
    return "foreach" if any(name.startswith("_foreach_") for name in names) else "for-loop"


def family_of(run: OptimizerProfile) -> Family:
    """The algorithm, inferred from its operators: those that torch has a fused kernel for, and "other".

    The operator sequences are those of `torch/optim/{adam,sgd,adagrad}.py`.
    """
    kinds = {
        name.removeprefix("_foreach_").removeprefix("_fused_").rstrip("_")
        for step_range in run.step_ranges
        for name in set(run.names(step_range))
    }
    for family in ("adam", "sgd", "adagrad"):
        if any(kind.startswith(family) for kind in kinds):
            return family
    # torch updates the first moment of Adam and NAdam by lerp. RMSprop (mul, addcmul, sqrt, addcdiv) is none of the three.
    if {"lerp", "addcmul", "sqrt", "addcdiv"} <= kinds and _updates_once(run):
        return "adam"
    if {"addcmul", "sqrt", "addcdiv"} <= kinds and not {"lerp", "mul", "sub"} & kinds:
        return "adagrad"
    if kinds <= {"add", "mul", "clone", "zeros_like", "neg", "copy", "_to_copy"} and "add" in kinds:
        return "sgd"
    return "other"


def _updates_once(run: OptimizerProfile) -> bool:
    """Whether each parameter is updated as often as its first moment: NAdam calls addcdiv twice."""
    names = run.names(run.step_ranges[-1])
    counts = {kind: sum(kind in name for name in names) for kind in ("lerp", "addcdiv")}
    return counts["addcdiv"] == counts["lerp"]


def element_bytes_of(run: OptimizerProfile) -> int:
    """Bytes per element of what the optimizer updates: 2 where most of its kernels are in 16 bits, else 4."""
    step_range = run.step_ranges[-1]
    dtypes = run.tape.operators.dtype[step_range.begin : step_range.end][
        run.is_kernel[step_range.begin : step_range.end]
    ]
    return 2 if run.tape.strings[int(np.bincount(dtypes).argmax())] in LOW_PRECISION else 4
