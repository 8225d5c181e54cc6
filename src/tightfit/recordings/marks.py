"""The marks that tightfit adds to a recording: steps, categories and modules, as plain data under the key `tightfit` and in memory.

torch's viewer ignores keys that it does not know, so a file with marks opens there like any other. As plain data, schema 1:

    {"schema": 1, "origin": "estimate" | "card" | "host", "trace": 0, "device": NAME, "capacity_bytes": N | None, "context_bytes": N | None,
     "spans": [[NAME, "setup" | "step" | "aside", BEGIN, END], ...],
     "categories": {"names": [...], "events": [...], "values": [...], "start_addresses": [...], "start_values": [...]},
     "modules": {"names": [...], "events": [...], "values": [...]}, "assumptions": [[WHERE, WHAT], ...]}

Events are counted in `device_traces[trace]`, from 0. `events` are those with the action `alloc`, in order, and `values` index `names`; an
allocation that is not listed has no known category (or module). Blocks allocated before the first event are identified by their addresses.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Self, get_args

import numpy as np

from tightfit.errors import RecordingError
from tightfit.simulate.history import CATEGORIES, UNKNOWN, HistorySpan
from tightfit.tape import Assumption, Column

SCHEMA = 1
KEY = "tightfit"

Origin = Literal["estimate", "card", "host"]

_MOST = (1 << 63) - 1
# In the order of `tightfit.tape.SpanKind`.
SPAN_KINDS: tuple[Literal["setup", "step", "aside"], ...] = ("setup", "step", "aside")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """Steps, categories and modules of one trace of a recording, and the GPU.

    `origin`: predicted (`estimate`), recorded on a GPU (`card`), or recorded from tensors on the host, with the addresses that torch's CUDA
    allocator would have given them (`host`). `category_events` are the events of allocations, ascending, whose `categories` (indices of
    `tightfit.simulate.history.CATEGORIES`) are known; likewise `module_events`, whose `module_values` index `modules`.
    `start_categories` are those of the blocks at `start_addresses`, which were allocated before the first event.
    """

    origin: Origin
    trace: int
    device: str
    capacity_bytes: int | None
    context_bytes: int | None
    spans: tuple[HistorySpan, ...]
    category_events: Column
    categories: Column
    start_addresses: Column
    start_categories: Column
    module_events: Column
    module_values: Column
    modules: tuple[str, ...]
    assumptions: tuple[Assumption, ...]

    def category_of_events(self, num_events: int) -> Column:
        """The category of each event's allocation, `UNKNOWN` where it is not known: shape `(num_events,)`."""
        return _spread(self.category_events, self.categories, num_events, UNKNOWN)

    def module_of_events(self, num_events: int) -> Column:
        """The index of the module that each event's allocation was made in, -1 where it is not known: shape `(num_events,)`."""
        return _spread(self.module_events, self.module_values, num_events, -1)

    def to_plain(self) -> dict[str, Any]:
        """The data for a recording, of plain containers, numbers and text."""
        return {
            "schema": SCHEMA,
            "origin": self.origin,
            "trace": self.trace,
            "device": self.device,
            "capacity_bytes": self.capacity_bytes,
            "context_bytes": self.context_bytes,
            "spans": [[span.name, span.kind, span.begin, span.end] for span in self.spans],
            "categories": {
                "names": list(CATEGORIES),
                "events": self.category_events.tolist(),
                "values": self.categories.tolist(),
                "start_addresses": self.start_addresses.tolist(),
                "start_values": self.start_categories.tolist(),
            },
            "modules": {
                "names": list(self.modules),
                "events": self.module_events.tolist(),
                "values": self.module_values.tolist(),
            },
            "assumptions": [[assumption.where, assumption.what] for assumption in self.assumptions],
        }

    @classmethod
    def from_plain(cls, value: Any) -> Self:
        """The marks in `value`, what a recording has under `KEY`. A category that this version does not know becomes unknown.

        Raises:
            RecordingError: it is not what `to_plain` gives, or of another schema.
        """
        try:
            return cls._from_checked(value)
        except _Malformed as error:
            raise RecordingError(f"the recording's own marks (its key '{KEY}') cannot be read: {error}") from error

    @classmethod
    def _from_checked(cls, value: Any) -> Self:
        whole = _mapping(value, "the whole")
        if whole.get("schema") != SCHEMA:
            raise _Malformed(f"schema {whole.get('schema')!r}, and this version reads {SCHEMA}")
        categories, modules = (_mapping(whole.get(key), f"'{key}'") for key in ("categories", "modules"))
        names = _texts(categories.get("names"), "the names of categories")
        # By name and not by index, so that a version with more categories can be read by one with fewer.
        known = np.array([CATEGORIES.index(n) if n in CATEGORIES else UNKNOWN for n in names], dtype=np.int64)
        module_names = _texts(modules.get("names"), "the names of modules")
        category_events, category_values = _pairs(categories, "events", "values", len(names))
        start_addresses, start_values = _pairs(categories, "start_addresses", "start_values", len(names))
        module_events, module_values = _pairs(modules, "events", "values", len(module_names))
        return cls(
            origin=_origin(whole.get("origin")),
            trace=_number(whole.get("trace"), "'trace'"),
            device=_text(whole.get("device"), "'device'"),
            capacity_bytes=_number_or_none(whole.get("capacity_bytes"), "'capacity_bytes'"),
            context_bytes=_number_or_none(whole.get("context_bytes"), "'context_bytes'"),
            spans=tuple(_span(entry) for entry in _sequence(whole.get("spans"), "'spans'")),
            category_events=category_events,
            categories=known[category_values],
            start_addresses=start_addresses,
            start_categories=known[start_values],
            module_events=module_events,
            module_values=module_values,
            modules=module_names,
            assumptions=tuple(_assumption(entry) for entry in _sequence(whole.get("assumptions"), "'assumptions'")),
        )


class _Malformed(ValueError):
    """The data does not follow the schema."""


def _spread(events: Column, values: Column, num_events: int, nothing: int) -> Column:
    spread = np.full(num_events, nothing, dtype=np.int64)
    # A ring buffer that dropped events, or a damaged file, can leave marks beyond the end.
    within = events < num_events
    spread[events[within]] = values[within]
    return spread


def _mapping(value: Any, where: str) -> Mapping[str, Any]:
    if type(value) is not dict:
        raise _Malformed(f"{where} is no dict")
    return value


def _sequence(value: Any, where: str) -> Sequence[Any]:
    if type(value) is not list and type(value) is not tuple:
        raise _Malformed(f"{where} is no list")
    return value


def _origin(value: Any) -> Origin:
    if value not in get_args(Origin):
        raise _Malformed(f"'origin' is none of {', '.join(get_args(Origin))}")
    return value


def _text(value: Any, where: str) -> str:
    if type(value) is not str:
        raise _Malformed(f"{where} is no text")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    return tuple(_text(entry, f"one of {where}") for entry in _sequence(value, where))


def _number(value: Any, where: str) -> int:
    if type(value) is not int or not 0 <= value <= _MOST:
        raise _Malformed(f"{where} is no whole number from 0 to 2**63 - 1")
    return value


def _number_or_none(value: Any, where: str) -> int | None:
    return None if value is None else _number(value, where)


def _pairs(table: Mapping[str, Any], keys: str, values: str, num_names: int) -> tuple[Column, Column]:
    """Two columns of one length: the first ascending, the second indices below `num_names`."""
    columns = [
        np.array(
            [_number(entry, f"an entry of '{name}'") for entry in _sequence(table.get(name), f"'{name}'")], np.int64
        )
        for name in (keys, values)
    ]
    if len(columns[0]) != len(columns[1]):
        raise _Malformed(f"'{keys}' and '{values}' are not of one length")
    # Strictly ascending: an event has one category, and look-ups bisect.
    if (np.diff(columns[0]) <= 0).any():
        raise _Malformed(f"'{keys}' do not ascend")
    if (columns[1] >= num_names).any():
        raise _Malformed(f"an entry of '{values}' is no index of a name")
    return columns[0], columns[1]


def _span(value: Any) -> HistorySpan:
    entry = _sequence(value, "a span")
    if len(entry) != 4 or entry[1] not in SPAN_KINDS:
        raise _Malformed("a span is not [name, kind, begin, end]")
    begin, end = _number(entry[2], "the begin of a span"), _number(entry[3], "the end of a span")
    if end < begin:
        raise _Malformed("a span ends before it begins")
    return HistorySpan(name=_text(entry[0], "the name of a span"), kind=entry[1], begin=begin, end=end)


def _assumption(value: Any) -> Assumption:
    entry = _sequence(value, "an assumption")
    if len(entry) != 2:
        raise _Malformed("an assumption is not [where, what]")
    return Assumption(where=_text(entry[0], "an assumption"), what=_text(entry[1], "an assumption"))
