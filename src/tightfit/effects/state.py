"""Snapshots of the state that a module's forward can read or write besides its inputs: taken, compared and restored.

A technique that runs code again needs that code to see, the second time, the state of the first time, and to have no side effects. The state
is: attributes, buffers, parameters, hooks and modes of the modules inside; containers and objects that they refer to; globals, closures and
class attributes that the user's functions name; and the random states of Python, numpy and the model's own generators. A snapshot holds
references, not copies: it is cheap enough to be taken in every call.
"""

import dataclasses
import itertools
import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakTensorKeyDictionary

from tightfit.effects.holders import PLAIN, has_gone, has_lost_members, in_graphs, is_gone, other_objects
from tightfit.effects.outside_calls import Unwatched
from tightfit.effects.random_states import numpy_state, put_python_state, python_state
from tightfit.effects.reachable.collected import Reach
from tightfit.effects.reachable.reach import reach_of, reach_of_arguments
from tightfit.effects.values.contents import SMALL_BYTES, content_of

DRAWN = "was advanced"
"""What is said of a generator of random numbers."""
# Up to which size a tensor is read where all are: 10 ms.
_LARGEST_READ_BYTES = 1 << 26


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StateDifference:
    """One change of the state. A snapshot can restore it unless `is_in_place`: a tensor was written to or given other data, or an iterator
    advanced. `tensor` is the tensor."""

    path: str
    what: str
    is_in_place: bool = False
    is_rewound: bool = False
    tensor: torch.Tensor | None = None

    def __str__(self) -> str:
        return f"{self.path} {self.what}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state at one time, in the order of `reach`; `reads_all` as in `RegionState.snapshot`."""

    reach: Reach
    contents: list[Any]
    versions: list[Any]
    storages: list[Any]
    drawn: list[Any]
    python_random: Any
    numpy_random: Any
    reads_all: bool = False

    @property
    def has_graphs(self) -> bool:
        """Whether the state had a tensor with a graph, which this snapshot does not keep alive."""
        return self.reach.has_graphs

    def in_graphs(self) -> list[torch.Tensor]:
        """The tensors with a graph in the state. The returned list keeps them alive; the snapshot does not."""
        if self.reach.has_graphs or self.contents is not self.reach.contents:
            return [tensor for content in self.contents for tensor in in_graphs(content)]
        return [t for number in self.reach.others if self.contents[number] for t in in_graphs(self.contents[number])]

    def gone(self) -> list[tuple[str, Any]]:
        """What stands for tensors with a graph that nobody has kept alive since, each with its path: for `with_replaced`."""
        found = []
        # As in `in_graphs`: without a graph in any dict, only the others are looked through.
        has_graphs = self.reach.has_graphs or self.contents is not self.reach.contents
        for number in range(len(self.contents)) if has_graphs else self.reach.others:
            holder, content = self.reach.holders[number], self.contents[number]
            named = content.items() if isinstance(content, dict) else enumerate(content)
            found += [(f"{holder.path}[{name!r}]", value) for name, value in named if is_gone(value)]
        return found


class RegionState:
    """Takes snapshots of the state that a module's forward can reach; the module is passed with each call, and not kept."""

    def __init__(self) -> None:
        self._reach: Reach | None = None

    def snapshot(
        self, module: torch.nn.Module, *, is_kept: bool = False, reads_weights: bool = True, reads_all: bool = False
    ) -> Snapshot:
        """The state now. `is_kept`: for a snapshot that may outlive the step; it does not keep graphs of earlier calls alive.

        `reads_weights`: whether large weights at the host are read, to see writes that torch does not count, and with `reads_all` whatever else is large,
        which takes too long for each call; both snapshots that are compared must say the same.
        """
        with Unwatched():
            reach, contents = self._looked_through(module, is_kept=is_kept)
            return _taken(reach, contents, reads_weights=reads_weights, reads_all=reads_all)

    def is_still(self, snapshot: Snapshot) -> bool:
        """Whether the state is that of a snapshot of this region, without making another one; False too where that takes one to tell: where a function was replaced
        since, which may reach other state when it runs."""
        reach = self._reach
        return (
            reach is snapshot.reach
            and reach.code.is_same()
            and reach.contents is snapshot.contents
            and reach.is_same()
            and _are_others_same(reach)
            and [_version(tensor) for tensor in reach.tensors] == snapshot.versions
            and all(map(operator.is_, map(_storage, reach.tensors), snapshot.storages))
            and [each.state() for each in reach.drawn] == snapshot.drawn
            and python_state() == snapshot.python_random
            and numpy_state.same(numpy_state.get(), snapshot.numpy_random)
        )

    def _looked_through(self, module: torch.nn.Module, *, is_kept: bool) -> tuple[Reach, list[Any]]:
        reach = self._reach
        # Another function may reach other state.
        if reach is None or not reach.code.is_same():
            reach = reach_of(module)
        # Where the holders that are dicts are unchanged, only the others are read.
        is_same = reach.is_same() and _are_others_same(reach)
        contents = reach.contents if is_same else [holder.content(is_kept=is_kept) for holder in reach.holders]
        # An attribute was rebound to another object: what lies behind it is found by another walk, which costs
        # far more than a snapshot.
        if not is_same and not _reaches_the_same(reach, contents):
            reach = reach_of(module)
            contents = reach.contents if is_kept else [holder.content(is_kept=False) for holder in reach.holders]
        elif not is_same and is_kept:
            reach.contents = contents
            reach.remember()
        self._reach = reach
        return reach, contents


def snapshot_of_arguments(
    arguments: Mapping[str, Any],
    *,
    attributes: frozenset[str] = frozenset(),
    inside: Collection[int] = frozenset(),
    reads_weights: bool = True,
    of_libraries: bool = False,
) -> Snapshot:
    """The state of the arguments of a forward: versions of tensors, contents of containers and objects, of libraries' too with `of_libraries`, and of Python modules what `attributes` name."""
    reach = reach_of_arguments(arguments, attributes=attributes, inside=inside, of_libraries=of_libraries)
    return _taken(reach, reach.contents, reads_weights=reads_weights)


def again(snapshot: Snapshot, *, reads_weights: bool = True) -> Snapshot:
    """A new snapshot of the same arguments."""
    contents = [holder.content(is_kept=False) for holder in snapshot.reach.holders]
    return _taken(snapshot.reach, contents, reads_weights=reads_weights)


def with_replaced(snapshot: Snapshot, others: Mapping[int, torch.Tensor]) -> Snapshot:
    """The snapshot with tensors, or what stands for them, replaced by `others`, given by `id`."""
    holders = zip(snapshot.reach.holders, snapshot.contents, strict=True)
    return dataclasses.replace(snapshot, contents=[h.with_replaced(content, others) for h, content in holders])


def _taken(reach: Reach, contents: list[Any], *, reads_weights: bool, reads_all: bool = False) -> Snapshot:
    return Snapshot(
        reach=reach,
        contents=contents,
        reads_all=reads_all,
        versions=[_version(tensor, reads_weights=reads_weights, reads_all=reads_all) for tensor in reach.tensors],
        storages=[_storage(tensor) for tensor in reach.tensors],
        drawn=[each.state() for each in reach.drawn],
        python_random=python_state(),
        numpy_random=numpy_state.get(),
    )


def _are_others_same(reach: Reach) -> bool:
    """Whether the holders that are no dicts have the contents that they had when last read."""
    return all(reach.holders[number].is_still(reach.contents[number]) for number in reach.others)


def _reaches_the_same(reach: Reach, contents: list[Any]) -> bool:
    """Whether no object that refers to others was replaced since `reach` was found; plain values may differ."""
    if any(reach.empty):
        return False
    for then, now in zip(reach.contents, contents, strict=True):
        values = (then.values(), now.values()) if isinstance(then, dict) else (then, now)
        if isinstance(then, set) or (len(then) == len(now) and all(map(operator.is_, *values))):
            continue
        if len(then) != len(now) or (isinstance(then, dict) and list(then) != list(now)):
            return False
        if not all(itertools.starmap(_refers_to_nothing, other_objects(*values))):
            return False
    return True


def _refers_to_nothing(*values: Any) -> bool:
    return all(isinstance(value, PLAIN) or type(value).__name__ == "_InGraph" for value in values)


def differences(before: Snapshot, after: Snapshot) -> list[StateDifference]:
    """The differences between two snapshots: plain values by equality, everything else by identity, version and storage."""
    found = []
    if before.python_random != after.python_random:
        found.append(StateDifference(path="Python's random", what=DRAWN))
    if not numpy_state.same(before.numpy_random, after.numpy_random):
        found.append(StateDifference(path="numpy.random", what=DRAWN))
    found += _different_contents(before, after)
    found += _different_tensors(before, after)
    found += _different_drawn(before, after)
    return found


def restore(to: Snapshot) -> None:
    """Restores everything but in-place changes."""
    if python_state() != to.python_random:
        put_python_state(to.python_random)
    if not numpy_state.same(numpy_state.get(), to.numpy_random):
        numpy_state.put(to.numpy_random)
    for holder, content in zip(to.reach.holders, to.contents, strict=True):
        if not holder.is_still(content):
            holder.put(content)
    # Dicts of hooks in which there was none: a forward that registers a hook on itself would register it twice.
    for hooks in to.reach.empty:
        hooks.clear()
    for each, state in zip(to.reach.drawn, to.drawn, strict=True):
        if each.put is not None and each.state() != state:
            each.put(state)


def rewind(to: Snapshot) -> None:
    """Puts generators back that `restore` leaves alone, where all that has drawn from them is taken back."""
    for each, state in zip(to.reach.drawn, to.drawn, strict=True):
        if each.rewind is not None and each.state() != state:
            each.rewind(state)


def _different_contents(before: Snapshot, after: Snapshot) -> Iterator[StateDifference]:
    if before.contents is after.contents:
        return
    later = {holder.key: content for holder, content in zip(after.reach.holders, after.contents, strict=True)}
    for holder, first in zip(before.reach.holders, before.contents, strict=True):
        # An object that is not reached any more was referred to by one that is, and that has changed.
        second = later.get(holder.key, first)
        if not holder.same(first, second):
            is_dict = isinstance(first, dict)
            lost = {name for name, value in first.items() if is_gone(value)} if is_dict else set[Any]()
            is_all_lost = not is_dict and (has_gone(first) or has_lost_members(first, second))
            for name in holder.changed(first, second):
                is_lost = is_all_lost or (bool(lost) and name.strip(".[]'") in lost)
                yield StateDifference(path=f"{holder.path}{name}", what="was changed", is_in_place=is_lost)
    empty = set(map(id, before.reach.empty))
    yield from (StateDifference(path=h.path, what="was added to") for h in after.reach.holders if h.key in empty)


def _different_tensors(before: Snapshot, after: Snapshot) -> Iterator[StateDifference]:
    same_storages = before.reach is after.reach and all(map(operator.is_, before.storages, after.storages))
    if same_storages and before.versions == after.versions:
        return
    later = dict(zip(map(id, after.reach.tensors), zip(after.versions, after.storages, strict=True), strict=True))
    places = zip(before.reach.tensor_paths, before.reach.tensors, before.versions, before.storages, strict=True)
    for path, tensor, version, storage in places:
        now = later.get(id(tensor)) or (_version(tensor, reads_all=before.reads_all), _storage(tensor))
        if now[1] is not storage:
            yield StateDifference(path=path, what="had its data replaced", is_in_place=True, tensor=tensor)
        elif now[0] != version:
            yield StateDifference(path=path, what="was written to", is_in_place=True, tensor=tensor)


def written_since(before: Snapshot) -> Iterator[StateDifference]:
    """The tensors of a snapshot that are not as they were, without a look at what refers to them now."""
    places = zip(before.reach.tensor_paths, before.reach.tensors, before.versions, before.storages, strict=True)
    for path, tensor, version, storage in places:
        if _storage(tensor) is not storage:
            yield StateDifference(path=path, what="had its data replaced", is_in_place=True, tensor=tensor)
        elif _version(tensor) != version:
            yield StateDifference(path=path, what="was written to", is_in_place=True, tensor=tensor)


def _different_drawn(before: Snapshot, after: Snapshot) -> Iterator[StateDifference]:
    later = {each.key: state for each, state in zip(after.reach.drawn, after.drawn, strict=True)}
    for each, state in zip(before.reach.drawn, before.drawn, strict=True):
        if later.get(each.key, state) != state:
            yield StateDifference(
                path=each.path, what=DRAWN, is_in_place=each.put is None, is_rewound=each.rewind is not None
            )


# Of the virtual GPU: they have storages of their own, without data.
_FAKE = "torch._subclasses.fake_tensor"
_PLAIN_TENSORS = (torch.nn.Parameter, torch.Tensor)
# Weights that are on the card or at the host by turns: their data is another each time, and whoever moves them looks for writes.
MOVED = WeakTensorKeyDictionary()


def _version(tensor: torch.Tensor, *, reads_weights: bool = True, reads_all: bool = False) -> Any:
    """The number of writes to a tensor that torch knows of; of a small one and of a weight at the host, which numpy and `.data` write to past torch, also the content."""
    number = _number_of_writes(tensor)
    if tensor.is_cuda:
        return number
    # Of what is large only weights are read in each call: a forward may keep any number of other tensors.
    # Sparse tensors, and others that are no range of memory, do not know their bytes.
    is_readable = number >= 0 and tensor.layout == torch.strided
    is_weight = reads_weights and tensor.is_leaf and tensor.requires_grad
    is_read = is_readable and (is_weight or tensor.nbytes <= (_LARGEST_READ_BYTES if reads_all else SMALL_BYTES))
    content = content_of(tensor) if is_read else None
    return number if content is None else (number, content)


def _number_of_writes(tensor: torch.Tensor) -> int:
    # What a lazy module has not made yet.
    if type(tensor) not in _PLAIN_TENSORS and is_lazy(tensor):
        return -2
    return -1 if tensor.is_inference() or is_moved(tensor) else tensor._version


def is_moved(tensor: torch.Tensor) -> bool:
    """Whether a weight is on the card or at the host by turns."""
    # Its own length is counted in Python, for each tensor of each snapshot.
    return bool(MOVED.data) and tensor in MOVED


def devices_of(parameters: Iterable[torch.Tensor]) -> set[torch.device]:
    """Where parameters are, but those that are on the card or at the host by turns, where there are others."""
    every = list(parameters)
    return {p.device for p in every if not is_moved(p)} or {p.device for p in every}


def moved_weights() -> list[torch.Tensor]:
    """The weights that are on the card or at the host by turns."""
    return list(MOVED.keys()) if MOVED.data else []


def _storage(tensor: torch.Tensor) -> Any:
    """The storage, which the snapshot keeps alive, as another one could get its address. None for wrapper subclasses, and for weights that are dropped meanwhile."""
    if is_moved(tensor):
        return None
    kind = type(tensor)
    if kind in _PLAIN_TENSORS and tensor.layout == torch.strided:
        return tensor.untyped_storage()
    is_wrapper = kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ and kind.__module__ != _FAKE
    return None if is_lazy(tensor) or is_wrapper or tensor.layout != torch.strided else tensor.untyped_storage()


def structural_differences(before: Snapshot, after: Snapshot) -> list[StateDifference]:
    """The changes except values of tensors, which an optimizer changes in every step, and random states, which other code draws from."""
    return [d for d in differences(before, after) if not d.is_in_place and d.what != DRAWN]
