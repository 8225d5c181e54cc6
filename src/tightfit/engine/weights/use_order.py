"""The order in which blocks are used, from the order of the blocks at first and from what was seen since."""

import enum


class Pass(enum.Enum):
    """What uses a block: a forward pass with gradients, one without, a backward pass, or a forward pass inside of that."""

    FORWARD = enum.auto()
    ALONE = enum.auto()
    BACKWARD = enum.auto()
    AGAIN = enum.auto()


Use = tuple[Pass, int]
# What is learned of the order. Between a forward and a backward pass, and after either, nothing is on the card or on its way: whatever the program does
# there to weights, also without a version that would tell (`weight.data`), it does to those at the host.
_MAY_FOLLOW = {
    Pass.FORWARD: (Pass.FORWARD,),
    Pass.ALONE: (Pass.ALONE,),
    Pass.BACKWARD: (Pass.BACKWARD, Pass.AGAIN),
    Pass.AGAIN: (Pass.BACKWARD, Pass.AGAIN),
}


class UseOrder:
    """Which use follows which."""

    def __init__(self) -> None:
        self._following: dict[Use, Use] = {}
        self._last: Use | None = None

    def expect(self, number: int) -> None:
        """A block was added behind those before `number`: it is expected after them, and before them in a backward pass."""
        if number:
            for kind in (Pass.FORWARD, Pass.ALONE):
                self._following[kind, number - 1] = kind, number
            self._following[Pass.BACKWARD, number] = Pass.BACKWARD, number - 1

    def learn(self, use: Use) -> None:
        """What is used now is expected next time where the last use was."""
        last, self._last = self._last, use
        if last is None or use[0] not in _MAY_FOLLOW[last[0]]:
            return
        # A forward pass that begins anew is not waited for: the program may do anything before.
        is_new_pass = use[0] is last[0] and use[0] in (Pass.FORWARD, Pass.ALONE) and use[1] < last[1]
        if not is_new_pass:
            self._following[last] = use

    def block_after(self, use: Use) -> int | None:
        """The number of the block that is expected after a use; None if none is."""
        following = self._following.get(use)
        return None if following is None else following[1]

    def end_pass(self) -> None:
        """A pass is over: what comes next does not follow its last use."""
        self._last = None
