"""The sizes of quantised optimizer states, and whether the library that can quantise them is there: what options are worked out from.

The formats themselves, and their sources, are in `tightfit.techniques.optimizer.states.state_codecs`.
"""

import importlib.metadata
from typing import Literal

Bits = Literal[8, 4]

BLOCK_SIZE: dict[Bits, int] = {8: 256, 4: 128}
MIN_NUMBERS = 4096  # a smaller tensor is not worth it (arXiv:2110.02861, section 3)
MIN_ON_DISK = 1 << 16  # a smaller state is not worth a file's latency
LOST_STATES = "; the step is incomplete, and the optimizer states there are lost: load the last checkpoint"
# Large tensors are quantised in pieces of this size, so that temporaries exist for one piece only.
NUMBERS_PER_PIECE = 2**24

LIBRARY = "bitsandbytes"
_FIRST_WITH_OPERATORS = (0, 46)  # bitsandbytes/_ops.py registers them with torch.library since then


def is_installed() -> bool:
    """Whether the library is installed in a version with the operators; it is not imported."""
    try:
        version = importlib.metadata.version(LIBRARY)
    except importlib.metadata.PackageNotFoundError:
        return False
    return tuple(int(part) for part in version.split(".")[:2]) >= _FIRST_WITH_OPERATORS
