"""Answers the calls of a generation loop whose cache grows by as much in each: every token is a call of the same model with a longer cache.

Three such calls in a row are traced. Where all that they allocate and return is the same but for sizes that grow by constant differences, a further
call allocates and frees in the same order what those sizes lead to, gives the cache its next keys and values, and runs nothing.
"""

import dataclasses
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.recurring_calls import REPEATED
from tightfit.tape import EventKind

NUM_CALLS_TRACED = 3
MIN_GROWTH = 1e-3
"""By how much the memory around a call must have grown before its events count again."""
_CACHES = "transformers.cache_utils"
# Layers that hold all keys and values, one tensor of each; others (windows, quantised, of fixed size) are always run.
_LAYER = "DynamicLayer"
_NAMES = ("keys", "values")
_STORAGE_COLUMNS = ("num_bytes", "low_bytes", "high_bytes")

Key = tuple[Any, ...]
Slot = tuple[Any, str]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Form:
    """What must be equal in another call. `steps` are the events, as kind and storage, counted from the call's first (the cache's old ones are negative);
    `kinds` the categories and sources of the storages. `tensors` are the cache's, in the order of the slots, and the returned ones: storage
    (-1: the cache's old one), dtype, number of dimensions. `leaves` are those of the result: the number of a tensor, or a plain leaf.
    """

    steps: tuple[tuple[int, int], ...]
    kinds: tuple[tuple[int, int], ...]
    tensors: tuple[tuple[int, torch.dtype, int], ...]
    leaves: tuple["int | _PlainLeaf", ...]
    structure: TreeSpec


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _PlainLeaf:
    """A value that is returned in each call, or (`argument`) which of the caches and tensors that were given: a cache, the states of an encoder."""

    value: Any = None
    argument: int = -1

    def of_call(self, given: Sequence[Any]) -> Any:
        """The leaf in a call with these caches and tensors."""
        return self.value if self.argument < 0 else given[self.argument]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _GrowingCall:
    """What a call did. `numbers` are all sizes: those of the storages, then those of the form's tensors. `of_arguments` are the sizes of the arguments."""

    form: _Form
    numbers: tuple[int, ...]
    of_arguments: tuple[int, ...]


@dataclasses.dataclass(slots=True)
class _History:
    """The latest calls with one key, how many were answered since, and the most memory that was allocated around one of them."""

    module: weakref.ref[torch.nn.Module]
    calls: list[_GrowingCall] = dataclasses.field(default_factory=list)
    num_answered: int = 0
    max_bytes: int = 0

    def next_numbers(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The sizes of the next call and those of its arguments, if the latest calls were alike and grew by constant differences."""
        if len(self.calls) < NUM_CALLS_TRACED:
            return None
        first, second, third = self.calls[-3:]
        if not first.form == second.form == third.form:
            return None
        times = self.num_answered + 1
        grown = []
        for a, b, c in (
            (first.numbers, second.numbers, third.numbers),
            (first.of_arguments, second.of_arguments, third.of_arguments),
        ):
            if any(z - y != y - x for x, y, z in zip(a, b, c, strict=True)):
                return None
            grown.append(tuple(z + times * (z - y) for y, z in zip(b, c, strict=True)))
        return grown[0], grown[1]


class GrowingCalls:
    """Runs calls of root modules with a cache, or answers those that continue a row of earlier ones."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._histories: dict[Key, _History] = {}

    def call(self, module: torch.nn.Module, args: Any, kwargs: Any, run: Callable[[], Any]) -> tuple[bool, Any]:
        """Whether the call has a cache that is followed, and its result then; `run` runs it."""
        leaves, structure = tree_flatten((args, kwargs), is_leaf=_is_cache)
        given = [leaf for leaf in leaves if _is_cache(leaf) or isinstance(leaf, torch.Tensor)]
        slots = _slots([each for each in given if _is_cache(each)])
        described = [_described(leaf) for leaf in leaves]
        if not slots or None in described:
            return False, None
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        modes = (module.training, autocast, self._gpu.recorder.stream)
        key = (id(module), self._gpu.attribution.line(), modes, str(structure), *described)
        of_arguments = tuple(
            size
            for leaf in (*leaves, *(getattr(*slot) for slot in slots))
            if isinstance(leaf, torch.Tensor)
            for size in leaf.size()
        )
        history = self._histories.get(key)
        # Another module may have got the address of one that is gone.
        if history is None or history.module() is not module:
            history = self._histories[key] = _History(weakref.ref(module))
        grown = history.next_numbers()
        if grown is not None and grown[1] == of_arguments:
            return True, self._answer(module, history, slots, given, grown[0])
        if history.num_answered:
            history.calls.clear()
            history.num_answered = 0
        call, result = self._trace(slots, given, of_arguments, run)
        if call is None:
            history.calls.clear()
        else:
            history.calls = [*history.calls[1 - NUM_CALLS_TRACED :], call]
        history.max_bytes = self._gpu.storages.alive_bytes()
        return True, result

    def _trace(
        self, slots: Sequence[Slot], given: Sequence[Any], of_arguments: tuple[int, ...], run: Callable[[], Any]
    ) -> tuple[_GrowingCall | None, Any]:
        """What the call did, or None if it did something that cannot be repeated without running it; and its result."""
        columns, events = self._gpu.recorder.storages, self._gpu.recorder.events
        begin, first = len(events["kind"]), len(columns["num_bytes"])
        before = {self._gpu.storages.index_of(getattr(*slot)): -1 - n for n, slot in enumerate(slots)}
        result = run()
        leaves, structure = tree_flatten(result, is_leaf=_is_cache)
        steps, alive = [], set[int]()
        for kind, storage in zip(events["kind"][begin:], events["storage"][begin:], strict=True):
            relative = storage - first if storage >= first else before.get(storage)
            if kind not in (EventKind.ALLOCATE, EventKind.FREE) or relative is None:
                return None, result
            steps.append((int(kind), relative))
            (alive.add if kind == EventKind.ALLOCATE else alive.discard)(relative)
        tensors, plan, sizes = list[tuple[int, torch.dtype, int]](), list[int | _PlainLeaf](), list[int]()
        for number, leaf in enumerate((*(getattr(*slot) for slot in slots), *leaves)):
            if not isinstance(leaf, torch.Tensor) or (number >= len(slots) and any(leaf is each for each in given)):
                plain = _plain_leaf(leaf, given)
                if plain is None:
                    return None, result
                plan.append(plain)
                continue
            index = self._gpu.storages.index_of(leaf)
            # The keys of an encoder stay as they are; what is returned is new, and decides over nothing.
            is_old = number < len(slots) and before.get(index) == -1 - number
            if index is None or (index < first and not is_old) or self._gpu.known_values.known(leaf):
                return None, result
            if number >= len(slots):
                plan.append(len(tensors))
            tensors.append((-1 if is_old else index - first, leaf.dtype, leaf.dim()))
            sizes += [leaf.untyped_storage().nbytes(), int(leaf.storage_offset()), *leaf.size(), *leaf.stride()]
        if not alive <= {storage for storage, _, _ in tensors}:
            return None, result
        rows = range(first, len(columns["num_bytes"]))
        form = _Form(
            steps=tuple(steps),
            kinds=tuple((columns["category"][row], columns["source"][row]) for row in rows),
            tensors=tuple(tensors),
            leaves=tuple(plan),
            structure=structure,
        )
        numbers = (*(columns[name][row] for row in rows for name in _STORAGE_COLUMNS), *sizes)
        return _GrowingCall(form=form, numbers=numbers, of_arguments=of_arguments), result

    def _answer(
        self,
        module: torch.nn.Module,
        history: _History,
        slots: Sequence[Slot],
        given: Sequence[Any],
        numbers: tuple[int, ...],
    ) -> Any:
        recorder, form = self._gpu.recorder, history.calls[-1].form
        history.num_answered += 1
        recorder.assume(
            self._gpu.attribution.where(),
            f"calls of {type(module).__name__} with a growing cache repeat themselves here: {NUM_CALLS_TRACED} were traced, and the sizes continued for the others",
        )
        name = recorder.strings.intern(f"{type(module).__name__} {REPEATED}")
        recorder.operator(name, name, self._gpu.attribution.line(), 0, 0, 0, 0)
        alive = self._gpu.storages.alive_bytes()
        counts = alive > history.max_bytes * (1 + MIN_GROWTH)
        history.max_bytes = alive if counts else history.max_bytes
        width = len(_STORAGE_COLUMNS)
        of_storage = self._tensors_of_storages(form, numbers[width * len(form.kinds) :])
        made: dict[int, torch.Tensor] = {}
        copies: dict[int, int] = {}
        for kind, storage in form.steps:
            if storage in of_storage and kind == EventKind.ALLOCATE:
                for number, tensor in of_storage[storage]():
                    made[number] = tensor
                    # The old keys are freed where the model frees them.
                    if number < len(slots):
                        setattr(*slots[number], tensor)
            elif counts and kind == EventKind.ALLOCATE:
                num_bytes, low_bytes, high_bytes = numbers[width * storage : width * (storage + 1)]
                category, source = form.kinds[storage]
                copies[storage] = recorder.allocate(num_bytes, category, source, (low_bytes, high_bytes))
            elif storage in copies:
                recorder.free(copies.pop(storage))
        leaves = [made[leaf] if isinstance(leaf, int) else leaf.of_call(given) for leaf in form.leaves]
        return tree_unflatten(leaves, form.structure)

    def _tensors_of_storages(
        self, form: _Form, numbers: Sequence[int]
    ) -> dict[int, Callable[[], Iterator[tuple[int, torch.Tensor]]]]:
        """What makes the tensors of each new storage that outlives the call, with their numbers in the form."""
        rest = iter(numbers)
        layouts: dict[int, list[tuple[int, torch.dtype, list[int]]]] = {}
        for number, (storage, dtype, num_dimensions) in enumerate(form.tensors):
            layouts.setdefault(storage, []).append(
                (number, dtype, list(itertools.islice(rest, 2 + 2 * num_dimensions)))
            )

        def make(rows: list[tuple[int, torch.dtype, list[int]]]) -> Iterator[tuple[int, torch.Tensor]]:
            _, dtype, (num_bytes, *_) = rows[0]
            whole = self._gpu.new((num_bytes // dtype.itemsize,), (1,), dtype)
            for number, of_view, (_, offset, *layout) in rows:
                half = len(layout) // 2
                yield number, whole.view(of_view).as_strided(layout[:half], layout[half:], offset)

        return {storage: functools.partial(make, rows) for storage, rows in layouts.items() if storage >= 0}


def _is_cache(value: Any) -> bool:
    module = sys.modules.get(_CACHES)
    return module is not None and isinstance(value, module.Cache | module.EncoderDecoderCache)


def _slots(caches: Sequence[Any]) -> list[Slot]:
    """Where the caches have their keys and values; nothing if one of them is of a kind that is not followed, or empty."""
    slots = list[Slot]()
    for cache in caches:
        for layer in _layers(cache):
            if type(layer).__name__ != _LAYER or not all(
                isinstance(getattr(layer, n, None), FakeTensor) for n in _NAMES
            ):
                return []
            slots += [(layer, name) for name in _NAMES]
    return slots


def _layers(cache: Any) -> Iterator[Any]:
    for part in (getattr(cache, "self_attention_cache", cache), getattr(cache, "cross_attention_cache", None)):
        yield from getattr(part, "layers", ())


def _described(leaf: Any) -> Any:
    """The properties of an argument that must be equal in each call, but for sizes; None if these are not known."""
    if _is_cache(leaf):
        return ("cache", type(leaf), sum(1 for _ in _layers(leaf)))
    if isinstance(leaf, torch.Tensor):
        return ("tensor", leaf.is_cuda, leaf.dtype, leaf.layout, leaf.dim())
    if isinstance(leaf, bool | str | type(None) | torch.dtype | torch.device | torch.layout):
        return ("plain", leaf)
    return ("number", type(leaf)) if isinstance(leaf, int | float) else None


def _plain_leaf(value: Any, given: Sequence[Any]) -> _PlainLeaf | None:
    """A leaf of the result that was given, or is no tensor; None if it cannot be given again."""
    number = next((n for n, each in enumerate(given) if each is value), None)
    if number is not None:
        return _PlainLeaf(argument=number)
    return _PlainLeaf(value=value) if isinstance(value, bool | str | int | float | type(None)) else None
