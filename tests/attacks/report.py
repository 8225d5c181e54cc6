"""Prints the verdicts of attacks; with --write, they go to the page, and what is wrong to the table of pairs that are known to be wrong.

python -m tests.attacks.report [--bad] [--kind KIND] [--write] [NAME ...]
"""

import argparse
import sys
import time
from collections import Counter
from pathlib import Path

import torch
from tests.attacks import table
from tests.attacks.harness import Outcome, run
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
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="tests.attacks.report", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--bad", action="store_true", help="only those that are wrong or crashed")
    parser.add_argument("--kind", help="only those of a kind")
    parser.add_argument("--techniques", help="only those whose names contain one of these, by commas")
    parser.add_argument("--write", action="store_true", help="write known_wrong.py and docs/exactness.md")
    given = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    wrong: dict[tuple[str, str], str] = {}
    begin = time.monotonic()
    for name, attack in attacks().items():
        if (given.names and name not in given.names) or (given.kind and attack.kind != given.kind):
            continue
        for variant in VARIANTS:
            if given.techniques and not any(part in variant for part in given.techniques.split(",")):
                continue
            verdict = run(attack, variant)
            counts[verdict.outcome] += 1
            if verdict.outcome in BAD:
                wrong[name, variant] = f"{verdict.outcome}: {verdict.reason}"
            if verdict.outcome is not Outcome.NO_PLACE and (verdict.outcome in BAD or not given.bad):
                print(f"{name:32} {variant:36} {verdict.outcome:8} {verdict.reason}", flush=True)
    print(dict(counts), f"{time.monotonic() - begin:.1f} s", file=sys.stderr)
    if given.write:
        rows = [f"    {pair!r}: {_short(told)!r},\n" for pair, told in wrong.items()]
        KNOWN.write_text(f"{HEAD}{''.join(rows)}}}\n")
        table.main()
    return int(bool(wrong))


def _short(told: str) -> str:
    return told if len(told) <= 110 else f"{told[:107]}..."


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
