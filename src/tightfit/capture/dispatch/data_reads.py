"""Answers to reads of data that does not exist.

Training code reads little: a loss to log it, a norm to clip by it, a flag. Where the true value is not known, a number reads as 1 and a
boolean as False, each with an assumption that names the line. A loop that waits for a value to change gets a changed answer after a while;
when that does not help, the run ends with an error that names the line.
"""

from collections import Counter
from collections.abc import Callable

import torch

from tightfit.errors import CaptureError

NUM_SAME_ANSWERS = 2_000
MAX_READS = 50_000
MAX_FILLED_ELEMENTS = 1 << 16


class ReadPolicy:
    """The policy, with its count of reads per line."""

    def __init__(self, where: Callable[[], str], assume: Callable[[str, str], None]) -> None:
        self._where = where
        self._assume = assume
        self._num_reads: Counter[str] = Counter()

    def scalar(self, dtype: torch.dtype) -> bool | int | float | complex:
        """The result of `.item()`.

        Raises:
            CaptureError: the same line has read so often that its loop will not end.
        """
        where = self._where()
        self._num_reads[where] += 1
        num_reads = self._num_reads[where]
        if num_reads > MAX_READS:
            raise CaptureError(
                f"{where}: a loop waits for a value that only a real run computes ({MAX_READS} reads); bound the loop, or estimate the step as a generator function"
            )
        changed = (num_reads // NUM_SAME_ANSWERS) % 2 == 1
        if dtype == torch.bool:
            answer: bool | int | float | complex = changed
        elif dtype.is_complex:
            answer = complex(not changed)
        else:
            # One and not zero, since programs divide by what they read and take its logarithm.
            answer = float(not changed) if dtype.is_floating_point else int(not changed)
        self._assume(where, f"a value read back from the GPU is assumed to be {answer}")
        return answer

    def fill(self, host: torch.Tensor) -> torch.Tensor:
        """Fills a host tensor with the policy's values; large ones stay zero, as untouched pages."""
        if host.dtype != torch.bool and host.numel() <= MAX_FILLED_ELEMENTS:
            host.fill_(1)
        self._assume(
            self._where(),
            "GPU data copied to the host is assumed to be ones (False for booleans, zeros for large tensors)",
        )
        return host
