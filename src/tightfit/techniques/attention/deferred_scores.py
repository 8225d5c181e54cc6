"""Deferred attention scores: a tensor subclass that records the queries and keys that it would be computed from.

Operators that models apply between the two products of an attention (a scale, masks, a softmax, casts, a dropout with rate 0) are recorded; the
second product then becomes one call of `scaled_dot_product_attention`, which never holds scores of length squared. Any other operator first
materialises the scores by replaying the recorded calls, with their autograd graph.
"""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeAlias

import torch
from torch.autograd import grad  # torch's own, whatever the program puts in its place later
from torch.nn import functional
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tightfit.effects.dispatched import dispatched
from tightfit.effects.values.contents import versions_and_contents
from tightfit.errors import ApplyError
from tightfit.techniques.attention.attention_masks import Fill, Masks, is_low
from tightfit.techniques.attention.score_products import apply_weights, scores_of
from tightfit.techniques.lazy_tensors.asked_gradients import DeferredTensor, is_read_of_node, refuse_lost_gradients
from tightfit.techniques.lazy_tensors.deferral import FACTS, fact, name_of
from tightfit.techniques.lazy_tensors.lazy_tensor import written_by
from tightfit.techniques.wrappers.first_order import Refuse, first_order

_Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...], Mapping[str, Any]]
Reads: TypeAlias = Callable[[torch.Tensor, Sequence[torch.Tensor]], None]


class _Scores:
    """Placeholder in a recorded call for the scores of the previous call."""


_SCORES = _Scores()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedAttention:
    """The recorded `calls`, each on the result of the one before, and their meaning for one attention call.

    `query` and `key` have shape `(..., T, D)` and `(..., S, D)`. `masks` are applied to the scaled scores. `meta` has the shape, strides and
    dtype of the result.
    """

    calls: tuple[_Call, ...]
    query: torch.Tensor
    key: torch.Tensor
    meta: torch.Tensor
    scale: float = 1.0
    masks: Masks = Masks()
    is_softmax: bool = False
    refuse: Refuse = ApplyError
    # Told the result of a kernel, and what that reads again in its backward pass: the masks and biases of the calls.
    reads: Reads = lambda _, __: None
    versions: tuple[Any, ...] = ()
    # The results of kernels, of all that comes from the same scores.
    results: list[None] = dataclasses.field(default_factory=list, compare=False)

    def before_gradient(self) -> None:
        """As `DeferredTensor.before_gradient`."""
        if self.results:
            raise self.refuse(
                "the program asks for the gradient of attention scores or weights (a hook, retain_grad, "
                "autograd.grad) after they were used; plan without it: tightfit plan --without attention"
            )

    def check(self) -> None:
        """Checks that the tensors of the recorded calls have not changed.

        Raises:
            ApplyError: one was written to since, such as a mask that the program keeps and changes.
        """
        if self.versions != versions_and_contents(self.tensors()):
            raise self.refuse(
                "attention scores are used after their queries, keys or mask were modified in place; leave the "
                "technique attention out: tightfit plan --without attention"
            )

    def tensors(self) -> list[torch.Tensor]:
        """All tensors among the arguments of the calls."""
        leaves = tree_leaves([(args, dict(kwargs)) for _, args, kwargs in self.calls])
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]

    def replayed(self, instead: Mapping[int, torch.Tensor] | None = None) -> torch.Tensor:
        """The result of running the recorded calls; with tensors replaced by those that `instead` has for their identities."""
        self.check()
        out: Any = None
        for func, args, kwargs in self.calls:
            given = tree_map_only(_Scores, lambda _, scores=out: scores, (args, dict(kwargs)))
            given = tree_map_only(torch.Tensor, lambda leaf: (instead or {}).get(id(leaf), leaf), given)
            out = func(*given[0], **given[1])
        return out

    def after(
        self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "RecordedAttention | None":
        """The record after a further call whose arguments have `_SCORES` for the scores; None if the scores must be materialised."""
        read = _WRITTEN_DOWN.get(name_of(func))
        changed = None if read is None else read(self, args, kwargs)
        if changed is None:
            return None
        meta = _on_meta(func, tree_map_only(_Scores, lambda _: self.meta, (args, kwargs)))
        if meta.shape != self.meta.shape:
            return None
        if name_of(func) == "softmax" and _autocast_type(self.query) is not None:
            # torch.amp runs softmax in float32 and returns that (its list "CUDA Ops that can autocast to
            # float32").
            meta = _on_meta(torch.Tensor.float, ((meta,), {}))  # what autocast makes of it
        is_narrower = torch.finfo(meta.dtype).max < torch.finfo(self.meta.dtype).max
        if is_narrower and not self.is_softmax and self.masks.has_numbers:
            return None  # large numbers become infinities
        after = dataclasses.replace(self, calls=(*self.calls, (func, args, kwargs)), meta=meta, **changed)
        return dataclasses.replace(
            after, versions=(*self.versions, *versions_and_contents(after.tensors())[len(self.versions) :])
        )

    def applied_to(self, value: torch.Tensor) -> torch.Tensor | None:
        """The attention output of shape `(..., T, D)` for `value`, `(..., S, D)`; None if one fused call cannot compute it."""
        fits = value.shape[:-2] == self.key.shape[:-2] and value.shape[-2] == self.key.shape[-2]
        arithmetic = _autocast_type(value)
        if not self.is_softmax or not fits or (arithmetic is None and value.dtype != self.key.dtype):
            return None
        self.check()
        taken = self.masks.for_kernel(self.query, arithmetic or self.query.dtype)
        if taken is None:
            return None
        (query, mask), key = taken, self.key
        mask = mask if mask is None else torch.atleast_2d(mask)
        # The kernels take four dimensions; (batch * heads, T, D), as `bmm` wants it, is a batch with one head.
        if query.dim() == 3:
            query, key, value = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
            mask = mask.unsqueeze(1) if mask is not None and mask.dim() == 3 else mask
        self.results.append(None)
        out = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=self.scale)
        given = (each for each in self.tensors() if each is not self.query and each is not self.key)
        self.reads(out, [each for each in given if each.grad_fn is None])
        return out.squeeze(1) if self.query.dim() == 3 else out


class _Defer(torch.autograd.Function):
    """Makes the deferred tensor a node of the graph, for code that passes it to autograd without any operator."""

    @staticmethod
    def forward(ctx: Any, attention: RecordedAttention, *tensors: torch.Tensor) -> "DeferredScores":
        # Nothing is saved for backward: the scores are recomputed from the recorded calls if their own gradient
        # is ever needed.
        ctx.attention, ctx.refuse, ctx.before_gradient = attention, attention.refuse, attention.before_gradient
        return DeferredScores.of(attention)

    @staticmethod
    @first_order("attention", "; leave attention out of the plan")
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        tensors = ctx.attention.tensors()
        leaves = {id(t): t.detach().requires_grad_(t.requires_grad) for t in tensors}
        with torch.enable_grad():
            out = ctx.attention.replayed(leaves)
        wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
        found = dict(zip(map(id, wanted), grad(out, wanted, grad_outputs), strict=True))
        # A tensor that was given twice gets its gradient once.
        return None, *(found.pop(id(leaves[id(t)]), None) for t in tensors)


class DeferredScores(DeferredTensor):
    """Attention scores or weights without data."""

    _attention: RecordedAttention
    _settled: torch.Tensor | None

    def before_gradient(self) -> None:
        self._attention.before_gradient()

    @classmethod
    def of(cls, attention: RecordedAttention) -> Self:
        """The tensor of `attention`, without a graph."""
        meta = attention.meta
        out = torch.Tensor._make_wrapper_subclass(
            cls, meta.shape, strides=meta.stride(), dtype=meta.dtype, device=attention.query.device
        )
        out._attention = attention
        out._settled = None
        return out

    def settled(self) -> torch.Tensor:
        """The materialised tensor, computed once."""
        if self._settled is None:
            # The program may read the scores under no_grad; whether they have a graph was decided when they
            # were made.
            with torch.set_grad_enabled(fact(torch.Tensor.requires_grad.__get__, self)):  # pyrefly: ignore
                self._settled = self._attention.replayed()
        return self._settled

    def _after(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor | None:
        """The attention output, or scores that are still deferred; None if `func` needs the values."""
        product = apply_weights(name_of(func), args, kwargs, self)
        if product is not None:
            value, given_back = product
            out = self._attention.applied_to(value)
            return None if out is None else given_back(out)
        name = name_of(func)
        # An in-place operator changes what this object records: every alias of it sees the new scores, as with
        # a real tensor.
        usual = _IN_PLACE.get(name)
        args, kwargs = _without(self, args, kwargs)
        attention = self._attention.after(func if usual is None else usual, args, kwargs)
        if attention is None:
            return None
        if usual is not None:
            self._attention = attention
            return self
        # A cast to the type that it has, say: what is written by the one name is read by the other.
        if name in _MAY_RETURN_ITSELF and _returns_itself(func, args, kwargs, self._attention.meta):
            return self
        return deferred_scores(attention)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = dispatched(func)
        args, given = tuple(args), dict(kwargs or {})
        refuse_lost_gradients(func, args, given)
        if name_of(func) == "type_as":
            func, args = torch.Tensor.to, (args[0], args[1].dtype)
        waiting = [m for m in _members((args, given)) if m._settled is None]
        if waiting and name_of(func) in FACTS and not is_read_of_node(func) and args and args[0] is waiting[0]:
            return fact(func, *args, **given)
        if len(waiting) == 1:
            out = waiting[0]._after(func, args, given)
            if out is not None:
                return out
        args, given = tree_map_only(DeferredScores, lambda member: member.settled(), (args, given))
        return func(*args, **given)

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
            if isinstance(member, DeferredScores):
                raise member._attention.refuse(
                    f"attention scores that are not materialised are modified in place by {func}; clone them first, "
                    "or plan without it: tightfit plan --without attention"
                )

        # Below autograd only values are needed: `_Defer` is the node of the graph.
        def values(member: DeferredScores) -> torch.Tensor:
            with torch.no_grad():
                return member._attention.replayed() if member._settled is None else member._settled.detach()

        args, kwargs = tree_map_only(DeferredScores, values, (tuple(args), dict(kwargs or {})))
        return func(*args, **kwargs)


def deferred_scores(attention: RecordedAttention) -> DeferredScores:
    """The deferred tensor of `attention`."""
    out = _Defer.apply(attention, *attention.tensors())
    assert isinstance(out, DeferredScores)
    return out


def started(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    refuse: Refuse = ApplyError,
    reads: Reads = lambda _, __: None,
) -> DeferredScores | None:
    """The deferred scores of a product of queries and keys; None if the call is no such product."""
    found = scores_of(name_of(func), args, kwargs)
    if found is None:
        return None
    query, key = found
    meta = _on_meta(func, (args, kwargs))
    meta = _on_meta(torch.Tensor.to, ((meta, _autocast_type(query) or meta.dtype), {}))
    attention = RecordedAttention(
        calls=((func, args, kwargs),), query=query, key=key, meta=meta, refuse=refuse, reads=reads
    )
    return deferred_scores(dataclasses.replace(attention, versions=versions_and_contents(attention.tensors())))


def _members(values: Any) -> Iterator[DeferredScores]:
    return (leaf for leaf in tree_leaves(values) if isinstance(leaf, DeferredScores))


def _without(scores: DeferredScores, args: Any, kwargs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return tree_map_only(DeferredScores, lambda leaf: _SCORES if leaf is scores else leaf, (args, kwargs))


def _autocast_type(tensor: torch.Tensor) -> torch.dtype | None:
    device = tensor.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def _on_meta(func: Callable[..., Any], given: Any) -> torch.Tensor:
    """The result on the meta device, for its shape, strides and dtype. Hidden from modes that count or record the program's operators."""
    with _disable_current_modes():
        args, kwargs = tree_map_only(torch.Tensor, _as_meta, given)
        return func(*args, **kwargs)


def _returns_itself(func: Callable[..., Any], args: Any, kwargs: Any, meta: torch.Tensor) -> bool:
    with _disable_current_modes():
        given = tree_map_only(_Scores, lambda _: meta, (args, kwargs))
        return func(*given[0], **given[1]) is meta


def _as_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _scale(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any], *, divides: bool) -> Any:
    if attention.is_softmax or kwargs or len(args) != 2 or attention.masks.has_numbers:
        return None
    first, second = args
    factor = second if first is _SCORES else first
    # A tensor may carry a gradient of its own (a learned temperature), and a scale of zero or less turns masks
    # around.
    if type(factor) not in (int, float) or factor <= 0 or (divides and first is not _SCORES):
        return None
    return {"scale": attention.scale / factor if divides else attention.scale * factor}


def _add(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if attention.is_softmax or kwargs or len(args) != 2:
        return None
    other = args[1] if args[0] is _SCORES else args[0]
    if not isinstance(other, torch.Tensor) or not other.is_floating_point() or other.dim() > attention.meta.dim():
        return None
    return {"masks": attention.masks.then(other)}


def _masked_fill(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if attention.is_softmax or kwargs or len(args) != 3 or args[0] is not _SCORES:
        return None
    return _masked(attention, args[1] if _is_mask(args[1]) else None, args[2])


def _where(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if attention.is_softmax or kwargs or len(args) != 3 or args[1] is not _SCORES:
        return None
    return _masked(attention, ~args[0] if _is_mask(args[0]) else None, args[2])


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _masked(attention: RecordedAttention, hidden: torch.Tensor | None, instead: Any) -> Any:
    if hidden is None or type(instead) not in (int, float) or hidden.dim() > attention.meta.dim():
        return None
    if not is_low(instead, attention.meta.dtype):
        return None
    return {"masks": attention.masks.then(Fill(hidden=hidden, value=float(instead)))}


def _softmax(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(
        zip(
            ("input", "dim", "_stacklevel", "dtype") if len(args) > 3 else ("input", "dim", "dtype"), args, strict=False
        )
    )
    given |= kwargs
    dim, dtype = given.get("dim"), given.get("dtype")
    is_last = isinstance(dim, int) and dim in (-1, attention.meta.dim() - 1)
    if attention.is_softmax or not is_last or dtype not in (None, torch.float32, attention.meta.dtype):
        return None
    return {"is_softmax": True}


def _cast(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [*args[1:], *kwargs.values()]  # no other device, no copy
    return {} if all(isinstance(value, torch.dtype) and value.is_floating_point for value in given) else None


def _dropout(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | kwargs
    drops = given.get("p", 0.5) > 0 and given.get("training", True)
    return {} if given.get("input") is _SCORES and not drops and not given.get("inplace", False) else None


def _same(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return {} if len(args) == 1 and not kwargs else None


def _multiply(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _scale(attention, args, kwargs, divides=False)


def _divide(attention: RecordedAttention, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return _scale(attention, args, kwargs, divides=True)


_WRITTEN_DOWN: dict[str, Callable[..., Any]] = (
    dict.fromkeys(("mul", "multiply", "__mul__", "__rmul__"), _multiply)
    | dict.fromkeys(("div", "divide", "true_divide", "__truediv__"), _divide)
    | dict.fromkeys(("add", "__add__", "__radd__"), _add)
    | dict.fromkeys(("to", "type", "float", "half", "bfloat16"), _cast)
    | {"masked_fill": _masked_fill, "where": _where, "softmax": _softmax, "dropout": _dropout, "contiguous": _same}
)
_MAY_RETURN_ITSELF = frozenset({"to", "type", "float", "half", "bfloat16", "contiguous", "dropout"})

_IN_PLACE: dict[str, Callable[..., Any]] = {
    "__iadd__": torch.add,
    "add_": torch.add,
    "__imul__": torch.mul,
    "mul_": torch.mul,
    "__itruediv__": torch.div,
    "div_": torch.div,
    "masked_fill_": torch.masked_fill,
}
