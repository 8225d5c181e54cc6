"""A history as one HTML page that needs nothing else: no network, no server, no other file.

The page is `page/page.html` with the styles, the scripts and the data put in. Its policy lets it load nothing and run only the scripts that
are in it, by their hashes; the data is a JSON block in which nothing can end the block; what it shows it sets as text, never as markup.
"""

import base64
import hashlib
import html
import os
from pathlib import Path

from tightfit.reports.html.page_data import page_json
from tightfit.reports.summary import Summary
from tightfit.simulate.history import History

_FOLDER = Path(__file__).with_name("page")
_SCRIPTS = (
    "data.js",
    "palette.js",
    "timeline_view.js",
    "timeline_draw.js",
    "legend.js",
    "timeline.js",
    "treemap.js",
    "table.js",
    "figures.js",
    "main.js",
)
_ESCAPES = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026"}


def html_page(history: History, summary: Summary) -> str:
    """The whole page, under 3 MB however long the run is."""
    styles = _asset("page.css")
    script = f'"use strict";\n(() => {{\n{"".join(map(_asset, _SCRIPTS))}}})();\n'
    policy = "; ".join(
        (
            "default-src 'none'",
            f"style-src '{_hash(styles)}'",
            f"script-src '{_hash(script)}'",
            "base-uri 'none'",
            "form-action 'none'",
        )
    )
    parts = {
        "POLICY": policy,
        "TITLE": html.escape(f"{os.path.basename(summary.label)}: memory report"),
        "STYLES": styles,
        "DATA": _in_a_block(page_json(history, summary)),
        "SCRIPT": script,
    }
    pieces = _asset("page.html").split("%%")
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _asset(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _in_a_block(text: str) -> str:
    """JSON without the characters that could end the block it stands in or open another; its values stay the same."""
    for character, escape in _ESCAPES.items():
        text = text.replace(character, escape)
    return text
