"""Runs a model that returns its loss over parts of a batch, one after another, so that only one part's activations are ever alive.

Each part is run backwards at once, inside the forward, with its gradients added up aside; what the caller gets is a loss whose backward pass
only scales those sums and hands them over. The caller's loop sees one forward, one loss and one backward pass.
"""

import abc
import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Never, Self

import torch

from tightfit.errors import ApplyError
from tightfit.faults import for_torch
from tightfit.techniques.loss_means import Term, Watch

SMALL_OUTPUT_BYTES = 16 << 20
"""What else a model returns is put together again up to this size, which class scores have and logits of a vocabulary do not."""

WRAPPERS = frozenset({"OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})
"""Modules that do their own work around the forward and the backward pass of the one inside."""

Forward = Callable[..., Any]
# Two orders of summation differ by less than this; a loss that parts of a batch do not make up differs by more.
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
_TOLERANCE_OF_HALVES = 2e-2


class SplitForward:
    """The code around a root's forward; `num_parts` at most, `allows_randomness` as `Watch` has it. `counted` is called once per part.

    `batch_of` says what of the arguments is the batch, `scaled` is the scale of the `GradScaler` that scales the loss outside. The two examples that are run to compare them are run inside of `unseen()`.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        num_parts: int,
        *,
        allows_randomness: bool,
        counted: Callable[[], None],
        batch_of: "Callable[[Sequence[Any], Mapping[str, Any]], AbstractBatch] | None" = None,
        scaled: Callable[[torch.Tensor], torch.Tensor] | None = None,
        unseen: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
    ) -> None:
        self.model = model
        self._num_parts = num_parts
        self._allows_randomness = allows_randomness
        self._counted = counted
        self._batch_of = batch_of or Batch
        self._scaled = scaled
        self._unseen = unseen
        self._is_checked = False

    def __call__(self, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        batch = self._batch_of(args, kwargs)
        # The last batch of an epoch may be one example; only a run that begins with one has nothing to split.
        if batch.num_examples < 2 and not self._is_checked:
            raise ApplyError("the batch has one example, which cannot be split; leave micro_batches out")
        if self._scaled is None:
            _refuse_float16(batch.device)
        with _GradientsAside(self.model) as aside:
            sums, outputs = self._run(forward, batch, aside)
            sums.gradients = [p.grad for p in aside.parameters]
        return outputs.joined(sums, aside.parameters)

    def _run(self, forward: Forward, batch: "AbstractBatch", aside: "_GradientsAside") -> tuple["Sums", "Outputs"]:
        one = torch.ones((), device=batch.device)
        sums, outputs = Sums(1.0 if self._scaled is None else self._scaled(one)), Outputs()
        for begin, end in batch.parts(self._num_parts):
            args, kwargs = batch.part(begin, end)
            watch = Watch(end - begin, allows_randomness=self._allows_randomness)
            with watch:
                output = forward(*args, **kwargs)
            # A plan may be put on the modules inside by their first forward, and change what is trained.
            _refuse_hooks(self.model)
            aside.take()
            loss = outputs.add(output, end - begin)
            index = watch.index_of(loss)
            term = watch.terms[index]
            del output, watch
            weight = sums.weight_of(term, loss)
            del term
            with torch.autocast(batch.device.type, enabled=False):
                torch.autograd.backward(loss, (weight * sums.loss_scale).to(loss.dtype), inputs=aside.parameters)
            sums.add(loss.detach(), weight)
            del loss
            self._counted()
            if not self._is_checked:
                with self._unseen():
                    self._check(forward, batch, index)
                self._is_checked = True
        return sums, outputs

    @torch.no_grad()
    def _check(self, forward: Forward, batch: "AbstractBatch", index: int) -> None:
        """Two examples together and one by one must give the same loss: what compares examples, or mixes them, does not."""
        versions = {name: buffer._version for name, buffer in self.model.named_buffers()}
        was_training = [module for module in self.model.modules() if module.training]
        if self._allows_randomness:
            self.model.eval()
        results = []
        for stretches in (((0, 2),), ((0, 1), (1, 2))):
            sums = Sums()
            for begin, end in stretches:
                args, kwargs = batch.part(begin, end)
                with Watch(end - begin, allows_randomness=self._allows_randomness) as watch:
                    output = forward(*args, **kwargs)
                loss = Outputs().add(output, end - begin)
                sums.add(loss, sums.weight_of(watch.terms[index], loss))
            results.append(sums.loss())
        for module in was_training:
            module.training = True
        # What this has cast stays in autocast's cache: a part that finds it there casts less than a block of it that is run again would.
        torch.clear_autocast_cache()
        changed = [name for name, buffer in self.model.named_buffers() if buffer._version != versions.get(name)]
        if changed:
            raise ApplyError(
                f"the forward changes the buffer {changed[0]}, which would happen once for each part; leave micro_batches out"
            )
        together, apart = results
        tolerance = _TOLERANCE.get(together.dtype, _TOLERANCE_OF_HALVES)
        if torch.is_autocast_enabled(batch.device.type):
            tolerance = _TOLERANCE_OF_HALVES
        # Asked this way round because numbers that nobody knows, on a virtual card, differ in nothing.
        if bool((together - apart).abs() > tolerance * together.abs()):
            raise ApplyError(
                f"two examples together have the loss {together.item():.6g} and one by one {apart.item():.6g}: it depends on what else is in "
                "the batch; leave micro_batches out"
            )


class AbstractBatch(abc.ABC):
    """The arguments of a call that are a batch of examples."""

    def __init__(self, num_examples: int, device: torch.device) -> None:
        self.num_examples = num_examples
        self.device = device

    def parts(self, num_parts: int) -> Iterator[tuple[int, int]]:
        """The stretches of examples, all of one length but for the last, which may be shorter."""
        size = -(-self.num_examples // num_parts)
        for begin in range(0, self.num_examples, size):
            yield begin, min(self.num_examples, begin + size)

    @abc.abstractmethod
    def part(self, begin: int, end: int) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments for the examples from `begin` to before `end`."""


class Batch(AbstractBatch):
    """The arguments of a model: tensors whose first dimension is that of the first tensor are split, those of length one are shared.

    Raises:
        ApplyError: it is not clear how to split them, or there is nothing to split.
    """

    def __init__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._args, self._kwargs = args, kwargs
        named = {str(name): value for name, value in (*enumerate(args), *kwargs.items()) if value is not None}
        tensors = {n: v for n, v in named.items() if isinstance(v, torch.Tensor) and v.dim()}
        if not tensors:
            raise ApplyError("the model is called without a tensor that could be split; leave micro_batches out")
        first = next(iter(tensors.values()))
        super().__init__(int(first.shape[0]), first.device)
        for name, value in named.items():
            if isinstance(value, torch.Tensor):
                if value.requires_grad:
                    raise ApplyError(
                        f"argument {name} wants a gradient of its own, which micro_batches does not give it; leave it out"
                    )
                if value.dim() > 1 and value.shape[0] not in (1, self.num_examples):
                    raise ApplyError(
                        f"argument {name} has {value.shape[0]} rows where the batch has {self.num_examples}: how to split it is not known; leave micro_batches out"
                    )
            elif not isinstance(value, bool | int | float | str | torch.dtype | torch.device):
                raise ApplyError(
                    f"argument {name} is a {type(value).__name__}, which is not known how to split; leave micro_batches out"
                )

    def part(self, begin: int, end: int) -> tuple[list[Any], dict[str, Any]]:
        """The arguments for the examples from `begin` to before `end`."""

        def cut(value: Any) -> Any:
            is_split = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == self.num_examples
            return value[begin:end] if is_split else value

        return [cut(value) for value in self._args], {name: cut(value) for name, value in self._kwargs.items()}


class Sums:
    """The weighted losses of the parts so far, and the sums of their gradients, to be scaled by one over the sum of the weights.

    The gradients were computed times `loss_scale`, so that float16 holds them.
    """

    def __init__(self, loss_scale: torch.Tensor | float = 1.0) -> None:
        self.loss_scale = loss_scale
        self.gradients: list[torch.Tensor | None] = []
        self._losses: list[torch.Tensor] = []
        self._weights: list[torch.Tensor] = []
        self._is_mean = True
        self._unit = 1

    def weight_of(self, term: Term, loss: torch.Tensor) -> torch.Tensor:
        """The weight of a part: the number of its terms, in units of the first part's, so that half precision can hold the sums.

        A count that is on the device stays there.
        """
        dtype = torch.promote_types(loss.dtype, torch.float32)
        if term.num_terms is None:
            self._is_mean = False
            return torch.ones((), dtype=dtype, device=loss.device)
        self._unit = self._unit if self._losses else term.most_terms
        if isinstance(term.num_terms, torch.Tensor):
            return term.num_terms.to(dtype) / self._unit
        return torch.full((), term.num_terms / self._unit, dtype=dtype, device=loss.device)

    def add(self, loss: torch.Tensor, weight: torch.Tensor) -> None:
        """One more part. The mean over no terms is no number, and counts for nothing."""
        self._losses.append(torch.where(weight > 0, loss * weight, 0.0))
        self._weights.append(weight)

    def loss(self) -> torch.Tensor:
        """The loss of the whole batch."""
        total = torch.stack(self._losses).sum()
        return total / self._total() if self._is_mean else total

    def scale(self) -> torch.Tensor | float:
        """What the sums of gradients are to be multiplied by."""
        return 1.0 / (self._total() * self.loss_scale) if self._is_mean else 1.0 / self.loss_scale

    def _total(self) -> torch.Tensor:
        return torch.stack(self._weights).sum()


@dataclasses.dataclass(slots=True)
class Outputs:
    """What the parts returned besides their losses, as far as it is small."""

    kind: Any = None
    keys: list[Any] = dataclasses.field(default_factory=list)
    loss_key: Any = None
    values: dict[Any, list[torch.Tensor]] = dataclasses.field(default_factory=dict)
    absent: set[Any] = dataclasses.field(default_factory=set)
    num_bytes: int = 0

    def add(self, output: Any, num_examples: int) -> torch.Tensor:
        """Keeps what can be joined, detached, and returns the loss."""
        items = _items(output)
        self.kind, self.keys = type(output), list(items)
        self.loss_key = _loss_key(items, output)
        for key, value in items.items():
            if key == self.loss_key or key in self.absent:
                continue
            can_join = isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == num_examples
            if can_join:
                self.values.setdefault(key, []).append(value.detach())
                self.num_bytes += value.numel() * value.element_size()
            if not can_join or self.num_bytes > SMALL_OUTPUT_BYTES:
                self.absent.add(key)
                self.values.pop(key, None)
        return items[self.loss_key]

    def joined(self, sums: Sums, parameters: Sequence[torch.Tensor]) -> Any:
        """The output for the whole batch, of the type that the model returns."""
        keys = list(self.values)
        loss, *others = _Joined.apply(sums, [torch.cat(self.values[key]) for key in keys], *parameters)
        found = dict(zip(keys, others, strict=True)) | {self.loss_key: loss}
        items = {key: found[key] if key in found else LeftOut(key) for key in self.keys}
        if issubclass(self.kind, torch.Tensor):
            return loss
        return tuple(items.values()) if self.kind is tuple else self.kind(**items)


class LeftOut:
    """Stands for an output that micro_batches does not put together; any use of it says so."""

    def __init__(self, name: Any) -> None:
        self._name = name

    def _refuse(self, *_: Any) -> Never:
        raise ApplyError(
            f"the program uses the output {self._name} of the model, of which micro_batches gives the loss alone; leave it out"
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise for_torch(AttributeError(name))
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        next(a for a in (*args, *(kwargs or {}).values()) if isinstance(a, LeftOut))._refuse()

    __getitem__ = __iter__ = __len__ = __add__ = __mul__ = __sub__ = __matmul__ = __truediv__ = _refuse


class _Joined(torch.autograd.Function):
    """The loss of the whole batch, whose gradients are there already."""

    @staticmethod
    def forward(ctx: Any, sums: Sums, others: Sequence[torch.Tensor], *parameters: torch.Tensor) -> Any:
        ctx.sums = sums
        ctx.set_materialize_grads(False)
        return sums.loss(), *others

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:  # pyrefly: ignore[bad-override]
        gradient, *others = grad_outputs
        if any(other is not None for other in others):
            raise ApplyError(
                "the program computes a loss of its own from what the model returns, and micro_batches has only the gradients of the model's own; leave it out"
            )
        sums, ctx.sums = ctx.sums, None
        if sums is None:
            raise ApplyError("the program runs one loss backwards twice, which micro_batches cannot; leave it out")
        gradients, sums.gradients = sums.gradients, []
        if gradient is None:
            return None, None, *(None for _ in gradients)
        scale = gradient * sums.scale()
        _scale([value for value in gradients if value is not None], scale)
        return None, None, *gradients


def _scale(gradients: Sequence[torch.Tensor], scale: torch.Tensor) -> None:
    """In as few kernels as there can be; a scale in 16 bits would be rounded, so gradients in those are scaled one by one."""
    together = [g for g in gradients if g.dtype == scale.dtype and g.device == scale.device]
    if together:
        torch._foreach_mul_(together, scale)
    for gradient in gradients:
        if gradient.dtype != scale.dtype or gradient.device != scale.device:
            gradient.mul_(scale)


def _items(output: Any) -> dict[Any, Any]:
    if isinstance(output, torch.Tensor):
        return {0: output}
    if type(output) is tuple:
        return dict(enumerate(output))
    if isinstance(output, Mapping):
        return dict(output)
    raise ApplyError(f"the model returns a {type(output).__name__}, no loss; leave micro_batches out")


def _loss_key(items: Mapping[Any, Any], output: Any) -> Any:
    """Which item is the loss: the one that is called so, or the only number among them."""
    if isinstance(items.get("loss"), torch.Tensor):
        return "loss"
    numbers = [key for key, value in items.items() if isinstance(value, torch.Tensor) and value.dim() == 0]
    if len(numbers) != 1:
        raise ApplyError(
            f"the model returns {len(numbers) or 'no'} numbers ({type(output).__name__}), of which one must be the loss; leave micro_batches out"
        )
    return numbers[0]


class _GradientsAside:
    """Takes the gradients off the parameters that are trained when `take` is first called, and puts them back at the end."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._gradients: list[torch.Tensor | None] = []
        self.parameters: list[torch.Tensor] = []

    def take(self) -> None:
        if self.parameters:
            return
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            parameter.grad = gradient


def _refuse_hooks(model: torch.nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ApplyError(
                f"{name} has a hook on its gradient, which would see each part's instead of the batch's; leave micro_batches out"
            )


def _refuse_float16(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16:
        raise ApplyError(
            "under autocast in float16 gradients need the scale of a GradScaler, which is not known in the forward; use bfloat16, or leave micro_batches out"
        )
