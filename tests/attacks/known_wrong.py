"""Pairs of attack and technique that are wrong or crash today, each with what is seen. Mended pairs are taken out; it is to be empty.

Written by `python -m tests.attacks.report --write`.
"""

# fmt: off
KNOWN_WRONG: dict[tuple[str, str], str] = {
}
