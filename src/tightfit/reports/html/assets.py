"""The styles and scripts that are put into a page, and the policy that keeps a browser from loading or running anything else."""

import base64
import functools
import hashlib

from tightfit.reports.html.templates import FOLDER


@functools.cache
def styles(*names: str) -> str:
    """The style sheets of `page/styles/` one after another."""
    return "".join(_asset("styles", name) for name in names)


@functools.cache
def script(*names: str) -> str:
    """The scripts of `page/scripts/` as one, in a scope of its own."""
    return f'"use strict";\n(() => {{\n{"".join(_asset("scripts", name) for name in names)}}})();\n'


def content_policy(*, styles: str, script: str | None = None) -> str:
    """A content security policy under which a page may load nothing, and apply and run only this style sheet and this script, by their hashes."""
    scripts = [] if script is None else [f"script-src '{_hash(script)}'"]
    return "; ".join(
        ["default-src 'none'", f"style-src '{_hash(styles)}'", *scripts, "base-uri 'none'", "form-action 'none'"]
    )


def _asset(folder: str, name: str) -> str:
    return (FOLDER / folder / name).read_text(encoding="utf-8")


@functools.cache
def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
