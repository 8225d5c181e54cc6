"""The tape: one traced run as plain columns, the only thing that passes from tracing to simulation, planning and reports."""

from tightfit.tape.columns import (
    SCHEMA,
    Assumption,
    Category,
    Column,
    Effect,
    EffectKind,
    EventKind,
    Events,
    Operators,
    Phase,
    Source,
    SpanKind,
    Spans,
    Storages,
    Table,
    Tape,
)
from tightfit.tape.coverage import Coverage, NotReached

__all__ = [
    "SCHEMA",
    "Assumption",
    "Category",
    "Column",
    "Coverage",
    "Effect",
    "EffectKind",
    "EventKind",
    "Events",
    "NotReached",
    "Operators",
    "Phase",
    "Source",
    "SpanKind",
    "Spans",
    "Storages",
    "Table",
    "Tape",
]
