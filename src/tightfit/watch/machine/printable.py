"""Texts of strangers (names and arguments of processes) made safe for terminals, pages and log lines."""

MAX_TEXT_LENGTH = 400
"""Longer texts lose their middle: the beginning names the program, the end the arguments that differ."""


def printable(text: str, max_length: int = MAX_TEXT_LENGTH) -> str:
    """`text` on one line, with everything that a terminal would act on, or that reorders text, written as an escape (`\\x1b`, `\\u202e`).

    What Unicode does not count as printable is escaped: control and format characters, half surrogates, private use, spaces other than the usual one.
    """
    if len(text) > max_length:
        half = (max_length - 1) // 2
        text = f"{text[:half]}…{text[-half:]}"
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
