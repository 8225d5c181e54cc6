"""Answers to reads of data that does not exist.

Training code reads little: a loss to log it, a norm to clip by it, a flag. Where the true value is not known, a number reads as 1 and a
boolean as False, or as what a check of the program's own passes with, each with an assumption that names the line. A loop that waits for a value
to change gets a changed answer after a while; when that does not help, the run ends with an error that names the line.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from tightfit.capture.observe.attribution import short
from tightfit.errors import CaptureError
from tightfit.errors.program_errors import note_assumed

NUM_SAME_ANSWERS = 2_000
NUM_PASSED_CHECKS = 2_000
"""A check fails once in so many reads in the same module: a program checks each of its layers, in each micro-batch."""
MAX_READS = 50_000
MAX_FILLED_ELEMENTS = 1 << 16
_MAX_LINES_BEFORE = 20


class ReadPolicy:
    """The policy, with its count of reads per line."""

    def __init__(
        self, where: Callable[[], str], assume: Callable[[str, str], None], modules: Sequence[object] = ()
    ) -> None:
        self._where = where
        self._modules = modules  # that run, as the list is at each read
        self._num_passed: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self._assume = assume
        self._num_reads: Counter[str] = Counter()
        self._answers: dict[str, str] = {}  # by the line

    def scalar(self, dtype: torch.dtype) -> bool | int | float | complex:
        """The result of `.item()`.

        Raises:
            CaptureError: the same line has read so often that its loop will not end.
        """
        where = self._where()
        num_reads = self._count_read(where)
        changed = (num_reads // NUM_SAME_ANSWERS) % 2 == 1
        if dtype == torch.bool:
            answer: bool | int | float | complex = changed
        elif dtype.is_complex:
            answer = complex(not changed)
        else:
            # One and not zero, since programs divide by what they read and take its logarithm.
            answer = float(not changed) if dtype.is_floating_point else int(not changed)
        self._answers[where] = str(answer)
        self._assume(where, f"a value read back from the GPU is assumed to be {answer}")
        return answer

    def note_on(self, error: BaseException, passed: Iterable[tuple[str, int, int]]) -> None:
        """Notes on an exception of the program what was assumed just before the lines that it `passed`: it may follow from that alone.

        Those are a file, the first line of a function, and the line, from the innermost out.
        """
        for file, first, last in passed:
            for line in range(last, max(first, last - _MAX_LINES_BEFORE) - 1, -1):
                where = f"{short(file)}:{line}"
                if where in self._answers:
                    note_assumed(error, where, self._answers[where])
                    return

    def passes(self, answer: bool) -> bool:
        """What a check of the program's own reads as, which passes with `answer`: that one, but for one read of many at the same line: a loop may end by the
        exception that the check raises.

        Raises:
            CaptureError: the same line has read so often that its loop will not end.
        """
        where = self._where()
        self._count_read(where)
        check = where, tuple(map(id, self._modules))
        self._num_passed[check] += 1
        if self._num_passed[check] % NUM_PASSED_CHECKS == 0:
            answer = not answer
            self._answers[where] = str(answer)
            self._assume(
                where, f"a check of values on the GPU that has passed {NUM_PASSED_CHECKS - 1} times is assumed to fail"
            )
        else:
            self._assume(where, "a check of values on the GPU is assumed to pass")
        return answer

    def fill(self, host: torch.Tensor) -> torch.Tensor:
        """Fills a host tensor with the policy's values; large ones stay zero, as untouched pages."""
        if host.dtype != torch.bool and host.numel() <= MAX_FILLED_ELEMENTS:
            host.fill_(1)
        where = self._where()
        self._answers[where] = "False" if host.dtype == torch.bool else "1 in each element, or 0 in a large tensor"
        self._assume(
            where,
            "GPU data copied to the host is assumed to be ones (zeros for large tensors, False for booleans, which select everything as masks)",
        )
        return host

    def _count_read(self, where: str) -> int:
        self._num_reads[where] += 1
        if self._num_reads[where] > MAX_READS:
            raise CaptureError(
                f"{where}: a loop waits for a value that only a real run computes ({MAX_READS} reads); bound the loop, or estimate the step as a generator function"
            )
        return self._num_reads[where]
