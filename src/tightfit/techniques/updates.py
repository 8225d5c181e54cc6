"""Updates of parameters within a backward pass: when they run, what they are refused for, and what the script finds on `p.grad` meanwhile.

Two ways. In two passes nothing is trained before the optimizer is stepped: the first pass keeps norms, the second one, within the step, updates
and frees (`tightfit.techniques.kept_passes`). In one pass, parameters are updated as their gradients come; that needs that each backward pass is
followed by one step and that nobody reads or changes a gradient or reads a parameter in between. So it is done where the plan says so, because
the trace has shown it, and after first steps in two passes that have shown it again. What deviates later is an error at the first moment at which
it can be known.

A backward pass whose gradients somebody else has a part in (hooks, a buffer of the script's own, second derivatives) is left to torch.
"""

import dataclasses
import functools
import weakref
from collections.abc import Callable, Collection, Container, Iterable, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tightfit.errors import ApplyError
from tightfit.techniques.deferred_gradients import Deferred, deferred_gradient, settle
from tightfit.techniques.forwards import OnlyHere
from tightfit.techniques.kept_passes import REMEDY, KeptPass, told_of_gradients
from tightfit.techniques.optimizer_steps import UpdateOne, groups_by_parameter, update_within_step
from tightfit.techniques.session import Session
from tightfit.torch_hooks.backward import BackwardPass, on_backward
from tightfit.torch_hooks.manifest import GRAPH_TASK_ID
from tightfit.torch_hooks.tensor_hooks import is_hooked, on_tensor_hooks

# What one sees in a graph of hooks on modules, and of a recomputation in a backward pass of its own.
_NODES_WITH_MORE = {
    "BackwardHookFunctionBackward": "a module has a backward hook",
    "CheckpointFunctionBackward": "torch.utils.checkpoint recomputes with use_reentrant=True",
}
_USED = f"after the update that used it up; {REMEDY}"
_MAX_READ_IN_A_ROW = 2


@dataclasses.dataclass(slots=True, kw_only=True)
class _Stepper:
    """One optimizer: how it updates a parameter, and whether that is to happen to all of them, and not by its own step."""

    update: UpdateOne
    updates_all: bool
    num_hooks: int = 0
    settings: list[dict[str, Any]] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True)
class _Standing:
    """What stood on parameters when a backward pass came: zeros, and what an update has used up, which nothing can be added to."""

    zeros: dict[torch.Tensor, torch.Tensor] = dataclasses.field(default_factory=dict)
    used: dict[torch.Tensor, torch.Tensor] = dataclasses.field(default_factory=dict)

    def put_back(self) -> None:
        """Zeros where no gradient has come; what is used up stays so, for the script to clear before it can step again."""
        for parameter, gradient in self.zeros.items():
            if parameter.grad is None:
                parameter.grad = gradient
        for parameter, gradient in self.used.items():
            parameter.grad = gradient


class Updates:
    """Around the backward passes and the steps of the optimizers of one session, whose parameters `updates` update one by one.

    `in_one_pass` allows updates in the first backward pass, after the first `session.check_steps` steps.
    `updates_all` says that what `updates` do is not what the step of the optimizer would do.
    """

    def __init__(
        self,
        session: Session,
        updates: Mapping[torch.optim.Optimizer, UpdateOne],
        *,
        in_one_pass: bool,
        updates_all: bool = False,
    ) -> None:
        self.session = session
        self._steppers = {o: _Stepper(update=update, updates_all=updates_all) for o, update in updates.items()}
        self._in_one_pass = in_one_pass
        self._kept: list[KeptPass] = []
        self._used: dict[torch.Tensor, Deferred] = {}  # by a pass that updated, until the step
        # Parameters as they were when the last backward pass ended: their versions, and in the first steps a sum over their bits.
        self._versions: dict[torch.Tensor, int] = {}
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._was_called = False
        self._num_clean = 0
        self._num_checked = 0
        self._last: list[Deferred] = []  # of the last step in two passes
        self._num_read = 0
        self.is_over = False

    def install(self) -> None:
        """Hooks the optimizers, and has backward passes told, until the session is undone."""
        for optimizer in self._steppers:
            update_within_step(self.session, optimizer, functools.partial(self._step, optimizer))
        self.session.wrap_forward(self.session.model, _Between(self))
        self.session.hook(self.session.model.register_state_dict_pre_hook, _BeforeSaving(self))
        leaves = on_backward(self), on_tensor_hooks(self), _before_other_steps(self)
        _ALL[:] = [*(known for known in _ALL if known() is not None), weakref.ref(self)]

        def leave() -> None:
            for each in leaves:
                each()

        self.session.when_undone(leave)
        self.session.when_undone(self._end)

    def _end(self) -> None:
        """Leaves the gradients that wait where the script finds them.

        Raises:
            ApplyError: a pass has updated parameters, and the step never came.
        """
        self.is_over = True
        try:
            self._make_all()
        except ApplyError as error:
            # What the script has changed meanwhile stands against it; whoever reads one of these gradients is told.
            for kept in self._kept:
                kept.give_up(str(error))
        if self._used and self.session.failure is None:
            raise ApplyError(f"parameters were updated in a backward pass that no step followed; {REMEDY}")

    def check_finished(self) -> None:
        """Does nothing where each update has had its step.

        Raises:
            ApplyError: a backward pass has updated parameters, and the step that was to has not come.
        """
        if self._used and not self.is_over:
            raise self.session.refuse(f"parameters were updated in a backward pass that no step followed; {REMEDY}")

    def forward_comes(self) -> None:
        """The model is called.

        Raises:
            ApplyError: between a backward pass that has updated its parameters and the step that was to.
        """
        if self._used:
            raise self.session.refuse(
                f"the model is called between the backward pass that updated its parameters and the optimizer's step; {REMEDY}"
            )
        self._was_called = True

    def other_steps(self, optimizer: torch.optim.Optimizer) -> None:
        """Any optimizer is stepped: one that is not of this session finds the gradients made."""
        if optimizer in self._steppers:
            return
        if any(parameter in self._owned() for group in optimizer.param_groups for parameter in group["params"]):
            self._make_all()

    # Backward passes

    def concerned_parameters(self) -> Container[torch.Tensor]:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        return self._owned()

    def around_backward(self, backward: BackwardPass) -> Any:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        if backward.is_nested or not backward.accumulates:
            return backward.run()
        self.session.check()
        owned = self._owned()
        reached = {parameter: owned[parameter] for parameter in backward.leaves() if parameter in owned}
        standing = self._clear_way(reached)
        for parameter in standing.used:
            del reached[parameter]
        reason = self._reason_against(backward, reached)
        try:
            with told_of_gradients(standing.used, _drop):
                if not reached:
                    return backward.run()
                if reason:
                    self._left_to_torch(reason)
                    return backward.run()
                if self._is_safe_in_one_pass():
                    return self._run_and_update(backward, reached, standing.zeros)
                return self._run_and_keep(backward, reached, standing.zeros)
        finally:
            standing.put_back()

    def _run_and_keep(
        self, backward: BackwardPass, reached: Collection[torch.Tensor], zeroed: Collection[torch.Tensor]
    ) -> Any:
        known = weakref.ref(self)

        def make_all() -> None:
            if (live := known()) is not None:
                live._make_all()

        self._note_settings()
        kept = KeptPass(backward, list(self.session.model.buffers()), _weakly(self))
        result = kept.run_first(reached, zeroed, make_all)
        self._kept.append(kept)
        self._versions = {parameter: parameter._version for parameter in reached}
        self._sums = self._sums_of(reached)
        self._was_called = False
        return result

    def _owned(self) -> dict[torch.Tensor, torch.optim.Optimizer]:
        return {
            parameter: optimizer
            for optimizer in self._steppers
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        }

    def _clear_way(self, reached: Iterable[torch.Tensor]) -> _Standing:
        """Makes place for the gradients that come, and returns what stood there: zeros that they are added to, and what is used up.

        Raises:
            ApplyError: they would be added to gradients of which an update has been made, and the step that was to has not come.
        """
        if self._used:
            raise self.session.refuse(
                f"a second backward pass comes before the optimizer's step, and the first one has used up its gradients; {REMEDY}"
            )
        self._kept = [kept for kept in self._kept if kept.waiting]
        standing = _Standing()
        for parameter in reached:
            deferred = deferred_gradient(parameter)
            if deferred is None or parameter.grad is None:
                continue
            if deferred.state == "deferred":
                self._make_all()
            if deferred.state == "zero":
                standing.zeros[parameter], parameter.grad = parameter.grad, None
            elif deferred.state == "used":
                standing.used[parameter], parameter.grad = parameter.grad, None
            settle(parameter)
        return standing

    def _reason_against(self, backward: BackwardPass, reached: Iterable[torch.Tensor]) -> str:
        """Why this pass is left to torch; empty where it is not."""
        if backward.creates_graph:
            return "a backward pass is run with create_graph=True"
        if sum(len(group["params"]) for o in self._steppers for group in o.param_groups) > self._num_held():
            return "a parameter is held by two optimizers"
        if backward.is_shared:
            # Each would free the graph that the other is to run again.
            return "a backward pass also reaches parameters that another plan updates"
        if self._num_read >= _MAX_READ_IN_A_ROW:
            return "gradients are read or added to before the optimizer steps"
        for parameter in reached:
            if parameter.grad is not None:
                return "gradients are there before the backward pass, to be added to"
            if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
                return "a parameter has a hook on its gradient"
        return next(filter(None, map(_reason_of, backward.nodes())), "")

    def _num_held(self) -> int:
        return len({parameter for o in self._steppers for parameter in groups_by_parameter(o)})

    def _left_to_torch(self, reason: str) -> None:
        self._num_clean = 0
        self.session.statistics["backward passes with all gradients kept"] += 1
        note = f"gradients are kept, because {reason}: the run may hold more than the plan says ({REMEDY})"
        if note not in self.session.notes:
            self.session.notes.append(note)

    # Updates in one pass

    def _is_safe_in_one_pass(self) -> bool:
        """Whether the first steps have shown that each pass is followed by one step, and nothing about the optimizers' hooks is new."""
        # On the virtual GPU nothing is compared, and one step in two passes shows what it holds.
        needed = max(1, self.session.check_steps)
        if any(_num_hooks(optimizer) != stepper.num_hooks for optimizer, stepper in self._steppers.items()):
            self._num_clean = 0
        if any(deferred.was_asked for deferred in self._last):
            self._num_clean = 0  # somebody reads gradients after the step
        return self._in_one_pass and self._num_clean >= needed and len(self._steppers) == 1 and not self._kept

    def _run_and_update(
        self,
        backward: BackwardPass,
        reached: Mapping[torch.Tensor, torch.optim.Optimizer],
        zeroed: Collection[torch.Tensor],
    ) -> Any:
        groups = {parameter: group for o in self._steppers for parameter, group in groups_by_parameter(o).items()}
        refuse = _weakly(self)
        self._note_settings()

        def updated(parameter: torch.Tensor) -> None:
            gradient = parameter.grad
            if gradient is None or gradient.layout != torch.strided:
                return
            if parameter in self._used:
                raise self.session.refuse(
                    f"a parameter got a second gradient in one backward pass; nothing can be added to one that is used up: {REMEDY}"
                )
            if parameter in zeroed:
                gradient.add_(0.0)
            deferred = self._used[parameter] = Deferred(gradient, refuse=refuse)
            self._update_one(parameter, reached[parameter], groups[parameter])
            deferred.is_used(_USED)
            deferred.put(parameter)

        try:
            with told_of_gradients(reached, updated):
                result = backward.run()
        except BaseException:
            if self._used:
                self.session.refuse(
                    f"a backward pass in which parameters are updated ended with an error, when {len(self._used)} of {len(reached)} were; {REMEDY}"
                )
            raise
        self._versions = {parameter: parameter._version for parameter in reached}
        return result

    def _update_one(self, parameter: torch.Tensor, optimizer: torch.optim.Optimizer, group: int) -> None:
        self._steppers[optimizer].update(parameter, group)
        self.session.statistics["parameters updated in backward"] += 1

    # Steps

    def _step(self, optimizer: torch.optim.Optimizer) -> dict[torch.Tensor, None]:
        """Runs within a step; the parameters that it has nothing to do for any more."""
        stepper, groups = self._steppers[optimizer], groups_by_parameter(optimizer)
        for parameter in groups:
            deferred = deferred_gradient(parameter)
            if deferred is None:
                continue
            if deferred.state == "used" and parameter not in self._used:
                raise self.session.refuse(
                    f"{type(optimizer).__name__} is stepped with gradients that an update has used up and that were not cleared since; {REMEDY}"
                )
            if deferred.state == "zero":
                deferred.whole()
        done = self._step_after_one_pass(optimizer, groups) if self._used else self._second_pass(optimizer, groups)
        for parameter, group in groups.items():
            settle(parameter)
            if stepper.updates_all and parameter not in done and parameter.grad is not None:
                stepper.update(parameter, group)
                done[parameter] = None
        stepper.num_hooks = _num_hooks(optimizer)
        return done

    def _step_after_one_pass(
        self, optimizer: torch.optim.Optimizer, groups: Mapping[torch.Tensor, int]
    ) -> dict[torch.Tensor, None]:
        used, self._used = self._used, {}
        if any(deferred_gradient(parameter) is not deferred for parameter, deferred in used.items()):
            raise self.session.refuse(
                f"gradients were cleared or replaced before the step, and the backward pass had used them for updates; {REMEDY}"
            )
        if self._steppers[optimizer].settings != _settings(optimizer) or self._has_versions_changed(used):
            raise self.session.refuse(
                f"the optimizer's groups or parameters were changed between the backward pass that updated them and its step; {REMEDY}"
            )
        return {parameter: None for parameter in used if parameter in groups}

    def _second_pass(
        self, optimizer: torch.optim.Optimizer, groups: Mapping[torch.Tensor, int]
    ) -> dict[torch.Tensor, None]:
        mine = [kept for kept in self._kept if any(parameter in groups for parameter in kept.waiting)]
        others = [kept for kept in self._kept if kept.waiting and kept not in mine]
        if not mine:
            return {}
        if len(mine) > 1 or others:
            # What one pass updates, another one would see.
            self._make_all()
            return {}
        (kept,) = mine
        parameters = {parameter: None for parameter in kept.waiting if parameter in groups}
        is_clean = self._is_clean(kept, optimizer)
        if self._num_checked < self.session.check_steps:
            self._num_checked += 1
            if not kept.try_out():
                self._make_all()
                self._num_read = _MAX_READ_IN_A_ROW
                return {}
        try:
            kept.use(lambda p: self._update_one(p, optimizer, groups[p]), parameters, _USED)
            kept.check_same()
        except BaseException:
            self.session.refuse(
                f"the second backward pass, in which parameters are updated, was not finished; {REMEDY}"
            )
            raise
        self._last = list(kept.gradients.values())
        self._kept.remove(kept)
        self._num_clean = self._num_clean + 1 if is_clean else 0
        self._num_read = 0
        return parameters

    def _is_clean(self, kept: KeptPass, optimizer: torch.optim.Optimizer) -> bool:
        """Whether this step could have been one in one pass: everything that an update uses is as the backward pass has found it."""
        waiting = kept.waiting
        return (
            not self._was_called
            and len(waiting) == len(kept.gradients)
            and not any(deferred.was_asked for deferred in waiting.values())
            and self._steppers[optimizer].settings == _settings(optimizer)
            and not self._has_versions_changed(waiting)
            and all(torch.equal(self._sums[p], each) for p, each in self._sums_of(waiting).items())
        )

    def _note_settings(self) -> None:
        for optimizer, stepper in self._steppers.items():
            stepper.settings = _settings(optimizer)

    def _has_versions_changed(self, parameters: Iterable[torch.Tensor]) -> bool:
        return any(parameter._version != self._versions[parameter] for parameter in parameters)

    def _sums_of(self, parameters: Iterable[torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """A sum over the bits of each parameter, which a write past its version changes; nothing where no step in one pass may follow."""
        if not self._in_one_pass:
            return {}
        return {p: _sum_of_bits(p) for p in parameters} if self.session.check_steps else {}

    def _make_all(self) -> None:
        kept = list(self._kept)
        for each in kept:
            each.make_all()
        self._kept.clear()
        if kept:
            self._num_clean = 0
            self._num_read += 1


def _reason_of(node: Any) -> str:
    """Why a graph with this node is not run twice; empty for most."""
    if is_hooked(node):
        return "a tensor inside the model has a hook on its gradient, or keeps it"
    return _NODES_WITH_MORE.get(type(node).__name__, "")


def _drop(parameter: torch.Tensor) -> None:
    parameter.grad = None


def _weakly(updates: Updates) -> Callable[[str], ApplyError]:
    """How a gradient refuses, without keeping anything: Python's collector does not see what a parameter's gradient refers to."""
    known = weakref.ref(updates)

    def refuse(message: str) -> ApplyError:
        live = known()
        return ApplyError(message) if live is None or live.is_over else live.session.refuse(message)

    return refuse


_ALL: "list[weakref.ref[Updates]]" = []


def check_finished() -> None:
    """As `Updates.check_finished`, for all that are there, at the end of a program."""
    for known in _ALL:
        if (updates := known()) is not None:
            updates.check_finished()


class _BeforeSaving(OnlyHere):
    """A hook before a model's `state_dict`; a copy of the model does without it."""

    __slots__ = ("_updates",)

    def __init__(self, updates: Updates) -> None:
        self._updates = weakref.ref(updates)

    def __call__(self, *_: object) -> None:
        if (updates := self._updates()) is not None:
            updates.check_finished()

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return _nothing

    def __reduce__(self) -> tuple[Any, ...]:
        return _made_nothing, ()


def _nothing(*_: object) -> None:
    """What is called before a copy is saved."""


def _made_nothing() -> Callable[..., None]:
    return _nothing


def _before_other_steps(updates: Updates) -> Callable[[], None]:
    """Has gradients made before the step of an optimizer that the session does not know, which may write to parameters before it reads them.

    What it returns ends that; so does the end of `updates`.
    """
    known = weakref.ref(updates)

    def before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (live := known()) is not None and not live.is_over:
            live.other_steps(optimizer)

    # A hook of torch's own for all optimizers: nothing is replaced.
    handle = register_optimizer_step_pre_hook(before_step)
    return weakref.finalize(updates, handle.remove)


class _Between(OnlyHere):
    """Around the model's forward; a copy of the model does without it."""

    __slots__ = ("_updates",)

    def __init__(self, updates: Updates) -> None:
        self._updates = weakref.ref(updates)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        updates = self._updates()
        # What a recomputation calls is part of the backward pass.
        if updates is not None and GRAPH_TASK_ID.value()() == -1:
            updates.forward_comes()
        return forward(*args, **kwargs)


def _settings(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups say besides their parameters; a tensor is told from a changed one by its version."""
    return [
        {
            name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]


def _num_hooks(optimizer: torch.optim.Optimizer) -> int:
    return len(optimizer._optimizer_step_pre_hooks) + len(optimizer._optimizer_step_post_hooks)


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _sum_of_bits(parameter: torch.Tensor) -> torch.Tensor:
    whole = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
    return whole.view(_INTEGERS[whole.element_size()]).sum(dtype=torch.int64)
