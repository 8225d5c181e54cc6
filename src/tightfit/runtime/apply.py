"""Puts a plan on a live model and its optimizers, all of it or nothing, on the virtual GPU and on a real one alike."""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice, Plan
from tightfit.techniques.catalogue import technique, techniques
from tightfit.techniques.session import Session

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def apply(plan: Plan, model: torch.nn.Module, optimizer: Optimizers = ()) -> Session:
    """The session of `model` and its optimizers with `plan` on it; `session.undo()` takes it off again.

    Raises:
        ApplyError: the plan was made for another model, or cannot be put on this one. Nothing has been changed then. It is also raised by the
            first step, if its inputs are larger than those that the plan was made for.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    planned = {root["class"]: root for root in plan.model.get("roots", ())}
    name = type(model).__name__
    if planned and name not in planned:
        raise ApplyError(f"the plan is for {' and '.join(planned)}, and this model is a {name}; make a plan for it")
    if planned and planned[name]["num_parameters"] != num_parameters(model):
        raise ApplyError(
            f"the plan is for a {name} of {planned[name]['num_parameters']:,} parameters, and this one has {num_parameters(model):,}; make a plan for it"
        )
    session = apply_choices(choices_for(plan.choices, name, is_only=len(planned) <= 1), model, optimizers)
    if planned:
        check_inputs(session, planned[name]["inputs"])
    return session


def apply_choices(
    choices: Iterable[Choice], model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]
) -> Session:
    """The same for bare choices, in the order in which their techniques are put on."""
    session = Session(model=model, optimizers=optimizers)
    by_name: dict[str, list[Choice]] = {}
    for choice in choices:
        by_name.setdefault(technique(choice.technique).name, []).append(choice)
    for name, known in techniques().items():
        if name not in by_name:
            continue
        try:
            known.apply(session, by_name[name])
        except ApplyError as error:
            session.undo()
            raise ApplyError(f"{name}: {error}") from error
        except BaseException:
            session.undo()
            raise
    return session


def choices_for(choices: Iterable[Choice], root: str, *, is_only: bool) -> list[Choice]:
    """The choices that concern the model whose class is `root`: those inside it, and those that name no module, if it is the only one."""
    return [c for c in choices if _root(c.where) == root or (is_only and not is_module(c.where))]


def is_module(where: str) -> bool:
    """Whether a place is a path of the module tree; all others are lower-case words."""
    return not where.islower() or "." in where


def _root(where: str) -> str:
    return where.partition(".")[0]


def num_parameters(model: torch.nn.Module) -> int:
    """Elements of all parameters, each counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def input_shapes(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, list[int]]:
    """The shapes of the tensors among the arguments of a call, by position or name."""
    named = [*enumerate(args), *kwargs.items()]
    return {str(name): list(value.shape) for name, value in named if isinstance(value, torch.Tensor)}


def check_inputs(session: Session, planned: Mapping[str, Sequence[int]]) -> None:
    """Has the first forward with gradients refuse inputs that are larger than those of the plan."""

    def around(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            _refuse_larger(planned, input_shapes(args, kwargs))
        return forward(*args, **kwargs)

    session.wrap_forward(session.model, around)


def _refuse_larger(planned: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> None:
    elements = functools.partial(functools.reduce, lambda product, size: product * size)
    for name, shape in found.items():
        known = planned.get(name)
        if known is not None and elements(shape, 1) > elements(known, 1):
            raise ApplyError(
                f"input {name} is {_shape(shape)}, larger than the {_shape(known)} that the plan was made for; make a plan for this batch"
            )


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape)) or "a scalar"
