"""Names the holders of storages: names of the program that lead to them, graphs that have saved them, cycles that keep them, in that order.

A search collects garbage once. It refers to every object that it looks at, and to none any more when it is over.
"""

import collections
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import torch

from tightfit.runtime.leaks.collected_cycles import Garbage
from tightfit.runtime.leaks.found_leaks import BOUNDED, CONTAINER, CYCLE, GRAPH, UNKNOWN, LeakHolder
from tightfit.runtime.leaks.holder_paths import KeptTensor, Reachable
from tightfit.runtime.leaks.kept_graphs import GraphWalk, StorageId, is_context, tensors_of_context
from tightfit.runtime.leaks.named_roots import NamedRoots
from tightfit.runtime.leaks.object_edges import is_of
from tightfit.runtime.record_hooks import all_tensors

Holders = dict[int, LeakHolder]
"""By the id of a storage."""

_MAX_NAMES = 40


@dataclasses.dataclass(frozen=True, slots=True)
class _Found:
    """Storages by what holds them: (the group of a path, whether by a graph) to the kept tensor of the newest storage and the storages."""

    groups: dict[tuple[str, bool], list[tuple[int, KeptTensor]]]


def holders_of_storages(wanted: Iterable[int], storage_id: StorageId) -> Holders:
    """The holders of the `wanted` storages, newest first; a storage that several names lead to has the one that holds most of them.

    Those that the collection of cycles has freed are named by their cycle.
    """
    # Tensors of a class of the program's own would run its code for each attribute.
    with torch._C.DisableTorchFunctionSubclass():
        return _holders(wanted, storage_id)


def _holders(wanted: Iterable[int], storage_id: StorageId) -> Holders:
    order = {storage: at for at, storage in enumerate(wanted)}
    found = _in_cycles(order, storage_id)
    rest = {storage: at for storage, at in order.items() if storage not in found}
    if rest:
        roots, reachable = NamedRoots(), Reachable()
        try:
            reachable.add(roots.of_users_code())
            found |= _by_names(rest, reachable, storage_id)
            rest = {storage: at for storage, at in rest.items() if storage not in found}
            if rest:
                found |= _in_graph_cycles(set(rest), storage_id)
                rest = {storage: at for storage, at in rest.items() if storage not in found}
            if rest:
                # Libraries have ten times the objects of a program.
                reachable.add(roots.of_libraries())
                found |= _by_names(rest, reachable, storage_id)
        finally:
            reachable.drop()
            roots.forget()
    return dict.fromkeys(order, _UNKNOWN) | found


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


def _by_names(wanted: dict[int, int], reachable: Reachable, storage_id: StorageId) -> Holders:
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
    for (_, by_graph), storages in sorted(groups.items(), key=lambda item: -len(item[1])):
        newest = min(storages, key=lambda storage: wanted[storage])
        one = storages[newest]
        if len(storages) > 1:
            one = dataclasses.replace(one, path="[-1]".join(one.path.rsplit("[-2]", 1)))
        holder = _named(one, by_graph=by_graph)
        for storage in storages:
            found.setdefault(storage, holder)
    return found


def _with_graphs(kept: Iterable[KeptTensor]) -> list[KeptTensor]:
    return [one for one in kept if one.tensor.grad_fn is not None]


def _longevity(one: KeptTensor, *, reachable: Reachable) -> tuple[bool, int]:
    """Local variables of a step come after containers and attributes, as these have the older tensors, too."""
    return "[" not in one.path and one.path.count(".") <= 1, len(one.path)


def _named(one: KeptTensor, *, by_graph: bool) -> LeakHolder:
    tensor = one.tensor
    has_graph = tensor.grad_fn is not None
    # Of those on the path the longest is the one that grows: `history[-1]['loss']` is in a list of dicts of one.
    growing = [each for each in one.containers if is_of(each, (list, dict, set, collections.deque))]
    container = max(growing, key=len, default=None)
    number = "" if container is None else f"a {type(container).__name__} of {len(container):,}; "
    name = one.path.rpartition(".")[2] or "it"
    if by_graph or has_graph:
        node = tensor.grad_fn.name() if tensor.grad_fn is not None else ""
        what = f"{number}its graph ({node}) retains what it was computed from"
        fix = (
            "reset `.grad` to None, or use torch.autograd.grad(..., create_graph=True)"
            if one.path.endswith(".grad")
            else f"keep `{name}.item()` or `{name}.detach()`"
            if tensor.numel() == 1
            else f"keep `{name}.detach()`, or run it under torch.no_grad()"
        )
        return LeakHolder(cause=GRAPH, path=one.path, root=one.root, what=what, fix=fix)
    bound = bound_of(one.containers)
    what = f"{number}one more with each step" if container is not None else "it grows with each step"
    fix = "clear it, bound it (`deque(maxlen=...)`, `lru_cache(maxsize=...)`), or keep `.cpu()` copies or numbers"
    return LeakHolder(cause=CONTAINER, path=one.path, root=one.root, what=bound or what, fix=fix)


def bound_of(containers: Iterable[Any]) -> str:
    """What bounds a container on the path to a tensor, as text; empty where nothing does."""
    for each in containers:
        if is_of(each, collections.deque) and each.maxlen is not None:
            return f"{BOUNDED}deque(maxlen={each.maxlen})"
        if is_of(each, functools._lru_cache_wrapper) and each.cache_parameters()["maxsize"] is not None:
            return f"{BOUNDED}lru_cache(maxsize={each.cache_parameters()['maxsize']})"
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
_FIX_OF_A_CYCLE = (
    "make one of its references a weakref.ref, or `del` it when it is done; gc.collect() frees it until then"
)
