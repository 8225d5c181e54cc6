"""Hooks on the nodes of graphs (`grad_fn.register_hook`, `grad_fn.register_prehook`), which a backward pass that is run again would call again.

A node does not tell its hooks. They are registered by one function of torch's, which makes the dict that the node keeps them in; that dict is
watched for as long as it lives. Nothing is watched while there is no owner.
"""

import functools
import weakref
from collections.abc import Callable
from typing import Any

from tightfit.torch_hooks.manifest import NODE_HOOK
from tightfit.torch_hooks.replaced import Leave, Replaced

_hooks: "dict[int, weakref.ref[Any]]" = {}


def on_node_hooks(owner: object) -> Leave:
    """Has hooks on nodes watched for as long as `owner` lives, or until what is returned is called.

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


def _put(inner: Any, owners: Callable[[], list[object]]) -> Any:
    # A static method, as torch has it.
    registered = inner.__func__ if isinstance(inner, staticmethod) else inner

    @functools.wraps(registered)
    def _register_hook(*args: Any, **kwargs: Any) -> Any:
        made = registered(*args, **kwargs)
        if owners():
            hooks = made[0]
            _hooks[id(hooks)] = weakref.ref(hooks)
        return made

    return staticmethod(_register_hook)


_REPLACED: Replaced[object] = Replaced(NODE_HOOK, _put)
