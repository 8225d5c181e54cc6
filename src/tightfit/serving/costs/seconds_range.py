"""Seconds that are expected between two ends."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SecondsRange:
    """The ends between which the seconds are expected."""

    low: float
    high: float

    def __add__(self, other: "SecondsRange") -> "SecondsRange":
        return SecondsRange(low=self.low + other.low, high=self.high + other.high)

    def times(self, factor: float) -> "SecondsRange":
        """Both ends times `factor`."""
        return SecondsRange(low=self.low * factor, high=self.high * factor)

    @property
    def middle(self) -> float:
        """What is expected where one number is wanted."""
        return (self.low + self.high) / 2
