"""What is done to attention scores before their softmax, masks and biases, and what a fused kernel takes for it where that means the same.

Scores that are filled with a number, or have one added, are no more than weights of zero as long as their row has others. In a row that is
masked whole, the numbers decide: a softmax of equal ones is even, one of minus infinities is no number, and kernels give zeros, or wrong
gradients, for both. So every row is looked at, in every call.
"""

import dataclasses
import functools
import operator

import torch

from tightfit.effects.fingerprints import paused
from tightfit.effects.value_checks import has_values

# In place of scores, so low that nothing is left of them after a softmax; what is written instead of minus infinity.
_NEARLY_MINUS_INFINITY = -1e9
# A bias within this leaves the scores that it is added to their digits.
_LARGEST_BIAS = 1e3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """`value` in place of the scores where `hidden` is True."""

    hidden: torch.Tensor
    value: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Fills and tensors that are added, in the order in which they were written."""

    steps: tuple[Fill | torch.Tensor, ...] = ()

    def then(self, step: Fill | torch.Tensor) -> "Masks":
        """These and one more."""
        return Masks(steps=(*self.steps, step))

    @property
    def has_numbers(self) -> bool:
        """Whether scaling the scores later is not the same as scaling them before: something finite is in their place, or added."""
        return any(not isinstance(step, Fill) or step.value != float("-inf") for step in self.steps)

    def for_kernel(
        self, query: torch.Tensor, arithmetic: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The query and the mask with which a kernel gives what the scores would, in `arithmetic`; None where none does.

        The mask is True where a score counts, or it is what is added.
        """
        if not self.steps:
            return query, None
        fills = [step for step in self.steps if isinstance(step, Fill)]
        biases = [step for step in self.steps if not isinstance(step, Fill)]
        hidden = functools.reduce(operator.or_, [fill.hidden for fill in fills]) if fills else None
        values = {fill.value for fill in fills}
        if hidden is not None and not biases and len(values) == 1 and values != {float("-inf")}:
            # A row that is masked whole is even, whatever its scores, and none of them gets a gradient: as those of a query of zeros.
            is_whole = hidden.all(-1, keepdim=True)
            return query.masked_fill(is_whole, 0.0), ~hidden | is_whole
        if not _is_each_row_seen(query, hidden, biases):
            return None
        if not biases:
            return query, None if hidden is None else ~hidden
        bias = functools.reduce(operator.add, biases)
        # The lowest number of a wider type would become minus infinity.
        bias = bias if bias.dtype == arithmetic else bias.clamp(min=torch.finfo(arithmetic).min).to(arithmetic)
        return query, bias if hidden is None else bias.masked_fill(hidden, float("-inf"))


def is_low(value: float, dtype: torch.dtype) -> bool:
    """Whether nothing is left, after a softmax, of scores of this type that have become `value`."""
    return value <= max(_NEARLY_MINUS_INFINITY, torch.finfo(dtype).min)


def _is_each_row_seen(query: torch.Tensor, hidden: torch.Tensor | None, biases: list[torch.Tensor]) -> bool:
    """Whether each row has a score that is not hidden and to which little is added, so that all that is hidden weighs nothing."""
    if not has_values(query):
        return True
    if query.is_cuda and torch.cuda.is_current_stream_capturing():
        return False
    # A look at values is no part of a run that is compared with another one of the same code.
    with paused(), torch.no_grad():
        if hidden is not None and not hidden.numel():
            return False
        if not biases:
            return hidden is None or not bool(hidden.all(-1).any())
        if not all(bias.numel() for bias in biases):
            return False
        found = [bias.amax() <= _LARGEST_BIAS for bias in biases]
        added = functools.reduce(operator.add, [bias.detach() for bias in biases])
        added = added if hidden is None else added.masked_fill(hidden, float("-inf"))
        # Asked so that what is no number is not seen.
        found.append((added.amax(-1) >= -_LARGEST_BIAS).all())
        return bool(torch.stack(found).all())
