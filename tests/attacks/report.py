"""Prints the verdicts of some attacks: python -m tests.attacks.report [--bad] [NAME ...]"""

import argparse
import sys
import time

import torch
from tests.attacks.harness import Outcome, run
from tests.attacks.places import VARIANTS
from tests.attacks.registry import attacks


def main(arguments: list[str]) -> int:
    """One line for each pair that has a place; 1 if one is wrong or crashed."""
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(prog="tests.attacks.report", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--bad", action="store_true", help="only those that are wrong or crashed")
    parser.add_argument("--kind", help="only those of a kind")
    given = parser.parse_args(arguments)
    known = attacks()
    counts: dict[str, int] = {}
    begin = time.monotonic()
    for name, attack in known.items():
        if (given.names and name not in given.names) or (given.kind and attack.kind != given.kind):
            continue
        for variant in VARIANTS:
            verdict = run(attack, variant)
            counts[verdict.outcome] = counts.get(verdict.outcome, 0) + 1
            bad = verdict.outcome in (Outcome.WRONG, Outcome.CRASHED)
            if verdict.outcome is not Outcome.NO_PLACE and (bad or not given.bad):
                print(f"{name:32} {variant:36} {verdict.outcome:8} {verdict.reason}")
    print(counts, f"{time.monotonic() - begin:.1f} s", file=sys.stderr)
    return int(any(counts.get(o) for o in (Outcome.WRONG, Outcome.CRASHED)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
