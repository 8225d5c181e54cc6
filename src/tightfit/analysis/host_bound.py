"""What bounds the steps of a run, the card or the host that issues its kernels, and what more work of either adds to them."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepBound:
    """Seconds per step: of kernels on the card, and of the host that issues them. A step takes the longer of both."""

    on_card: float
    on_host: float
    issue_seconds: float

    def added(self, on_card: float, on_host: float, *, num_alike: float = 1) -> float:
        """What a step takes longer by this much more of each, where `num_alike` such additions come together: what one of them hides behind the other side, all
        of them may not."""
        together = max(self.on_card + num_alike * on_card, self.on_host + num_alike * on_host)
        return (together - max(self.on_card, self.on_host)) / num_alike
