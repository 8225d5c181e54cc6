"""Optimizer-in-backward: updates parameters within a backward pass, with lazy gradients on `p.grad` meanwhile.

Nothing is updated before the optimizer steps: the first backward pass keeps norms, and a second one, within the step, updates parameters and frees
their gradients (`tightfit.techniques.lazy_tensors.retained_graphs`). So whatever the script does in between (reads of gradients or weights, new
settings, edited states, a skipped step) has the same effect as without updates in the backward pass. Nothing else would be exact: an update
that the script has not asked for yet cannot be undone without a copy of the parameter and its states.

A backward pass whose gradients are also used elsewhere (hooks, a buffer of the script's own, second derivatives) is left to torch.
"""

import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from tightfit.capture.observe.host_python import spends
from tightfit.cost.host_python import HostWork
from tightfit.effects.ambient import dispatch_modes_of_program
from tightfit.effects.bytecode.class_questions import ClassQuestion
from tightfit.effects.values.card_sums import unseen
from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.code_in_graphs import CodeInGraph, runs_own_code
from tightfit.techniques.lazy_tensors.data_of_stand_ins import refuse_data_of_stand_ins
from tightfit.techniques.lazy_tensors.deferred_gradients import REMEDY, deferred_gradient, settle, settle_held_zeros
from tightfit.techniques.lazy_tensors.gradient_forms import GradientForms
from tightfit.techniques.lazy_tensors.lazy_tensor import is_in_compiled_code
from tightfit.techniques.lazy_tensors.programs_code import ProgramsCode, RegionStates
from tightfit.techniques.lazy_tensors.retained_graphs import (
    KeptPass,
    told_of_gradients,
)
from tightfit.techniques.optimizer.updates.common_memory import CommonMemory
from tightfit.techniques.optimizer.updates.given_tensors import GivenTensors
from tightfit.techniques.optimizer.updates.optimizer_steps import UpdateOne, groups_by_parameter, update_within_step
from tightfit.techniques.optimizer.updates.standing_gradients import Standing
from tightfit.techniques.session import Session
from tightfit.techniques.wrappers.first_order import are_transforms_active
from tightfit.techniques.wrappers.forwards import OnlyHere
from tightfit.techniques.wrappers.made_before import make_before_casts_and_swaps
from tightfit.techniques.wrappers.reduced_gradients import ReducedGradients
from tightfit.torch_hooks.backward import BackwardPass, leaves_with_hooked_accumulators, on_backward
from tightfit.torch_hooks.node_hooks import is_any_node_hooked, on_node_hooks
from tightfit.torch_hooks.tensor_hooks import is_hooked, on_tensor_hooks

# What one sees in a graph of hooks on modules, of a recomputation in a backward pass of its own, and of gradients that are all there already.
_NODES_WITH_MORE = {
    # The identity that `register_full_backward_hook` inserts into the graph (torch/nn/modules/_functions.py): a
    # second pass would call the hook twice.
    "BackwardHookFunctionBackward": "a module has a backward hook",
    "CheckpointFunctionBackward": "torch.utils.checkpoint recomputes with use_reentrant=True",
    "_JoinedBackward": "micro_batches computes all of them in the forward",
}
_USED = f"after the update that consumed it; {REMEDY}"
_MAX_READ_IN_A_ROW = 2

Expecting = Callable[[Iterable[torch.Tensor]], AbstractContextManager[None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Stepper:
    """One optimizer: its update of one parameter, the context of updates in a known order, and whether all parameters are updated this way instead of
    by its own step.
    """

    update: UpdateOne
    expecting: Expecting
    updates_all: bool


class _KeptPasses:
    """The backward passes whose gradients wait. `why_kept` is the reason to keep gradients from now on, `why_kept_in_step` that to keep them until the next
    step, if there is one."""

    def __init__(self) -> None:
        self.kept: list[KeptPass] = []
        self.why_kept = self.why_kept_in_step = ""
        self._num_read = 0

    def forget_done(self) -> None:
        """Drops the passes of which no gradient waits."""
        self.kept = [kept for kept in self.kept if kept.gradients.now]

    def of_graphs_that_may_go(self) -> list[KeptPass]:
        """Those whose graph the program itself retains, so that it may run it once more, and free it."""
        return [kept for kept in self.kept if kept.backward.keeps_graph and kept.gradients.now]

    def make_before(self, backward: BackwardPass) -> None:
        """Materialises gradients that the program has taken off their parameters, and those whose graph this pass is about to free."""
        may_go = [] if backward.keeps_graph else self.of_graphs_that_may_go()
        kept = [each for each in self.kept if each.gradients.has_taken_off()]
        kept += [each for each in may_go if each not in kept and each.shares_graph_with(backward)]
        for each in kept:
            each.make_all()
        self.forget_done()
        self._count_read(kept)

    def used(self, kept: KeptPass) -> None:
        """A pass has run a second time within a step."""
        self.kept.remove(kept)
        self._num_read = 0

    def make_before_step(self, parameters: Collection[torch.Tensor]) -> None:
        """Materialises all gradients that wait, if a pass leads to one of these, which an optimizer updates by itself."""
        updated = [parameter for parameter in parameters if parameter.grad is not None]
        if any(kept.gradients.now and kept.goes_to(updated) for kept in self.kept):
            self.make_all()

    def make_all(self) -> None:
        """Materialises the gradients that wait."""
        kept = list(self.kept)
        for each in kept:
            each.make_all()
        self.kept.clear()
        self._count_read(kept)

    def clear_way(self, reached: Iterable[torch.Tensor]) -> Standing:
        """Removes lazy gradients before new ones arrive, and returns them: zeros that these are added to, and consumed ones."""
        self.forget_done()
        standing = Standing()
        for parameter in reached:
            settle_held_zeros(parameter)
            deferred = deferred_gradient(parameter)
            if deferred is None or parameter.grad is None:
                continue
            if deferred.state == "deferred":
                self.make_all()
            if deferred.state == "zero":
                standing.zeros[parameter], parameter.grad = parameter.grad, None
            elif deferred.state == "used":
                standing.used[parameter], parameter.grad = parameter.grad, None
            settle(parameter)
        return standing

    def _count_read(self, kept: Collection[KeptPass]) -> None:
        if not kept:
            return
        # Who reads gradients before a further pass of the same step may move the weights between the two, and back again before the step (SAM).
        self.why_kept_in_step = "gradients are read before another backward pass of the same step"
        self._num_read += 1
        # A program that reads gradients in every step would pay two passes each time and save nothing.
        if self._num_read >= _MAX_READ_IN_A_ROW:
            self.why_kept = "gradients are read or added to before the optimizer steps"


class _Steps:
    """Runs within the steps of the optimizers: a second backward pass, in which parameters are updated one by one."""

    def __init__(
        self,
        session: Session,
        steppers: Mapping[torch.optim.Optimizer, _Stepper],
        passes: _KeptPasses,
        given: GivenTensors,
    ) -> None:
        self.session = session
        self._steppers = steppers
        self._passes = passes
        self._given = given
        self._num_checked = 0
        self._reads_later = False
        self._common_memory = CommonMemory()

    def step(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, None]:
        """Runs within a step; returns the parameters that are updated already."""
        self._given.end_step()
        self._passes.why_kept_in_step = ""
        stepper, groups = self._steppers[optimizer], groups_by_parameter(optimizer)
        for parameter in groups:
            deferred = deferred_gradient(parameter)
            if deferred is None:
                continue
            if deferred.state == "used":
                raise self.session.refuse(
                    f"{type(optimizer).__name__} is stepped with gradients that an update has already consumed and "
                    f"that were not cleared since; {REMEDY}"
                )
            if deferred.state == "zero":
                deferred.whole()
        done = self._second_pass(optimizer, groups)
        for parameter in groups:
            settle(parameter)
        if stepper.updates_all:
            left = [parameter for parameter in groups if parameter not in done and parameter.grad is not None]
            with stepper.expecting(left):
                for parameter in left:
                    stepper.update(parameter, groups[parameter])
                    done[parameter] = None
        return done

    def _second_pass(
        self, optimizer: torch.optim.Optimizer, groups: Mapping[torch.Tensor, int]
    ) -> dict[torch.Tensor, None]:
        on_parameters = [(kept, kept.gradients.on_parameters()) for kept in self._passes.kept]
        mine = [kept for kept, known in on_parameters if any(parameter in groups for parameter in known)]
        others = [kept for kept in self._passes.kept if kept.gradients.now and kept not in mine]
        if not mine:
            self._passes.make_before_step(groups.keys())
            return {}
        known = {parameter: deferred for _, found in on_parameters for parameter, deferred in found.items()}
        own = set(map(id, known.values()))
        # The program has set the gradient of one parameter on another as well.
        if any(id(d) in own and known.get(p) is not d for p in groups if (d := deferred_gradient(p)) is not None):
            self._passes.make_all()
            return {}
        is_common = self._common_memory.of_parameters(optimizer)
        if is_common or self._common_memory.of_states(optimizer):
            self._passes.make_all()
            _tell(self.session, f"{'parameters' if is_common else 'states'} of the optimizer share memory")
            return {}
        # Several losses with a pass each (a GAN's, a multi-task model's): updates in the second pass of one
        # would change the weights that another graph has saved.
        if len(mine) > 1 or others:
            # What one pass updates, another one would see.
            self._passes.make_all()
            return {}
        (kept,) = mine
        parameters = {parameter: None for parameter in known if parameter in groups}
        through_host = not self._can_update_in(kept)
        num_updated = 0

        def update(parameter: torch.Tensor) -> None:
            nonlocal num_updated
            num_updated += 1
            self._update_one(parameter, optimizer, groups[parameter])

        try:
            # In the order in which the first pass has come to them.
            with self._steppers[optimizer].expecting(parameters):
                updated = kept.use(update, parameters, _USED, through_host=through_host)
        except BaseException as error:
            # Nothing may be trained on from here.
            refusal = self._refuse_to_go_on(error, num_updated, len(parameters))
            if isinstance(error, ApplyError):
                raise refusal from error
            raise
        self._passes.used(kept)
        if len(updated) < len(parameters):
            self.session.statistics["gradients kept to the step"] += len(parameters) - len(updated)
            _tell(self.session, "something else also holds a parameter's memory when its gradient arrives")
        return updated

    def _refuse_to_go_on(self, error: BaseException, num_updated: int, num_parameters: int) -> ApplyError:
        """The error of a second pass that was not finished, with what it has left half done."""
        if isinstance(error, ApplyError) and not num_updated:
            return self.session.refuse(str(error))
        lost = f" {num_updated} of {num_parameters} parameters may have been updated: load the last checkpoint;" * bool(
            num_updated
        )
        self.session.verdict.forget()
        if isinstance(error, ApplyError):
            return self.session.refuse(f"{error};{lost.removesuffix(';')}")
        return self.session.refuse(
            f"the second backward pass, in which parameters are updated, was not finished;{lost} {REMEDY}"
        )

    def _can_update_in(self, kept: KeptPass) -> bool:
        """Whether parameters may be updated within the second pass: not in the first steps, in which a trial runs, nor if a tensor was written to
        since the first pass, or if an autograd function of the program's own, or a region that is recomputed, may read what an update changes.
        """
        if self._num_checked < self.session.check_steps:
            self._num_checked += 1
            # A region that is recomputed after the gradient of a parameter that it adds refuses in the trial.
            with self.session.verdict.on_trial():
                self._reads_later = self._reads_later or not kept.try_out()
            return False
        # On the virtual GPU there are no values to try anything with, and the tape is to show what a run does
        # after its first steps.
        if not self.session.check_steps:
            return True
        may_read = self._reads_later or self.session.verdict.may_read_optimizers
        is_uncertain = may_read or runs_own_code(kept.backward.nodes())
        if is_uncertain:
            self.session.statistics["backward passes with gradients in host memory"] += 1
            note = (
                "gradients wait in host memory, because a backward pass may read parameters after their "
                f"gradients ({REMEDY})"
            )
            if note not in self.session.notes:
                self.session.notes.append(note)
        return not is_uncertain and not kept.may_be_other()

    def _update_one(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer, group: int) -> None:
        spends(HostWork.UPDATED_PARAMETER)
        self._steppers[optimizer].update(parameter, group)
        self.session.statistics["parameters updated in backward"] += 1


class Updates:
    """Wraps the backward passes and the steps of the optimizers of one session, whose parameters are updated one by one by `updates`.

    `updates_all`: the optimizer's own step cannot be used for parameters that were not updated in the backward pass. `expecting`: contexts around
    updates in the order that they are given.
    """

    def __init__(
        self,
        session: Session,
        updates: Mapping[torch.optim.Optimizer, UpdateOne],
        *,
        updates_all: bool = False,
        expecting: Mapping[torch.optim.Optimizer, Expecting] | None = None,
    ) -> None:
        self.session = session
        self._steppers = {
            optimizer: _Stepper(
                update=update, updates_all=updates_all, expecting=(expecting or {}).get(optimizer, _expecting_nothing)
            )
            for optimizer, update in updates.items()
        }
        self._passes = _KeptPasses()
        self._given = GivenTensors()
        self._question = ClassQuestion(session.model)
        self._states = RegionStates()
        self._reduced = ReducedGradients()
        self._forms = GradientForms()
        self._steps = _Steps(session, self._steppers, self._passes, self._given)
        self.is_over = False

    def install(self) -> None:
        """Registers hooks on optimizers and backward passes, until the session is undone.

        Raises:
            ApplyError: the program has put hooks on the accumulator of a gradient, which a second backward pass would call again.
        """
        # Of one that the plan does not update the hook may do so by itself, before a second pass (torch's own optimizers in the backward pass).
        watched_leaves = {*_owned(self._steppers), *self.session.model.parameters()}
        if any(leaf in watched_leaves for leaf in leaves_with_hooked_accumulators()):
            raise ApplyError(
                "the gradient accumulator of a parameter has a hook, which a second backward pass would call again; "
                f"{REMEDY}"
            )
        for optimizer in self._steppers:
            update_within_step(self.session, optimizer, functools.partial(self._steps.step, optimizer))
        self.session.wrap_forward(self.session.model, _Inputs(self))
        watched = on_backward(self), on_tensor_hooks(self), on_node_hooks(self), _before_other_steps(self)
        leaves = *watched, refuse_data_of_stand_ins(), make_before_casts_and_swaps(self._passes.make_all)

        def leave() -> None:
            for each in leaves:
                each()

        self.session.when_undone(leave)
        self.session.when_undone(self._end)

    def _end(self) -> None:
        """Materialises the gradients that wait."""
        self.is_over = True
        try:
            self._passes.make_all()
        except ApplyError as error:
            # The script has changed something since: a read of one of these gradients gets the error.
            for kept in self._passes.kept:
                kept.gradients.give_up(str(error))

    def other_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Called before any optimizer's step: one that is not of this session needs materialised gradients, and so do passes that lead to what it updates."""
        if optimizer in self._steppers:
            return
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        owned = _owned(self._steppers)
        if any(parameter in owned for parameter in parameters):
            self._passes.make_all()
        else:
            self._passes.make_before_step(parameters)

    # Backward passes

    def concerned_parameters(self) -> Container[torch.Tensor] | None:
        """As `tightfit.torch_hooks.backward.BackwardOwner`: all passes, while one may free a graph that is to be run again."""
        return None if self._passes.of_graphs_that_may_go() else _owned(self._steppers)

    def before_node_hook(self, hook: object) -> None:
        """Does nothing: `is_any_node_hooked` is asked when a backward pass begins."""

    def around_backward(self, backward: BackwardPass) -> Any:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        # A reentrant checkpoint's own pass is part of the outer one, micro-batches collect gradients
        # themselves, and `torch.autograd.grad` returns them: none of these ends in `p.grad` of this step.
        if backward.is_nested or backward.is_of_part:
            return backward.run()
        self._passes.make_before(backward)
        if not backward.accumulates:
            return backward.run()
        self.session.check()
        owned = _owned(self._steppers)
        reached = {parameter: owned[parameter] for parameter in backward.leaves() if parameter in owned}
        standing = self._passes.clear_way(reached)
        for parameter in standing.used:
            del reached[parameter]
        within = CodeInGraph()
        reason = self._reason_against(backward, reached, within)
        try:
            # Nothing can be added to a consumed gradient: the new one is dropped, and the script's next step is
            # refused unless it clears gradients first.
            with told_of_gradients(standing.used, _drop):
                if not reached:
                    return backward.run()
                code, reason = (None, reason) if reason else self._code_of_program(within)
                if reason:
                    self.session.statistics["backward passes with all gradients kept"] += 1
                    _tell(self.session, reason)
                    standing.make_zeros()
                    return backward.run()
                return self._run_and_keep(backward, reached, standing.zeros, code)
        finally:
            standing.put_back()

    def _code_of_program(self, within: CodeInGraph) -> tuple[ProgramsCode | None, str]:
        """What is to be put back around a second run, None if nothing is, and the reason to leave the pass to torch instead."""
        checkpoints = within.checkpoints()
        if not checkpoints:
            return None, ""
        code = None if None in checkpoints else ProgramsCode(self._states, self.session.model, checkpoints)
        if code is not None and code.reaches(self._steppers):
            return code, "code in a checkpoint of the program may read its optimizer"
        is_closed = code is None or code.reaches_outside
        return code, "code in a checkpoint of the program may act outside the process" if is_closed else ""

    def _run_and_keep(
        self,
        backward: BackwardPass,
        reached: Collection[torch.Tensor],
        zeroed: Mapping[torch.Tensor, torch.Tensor],
        code: ProgramsCode | None,
    ) -> Any:
        known = weakref.ref(self._passes)

        def make_all() -> None:
            if (live := known()) is not None:
                live.make_all()

        model = self.session.model
        # The pass may read frozen weights and the batch too; a write to one of them changes what the second
        # pass would compute.
        frozen = [parameter for parameter in model.parameters() if parameter not in reached]
        kept = KeptPass(
            backward, list(model.buffers()), [*frozen, *self._given.take()], _weakly(self), self._forms, code
        )
        result = kept.run_first(reached, zeroed, make_all)
        self._passes.kept.append(kept)
        return result

    def _reason_against(self, backward: BackwardPass, reached: Collection[torch.Tensor], within: CodeInGraph) -> str:
        """The reason to leave this pass to torch; empty if there is none."""
        if line := self._question.line():
            self._passes.why_kept = (
                f"{line} tests `type(...) is torch.Tensor`, which is false for a gradient that is not kept"
            )
        if backward.creates_graph:
            return "a backward pass runs with create_graph=True"
        # Each optimizer would update it with the one gradient, and the first update frees that.
        if sum(len(group["params"]) for o in self._steppers for group in o.param_groups) > _num_held(self._steppers):
            return "a parameter is held by two optimizers"
        # By hooks in C++, which a second pass would call once more, with the gradients of the first one.
        if self._reduced.is_any_of(reached):
            return "DistributedDataParallel averages gradients as they arrive"
        if backward.is_shared:
            # Each would free the graph that the other is to run again.
            return "a backward pass also reaches parameters that another plan updates"
        reasons = itertools.chain(
            (self._passes.why_kept, self._passes.why_kept_in_step, _reason_of_mode()),
            map(_reason_of_parameter, reached),
            (_reason_of_other(leaf) for leaf in backward.leaves() if leaf not in reached),
            (_reason_of(node) or within.reason_of(node) for node in backward.nodes()),
        )
        return next(filter(None, reasons), "")

    def call(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of the model with gradients."""
        # A graph whose gradients the program has cleared, as after a step that was skipped or run again, is not held while the next one grows.
        self._passes.forget_done()
        result = forward(*args, **kwargs)
        if not self._passes.why_kept:
            with unseen():
                self._given.add((args, kwargs), result)
        return result


def _expecting_nothing(_: Iterable[torch.Tensor]) -> AbstractContextManager[None]:
    return nullcontext()


def _owned(
    steppers: Mapping[torch.optim.Optimizer, _Stepper],
) -> dict[torch.Tensor, torch.optim.Optimizer]:
    """The trained parameters of the optimizers."""
    return {
        parameter: optimizer
        for optimizer in steppers
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad
    }


def _num_held(steppers: Mapping[torch.optim.Optimizer, _Stepper]) -> int:
    return len({parameter for o in steppers for parameter in groups_by_parameter(o)})


def _tell(session: Session, reason: str) -> None:
    note = f"gradients are kept, because {reason}: memory may exceed the plan ({REMEDY})"
    if note not in session.notes:
        session.notes.append(note)


def _reason_of_mode() -> str:
    if torch.autograd.graph._allow_mutation_on_saved_tensors_enabled:
        return "a tensor saved in a graph may be modified"
    if dispatch_modes_of_program():
        return "a mode of the program sees every operator of the backward pass"
    if is_in_compiled_code():
        return "the backward pass is a part of a compiled function (torch.compile)"
    return "a node of a graph has a hook" if is_any_node_hooked() else ""


def _reason_of(node: Any) -> str:
    """The reason not to run a graph with this node twice; empty for most nodes."""
    if is_hooked(node):
        return "a tensor inside the model has a hook on its gradient, or retains it"
    return _NODES_WITH_MORE.get(type(node).__name__, "")


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _reason_of_parameter(parameter: torch.Tensor) -> str:
    if parameter.grad is not None:
        return "gradients exist before the backward pass and are accumulated into"
    if is_traceable_wrapper_subclass(parameter):
        return "a parameter wraps other tensors (DTensor), and so does its gradient"
    has_hooks = parameter._backward_hooks or parameter._post_accumulate_grad_hooks
    return "a parameter has a hook on its gradient" if has_hooks else ""


def _reason_of_other(leaf: torch.Tensor) -> str:
    """Of a leaf that the plan's optimizers do not update: the program may do so by itself as soon as its gradient is there."""
    has_hooks = bool(leaf._post_accumulate_grad_hooks)
    return (
        "a parameter that the plan does not update has a hook that is called when its gradient arrives"
        if has_hooks
        else ""
    )


def _weakly(updates: Updates) -> Callable[[str], ApplyError]:
    """A refusal that keeps nothing alive: Python's garbage collector does not see what a parameter's gradient refers to."""
    known = weakref.ref(updates)

    def refuse(message: str) -> ApplyError:
        live = known()
        return ApplyError(message) if live is None or live.is_over else live.session.refuse(message)

    return refuse


def _before_other_steps(updates: Updates) -> Callable[[], None]:
    """Materialises gradients before the step of an optimizer that the session does not know, which may write to parameters before it reads them.

    The returned function ends this; so does the end of `updates`.
    """
    known = weakref.ref(updates)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (live := known()) is not None and not live.is_over:
            live.other_steps(optimizer)

    # A hook of torch's own for all optimizers: nothing is replaced.
    handle = register_optimizer_step_pre_hook(before_step)
    return weakref.finalize(updates, handle.remove)


class _Inputs(OnlyHere):
    """The wrapper around the model's forward; a copy of the model has none."""

    __slots__ = ("_updates",)

    def __init__(self, updates: Updates) -> None:
        self._updates = weakref.ref(updates)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        updates = self._updates()
        if (
            updates is not None
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not are_transforms_active()
        ):
            return updates.call(forward, args, kwargs)
        return forward(*args, **kwargs)
