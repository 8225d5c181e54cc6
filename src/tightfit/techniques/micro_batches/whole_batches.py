"""A batch that cannot be split runs whole where others were split before it, and where what its first part has done can be taken back: nothing but what a
snapshot of the model's state puts back, and no backward pass. Until then it is refused: the plan was made for batches that are split.
"""

from collections.abc import Callable, Iterable

import torch

from tightfit.effects.random_states import TorchRandom
from tightfit.effects.values.value_checks import has_values
from tightfit.errors import ApplyError

TakeBack = Callable[[str], None]
"""Takes back that a batch was refused, for the reason given."""

_Gradient = tuple[torch.Tensor | None, int]


class WholeBatches:
    """Says of each batch whether it may run whole. `takes_back` is called before a batch, and gives what takes back that it was refused."""

    def __init__(self, takes_back: Callable[[], TakeBack] | None) -> None:
        self._takes_back = takes_back
        self._take_back: TakeBack | None = None
        self.has_split = False
        """Whether a batch was split."""
        # The random states before the first part, until its backward pass begins.
        self._random: TorchRandom | None = None
        self._gradients: list[_Gradient] = []

    def begin(self) -> None:
        """A batch begins."""
        self.begin_backward()
        self._take_back = self._takes_back() if self._takes_back is not None and self.has_split else None

    def begin_parts(self, parameters: Iterable[torch.Tensor], *, are_led: bool) -> None:
        """Its first part is about to run, or its parts run once more, led by what the whole decides. In a trace a batch is refused: the next plan is made without."""
        parameters = list(parameters)
        may_be = self._take_back is not None and not are_led and has_values(*parameters)
        self._random = TorchRandom.now() if may_be else None
        self._gradients = _gradients_of(parameters) if may_be else []

    def begin_backward(self) -> None:
        """The backward pass of a part is about to run."""
        self._random = None
        self._gradients.clear()

    def may_run(self, error: ApplyError, parameters: Iterable[torch.Tensor], put_back: Callable[[], str]) -> bool:
        """Whether the batch runs whole, although `error` says that it cannot be split; `put_back` is that of the proofs."""
        is_own = error.technique in ("", "micro_batches")
        if not is_own or self._take_back is None or self._random is None:
            return False
        # A forward may run a backward pass of its own.
        if not all(map(_is_same, self._gradients, _gradients_of(parameters))) or put_back():
            return False
        self._random.put()
        self._take_back(str(error))
        return True


def _gradients_of(parameters: Iterable[torch.Tensor]) -> list[_Gradient]:
    """The gradient of each, and how often it was written to."""
    with torch._C.DisableTorchFunctionSubclass():
        gradients = [parameter.grad for parameter in parameters]
        return [(g, -1 if g is None or g.is_inference() else g._version) for g in gradients]


def _is_same(one: _Gradient, other: _Gradient) -> bool:
    return one[0] is other[0] and one[1] == other[1]
