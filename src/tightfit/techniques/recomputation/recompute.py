"""Recomputes a module's activations in its backward pass, without other observable differences.

`torch.utils.checkpoint` restores torch's random state and autocast. Any other state that the second run reads, and its side effects, are handled
here with `tightfit.effects`: attributes, buffers, hooks, modes, globals and the random states of Python and numpy are restored for the second run
to their values at the first, and afterwards to their later values. Changes that cannot be restored are refused, in the forward or before any
gradient of the region is used. In every call what the second run saves for backward is compared with what the first one saved (`saved_values`);
in the first calls, and again after a change of shape, mode or module, the result of each operator too.
"""

import copy
import functools
import inspect
import itertools
import traceback
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import _StopRecomputationError, checkpoint

from tightfit.effects.ambient import (
    Ambient,
    are_saved_tensor_hooks_refused,
    may_saved_tensors_be_written,
    takes_saved_tensor_hooks,
)
from tightfit.effects.asked_of_saved import told
from tightfit.effects.fingerprints import Fingerprint, Fingerprints, first_mismatch
from tightfit.effects.holders import PLAIN
from tightfit.effects.optimizer_marks import OptimizerMarks
from tightfit.effects.outside_calls import without_outside_calls
from tightfit.effects.state import (
    RegionState,
    Snapshot,
    StateDifference,
    again,
    differences,
    restore,
    snapshot_of_arguments,
    with_replaced,
)
from tightfit.effects.value_checks import has_values
from tightfit.errors import ApplyError, TightfitError
from tightfit.techniques.recomputation.recompute_checks import (
    CheckSchedule,
    InnerModules,
    ParameterMarks,
    StoredTensors,
)
from tightfit.techniques.recomputation.saved_values import SavedValues
from tightfit.techniques.session import CHECK_STEPS, ComparedSums, Verdict
from tightfit.torch_hooks.backward import keeps_graph
from tightfit.torch_hooks.saved_tensor_hooks import is_of_torch_offload, mark_as_ours, programs_hooks

Refusal = Callable[[str], ApplyError]
Contexts = Callable[[], tuple[AbstractContextManager[Any], AbstractContextManager[Any]]]

# Batch norm's operator writes to these although its schema does not say so: the tensors' versions stay as they were.
_CHANGED_UNSEEN = frozenset({"running_mean", "running_var"})
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
        self._module = weakref.ref(module)
        # Not the session, which keeps the model.
        self._verdict = verdict
        self._where = where
        self._technique = technique
        self._contexts = contexts
        self.state = RegionState()
        # The tensors that its forwards write to, by their paths.
        self._written: set[str] = set()
        self.schedule = CheckSchedule(check_steps)
        self.stored = StoredTensors()
        self._inside = InnerModules()
        self._is_first = True
        self.num_second_runs = 0
        self.num_saved = 0
        """How many tensors the last call has saved for its backward pass."""
        self.adds_in_any_order = False
        """Whether an operator inside adds up in an order that may be another the second time, as atomic additions of a card do."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "Recomputed":
        module = copy.deepcopy(self.owner(), memo)
        return Recomputed(
            module, where=self._where, technique=self._technique, verdict=Verdict(), contexts=self._contexts
        )

    def owner(self) -> torch.nn.Module:
        """The module."""
        module = self._module()
        assert module is not None
        return module

    @property
    def is_selective(self) -> bool:
        """Whether some of its results are saved for the second run."""
        return self._contexts is not None

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
            refuse = functools.partial(self.refusal, f"{words} when it was run a second time")
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
        if not torch.is_grad_enabled() or self.is_left_alone():
            return forward(*args, **kwargs)
        args, kwargs = tuple(_withhold(a) for a in args), {name: _withhold(a) for name, a in kwargs.items()}
        # A decoder that fills a cache in training would fill it twice; nothing reads it between the passes
        # (transformers' own checkpointing switches it off too).
        if kwargs.get("use_cache") is True:
            kwargs["use_cache"] = False
        if torch.compiler.is_compiling():
            extra: dict[str, Any] = {} if self._contexts is None else {"context_fn": self._contexts}
            # What a module calls its arguments may be what a checkpoint calls its own.
            named = functools.partial(forward, **kwargs) if _OF_CHECKPOINTS & kwargs.keys() else forward
            given = {} if _OF_CHECKPOINTS & kwargs.keys() else kwargs
            return checkpoint(named, *args, use_reentrant=False, **extra, **given)
        if not takes_saved_tensor_hooks():
            raise self.refusal(
                "runs where the program has switched off hooks for saved tensors, which a second run needs"
            )
        call = RecomputedCall(self, args, kwargs)
        on_call(call)
        contexts = functools.partial(call.contexts, self._contexts)
        # Where both runs are compared, the second one goes on to its end, past the last tensor that the backward pass needs.
        # So it does where hooks may begin what others of them end.
        stops_early = not (call.is_checked and self.schedule.has_values) and not self._inside.has_hooks(
            self.owner(), call.before
        )
        with without_outside_calls(self.refusal, is_on=call.is_watched):
            result = checkpoint(
                call.running(forward), kwargs, *args, use_reentrant=False, context_fn=contexts, early_stop=stops_early
            )
            call.raise_failure()
        call.end_first()
        return result

    def is_left_alone(self) -> bool:
        """Whether this call is not checkpointed: lazy parameters are made in it, torch.func transforms take no saved-tensor hooks, saved tensors that may
        be written to would be changed for a second run, and what the program recomputes or packs by itself would not be given to its hooks any more."""
        if torch._C._functorch.peek_interpreter_stack() is not None or may_saved_tensors_be_written():
            return True
        hooks = programs_hooks()
        if hooks is not None and not is_of_torch_offload(hooks[0]):
            return True
        return self._is_first and any(torch.nn.parameter.is_lazy(p) for p in self.owner().parameters())

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
                raise self.refusal(f"cannot be run a second time: in its forward {path} was written to")
        if found:
            raise self.refusal(f"cannot be run a second time: in its forward {next(iter(found.values()))}")
        self._is_first = False

    @property
    def is_first(self) -> bool:
        """Whether no forward has finished yet."""
        return self._is_first


class RecomputedCall:
    """One call of a module: the state at its first run, for every later run of the same call."""

    def __init__(self, owner: Recomputed, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        self._owner = owner
        self._before = owner.state.snapshot(owner.owner(), is_kept=True)
        self._versions = _versions((args, kwargs))
        self._versions_kept = _versions(_kept_as_they_are(args, kwargs))
        named = {**{f"argument {n}": a for n, a in enumerate(args)}, **kwargs}
        # Lists and dicts among the arguments are written to by many forwards (collected hidden states,
        # auxiliary losses): their contents are restored like attributes.
        held = {name: value for name, value in named.items() if _holds_things(value)}
        self._held = snapshot_of_arguments(held) if held else None
        self._ambient = Ambient.now()
        self.is_checked = owner.schedule.needs_check(_shapes((args, kwargs)), self._before)
        self._of_all = self.is_checked or owner.is_first
        parameter = next(owner.owner().parameters(), None)
        is_at_host = parameter is None or parameter.device.type == "cpu"
        # On a card a call is over before its kernels are, and what the look costs would show.
        self.is_watched = owner.schedule.has_values and (
            is_at_host or self.is_checked or self._before.reach.names_outside
        )
        self._copies = owner.copies(self._before, of_all=self._of_all)
        self._own_writes: frozenset[str] = frozenset()
        # Snapshots refer to tensors with a graph weakly. Those that the first run may read must be alive for
        # the second, whatever the program drops in between.
        in_graphs = self._before.in_graphs()
        self._handed_over = owner.stored.handed_over(in_graphs, owner.num_second_runs)
        self._handed_over += self._held.in_graphs() if self._held is not None else []
        self._has_graphs = bool(in_graphs)
        self._first: list[Fingerprint] | None = None
        # Where both runs are compared operator by operator, and where operators add up in any order, sums tell nothing.
        num_summed = 0 if self.is_checked or owner.adds_in_any_order else owner.num_saved
        self._saved = SavedValues(self._before.reach.weights, num_summed) if owner.schedule.has_values else None
        self._is_used_up = False
        self._failure: BaseException | None = None

    @property
    def before(self) -> Snapshot:
        """The state before the first run."""
        return self._before

    def contexts(self, inner: Contexts | None) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        """The contexts of a checkpoint for the first run and for each later one; the contexts of `inner` see only the module's operators."""
        first, later = (nullcontext(), nullcontext()) if inner is None else inner()
        return first, _Again(self, later)

    def running(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The function for the checkpoint to run twice; keyword arguments are passed as one dict, as a checkpoint has keywords of its own."""
        num_runs = 0

        def run(kwargs: dict[str, Any], *args: Any) -> Any:
            nonlocal num_runs
            num_runs += 1
            mark_as_ours()
            if self._is_used_up and self._owner.is_selective:
                raise self._owner.refusal("is gone through backwards twice, and what is kept of it serves once")
            if num_runs > 1:
                self._is_used_up = not keeps_graph()
                if _versions(_kept_as_they_are(args, kwargs)) != self._versions_kept:
                    raise self._owner.refusal("is given a tensor that is written to after it was handed in")
                with self._same_saved(), self._compared(), _told_of_mismatches(self._owner.refusal):
                    return forward(*args, **kwargs)
            try:
                return self._run_first(forward, args, kwargs)
            except BaseException as error:  # noqa: BLE001 - raised by `raise_failure`
                # Before torch 2.13 a checkpoint whose function raises leaves its hooks in effect as long as somebody has the error.
                self._failure = error
                return None

        return run

    def _run_first(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        with (
            _told_of_transforms(self._owner.refusal),
            self._saved.of_first_run() if self._saved is not None else nullcontext(),
            Fingerprints() if self.is_checked and self._owner.schedule.has_values else nullcontext() as fingerprints,
        ):
            result = forward(*args, **kwargs)
        self._first = fingerprints.taken if fingerprints is not None else None
        self._owner.adds_in_any_order |= any(each.bound for each in self._first or ())
        if _versions((args, kwargs)) != self._versions:
            raise self._owner.refusal("writes over its own input, which a second run would find changed")
        return result

    def raise_failure(self) -> None:
        """Raises what the first run has raised, outside of its checkpoint."""
        error, self._failure = self._failure, None
        if error is not None:
            raise error

    def end_first(self) -> None:
        """To be called after the first run.

        Raises:
            ApplyError: it had a side effect that cannot be restored for a later run.
        """
        self._owner.note_reach(self._before)
        if self._saved is not None:
            self._owner.num_saved = len(self._saved)
        if self._saved is not None and self._saved.question:
            raise self._owner.refusal(told(self._saved.question))
        if self._of_all:
            self._owner.learn(self._before, self._copies)
        if self._has_graphs or self._of_all:
            after = self._owner.state.snapshot(self._owner.owner())
            # What a forward draws from, a second run goes on drawing from: its results may be the same, and its gradients of another number.
            self._own_writes = frozenset(d.path for d in differences(self._before, after) if d.what != "was drawn from")
            self._owner.stored.leaves(self._before.in_graphs(), after.in_graphs(), self._owner.num_second_runs)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Restores the state of the first run for a block and compares its results; afterwards the present state is restored."""
        with self.restored(), self._compared():
            yield

    @contextmanager
    def restored(self) -> Iterator[None]:
        """The same without the comparison.

        Raises:
            ApplyError: the state cannot be restored.
        """
        owner, module = self._owner, self._owner.owner()
        owner.num_second_runs += 1
        now = owner.state.snapshot(module)
        held = again(self._held) if self._held is not None else None
        # Tensors that may be referred to only by the state that is being replaced.
        kept = [*now.in_graphs(), *(held.in_graphs() if held is not None else [])]
        changed = differences(self._before, now)
        changed += differences(self._held, held) if self._held is not None and held is not None else []
        self._refuse_lost(changed)
        # A mode of the user's may change what operators compute, and the backward pass runs outside of it.
        if modes := self._ambient.unknown_modes():
            raise owner.refusal(f"ran inside of {modes[0]}, which the backward pass is not in")
        if modes := self._ambient.other_dispatch_modes():
            raise owner.refusal(
                f"is run a second time inside of {modes[0]}, or was the first time, which sees each operator"
            )
        # Most blocks write nothing: for these a second run costs one snapshot and no restoring.
        needs_restoring = bool(changed or self._copies)
        if needs_restoring:
            # Each run writes to copies of its own: there may be a third.
            restore(with_replaced(self._before, {key: copy.clone() for key, copy in self._copies.items()}))
            if self._held is not None:
                restore(self._held)
        marks = ParameterMarks(self._before.reach.tensors), OptimizerMarks(self._before.reach.optimizers)
        try:
            with self._ambient.put_back():
                yield
        finally:
            # What the program has put back in between is as before the first run, and was written to by this one.
            if needs_restoring or self._is_written_since(now, held):
                restore(now)
                if held is not None:
                    restore(held)
            kept.clear()
            if change := marks[0].change() or marks[1].change():
                raise owner.refusal(f"{change} in its forward, which a second run would do once more")

    def _is_written_since(self, now: Snapshot, held: Snapshot | None) -> bool:
        after = self._owner.state.snapshot(self._owner.owner())
        return bool(differences(now, after) or (held is not None and differences(held, again(held))))

    def _refuse_lost(self, changed: Sequence[StateDifference]) -> None:
        for difference in changed:
            is_own = difference.tensor is None and difference.path in self._own_writes
            if difference.is_in_place and not is_own and id(difference.tensor) not in self._copies:
                raise self._owner.refusal(f"cannot be run a second time: since its forward {difference}")

    @contextmanager
    def _same_saved(self) -> Iterator[None]:
        """Compares what a later run saves with what the first one saved, as far as the run goes.

        Raises:
            ApplyError: it is not the same, or the program has written to what it still holds of it.
        """
        if self._saved is None:
            yield
            return
        if self._saved.is_any_written():
            raise self._owner.refusal(
                "cannot be run a second time: a result that it saved for its backward pass was written to past torch (through .data)"
            )
        with self._saved.of_later_run() as mismatch:
            try:
                yield
            except _StopRecomputationError:
                self._owner.expect(mismatch.sums)
                if mismatch.words:
                    raise self._owner.refusal(f"{mismatch.words} when it was run a second time") from None
                raise
        self._owner.expect(mismatch.sums)
        if mismatch.words:
            raise self._owner.refusal(f"{mismatch.words} when it was run a second time")

    @contextmanager
    def _compared(self) -> Iterator[None]:
        if self._first is None:
            yield
            return
        fingerprints = Fingerprints()
        try:
            with fingerprints:
                yield
        except _StopRecomputationError:
            # What the backward pass needs is there.
            self._compare(fingerprints.taken)
            raise
        self._compare(fingerprints.taken)

    def _compare(self, taken: Sequence[Fingerprint]) -> None:
        mismatch = first_mismatch(self._first or (), taken)
        if mismatch is not None:
            raise self._owner.refusal(f"{mismatch} when it was run a second time")


@contextmanager
def _told_of_mismatches(refusal: Refusal) -> Iterator[None]:
    """Converts errors of the second run alone to a refusal that names the module, including torch's own about other saved tensors."""
    try:
        yield
    except (_StopRecomputationError, TightfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        # torch's checkpointing raises its own CheckpointError where the second run saves another number of
        # tensors, or others by shape, dtype or device.
        is_of_torch = isinstance(error, RuntimeError) and frames[-1].filename == torch.utils.checkpoint.__file__
        did = "did other things" if is_of_torch else f"raised {type(error).__name__}"
        raise refusal(f"{did} when it was run a second time") from error


@contextmanager
def _told_of_transforms(refusal: Refusal) -> Iterator[None]:
    """Converts torch's error about code that takes no saved-tensor hooks to a refusal that names the module."""
    try:
        yield
    except RuntimeError as error:
        if not are_saved_tensor_hooks_refused(error):
            raise
        raise refusal(
            "transforms code (torch.func) that takes no hooks for saved tensors, which a second run needs"
        ) from error


class _Again:
    """A context for each run of a call after the first: `RecomputedCall.restored`, and `inner` inside of it."""

    def __init__(self, call: RecomputedCall, inner: AbstractContextManager[Any]) -> None:
        self._call = call
        self._inner = inner
        self._stacks: list[ExitStack] = []

    def __enter__(self) -> None:
        # First the state, then torch's own context: what restoring runs (copies of buffers) must not be counted
        # or saved by a selective checkpoint.
        with ExitStack() as stack:
            stack.enter_context(self._call.restored())
            stack.enter_context(self._inner)
            self._stacks.append(stack.pop_all())

    def __exit__(self, *error: Any) -> bool | None:
        return self._stacks.pop().__exit__(*error)


def _holds_things(value: Any) -> bool:
    """Whether an argument has state of its own: it is not only tensors and plain values in tuples."""
    if isinstance(value, tuple):
        return any(_holds_things(inner) for inner in value)
    return not isinstance(value, (*PLAIN, torch.Tensor, torch.Size, torch.dtype, torch.device))


def _kept_as_they_are(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The arguments whose tensors a checkpoint saves without checking versions: autograd checks those that are tensors themselves."""
    return [arg for arg in args if not isinstance(arg, torch.Tensor)], dict(kwargs)


def _versions(arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> list[int]:
    return [-1 if tensor.is_inference() else tensor._version for tensor in _tensors_in(arguments)]


def _shapes(arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> tuple[Any, ...]:
    return tuple((tensor.shape, tensor.dtype) for tensor in _tensors_in(arguments))


def _tensors_in(arguments: tuple[Sequence[Any], Mapping[str, Any]]) -> Iterator[torch.Tensor]:
    args, kwargs = arguments
    for value in itertools.chain(args, kwargs.values()):
        if isinstance(value, torch.Tensor):
            yield value
        elif not isinstance(value, PLAIN):
            yield from (leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))


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
    return one.shape == other.shape and bool(torch.equal(one, other))


def _withhold(argument: Any) -> Any:
    """Replaces a key-value cache by None. Hugging Face's caches have no common type, and are recognised by their methods."""
    is_cache = hasattr(argument, "get_seq_length") and hasattr(argument, "update")
    return None if is_cache else argument
