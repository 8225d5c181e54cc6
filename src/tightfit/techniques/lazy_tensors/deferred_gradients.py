"""Gradients that are not kept: what stands on `p.grad` in place of one, answers what is known of it, and has it made again for whoever reads more.

Of a gradient its 2-norm is kept, and what it was multiplied by since: so clipping by norm works as it is written, with `clip_grad_norm_`, with
`get_total_norm` and `clip_grads_with_norm_`, or by hand. Any other operator makes the gradients of that backward pass again, all of them, while
that is possible; of a gradient that an update has used up, it is an error.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.lazy_tensor import NOT_ANSWERED, AbstractSource, ElementsNeeded, LazyTensor

State = Literal["deferred", "made", "zero", "used"]

_aten = torch.ops.aten
_SCALING = frozenset({_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar})


@final
class Deferred(AbstractSource):
    """A gradient of the shape, strides, type and device of `like`. `make_all` makes those of its backward pass again; `refuse` gives the error for
    who reads one that is used up.

    States: deferred (it can be made again), made (it is there), zero (it was filled with zeros), used (an update has used it up).
    """

    def __init__(
        self,
        like: torch.Tensor,
        norm: torch.Tensor | None = None,
        make_all: Callable[[], None] = lambda: None,
        refuse: Callable[[str], ApplyError] = ApplyError,
    ) -> None:
        self.state: State = "deferred"
        self.norm = norm
        self.was_asked = False
        self.changes: list[tuple[Any, Any]] = []
        self._form = (tuple(like.shape), like.stride(), like.dtype, like.device)
        self._made: torch.Tensor | None = None
        self._make_all = make_all
        self._refuse = refuse
        self._why_used = ""

    @classmethod
    def zeros(cls, like: torch.Tensor) -> "Deferred":
        """A gradient of zeros, which takes no memory until somebody asks for it."""
        made = cls(like)
        made.state = "zero"
        return made

    def put(self, parameter: torch.Tensor) -> None:
        """Has this stand on `parameter` in place of the gradient that is there."""
        assert parameter.grad is not None
        parameter.grad = LazyTensor(self, parameter.grad)

    def whole(self) -> torch.Tensor:
        self.was_asked = True
        if self._made is not None:
            return self._made
        if self.state == "zero":
            shape, stride, dtype, device = self._form
            self.is_made(torch.empty_strided(shape, stride, dtype=dtype, device=device).zero_())
            return self.whole()
        if self.state == "used":
            raise self._refuse(f"a gradient is read {self._why_used}")
        raise ElementsNeeded(self)

    def held(self) -> Sequence[torch.Tensor]:
        return () if self._made is None else (self._made,)

    def form_is_read(self) -> None:
        # A step looks at whether a gradient is sparse before it changes anything. One that is not of this session must find it made by then.
        if self.state == "deferred":
            self.make()

    def make(self) -> None:
        self._make_all()
        if self._made is None:
            raise self._refuse("a gradient is read whose backward pass is gone")

    def changed(self, gradient: torch.Tensor) -> torch.Tensor:
        """`gradient`, the one that this stands for, after what was done to it since, in place."""
        for operator, other in self.changes:
            operator(gradient, other)
        return gradient

    def is_made(self, gradient: torch.Tensor) -> None:
        """The gradient is there now, with the changes made to it."""
        self.state, self._made, self.norm = "made", gradient, None
        self.changes.clear()

    def is_zero(self) -> None:
        """The gradient was filled with zeros."""
        self.state, self.norm, self._made = "zero", None, None
        self.changes.clear()

    def is_used(self, why: str, norm: torch.Tensor | None = None) -> None:
        """The gradient is gone for good; `why` ends the sentence of the error, `norm` is what is still known of it."""
        self.state, self.norm, self._made, self._why_used = "used", norm, None, why
        self.was_asked = False
        self.changes.clear()

    def answers(self, operator: Any, others: Sequence[Any]) -> bool:
        if self._made is not None:
            return False
        if operator is _aten.zero_.default:
            return True
        if operator is _aten.linalg_vector_norm.default:
            return self.norm is not None and not self.changes and _is_two_norm(*others)
        return operator in _SCALING and self.state == "deferred" and len(others) == 1 and _is_number(others[0])

    def answer(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if operator is _aten._to_copy.default and self.state == "used":
            # A model that is cast or moved takes along what its script has still to clear.
            return LazyTensor(self, args[0], dtype=kwargs.get("dtype"), device=kwargs.get("device"))  # pyrefly: ignore[unexpected-keyword]
        if kwargs or not self.answers(operator, args[1:]):
            return NOT_ANSWERED
        if operator is _aten.zero_.default:
            self.is_zero()
            return args[0]
        self.was_asked = True  # whatever was asked, an update at once would have changed the answer
        if operator in _SCALING:
            # The script may write to what it multiplied by.
            other = args[1].detach().clone() if isinstance(args[1], torch.Tensor) else args[1]
            self.changes.append((operator, other))
            return args[0]
        assert self.norm is not None
        return self.norm.clone()


def deferred_gradient(parameter: torch.Tensor) -> Deferred | None:
    """What stands on a parameter in place of its gradient; None where a tensor or nothing is there."""
    gradient = parameter.grad
    if isinstance(gradient, LazyTensor) and isinstance(gradient.source, Deferred):
        return gradient.source
    return None


def settle(parameter: torch.Tensor) -> None:
    """Puts the tensor itself on a parameter where somebody has had a gradient made, which all aliases share."""
    deferred = deferred_gradient(parameter)
    if deferred is not None and deferred.state == "made":
        parameter.grad = deferred.whole()


def _is_two_norm(order: Any = 2, dim: Any = None, keepdim: bool = False) -> bool:
    return order == 2 and dim is None and not keepdim


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
