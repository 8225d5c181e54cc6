"""Applies a plan to an unmodified program: waits for its models and optimizers, and applies just before the first forward.

Two entry points of torch are watched (`torch_hooks.calls`): new optimizers and, as long as something is expected, module calls. The outermost
module that is called with gradients and has trainable parameters is a root; a program may have several (a generator and a discriminator), and each
gets the choices that name its class. Choices that name no module concern optimizers, and go to the first root that each optimizer is seen with.
If an optimizer is made later, or replaces another, its root's session is made anew before the next forward. Models that the program drops are not
kept alive. The same code runs in a capture on the virtual GPU (`prepare`) and in a real run (`tightfit run`).
"""

import dataclasses
import gc
import inspect
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import (
    choices_for,
    innermost,
    is_module,
    num_parameters,
    planned_for,
    root_of,
    session_on,
    undo_after,
    watch_inputs,
)
from tightfit.runtime.framework_loops import LoopWatch, is_of_loop
from tightfit.runtime.input_shapes import InputCheck, Inputs, Tell, input_shapes
from tightfit.runtime.later_optimizers import LaterOptimizers
from tightfit.runtime.left_at_host import LeftAtHost
from tightfit.runtime.predictions import Predictions
from tightfit.techniques.recomputation.only_above import CallSizes
from tightfit.techniques.session import CHECK_STEPS, Session, Verdict
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.torch_hooks.calls import on_new_optimizer, on_outermost_call
from tightfit.torch_hooks.replaced import Leave
from tightfit.torch_hooks.weak_references import WeakTable


@dataclasses.dataclass(slots=True, kw_only=True)
class Root:
    """A model of the program: its class, the number of its parameters, its inputs, and the notes, statistics and `CallSizes` of its session."""

    name: str
    num_parameters: int
    inputs: Inputs
    notes: list[str]
    statistics: Mapping[str, int]
    call_sizes: Mapping[str, list[int]]


@dataclasses.dataclass(slots=True, kw_only=True)
class _Live:
    """The state of a live model. Its session is kept alive by the model's own forward, and not here."""

    root: Root
    choices: list[Choice]
    planned: Inputs | None
    check: weakref.ref[InputCheck]


class _Owners:
    """Each optimizer with the model whose session has it; None until there is one."""

    def __init__(self) -> None:
        self._owners: WeakTable[torch.optim.Optimizer, weakref.ref[torch.nn.Module] | None] = WeakTable()
        self.has_given = False
        """Whether a session has had an optimizer, which may be gone since: a search drops those of a trial before it begins the next."""

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """A new optimizer, which has no model yet."""
        self._owners.setdefault(optimizer, None)

    def give(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> None:
        """The session of `model` has the optimizer."""
        self._owners[optimizer] = weakref.ref(model)
        self.has_given = True

    def is_new(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether no session has had the optimizer yet."""
        return self._owners[optimizer] is None

    def has_new(self) -> bool:
        """Whether there is an optimizer that no session has had yet."""
        return None in self._owners.values()

    def free_for(self, module: torch.nn.Module) -> list[torch.optim.Optimizer]:
        """The optimizers that hold parameters of `module` and are in no other model's session."""
        held = {id(p) for p in module.parameters()}
        return [
            optimizer
            for optimizer, owner in self._owners.items()
            # An optimizer whose model was dropped is free for the next one: searches build models anew and keep
            # the optimizer's name.
            if (owner is None or owner() in (None, module))
            and any(id(p) in held for group in optimizer.param_groups for p in group["params"])
        ]


class _OutermostCalls:
    """Watches outermost calls of modules, for `attachment`, between `begin` and `end`."""

    def __init__(self, attachment: "Attachment") -> None:
        self._attachment = attachment
        self._unwatch: Leave | None = None

    def begin(self) -> None:
        """Calls are watched from now on."""
        if self._unwatch is None:
            self._unwatch = on_outermost_call(self._attachment)

    def end(self) -> None:
        """They cost nothing any more."""
        if self._unwatch is not None:
            self._unwatch()
            self._unwatch = None


class Attachment:
    """Choices that wait for their models. `planned` are the roots as the plan describes them, empty while it is being made.

    `check_steps` and `disk_folder` are as in `Session`: no checks on the virtual GPU. `on_apply` is called with each session, before the forward that it was made for;
    `tell` with messages for the user. `verdicts` are those of its sessions: the program may have swallowed a refusal.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        planned: Sequence[Mapping[str, Any]] = (),
        on_apply: Callable[[Session], None] | None = None,
        tell: Tell = lambda _: None,
        check_steps: int = CHECK_STEPS,
        disk_folder: str | None = None,
    ) -> None:
        self._later = LaterOptimizers(tell, check_steps, disk_folder)
        self._choices = [c for c in choices if not is_of_loop(c)]
        self._of_loops = [c for c in choices if is_of_loop(c)]
        self._loops = LoopWatch(self._of_loops, lambda choice: self._applied.add((choice.technique, choice.where)))
        self._planned = planned
        self._on_apply = on_apply
        self._tell = tell
        self._applied: set[tuple[str, str]] = set()
        # The modules inside of roots. A script that calls a part of its model by itself (an encoder, for a
        # metric) does not make that a model of its own.
        self._parts: WeakTable[torch.nn.Module, None] = WeakTable()
        # Without gradients, or in the constructor of a module: whether it was that.
        self._called_before: WeakTable[torch.nn.Module, bool] = WeakTable()
        self._predictions = Predictions(self._choices)
        self._live: WeakTable[torch.nn.Module, _Live] = WeakTable()
        self._optimizers = _Owners()
        # A thread may evaluate one model while another one trains the next.
        self._lock = threading.RLock()
        self._leaves: list[Leave] = []
        self._left_at_host = LeftAtHost(self._choices)
        self._calls = _OutermostCalls(self)
        self.verdicts: list[Verdict] = []
        self.roots: list[Root] = []

    def install(self) -> Callable[[], None]:
        """Starts watching; returns a function that ends it.

        Raises:
            ApplyError: this torch has other entry points.
        """
        try:
            self._leaves += [on_new_optimizer(self), self._left_at_host.begin()]
            self._loops.look()
            self._calls.begin()
        except BaseException:
            self.end()
            raise
        return self.end

    def end(self) -> None:
        """Stops watching; the sessions of models stay."""
        for leave in self._leaves:
            leave()
        self._loops.end()
        self._calls.end()

    def after_optimizer_was_made(self, optimizer: torch.optim.Optimizer) -> None:
        """A new optimizer becomes part of its model's session before the model's next call."""
        with self._lock:
            if self._optimizers.has_given:
                self._later.add(optimizer)
            self._optimizers.add(optimizer)
            self._loops.look()
            # A model with a session is part of a cycle of references: one that the program has dropped is freed here. One that goes on with another
            # optimizer is not: to look through all objects for each inner loop of meta-learning takes longer than the loop.
            if self.roots and not _has_parameters_of(optimizer, list(self._live)):
                gc.collect()
            self._calls.begin()

    def before_outermost_call(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Applies the choices for a model, if it is called with gradients for the first time or has a new optimizer.

        Raises:
            ApplyError: they cannot be applied, or the session has refused something since.
        """
        if is_looked_at(args, kwargs):
            # A look at sizes would be a part of what is traced.
            return
        with self._lock:
            module = innermost(module)
            self._loops.look()
            if not torch.is_grad_enabled():
                self._called_before.setdefault(module, False)
            # Of modules that take their shapes from a first call (`torch.nn.LazyLinear`) no more is known before it.
            if any(map(is_lazy, module.parameters())):
                return
            if not torch.is_grad_enabled():
                self._predicts(module, args, kwargs)
                return
            live = self._live.get(module)
            if live is not None:
                self._make_anew_for_optimizers(module, live)
            elif module in self._parts or not any(p.requires_grad for p in module.parameters()):
                return
            elif isinstance(module, ParametrizationList):
                # Torch calls it once while it makes it: it is of a model that comes.
                return
            elif _is_in_constructor() and not self._optimizers.free_for(module):
                # It makes modules at its first call (the projector of BYOL and DINO), and is of a model that comes.
                self._called_before[module] = True
                return
            else:
                parts = _called_before(self._called_before, module, self._choices)
                for part in parts[False]:
                    self._meet(part, is_first=False)
                live = self._meet(module, is_first=True)
                # After the model, whose the optimizers are.
                for part in parts[True]:
                    self._meet(part, is_first=False)
            live.root.inputs.note(input_shapes(args, kwargs))
            # From here on calls of modules cost nothing again.
            if self._planned and not self._waits():
                self._calls.end()

    def _predicts(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A model is called without gradients: choices that are for such calls are applied at the first one."""
        if not self._planned:
            self._predictions.note(module, args, kwargs)
        if module in self._live or module in self._parts or not self._predictions.are_planned(module):
            return
        self._meet(module, is_first=True).root.inputs.note(input_shapes(args, kwargs))
        if self._planned and not self._waits():
            self._calls.end()

    def _waits(self) -> bool:
        """Whether a model of the plan was not called yet, or an optimizer has no model yet."""
        met = {(root.name, root.num_parameters) for root in self.roots}
        coming = {(root["class"], root["num_parameters"]) for root in self._planned} - met
        return bool(coming) or self._optimizers.has_new()

    def _meet(self, module: torch.nn.Module, *, is_first: bool) -> _Live:
        name = type(module).__name__
        met = any(root.name == known["class"] for root in self.roots for known in self._planned)
        own = self._optimizers.free_for(module)
        # A model that shares its optimizers with another leaves what concerns them to that one's session.
        is_first = is_first and (bool(own) or not self.roots)
        unknown = _unknown(self._planned, module, [root.name for root in self.roots]) if self._planned and met else ""
        if unknown:
            self._tell(f"the plan knows of no {unknown}, which runs unchanged")
            planned, choices = None, []
        else:
            planned = planned_for(self._planned, module)
            choices = _those_inside(self._planned, module, choices_for(self._choices, module, is_first=is_first))
        # A program that builds its model anew, of a checkpoint or for another fold, has trained by then too.
        is_anew = any(root.name == name for root in self.roots)
        session, choices = self._later.applied(choices, module, own, is_planned=bool(self._planned), is_anew=is_anew)
        check = self._keep(session, choices, planned)
        root = Root(
            name=name,
            num_parameters=num_parameters(module),
            inputs=Inputs(),
            notes=session.notes,
            statistics=session.statistics,
            call_sizes=session.shared.get(CallSizes, {}),
        )
        live = self._live[module] = _Live(root=root, choices=choices, planned=planned, check=weakref.ref(check))
        for part in module.modules():
            self._parts[part] = None
        self.roots.append(root)
        self._applied |= {(c.technique, c.where) for c in choices}
        if self._on_apply is not None and (planned is not None or not self._planned):
            self._on_apply(session)
        return live

    def _keep(self, session: Session, choices: Sequence[Choice], planned: Inputs | None) -> InputCheck:
        if choices:
            self.verdicts.append(session.verdict)
        for optimizer in session.optimizers:
            self._optimizers.give(optimizer, session.model)
        # A program of TorchScript has no forward to look at inputs in.
        if choices or (planned is not None and not isinstance(session.model, torch.jit.ScriptModule)):
            try:
                return watch_inputs(session, planned, self._tell)
            except BaseException as error:
                undo_after(session, error)
                raise
        return InputCheck(session, planned, self._tell)

    def _make_anew_for_optimizers(self, module: torch.nn.Module, live: _Live) -> None:
        """Undoes the session and makes a new one, if there is an optimizer that it does not know."""
        check = live.check()
        if check is not None:
            check.session.check()
        if not any(self._optimizers.is_new(o) for o in self._optimizers.free_for(module)):
            return
        if check is None and session_on(module) is not None:
            # Another plan has taken the place of this one (a guard's), and whoever has put it there sees to the optimizers.
            for optimizer in self._optimizers.free_for(module):
                self._optimizers.give(optimizer, module)
            return
        if check is not None:
            check.session.undo()
        # An optimizer that the program has dropped is gone with the session that knew it, if nothing that refers to itself has it (a scheduler does).
        del check
        if not all(self._optimizers.is_new(o) for o in self._optimizers.free_for(module)):
            gc.collect()
        optimizers = self._optimizers.free_for(module)
        is_known = live.planned is not None or not self._planned
        # The choices that concern optimizers, for a root that now has some of its own.
        global_ones = [c for c in self._choices if is_known and not is_module(c.where) and c not in live.choices]
        live.choices = [*live.choices, *global_ones]
        session, live.choices = self._later.applied(
            live.choices, module, optimizers, is_planned=bool(self._planned), is_anew=True
        )
        check = self._keep(session, live.choices, live.planned)
        live.root.notes, live.root.statistics, live.check = session.notes, session.statistics, weakref.ref(check)
        live.root.call_sizes = session.shared.get(CallSizes, {})
        self._applied |= {(c.technique, c.where) for c in live.choices}

    def report(self) -> dict[str, Any]:
        """The roots that were called, with the notes and statistics of their sessions, and how large calls were.

        Raises:
            ApplyError: the plan names a model that was never called, or a place that no model has.
        """
        _check_all_applied((*self._choices, *self._of_loops), self._applied, {root.name for root in self.roots})
        # Ensembles and searches make several models of one class and size: the plan knows them as one root.
        merged: dict[tuple[str, int], Inputs] = {}
        for root in self.roots:
            inputs = merged.setdefault((root.name, root.num_parameters), Inputs())
            inputs.note(root.inputs.largest)
            inputs.varying.update(root.inputs.varying)
        merged = merged or self._predictions.inputs
        return {
            "roots": [{"class": name, "num_parameters": n, **i.to_json()} for (name, n), i in merged.items()],
            "notes": [*(note for root in self.roots for note in root.notes), *self._loops.notes],
            "statistics": {key: n for root in self.roots for key, n in root.statistics.items()}
            | self._loops.statistics,
            "call_sizes": {key: n for root in self.roots for key, n in root.call_sizes.items()},
        }


def _called_before(
    called: WeakTable[torch.nn.Module, bool], module: torch.nn.Module, choices: Sequence[Choice]
) -> dict[bool, list[torch.nn.Module]]:
    """The modules inside of `module` that were called before by themselves and are named by choices, by whether they leave it its optimizers: those that were
    called in a constructor, and those that are not trained (a teacher).

    Paths inside of these begin with their own class: a capture names paths by the first outermost call, also one without gradients.
    """
    names = {root_of(c.where) for c in choices if is_module(c.where)}
    found = [m for m in module.modules() if m is not module and m in called and type(m).__name__ in names]
    leaves = [called[m] or not any(p.requires_grad for p in m.parameters()) for m in found]
    return {each: [m for m, is_left in zip(found, leaves, strict=True) if is_left is each] for each in (False, True)}


def _is_in_constructor() -> bool:
    """Whether the constructor of a module is under way in this thread."""
    frame = inspect.currentframe()
    while frame is not None:
        code = frame.f_code
        owners = map(frame.f_locals.get, code.co_varnames[:1]) if code.co_name == "__init__" else ()
        if any(isinstance(owner, torch.nn.Module) for owner in owners):
            return True
        frame = frame.f_back
    return False


def _those_inside(planned: Sequence[Mapping[str, Any]], module: torch.nn.Module, choices: list[Choice]) -> list[Choice]:
    """The choices for places that `module` has, if the program has several models of its class; else all."""
    name = type(module).__name__
    known = [root["class"] for root in planned]
    if planned and known.count(name) < 2:
        return choices
    paths = {path for path, _ in module.named_modules()}

    def has(choice: Choice) -> bool:
        # Of some techniques the place is the model, and the blocks are named in their settings.
        blocks = choice.settings.get("blocks", ())
        return choice.where.partition(".")[2] in paths and (not isinstance(blocks, list) or paths.issuperset(blocks))

    return [c for c in choices if not is_module(c.where) or has(c)]


def _unknown(planned: Sequence[Mapping[str, Any]], module: torch.nn.Module, met: Sequence[str]) -> str:
    """A model that the plan does not know, in words, where another one has been trained already; else nothing.

    Of a class that it knows only where the program has had one of that class: a search over sizes, of which the trace saw some.
    """
    name, count = type(module).__name__, num_parameters(module)
    sizes = [root["num_parameters"] for root in planned if root["class"] == name]
    if not sizes:
        return name
    return f"{name} of {count:,} parameters" if name in met and count not in sizes else ""


def _has_parameters_of(optimizer: torch.optim.Optimizer, models: Sequence[torch.nn.Module]) -> bool:
    """Whether all its parameters are of these."""
    held = {id(parameter) for model in models for parameter in model.parameters()}
    return all(id(parameter) in held for group in optimizer.param_groups for parameter in group["params"])


def _check_all_applied(choices: Sequence[Choice], applied: set[tuple[str, str]], names: set[str]) -> None:
    called = ", ".join(sorted(names)) or "no model"
    left = [
        c
        for c in choices
        # Allocator settings are set in the environment before torch is imported (`run`).
        if "alloc_conf" not in c.settings and (c.technique, c.where) not in applied
    ]
    missing = {root_of(c.where) for c in left if is_module(c.where)} - names
    if missing:
        raise ApplyError(
            f"the plan names {' and '.join(sorted(missing))}, which the program never called with gradients (it called {called} with them); make a plan for it"
        )
    if left:
        raise ApplyError(
            f"{left[0].technique}: there was nothing to put it on at {left[0].where} (the program called {called} with gradients); make a plan for it"
        )


def prepare(argument: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """The function of a `tightfit.capture.trace.Preparation`: attaches the choices, and reports when the run is over."""
    told: list[str] = []
    attachment = Attachment(
        [Choice(**choice) for choice in argument["choices"]],
        argument.get("roots", ()),
        tell=told.append,
        check_steps=0,
    )
    attachment.install()
    return lambda: attachment.report() | {"told": told}
