"""Lazy gradients on `p.grad`: they answer norms and scalings without their elements, and recompute these for other reads.

Of a gradient its 2-norm is kept, and the factors it was multiplied by since: so clipping by norm works as written, with `clip_grad_norm_`, with
`get_total_norm` and `clip_grads_with_norm_`, or by hand. Any other operator recomputes all gradients of that backward pass, as long as that is
possible; for a gradient that an update has consumed, it raises an error.
"""

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Literal, final

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.lazy_tensor import (
    NOT_ANSWERED,
    AbstractElementSource,
    ElementsNeeded,
    LazyTensor,
    carry_attributes,
)
from tightfit.torch_hooks.manifest import TENSOR_USES

REMEDY = "leave updates in the backward pass out of the plan"

State = Literal["deferred", "made", "zero", "used"]


def _references_by_name() -> int:
    """How many references `sys.getrefcount` sees of a name that it is called with: Python 3.14 hands on a name without one of its own."""
    named = object()
    return sys.getrefcount(named)


# References to a gradient that only its parameter keeps, while `is_held` runs: the parameter, the caller's name, and its own.
_OWN_REFERENCES = 2 + _references_by_name()
# And of the gradient in C++: the parameter's and Python's. What exports it without a copy (DLPack) is one more.
_OWN_HANDLES = 2

_aten = torch.ops.aten
# The in-place operators of `clip_grads_with_norm_` and of loops that divide by a world size or a loss scale;
# recorded, since a factor changes the norm by itself.
_SCALING = frozenset({_aten.mul_.Tensor, _aten.mul_.Scalar, _aten.div_.Tensor, _aten.div_.Scalar})


@final
class Deferred(AbstractElementSource):
    """A gradient of the shape, strides, dtype and device of `like`. `make_all` recomputes those of its backward pass; `refuse` makes the error for
    reads of a consumed one.

    States: deferred (it can be recomputed), made (it is materialised), zero (it was filled with zeros), used (an update has consumed it).
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
        """Operators that have changed it in place, each with its other operand; they are applied to the recomputed one."""
        self._form = (tuple(like.shape), like.stride(), like.dtype, like.device)
        self._made: torch.Tensor | None = None
        self._make_all = make_all
        self._refuse = refuse
        # torch takes ordinary gradients all at once (`_foreach_norm`), these one by one.
        self.refused_in_modes = lambda: refuse("a mode of the program sees the operators on gradients, and these "
            "differ where gradients are not kept")  # fmt: skip
        self._why_used = ""
        self.is_lost = False
        """Whether its backward pass is gone: it was consumed by nothing."""
        self._aliases: list[weakref.ref[LazyTensor]] = []
        self.on_parameters: list[weakref.ref[LazyTensor]] = []
        """Those that are or were the gradient of a parameter: an update puts another one in the place of the one before."""

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
        # Not here: inside of an operator autograd cannot run. `LazyTensor.__torch_function__` catches this,
        # runs the pass, and calls the operator again.
        raise ElementsNeeded(self)

    def held(self) -> Sequence[torch.Tensor]:
        return () if self._made is None else (self._made,)

    def alias(self, tensor: LazyTensor) -> LazyTensor:
        self._aliases = [each for each in self._aliases if each() is not None]
        self._aliases.append(weakref.ref(tensor))
        return tensor

    def sets_data(self, tensor: LazyTensor, value: torch.Tensor) -> bool:
        aliases = [alias for each in self._aliases if (alias := each()) is not None]
        if self._made is None or any(alias is tensor for alias in aliases):
            # Of the same memory as `value`, to which the program may write later.
            tensor.source = _made_of(value, self._refuse)
            return True
        # It stands for the gradient of its parameter, which is there by now; aliases go on with what that was.
        before = _made_of(self._made.detach(), self._refuse)
        for alias in aliases:
            alias.source = before
        self._made.data = value
        return True

    def form_is_read(self) -> None:
        # A step looks at whether a gradient is sparse before it changes anything. One that is not of this session must find it made by then.
        if self.state == "deferred":
            self.make()
        elif self.state == "used" and self.is_lost:
            self.whole()

    def make(self) -> None:
        self._make_all()
        if self._made is None:
            raise self._refuse(
                "a gradient is read after its graph was freed (it was cleared or replaced on its parameter, or the "
                f"plan was removed); read it earlier, clone it, or {REMEDY}"
            )

    def is_made(self, gradient: torch.Tensor) -> None:
        """Sets the materialised gradient, with the changes applied."""
        self.state, self._made, self.norm = "made", gradient, None
        self.changes.clear()

    def is_used(self, why: str, norm: torch.Tensor | None = None, *, is_lost: bool = False) -> None:
        """Marks the gradient as consumed; `why` ends the error message, `norm` is its 2-norm if it is still known. `is_lost`: by nothing, so that an optimizer is
        told before it writes to anything."""
        self.state, self.norm, self._made, self._why_used = "used", norm, None, why
        self.is_lost = is_lost
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
            self.state, self.norm, self._made = "zero", None, None
            self.changes.clear()
            return args[0]
        self.was_asked = True  # an update in the first pass would have changed this result
        if operator in _SCALING:
            # The script may write to the factor later.
            other = args[1].detach().clone() if isinstance(args[1], torch.Tensor) else args[1]
            self.changes.append((operator, other))
            return args[0]
        assert self.norm is not None
        return self.norm.clone()


def _made_of(value: torch.Tensor, refuse: Callable[[str], ApplyError]) -> Deferred:
    made = Deferred(value, refuse=refuse)
    made.is_made(value)
    return made


def deferred_zeros(like: torch.Tensor) -> Deferred:
    """A gradient of zeros, which takes no memory until its elements are read."""
    zeros = Deferred(like)
    zeros.state = "zero"
    return zeros


def defer_gradient(parameter: torch.Tensor, deferred: Deferred) -> None:
    """Replaces the gradient of `parameter` by `deferred`."""
    assert parameter.grad is not None
    deferred.on_parameters = [each for each in deferred.on_parameters if each() is not None]
    parameter.grad = LazyTensor(deferred, parameter.grad)
    deferred.on_parameters.append(weakref.ref(parameter.grad))


def deferred_gradient(parameter: torch.Tensor) -> Deferred | None:
    """The lazy gradient of a parameter; None if it has an ordinary one or none."""
    gradient = parameter.grad
    if isinstance(gradient, LazyTensor) and isinstance(gradient.source, Deferred):
        return gradient.source
    return None


def settle(parameter: torch.Tensor) -> None:
    """Replaces a lazy gradient that was materialised by the tensor itself, which all aliases share."""
    deferred = deferred_gradient(parameter)
    if deferred is not None and deferred.state == "made":
        standing, parameter.grad = parameter.grad, deferred.whole()
        carry_attributes(standing, parameter.grad)


def settle_zeros(parameter: torch.Tensor) -> None:
    """Replaces a lazy gradient of zeros by an ordinary one."""
    deferred = deferred_gradient(parameter)
    if deferred is not None and deferred.state == "zero":
        deferred.whole()
        settle(parameter)


def settle_held_zeros(parameter: torch.Tensor) -> None:
    """Materialises a lazy gradient of zeros that the program, or another parameter, refers to as well: a backward pass adds to that memory."""
    deferred = deferred_gradient(parameter)
    if deferred is None or deferred.state != "zero":
        return
    gradient = parameter.grad
    if is_held(parameter) or any(
        _is_beside(each(), gradient) for each in (*deferred._aliases, *deferred.on_parameters)
    ):
        settle_zeros(parameter)


def add_to_zeros(parameter: torch.Tensor) -> None:
    """Has the gradient that has just come be what an addition to zeros would leave: dense, and without negative zeros."""
    gradient = parameter.grad
    if gradient is None:
        return
    with torch.no_grad():
        if gradient.layout == torch.strided and not (gradient.is_conj() or gradient.is_neg()):
            gradient.add_(0.0)
        else:
            parameter.grad = torch.zeros_like(parameter).add_(gradient)


def _is_beside(alias: torch.Tensor | None, gradient: torch.Tensor | None) -> bool:
    return alias is not None and alias is not gradient


def is_held(parameter: torch.Tensor) -> bool:
    """Whether anything but the parameter and the caller, which has one name for it, refers to its gradient.

    The gradient is not an argument, which has a reference of its own or not, by the release of Python.
    """
    gradient = parameter.grad
    assert gradient is not None
    return TENSOR_USES.call(gradient) > _OWN_HANDLES or sys.getrefcount(gradient) > _OWN_REFERENCES


def _is_two_norm(order: Any = 2, dim: Any = None, keepdim: bool = False) -> bool:
    return order == 2 and dim is None and not keepdim


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) or (isinstance(value, torch.Tensor) and value.dim() == 0)
