"""Hooks that a program puts on the nodes of a graph (`grad_fn.register_hook`, `grad_fn.register_prehook`), told to those who wait for them.

The classes of nodes are torch's own and cannot be changed, but each of them registers its hooks through one function in Python.
"""

import functools
import types
from collections.abc import Callable
from typing import Any, Protocol

from tightfit.torch_hooks.manifest import NODE_HOOK
from tightfit.torch_hooks.replaced import Leave, Replaced


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


def _put(inner: Callable[..., Any], owners: Callable[[], list[NodeHookOwner]]) -> Any:
    @functools.wraps(inner)
    def _register_hook(hooks: Any, hook: Any) -> Any:
        if not (isinstance(hook, types.FunctionType) and hook.__module__ == "torch.utils.hooks"):
            for owner in owners():
                owner.before_node_hook(hook)
        return inner(hooks, hook)

    # As torch has it: it is called through the class and through what is made of it.
    return staticmethod(_register_hook)


_REPLACED: Replaced[NodeHookOwner] = Replaced(NODE_HOOK, _put)
