"""Combines the outputs of micro-batches: the loss of the whole batch, whose gradients are computed already, and small other outputs."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Never

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.effects.global_settings import precisions
from tightfit.effects.independence.totals import ROWS
from tightfit.effects.values.shared_memory import OneMemory, overlap
from tightfit.effects.values.written_past import WrittenPast
from tightfit.errors import ApplyError
from tightfit.techniques.micro_batches.batches import AbstractBatch, whole_argument
from tightfit.techniques.micro_batches.loss_means import Term
from tightfit.techniques.micro_batches.saved_by_parts import SavedByParts, Unchanged
from tightfit.techniques.wrappers.first_order import Refuse, first_order

# By how much shares of whole numbers, and of sums of class weights, may differ.
_EXACT, _ROUNDED = 1e-12, 1e-6

WRITTEN = "an output of the model that is a view of another output or of an argument was modified in place"
SMALL_OUTPUT_BYTES = 16 << 20
"""What else a model returns is put together again up to this size, which class scores have and logits of a vocabulary do not."""


class Sums:
    """The weighted losses of the parts so far, and the sums of their gradients, to be scaled by one over the sum of the weights.

    The gradients were computed times `loss_scale`, so that float16 holds them.
    """

    def __init__(self, loss_scale: torch.Tensor | float = 1.0) -> None:
        self.loss_scale = loss_scale
        self.gradients: list[torch.Tensor | None] = []
        self.refuse: Refuse = ApplyError
        self.before_backward: Callable[[torch.Tensor | None], None] | None = None
        self.unchanged: Unchanged | None = None
        self.beside: WrittenPast | None = None
        self.memory: OneMemory | None = None
        self.saved = SavedByParts()
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        # Of each part what all of its means are over.
        self._counts: list[list[torch.Tensor | int]] = []
        self._is_mean = True
        self._unit = 1

    def weight_of(
        self, means: frozenset[int], terms: Sequence[Term], num_examples: int, loss: torch.Tensor
    ) -> torch.Tensor:
        """The weight of a part of `num_examples` whose loss functions were `terms` and whose loss is a mean over `means`, or a sum.

        It is the number of its terms, in units of the first part's, so that half precision can hold the sums. A count that is on the device stays there.
        """
        dtype = torch.promote_types(loss.dtype, torch.float32)
        if not means:
            self._is_mean = False
            return torch.ones((), dtype=dtype, device=loss.device)
        counts = [_count(terms, mean, num_examples) for mean in sorted(means)]
        self._counts.append(counts)
        if not self._losses:
            self._unit = num_examples if ROWS in means else terms[min(means)].max_terms
        # A count of targets that are not ignored is on the device, and reading it back would wait for the
        # device once per part.
        if isinstance(counts[0], torch.Tensor):
            return counts[0].to(dtype) / self._unit
        return torch.full((), counts[0] / self._unit, dtype=dtype, device=loss.device)

    def are_shares_equal(self) -> bool:
        """Whether each part has the same share in all means; otherwise there is no single weight for it. Counts on the device are read back."""
        if not self._counts or len(self._counts[0]) < 2 or isinstance(self._losses[0], FakeTensor):
            return True
        if all(isinstance(count, int) for counts in self._counts for count in counts):
            table = torch.tensor(self._counts, dtype=torch.float64, device="cpu")
        else:
            device = self._losses[0].device
            rows = [[torch.as_tensor(c, dtype=torch.float64, device=device) for c in each] for each in self._counts]
            table = torch.stack([torch.stack(row) for row in rows])
        shares = table / table.sum(0)
        is_rounded = any(isinstance(c, torch.Tensor) and c.is_floating_point() for c in self._counts[0])
        return bool(((shares - shares[:, :1]).abs() <= (_ROUNDED if is_rounded else _EXACT)).all())

    def add(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        """Adds a part. A mean over no terms is NaN, and gets weight 0."""
        # `loss * 0` would be NaN where all targets of a part are ignored.
        self._losses.append(torch.where(weight != 0, loss * weight, 0.0))
        self._weights.append(weight)

    def combine(self, of_each: Callable[[torch.Tensor], list[torch.Tensor]]) -> float:
        """Adds what other processes have: `of_each` gives a tensor of each, in their order. Returns the factor for the gradients of the parts here: all are in units of the first one's then."""
        loss, dtype = torch.stack(self._losses).sum(), self._losses[0].dtype
        is_rounded = any(isinstance(c, torch.Tensor) and c.is_floating_point() for c in (self._counts or [[]])[0])
        counts = [sum(float(c) for c in column) for column in zip(*self._counts, strict=True)]
        own = torch.tensor([float(loss), float(self._total()), self._unit, *counts], dtype=torch.float64, device="cpu")
        rows = [row.tolist() for row in of_each(own)]
        unit, self._unit = self._unit, int(rows[0][2])
        units = [row[2] / self._unit for row in rows]
        self._losses = [loss.new_tensor(row[0] * each, dtype=dtype) for row, each in zip(rows, units, strict=True)]
        self._weights = [loss.new_tensor(row[1] * each, dtype=dtype) for row, each in zip(rows, units, strict=True)]
        if counts:
            self._counts = [
                [torch.tensor(c, dtype=torch.float64, device=loss.device) if is_rounded else round(c) for c in row[3:]]
                for row in rows
            ]
        return unit / self._unit

    def loss(self) -> torch.Tensor:
        """The loss of the whole batch."""
        total = torch.stack(self._losses).sum()
        return total / self._total() if self._is_mean else total

    def scale(self) -> torch.Tensor | float:
        """The factor for the sums of gradients."""
        return 1.0 / (self._total() * self.loss_scale) if self._is_mean else 1.0 / self.loss_scale

    def _total(self) -> torch.Tensor:
        return torch.stack(self._weights).sum()


def _count(terms: Sequence[Term], mean: int, num_examples: int) -> torch.Tensor | int:
    found = num_examples if mean == ROWS else terms[mean].num_terms
    assert found is not None
    return found


@dataclasses.dataclass(slots=True)
class Outputs:
    """The small outputs of the parts besides their losses."""

    refuse: Refuse = ApplyError
    kind: Any = None
    keys: list[Any] = dataclasses.field(default_factory=list)
    loss_key: Any = None
    values: dict[Any, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    absent: set[Any] = dataclasses.field(default_factory=set)
    # What was none of the time in each part: code asks for that by `is`, which no stand-in sees.
    none: set[Any] | None = None
    # Those that are another one, those that are an argument, pairs of those that are views of one memory, and the arguments that one is a view of.
    again: dict[Any, Any] = dataclasses.field(default_factory=dict)
    arguments: dict[Any, torch.Tensor] = dataclasses.field(default_factory=dict)
    views: list[tuple[Any, Any]] = dataclasses.field(default_factory=list)
    viewed: dict[Any, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    num_bytes: int = 0

    def add(
        self, output: Any, part: tuple[int, int], loss_key: Any, joined: frozenset[Any], batch: AbstractBatch
    ) -> None:
        """Keeps the outputs that can be concatenated, detached: those in `joined`, which have a row for each example of the `part`, if they are small."""
        num_examples = part[1] - part[0]
        items = items_of(output)
        if self.keys and self.keys != list(items):
            raise self.refuse(
                "the model returns different outputs for different parts of the batch; leave micro_batches out"
            )
        self.kind, self.keys, self.loss_key = type(output), list(items), loss_key
        none = {key for key, value in items.items() if value is None}
        if self.none is not None and self.none != none:
            raise self.refuse(
                "an output of the model is None for one part of the batch and not for another; leave micro_batches out"
            )
        self.none = none
        for key, value in items.items():
            if key == self.loss_key or key in self.absent:
                continue
            can_join = key in joined and isinstance(value, torch.Tensor) and value.shape[0] == num_examples
            if can_join and self._is_known(key, value, items, part, batch):
                continue
            if can_join:
                self.values.setdefault(key, []).append(value.detach())
                self.num_bytes += value.numel() * value.element_size()
            if not can_join or self.num_bytes > SMALL_OUTPUT_BYTES:
                self.absent.add(key)
                self.values.pop(key, None)

    def _is_known(
        self, key: Any, value: torch.Tensor, items: Mapping[Any, Any], part: tuple[int, int], batch: AbstractBatch
    ) -> bool:
        """Whether an output is another one, or an argument of the model: the program may write to one and read the other."""
        others = [other for other in self.values if other != key and isinstance(items.get(other), torch.Tensor)]
        for other in others:
            if items[other] is value:
                self.again[key] = other
                return True
            if overlap(items[other], value):
                self.views.append((other, key))
        argument = whole_argument(value, part, batch)
        if argument is not None:
            self.arguments[key] = argument
        elif viewed := [each for each in batch.tensors() if overlap(value, each)]:
            self.viewed[key] = viewed
        return argument is not None

    def combine(
        self, gathered: Callable[[torch.Tensor], torch.Tensor], of_each: Callable[[torch.Tensor], list[torch.Tensor]]
    ) -> None:
        """Puts the rows of other processes beside those of this one: `gathered` gives the rows of all. What is left out in one is in all."""
        others = [key for key in self.keys if key != self.loss_key and key not in {*self.again, *self.arguments}]
        flags = torch.tensor([key in self.values for key in others] or [False], device="cpu")
        is_there = torch.stack(of_each(flags)).all(0).tolist()
        for key, each in zip(others, is_there, strict=False):
            if each:
                self.values[key] = [gathered(torch.cat(self.values[key]))]
            else:
                self.absent.add(key)
                self.values.pop(key, None)

    def joined(self, sums: Sums, parameters: Sequence[torch.Tensor]) -> Any:
        """The output for the whole batch, of the model's own output type."""
        keys = list(self.values)
        loss = _Joined.apply(sums, *parameters)
        found: dict[Any, Any] = {key: _Beside.apply(sums.refuse, self.values[key], *parameters) for key in keys}
        # A plain graph may have saved them, and goes by what is written there.
        sums.beside = WrittenPast(found.values())
        watched = {key: found[key] for pair in self.views for key in pair if set(pair) <= found.keys()}
        watched |= {key: found[key] for key in self.viewed if key in found}
        arguments = {id(each): each for key, viewed in self.viewed.items() if key in found for each in viewed}
        sums.memory = OneMemory([*watched.values(), *arguments.values()]) if watched else None
        found |= self.arguments
        found |= {key: found[other] for key, other in self.again.items() if other in found}
        found[self.loss_key] = loss
        found |= dict.fromkeys(self.none or ())
        items = {key: found[key] if key in found else LeftOut(key, self.refuse) for key in self.keys}
        if issubclass(self.kind, torch.Tensor):
            return loss
        return tuple(items.values()) if self.kind is tuple else self.kind(**items)


class LeftOut:
    """Placeholder for an output that micro_batches does not provide; any use of it raises an error."""

    def __init__(self, name: Any, refuse: Refuse) -> None:
        self._name = name
        self._error = refuse

    def _refuse(self, *_: Any) -> Never:
        raise self._error(
            f"the program uses the output {self._name} of the model, and micro_batches computes only the loss; leave "
            "it out"
        )

    def __getattr__(self, name: str) -> Any:
        # `copy`, pickle and dataclasses probe for dunder names; that is no use of the output.
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, LeftOut))._refuse()

    def __hash__(self) -> int:
        # As a key of a table it is only kept.
        return id(self)

    def _used(self, *_: Any) -> Never:
        self._refuse()

    __getitem__ = __iter__ = __len__ = __contains__ = __call__ = __bool__ = _used
    # A name is compared, a number counted with or printed.
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _used  # pyrefly: ignore[bad-override]
    __str__ = __format__ = __float__ = __int__ = __index__ = __complex__ = __round__ = _used
    __neg__ = __pos__ = __abs__ = __invert__ = _used
    __add__ = __sub__ = __mul__ = __matmul__ = __truediv__ = __floordiv__ = __mod__ = __pow__ = _used
    __radd__ = __rsub__ = __rmul__ = __rmatmul__ = __rtruediv__ = __rfloordiv__ = __rmod__ = __rpow__ = _used
    __and__ = __or__ = __xor__ = __rand__ = __ror__ = __rxor__ = _used


class _Beside(torch.autograd.Function):
    """An output of the whole batch beside the loss: its values, joined, and no gradient, for that of the loss did not go through it."""

    @staticmethod
    def forward(ctx: Any, refuse: Refuse, values: Sequence[torch.Tensor], *parameters: torch.Tensor) -> torch.Tensor:
        def before_gradient() -> None:
            raise refuse(
                "the program asks for the gradient of a model output other than the loss (a hook, retain_grad, "
                "autograd.grad), and micro_batches computes only gradients of parameters; leave it out"
            )

        ctx.refuse, ctx.before_gradient = refuse, before_gradient
        ctx.set_materialize_grads(False)
        return torch.cat(list(values))

    @staticmethod
    @first_order("micro_batches", "; leave micro_batches out of the plan")
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:  # pyrefly: ignore[bad-override]
        if grad_outputs[0] is not None:
            raise ctx.refuse(
                "the program computes its own loss from the model's outputs, and micro_batches has only the "
                "gradients of the model's loss; leave it out"
            )
        return (None,) * len(ctx.needs_input_grad)


class _Joined(torch.autograd.Function):
    """The loss of the whole batch, whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, sums: Sums, *parameters: torch.Tensor) -> Any:
        ctx.sums, ctx.refuse = sums, sums.refuse
        ctx.casts, ctx.precisions = [torch.is_autocast_enabled(p.device.type) for p in parameters[:1]], precisions()
        ctx.set_materialize_grads(False)
        return sums.loss()

    @staticmethod
    @first_order("micro_batches", "; leave micro_batches out of the plan")
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:  # pyrefly: ignore[bad-override]
        (gradient,) = grad_outputs
        if ctx.sums is not None and ctx.sums.before_backward is not None:
            ctx.sums.before_backward(gradient)
        # The gradients are returned once: a second pass would scale them again.
        if ctx.casts == [False] and any(
            g is not None and torch.is_autocast_enabled(g.device.type) for g in grad_outputs
        ):
            raise ctx.refuse(
                "the backward pass runs under autocast and the forward did not, where micro_batches had already run "
                "both; leave it out"
            )
        if ctx.precisions != precisions():
            raise ctx.refuse(
                "torch's matmul precision was changed between forward and backward, and micro_batches had already "
                "run both; leave it out"
            )
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise ctx.refuse(
                "the program calls backward twice on one loss, which micro_batches does not support; leave it out"
            )
        changed = "" if sums.unchanged is None else sums.unchanged.what_changed()
        if sums.beside is not None and sums.beside.is_any():
            changed = changed or ("an output of the model was modified without autograd seeing it (through .data, say)")
        if sums.memory is not None and sums.memory.is_any_written():
            changed = changed or WRITTEN
        if changed:
            raise ctx.refuse(
                f"{changed} between forward and backward, and micro_batches had already run both; leave it out"
            )
        gradients, sums.gradients = sums.gradients, []
        if gradient is None:
            return None, *(None for _ in gradients)
        scale = gradient * sums.scale()
        _scale([value for value in gradients if value is not None], scale)
        return None, *gradients


def _scale(gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """Multiplies in place, with one foreach call where dtypes agree; a scale cast to 16 bits would be rounded, so such gradients are scaled one by one."""
    together = [g for g in gradients if g.dtype == scale.dtype and g.device == scale.device]
    if together:
        torch._foreach_mul_(together, scale)
    for gradient in gradients:
        if gradient.dtype != scale.dtype or gradient.device != scale.device:
            gradient.mul_(scale)


def find_loss(output: Any) -> tuple[Any, torch.Tensor]:
    """The key of the loss among a model's outputs, and the loss.

    Raises:
        ApplyError: it is not clear, or there is none.
    """
    items = items_of(output)
    key = _loss_key(items, output)
    return key, items[key]


def items_of(output: Any) -> dict[Any, Any]:
    """The outputs of a model, by key or position."""
    if isinstance(output, torch.Tensor):
        return {0: output}
    if type(output) is tuple:
        return dict(enumerate(output))
    if isinstance(output, Mapping):
        return dict(output)
    raise ApplyError(f"the model returns a {type(output).__name__}, not a loss; leave micro_batches out")


def _loss_key(items: Mapping[Any, Any], output: Any) -> Any:
    """The key of the loss: "loss", or that of the only scalar."""
    if isinstance(items.get("loss"), torch.Tensor):
        return "loss"
    numbers = [key for key, value in items.items() if isinstance(value, torch.Tensor) and value.dim() == 0]
    if len(numbers) != 1:
        raise ApplyError(
            f"the model returns {len(numbers) or 'no'} scalars ({type(output).__name__}), and micro_batches needs "
            "exactly one, the loss; leave micro_batches out"
        )
    return numbers[0]
