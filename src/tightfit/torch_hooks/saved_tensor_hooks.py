"""Whose hooks for saved tensors are in effect: ours, or the program's, to which those of a checkpoint belong that it calls by itself."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

from tightfit.effects.values.saved_hooks import top_saved_hooks

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

CHECKPOINT = "torch.utils.checkpoint"


def programs_hooks() -> Hooks | None:
    """The innermost hooks, if they are the program's; those of ours that pass on what they are given are looked through."""
    hooks = top_saved_hooks()
    while hooks is not None and (around := _around(hooks[0])) is not None:
        hooks = around
    return None if hooks is None or is_ours(hooks[0]) else hooks


def packs_by_itself() -> bool:
    """Whether what is saved for backward here goes to hooks of the program's own, which may count, round or move it: fewer or other tensors are not the same."""
    if torch.compiler.is_compiling():
        return False
    hooks = programs_hooks()
    return hooks is not None and not is_of_checkpoint(hooks[0]) and not is_of_torch_offload(hooks[0])


def innermost(unpack: Any) -> Any:
    """The hook that gives a saved tensor back, where hooks of ours around it pass on what they are given."""
    while (around := _around(unpack)) is not None:
        unpack = around[1]
    return unpack


def _around(hook: Any) -> Hooks | None:
    owner = getattr(hook, "__self__", None)
    return getattr(owner, "around", None) if type(owner).__module__.partition(".")[0] == "tightfit" else None


def is_ours(hook: Any) -> bool:
    """Whether a hook is of this package."""
    return module_of_hook(hook).partition(".")[0] == "tightfit"


def is_of_checkpoint(hook: Any) -> bool:
    """Whether a hook is of `torch.utils.checkpoint`."""
    return module_of_hook(hook) == CHECKPOINT


def is_of_torch_offload(hook: Any) -> bool:
    """Whether a hook is of `torch.autograd.graph.save_on_cpu`, which gives back what it is given."""
    return module_of_hook(hook) == torch.autograd.graph.__name__


def module_of_hook(hook: Any) -> str:
    """The name of the module that a hook was defined in, empty if it does not say."""
    inner = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(inner, "__module__", None) or "")


def given_to_checkpoint(unpack: Any) -> dict[str, Any] | None:
    """The function of the checkpoint that an unpack hook is of, with its arguments but the tensors among them.

    None if they are not where torch keeps them, or if the program has given contexts for its runs (a selective checkpoint, whose results serve once).
    """
    frame = _variable(unpack, "frame")
    again = getattr(frame, "recompute_fn", None)
    function = _variable(again, "fn")
    # From torch 2.12 they are on the frame, and the keywords in the closure; before, a node of the graph has a tensor of its own, the keywords and the rest.
    saved, keywords = getattr(frame, "saved_args", None), _variable(again, "kwargs")
    if saved is None:
        node = getattr(getattr(frame, "input_saver", None), "grad_fn", None)
        _, keywords, *saved = _variable(getattr(node, "get_args", None), "args") or (None, None)
    has_contexts = not isinstance(_variable(again, "recompute_context"), contextlib.nullcontext)
    if function is None or keywords is None or has_contexts:
        return None
    return {"function": function, "args": list(saved), "kwargs": keywords}


def has_own_context(unpack: Any) -> bool:
    """Whether the checkpoint that an unpack hook is of runs again inside of a context that the program has given; torch's selective ones are not meant."""
    again = getattr(_variable(unpack, "frame"), "recompute_fn", None)
    context = _variable(again, "recompute_context")
    is_plain = context is None or isinstance(context, contextlib.nullcontext)
    return not is_plain and not f"{type(context).__module__}.".startswith("torch.")


def _variable(function: Any, name: str) -> Any:
    """What a function made by another one has of a variable of that one, None if it has none of this name."""
    code = getattr(function, "__code__", None)
    if code is None or name not in code.co_freevars:
        return None
    return function.__closure__[code.co_freevars.index(name)].cell_contents
