"""How far a forecast looks: a number of samples, or a time that is as many samples as fit in it."""

import dataclasses
import math
import re

from tightfit.errors import UsageError
from tightfit.forecast.series import Series

_SECONDS = {"s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}
_MAX_SAMPLES = 100_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Horizon:
    """The next `count` samples, or those of the next `count` seconds."""

    count: float
    is_time: bool

    def num_samples(self, series: Series) -> int:
        """The samples of one series that it spans, at least one.

        Raises:
            UsageError: the horizon is a time and the series has one sample, so that nobody knows when the next one comes; or it has too many samples.
        """
        if not self.is_time:
            return int(self.count)
        if not series.interval:
            raise UsageError(
                f"the series {series.name} has one sample, and so no interval; give --horizon as a number of samples"
            )
        samples = max(1, math.ceil(self.count / series.interval - 1e-6))
        if samples > _MAX_SAMPLES:
            raise UsageError(
                f"--horizon: {samples} samples of the series {series.name}; at most {_MAX_SAMPLES} are forecast"
            )
        return samples


def parse_horizon(text: str) -> Horizon:
    """`10` is ten samples; `90s`, `10min`, `1.5h` and `2d` are times.

    Raises:
        UsageError: it is neither, or not above zero.
    """
    match = re.fullmatch(r"\s*([0-9]{1,9}(?:\.[0-9]+)?)\s*([a-z]*)\s*", text.lower())
    if match is None or (match[2] and match[2] not in _SECONDS):
        raise UsageError(f"--horizon {text}: write a number of samples, such as 10, or a time, such as 10min or 1h")
    count = float(match[1])
    if match[2]:
        count *= _SECONDS[match[2]]
    elif not count.is_integer() or count > _MAX_SAMPLES:
        raise UsageError(
            f"--horizon {text}: a number of samples is whole and at most {_MAX_SAMPLES}; a time has a unit, such as 10min"
        )
    if count <= 0:
        raise UsageError(f"--horizon {text}: it must be above zero")
    return Horizon(count=count, is_time=bool(match[2]))
