"""Whether products and convolutions of float32 are computed in TF32, as the program has set it.

From torch 2.9 on there are two sets of switches, and the older ones raise an error where a program has used the newer ones (`torch.backends.fp32_precision`).
"""

from typing import Any

import torch


def multiplies_in_tf32() -> bool:
    """Whether matrix products are."""
    return _is_on(torch.backends.cuda.matmul)


def convolves_in_tf32() -> bool:
    """Whether convolutions are."""
    return _is_on(getattr(torch.backends.cudnn, "conv", torch.backends.cudnn))


def _is_on(backend: Any) -> bool:
    precision = getattr(backend, "fp32_precision", None)
    return bool(backend.allow_tf32) if precision is None else precision == "tf32"
