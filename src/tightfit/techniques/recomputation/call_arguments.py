"""The arguments of a recomputed call: which tensors are among them, what of them has state of its own, and how they are kept for the second run."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from tightfit.effects.holders import PLAIN
from tightfit.effects.users_code import is_of_library, is_users_class
from tightfit.effects.values.card_sums import unseen
from tightfit.torch_hooks.manifest import MAKE_SAVED_TENSOR
from tightfit.torch_hooks.node_hooks import hooks_of

_WITHOUT_STATE = (torch.Tensor, *PLAIN, torch.Size, torch.dtype, torch.device)
_make_saved_tensor: Any = MAKE_SAVED_TENSOR.value() if MAKE_SAVED_TENSOR.is_expected() else None


def tensors_in(values: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in arguments, in order."""
    found: list[torch.Tensor] = []
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif type(value) is tuple:
            found += tensors_in(value)
        elif not isinstance(value, PLAIN):
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]
    return found


def versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    """The number of writes to each."""
    return [-1 if tensor.is_inference() else tensor._version for tensor in tensors]


def shapes(tensors: Iterable[torch.Tensor]) -> tuple[Any, ...]:
    """The shape and dtype of each."""
    return tuple((tensor.shape, tensor.dtype) for tensor in tensors)


def kept_as_they_are(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that are kept without checking versions: autograd checks those that are given by position and tensors themselves."""
    return [*(arg for arg in args if not isinstance(arg, torch.Tensor)), *kwargs.values()]


def holds_things(value: Any) -> bool:
    """Whether an argument has state of its own: it is not only tensors and plain values in tuples."""
    if isinstance(value, tuple):
        return any(holds_things(inner) for inner in value)
    return not isinstance(value, _WITHOUT_STATE)


def without_cache(
    module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a library's decoder block without the key-value cache that it would fill, and a second run once more.

    Nothing reads that between the passes of a training step (transformers' own checkpointing switches it off too). What a program calls so in code of
    its own, and a cache that holds something already, a learned prefix or the segment before, stays what it is.
    """
    if not is_of_library(type(module)):
        return args, kwargs
    is_cross = kwargs.get("key_value_states") is not None
    given = {name: _without_empty(value, module, is_cross=is_cross) for name, value in kwargs.items()}
    is_kept = any(_is_cache(value) for value in given.values())
    if given.get("use_cache") is True and not is_kept:
        given["use_cache"] = False
    return tuple([_without_empty(value, module, is_cross=is_cross) for value in args]), given


def _without_empty(argument: Any, module: torch.nn.Module, *, is_cross: bool) -> Any:
    if not _is_cache(argument):
        return argument
    # Attention to an encoder fills a part of its own, in a block whose attention to itself has filled the other one just before
    # (`EncoderDecoderCache` of transformers/cache_utils.py).
    filled = getattr(argument, "cross_attention_cache", argument) if is_cross else argument
    return argument if filled.get_seq_length(_layer_of(module)) else None


def _layer_of(module: torch.nn.Module) -> int:
    """The number of a block in a cache."""
    numbers = (getattr(part, "layer_idx", None) for part in module.modules())
    return next((number for number in numbers if isinstance(number, int)), 0)


def _is_cache(argument: Any) -> bool:
    """Hugging Face's caches have no common type, and are recognised by their methods."""
    if isinstance(argument, _WITHOUT_STATE) or type(argument) is tuple or is_users_class(type(argument)):
        return False
    return hasattr(argument, "get_seq_length") and hasattr(argument, "update")


_HOOKS_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@contextmanager
def without_more_hooks(
    tensors: Iterable[torch.Tensor], refusal: Callable[[str], Exception], *, of_nodes: bool
) -> Iterator[None]:
    """Takes hooks off again that code inside puts on `tensors`, and with `of_nodes` on the nodes that have made them: the backward pass goes through both
    and has those of the first run already. One that retains a gradient takes the place of the first run's, and is refused.
    """
    with torch._C.DisableTorchFunctionSubclass():
        held = [(each, name, set(getattr(each, name, None) or ())) for each in tensors for name in _HOOKS_OF_TENSORS]
        nodes = {each.grad_fn for each, _, _ in held if each.grad_fn is not None} if of_nodes else ()
        kept = [(hooks, set(hooks)) for node in nodes for hooks in hooks_of(node)]
        passed_by = [each for each, _, _ in held if each.grad_fn is not None and not each.retains_grad]
    try:
        yield
    finally:
        with torch._C.DisableTorchFunctionSubclass():
            kept += [(getattr(each, name, None) or {}, known) for each, name, known in held]
        for hooks, known in kept:
            for number in [number for number in hooks if number not in known]:
                del hooks[number]
    with torch._C.DisableTorchFunctionSubclass():
        if any(each.retains_grad for each in passed_by):
            raise refusal("calls retain_grad on an input, which is another tensor when it is recomputed")


class SavedInputs:
    """The arguments of a call by position: tensors are saved by autograd, which checks their versions, and given to the hooks for saved tensors around the call."""

    __slots__ = ("_args", "_places", "_saved")

    def __init__(self, args: Sequence[Any]) -> None:
        self._places = [place for place, arg in enumerate(args) if isinstance(arg, torch.Tensor)]
        self._args = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        self._saved = _saved([args[place] for place in self._places])

    def get(self) -> list[Any]:
        """The arguments again.

        Raises:
            RuntimeError: one was written to, as torch says it of a graph's saved tensors.
        """
        args = list(self._args)
        for place, tensor in zip(self._places, self._saved(), strict=True):
            args[place] = tensor
        return args


def _saved(tensors: list[torch.Tensor]) -> Callable[[], Sequence[torch.Tensor]]:
    """Has autograd save tensors; the function gives them back."""
    if _make_saved_tensor is not None:
        saved = [_make_saved_tensor(tensor, is_output=False) for tensor in tensors]
        return lambda: [each.unpack() for each in saved]
    if not tensors:
        return list
    # Kept whole: up to torch 2.12 a node gives up what it saved with the last result of its own, whoever holds the node.
    result: Any = _Saving.apply(_leaf(), *tensors)
    return lambda: result.grad_fn.saved_tensors


class _Saving(torch.autograd.Function):
    """Saves what it is given; nothing is computed from its result."""

    @staticmethod
    def forward(ctx: Any, _: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:  # type: ignore[override]  # pyrefly: ignore[bad-override]
        ctx.save_for_backward(*tensors)
        with unseen():
            return torch.empty(0, device="cpu")

    @staticmethod
    def backward(_: Any, *gradients: Any) -> Any:  # pyrefly: ignore[bad-override]
        raise AssertionError("nothing is computed from this result")

    @staticmethod
    def jvp(_: Any, *tangents: Any) -> Any:  # pyrefly: ignore[bad-override]
        return None


_LEAVES: list[torch.Tensor] = []


def _leaf() -> torch.Tensor:
    """A leaf that asks for a gradient, without which a function saves nothing. Made where no mode of a program's sees it."""
    if not _LEAVES:
        with unseen():
            _LEAVES.append(torch.empty(0, device="cpu", requires_grad=True))
    return _LEAVES[0]
