"""Numbers that a loss over rows is divided by: the sum of a mask, what is made of it (`.clamp(min=1)`, `+ 1e-8`), and what it is for the whole batch.

Divided by its own part's sum, the loss of a part is a mean with as many terms as the sum says; of the whole batch the sums add up, and what is made of them is made once more.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# Functions of one number, and of plain numbers besides.
_PURE = frozenset(
    ["clamp", "clamp_min", "clamp_max", "add", "__add__", "__radd__", "mul", "__mul__", "__rmul__", "sub", "__sub__"]
)
_CASTS = frozenset(["to", "float", "double", "half", "bfloat16", "type_as", "type", "detach", "clone"])
_DIVIDES = frozenset(["div", "__truediv__", "true_divide", "divide"])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Divisor:
    """A number that is made of the sum `base` in `steps`."""

    value: torch.Tensor
    base: torch.Tensor
    steps: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = ()

    def of(self, total: torch.Tensor) -> torch.Tensor:
        """The number for another sum."""
        for step in self.steps:
            total = step(total)
        return total

    def then(self, value: torch.Tensor, step: Callable[[torch.Tensor], torch.Tensor]) -> "Divisor":
        """What is made of it by one more step."""
        return Divisor(value=value, base=self.base, steps=(*self.steps, step))

    @torch.no_grad()
    def is_as_made(self) -> bool:
        """Whether nobody has written to it since."""
        return bool(torch.equal(self.of(self.base), self.value))


class Divisors:
    """Those of one run."""

    def __init__(self) -> None:
        # By identity: the tensors are kept for as long.
        self._known: dict[int, Divisor] = {}

    def look(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], result: Any
    ) -> Divisor | None:
        """Follows one call. Returns what a number was divided by, if the call has done that."""
        if not isinstance(result, torch.Tensor) or result.dim():
            return None
        name = getattr(func, "__name__", "")
        if name == "sum":
            if not result.requires_grad:
                self._known[id(result)] = Divisor(value=result, base=result)
            return None
        known = [each for each in args if isinstance(each, torch.Tensor) and id(each) in self._known]
        if not known:
            return None
        if name in _DIVIDES:
            is_quotient = len(args) > 1 and isinstance(args[0], torch.Tensor) and not args[0].dim() and not kwargs
            return self._known.get(id(args[1])) if is_quotient else None
        others = [each for each in (*args, *kwargs.values()) if each is not known[0]]
        if result is known[0]:
            return None
        if name in _CASTS:
            dtype = result.dtype
            self._known[id(result)] = self._known[id(known[0])].then(result, lambda total: total.to(dtype))
        elif name in _PURE and all(isinstance(each, int | float | None) for each in others):
            at = next(number for number, each in enumerate(args) if each is known[0])

            def again(total: torch.Tensor) -> torch.Tensor:
                return func(*args[:at], total, *args[at + 1 :], **kwargs)

            self._known[id(result)] = self._known[id(known[0])].then(result, again)
        return None
