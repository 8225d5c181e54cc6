"""The forms of a report (`tightfit report --format`): what writes each, and the ending of its file.

Ours, and those of installed packages with the entry point `tightfit.reports`, whose name is the form and the ending.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from tightfit.errors import UsageError
from tightfit.reports.summary import Summary
from tightfit.simulate.history import History

Writer = Callable[[History, Summary], str]


def _html(history: History, summary: Summary) -> str:
    # Here, so that no other form loads jinja2.
    from tightfit.reports.html.history_page import html_page

    return html_page(history, summary)


def _perfetto(history: History, _: Summary) -> str:
    from tightfit.reports.perfetto import perfetto_text

    return perfetto_text(history)


_OURS: dict[str, tuple[Writer, str]] = {"html": (_html, ".html"), "perfetto": (_perfetto, ".perfetto.json")}


def writer_of(form: str) -> tuple[Writer, str]:
    """What writes the report in that form, and the ending of its file.

    Raises:
        UsageError: there is no such form; the message lists all.
    """
    if form in _OURS:
        return _OURS[form]
    found = {point.name: point for point in entry_points(group="tightfit.reports")}
    if form not in found:
        # The command itself prints these two.
        known = ", ".join([*_OURS, "json", "text", *sorted(found)])
        raise UsageError(f"--format {form}: there is no such form; there are {known}")
    return found[form].load(), f".{form}"
