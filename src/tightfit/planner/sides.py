"""The two sides of a step: the card, which runs kernels, and the host, which issues them. A step takes as long as the slower side."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """Seconds of each side: of a step, or of what is added to one."""

    on_card: float = 0.0
    on_host: float = 0.0

    @classmethod
    def both(cls, seconds: float) -> "Sides":
        """So many seconds of either side: they pass whichever of them a step waits for."""
        return cls(on_card=seconds, on_host=seconds)

    @property
    def seconds(self) -> float:
        """Of a step: the slower side's."""
        return max(self.on_card, self.on_host)

    def __add__(self, other: "Sides") -> "Sides":
        return Sides(on_card=self.on_card + other.on_card, on_host=self.on_host + other.on_host)

    def __sub__(self, other: "Sides") -> "Sides":
        return Sides(on_card=self.on_card - other.on_card, on_host=self.on_host - other.on_host)

    def __mul__(self, factor: float) -> "Sides":
        return Sides(on_card=self.on_card * factor, on_host=self.on_host * factor)

    def added(self, more: "Sides") -> float:
        """What a step of these sides takes longer with `more`: what either side has to spare hides some of it."""
        return (self + more).seconds - self.seconds
