"""The page: one document with its styles and scripts in it, which loads nothing but data from where it came from."""

import base64
import functools
import hashlib
import os
from pathlib import Path

_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = (
    "format.js",
    "elements.js",
    "chart.js",
    "chart_reader.js",
    "cards.js",
    "processes.js",
    "advice.js",
    "main.js",
)


@functools.cache
def page_html() -> str:
    """The document."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    environment = Environment(loader=FileSystemLoader(os.fspath(_FOLDER)), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("watch.html").render(styles=_styles(), script=_script())


@functools.cache
def page_policy() -> str:
    """A content security policy under which the page may apply and run what is in it, by hash, and ask its own server for data; nothing else, and nobody may frame it."""
    return "; ".join(
        [
            "default-src 'none'",
            f"style-src '{_hash(_styles())}'",
            f"script-src '{_hash(_script())}'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


@functools.cache
def _styles() -> str:
    return (_FOLDER / "watch.css").read_text(encoding="utf-8")


@functools.cache
def _script() -> str:
    parts = ((_FOLDER / "scripts" / name).read_text(encoding="utf-8") for name in _SCRIPTS)
    return f'"use strict";\n(() => {{\n{"".join(parts)}}})();\n'


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
