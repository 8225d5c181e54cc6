"""The columns of a tape: one traced run, the only thing that passes from tracing to simulation, planning and reports.

`operators` has a row per kernel call in the order of issue; `storages` a row per allocation of device memory; `events` is the order in
which storages are allocated and freed (and the few other calls of an allocator); `spans` names ranges of events: the steps, and what a script
does outside of steps, such as an evaluation. Two small tables are for the timeline alone: `copies` says which operators are copies between host and
card, `waits` what streams record and wait for and where the host waits. Columns are numpy arrays, names are indices into `strings`. A tape does not
depend on torch or on a GPU: sizes are those that were requested, before any allocator rounds them.
"""

import dataclasses
import enum
import io
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from tightfit.errors import RecordingError
from tightfit.output_files import writing
from tightfit.tape.coverage import Coverage
from tightfit.tape.left_out import LeftOut
from tightfit.tape.loader_use import LoaderUse

SCHEMA = 1

Column = npt.NDArray[Any]


class Phase(enum.IntEnum):
    """What the run was doing."""

    FORWARD = 0
    BACKWARD = 1
    OPTIMIZER = 2
    OTHER = 3


class Category(enum.IntEnum):
    """What a storage is for. `TEMPORARIES` are freed in the phase that allocated them, `ACTIVATIONS` are saved for backward, `COMMUNICATION`
    are the buffers that parameters are gathered in and gradients reduced (buckets of DistributedDataParallel, flat buffers of FSDP)."""

    PARAMETERS = 0
    GRADIENTS = 1
    OPTIMIZER_STATE = 2
    ACTIVATIONS = 3
    TEMPORARIES = 4
    INPUTS = 5
    WORKSPACE = 6
    COMMUNICATION = 7


# Kept apart because workspaces depend on the GPU and may be left out where memory is short, unlike tensors.
class Source(enum.IntEnum):
    """What a storage was allocated for: a tensor, a kernel's own scratch space, or the workspace of a library."""

    TENSOR = 0
    SCRATCH = 1
    CUBLAS = 2
    CUBLASLT = 3
    CUDNN = 4


class EventKind(enum.IntEnum):
    """The calls of an allocator. `storage` is -1 where an event concerns none; `value` is the stream of a `USE`."""

    ALLOCATE = 0
    FREE = 1
    USE = 2  # record_stream: the block is also used on stream `value`
    SYNCHRONIZE = 3
    EMPTY_CACHE = 4


class SpanKind(enum.IntEnum):
    """`SETUP` is everything before the first step; `STEP` one step of the user's loop; `ASIDE` is outside of steps: evaluation, sampling."""

    SETUP = 0
    STEP = 1
    ASIDE = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Columns of equal length."""

    def __len__(self) -> int:
        return len(getattr(self, dataclasses.fields(self)[0].name))

    @classmethod
    def from_columns(cls, columns: Mapping[str, Any]) -> Self:
        """Builds the table from sequences, converting each to its column's type."""
        return cls(**{f.name: np.asarray(columns[f.name], dtype=f.metadata["dtype"]) for f in dataclasses.fields(cls)})

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[Any]]) -> Self:
        """Builds the table from rows, with their values in the order of the columns."""
        names = [f.name for f in dataclasses.fields(cls)]
        return cls.from_columns(dict(zip(names, zip(*rows, strict=True) if rows else ((),) * len(names), strict=True)))

    def rows(self, chosen: Any) -> Self:
        """The table of these rows: a slice, or a mask."""
        return type(self)(**{name: column[chosen] for name, column in self.columns().items()})

    def columns(self) -> dict[str, Column]:
        """The columns by name."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}


_AnyTable = TypeVar("_AnyTable", bound=Table)


def _column(dtype: str) -> Any:
    return dataclasses.field(metadata={"dtype": dtype})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Operators(Table):
    """Kernel calls. `name`, `module`, `line` and `dtype` index `Tape.strings`; FLOPs count a multiply-add as two."""

    name: Column = _column("int32")  # aten.addmm
    module: Column = _column("int32")  # transformer.h.0.mlp.c_fc
    line: Column = _column("int32")  # train.py:41, of the user's own code
    dtype: Column = _column("int32")  # of the arithmetic: float16
    phase: Column = _column("int8")
    stream: Column = _column("int16")
    flops: Column = _column("float64")
    bytes_read: Column = _column("int64")
    bytes_written: Column = _column("int64")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Storages(Table):
    """Allocations of device memory, with the operator that made them (-1: none, such as a copy from the host at set-up).

    `low_bytes` to `high_bytes` is the range of a size that is not known for certain; for all others both equal `num_bytes`.
    """

    num_bytes: Column = _column("int64")
    low_bytes: Column = _column("int64")
    high_bytes: Column = _column("int64")
    category: Column = _column("int8")
    source: Column = _column("int8")
    operator: Column = _column("int32")
    stream: Column = _column("int16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Events(Table):
    """Allocations and frees in order. `operator` is the number of operators issued before the event."""

    kind: Column = _column("int8")
    storage: Column = _column("int32")
    operator: Column = _column("int32")
    value: Column = _column("int16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Spans(Table):
    """Named ranges of events `[begin, end)`, in order and disjoint."""

    name: Column = _column("int32")
    kind: Column = _column("int8")
    begin: Column = _column("int32")
    end: Column = _column("int32")


class CopyDirection(enum.IntEnum):
    """The way of a copy between host and card, or between host and disk."""

    TO_CARD = 0
    TO_HOST = 1
    TO_DISK = 2
    FROM_DISK = 3


class WaitKind(enum.IntEnum):
    """What orders streams, and makes the host wait."""

    RECORD = 0  # `stream` records `event`
    STREAM_FOR_EVENT = 1  # `stream` waits for `event`
    HOST_FOR_EVENT = 2
    HOST_FOR_STREAM = 3
    HOST_FOR_DEVICE = 4
    HOST_READS = 5  # the host reads a value that `stream` has computed: `.item()`, the size that `nonzero` finds
    HOST_UPDATES = 6  # the host itself updates parameters (a fused optimizer on host tensors); `event` is the KiB that it reads and writes
    HOST_RUNS = 7  # the host runs Python of a technique (`tightfit.cost.host_python`); `event` is the microseconds that it takes there


# Tables of their own and no rows of `operators` and `events`: both are few in nearly every program, and every reader of memory events goes on
# without a word about them.
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Copies(Table):
    """The copies between host and card, or disk, among the operators, in order. `is_blocking`: the call returns when the copy is complete."""

    operator: Column = _column("int32")
    direction: Column = _column("int8")
    is_pinned: Column = _column("bool")
    is_blocking: Column = _column("bool")
    num_bytes: Column = _column("int64")


class CollectiveKind(enum.IntEnum):
    """What a group of ranks does together; `SEND` and `RECEIVE` are the two ends of a message between two of them."""

    ALL_REDUCE = 0
    ALL_GATHER = 1
    REDUCE_SCATTER = 2
    ALL_TO_ALL = 3
    BROADCAST = 4
    REDUCE = 5
    GATHER = 6
    SCATTER = 7
    SEND = 8
    RECEIVE = 9
    BARRIER = 10


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Collectives(Table):
    """The collectives among the operators of a distributed program, in order; their streams are those of the operators. `group` indexes `Tape.communicators`, which
    has the ranks of the `group_size` members; `peer` is the rank at the other end of a message, or the root, -1 without one.

    `num_bytes` are those of the whole buffer, as NCCL's tests count them: what is gathered from all ranks, what is reduced before it is scattered, all
    that a rank sends to the others in an all-to-all, else the tensors of this rank.
    """

    operator: Column = _column("int32")
    kind: Column = _column("int8")
    num_bytes: Column = _column("int64")
    group: Column = _column("int32")
    group_size: Column = _column("int32")
    peer: Column = _column("int32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waits(Table):
    """Records of events, and waits, in order. `operator` is the number of operators issued before; `stream` and `event` are -1 where none is concerned."""

    kind: Column = _column("int8")
    operator: Column = _column("int32")
    stream: Column = _column("int16")
    event: Column = _column("int32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights(Table):
    """The parameters of modules when the steps are over: the storage of each, the module that holds it (indexes `Tape.strings`), and whether it is trained. A
    storage that several modules hold has a row for each."""

    storage: Column = _column("int32")
    module: Column = _column("int32")
    is_trained: Column = _column("bool")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Geometry(Table):
    """The sizes of matrix products, convolutions and attention among the operators, in order.

    `batch` products of `num_rows` x `depth` by `depth` x `num_columns`. Of attention: heads of all sequences, queries, keys, width of a head. Of a convolution:
    groups, images x output pixels, output channels of a group, input channels of a group x `taps` of its filter (0: no convolution); a backward
    pass has the sizes of its forward pass. `gradients`: 0 forward, 1 of the input, 2 of the weight (of a product: its depth is the contiguous dimension of
    neither operand), 3 of both. `images`: of a convolution, 0 in tapes from before
    they were recorded.
    """

    operator: Column = _column("int32")
    batch: Column = _column("int64")
    num_rows: Column = _column("int64")
    num_columns: Column = _column("int64")
    depth: Column = _column("int64")
    taps: Column = _column("int32")
    stride: Column = _column("int16")
    gradients: Column = _column("int8")
    is_channels_last: Column = _column("bool")
    images: Column = _column("int32")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Casts(Table):
    """The operators, in order, whose results are copies of weights that autocast's cache holds until the event `end`, before which its outermost context ends.
    `is_of_module`: that context is within the call of a module, as that of a model with autocast in its forward is."""

    operator: Column = _column("int32")
    end: Column = _column("int32")
    is_of_module: Column = _column("bool")


def _empty(table: type[_AnyTable]) -> _AnyTable:
    return table.from_columns({f.name: () for f in dataclasses.fields(table)})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Assumption:
    """A value that a trace without data cannot know: where it came up and what was assumed."""

    where: str
    what: str


class EffectKind(enum.StrEnum):
    """Side effects of a module's code, or other uses of the gradients by the program.

    `WRITE` and `DRAW` (from a random state that is not torch's own) can be restored; `IN_PLACE` cannot. `INPUT` and `OUTPUT`: the module's
    inputs or outputs are modified in place. `REPLACED`: its parameters are other tensors when the backward pass begins. Those from `GRADIENT`
    on concern the program as a whole.
    """

    WRITE = "write"
    DRAW = "draw"
    IN_PLACE = "in place"
    INPUT = "input"
    OUTPUT = "output"
    REPLACED = "replaced"
    CREATE_GRAPH = "create_graph"
    HOOK = "hook"
    PARAMETRIZED = "parametrized"
    GRADIENT = "gradient"  # the script reads or sets the gradient of a parameter
    GRADIENT_HOOK = "gradient hook"
    STEP_HOOK = "step hook"
    BACKWARD = "backward"  # of something else, between a backward pass and its step; or more than one for a step
    DROPPED = "dropped"  # gradients that no step has used


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Effect:
    """One side effect of the module at the path `module`; `module` is empty for the program as a whole.

    `what` is a clause that begins with a verb, `line` the user's (`train.py:41`), empty where it could not be found.
    """

    module: str
    kind: EffectKind
    what: str
    line: str = ""

    @property
    def reason(self) -> str:
        """The clause with its line."""
        return f"{self.what} ({self.line})" if self.line else self.what


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tape:
    """One traced run. `host_peak_bytes` is the peak of host memory: tensors on the host, and what torch's allocator of pinned memory reserves, whose own peak
    is `pinned_peak_bytes` for tensors of at most `pinned_tensor_bytes` at a time; `disk_peak_bytes` that of what techniques keep on disk.

    `loop` is the framework whose training loop ran all backward passes ("Lightning", "Trainer"), empty for the program's own.
    `effects` are those that were seen, where the capture was asked to watch for them. `coverage` says what of the program the tape has, `module_classes` has the class of each module that ran, by
    its path ("GPT2LMHeadModel.transformer.h.0": "GPT2Block"), and `called_modules` the paths of those that were called by themselves: a ModuleList never is, nor a module of which
    the program runs the parts alone. Tapes from before these were recorded have none. `random_operators`
    are the names of the operators of this run that draw random numbers (torch's tag `nondeterministic_seeded`), those of the program's own among them.
    `optimizers` are the classes of those that have stepped: by their names those of torch.optim, with their modules others.
    Of a distributed program the tape has one process, `rank` of `num_ranks` on `num_nodes` machines; `communicators` are the ranks of each group that communicates on cards.
    `operators_of_steps` are the operators `[begin, end)` of each span of kind `STEP`; `loaders` are those that batches were taken from.
    `memory_fraction` is the share of the GPU's memory that the program has allowed itself (`torch.cuda.set_per_process_memory_fraction`).
    `left_out` are turns of loops that the trace left out (`tightfit.tape.left_out`): the tapes that are handed on have them all, and none here.
    `tf32_matmul` and `tf32_convolution`: products and convolutions of float32 are computed in TF32 where a card can, as the program has set it; by torch's defaults convolutions alone. Tapes from before these, `copies`, `waits`, `weights`, `geometry` and `casts` were recorded have none.
    """

    target: str
    versions: Mapping[str, str]
    traced_for: str
    strings: tuple[str, ...]
    operators: Operators
    storages: Storages
    events: Events
    spans: Spans
    assumptions: tuple[Assumption, ...]
    host_peak_bytes: int
    loop: str = ""
    effects: tuple[Effect, ...] = ()
    coverage: Coverage = Coverage()
    module_classes: Mapping[str, str] = dataclasses.field(default_factory=dict)
    called_modules: frozenset[str] = frozenset()
    random_operators: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ()
    operators_of_steps: tuple[tuple[int, int], ...] = ()
    pinned_peak_bytes: int = 0
    pinned_tensor_bytes: int = 0
    disk_peak_bytes: int = 0
    copies: Copies = dataclasses.field(default_factory=lambda: _empty(Copies))
    waits: Waits = dataclasses.field(default_factory=lambda: _empty(Waits))
    weights: Weights = dataclasses.field(default_factory=lambda: _empty(Weights))
    collectives: Collectives = dataclasses.field(default_factory=lambda: _empty(Collectives))
    rank: int = 0
    num_ranks: int = 1
    num_nodes: int = 1
    communicators: tuple[tuple[int, ...], ...] = ()
    geometry: Geometry = dataclasses.field(default_factory=lambda: _empty(Geometry))
    casts: Casts = dataclasses.field(default_factory=lambda: _empty(Casts))
    loaders: tuple[LoaderUse, ...] = ()
    tf32_matmul: bool = False
    tf32_convolution: bool = True
    left_out: tuple[LeftOut, ...] = ()
    memory_fraction: float = 1.0

    def of_steps(self) -> Self:
        """The tape up to the end of its last step, without what comes after the steps; the same tape where it has no step or nothing follows."""
        ends = self.spans.end[self.spans.kind == SpanKind.STEP]
        if not len(ends) or int(ends[-1]) == len(self.events):
            return self
        end = int(ends[-1])
        num_operators = int(self.events.operator[end])
        num_storages = int((self.events.kind[:end] == EventKind.ALLOCATE).sum())
        kept = self.spans.begin < end
        return dataclasses.replace(
            self,
            operators=self.operators.rows(slice(num_operators)),
            storages=self.storages.rows(slice(num_storages)),
            events=self.events.rows(slice(end)),
            spans=self.spans.rows(kept),
            copies=self.copies.rows(self.copies.operator < num_operators),
            collectives=self.collectives.rows(self.collectives.operator < num_operators),
            waits=self.waits.rows(self.waits.operator <= num_operators),
            weights=self.weights.rows(self.weights.storage < num_storages),
            geometry=self.geometry.rows(self.geometry.operator < num_operators),
            casts=self.casts.rows(self.casts.operator < num_operators),
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the tape as an npz file, whole or not at all."""
        head = {
            "schema": SCHEMA,
            "target": self.target,
            "versions": dict(self.versions),
            "traced_for": self.traced_for,
            "strings": self.strings,
            "assumptions": [dataclasses.asdict(a) for a in self.assumptions],
            "host_peak_bytes": self.host_peak_bytes,
            "pinned_peak_bytes": self.pinned_peak_bytes,
            "pinned_tensor_bytes": self.pinned_tensor_bytes,
            "disk_peak_bytes": self.disk_peak_bytes,
            "loop": self.loop,
            "effects": [dataclasses.asdict(e) for e in self.effects],
            "coverage": self.coverage.to_json(),
            "module_classes": dict(self.module_classes),
            "called_modules": sorted(self.called_modules),
            "random_operators": self.random_operators,
            "optimizers": self.optimizers,
            "operators_of_steps": self.operators_of_steps,
            "rank": self.rank,
            "num_ranks": self.num_ranks,
            "num_nodes": self.num_nodes,
            "communicators": self.communicators,
            "loaders": [loader.to_json() for loader in self.loaders],
            "tf32_matmul": self.tf32_matmul,
            "tf32_convolution": self.tf32_convolution,
            "left_out": [dataclasses.asdict(each) for each in self.left_out],
            "memory_fraction": self.memory_fraction,
        }
        arrays = {f"{t}.{c}": column for t in _TABLES for c, column in getattr(self, t).columns().items()}
        buffer = io.BytesIO()
        # JSON as bytes in an array: everything is one file, and np.load needs no pickle to read it.
        np.savez_compressed(buffer, head=np.frombuffer(json.dumps(head).encode(), dtype=np.uint8), **arrays)
        with writing(path) as file:
            file.write(buffer.getbuffer())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Reads what `save` wrote.

        Raises:
            RecordingError: the file is not a tape, or one of another schema.
        """
        try:
            # allow_pickle=False, as a tape may come from somebody else and a pickle can run code.
            _check_archive(path)
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as arrays:
                head = json.loads(arrays["head"].tobytes())
                tables: dict[str, Any] = {
                    name: table.from_columns({f.name: _array(arrays, name, f.name) for f in dataclasses.fields(table)})
                    for name, table in _TABLES.items()
                    # Tapes from before these were recorded lack them.
                    if name not in _LATER or any(key.startswith(f"{name}.") for key in arrays)
                }
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise RecordingError(f"{os.fspath(path)} is not a tape that can be read: {error}") from error
        if not isinstance(head, dict) or head.pop("schema", None) != SCHEMA:
            raise RecordingError(f"{os.fspath(path)} has another schema than this version reads ({SCHEMA})")
        try:
            return cls(**_of_head(head), **tables)
        # Of a newer version, or edited.
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise RecordingError(
                f"{os.fspath(path)} is no tape of this version ({error}): read it with the version that wrote it, or trace the program again"
            ) from error


_TABLES: dict[str, type[Table]] = {
    "operators": Operators,
    "storages": Storages,
    "events": Events,
    "spans": Spans,
    "copies": Copies,
    "waits": Waits,
    "weights": Weights,
    "collectives": Collectives,
    "geometry": Geometry,
    "casts": Casts,
}


def _of_head(given: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a tape that are no tables, as `save` wrote them."""
    head = dict(given)
    head["strings"] = tuple(head["strings"])
    head["assumptions"] = tuple(Assumption(**a) for a in head["assumptions"])
    # Tapes from before effects and coverage were recorded lack the keys.
    head["effects"] = tuple(Effect(**{**e, "kind": EffectKind(e["kind"])}) for e in head.get("effects", ()))
    head["coverage"] = Coverage.from_json(head.get("coverage", {}))
    head["called_modules"] = frozenset(head.get("called_modules", ()))
    head["random_operators"] = tuple(head.get("random_operators", ()))
    head["optimizers"] = tuple(head.get("optimizers", ()))
    head["operators_of_steps"] = tuple((begin, end) for begin, end in head.get("operators_of_steps", ()))
    head["communicators"] = tuple(tuple(ranks) for ranks in head.get("communicators", ()))
    head["loaders"] = tuple(LoaderUse.from_json(loader) for loader in head.get("loaders", ()))
    head["left_out"] = tuple(LeftOut.from_json(each) for each in head.get("left_out", ()))
    return head


def _array(arrays: Mapping[str, Column], table: str, column: str) -> Column:
    key = f"{table}.{column}"
    # Columns that tapes from before them lack.
    return np.zeros(len(arrays[f"{table}.operator"])) if key == "geometry.images" and key not in arrays else arrays[key]


_LATER = ("copies", "waits", "weights", "collectives", "geometry", "casts")


def _check_archive(path: str | os.PathLike[str]) -> None:
    # What is none is taken for a pickle by numpy, whose advice then is to load it.
    if not zipfile.is_zipfile(path):
        raise ValueError("it is empty" if not os.path.getsize(path) else "it is no .npz archive, or a part of one")
