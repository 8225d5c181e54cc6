"""Prints the verdicts of attacks; with --write, they go to the page, and what is wrong to the table of pairs that are known to be wrong.

python -m tests.attacks.report [--bad] [--kind KIND] [--write] [NAME ...]
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

from tests.attacks import table
from tests.attacks.harness import Outcome
from tests.attacks.known_wrong import KNOWN_WRONG
from tests.attacks.places import VARIANTS
from tests.attacks.registry import attacks

KNOWN = Path(__file__).with_name("known_wrong.py")
HEAD = '''"""Pairs of attack and technique that are wrong or crash today, each with what is seen. Mended pairs are taken out; it is to be empty.

Written by `python -m tests.attacks.report --write`.
"""

# fmt: off
KNOWN_WRONG: dict[tuple[str, str], str] = {
'''
BAD = (Outcome.WRONG, Outcome.CRASHED)


def main(arguments: list[str]) -> int:
    """One line for each pair that has a place; 1 if one is wrong or crashed."""
    parser = argparse.ArgumentParser(prog="tests.attacks.report", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--bad", action="store_true", help="only those that are wrong or crashed")
    parser.add_argument("--kind", help="only those of a kind")
    parser.add_argument("--techniques", help="only those whose names contain one of these, by commas")
    parser.add_argument(
        "--write",
        action="store_true",
        help="write known_wrong.py and docs/exactness.md, with other rows and columns as they are",
    )
    given = parser.parse_args(arguments)
    begin = time.monotonic()
    names = [n for n, a in attacks().items() if (not given.names or n in given.names) and given.kind in (None, a.kind)]
    parts = given.techniques.split(",") if given.techniques else [""]
    verdicts = table.verdicts_of(names, [v for v in VARIANTS if any(part in v for part in parts)])
    counts: Counter[str] = Counter()
    wrong: dict[tuple[str, str], str] = {}
    for name, variant, verdict in ((n, v, verdict) for n, found in verdicts.items() for v, verdict in found.items()):
        counts[verdict.outcome] += 1
        if verdict.outcome in BAD:
            wrong[name, variant] = f"{verdict.outcome}: {verdict.reason}"
        if verdict.outcome is not Outcome.NO_PLACE and (verdict.outcome in BAD or not given.bad):
            print(f"{name:32} {variant:36} {verdict.outcome:8} {verdict.reason}", flush=True)
    print(dict(counts), f"{time.monotonic() - begin:.1f} s", file=sys.stderr)
    if given.write:
        others = {
            pair: told
            for pair, told in KNOWN_WRONG.items()
            if pair[0] in attacks() and not (pair[0] in names and any(part in pair[1] for part in parts))
        }
        rows = [f"    {pair!r}: {_short(told)!r},\n" for pair, told in (others | wrong).items()]
        KNOWN.write_text(f"{HEAD}{''.join(rows)}}}\n")
        table.write(verdicts)
    return int(bool(wrong))


def _short(told: str) -> str:
    return told if len(told) <= 110 else f"{told[:107]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
