"""Keeps some results of a block for its second run: those of its products, by their number in the forward. The first run sets them aside, the second one is
given them in place of running the operator, and all else is computed again.

As torch's selective checkpoints (`torch.utils.checkpoint.create_selective_checkpoint_contexts`), for which each operator of the block is an entry; here
only what is kept is, so that an operator costs the host a third. A result that was written to since, or that one run has taken, is computed again too.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.effects.values.fingerprints import num_paused
from tightfit.torch_hooks.backward import keeps_graph
from tightfit.torch_hooks.manifest import INCLUDES_KEY, KEY_OF_VERSIONS

_UNSAFE_VIEW = torch.ops.aten._unsafe_view.default
# Below autograd, where modes are called, views have versions of their own, without it (`_maybe_detach` of torch/utils/checkpoint.py says why).
_sharing_versions = functools.partial(INCLUDES_KEY.value(), KEY_OF_VERSIONS.value(), False)


class OtherRunError(Exception):
    """The second run has another product where the first one had the one whose result is kept."""


class KeptTensor:
    """A tensor that is set aside: without its graph, and with the version that it had."""

    __slots__ = ("value", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.keep(alias_of(tensor))

    def keep(self, value: Any) -> None:
        """Has `value` in place of what it was."""
        self.value = value
        self.version = value._version

    def is_written(self) -> bool:
        """Whether it has been written to since."""
        return isinstance(self.value, torch.Tensor) and self.value._version != self.version


class KeptResult:
    """What one product of the first run has returned."""

    __slots__ = ("operator", "result", "shapes")

    def __init__(self, operator: OpOverload, args: Any, result: Any) -> None:
        self.operator = operator
        self.shapes = _shapes(args)
        self.result = _mapped(KeptTensor, torch.Tensor, result)

    def tensors(self) -> Iterator[KeptTensor]:
        """Those of the result."""
        several = self.result if isinstance(self.result, tuple | list) else (self.result,)
        return (each for each in several if isinstance(each, KeptTensor))

    def is_written(self) -> bool:
        """Whether one of them has been written to since."""
        return any(each.is_written() for each in self.tensors())

    def is_seen_as(self, view: torch.Tensor) -> None:
        """Watches `view`, the tensor that the program has of this product of several dimensions: writes to it are not counted by the product itself."""
        (own,) = self.tensors()
        with _sharing_versions():
            # Detached at last: a view holds what it is of, and would not be its memory's only owner.
            own.keep(view.view(own.value.shape).detach())

    def is_of(self, operator: OpOverload, args: Any) -> bool:
        """Whether a call may be the one that returned it."""
        return operator is self.operator and _shapes(args) == self.shapes

    def take(self) -> Any:
        """The result, for a graph of its own."""
        return _mapped(_value_of, KeptTensor, self.result)


class KeepsResults(TorchDispatchMode):
    """Sets the results aside whose numbers are in `keep`."""

    # Of torch.cond and its kin: what they run is computed again as one.
    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets what is compiled within the block stay so."""
        return True

    def __init__(self, keep: frozenset[int]) -> None:
        super().__init__()
        self.keep = keep
        self.kept: dict[int, KeptResult] = {}
        self.num_products = 0
        self.num_paused = 0
        # The operator before, if its result is kept.
        self.last: KeptResult | None = None

    def __enter__(self) -> Any:
        self.num_paused = num_paused()
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        super().__exit__(exc_type, exc_val, exc_tb)
        self.last = None
        # Now, and not only before the second run: each holds the memory of a result that another one takes the place of.
        drop_written(self.kept)


class GivesResults(TorchDispatchMode):
    """Hands out what `first` has set aside; a pass that retains its graph leaves it there for another one."""

    supports_higher_order_operators = True

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Lets what is compiled within the block stay so."""
        return True

    def __init__(self, first: KeepsResults) -> None:
        super().__init__()
        self.kept = first.kept
        self.num_products = 0
        self.num_paused = 0
        self.is_kept_on = False

    def __enter__(self) -> Any:
        self.num_paused, self.num_products, self.is_kept_on = num_paused(), 0, keeps_graph()
        drop_written(self.kept)
        return super().__enter__()


def _of_first_run(mode: KeepsResults, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if not isinstance(func, OpOverload):
        return _of_several(func, args, kwargs or {})
    result = func(*args, **kwargs) if kwargs else func(*args)
    # What our checks run is nothing that the block does: they may be in one of its runs and not in the other.
    if num_paused() > mode.num_paused:
        return result
    last, mode.last = mode.last, None
    if not _is_product(func):
        if last is not None and func is _UNSAFE_VIEW:
            last.is_seen_as(result)
        return result
    number = mode.num_products
    mode.num_products += 1
    # Inference tensors have no versions. Keeping every product saved 9 % less than keeping those that the plain run keeps (docs/log.md, "The planner,
    # made exact and quick").
    if number in mode.keep and not torch.is_inference_mode_enabled():
        mode.last = mode.kept[number] = KeptResult(func, args, result)
    return result


def _of_later_run(mode: GivesResults, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if _is_product(func) and num_paused() == mode.num_paused:
        number = mode.num_products
        mode.num_products += 1
        kept = mode.kept.get(number)
        if kept is not None:
            if not kept.is_of(func, args):
                raise OtherRunError(str(func))
            if not mode.is_kept_on:
                del mode.kept[number]
            if not kept.is_written():
                return kept.take()
    if not isinstance(func, OpOverload):
        return _of_several(func, args, kwargs or {})
    return func(*args, **kwargs) if kwargs else func(*args)


@torch._disable_dynamo
def _of_several(func: Any, args: Any, kwargs: Any) -> Any:
    """An operator that runs others (`torch.cond`), which would be traced here once more."""
    return func(*args, **kwargs)


# Put on afterwards: what a class of modes is defined with gets torch's decorator against its compiler, whose six calls take as long as all of this. A block
# under these modes is not compiled (`recompute`).
setattr(KeepsResults, "__torch_dispatch__", _of_first_run)  # noqa: B010 - a type checker would compare it with the method that it replaces
setattr(GivesResults, "__torch_dispatch__", _of_later_run)  # noqa: B010


def drop_written(kept: dict[int, KeptResult]) -> None:
    """Has results made again by the second run that were written to in place since (a convolution's, by an activation): it writes to them as the first one did."""
    for number in [number for number, each in kept.items() if each.is_written()]:
        del kept[number]


def alias_of(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor without its graph, which counts the writes to either as one's own."""
    with _sharing_versions():
        return tensor.detach()


@functools.cache
def _is_product(operator: Any) -> bool:
    return isinstance(operator, OpOverload) and operator_class(str(operator)) in TENSOR_CORE_CLASSES


def _value_of(kept: KeptTensor) -> torch.Tensor:
    return alias_of(kept.value)


def _shapes(args: Any) -> list[Any]:
    return [each.shape for each in args if isinstance(each, torch.Tensor)]


def _mapped(change: Callable[[Any], Any], kind: type, result: Any) -> Any:
    if isinstance(result, kind):
        return change(result)
    if isinstance(result, tuple | list):
        return type(result)(change(each) if isinstance(each, kind) else each for each in result)
    return result
