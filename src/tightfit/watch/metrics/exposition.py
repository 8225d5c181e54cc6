"""Metrics as text: the format of Prometheus (0.0.4), or OpenMetrics (1.0) for those that ask for it."""

from collections.abc import Iterable

from tightfit.watch.metrics.families import Family

PROMETHEUS = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_ESCAPES = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})


def content_type(accept: str) -> str:
    """OpenMetrics for a client whose `Accept` header names it, else the format of Prometheus."""
    return OPENMETRICS if "application/openmetrics-text" in accept else PROMETHEUS


def exposition(families: Iterable[Family], kind: str) -> str:
    """The text of all families in the format `kind`, one of the two content types."""
    is_open = kind == OPENMETRICS
    lines = []
    for family in families:
        lines.append(f"# HELP {family.name} {family.help.translate(_ESCAPES)}")
        lines.append(f"# TYPE {family.name} gauge")
        if is_open and family.unit:
            lines.append(f"# UNIT {family.name} {family.unit}")
        for labels, value in family.samples:
            written = ",".join(f'{name}="{text.translate(_ESCAPES)}"' for name, text in labels.items())
            # Whole numbers of bytes in full: the shortest form of a float is exact, but not what people read.
            number = f"{value:.0f}" if float(value).is_integer() else repr(float(value))
            lines.append(f"{family.name}{{{written}}} {number}" if written else f"{family.name} {number}")
    if is_open:
        lines.append("# EOF")
    return "\n".join(lines) + "\n"
