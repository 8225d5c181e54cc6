"""Masks and biases of attention scores, and their equivalent for a fused kernel.

Scores that are masked by a low number have weight zero as long as their row has others. In a row that is masked completely, the numbers matter: a
softmax of equal scores is uniform, one of minus infinities is NaN, and kernels return zeros, or wrong gradients, for both. So every row is
checked, in every call.
"""

import dataclasses
import functools
import operator

import torch

from tightfit.effects.values.fingerprints import paused
from tightfit.effects.values.value_checks import has_values

# Scores at or below this have weight zero after a softmax; models use it instead of minus infinity.
_NEARLY_MINUS_INFINITY = -1e9
# A bias within this leaves the scores that it is added to their digits.
_LARGEST_BIAS = 1e3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fill:
    """Replaces the scores by `value` where `hidden` is True."""

    hidden: torch.Tensor
    value: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Masks:
    """Fills and additive biases, in the order of the program."""

    steps: tuple[Fill | torch.Tensor, ...] = ()

    def then(self, step: Fill | torch.Tensor) -> "Masks":
        """These masks and one more."""
        return Masks(steps=(*self.steps, step))

    @property
    def has_numbers(self) -> bool:
        """Whether scaling the scores afterwards differs from scaling them before: finite numbers were filled in or added."""
        return any(not isinstance(step, Fill) or step.value != float("-inf") for step in self.steps)

    def for_kernel(
        self, query: torch.Tensor, arithmetic: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None] | None:
        """The query and the mask with which a kernel gives the same result as the scores, in `arithmetic`; None if there are none.

        The mask is boolean, True where a score counts, or an additive bias.
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
    """Whether scores of this dtype that were set to `value` have weight zero after a softmax."""
    return value <= max(_NEARLY_MINUS_INFINITY, torch.finfo(dtype).min)


def _is_each_row_seen(query: torch.Tensor, hidden: torch.Tensor | None, biases: list[torch.Tensor]) -> bool:
    """Whether each row has a score that is not masked and whose bias is small, so that masked scores have weight zero."""
    if not has_values(query):
        return True
    # Reading a value back would end the capture of a CUDA graph with an error.
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
        # Compared this way round, NaN counts as masked.
        found.append((added.amax(-1) >= -_LARGEST_BIAS).all())
        return bool(torch.stack(found).all())
