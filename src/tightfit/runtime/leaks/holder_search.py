"""Names the holders of storages: names of the program that lead to them, graphs that have saved them, cycles that keep them, in that order.

A search collects garbage once. It refers to every object that it looks at, and to none any more when it is over.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from tightfit.runtime.leaks.collected_cycles import Garbage
from tightfit.runtime.leaks.found_leaks import BOUNDED, CONTAINER, CYCLE, GRAPH, UNKNOWN, LeakHolder
from tightfit.runtime.leaks.holder_paths import MAX_OBJECTS, KeptTensor, Reachable
from tightfit.runtime.leaks.kept_graphs import GraphWalk, StorageId, is_context, tensors_of_context
from tightfit.runtime.leaks.named_roots import NamedRoots
from tightfit.runtime.leaks.object_edges import is_of
from tightfit.runtime.record_hooks import all_tensors

Holders = dict[int, LeakHolder]
"""By the id of a storage."""

_CAN_GROW = (list, dict, set, collections.deque, functools._lru_cache_wrapper)


def holders_of_storages(wanted: Mapping[int, int], storage_id: StorageId) -> Holders:
    """The holders of the `wanted` storages, newest first, each with its step; a storage that several names lead to has the one that holds most of them.

    Those that the collection of cycles has freed are named by their cycle.
    """
    # Tensors of a class of the program's own would run its code for each attribute.
    with torch._C.DisableTorchFunctionSubclass():
        return _holders(wanted, storage_id)


def _holders(wanted: Mapping[int, int], storage_id: StorageId) -> Holders:
    order = {storage: at for at, storage in enumerate(wanted)}
    found = _in_cycles(order, storage_id)
    rest = {storage: at for storage, at in order.items() if storage not in found}
    if rest:
        roots, reachable = NamedRoots(), Reachable()
        try:
            reachable.add(roots.of_users_code())
            found |= _by_names(rest, wanted, reachable, storage_id)
            rest = {storage: at for storage, at in rest.items() if storage not in found}
            if rest:
                found |= _in_graph_cycles(set(rest), storage_id)
                rest = {storage: at for storage, at in rest.items() if storage not in found}
            if rest:
                # Libraries have ten times the objects of a program.
                reachable.add(roots.of_libraries())
                found |= _by_names(rest, wanted, reachable, storage_id)
                rest = {storage: at for storage, at in rest.items() if storage not in found}
            unknown = _NOT_LOOKED_AT if reachable.is_cut else _UNKNOWN
        finally:
            reachable.drop()
            roots.forget()
        found |= dict.fromkeys(rest, unknown)
    return found


def _in_cycles(wanted: dict[int, int], storage_id: StorageId) -> Holders:
    garbage = Garbage()
    try:
        walk, found = GraphWalk(storage_id), {}
        for tensor in sorted(garbage.tensors(), key=lambda one: wanted.get(storage_id(one) or 0, len(wanted))):
            storages = [storage for storage in (storage_id(tensor),) if storage in wanted and storage not in found]
            storages += [s for s, _ in walk.saved(tensor) if s in wanted and s not in found]
            if storages:
                path, cycle = garbage.path_to(tensor)
                holder = LeakHolder(
                    cause=CYCLE, path=path, root="in a cycle that no name leads to", what=cycle, fix=_FIX_OF_A_CYCLE
                )
                found |= dict.fromkeys([s for s in storages if s is not None], holder)
        return found
    finally:
        garbage.drop()


def _by_names(wanted: dict[int, int], steps: Mapping[int, int], reachable: Reachable, storage_id: StorageId) -> Holders:
    kept = list(reachable.tensors())
    groups: dict[tuple[str, bool], dict[int, KeptTensor]] = collections.defaultdict(dict)
    for one in kept:
        storage = storage_id(one.tensor)
        if storage in wanted:
            groups[one.group, False].setdefault(storage, one)
    # Graphs of what holds most are walked last-made first, so that a node is counted for the tensor that retains all of them.
    walk = GraphWalk(storage_id)
    for one in sorted(_with_graphs(kept), key=functools.partial(_longevity, reachable=reachable)):
        for storage, _ in walk.saved(one.tensor):
            if storage in wanted and (one.group, True) not in groups:
                groups[one.group, True] = {}
            if storage in wanted:
                groups[one.group, True].setdefault(storage, one)
    found: Holders = {}
    for (group, _), storages in sorted(groups.items(), key=lambda item: -len(item[1])):
        newest = min(storages, key=lambda storage: wanted[storage])
        growing = growing_on_paths(list(storages.values()), [steps[storage] for storage in storages])
        one = _as_the_newest(storages[newest], growing) if len(storages) > 1 else storages[newest]
        if (group, True) in groups:
            holder = _by_its_graph(one, growing, is_held=(group, False) in groups)
        else:
            holder = _by_a_name(one, growing)
        for storage in storages:
            found.setdefault(storage, holder)
    return found


def _with_graphs(kept: Iterable[KeptTensor]) -> list[KeptTensor]:
    return [one for one in kept if one.tensor.grad_fn is not None]


def _longevity(one: KeptTensor, *, reachable: Reachable) -> tuple[bool, int]:
    """Local variables of a step come after containers and attributes, as these have the older tensors, too."""
    return "[" not in one.path and one.path.count(".") <= 1, len(one.path)


def _by_its_graph(one: KeptTensor, growing: Any, *, is_held: bool) -> LeakHolder:
    """`is_held`: what grows is the tensor itself, too, and not only what its graph retains."""
    tensor, name = one.tensor, _short_name(one)
    node = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
    if one.path.endswith(".grad"):
        fix = "reset `.grad` to None, or use torch.autograd.grad(..., create_graph=True)"
    elif tensor.numel() == 1:
        fix = f"keep `{name}.item()` or `{name}.detach()`"
    elif is_held:
        # Detached it shares its memory.
        fix = f"keep numbers or a `.cpu()` copy of `{name}.detach()`, which alone frees its graph and not the tensor"
    else:
        fix = f"keep `{name}.detach()`, or run it under torch.no_grad()"
    what = f"{_size_of(growing)}its graph ({node}) retains what it was computed from"
    return LeakHolder(cause=GRAPH, path=one.path, root=one.root, what=what, fix=fix)


def _by_a_name(one: KeptTensor, growing: Any) -> LeakHolder:
    size = _size_of(growing)
    what = f"{size}one more with each step" if size else "it grows with each step"
    fix = "clear it, bound it (`deque(maxlen=...)`, `lru_cache(maxsize=...)`), or keep `.cpu()` copies or numbers"
    bound = bound_of(one.containers, growing)
    return LeakHolder(cause=CONTAINER, path=one.path, root=one.root, what=bound or what, fix=fix)


def _as_the_newest(one: KeptTensor, growing: Any) -> KeptTensor:
    """With the last index of the container that grows, which may be one step ahead of the storages that are looked for."""
    named = zip(one.labels, (*one.containers, None), strict=True)
    return dataclasses.replace(
        one,
        labels=tuple("[-1]" if each is growing and label == "[-2]" else label for label, each in named),
    )


def _short_name(one: KeptTensor) -> str:
    return one.path.rpartition(".")[2] or "it"


def _size_of(growing: Any) -> str:
    is_counted = growing is not None and not is_of(growing, functools._lru_cache_wrapper)
    return f"a {type(growing).__name__} of {len(growing):,}; " if is_counted else ""


def growing_on_paths(kept: Sequence[KeptTensor], steps: Sequence[int]) -> Any:
    """The container that grows, of those on the paths to tensors of one group: the innermost that holds tensors of most `steps` (those of `kept`).

    `history[-1]['loss']` is in a list of dicts of one. Of one step's tensors it is one that has them in fewest places, then the longest; None where
    no path has a container.
    """
    best: tuple[float, int, int] = (0.0, 0, 0)
    found = None
    for depth in range(min(len(one.containers) for one in kept)):
        at = kept[0].containers[depth]
        if not is_of(at, _CAN_GROW):
            continue
        each = {(id(one.containers[depth]), step) for one, step in zip(kept, steps, strict=True)}
        most = len(each) / len({container for container, _ in each})
        places = len({id((one.tensor, *one.containers)[depth]) for one in kept})
        size = (most, 0, 0) if most > 1 else (most, -places, _length(at))
        if size > best:
            best, found = size, at
    return found


def _length(container: Any) -> int:
    is_cache = is_of(container, functools._lru_cache_wrapper)
    return container.cache_info().currsize if is_cache else len(container)


def bound_of(containers: Sequence[Any], growing: Any) -> str:
    """What bounds the container that grows on the path to a tensor, as text; empty where nothing does.

    That is its own bound, or that of one around it that is still being filled; one that is full replaces its elements, so what grows is one of them.
    """
    at = next((at for at, each in enumerate(containers) if each is growing), len(containers))
    for each in containers[at:]:
        is_cache = is_of(each, functools._lru_cache_wrapper)
        if not is_cache and not is_of(each, collections.deque):
            continue
        most = each.cache_parameters()["maxsize"] if is_cache else each.maxlen
        if most is not None and (each is growing or _length(each) < most):
            return f"{BOUNDED}lru_cache(maxsize={most})" if is_cache else f"{BOUNDED}deque(maxlen={most})"
    return ""


def _in_graph_cycles(missing: set[int], storage_id: StorageId) -> Holders:
    """Cycles through autograd's graph, which is C++: Python sees no name that leads there, and its collector does not find them."""
    found: Holders = {}
    for tensor in list(all_tensors()):
        cycle = _graph_cycle(tensor, storage_id)
        if cycle is None:
            continue
        storages, holder = cycle
        found |= {storage: holder for storage in storages & missing if storage not in found}
    return found


def _graph_cycle(tensor: torch.Tensor, storage_id: StorageId) -> tuple[set[int], LeakHolder] | None:
    start = tensor.grad if tensor.is_leaf and tensor.grad is not None else tensor
    if start.grad_fn is None:
        return None
    walk = GraphWalk(storage_id)
    storages = {storage_id(tensor), storage_id(start)}
    path = what = ""
    for node in GraphWalk(storage_id).nodes(start):
        if is_context(node):
            for held, name in tensors_of_context(node):
                if held is tensor or held is start:
                    path, what = (
                        name,
                        f"cycle: the output's graph holds the context of {node.name()}, and {name} is that output",
                    )
        elif start is not tensor and getattr(node, "variable", None) is tensor:
            path, what = "leaf.grad", "cycle: the leaf holds its gradient, whose graph holds the leaf"
    if not path:
        return None
    storages |= {storage for storage, _ in walk.saved(start)}
    fix = (
        "use torch.autograd.grad(..., create_graph=True), or set `.grad = None` when it is no longer needed"
        if start is not tensor
        else "use ctx.save_for_backward for inputs and outputs, or keep a `.detach()`ed one"
    )
    return {s for s in storages if s is not None}, LeakHolder(
        cause=CYCLE, path=path, root="in a cycle through autograd's graph", what=what, fix=fix
    )


_UNKNOWN = LeakHolder(
    cause=UNKNOWN,
    path="",
    root="",
    what="no name of Python leads to it: C++ code keeps it",
    fix="look at native extensions and at queues of other threads",
)
_NOT_LOOKED_AT = dataclasses.replace(
    _UNKNOWN,
    what=f"not among the {MAX_OBJECTS:,} objects that were looked at: the program has more",
    fix="run it with a smaller data set in memory, or look at what holds the results of this line",
)
_FIX_OF_A_CYCLE = (
    "make one of its references a weakref.ref, or `del` it when it is done; gc.collect() frees it until then"
)
