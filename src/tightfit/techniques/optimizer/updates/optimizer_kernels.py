"""Switches an optimizer of torch.optim to another implementation: the flags of its groups, and the device of its step counters.

A fused kernel needs the step counters in float32 on the device of the parameters, the others read them on the host. Checkpoints are written with
the flags and devices of a plain run, and loading a checkpoint does not reset the flags.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeGuard

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor
from tightfit.techniques.session import Session
from tightfit.torch_hooks.weak_references import WeakTable

UPDATED_ON_HOST = frozenset({"Adam", "AdamW", "SGD", "Adagrad"})
"""The classes of torch.optim that have a fused implementation for the host's processor (aten/src/ATen/native/cpu/FusedAdamKernel.cpp and beside it)."""

_HALF = (torch.bfloat16, torch.float16)


def goes_wrong_at_host(optimizer: torch.optim.Optimizer, dtype: torch.dtype) -> bool:
    """Whether the fused implementation for the host gives other numbers than it should: SGD's in half precision, from 16 elements on
    (aten/src/ATen/native/cpu/FusedSGDKernel.cpp, torch 2.13; tests/cpu/test_fused_at_host.py)."""
    return isinstance(optimizer, torch.optim.SGD) and dtype in _HALF


# torch/amp/grad_scaler.py, `GradScaler.step`: an optimizer made with fused=True says so of itself.
_STEP_UNSCALES = "_step_supports_amp_scaling"

_COUNT = "step"

Kernel = Literal["fused", "foreach", "for-loop"]

# What the groups of an optimizer say where torch is to run each implementation (torch/optim/optimizer.py, `_fused_doc`).
_FLAGS: dict[Kernel, dict[str, bool]] = {
    "fused": {"fused": True, "foreach": False},
    "foreach": {"fused": False, "foreach": True},
    "for-loop": {"fused": False, "foreach": False},
}

_NAMES = ("fused", "foreach")


@dataclasses.dataclass(slots=True)
class _Switched:
    """The flags of a plain run, and a token for each session that has switched an optimizer: one model may be made of parts of another, and both are called."""

    before: list[dict[str, Any]]
    by: set[object] = dataclasses.field(default_factory=set)


_SWITCHED: WeakTable[torch.optim.Optimizer, _Switched] = WeakTable()


def check_kernel(
    optimizer: torch.optim.Optimizer, model: torch.nn.Module, kernel: Kernel, technique: str = "optimizer_kernel"
) -> None:
    """Checks that `optimizer` can run `kernel`, for `technique`.

    Raises:
        ApplyError: it has no such implementation, or not for these parameters.
    """
    name, flag = type(optimizer).__name__, "fused" if kernel == "fused" else "foreach"
    if any(flag not in group for group in optimizer.param_groups):
        raise ApplyError(f"{name} has no {kernel} implementation; leave {technique} out of the plan")
    if kernel == "for-loop":
        return
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ApplyError(f"{name}(differentiable=True) cannot run {kernel}; leave {technique} out of the plan")
    for module in model.modules():
        if getattr(module, "sparse", False) and isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag):
            raise ApplyError(
                f"{type(module).__name__}(sparse=True) has sparse gradients, which {kernel} optimizers do not take; leave {technique} out"
            )
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if kernel == "fused" and not parameter.is_floating_point():
                raise ApplyError(f"{name} holds a parameter of {parameter.dtype}, which has no fused implementation")
            if kernel == "fused" and parameter.device.type == "cpu" and goes_wrong_at_host(optimizer, parameter.dtype):
                raise ApplyError(
                    f"torch's fused {name} is incorrect on the CPU in {parameter.dtype}; leave {technique} out of "
                    "the plan"
                )


def set_kernels(
    session: Session, optimizers: Sequence[torch.optim.Optimizer], kernel: Kernel, *, has_states_of_ours: bool = False
) -> None:
    """Switches `optimizers` to `kernel` until the session is undone; call `check_kernel` first. A step that `kernel` would not do as the optimizer's own
    implementation is left to that. `has_states_of_ours`: their states are tensors of ours, which lie in memory row by row.
    """
    # Of all before any is switched: an optimizer that steps by another one, as SAM is written, has the groups of that.
    before = [_flags_of(optimizer) for optimizer in optimizers]
    for optimizer, flags in zip(optimizers, before, strict=True):
        _set_kernel(session, optimizer, kernel, flags, has_states_of_ours=has_states_of_ours)


def _flags_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The flags of a plain run, of `defaults` and each group. `defaults` too: a group that is added later takes its flags from there."""
    switched = _SWITCHED.get(optimizer)
    if switched is not None and switched.by:
        return switched.before
    holders: list[dict[str, Any]] = [optimizer.defaults, *optimizer.param_groups]
    return [{name: holder[name] for name in _NAMES if name in holder} for holder in holders]


def _set_kernel(
    session: Session,
    optimizer: torch.optim.Optimizer,
    kernel: Kernel,
    before: list[dict[str, Any]],
    *,
    has_states_of_ours: bool,
) -> None:
    flags = _FLAGS[kernel]
    switched = _SWITCHED.get(optimizer)
    if switched is None or not switched.by:
        switched = _SWITCHED[optimizer] = _Switched(before)
    token = object()
    switched.by.add(token)
    was_fused = any(flags_before.get("fused") for flags_before in before)
    unscales = getattr(optimizer, _STEP_UNSCALES, False)

    def put(_: object = None) -> None:
        for holder in (optimizer.defaults, *optimizer.param_groups):
            holder.update({name: value for name, value in flags.items() if name in holder})
        _place_counts(optimizer, beside_parameters=kernel == "fused")
        if unscales and kernel != "fused":
            # Only the fused kernel divides gradients by the scale itself: a GradScaler is to do it before the step.
            setattr(optimizer, _STEP_UNSCALES, False)

    def as_before(holder: dict[str, Any], index: int) -> None:
        holder.update(before[min(index, len(before) - 1)])

    # A checkpoint of this run must load into a plain one: with the `fused` flag of a group torch would pick the
    # fused kernel there as well.
    def saved(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        groups = [dict(group) for group in state_dict["param_groups"]]
        for index, group in enumerate(groups, 1):
            as_before(group, index)
        states = state_dict["state"]
        if kernel == "fused" and not was_fused:
            states = {key: _with_count_on_host(state) for key, state in states.items()}
        return {**state_dict, "param_groups": groups, "state": states}

    # A copy and a pickle train without the plan, by the optimizer's own implementation.
    def state_of_copies() -> Any:
        state: Any = type(optimizer).__getstate__(optimizer)
        if not isinstance(state, dict) or not {"defaults", "param_groups"} <= state.keys():
            return state
        copied = [dict(holder) for holder in (state["defaults"], *state["param_groups"])]
        for index, holder in enumerate(copied):
            as_before(holder, index)
        return {**state, "defaults": copied[0], "param_groups": copied[1:]}

    def undo() -> None:
        for index, holder in enumerate((optimizer.defaults, *optimizer.param_groups)):
            as_before(holder, index)
        switched.by.discard(token)
        _place_counts(optimizer, beside_parameters=was_fused)
        if unscales:
            setattr(optimizer, _STEP_UNSCALES, True)

    def before_step(*_: object) -> None:
        for index, group in enumerate(optimizer.param_groups, 1):
            if _needs_own_kernel(optimizer, group, kernel, has_states_of_ours=has_states_of_ours):
                as_before(group, index)

    def after_step(*_: object) -> None:
        if any(group.get(name) != flag for group in optimizer.param_groups for name, flag in flags.items()):
            put()

    session.when_undone(undo)
    if kernel != "for-loop" and not was_fused:
        session.hook(optimizer.register_step_pre_hook, before_step)
        session.hook(optimizer.register_step_post_hook, after_step)
    # Before hooks of the program's, which are to see a checkpoint of a plain run.
    session.hook(functools.partial(optimizer.register_state_dict_post_hook, prepend=True), saved)
    session.set(optimizer, "__getstate__", state_of_copies)
    session.hook(optimizer.register_load_state_dict_post_hook, put)
    put()


def _needs_own_kernel(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], kernel: Kernel, *, has_states_of_ours: bool
) -> bool:
    """Whether `kernel` would do another step of a group than the optimizer's own implementation, or none."""
    if kernel == "foreach":
        # torch takes a rate that is a tensor there only where all else is on the card too (torch/optim/adam.py, `Adam.__init__`).
        given = (group.get("lr"), *(group.get("betas") or ()))
        return not group.get("capturable") and any(isinstance(each, torch.Tensor) for each in given)
    if group.get("momentum") and isinstance(optimizer, torch.optim.SGD) and _has_first_gradients(optimizer, group):
        return True
    # Those of ours are not to be read before they are needed.
    if _are_contiguous(group, {} if has_states_of_ours else optimizer.state):
        return False
    return has_states_of_ours or not all(_lies_alike(p, optimizer.state.get(p, {})) for p in group["params"])


def _are_contiguous(group: dict[str, Any], states: Mapping[Any, Any]) -> bool:
    """Whether all parameters of a group, their gradients and states lie row by row, in one dtype, as almost all do: asked before each step, in little time."""
    for parameter in group["params"]:
        gradient = parameter.grad
        if not parameter.is_contiguous() or _has_gradient_of_another_type(parameter):
            return False
        if type(gradient) is torch.Tensor and not gradient.is_contiguous():
            return False
        if parameter in states:
            dtype = parameter.dtype
            for name, value in states[parameter].items():
                if (
                    type(value) is torch.Tensor
                    and name != _COUNT
                    and not (value.is_contiguous() and value.dtype == dtype)
                ):
                    return False
    return True


def _lies_alike(parameter: torch.Tensor, state: Mapping[str, Any]) -> bool:
    """Whether a parameter, its gradient and its states have their elements in the same order in memory, and in one dtype. Fused kernels go through memory: on
    a card torch raises where these differ, at the host it updates other elements (aten/src/ATen/native/cpu/FusedAdamKernel.cpp)."""
    of_state = (value for name, value in state.items() if name != _COUNT)
    others = [each for each in (parameter.grad, *of_state) if _has_strides(each) and each.shape == parameter.shape]
    stride, dtype = parameter.stride(), parameter.dtype
    if _has_gradient_of_another_type(parameter):
        return False
    return is_dense(parameter) and all(each.stride() == stride and each.dtype == dtype for each in others)


def _has_gradient_of_another_type(parameter: torch.Tensor) -> bool:
    """Whether the program has another type for the gradient than for the parameter (`grad_dtype`), also of one that waits for a second backward pass."""
    return parameter.grad is not None and parameter.grad.dtype != parameter.dtype


def is_dense(value: torch.Tensor) -> bool:
    """Whether the elements are one range of memory, in whatever order."""
    sizes = sorted((stride, size) for stride, size in zip(value.stride(), value.shape, strict=True) if size > 1)
    expected = 1
    for stride, size in sizes:
        if stride != expected:
            return False
        expected *= size
    return True


def _has_strides(value: Any) -> TypeGuard[torch.Tensor]:
    # What waits for a second backward pass comes as the parameter lies.
    return isinstance(value, torch.Tensor) and not isinstance(value, LazyTensor) and value.layout == torch.strided


def _has_first_gradients(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> bool:
    """Whether some of the parameters of a group have their first gradient now and others had theirs before: torch's fused SGD takes a momentum for all of them,
    or for none (torch/optim/sgd.py, `_fused_sgd`), where a layer was left out or unfreezes."""
    of_each = {has_momentum(optimizer.state.get(p, {})) for p in group["params"] if p.grad is not None}
    return len(of_each) > 1


def has_momentum(states: Mapping[str, Any]) -> bool:
    """Whether a parameter has had a gradient before, as SGD with momentum sees it: torch's fused one takes those that have and those that have not apart."""
    return states.get("momentum_buffer") is not None


def _place_counts(optimizer: torch.optim.Optimizer, *, beside_parameters: bool) -> None:
    for group in optimizer.param_groups:
        # A capturable optimizer keeps its counters on the device in every implementation.
        if group.get("capturable"):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            count = state.get(_COUNT)
            if isinstance(count, torch.Tensor):
                device = parameter.device if beside_parameters else torch.device("cpu")
                # Another one only where it has to be: two optimizers may hold the same (`load_state_dict` of another's states).
                state[_COUNT] = count.to(device=device, dtype=torch.float32 if beside_parameters else count.dtype)


def _with_count_on_host(state: dict[str, Any]) -> dict[str, Any]:
    count = state.get(_COUNT)
    return {**state, _COUNT: count.cpu()} if isinstance(count, torch.Tensor) else state
