"""The module calls of a tape: the operators of each call in the forward and the backward pass, and the storages that it saves for backward.

No model is needed. A module is a path; its submodules are the paths that continue it. A module call is one call of a module in a forward pass with
gradients: a contiguous range of its operators, with the range of the backward pass that belongs to it. A storage that is allocated in a call
and still allocated when the backward pass begins is saved for backward; one of them may be the call's own output, which stays allocated
whatever is done inside of the module.
"""

import dataclasses
import itertools
from collections import Counter
from collections.abc import Iterable
from functools import cached_property

import numpy as np

from tightfit.analysis.lifetimes import StorageLifetimes
from tightfit.tape import Column, Phase


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One call of the module at `path`. Forward operators are `[begin, end)`, backward ones `[back_begin, back_end)`.

    `end_event` is the first event after the forward operators, `back_event` the first of the backward ones and `back_end_event` the first
    after them. `saved` are the storages that the call saves for backward, without its `output`. `input` is the storage of its input, -1 where
    that is not from the same forward pass; recomputing the module requires it.
    """

    path: str
    begin: int
    end: int
    back_begin: int
    back_end: int
    begin_event: int
    end_event: int
    back_event: int
    back_end_event: int
    saved: Column
    output: int
    input: int = -1


class _Rounds:
    """The rounds of a run, each a forward pass with the backward pass that follows it: the round `of` each operator, -1 for none, and where they begin."""

    def __init__(self, phase: Column) -> None:
        backward = phase == Phase.BACKWARD
        relevant = backward | (phase == Phase.FORWARD)
        kinds = backward[relevant]
        begins = np.zeros(len(kinds), dtype=np.int64)
        # A forward operator after a backward one opens a round: gradient accumulation and GANs have several per step. Operators of
        # other phases do not count, so logging or an optimizer in between opens none.
        begins[1:] = kinds[:-1] & ~kinds[1:]
        numbers = np.full(len(phase), -1, dtype=np.int64)
        numbers[relevant] = np.cumsum(begins)
        self.of = numbers
        self.num_rounds = int(begins.sum()) + 1 if len(kinds) else 0
        self.first_backward = np.full(self.num_rounds, len(phase), dtype=np.int64)
        at = np.flatnonzero(backward)
        np.minimum.at(self.first_backward, numbers[at], at)
        self.first_forward = np.full(self.num_rounds, len(phase), dtype=np.int64)
        at = np.flatnonzero(relevant & ~backward)
        np.minimum.at(self.first_forward, numbers[at], at)


class _SortedPaths:
    """The paths `names` of the modules that ran operators, a module and all its submodules side by side."""

    def __init__(self, names: list[str]) -> None:
        self.names = names
        self.parts = [name.split(".") for name in names]
        self._ranges: dict[str, tuple[int, int]] = {}
        for rank, parts in enumerate(self.parts):
            for length in range(1, len(parts) + 1):
                path = ".".join(parts[:length])
                self._ranges[path] = self._ranges.get(path, (rank, rank))[0], rank + 1

    def inside(self, path: str) -> tuple[int, int]:
        """The ranks of `path` and its submodules, as a half-open range; empty for a module that ran no operator."""
        return self._ranges.get(path, (len(self.parts), len(self.parts)))


class ModuleCalls:
    """The module calls of a tape."""

    def __init__(self, lifetimes: StorageLifetimes) -> None:
        self.lifetimes = lifetimes
        self.tape = tape = lifetimes.tape
        operators = tape.operators
        self._phase = operators.phase
        modules = np.unique(operators.module)
        texts = [tape.strings[m] for m in modules.tolist()]
        # Sorted by path components, a module and all its submodules are neighbours, so that `inside` is a comparison with two ranks
        # instead of a test of every path. As plain text "layer.1" would have "layer.10" and "layer.1.mlp" mixed.
        order = sorted(range(len(texts)), key=lambda i: texts[i].split("."))
        self._sorted = _SortedPaths([texts[i] for i in order])
        rank_of = np.zeros(len(tape.strings), dtype=np.int64)
        rank_of[modules[order]] = np.arange(len(order))
        self._rank = rank_of[operators.module]
        self._calls: dict[str, tuple[ModuleCall, ...]] = {}
        self._rounds = _Rounds(self._phase)
        self.num_rounds = self._rounds.num_rounds

    @cached_property
    def saved_for_backward(self) -> Column:
        """Which storages are saved for backward: allocated in a forward pass and not freed when the backward pass of its round begins."""
        born_of = self.tape.storages.operator
        known = (born_of >= 0) & self.lifetimes.is_tensor
        saved_for_backward = np.zeros(len(born_of), dtype=bool)
        if not self.num_rounds:
            return saved_for_backward
        operators = born_of[known]
        forward = self._phase[operators] == Phase.FORWARD
        rounds = np.where(forward, self._rounds.of[operators], 0)
        first = self._rounds.first_backward[rounds]
        has_backward = first < len(self._phase)
        saved_for_backward[known] = (
            forward & has_backward & (self.lifetimes.freed_at[known] > self.lifetimes.event_of(first))
        )
        return saved_for_backward

    @cached_property
    def paths(self) -> list[str]:
        """All modules that have operators or that contain some that do, outermost first."""
        found: dict[str, None] = {}
        for parts in self._sorted.parts:
            for length in range(1, len(parts) + 1):
                found.setdefault(".".join(parts[:length]))
        return [path for path in found if path]

    @cached_property
    def saved_weights(self) -> Counter[str]:
        """By path, how many weights the modules at and inside of it save for backward, where none is frozen: not biases, which are smaller than the weight
        beside them. (A norm saves both of its.)"""
        weights, num_bytes = self.tape.weights, self.tape.storages.num_bytes
        sizes: dict[int, list[int]] = {}
        for module, storage in zip(weights.module.tolist(), weights.storage.tolist(), strict=True):
            sizes.setdefault(module, []).append(int(num_bytes[storage]))
        found: Counter[str] = Counter()
        for module, of_module in sizes.items():
            parts = self.tape.strings[module].split(".")
            for length in range(1, len(parts) + 1):
                found[".".join(parts[:length])] += of_module.count(max(of_module))
        return found

    def is_called(self, path: str) -> bool:
        """Whether the module at `path` is called by itself, so that a wrapper around its forward runs; unknown of tapes that do not say it, and then yes."""
        called = self.tape.called_modules
        return not called or path in called

    def modules_inside(self, path: str) -> list[str]:
        """The paths at and inside `path` that have operators of their own."""
        low, high = self._sorted.inside(path)
        return self._sorted.names[low:high]

    def calls(self, path: str) -> tuple[ModuleCall, ...]:
        """The calls of the module at `path` that take part in a backward pass, in order."""
        if path not in self._calls:
            self._calls[path] = self._found_calls(path)
        return self._calls[path]

    def _found_calls(self, path: str) -> tuple[ModuleCall, ...]:
        low, high = self._sorted.inside(path)
        inside = (self._rank >= low) & (self._rank < high)
        forward = np.flatnonzero(inside & (self._phase == Phase.FORWARD))
        if not len(forward):
            return ()
        backward = np.flatnonzero(inside & (self._phase == Phase.BACKWARD))
        # A gap in the operators ends a call, and so does a new round: two micro-batches can follow without anything in between.
        breaks = np.flatnonzero((np.diff(forward) > 1) | (np.diff(self._rounds.of[forward]) != 0))
        begins, ends = forward[np.r_[0, breaks + 1]], forward[np.r_[breaks, len(forward) - 1]] + 1
        found = []
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            back = backward[self._rounds.of[backward] == self._rounds.of[begin]]
            if len(back):
                found.append(self.call(path, begin, end, int(back[0]), int(back[-1]) + 1))
        rounds = [list(group) for _, group in itertools.groupby(found, key=lambda call: self._rounds.of[call.begin])]
        # A single call in a round keeps its backward pass even if nothing of it is saved: a module may save only its inputs.
        ran = [
            [v for v in group if len(group) == 1 or _is_run_backwards(v, self.lifetimes.freed_at)] for group in rounds
        ]
        return tuple(call for group in ran for call in _one_after_the_other(group, backward, self))

    def call(self, path: str, begin: int, end: int, back_begin: int, back_end: int) -> ModuleCall:
        """The call of `path` that consists of these operators, forward and backward."""
        lifetimes = self.lifetimes
        made = lifetimes.made_in(begin, end)
        saved = made[self.saved_for_backward[made]]
        # Only storages of the same forward pass: parameters and batches are allocated before it and stay anyway.
        before = lifetimes.made_in(int(self._rounds.first_forward[self._rounds.of[begin]]), begin)
        at_begin = before[lifetimes.is_tensor[before] & (lifetimes.freed_at[before] >= lifetimes.event_of(begin))]
        output = lifetimes.output_of(begin, end)
        return ModuleCall(
            path=path,
            begin=begin,
            end=end,
            back_begin=back_begin,
            back_end=back_end,
            begin_event=int(lifetimes.event_of(begin)),
            end_event=int(lifetimes.event_of(end)),
            back_event=int(lifetimes.event_of(back_begin)),
            back_end_event=int(lifetimes.event_of(back_end)),
            saved=saved[saved != output],
            output=output,
            input=lifetimes.last_large(at_begin),
        )

    def operator_names(self, begin: int, end: int) -> tuple[str, ...]:
        """The names of the operators `[begin, end)`."""
        return tuple(self.tape.strings[n] for n in self.tape.operators.name[begin:end].tolist())


def _is_run_backwards(call: ModuleCall, freed_at: Column) -> bool:
    """Whether a call has gradients: one that saved nothing before another call's backward pass ran under `no_grad`."""
    return len(call.saved) > 0 or bool(call.output >= 0 and freed_at[call.output] > call.back_event)


def _one_after_the_other(calls: list[ModuleCall], backward: Column, of: ModuleCalls) -> list[ModuleCall]:
    """The calls of one round, each with its own range of `backward`, which runs from the last call to the first: a range holds what frees the last
    storage that the call saved. Where these ends are in another order, all calls share the whole range."""
    if len(calls) < 2:
        return calls
    freed_by, end, begins = of.tape.events.operator, calls[0].back_end, [calls[0].back_begin]
    for call, earlier in zip(reversed(calls[1:]), reversed(calls[:-1]), strict=True):
        gone = _freed_in_backward(call, of)
        if not len(gone) or int(freed_by[gone[-1]]) >= end:
            return calls
        after = int(freed_by[gone[-1]])
        until = next((at for at in freed_by[_freed_in_backward(earlier, of)].tolist() if at > after), after)
        begins.append(_begin_between(backward, after, until))
    if any(b >= e for b, e in itertools.pairwise([*begins, end])):
        return calls
    ends = [int(backward[np.searchsorted(backward, b) - 1]) + 1 for b in begins[1:]]
    return [
        dataclasses.replace(
            call,
            back_begin=b,
            back_end=e,
            back_event=int(of.lifetimes.event_of(b)),
            back_end_event=int(of.lifetimes.event_of(e)),
        )
        for call, b, e in zip(calls, reversed(begins), reversed([*ends, end]), strict=True)
    ]


def _freed_in_backward(call: ModuleCall, of: ModuleCalls) -> Column:
    """The events of the backward pass that free what `call` saved, in order."""
    gone = of.lifetimes.freed_at[call.saved]
    return np.sort(gone[(gone >= call.back_event) & (gone < call.back_end_event)])


def _begin_between(backward: Column, after: int, until: int) -> int:
    """Where a call's part of `backward` begins, if the call that comes before it there has freed all that it saved before operator `after`, and this one frees the first before `until`.

    The call before may have gradients to add up still. Other modules run between the two: this one begins behind the longest gap.
    """
    first = int(np.searchsorted(backward, after))
    around = backward[max(0, first - 1) : np.searchsorted(backward, until)]
    return int(backward[first]) if len(around) < 2 else int(around[int(np.diff(around).argmax()) + 1])


def paths_below(path: str, modules: Iterable[str]) -> set[str]:
    """These modules inside of `path` and what is between: a block that only calls others has no operators of its own."""
    found = set[str]()
    for module in modules:
        inside = module
        while len(inside) > len(path):
            found.add(inside)
            inside = inside.rpartition(".")[0]
    return found
