"""Deferred logits: a tensor subclass that knows its shape, and the hidden states and weight that it would be computed from.

A cross-entropy takes these and works in chunks. Operators that keep each token's logits together (slices of the leading dimensions, views, a
transposition, a cast, a scale, a tanh) are recorded; any other operator first materialises the logits as the plain model does, with their
autograd graph. So other code sees an ordinary tensor.
"""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import torch
from torch.autograd import grad  # torch's own, whatever the program puts in its place later
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from tightfit.capture.observe.host_python import spends
from tightfit.cost.host_python import HostWork
from tightfit.effects.ambient import Ambient
from tightfit.effects.dispatched import dispatched
from tightfit.effects.values.contents import versions_and_contents
from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.asked_gradients import DeferredTensor, is_read_of_node, refuse_lost_gradients
from tightfit.techniques.lazy_tensors.deferral import FACTS, changes, fact, name_of
from tightfit.techniques.lazy_tensors.lazy_tensor import written_by
from tightfit.techniques.loss_head.chunked_cross_entropy import (
    Cast,
    ChunkedCrossEntropy,
    Loss,
)
from tightfit.techniques.loss_head.logit_forms import Form
from tightfit.techniques.loss_head.loss_checks import sample_differs
from tightfit.techniques.loss_head.loss_options import GradientsIn
from tightfit.techniques.wrappers.first_order import Refuse, first_order


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunks:
    """The number of chunks, and the pass in which gradients are computed."""

    num_chunks: int
    gradients_in: GradientsIn


class WeightCopies:
    """Copies of weights from before an optimizer step, one for each weight."""

    def __init__(self) -> None:
        self._copies: dict[int, torch.Tensor] = {}

    def of(self, weight: torch.Tensor) -> torch.Tensor:
        """The copy of `weight`."""
        if id(weight) not in self._copies:
            self._copies[id(weight)] = weight.detach().clone()
        return self._copies[id(weight)]


class Origin:
    """One call of a head: its hidden states and weight, and the logits once they are materialised."""

    def __init__(
        self,
        linear: torch.nn.Linear,
        hidden: torch.Tensor,
        chunks: Chunks,
        counted: Callable[[str], None],
        refuse: Refuse = ApplyError,
        *,
        is_checked: bool = False,
    ) -> None:
        self.refuse = refuse
        self.is_checked = is_checked
        self.hidden = hidden
        self.parameter = linear.weight
        self.weight: torch.Tensor = linear.weight
        self.bias: torch.Tensor | None = linear.bias
        self.num_classes = len(linear.weight)
        """The size of the vocabulary."""
        self.chunks = chunks
        self.counted = counted
        device = hidden.device.type
        self.autocasts_to = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        self.settings = Ambient.now()
        self.type: torch.dtype = self.autocasts_to or torch.promote_types(hidden.dtype, linear.weight.dtype)
        self.whole: torch.Tensor | None = None
        self.has_loss = False
        self._then: Any = _read(self)
        self._is_of_the_past = False
        self._family: list[weakref.ref[DeferredLogits]] = []

    def join(self, member: "DeferredLogits") -> None:
        """Registers a tensor that is derived from these logits, so that it is materialised before they are changed in place."""
        self._family.append(weakref.ref(member))

    def check(self) -> None:
        """Checks that the logits can still be computed as of the head's call.

        Raises:
            ApplyError: the hidden states or the weight were changed since, and not by an optimizer of the session.
        """
        if not self._is_as_it_was:
            raise self.refuse(
                "the logits of an earlier step are read after the next step has begun, or after the head's weight or bias was changed by "
                "hand; read them before that, or leave the technique chunked_loss out"
            )

    def before_gradient(self) -> None:
        """Somebody is about to ask for the gradient with respect to these logits.

        Raises:
            ApplyError: a loss in chunks was made of them, whose gradient does not go through them.
        """
        if self.has_loss:
            raise self.refuse(
                "the program asks for the gradient of logits (a hook, retain_grad, autograd.grad) after their loss "
                "was computed in chunks; plan without it: tightfit plan --without chunked_loss"
            )

    @property
    def _is_as_it_was(self) -> bool:
        return _read(self) == self._then

    def logits(self) -> torch.Tensor:
        """The logits of the head with their graph, computed once."""
        if self.whole is None:
            self.check()
            self.counted("logits computed whole")
            with torch.enable_grad(), self.arithmetic():
                self.whole = functional.linear(self.hidden, self.weight, self.bias)
        return self.whole

    def values(self) -> torch.Tensor:
        """The values of the logits, not cached."""
        if self.whole is not None:
            return self.whole.detach()
        self.check()
        self.counted("logits computed whole")
        with torch.no_grad(), self.arithmetic():
            return functional.linear(self.hidden, self.weight, self.bias)

    def settle_family(self) -> None:
        """Materialises every tensor derived from these logits, as one of them is about to be changed in place."""
        for reference in self._family:
            member = reference()
            if member is not None:
                member.settled()

    def before_weight_changes(self, copies: WeightCopies) -> None:
        """Materialises the logits before the weight changes, or copies the weight if that is smaller."""
        if self.whole is not None or self._is_of_the_past or not self._is_as_it_was:
            return
        num_tokens = self.hidden.numel() // self.hidden.shape[-1]
        if num_tokens * self.type.itemsize < self.hidden.shape[-1] * self.weight.itemsize:
            self.logits()
        else:
            # Detached from the parameter: logits read after the step are those of the step's weight, as in the
            # plain program. A copy that outlived the next call was itself part of the next peak (docs/log.md,
            # "Loss heads in chunks").
            self._is_of_the_past = True
            self.weight, self.bias = copies.of(self.weight), self.bias if self.bias is None else copies.of(self.bias)
            self._then = _read(self)

    def when_called_again(self) -> None:
        """Drops the copy of an earlier weight: its logits are those of an earlier step."""
        if self._is_of_the_past and self.whole is None:
            self.weight, self.bias, self._then = self.parameter, None, None

    @contextlib.contextmanager
    def arithmetic(self) -> Iterator[None]:
        """The autocast that the head was called under, and its other settings."""
        cast = torch.autocast(self.hidden.device.type, dtype=self.autocasts_to, enabled=self.autocasts_to is not None)
        with contextlib.nullcontext() if self.settings.rounds_as_now() else self.settings.put_back(), cast:
            yield


def _read(origin: Origin) -> Any:
    return versions_and_contents((origin.weight, origin.bias, origin.hidden))


class _Defer(torch.autograd.Function):
    """Makes the deferred tensor a node of the graph, for code that passes it to autograd without any operator."""

    @staticmethod
    def forward(
        ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, origin: Origin, form: Form
    ) -> "DeferredLogits":
        ctx.origin, ctx.form, ctx.refuse, ctx.before_gradient = origin, form, origin.refuse, origin.before_gradient
        return DeferredLogits.of(origin, form)

    @staticmethod
    @first_order("chunked_loss", "; leave chunked_loss out of the plan")
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        origin: Origin = ctx.origin
        inputs = [origin.hidden, origin.weight] + ([] if origin.bias is None else [origin.bias])
        leaves = [part.detach().requires_grad_(part.requires_grad) for part in inputs]
        with torch.enable_grad():
            with origin.arithmetic():
                logits = functional.linear(*leaves)
            out = ctx.form.replayed(logits)
        wanted = [leaf for leaf in leaves if leaf.requires_grad]
        found = iter(grad(out, wanted, grad_outputs))
        gradients = [next(found) if leaf.requires_grad else None for leaf in leaves]
        return *gradients, *([None] * (5 - len(gradients)))


class DeferredLogits(DeferredTensor):
    """Logits of a head, or a tensor derived from them, without data."""

    _origin: Origin
    _form: Form
    _settled: torch.Tensor | None

    def before_gradient(self) -> None:
        self._origin.before_gradient()

    @classmethod
    def of(cls, origin: Origin, form: Form) -> Self:
        """The tensor of `form`, without a graph."""
        meta = form.meta
        out = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=form.hidden.device
        )
        out._origin = origin
        out._form = form
        out._settled = None
        origin.join(out)
        return out

    def settled(self) -> torch.Tensor:
        """The materialised tensor, computed once."""
        if self._settled is None:
            logits = self._origin.logits()
            with torch.set_grad_enabled(fact(torch.Tensor.requires_grad.__get__, self)):  # pyrefly: ignore
                self._settled = self._form.replayed(logits)
        return self._settled

    def values(self) -> torch.Tensor:
        """The values alone, without a graph; computed for this call unless the tensor is materialised already."""
        if self._settled is not None:
            return self._settled.detach()
        with torch.no_grad():
            return self._form.replayed(self._origin.values())

    # A compiled function's graph may break at the loss: the compiler would then look through all that is called for it here.
    @torch._disable_dynamo
    def _without_values(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> torch.Tensor | None:
        """The loss, or logits that are still deferred; None if `func` needs the logits."""
        if name_of(func) == "cross_entropy":
            return _loss(self._origin, self._form, *args, **kwargs)
        form = self._form.after(func, args, kwargs)
        return None if form is None else _deferred(self._origin, form)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = dispatched(func)
        rest = dict(kwargs or {})
        name = name_of(func)
        refuse_lost_gradients(func, args, rest)
        first, *others = args if args else (rest.pop("input", None),)
        if isinstance(first, DeferredLogits) and first._settled is None:
            if name in FACTS and not is_read_of_node(func):
                return fact(func, first, *others, **rest)
            if first._origin.whole is None:
                if name in _ONLY_READ:
                    return func(first.values(), *others, **rest)
                out = first._without_values(func, others, rest)
                if out is not None:
                    return out
        # Tensors derived from these logits may be views of them in the plain program, and would see the write.
        if changes(name, rest):
            for member in tree_leaves((args, kwargs)):
                if isinstance(member, DeferredLogits):
                    member._origin.settle_family()
        args, kwargs = tree_map_only(DeferredLogits, lambda member: member.settled(), (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # pyrefly: ignore[bad-override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        # What comes here past `__torch_function__` (`set_`) would write to values that nobody keeps.
        for member in written_by(func, args, kwargs or {}):
            if isinstance(member, DeferredLogits):
                raise member._origin.refuse(
                    f"logits that are not materialised are modified in place by {func}; clone them first, or plan "
                    "without it: tightfit plan --without chunked_loss"
                )
        # Below autograd only values are needed: `_Defer` is the node of the graph.
        args, kwargs = tree_map_only(DeferredLogits, lambda member: member.values(), (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def deferred_logits(origin: Origin) -> DeferredLogits:
    """The deferred logits of `origin`, shape `(..., V)`."""
    shape = (*origin.hidden.shape[:-1], origin.num_classes)
    meta = torch.empty(shape, dtype=origin.type, device="meta")
    form = Form(steps=(), hidden=origin.hidden, pointwise=(), vocabulary=len(shape) - 1, meta=meta)
    return _deferred(origin, form)


def _deferred(origin: Origin, form: Form) -> DeferredLogits:
    out = _Defer.apply(origin.hidden, origin.weight, origin.bias, origin, form)
    assert isinstance(out, DeferredLogits)
    return out


def _loss(
    origin: Origin,
    form: Form,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """The cross-entropy in chunks; None if it is not one of class indices without class weights."""
    rest = [size for dimension, size in enumerate(form.meta.shape) if dimension != 1]
    # cross_entropy takes (N, C) and (N, C, d1, ...): the classes are dimension 1.
    is_ours = form.vocabulary == 1 and weight is None and size_average is None and reduce is None
    if not is_ours or target.dtype != torch.int64 or list(target.shape) != rest or not target.numel():
        return None
    spends(HostWork.CHUNKED_LOSS)
    origin.check()
    origin.has_loss = True
    hidden = form.hidden.movedim(1, -1).reshape(-1, form.hidden.shape[1])
    trained = [t for t in (hidden, origin.weight, origin.bias) if t is not None and t.requires_grad]
    wants_gradients = torch.is_grad_enabled() and bool(trained)
    pointwise = form.pointwise
    # cross_entropy is on autocast's list of operators that run in float32.
    if torch.is_autocast_enabled(hidden.device.type) and form.meta.dtype in (torch.float16, torch.bfloat16):
        pointwise = (*pointwise, Cast(source=form.meta.dtype, target=torch.float32))
    # One factor per token cannot be multiplied in any more once the gradient of the weight has been summed over them.
    gradients_in = "backward" if reduction == "none" else origin.chunks.gradients_in
    loss = Loss(
        head_type=origin.type,
        num_classes=origin.num_classes,
        pointwise=pointwise,
        reduction=reduction,
        ignore_index=ignore_index,
        label_smoothing=label_smoothing,
        num_chunks=origin.chunks.num_chunks,
        gradients_in=gradients_in if wants_gradients else None,
        head=origin.settings,
        refuse=origin.refuse,
    )
    origin.counted("losses in chunks")
    if origin.is_checked and wants_gradients:
        told = sample_differs(hidden, origin.weight, origin.bias, target.reshape(-1), loss)
        if told:
            raise origin.refuse(
                f"{told}, computed in chunks, differs from the plain one; plan without it: tightfit plan --without "
                "chunked_loss"
            )
    out = ChunkedCrossEntropy.apply(hidden, origin.bias, origin.weight, target.reshape(-1), loss)
    assert isinstance(out, torch.Tensor)
    return out.reshape(target.shape) if reduction == "none" else out


# Operators whose result has no gradient: the logits are computed for them and freed.
_ONLY_READ = frozenset({"argmax"})
