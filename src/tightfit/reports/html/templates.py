"""Renders the jinja2 templates of `page/`: every value is escaped and made inert, and a name that a template does not know is an error.

jinja2 is imported for the first page that is rendered, since results can show themselves as HTML and most never do.
"""

import functools
import os
from pathlib import Path
from typing import TYPE_CHECKING

from tightfit.reports.html.inert_text import inert
from tightfit.units import format_bytes, format_bytes_change, format_seconds, format_seconds_change

if TYPE_CHECKING:
    from jinja2 import Environment

FOLDER = Path(__file__).with_name("page")


def render(template: str, **values: object) -> str:
    """The template of that name filled with `values`; `|bytes` and `|seconds` format numbers, `|bytes_change` and `|seconds_change` with a sign.

    Only what a template marks as `safe` is written as it is: the project's own styles and scripts, and JSON that cannot end its block.

    Raises:
        jinja2.UndefinedError: the template names a value that is not there.
    """
    return _environment().get_template(template).render(values)


@functools.cache
def _environment() -> "Environment":
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(
        loader=FileSystemLoader(os.fspath(FOLDER)),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
        auto_reload=False,
    )
    environment.filters |= {"bytes": format_bytes, "seconds": format_seconds}
    environment.filters |= {"bytes_change": format_bytes_change, "seconds_change": format_seconds_change}
    return environment


def _finalized(value: object) -> object:
    """What jinja2 escapes next. Markup, which is a subclass of str, holds what was finalized already or is the project's own."""
    return inert(value) if type(value) is str else value
