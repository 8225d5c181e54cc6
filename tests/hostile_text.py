"""Texts that a stranger's program may hold in its names, file names and exceptions, each of which would harm a page that trusted it."""

from typing import Any

DIRECTION_CONTROLS = "\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
SCRIPT = "window.broken = (window.broken ?? 0) + 1"
HOSTILE_TEXTS = {
    "ends a script": f"</script><script>{SCRIPT}</script><!--",
    "ends a style, a title and a comment": f"</style></title>--><script>{SCRIPT}</script>",
    "an element that runs": f"<img src=x onerror='{SCRIPT}'><svg onload={SCRIPT.replace(' ', '')}>",
    "ends an attribute": f"\" onmouseover=\"{SCRIPT}\" x='\" `' onfocus='{SCRIPT}' autofocus='",
    "an entity": "&lt;b&gt; &amp;quot; &#x3c;script>",
    "an expression of the templates": "{{ 7 * 7 }}{{ ''.__class__.__mro__ }}",
    "a statement of the templates": "{% set plan = 0 %}{% include 'base.html' %}{# gone #}{% raw %}",
    "of the scripts": "${SCRIPT}`\\u003cscript>\\",
    "lines of a traceback": 'Traceback:\n  File "<string>", line 1\r\nValueError: <b>\u2028{{ x }}',
    "turns the direction": f"photo{DIRECTION_CONTROLS}gpj.py",
}


def behind_every_text(value: Any, hostile: str) -> Any:
    """The JSON value with `hostile` behind every text in it that is no key."""
    if isinstance(value, str):
        return value + hostile
    if isinstance(value, dict):
        return {key: behind_every_text(part, hostile) for key, part in value.items()}
    return [behind_every_text(part, hostile) for part in value] if isinstance(value, (list, tuple)) else value
