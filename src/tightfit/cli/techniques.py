"""`tightfit techniques`: the techniques that a plan can use, what each trades, and whether results stay the same."""

import dataclasses
import inspect
import json as jsonlib
import re
from typing import Any

from rich.table import Table
from rich.text import Text

from tightfit.errors import MissingExtra

_PAGES = "docs/guide/techniques"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One technique. `trades` says in a sentence what it trades, `page` is its documentation in the project's repository, None for a technique of
    another package, and `defined_in` the class as `module:name`.
    """

    name: str
    exact: bool
    exactness: str
    trades: str
    page: str | None
    defined_in: str


def techniques(*, json: bool = False) -> int:
    """List the techniques: what each trades for memory, and whether results stay the same. Lossy ones must be allowed by name.

    Parameters
    ----------
    json
        Print JSON instead of text.
    """
    found = entries()
    if json:
        print(jsonlib.dumps({"schema": 1, "techniques": [dataclasses.asdict(entry) for entry in found]}))
    else:
        _write(found)
    return 0


def entries() -> list[Entry]:
    """Every known technique, those of other installed packages last.

    Raises:
        MissingExtra: a technique of an installed package needs torch for being listed, and torch is not installed.
    """
    from tightfit.techniques.registry import techniques as all_techniques

    try:
        known = all_techniques()
    except ModuleNotFoundError as error:
        # Any other missing module is a broken installation, which the message below would hide.
        if error.name != "torch":
            raise
        raise MissingExtra(
            "a technique of an installed package needs torch, which is not installed here; install it: pip install 'tightfit[torch]'"
        ) from error
    return [_entry(technique) for technique in known.values()]


def _entry(technique: Any) -> Entry:
    kind = type(technique)
    is_ours = kind.__module__.startswith("tightfit.")
    return Entry(
        name=technique.name,
        exact=technique.exact,
        exactness=technique.exactness,
        # The first sentence of the class's docstring is what users read, here and in the docs.
        trades=_first_sentence(inspect.getdoc(kind) or ""),
        # Techniques of other packages come through entry points and have no page here.
        page=f"{_PAGES}/{technique.name}.md" if is_ours else None,
        defined_in=f"{kind.__module__}:{kind.__qualname__}",
    )


def _first_sentence(text: str) -> str:
    paragraph = " ".join(text.partition("\n\n")[0].split())
    # A capital must follow, so that "e.g. 4 bits" does not end the sentence.
    return re.split(r"(?<=[.!?])\s+(?=[A-Z])", paragraph, maxsplit=1)[0]


def _write(found: list[Entry]) -> None:
    from tightfit.reports.text.estimates import MAX_WIDTH, console

    output = console()
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    for entry in found:
        kind = ("exact", "green") if entry.exact else ("lossy", "yellow")
        words = Text.assemble(entry.trades, "\n", (entry.exactness.removeprefix("lossy: "), "dim"))
        table.add_row(Text(entry.name, style="bold"), Text(*kind), words)
    output.print(table, width=min(output.width, MAX_WIDTH))
    output.print(f"\nEach has a page, {_PAGES}/NAME.md: when it helps, and what it refuses.", soft_wrap=True)
    for entry in found:
        if entry.page is None:
            output.print(Text(f"{entry.name} is of another package: {entry.defined_in}"), soft_wrap=True)
