"""Steps of an optimizer of torch.optim in other ways than all parameters at once: one parameter alone, or something else in its place.

The optimizer stays the script's own object, and its `step` is not replaced: schedulers have wrapped it, and count its calls. What is to happen
instead runs in a hook before it, after which the step itself finds nothing to do.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.session import Session

UpdateOne = Callable[[torch.Tensor, int], None]

# These update every parameter from its own gradient and state only; LBFGS looks at all of them together.
_NOT_SEPARABLE = ("LBFGS",)


def check_separable(optimizer: torch.optim.Optimizer, technique: str) -> None:
    """Does nothing where `optimizer` updates every parameter by itself, as all but one of torch.optim do.

    Raises:
        ApplyError: it is not known to.
    """
    kind = type(optimizer)
    owner = next(base for base in kind.__mro__ if "step" in vars(base))
    if not owner.__module__.startswith("torch.optim.") or kind.__name__ in _NOT_SEPARABLE:
        raise ApplyError(
            f"{kind.__module__}.{kind.__name__} is not known to update each parameter by itself; leave {technique} out of the plan"
        )
    if any(group.get("differentiable") for group in optimizer.param_groups):
        raise ApplyError(
            f"{kind.__name__}(differentiable=True) cannot be stepped apart; leave {technique} out of the plan"
        )


def step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """The optimizer's step without its hooks and without what schedulers have put around it."""
    step = type(optimizer).step
    inner = vars(step)["__wrapped__"] if getattr(step, "hooked", False) else step
    return lambda: inner(optimizer)


def groups_by_parameter(optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, int]:
    """Which group each parameter is in, by the index of the group: a checkpoint that is loaded brings new group objects."""
    return {p: index for index, group in enumerate(optimizer.param_groups) for p in group["params"]}


@contextmanager
def only(optimizer: torch.optim.Optimizer, group: int, parameter: torch.Tensor) -> Iterator[None]:
    """While this lasts `optimizer` has one parameter, with the hyperparameters of that group as they are now."""
    groups = optimizer.param_groups
    optimizer.param_groups = [{**groups[group], "params": [parameter]}]
    try:
        yield
    finally:
        optimizer.param_groups = groups


def update_alone(optimizer: torch.optim.Optimizer) -> UpdateOne:
    """Updates one parameter, of the group with this index, as the optimizer's step would."""
    step = step_of(optimizer)

    def update(parameter: torch.Tensor, group: int) -> None:
        with only(optimizer, group, parameter):
            step()

    return update


@dataclasses.dataclass(slots=True, kw_only=True)
class _Replaced:
    """The hooks around one optimizer's step that run `update` in its place."""

    update: Callable[[], None]
    groups: list[dict[str, Any]] | None = None

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        closure = args[1] if len(args) > 1 else kwargs.get("closure")
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
            args, kwargs = (args[0],), {"closure": lambda: loss}
        with torch.no_grad():
            self.update()
        self.groups, optimizer.param_groups = optimizer.param_groups, []
        return args, kwargs

    def after(self, optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        if self.groups is not None:
            self.groups, optimizer.param_groups = None, self.groups


def replace_step(session: Session, optimizer: torch.optim.Optimizer, update: Callable[[], None]) -> None:
    """Has `update` run whenever `optimizer` is stepped, in place of what it does; closures are called first, as it would."""
    replaced = _Replaced(update=update)
    for handle in (
        optimizer.register_step_pre_hook(replaced.before),
        optimizer.register_step_post_hook(replaced.after),
    ):
        session.when_undone(handle.remove)
