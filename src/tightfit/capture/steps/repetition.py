"""Skips repeated calls in evaluation and sampling loops: a call that was traced a few times is answered with fresh outputs.

A call is repeated when the same module is called without gradients from the same line with arguments of the same shapes. Once three such calls
in a row have left the same events on the tape, further ones return new outputs of the same shapes and run nothing. The call's peak is on the
tape already; its events are repeated whenever the allocated memory around it has grown since, and its operators where its seconds count.
"""

import dataclasses
import gc
import types
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.observe.repeated_rows import repeat_operators
from tightfit.capture.steps.recurring_calls import REPEATED
from tightfit.tape import EventKind

# The first call differs often (caches, autocast's casts); two equal ones after it show that the call has
# settled.
NUM_CALLS_TRACED = 3
MIN_GROWTH = 1e-3
"""By how much the memory around a call must have grown before its events count again."""

_PLAIN = (bool, str, type(None), torch.dtype, torch.device, torch.layout)

Key = tuple[Any, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Output:
    """One leaf of a call's return value: a view of a storage of its own (`group`), or a plain value."""

    group: int
    num_elements: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype | None
    value: Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """What a call did: its rows of events, its operators, its outputs, and the sizes of what autocast's cache retained.
    `storages` are those of its outputs."""

    begin: int
    end: int
    operators: tuple[int, int]
    sizes: tuple[int, ...]
    outputs: tuple[_Output, ...]
    structure: TreeSpec
    kept: tuple[int, ...]
    storages: frozenset[int]

    def is_like(self, other: "_Call") -> bool:
        """Whether both calls did the same."""
        return (self.sizes, self.outputs, self.kept) == (other.sizes, other.outputs, other.kept)


@dataclasses.dataclass(slots=True)
class _History:
    """The calls of `module` with one key: the latest, how many in a row were equal to it in this turn, and the most memory that was allocated around one."""

    module: weakref.ref[torch.nn.Module]
    call: _Call | None = None
    num_alike: int = 0
    turn: int = 0
    max_bytes: int = 0
    first_storages: frozenset[int] = frozenset()


class Repetition:
    """Runs calls of root modules, or skips those that repeat earlier ones."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._histories: dict[Key, _History] = {}
        self._called_in_context: set[int] = set()
        self._kept: list[torch.Tensor] = []

    def install(self) -> None:
        """Follows the end of autocast contexts, where the cached half-precision copies of weights are freed."""
        self._gpu.casts.when_cleared += [self._called_in_context.clear, self._kept.clear]

    def call(
        self, module: torch.nn.Module, args: Any, kwargs: Any, run: Callable[[], Any], *, turn: int, is_timed: bool
    ) -> Any:
        """The result of calling `module` without gradients; `run` runs it. A loop of calls is within one `turn` of the training loop. `is_timed`: its seconds
        count."""
        # `torch.jit.trace` (TensorBoard's `add_graph`) names values after the variables of the functions that it finds on the stack, and compares
        # the names of two runs.
        key = None if torch.jit.is_tracing() else self._key(module, args, kwargs)
        if key is None:
            return run()
        history = self._histories.get(key)
        # Another module may have got the address of one that is gone.
        if history is None or history.module() is not module:
            history = self._histories[key] = _History(weakref.ref(module))
        if history.turn != turn:
            history.turn, history.num_alike = turn, 0
        alive = self._gpu.storages.alive_bytes()
        self._called_in_context.add(id(module))
        if history.call is not None and history.num_alike >= NUM_CALLS_TRACED:
            return self._answer(module, history, alive, is_timed=is_timed)
        return self._trace(history, alive, run)

    def _key(self, module: torch.nn.Module, args: Any, kwargs: Any) -> Key | None:
        leaves, structure = tree_flatten((args, kwargs))
        described = [_describe(leaf) for leaf in leaves]
        if None in described:
            return None
        autocast = torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda")
        # Inside an autocast context the first call of a module makes the casts of its weights, and later ones
        # find them in the cache.
        is_first = bool(autocast) and id(module) not in self._called_in_context
        modes = (module.training, autocast, is_first, self._gpu.recorder.stream)
        return (id(module), self._gpu.attribution.line(), modes, str(structure), *described)

    def _trace(self, history: _History, alive: int, run: Callable[[], Any]) -> Any:
        recorder = self._gpu.recorder
        begin, first_storage = len(recorder.events["kind"]), len(recorder.storages["num_bytes"])
        first_operator = recorder.num_operators
        result = run()
        call = self._observe(result, begin, first_storage, (first_operator, recorder.num_operators))
        if call is None:
            history.num_alike = 0
        else:
            history.num_alike = history.num_alike + 1 if history.call is not None and call.is_like(history.call) else 1
            history.max_bytes = max(history.max_bytes, alive)
            if history.num_alike == 1:
                history.first_storages = call.storages
            elif history.num_alike == NUM_CALLS_TRACED and (
                _is_kept_elsewhere(result) or (_has_views(result) and self._are_alive(history.first_storages))
            ):
                history.num_alike = 0
        history.call = call
        return result

    def _observe(self, result: Any, begin: int, first_storage: int, operators: tuple[int, int]) -> _Call | None:
        """The record of the call, or None if it did something that cannot be repeated without running it."""
        recorder = self._gpu.recorder
        kinds, storages = recorder.events["kind"][begin:], recorder.events["storage"][begin:]
        allocated_at = {s for k, s in zip(kinds, storages, strict=True) if k == EventKind.ALLOCATE}
        # Streams, synchronisation, and frees of what was there before the call: none of these would be right in
        # another call.
        if any(kind not in (EventKind.ALLOCATE, EventKind.FREE) for kind in kinds) or any(
            s < first_storage for s in storages
        ):
            return None
        alive = allocated_at - {s for k, s in zip(kinds, storages, strict=True) if k == EventKind.FREE}
        leaves, structure = tree_flatten(result)
        outputs = self._outputs(leaves, alive)
        if outputs is None:
            return None
        held = {self._gpu.storages.index_of(leaf) for leaf in leaves if isinstance(leaf, FakeTensor)}
        num_bytes = recorder.storages["num_bytes"]
        kept = tuple(num_bytes[s] for s in sorted(alive - held))
        if kept and not torch.is_autocast_enabled("cuda"):
            return None
        sizes = tuple(
            # Storages relative to the call's first one, so that two calls can be compared; negative for frees.
            num_bytes[s] if k == EventKind.ALLOCATE else first_storage - s - 1
            for k, s in zip(kinds, storages, strict=True)
        )
        return _Call(
            begin=begin,
            end=begin + len(kinds),
            operators=operators,
            sizes=sizes,
            outputs=outputs,
            structure=structure,
            kept=kept,
            storages=frozenset(index for index in held if index is not None),
        )

    def _are_alive(self, storages: frozenset[int]) -> bool:
        """Whether one of these is: of the first of some calls, whose result the program has dropped if it keeps the latest one alone."""
        return not storages.isdisjoint(self._gpu.storages.indices())

    def _outputs(self, leaves: Sequence[Any], alive: set[int]) -> tuple[_Output, ...] | None:
        groups: dict[int, int] = {}
        outputs = []
        for leaf in leaves:
            if not isinstance(leaf, torch.Tensor):
                if not isinstance(leaf, (*_PLAIN, int, float)):
                    return None
                outputs.append(_Output(group=-1, num_elements=0, size=(), stride=(), offset=0, dtype=None, value=leaf))
                continue
            index = self._gpu.storages.index_of(leaf)
            # Outputs with known values decide over control flow (a token that ends a generation); such a call
            # is always run.
            if index is None or index not in alive or self._gpu.known_values.known(leaf):
                return None
            outputs.append(
                _Output(
                    group=groups.setdefault(index, len(groups)),
                    num_elements=leaf.untyped_storage().nbytes() // leaf.element_size(),
                    size=tuple(leaf.size()),
                    stride=leaf.stride(),
                    offset=int(leaf.storage_offset()),
                    dtype=leaf.dtype,
                    value=None,
                )
            )
        return tuple(outputs)

    def _answer(self, module: torch.nn.Module, history: _History, alive: int, *, is_timed: bool) -> Any:
        call, recorder = history.call, self._gpu.recorder
        assert call is not None
        recorder.assume(
            self._gpu.attribution.where(),
            f"calls of {type(module).__name__} without gradients repeat themselves here: {NUM_CALLS_TRACED} were traced, the others give tensors of the same shapes",
        )
        if not (is_timed and repeat_operators(recorder, *call.operators)):
            name = recorder.strings.intern(f"{type(module).__name__} {REPEATED}")
            recorder.operator(name, name, self._gpu.attribution.line(), 0, 0, 0, 0)
        if alive > history.max_bytes * (1 + MIN_GROWTH):
            history.max_bytes = alive
            self._repeat_events(call)
        self._kept += [self._gpu.new((size,), (1,), torch.uint8) for size in call.kept]
        storages: dict[int, torch.Tensor] = {}
        leaves = []
        for output in call.outputs:
            if output.dtype is None:
                leaves.append(output.value)
                continue
            whole = storages.get(output.group)
            if whole is None:
                whole = storages[output.group] = self._gpu.new((output.num_elements,), (1,), output.dtype)
            leaves.append(whole.view(output.dtype).as_strided(output.size, output.stride, output.offset))
        return tree_unflatten(leaves, call.structure)

    def _repeat_events(self, call: _Call) -> None:
        recorder = self._gpu.recorder
        copies: dict[int, int] = {}
        columns = recorder.storages
        kinds, storages = (recorder.events[name][call.begin : call.end] for name in ("kind", "storage"))
        for kind, storage in zip(kinds, storages, strict=True):
            if kind == EventKind.FREE:
                recorder.free(copies.pop(storage))
            else:
                copies[storage] = recorder.allocate(
                    columns["num_bytes"][storage],
                    columns["category"][storage],
                    columns["source"][storage],
                    (columns["low_bytes"][storage], columns["high_bytes"][storage]),
                )
        for copy in copies.values():
            recorder.free(copy)


def _is_kept_elsewhere(result: Any) -> bool:
    """Whether the program keeps a tensor of what a call is about to return, or an alias of it, in a list of a module or of a hook say: each call adds one."""
    leaves = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
    if not _has_views(result):
        owners: dict[int, set[int]] = {}
        for leaf in leaves:
            owners.setdefault(leaf.untyped_storage()._cdata, set()).add(id(leaf))
        # Besides tensors the Python object of a storage owns it, by which its end is noticed.
        if any(torch._C._storage_Use_Count(address) > len(known) + 1 for address, known in owners.items()):
            return True
    inside = {id(leaves), *_containers(result)}
    return any(id(referrer) not in inside for leaf in leaves for referrer in gc.get_referrers(leaf))


def _has_views(result: Any) -> bool:
    """Whether tensors of a result are views. Of what they were made by, other tensors are alive that nobody can tell from those that the program keeps."""
    return any(isinstance(leaf, torch.Tensor) and leaf._is_view() for leaf in tree_flatten(result)[0])


def _containers(result: Any) -> set[int]:
    """The addresses of the objects that a result consists of."""
    found, around = set[int](), [result]
    while around:
        value = around.pop()
        if id(value) in found or isinstance(value, torch.Tensor | torch.nn.Module | type | types.ModuleType):
            continue
        found.add(id(value))
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            around.append(attributes)
        if isinstance(value, dict):
            around += dict.values(value)
        elif isinstance(value, list | tuple | set):
            around += value
    return found


def _describe(leaf: Any) -> Any:
    """The properties of an argument that output shapes depend on; None if these are not known."""
    if isinstance(leaf, torch.Tensor):
        is_dense = leaf.layout == torch.strided and leaf.is_contiguous()
        return ("tensor", leaf.is_cuda, leaf.dtype, leaf.layout, tuple(leaf.size()), is_dense)
    if isinstance(leaf, bool | str | type(None) | torch.dtype | torch.device | torch.layout):
        return ("plain", leaf)
    return ("number", type(leaf)) if isinstance(leaf, int | float) else None
