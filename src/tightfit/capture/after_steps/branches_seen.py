"""Which branches of the program ran, and which of them only before its first step was over."""


class BranchesSeen:
    """`marks[n]` is set by branch `n` itself when it runs; the marks begin anew when the first step is over."""

    def __init__(self) -> None:
        self.marks = bytearray()
        self._early = b""

    def first_step_ended(self) -> None:
        """From now on `marks` is what runs again."""
        self._early = bytes(self.marks)
        self.marks[:] = bytes(len(self.marks))

    def later(self, number: int) -> bool:
        """Whether a branch ran since the first step was over; before that, whether it ran."""
        return bool(self.marks[number])

    def ever(self, number: int) -> bool:
        """Whether a branch ran."""
        return bool(self.marks[number]) or (number < len(self._early) and bool(self._early[number]))

    def early_alone(self, number: int) -> bool:
        """Whether a branch ran before the first step was over, and not since."""
        return self.ever(number) and not self.marks[number] and bool(self._early)
