"""The keys of a terminal, from the bytes that it sends."""

import codecs

_SEQUENCES = {
    **{
        f"[{letter}": name
        for letter, name in zip("ABCDHF", ("up", "down", "right", "left", "home", "end"), strict=True)
    },
    **{
        f"O{letter}": name
        for letter, name in zip("ABCDHF", ("up", "down", "right", "left", "home", "end"), strict=True)
    },
    **{"[1~": "home", "[4~": "end", "[7~": "home", "[8~": "end", "[5~": "page up", "[6~": "page down"},
    **{"[Z": "up", "[15~": "refresh"},
    # With the Alt key, as in nvitop.
    **{"k": "up", "j": "down", "h": "left", "l": "right", "K": "page up", "J": "page down"},
}
_SINGLE = {
    **{"\t": "down", "\r": "enter", "\n": "enter", "\x01": "line start", "\x05": "line end", "\x12": "refresh"},
    **{"^": "line start", "$": "line end", "[": "page up", "]": "page down", "r": "refresh", "?": "h"},
}
_MAX_SEQUENCE = 32


class KeyDecoder:
    """Turns bytes into names of keys; half a sequence waits for the rest. Printable signs are their own names, and sequences that nobody knows are nothing."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="ignore")
        self._rest = ""

    def feed(self, data: bytes) -> list[str]:
        """The keys in `data`."""
        text, self._rest = self._rest + self._decoder.decode(data), ""
        keys = []
        while text:
            if text[0] != "\x1b":
                keys.append(_SINGLE.get(text[0], text[0]))
                text = text[1:]
                continue
            length = _length(text)
            if length is None:
                self._rest = text
                break
            found = _SEQUENCES.get(text[1:length])
            if found is not None:
                keys.append(found)
            text = text[length:]
        return [key for key in keys if key.isprintable()]

    def flush(self) -> list[str]:
        """What waits, once nothing has followed for a moment: an escape by itself is the Escape key."""
        rest, self._rest = self._rest, ""
        return ["escape"] if rest == "\x1b" else []


def _length(text: str) -> int | None:
    """How long the escape sequence at the beginning is; None while it is not complete."""
    if len(text) == 1:
        return None
    if text[1] == "\x1b":
        return 1
    if text[1] not in "[O":
        return 2
    for at, sign in enumerate(text[2 : _MAX_SEQUENCE + 2], start=2):
        if "@" <= sign <= "~":
            return at + 1
    return None if len(text) < _MAX_SEQUENCE + 2 else _MAX_SEQUENCE
