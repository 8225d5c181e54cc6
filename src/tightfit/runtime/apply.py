"""Applies a plan to a live model and its optimizers, completely or not at all, on the virtual GPU and on a real one alike."""

import dataclasses
import os
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from tightfit.capture.processes.process_role import begin_plan, is_simulated
from tightfit.errors import ApplyError, UsageError
from tightfit.errors.faults import answering, note
from tightfit.planner.plan import Choice, Plan
from tightfit.runtime.input_shapes import InputCheck, Inputs, Tell
from tightfit.runtime.setting_kinds import settings_of
from tightfit.techniques.registry import technique, techniques
from tightfit.techniques.session import CHECK_STEPS, Session
from tightfit.techniques.technique import AbstractTechnique, check_each
from tightfit.techniques.wrappers.forwards import copied_wrappers, take_off_copied
from tightfit.torch_hooks.optimizer_step_hooks import is_called_by_step_hook
from tightfit.torch_hooks.saved_variables import saved_reader
from tightfit.torch_hooks.weak_references import WeakTable

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]
OF_OPTIMIZERS = ("optimizer", "gradients")
"""The places of what is put on optimizers alone."""

# The session of each model. It is kept by the model's own forward, and not here.
_sessions: WeakTable[torch.nn.Module, weakref.ref[Session]] = WeakTable()


def apply(
    plan: Plan,
    model: torch.nn.Module,
    optimizer: Optimizers = (),
    *,
    check_steps: int = CHECK_STEPS,
    disk_folder: str | os.PathLike[str] | None = None,
) -> Session:
    """Applies `plan` to `model` and its optimizers, and returns the session; `session.undo()` removes it again.

    In the first `check_steps` steps, and after a change of shape, mode or module, what techniques compute is compared with the plain run. What a plan
    keeps on disk goes to a file in `disk_folder`, by default that for temporary files (TMPDIR).

    Inputs larger than those that the plan was made for are a `UserWarning`, once. `model` is the module that the program calls; for the result of torch.compile, the model inside is taken. For a plan of several models, call
    this once for each, with its own optimizers.

    Raises:
        ApplyError: the plan was made for another model, or cannot be applied to this one. Nothing has been changed then.
    """
    for what, given, kind in (("plan", plan, Plan), ("model", model, torch.nn.Module)):
        if not isinstance(given, kind):
            hint = (
                "; tightfit.Plan.load(FILE) reads one" if isinstance(given, str | os.PathLike) and kind is Plan else ""
            )
            raise UsageError(
                f"the {what} is {str(given)[:80]!r}, a {type(given).__name__}, not a {kind.__name__}{hint}"
            )
    model = innermost(model)
    optimizers = [_own(o) for o in ([optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer)]
    if has_plan(model):
        raise ApplyError(f"there is a plan on this {type(model).__name__} already; undo its session first")
    held = {id(p) for p in model.parameters()}
    for each in optimizers:
        if not any(id(p) in held for group in each.param_groups for p in group["params"]):
            raise ApplyError(f"the {type(each).__name__} holds no parameter of this {type(model).__name__}")
    planned = planned_for(plan.model.get("roots", ()), model)
    return apply_choices(
        choices_for(plan.choices, model, is_first=True),
        model,
        optimizers,
        # On the virtual GPU there are no values to compare, and what is read back is assumed.
        check_steps=0 if is_simulated() else check_steps,
        disk_folder=None if disk_folder is None else os.fspath(disk_folder),
        last=lambda session: watch_inputs(session, planned, lambda said: warnings.warn(said, stacklevel=2)),
    )


def apply_choices(
    choices: Iterable[Choice],
    model: torch.nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    *,
    check_steps: int = CHECK_STEPS,
    disk_folder: str | None = None,
    last: Callable[[Session], object] | None = None,
) -> Session:
    """The same for choices without a plan, in the order in which their techniques are applied; `last` is called after them, under the same guarantee."""
    choices = list(choices)
    # Before anything is changed: older releases of torch may be built in a way that it cannot read.
    saved_reader()
    begin_plan(is_alike=all(technique(choice.technique).is_alike_in_batches for choice in choices))
    session = Session(model=model, optimizers=optimizers, check_steps=check_steps, disk_folder=disk_folder)
    # A deep copy of a model with a plan brings the wrappers along, without a session that could take them off.
    copied = copied_wrappers(model)
    try:
        for module in copied:
            take_off_copied(module)
        return apply_to(session, choices, last=last)
    except BaseException:
        for module, wrapped in copied.items():
            vars(module)["forward"] = wrapped
        raise


def apply_to(
    session: Session, choices: Iterable[Choice], *, last: Callable[[Session], object] | None = None
) -> Session:
    """Applies choices to the objects of a session, all of them or none, and returns it.

    An interrupt undoes all of it, as long as the session was not returned to the caller.

    Raises:
        ApplyError: one cannot be applied. The session has been undone then.
    """
    # A hook more would end the program's step with an error of Python's.
    if any(map(is_called_by_step_hook, session.optimizers)):
        raise ApplyError(
            "the plan is put on by a step hook of its own optimizer, while torch goes through them; put it on before the step, or after it"
        )
    for name, parameter in session.model.named_parameters():
        # Gradients are taken, kept and given back by techniques of many kinds.
        if type(parameter).grad is not torch.Tensor.grad:
            raise ApplyError(
                f"the gradient of {name} is a property of its class {type(parameter).__name__}, and no plan knows what it does"
            )
    by_name: dict[str, list[Choice]] = {}
    for choice in choices:
        by_name.setdefault(technique(choice.technique).name, []).append(choice)
    try:
        # In the order of the catalogue, whatever the order of the plan: what works inside of a module comes
        # before what is wrapped around it.
        for name, known in techniques().items():
            if name in by_name:
                if name == "trained_weight_streaming" or any(c.where in OF_OPTIMIZERS for c in by_name[name]):
                    session.verdict.updates_by = name
                # The first call of a model may be one of `torch.func`, inside of which tensors of ours would be its own, and gone with it.
                with temporarily_clear_interpreter_stack():
                    _put_on(session, name, known, by_name[name])
        if by_name:
            # After all techniques: some ask for a module whose forward is its own, and the guard is to be the
            # outermost.
            session.guard()
        if last is not None:
            last(session)
        return session.complete()
    except BaseException as error:
        undo_after(session, error)
        note(error, "the run")
        raise


def _put_on(session: Session, name: str, known: AbstractTechnique, choices: Sequence[Choice]) -> None:
    try:
        settings = check_each(choices, lambda choice: settings_of(known, choice.where, choice.settings))
        choices = [dataclasses.replace(c, settings=each) for c, each in zip(choices, settings, strict=True)]
        with answering(f"technique {name}", technique=name):
            known.apply(session, choices)
    except ApplyError as error:
        raise ApplyError(f"{name}: {error}", technique=name, places=error.places) from error


def undo_after(session: Session, error: BaseException) -> None:
    """Undoes a session that `error` ended. A failure to undo is added to `error` as a note."""
    try:
        session.undo()
    except Exception as other:  # noqa: BLE001 - it is told with the first one
        error.add_note(f"and while undoing: {type(other).__name__}: {other}")


def choices_for(choices: Iterable[Choice], model: torch.nn.Module, *, is_first: bool) -> list[Choice]:
    """The choices for `model`: those for modules inside it, and those that name no module, if it is the first model with its optimizers."""
    name = type(model).__name__
    return [c for c in choices if root_of(c.where) == name or (is_first and not is_module(c.where))]


def planned_for(roots: Sequence[Mapping[str, Any]], model: torch.nn.Module) -> Inputs | None:
    """The inputs that a plan with these roots was made for; None if the plan knows of no model.

    Raises:
        ApplyError: the plan is for other models.
    """
    if not roots:
        return None
    name, count = type(model).__name__, num_parameters(model)
    of_class = [root for root in roots if root["class"] == name]
    if not of_class:
        planned = " and ".join(dict.fromkeys(root["class"] for root in roots))
        raise ApplyError(f"the plan is for a {planned}, and this model is a {name}; make a plan for it")
    for root in of_class:
        if root["num_parameters"] == count:
            return Inputs.of_root(root)
    raise ApplyError(
        f"the plan is for a {name} of {of_class[0]['num_parameters']:,} parameters, and this one has {count:,}; make a plan for it"
    )


def watch_inputs(session: Session, planned: Inputs | None, tell: Tell) -> InputCheck:
    """Wraps the forward of the session's model to compare its inputs with those of the plan; the wrapper keeps the session alive."""
    check = InputCheck(session, planned, tell)
    session.wrap_forward(session.model, check)
    _sessions[session.model] = weakref.ref(session)
    return check


def has_plan(model: torch.nn.Module) -> bool:
    """Whether a session is active on the model."""
    return session_on(model) is not None


def session_on(model: torch.nn.Module) -> Session | None:
    """The session that is active on the model."""
    known = _sessions.get(model)
    session = None if known is None else known()
    return session if session is not None and session.is_on else None


def is_module(where: str) -> bool:
    """Whether a place is a module path; all others are lower-case words."""
    return not where.islower() or "." in where


def root_of(where: str) -> str:
    """The class of the model that a place belongs to."""
    return where.partition(".")[0]


def num_parameters(model: torch.nn.Module) -> int:
    """Elements of all parameters, each counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def innermost(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside of what torch.compile returned."""
    # Of a scripted module the table is no dict.
    while isinstance(modules := vars(model).get("_modules"), dict) and isinstance(
        inner := modules.get("_orig_mod"), torch.nn.Module
    ):
        model = inner
    return model


def _own(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The torch optimizer inside of a wrapper by Accelerate or Lightning."""
    # AcceleratedOptimizer and LightningOptimizer both keep it as `optimizer`.
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = inner
    return optimizer
