"""Makes text from a recording, a plan or a user's program safe to show: it cannot reorder what stands beside it, and UTF-8 can hold it.

Markup is another matter: the templates escape it (`templates.py`), and the scripts set text as text.
"""

import re

# Unicode's characters of the property Bidi_Control. An override or embedding that is never closed would reverse the rest of a line, and a file
# name could pose as another ("Trojan Source", Boucher and Anderson, 2021).
_DIRECTION_CONTROLS = re.compile("[\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069]")


def inert(text: str) -> str:
    """`text` with Unicode's direction controls written out as escapes (`\\u202e`), and with `?` for half of a surrogate pair."""
    if text.isascii():
        return text
    # JSON and the names of files may hold half of a surrogate pair, which no file in UTF-8 can.
    whole = text.encode(errors="replace").decode()
    return _DIRECTION_CONTROLS.sub(lambda found: f"\\u{ord(found[0]):04x}", whole)
