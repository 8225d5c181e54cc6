"""What a recomputed module keeps from call to call: when its two runs are compared, the modules inside of it, and the tensors that it stores."""

import operator
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tightfit.effects.state import MOVED, Snapshot

_MAX_SHAPES = 64
# Checks after plain attributes have changed, which a counter does in every call; attributes that are restored
# for the second run need none.
_CHECKS_AFTER_CHANGES = 4
# A check costs about half a step of the module: one in so many calls is below half a per cent of a run.
_CALLS_BETWEEN_CHECKS = 200


class CheckSchedule:
    """In which calls the results of both runs are compared: the first `check_steps`, after a change, and one in so many. Never with 0."""

    def __init__(self, check_steps: int) -> None:
        self.has_values = check_steps > 0
        """Whether tensors have values to compare; on the virtual GPU they have none."""
        self._checks_left = check_steps
        self._checks_after_changes = _CHECKS_AFTER_CHANGES if check_steps else 0
        self._calls_since_check = 0
        self._shapes: set[Any] = set()
        self._contents: Any = None

    def needs_check(self, shapes: Any, before: Snapshot) -> bool:
        """Whether the results of this call's two runs are to be compared: in the first calls, and after a change."""
        is_new_shape = shapes not in self._shapes and len(self._shapes) < _MAX_SHAPES
        self._shapes.add(shapes) if is_new_shape else None
        # Snapshots share one list of contents as long as nothing has changed: identity is enough.
        is_changed = self._contents is not None and before.contents is not self._contents
        self._contents = before.contents
        if self._checks_left:
            self._checks_left -= 1
            return True
        self._calls_since_check = (self._calls_since_check + 1) % _CALLS_BETWEEN_CHECKS
        if not self._calls_since_check and self.has_values:
            return True
        if is_changed and self._checks_after_changes:
            self._checks_after_changes -= 1
            return True
        return is_new_shape and self.has_values


class InnerModules:
    """The norms and hooks inside of a module, looked for again when what it reaches has changed."""

    def __init__(self) -> None:
        self._norms: list[weakref.ref[torch.nn.Module]] = []
        self._norms_of: Any = None
        self._has_hooks = False
        self._hooks_of: Any = None

    def statistics(self, module: torch.nn.Module, before: Snapshot) -> set[int]:
        """The running statistics that a norm in training writes to, by `id`."""
        if self._norms_of is not before.reach:
            parts = module.modules()
            self._norms = [weakref.ref(m) for m in parts if getattr(m, "running_mean", None) is not None]
            self._norms_of = before.reach
        norms = [norm for norm in [reference() for reference in self._norms] if norm is not None and norm.training]
        return {id(buffer) for norm in norms for buffer in norm._buffers.values()}

    def has_hooks(self, module: torch.nn.Module, before: Snapshot) -> bool:
        """Whether modules inside have hooks around their forwards."""
        if self._hooks_of is not before.reach:
            of_all = torch.nn.modules.module
            self._has_hooks = bool(of_all._global_forward_hooks or of_all._global_forward_pre_hooks) or any(
                part._forward_hooks or part._forward_pre_hooks for part in module.modules()
            )
            self._hooks_of = before.reach
        return self._has_hooks


class StoredTensors:
    """The tensors with a graph that a module's last forward stored on reachable objects, and the number of second runs by then."""

    def __init__(self) -> None:
        self._left: dict[int, weakref.ref[torch.Tensor]] = {}
        self._left_after = 0

    def handed_over(self, tensors: Sequence[torch.Tensor], num_second_runs: int) -> list[torch.Tensor]:
        """The tensors with a graph that a forward may continue from, to be kept for its second run.

        Tensors that it stored itself in an earlier step, as a module that keeps its last output does, are overwritten: keeping them would only
        keep memory alive.
        """
        if self._left_after == num_second_runs:
            return list(tensors)
        left = {id(tensor) for tensor in [reference() for reference in self._left.values()] if tensor is not None}
        return [tensor for tensor in tensors if id(tensor) not in left]

    def leaves(self, before: Sequence[torch.Tensor], after: Sequence[torch.Tensor], num_second_runs: int) -> None:
        """Remembers which tensors with a graph a forward has stored, from those reached before and after it."""
        known = set(map(id, before))
        self._left = {id(tensor): weakref.ref(tensor) for tensor in after if id(tensor) not in known}
        self._left_after = num_second_runs


class ParameterMarks:
    """What code can do to parameters besides writing their values: add to their gradients, or drop them, put hooks on them, freeze them.

    A second run would do it twice, and in the middle of the backward pass. Values, and what is restored for a second run, are looked at by
    snapshots (`tightfit.effects.state`).
    """

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        # Weights that are at the host come and go, and their gradients with them.
        self._parameters = [each for each in parameters if each not in MOVED] if MOVED.data else parameters
        self._gradients, self._marks = _marks_of(self._parameters)

    def change(self) -> str:
        """What was done to one of them since, in words; empty if nothing was."""
        gradients, marks = _marks_of(self._parameters)
        if not all(map(operator.is_, gradients, self._gradients)):
            return _CHANGES[0]
        if marks == self._marks:
            return ""
        pairs = zip(self._marks, marks, strict=True)
        return next(_CHANGES[n] for one, other in pairs for n in range(len(one)) if one[n] != other[n])


# In the order of the marks of each parameter.
_CHANGES = (
    "writes to the gradient of a parameter",
    "registers a hook on a parameter",
    "registers a hook on a parameter",
    "changes requires_grad of a parameter",
)


def _marks_of(parameters: Sequence[torch.nn.Parameter]) -> tuple[list[torch.Tensor | None], list[tuple[Any, ...]]]:
    """The gradient of each, and what can be compared by value: the gradient's version, hooks, whether it is trained."""
    with torch._C.DisableTorchFunctionSubclass():
        gradients = [parameter.grad for parameter in parameters]
        marks = [
            (
                -1 if gradient is None or gradient.is_inference() else gradient._version,
                tuple(parameter._backward_hooks or ()),
                tuple(getattr(parameter, "_post_accumulate_grad_hooks", None) or ()),
                parameter.requires_grad,
            )
            for parameter, gradient in zip(parameters, gradients, strict=True)
        ]
    return gradients, marks
