"""Hooks that a program puts on the nodes of a graph (`grad_fn.register_hook`, `grad_fn.register_prehook`), told to those who wait for them.

The classes of nodes are torch's own and cannot be changed, and a node does not tell its hooks. But each of them registers its hooks through one
function in Python, which makes the dict that the node keeps them in; that dict is watched for as long as it lives. Without owners nothing is watched.
"""

import functools
import types
import weakref
from collections.abc import Callable
from typing import Any, Protocol

from tightfit.torch_hooks.manifest import NODE_HOOK
from tightfit.torch_hooks.replaced import Leave, Replaced

_hooks: "dict[int, weakref.ref[Any]]" = {}


class NodeHookOwner(Protocol):
    """Who is told of hooks on nodes. It is held weakly."""

    def before_node_hook(self, hook: Any) -> None:
        """A hook is about to be put on a node. An exception is raised where the program puts it."""
        ...


def on_node_hooks(owner: NodeHookOwner) -> Leave:
    """Tells `owner` of hooks on nodes until what is returned is called or it is collected. Those of torch's own for modules are not told.

    Raises:
        ApplyError: this torch has no such function.
    """
    return _REPLACED.enter(owner)


def is_any_node_hooked() -> bool:
    """Whether a node of any graph that is alive has a hook that was registered while there was an owner."""
    for key, known in list(_hooks.items()):
        if known() is None:
            del _hooks[key]
    return any(known() for known in _hooks.values())


def _put(inner: Any, owners: Callable[[], list[NodeHookOwner]]) -> Any:
    # A static method, as torch has it: it is called through the class and through what is made of it.
    registered = inner.__func__ if isinstance(inner, staticmethod) else inner

    @functools.wraps(registered)
    def _register_hook(hooks: Any, hook: Any) -> Any:
        told = owners()
        if not (isinstance(hook, types.FunctionType) and hook.__module__ == "torch.utils.hooks"):
            for owner in told:
                owner.before_node_hook(hook)
        made = registered(hooks, hook)
        if told:
            _hooks[id(made[0])] = weakref.ref(made[0])
        return made

    return staticmethod(_register_hook)


_REPLACED: Replaced[NodeHookOwner] = Replaced(NODE_HOOK, _put)
