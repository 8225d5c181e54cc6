"""Notifies owners of hooks that a program registers on autograd nodes (`grad_fn.register_hook`, `grad_fn.register_prehook`).

The node classes are C++ types that cannot be patched, and a node does not list its hooks. But each of them registers its hooks through one
function in Python, which makes the dict that the node keeps them in; that dict is watched as long as it exists. Without owners nothing is watched.
"""

import functools
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from tightfit.torch_hooks.manifest import NODE_HOOK
from tightfit.torch_hooks.replaced import Leave, Replaced
from tightfit.torch_hooks.weak_references import WeakTable

# The hooks of a node, with the number of the last one, and whether an owner of all hooks was there.
_hooks: "dict[int, tuple[int, weakref.ref[Any], bool]]" = {}
_numbers = itertools.count(1)
_of_later: WeakTable[Any, bool] = WeakTable()


class _Own(threading.local):
    """The hook of ours that this thread is about to register."""

    hook: Any = None


_own = _Own()


class NodeHookOwner(Protocol):
    """Is notified of hooks on nodes. It is held weakly."""

    def before_node_hook(self, hook: Any) -> None:
        """A hook is about to be registered on a node. An exception is raised in the program's own call."""
        ...


def on_node_hooks(owner: NodeHookOwner, *, is_of_later: bool = False) -> Leave:
    """Notifies `owner` of hooks on nodes until the returned function is called or the owner is collected. torch's own hooks for modules are left out.

    With `is_of_later` it asks `is_any_node_hooked` with a moment alone: what is registered for it does not count for owners that ask for all.

    Raises:
        ApplyError: this torch has no such function.
    """
    if is_of_later:
        _of_later[owner] = True
    return _REPLACED.enter(owner)


def put_own_prehook(node: Any, hook: Callable[[Any], None]) -> None:
    """Registers a hook of ours that runs before `node`, which changes no gradient: nobody is notified of it, and it counts as none."""
    _own.hook = hook
    try:
        node.register_prehook(hook)
    finally:
        _own.hook = None


def has_hooks(node: Any) -> bool:
    """Whether a node has hooks, whoever has registered them when. It does not list them: one of ours is registered beside them, and taken off again."""
    return any(hooks_of(node))


def hooks_of(node: Any) -> list[dict[int, Any]]:
    """The two dicts that a node keeps its hooks in, those that run before it and those that run after it; they stay with it."""
    found: list[dict[int, Any]] = []
    for register in (node.register_hook, node.register_prehook):
        _own.hook = _probe
        try:
            handle = register(_probe)
        finally:
            _own.hook = None
        # A weak reference; the node keeps the dict.
        hooks = handle.hooks_dict_ref()
        handle.remove()
        found.append(hooks)
    return found


def _probe(*_: Any) -> None:
    """Is never called."""


def is_any_node_hooked(since: int = 0) -> bool:
    """Whether a node of any live graph has a hook that was registered while there was an owner, and after `since`, a number of `moment`."""
    for key, (_, known, _) in list(_hooks.items()):
        if known() is None:
            del _hooks[key]
    # A handle that is removed empties its dict and leaves it with the node: an empty one counts as no hook.
    return any(number > since and (since or is_of_all) and known() for number, known, is_of_all in _hooks.values())


def moment() -> int:
    """A number that is higher than those of all hooks so far."""
    return next(_numbers)


def _put(inner: Any, owners: Callable[[], list[NodeHookOwner]]) -> Any:
    # A static method, as in torch: it is called through the class and through instances.
    registered = inner.__func__ if isinstance(inner, staticmethod) else inner

    @functools.wraps(registered)
    def _register_hook(hooks: Any, hook: Any) -> Any:
        told = owners()
        # `Module.register_full_backward_hook` puts a hook of torch's own on the nodes of its inputs and outputs
        # (torch/utils/hooks.py, `BackwardHook`), which the techniques know of from the module.
        is_own = hook is _own.hook
        if not is_own and not (isinstance(hook, types.FunctionType) and hook.__module__ == "torch.utils.hooks"):
            for owner in told:
                owner.before_node_hook(hook)
        made = registered(hooks, hook)
        if told and not is_own:
            # An `OrderedDict`, unlike a plain dict, can be referred to weakly (torch/autograd/function.py,
            # `_HookMixin._register_hook`).
            is_of_all = any(owner not in _of_later for owner in told)
            _hooks[id(made[0])] = next(_numbers), weakref.ref(made[0]), is_of_all
        return made

    return staticmethod(_register_hook)


_REPLACED: Replaced[NodeHookOwner] = Replaced(NODE_HOOK, _put)
