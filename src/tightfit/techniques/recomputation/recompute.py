"""Recomputes a module's activations in its backward pass, without other observable differences.

As `torch.utils.checkpoint` does without reentrant autograd (torch/utils/checkpoint.py has the rules), a call saves its arguments, and of what its operators save
nothing: the first tensor that the backward pass asks for has the call run again, and what that saves takes the places of all that are still needed. It is done
here, and not around torch's own checkpoint, since the processor's time of a call is the time of a step on a fast card: hooks of ours beside torch's took as long
as both do together now (docs/log.md, 2026-11-26).

Besides torch's random states and autocast, any other state that the second run reads, and its side effects, are handled with `tightfit.effects`: attributes,
buffers, hooks, modes, globals and the random states of Python and numpy are restored for the second run to their values at the first, and afterwards to their
later values. Changes that cannot be restored are refused, in the forward or before any gradient of the region is used. In every call what the second run saves
for backward is compared with what the first one saved (`saved_values`); in the first calls, and again after a change of shape, mode or module, the result of
each operator too.
"""

import copy
import functools
import inspect
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from tightfit.capture.observe.host_python import spends
from tightfit.cost.host_python import HostWork
from tightfit.effects.ambient import (
    Ambient,
    are_saved_tensor_hooks_refused,
    may_saved_tensors_be_written,
    takes_saved_tensor_hooks,
)
from tightfit.effects.bytecode.asked_of_saved import told
from tightfit.effects.optimizer_marks import OptimizerMarks
from tightfit.effects.outside_calls import without_outside_calls
from tightfit.effects.run_settings import RunSettings
from tightfit.effects.state import (
    DRAWN,
    RegionState,
    Snapshot,
    StateDifference,
    again,
    differences,
    restore,
    snapshot_of_arguments,
    with_replaced,
    written_since,
)
from tightfit.effects.values.fingerprints import Fingerprint, Fingerprints, first_mismatch
from tightfit.effects.values.value_checks import has_values
from tightfit.errors import ApplyError, TightfitError
from tightfit.techniques.recomputation.call_arguments import (
    SavedInputs,
    holds_things,
    kept_as_they_are,
    shapes,
    tensors_in,
    versions,
    without_cache,
    without_more_hooks,
)
from tightfit.techniques.recomputation.kept_results import OtherRunError
from tightfit.techniques.recomputation.recompute_checks import (
    CheckSchedule,
    InnerModules,
    ParameterMarks,
    StoredTensors,
)
from tightfit.techniques.recomputation.saved_values import LaterRun, SavedTensor, SavedValues
from tightfit.techniques.session import CHECK_STEPS, ComparedSums, Verdict
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.torch_hooks.backward import keeps_graph
from tightfit.torch_hooks.manifest import GRAPH_TASK_ID
from tightfit.torch_hooks.saved_tensor_hooks import is_of_torch_offload, programs_hooks
from tightfit.torch_hooks.saving_functions import on_saving_functions

Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

_OTHER_THINGS = "ran differently when it was recomputed"
# The number of a backward pass where there is none.
_NO_TASK = -1
_NOTHING = nullcontext()
_graph_task: Callable[[], int] = GRAPH_TASK_ID.value()
_OF_CHECKPOINTS = frozenset((*inspect.signature(checkpoint).parameters, "preserve_rng_state"))


class Recomputed:
    """The wrapper around one module's forward; `contexts` as `context_fn` of `torch.utils.checkpoint.checkpoint`.

    It refers to the module weakly, and a copy of the module gets a copy of it, so that neither keeps the other's module alive or
    changes it.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        *,
        where: str,
        technique: str,
        verdict: Verdict,
        check_steps: int = CHECK_STEPS,
        contexts: Contexts | None = None,
    ) -> None:
        self.contexts = contexts
        """Those of the first run and of each later one; they see the module's operators alone."""
        self._module = weakref.ref(module)
        on_saving_functions(self)
        # Not the session, which keeps the model.
        self._verdict = verdict
        self._where = where
        self._technique = technique
        self.state = RegionState()
        # The tensors that its forwards write to, by their paths.
        self._written: set[str] = set()
        self.schedule = CheckSchedule(check_steps)
        self.stored = StoredTensors()
        self._inside = InnerModules()
        self.is_first = True
        """Whether no forward has finished yet."""
        self.num_second_runs = 0
        self.num_saved = 0
        """How many tensors the last call has saved for its backward pass."""
        self.adds_in_any_order = False
        """Whether an operator inside adds up in an order that may be another the second time, as atomic additions of a card do."""
        self.writes_at_its_end = False
        """Whether its forward writes to a tensor of its state after the last one that it saves, as one that takes a change back at its end does."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recomputed":
        module = copy.deepcopy(self.owner(), memo)
        return Recomputed(
            module, where=self._where, technique=self._technique, verdict=Verdict(), contexts=self.contexts
        )

    def owner(self) -> torch.nn.Module:
        """The module."""
        module = self._module()
        assert module is not None
        return module

    @property
    def is_selective(self) -> bool:
        """Whether some of its results are saved for the second run."""
        return self.contexts is not None

    def note_reach(self, before: Snapshot) -> None:
        """Notes whether code that is run again may read an optimizer."""
        self._verdict.may_read_optimizers |= bool(before.reach.optimizers)

    def refusal(self, why: str) -> ApplyError:
        """The error that this module cannot be recomputed, with the remedy."""
        message = f"{self._where} {why}; leave it out: tightfit plan --without {self._technique}@{self._where}"
        return self._verdict.refuse(message, technique=self._technique, places=(self._where,))

    def expect(self, sums: Sequence[tuple[torch.Tensor, torch.Tensor, str]]) -> None:
        """Has the two sums of each compared before the next step of an optimizer."""
        for first, second, words in sums:
            refuse = functools.partial(self.refusal, f"{words} when it was recomputed")
            self._verdict.sums.append(ComparedSums(first=first, again=second, refuse=refuse))

    def is_of(self, module: torch.nn.Module) -> bool:
        """Whether this wraps `module`, and not a module that it is a copy of."""
        return self._module() is module

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        return self.run(forward, args, kwargs)

    def run(
        self,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        on_call: Callable[["RecomputedCall"], None] = lambda _: None,
    ) -> Any:
        """Calls `forward`; `on_call` is called before with the `RecomputedCall`, which can run it once more."""
        if not torch.is_grad_enabled() or self.is_left_alone() or is_looked_at(args, kwargs):
            return forward(*args, **kwargs)
        args, kwargs = without_cache(self.owner(), args, kwargs)
        if torch.compiler.is_compiling():
            extra: dict[str, Any] = {} if self.contexts is None else {"context_fn": self.contexts}
            # What a module calls its arguments may be what a checkpoint calls its own.
            named = functools.partial(forward, **kwargs) if _OF_CHECKPOINTS & kwargs.keys() else forward
            given = {} if _OF_CHECKPOINTS & kwargs.keys() else kwargs
            return checkpoint(named, *args, use_reentrant=False, **extra, **given)
        if not takes_saved_tensor_hooks():
            raise self.refusal("runs where the program has disabled saved-tensor hooks, which recomputation needs")
        call = RecomputedCall(self, args, kwargs)
        on_call(call)
        # Where both runs are compared, the second one goes on to its end, past the last tensor that the backward pass needs.
        # So it does where hooks may begin what others of them end.
        is_compared = call.is_checked and self.schedule.has_values
        has_hooks = self._inside.has_hooks(self.owner(), call.before)
        is_ended = has_hooks or call.before.reach.ends_by_hand or self.writes_at_its_end
        stops_early = not (is_compared or is_ended)
        if not call.is_watched:
            return call.first(forward, args, kwargs, stops_early=stops_early)
        with without_outside_calls(self.refusal, is_on=True):
            return call.first(forward, args, kwargs, stops_early=stops_early)

    def is_left_alone(self) -> bool:
        """Whether this call is not checkpointed: lazy parameters are made in it, torch.func transforms take no saved-tensor hooks, saved tensors that may
        be written to would be changed for a second run, and what the program recomputes or packs by itself would not be given to its hooks any more."""
        if torch._C._functorch.peek_interpreter_stack() is not None or may_saved_tensors_be_written():
            return True
        hooks = programs_hooks()
        if hooks is not None and not is_of_torch_offload(hooks[0]):
            return True
        return self.is_first and any(torch.nn.parameter.is_lazy(p) for p in self.owner().parameters())

    def copies(self, before: Snapshot, *, of_all: bool) -> dict[int, torch.Tensor]:
        """Copies of the tensors that the forward is known to write to; with `of_all`, of all that it may write to."""
        statistics = self._inside.statistics(self.owner(), before)
        if not (of_all or self._written or statistics):
            return {}
        places = zip(before.reach.tensor_paths, before.reach.tensors, strict=True)
        with torch.no_grad():
            return {
                id(tensor): tensor.clone()
                for path, tensor in places
                if not isinstance(tensor, torch.nn.Parameter)
                and not tensor.requires_grad
                and (of_all or path in self._written or id(tensor) in statistics)
            }

    def learn(self, before: Snapshot, copies: dict[int, torch.Tensor]) -> None:
        """Finds the tensors that a forward wrote to, and drops the copies of the others.

        Raises:
            ApplyError: it wrote to one in a way that cannot be restored.
        """
        after, statistics = self.state.snapshot(self.owner()), self._inside.statistics(self.owner(), before)
        found = {id(d.tensor): d for d in differences(before, after) if d.is_in_place and d.tensor is not None}
        for path, tensor in zip(before.reach.tensor_paths, before.reach.tensors, strict=True):
            value = copies.get(id(tensor))
            if value is None or id(tensor) in statistics:
                found.pop(id(tensor), None) if value is not None else None
            elif id(tensor) not in found and not (self.schedule.has_values and not _is_equal(value, tensor)):
                del copies[id(tensor)]
            elif _is_replaceable(before, tensor):
                self._written.add(path)
                found.pop(id(tensor), None)
            else:
                raise self.refusal(f"cannot be recomputed: in its forward {path} was written to")
        if found:
            raise self.refusal(f"cannot be recomputed: in its forward {next(iter(found.values()))}")
        self.is_first = False


class RecomputedCall:
    """One call of a module: the state at its first run, for every later run of the same call."""

    def __init__(self, owner: Recomputed, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self.owner = owner
        self.before = owner.state.snapshot(owner.owner(), is_kept=True)
        given = tensors_in((*args, *kwargs.values()))
        self._given, self._versions = given, versions(given)
        named = {**{f"argument {n}": a for n, a in enumerate(args)}, **kwargs}
        # Lists and dicts among the arguments are written to by many forwards (collected hidden states,
        # auxiliary losses): their contents are restored like attributes.
        held = {name: value for name, value in named.items() if holds_things(value)}
        self._held = snapshot_of_arguments(held) if held else None
        self._ambient = Ambient.now()
        self.is_checked = owner.schedule.needs_check(shapes(given), self.before)
        self._of_all = self.is_checked or owner.is_first
        # To go through the modules for it would take as long as all else here.
        parameter = next(iter(self.before.reach.parameters), None)
        is_at_host = parameter is None or parameter.device.type == "cpu"
        # On a card a call is over before its kernels are, and what the look costs would show.
        self.is_watched = owner.schedule.has_values and (
            is_at_host or self.is_checked or self.before.reach.names_outside
        )
        self._copies = owner.copies(self.before, of_all=self._of_all)
        self._own_writes: frozenset[str] = frozenset()
        # Snapshots refer to tensors with a graph weakly. Those that the first run may read must be alive for
        # the second, whatever the program drops in between.
        in_graphs = self.before.in_graphs()
        self._handed_over = owner.stored.handed_over(in_graphs, owner.num_second_runs)
        self._handed_over += self._held.in_graphs() if self._held is not None else []
        self._has_graphs = bool(in_graphs)
        self.fingerprints: list[Fingerprint] | None = None
        # Where both runs are compared operator by operator, and where operators add up in any order, sums tell nothing.
        num_summed = 0 if self.is_checked or owner.adds_in_any_order else owner.num_saved
        self.saved = SavedValues(self.before.reach.weights, num_summed, has_values=owner.schedule.has_values)
        self._settings = RunSettings(given if parameter is None else [*given, parameter])

    def first(
        self, forward: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, stops_early: bool
    ) -> Any:
        """The first run, which saves nothing but its arguments; `stops_early` ends later runs with the last tensor that the first one has saved.

        Raises:
            ApplyError: it had a side effect that cannot be restored for a later run.
        """
        owner, saved, settings = self.owner, self.saved, self._settings
        first, later = (None, None) if owner.contexts is None else owner.contexts()
        # Not kept here: it leads to the forward, which may lead to this call.
        graph_holds = _RepeatedCall(self, forward, args, kwargs, settings, later, stops_early=stops_early)
        fingerprints = Fingerprints() if self.is_checked and owner.schedule.has_values else None
        try:
            with (
                torch.autograd.graph.saved_tensors_hooks(saved.pack, graph_holds.unpack),
                first or _NOTHING,
                fingerprints or _NOTHING,
            ):
                result = _run_uncompiled(forward, args, kwargs)
        except RuntimeError as error:
            if not are_saved_tensor_hooks_refused(error):
                raise
            raise owner.refusal(
                "runs a torch.func transform that does not support saved-tensor hooks, which recomputation needs"
            ) from error
        saved.is_complete = True
        self.fingerprints = fingerprints.taken if fingerprints is not None else None
        owner.adds_in_any_order |= any(each.bound for each in self.fingerprints or ())
        # Those that it was given: a list among its arguments may hold more by now.
        given, self._given = self._given, []
        if versions(given) != self._versions:
            raise owner.refusal("modifies its own input in place, so a recomputation would start from other values")
        if settings.has_begun_card:
            raise owner.refusal(
                "is the first code to use the GPU, so a recomputation could not draw the same random numbers"
            )
        self._end_first()
        return result

    def _end_first(self) -> None:
        self._spend()
        self.owner.note_reach(self.before)
        self.owner.num_saved = len(self.saved)
        if self.saved.question:
            raise self.owner.refusal(told(self.saved.question))
        if self._of_all:
            self.owner.learn(self.before, self._copies)
        if self._has_graphs or self._of_all:
            after = self.owner.state.snapshot(self.owner.owner())
            # What a forward draws from, a second run goes on drawing from: its results may be the same, and its gradients of another number.
            self._own_writes = frozenset(d.path for d in differences(self.before, after) if d.what != DRAWN)
            self.owner.stored.leaves(self.before.in_graphs(), after.in_graphs(), self.owner.num_second_runs)

    @contextmanager
    def again(self, given: Sequence[torch.Tensor]) -> Iterator[None]:
        """Restores the state of the first run for a block, which is given these tensors, and compares its results; afterwards the present state is restored."""
        with self.restored(given), self._compared():
            yield

    @contextmanager
    def restored(self, given: Sequence[torch.Tensor]) -> Iterator[None]:
        """The same without the comparison.

        Raises:
            ApplyError: the state cannot be restored.
        """
        owner, module = self.owner, self.owner.owner()
        owner.num_second_runs += 1
        self._spend()
        # As a rule nothing has changed since, and the first snapshot is that of the present state too.
        is_same = self._held is None and owner.state.is_still(self.before)
        now = self.before if is_same else owner.state.snapshot(module)
        held = again(self._held) if self._held is not None else None
        # Tensors that may be referred to only by the state that is being replaced.
        kept = [*now.in_graphs(), *(held.in_graphs() if held is not None else [])]
        changed = [] if is_same else differences(self.before, now)
        changed += differences(self._held, held) if self._held is not None and held is not None else []
        self._refuse_lost(changed)
        ambient = Ambient.now()
        # A mode of the user's may change what operators compute, and the backward pass runs outside of it.
        if modes := self._ambient.unknown_modes(ambient):
            raise owner.refusal(f"ran under {modes[0]}, a mode that the backward pass does not run under")
        if modes := self._ambient.other_dispatch_modes(ambient):
            raise owner.refusal(f"runs, or is recomputed, under {modes[0]}, a mode that sees every operator")
        # Most blocks write nothing: for these a second run costs two looks at the state and no restoring.
        needs_restoring = bool(changed or self._copies)
        if needs_restoring:
            # Each run writes to copies of its own: there may be a third.
            restore(with_replaced(self.before, {key: copy.clone() for key, copy in self._copies.items()}))
            if self._held is not None:
                restore(self._held)
        marks = ParameterMarks(self.before.reach.parameters), OptimizerMarks(self.before.reach.optimizers)
        try:
            with self._ambient.put_back(ambient), _without_hooks_of(owner, self.before, [*given, *kept]):
                yield
        finally:
            # What the program has put back in between is as before the first run, and was written to by this one.
            if needs_restoring or self._is_written_since(now, held):
                restore(now)
                if held is not None:
                    restore(held)
                self._refuse_left(now)
            kept.clear()
            if change := marks[0].change() or marks[1].change():
                raise owner.refusal(f"{change} in its forward, which a recomputation would repeat")

    def _spend(self) -> None:
        """Half of what a call costs the processor, in each of its runs."""
        if self.owner.schedule.has_values:
            return
        num_tensors = 0.5 * len(self.saved)
        spends(HostWork.RECOMPUTED_CALL, 0.5)
        spends(HostWork.RECOMPUTED_TENSOR, num_tensors)
        if self.owner.is_selective:
            spends(HostWork.SELECTED_TENSOR, num_tensors)

    def _is_written_since(self, now: Snapshot, held: Snapshot | None) -> bool:
        if now is self.before and self.owner.state.is_still(now):
            return False
        after = self.owner.state.snapshot(self.owner.owner())
        return bool(differences(now, after) or (held is not None and differences(held, again(held))))

    def _refuse_left(self, now: Snapshot) -> None:
        """A run that ends with the last tensor that the backward pass needs does not come to what takes its writes back at the end of the forward."""
        for difference in written_since(now):
            raise self.owner.refusal(
                f"was recomputed only up to its last saved tensor, and that left a change: {difference}"
            )

    def _refuse_lost(self, changed: Sequence[StateDifference]) -> None:
        for difference in changed:
            is_own = difference.tensor is None and difference.path in self._own_writes
            if difference.is_in_place and not is_own and id(difference.tensor) not in self._copies:
                raise self.owner.refusal(f"cannot be recomputed: since its forward {difference}")

    @contextmanager
    def _compared(self) -> Iterator[None]:
        if self.fingerprints is None:
            yield
            return
        with Fingerprints() as fingerprints:
            yield
        self.compare(fingerprints.taken)

    def compare(self, taken: Sequence[Fingerprint]) -> None:
        """Compares the fingerprints of a later run with those of the first.

        Raises:
            ApplyError: they are not the same.
        """
        mismatch = first_mismatch(self.fingerprints or (), taken)
        if mismatch is not None:
            raise self.owner.refusal(f"{mismatch} when it was recomputed")


class _RepeatedCall:
    """What the graph of a call holds: the call, with all that runs it once more when the backward pass asks for a tensor that it has saved."""

    __slots__ = (
        *("_call", "_forward", "_inputs", "_kwargs", "_later", "_settings", "_stops_early"),
        *("__weakref__", "_versions_kept"),
    )

    def __init__(
        self,
        call: RecomputedCall,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        settings: RunSettings,
        later: AbstractContextManager[Any] | None,
        *,
        stops_early: bool,
    ) -> None:
        self._call = call
        self._forward = forward
        self._inputs = SavedInputs(args)
        self._kwargs = kwargs
        self._settings = settings
        self._later = later or _NOTHING
        self._stops_early = stops_early
        self._versions_kept = versions(tensors_in(kept_as_they_are(args, kwargs)))

    def unpack(self, saved: SavedTensor) -> torch.Tensor:
        """The tensor of a second run that a node of the graph asks for: a hook for saved tensors."""
        task = _graph_task()
        value = saved.again.pop(task, None)
        if value is not None:
            return value
        self._run_again(task)
        value = saved.again.pop(task, None)
        if task == _NO_TASK:
            # Each look at a graph from outside of a backward pass stands for itself.
            self._call.saved.forget(task)
        elif keeps_graph():
            self._call.saved.forget_after(task)
        if value is None:
            raise self._call.owner.refusal(_OTHER_THINGS)
        return value

    def _run_again(self, task: int) -> None:
        """Runs the call once more, for the backward pass `task`.

        Raises:
            ApplyError: it did something else than the first time.
        """
        call, owner = self._call, self._call.owner
        args = self._inputs.get()
        at_last: list[tuple[Snapshot, int]] = []
        fingerprints = Fingerprints() if call.fingerprints is not None else None
        noted = functools.partial(_note_state, owner, fingerprints, at_last) if fingerprints is not None else None
        later = LaterRun(call.saved, task, stops_early=self._stops_early, at_last=noted)
        # First the state, then the rest: what restoring runs (copies of buffers) must be neither counted nor saved.
        with torch.enable_grad(), self._settings.put_back(), call.restored(tensors_in((*args, *self._kwargs.values()))):
            self._check(args)
            try:
                with (
                    torch.autograd.graph.saved_tensors_hooks(later.pack, _as_it_is),
                    self._later,
                    fingerprints or _NOTHING,
                ):
                    _run_uncompiled(self._forward, args, self._kwargs)
                written = [] if fingerprints is None else fingerprints.written
                owner.writes_at_its_end |= any(_is_written(then, written[num_before:]) for then, num_before in at_last)
            except _StopRecomputationError:
                # What the backward pass needs is there.
                if not later.is_stopped:
                    raise
            except (TightfitError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise owner.refusal(_did_instead(error)) from error
        owner.expect(later.sums)
        if fingerprints is not None:
            call.compare(fingerprints.taken)
        if later.words:
            raise owner.refusal(f"{later.words} when it was recomputed")
        if not later.is_alike or not later.is_whole:
            raise owner.refusal(_OTHER_THINGS)

    def _check(self, args: Sequence[Any]) -> None:
        owner = self._call.owner
        if versions(tensors_in(kept_as_they_are(args, self._kwargs))) != self._versions_kept:
            raise owner.refusal("gets an argument that is modified after the call")
        if self._call.saved.is_any_written():
            raise owner.refusal(
                "cannot be recomputed: a tensor that it saved for its backward pass was modified without torch "
                "seeing it (through .data)"
            )


def _without_hooks_of(
    owner: Recomputed, before: Snapshot, given: Sequence[torch.Tensor]
) -> AbstractContextManager[None]:
    """Takes the hooks of a second run off again: on what it is given, and where its code names hooks on other tensors that it reaches."""
    reach = before.reach
    of_all = reach.names_gradient_hooks
    # Of parameters it is refused (`ParameterMarks`).
    others = (t for t in reach.tensors if of_all and t.requires_grad and not isinstance(t, torch.nn.Parameter))
    return without_more_hooks([*given, *others], owner.refusal, of_nodes=of_all)


def _did_instead(error: Exception) -> str:
    """What a second run has done that raised an error, which the first one did not."""
    frames = traceback.extract_tb(error.__traceback__)
    # Of a checkpoint of the program's inside, which has saved another number of tensors, or others by shape, dtype or device.
    is_of_torch = isinstance(error, RuntimeError) and frames[-1].filename == torch.utils.checkpoint.__file__
    if is_of_torch or isinstance(error, OtherRunError):
        return _OTHER_THINGS
    return f"raised {type(error).__name__} when it was recomputed"


def _note_state(owner: Recomputed, fingerprints: Fingerprints, kept: list[tuple[Snapshot, int]]) -> None:
    kept[:] = [(owner.state.snapshot(owner.owner()), len(fingerprints.written))]


def _is_written(then: Snapshot, storages: Sequence[int]) -> bool:
    """Whether a tensor of the state was written to since `then`: it is another now, or operators wrote to its storage, which on a card may not be seen by it."""
    reached = {tensor.untyped_storage()._cdata for tensor in then.reach.tensors if tensor.layout is torch.strided}
    return not reached.isdisjoint(storages) or any(True for _ in written_since(then))


@torch._disable_dynamo
def _run_uncompiled(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Calls a function so that the compiler leaves it as it is: what it makes of a second run is not what it made of the first."""
    return function(*args, **kwargs)


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    """What a backward pass within a second run is given."""
    return tensor


def _is_replaceable(before: Snapshot, tensor: torch.Tensor) -> bool:
    """Whether a restorable container holds the tensor, so that a second run can be given another one; not if numpy sees its memory too."""
    if any(_shares(tensor, *each.memory) for each in before.reach.drawn):
        return False
    contents = (content.values() if isinstance(content, dict) else content for content in before.contents)
    return any(value is tensor for values in contents for value in values)


def _shares(tensor: torch.Tensor, address: int, num_bytes: int) -> bool:
    if not num_bytes or tensor.device.type != "cpu" or not has_values(tensor):
        return False
    storage = tensor.untyped_storage()
    return address < storage.data_ptr() + storage.nbytes() and storage.data_ptr() < address + num_bytes


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Torch compares no sparse tensors; a write to one changes its version.
    return one.shape == other.shape and (one.layout != torch.strided or bool(torch.equal(one, other)))
