"""Which code of the program's a backward pass runs: functions with a backward pass in Python, hooks for saved tensors, and checkpoints of its own."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch

from tightfit.effects.bytecode.written_by_functions import may_write
from tightfit.effects.users_code import is_users_class
from tightfit.techniques.lazy_tensors.saved_and_shared import unpack_hooks
from tightfit.torch_hooks.saved_tensor_hooks import (
    given_to_checkpoint,
    has_own_context,
    innermost,
    is_of_checkpoint,
    is_ours,
    module_of_hook,
)

_MAX_DEPTH = 3
_OF_TORCH = ("torch.", "tightfit.")


def runs_own_code(nodes: Iterable[Any]) -> bool:
    """Whether a graph has an autograd function in Python that is neither torch's nor ours: its backward may read any tensor."""
    return any(map(_is_own, nodes))


class CodeInGraph:
    """What the program runs in a pass through the graph that is looked through by `reason_of`, node by node."""

    def __init__(self) -> None:
        # By hook, which every tensor that the checkpoint has saved shares.
        self._checkpoints: dict[int, Any] = {}
        self._ours: dict[int, Any] = {}
        self._writes: dict[Any, bool] = {}

    def reason_of(self, node: Any) -> str:
        """Why a second run of this node may find what the first one has left: what a function or an unpack hook of the program's writes. Empty for most."""
        if _is_own(node):
            if self._may_write(type(node)._forward_cls.backward):
                return "the backward of a custom autograd function may have side effects"
            if _holds_code(vars(node)):
                return "the backward of a custom autograd function can reach code with side effects"
        if _uses_up_saved(node):
            return "compiled code reuses the memory of its saved tensors in its backward pass (donated buffers)"
        return self.reason_of_hooks(node)

    def reason_of_hooks(self, node: Any) -> str:
        """The same of what the program has put around saved tensors alone."""
        for given in unpack_hooks(node):
            # A checkpoint has one hook for all that it saves.
            if id(given) in self._ours:
                continue
            hook = innermost(given)
            if is_ours(hook):
                self._ours[id(given)] = given
                continue
            if is_of_checkpoint(hook):
                self._checkpoints[id(hook)] = hook
            elif not _is_of_torch(module_of_hook(hook)) and self._may_write(hook):
                return "a saved-tensor hook of the program may have side effects"
        return ""

    def _may_write(self, function: Any) -> bool:
        # Within one look through a graph, a function is read once.
        if function not in self._writes:
            self._writes[function] = may_write(function)
        return self._writes[function]

    def has_own_contexts(self) -> bool:
        """Whether a checkpoint runs its function inside of contexts of the program's, other than torch's selective ones."""
        return any(has_own_context(hook) for hook in self._checkpoints.values())

    def checkpoints(self) -> list[Mapping[str, Any] | None]:
        """What each checkpoint of the program's was given; None for one that does not show it."""
        return [given_to_checkpoint(hook) for hook in self._checkpoints.values()]


def _is_own(node: Any) -> bool:
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    kind: Any = type(node)
    return not _is_of_torch(kind._forward_cls.__module__)


def _uses_up_saved(node: Any) -> bool:
    """Whether a node is compiled code whose backward pass may run once: it was compiled with the forward, as with dynamic shapes. What is compiled by the first
    pass itself is compiled for several (torch/_functorch/_aot_autograd/runtime_wrappers.py, `saved_tensors_use_once`)."""
    if not isinstance(node, torch.autograd.function.BackwardCFunction):
        return False
    kind: Any = type(node)
    compiled = vars(kind._forward_cls)
    if compiled.get("compiled_bw") is None or not kind._forward_cls.__module__.startswith("torch._functorch."):
        return False
    return bool(getattr(compiled.get("metadata"), "bw_donated_idxs", None))


def _is_of_torch(module: str) -> bool:
    return f"{module}.".startswith(_OF_TORCH)


def _holds_code(value: Any) -> bool:
    """Whether a context has something that its backward pass may call: a module, a function, an object of a class of the program's."""
    return any(
        isinstance(each, torch.nn.Module)
        or (callable(each) and not isinstance(each, torch.Tensor | type))
        or is_users_class(type(each))
        for each in _held(value, _MAX_DEPTH)
    )


def _held(value: Any, depth: int) -> Iterator[Any]:
    if isinstance(value, Mapping):
        value = list(value.values())
    if depth and isinstance(value, tuple | list | set):
        for each in value:
            yield from _held(each, depth - 1)
    else:
        yield value
