"""A session: the techniques applied to one model and its optimizers, and how to undo them.

The same code runs on the virtual GPU and on a real one. A technique changes the live objects and registers how to undo that; the session runs
the undo functions in reverse order. Notes for the user and statistics of techniques are collected here too.

A technique that finds while the program runs that it cannot continue correctly refuses through the session, which then blocks training until it
is undone: a program that catches the error gets it again at its next forward or step.
"""

import contextlib
import copy
import dataclasses
import functools
import re
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Self

import torch
from torch.utils.hooks import RemovableHandle

from tightfit.effects.ambient import names_of_modes
from tightfit.effects.values.card_sums import first_difference
from tightfit.errors import ApplyError
from tightfit.techniques.wrappers.forwards import Around, OnlyHere, copied_wrappers, take_off_copied, wrap_forward
from tightfit.techniques.wrappers.replaced_methods import MethodReplacement
from tightfit.torch_hooks.optimizer_step_hooks import take_off_hook

Undo = Callable[[], object]
CHECK_STEPS = 2
"""In how many of its first calls what a technique does is compared with the plain run."""
# Of what waits for a step to be compared, 8 MiB on a card: a program that updates by hand, or by an optimizer that no session has, never comes to one.
_MOST_SUMS = 1 << 13


@dataclasses.dataclass(slots=True, kw_only=True)
class Verdict(OnlyHere):
    """The first refusal since a plan was applied, until its session is undone: `failure` is that error."""

    failure: ApplyError | None = None
    sums: list["ComparedSums"] = dataclasses.field(default_factory=list)
    """What a card has yet to compare: it is asked before the next step, and not waited for in the backward pass."""
    may_read_optimizers: bool = False
    """Whether code that is run again in a backward pass may read an optimizer, whose states updates in that pass change."""
    updates_by: str = ""
    """A technique that has the step of an optimizer do other operators than its own, or nothing."""

    def refuse(self, message: str, *, technique: str = "", places: Sequence[str] = ()) -> ApplyError:
        """As `Session.refuse`, for wrappers on a model, which must not keep the model's session alive."""
        first = self.failure
        if first is None:
            self.failure = ApplyError(message, technique=technique, places=places)
        elif places and first.places and technique == first.technique:
            # One plan can be made without them all.
            joined = tuple(dict.fromkeys((*first.places, *places)))
            self.failure = ApplyError(str(first), technique=technique, places=joined)
        return self.error()

    def error(self) -> ApplyError:
        """The error to raise: a new object each time, since each raise extends a traceback."""
        assert self.failure is not None
        return ApplyError(str(self.failure), technique=self.failure.technique, places=self.failure.places)

    def check(self) -> None:
        """Raises the first refusal, if there is one.

        Raises:
            ApplyError: something was refused; the message is that of the first refusal.
        """
        sums, self.sums = self.sums, []
        if sums and self.failure is None:
            different = first_difference([each.first for each in sums], [each.again for each in sums])
            if different is not None:
                sums[different].refuse()
        if self.failure is not None:
            raise self.error() from self.failure

    def forget(self) -> None:
        """Clears the refusal."""
        self.failure = None
        self.sums.clear()

    @contextlib.contextmanager
    def on_trial(self) -> Iterator[None]:
        """Around a run whose refusals are an answer, and end nothing: afterwards there are those of before."""
        failure, sums = self.failure, list(self.sums)
        try:
            yield
        finally:
            self.failure, self.sums = failure, sums

    def before_step(self, *_: object) -> None:
        """A hook before the step of an optimizer."""
        self.check()
        if self.updates_by and (modes := names_of_modes()):
            raise self.refuse(
                f"an optimizer steps under {modes[0]}, a mode that sees every operator, and {self.updates_by} runs "
                f"different ones; leave {self.updates_by} out of the plan",
                technique=self.updates_by,
            )

    def before_forward(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """A wrapper around the forward of a model."""
        # A program may call it many times before a step: sums are left to that, if there is no failure yet, and they are not many.
        if (
            torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and (self.failure is not None or self._are_many())
        ):
            self.check()
        return forward(*args, **kwargs)

    def _are_many(self) -> bool:
        """Whether so many sums wait that they are compared now, where that does not end the capture of a graph."""
        if len(self.sums) < _MOST_SUMS:
            return False
        return not (self.sums[0].first.is_cuda and torch.cuda.is_current_stream_capturing())

    def __deepcopy__(self, memo: dict[int, Any]) -> "Verdict":
        # A copy of the model or of its optimizer trains by itself.
        return Verdict()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ComparedSums:
    """The sums (`effects.card_sums`) of what two runs of a region have saved, which are to be equal; `refuse` notes that they are not."""

    first: torch.Tensor
    again: torch.Tensor
    refuse: Callable[[], object]


# In words of a note or a refusal.
_NUMBER = re.compile(r"\d[\d.e+-]*")


def without_numbers(note: str) -> str:
    """What notes are told apart by: batches whose lengths vary are refused in the same words with other sizes."""
    return _NUMBER.sub("#", note)


class Notes(list[str]):
    """What a session has to say to the user. `tell` is given what comes after it was set; None: nobody is told, and whoever reads the list finds it."""

    tell: Callable[[str], None] | None = None

    def append(self, note: str) -> None:
        super().append(note)
        if self.tell is not None:
            self.tell(note)

    def extend(self, notes: Iterable[str]) -> None:
        for note in notes:
            self.append(note)


@dataclasses.dataclass(slots=True, kw_only=True, weakref_slot=True, eq=False)
class Session:
    """`model` is the outermost module that the workload calls; `optimizers` are those that hold parameters of it.

    `loop` is the framework's object whose method computes the loss of a batch, a LightningModule or a Trainer, for techniques that are applied to
    that; else None. In the first `check_steps` calls after a technique was applied, its results are compared with plain ones; 0 on the virtual
    GPU, where tensors have no values. `disk_folder` is where files of techniques go, by default TMPDIR. `statistics` counts events (`loss head chunks`, `recomputed blocks`); `notes` are messages for the user.
    Wrappers on the model refer to the `verdict`, and neither to the session nor to the model. `before` has the values, with their versions, that
    tensors had before they were cast; they are dropped once the whole plan is applied. `shared` has, by type, what several techniques use together.
    """

    model: torch.nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    loop: Any = None
    check_steps: int = CHECK_STEPS
    disk_folder: str | None = None
    statistics: Counter[str] = dataclasses.field(default_factory=Counter)
    notes: Notes = dataclasses.field(default_factory=Notes)
    verdict: Verdict = dataclasses.field(default_factory=Verdict)
    before: dict[torch.Tensor, tuple[torch.Tensor, int]] = dataclasses.field(default_factory=dict)
    shared: dict[type, Any] = dataclasses.field(default_factory=dict)
    _is_guarded: bool = False
    _is_over: bool = False
    _undo: list[Undo] = dataclasses.field(default_factory=list)

    def module(self, where: str) -> torch.nn.Module:
        """The module at the path `where`, which begins with the class name of the model.

        Raises:
            ApplyError: the plan was made for another model.
        """
        root, _, path = where.partition(".")
        if root != type(self.model).__name__:
            raise ApplyError(
                f"the plan is for a {root}, and this model is a {type(self.model).__name__}; make a plan for it"
            )
        try:
            return self.model.get_submodule(path)
        except AttributeError:
            raise ApplyError(
                f"the plan names {where}, which this {root} does not have; make a plan for this model"
            ) from None

    def when_undone(self, undo: Undo) -> None:
        """Registers a function for `undo`, to be run before all earlier ones; twice, if an interrupt cuts it short."""
        self._undo.append(undo)
        self._is_over = False

    def complete(self) -> Self:
        """Marks the whole plan as applied, and returns the session."""
        # In one line and in C, so that an interrupt comes either before or in the caller.
        return (self.before.clear(), self)[1]

    @property
    def is_on(self) -> bool:
        """Whether there is anything to undo."""
        return bool(self._undo)

    def set(self, holder: Any, name: str, value: Any) -> None:
        """Sets an attribute of a live object until the session is undone; one that the object itself did not have is deleted again.

        A value that other code sets there meanwhile stays. If it calls our function, that behaves like the original after the undo.
        """
        own = vars(holder)
        # Only what the object itself has: an attribute of its class is found again once ours is deleted.
        had, before = name in own, own.get(name)
        if callable(value) and not isinstance(value, type | torch.nn.Module):
            value = MethodReplacement(holder, name, value, before)
            self.when_undone(value.take_off)
        else:
            self.when_undone(lambda: _put_back(holder, name, value, had=had, before=before))
        setattr(holder, name, value)

    def wrap_forward(self, module: torch.nn.Module, around: Around, *, is_of_model: bool = False) -> None:
        """Replaces the module's `forward` by `around(forward, *args, **kwargs)`; what `is_of_model` is looked at with the model (`WrappedForward`).

        A copy of the module is wrapped too, by the same function or by a copy of an object with `__deepcopy__`, but not by an `OnlyHere`.

        Raises:
            ApplyError: the module is a program of TorchScript, whose forward Python does not call.
        """
        if isinstance(module, torch.jit.ScriptModule):
            path = next((path for path, part in self.model.named_modules() if part is module), "")
            where = f"{type(self.model).__name__}.{path}" if path else "the model"
            raise ApplyError(
                f"{where} is scripted or traced (torch.jit), and its forward cannot be wrapped; leave out what wraps "
                f"it (tightfit plan --without TECHNIQUE@{where})"
            )
        wrapped = wrap_forward(module, around, is_of_model=is_of_model)
        self.when_undone(wrapped.take_off)
        wrapped.put_on()

    def hook(self, register: Callable[[Any], RemovableHandle], function: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook until the session is undone: `session.hook(optimizer.register_step_pre_hook, function)`."""
        handles: list[RemovableHandle] = []

        def remove() -> None:
            for handle in handles:
                take_off_hook(handle)

        self.when_undone(remove)
        # In one call of C, so that no interrupt comes between.
        handles.extend(map(register, (function,)))
        return handles[0]

    def refuse(self, message: str, *, technique: str = "", places: Sequence[str] = ()) -> ApplyError:
        """The error to raise while user code runs: `raise session.refuse(...)`.

        From then on the model's forwards with gradients and its optimizers' steps raise it again, until the session is undone. Of several
        refusals the first one is kept; threads of the backward pass may call this.
        """
        if self._is_over:
            # A backward pass from before the session was undone may still run.
            return ApplyError(message, technique=technique, places=places)
        if self.verdict.failure is None:
            self.verdict.refuse(message, technique=technique, places=places)
            self.guard()
        return self.verdict.error()

    def check(self) -> None:
        """Raises the first refusal, if there is one.

        Raises:
            ApplyError: something was refused; the message is that of the first refusal.
        """
        self.verdict.check()

    def guard(self) -> None:
        """Makes the model's forwards with gradients and its optimizers' steps call `check`, before any other wrapper or hook.

        Some techniques need a module with its own forward, so this is called after all of them.
        """
        if self._is_guarded:
            return
        self._is_guarded = True
        self.when_undone(self.verdict.forget)
        # By reference to the model alone, and weakly: a session that is dropped must not wait for the garbage collector, nor its model for it.
        self.when_undone(functools.partial(_take_off_copies, weakref.ref(self.model)))
        for optimizer in self.optimizers:
            handle = self.hook(optimizer.register_step_pre_hook, self.verdict.before_step)
            hooks: Any = optimizer._optimizer_step_pre_hooks
            hooks.move_to_end(handle.id, last=False)
        # Of a program of TorchScript the steps are watched.
        if not isinstance(self.model, torch.jit.ScriptModule):
            self.wrap_forward(self.model, self.verdict.before_forward)

    def undo(self) -> None:
        """Undoes everything; the values of parameters and optimizer states stay as trained.

        All undo functions are run. If some fail, the first error is raised at the end, with notes on the others. A function that an interrupt has
        cut short is run again.
        """
        self._is_over, self._is_guarded = True, False
        errors: list[BaseException] = []
        try:
            _run_all(self._undo, errors)
        except KeyboardInterrupt as interrupt:
            errors.append(interrupt)
            _run_all(self._undo, errors)
        if errors:
            for other in errors[1:]:
                errors[0].add_note(f"and while undoing: {type(other).__name__}: {other}")
            raise errors[0]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.undo()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Session":
        """The session in a copy of an object that refers to one: it has nothing applied to the copied model and optimizers."""
        return Session(
            model=copy.deepcopy(self.model, memo),
            optimizers=[copy.deepcopy(optimizer, memo) for optimizer in self.optimizers],
            loop=copy.deepcopy(self.loop, memo),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _without_plan, (self.model, list(self.optimizers))


def _without_plan(model: torch.nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Session:
    return Session(model=model, optimizers=optimizers)


def _run_all(undo: list[Undo], errors: list[BaseException]) -> None:
    """Runs and removes the functions, the last one first; what they raise is added to `errors`."""
    while undo:
        try:
            # Removed after it has run: an interrupt in between runs it twice, and never not at all.
            undo[-1]()
        except Exception as error:  # noqa: BLE001 - the other steps are taken first
            errors.append(error)
        undo.pop()


def _put_back(holder: Any, name: str, value: Any, *, had: bool, before: Any) -> None:
    if vars(holder).get(name) is value:
        if had:
            setattr(holder, name, before)
        else:
            delattr(holder, name)


def _take_off_copies(model_of: "weakref.ref[torch.nn.Module]") -> None:
    """Modules of the model that are copies of others of its modules (a network that grows) came with what was around those."""
    model = model_of()
    for module in copied_wrappers(model) if model is not None else ():
        take_off_copied(module)
