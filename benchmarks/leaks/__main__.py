"""The benchmark of leaks: 40 scripts that leak and 40 that do not, what is said of each, and how often that is right.

    python -m benchmarks.leaks [--only NAME] [--here]

Each script runs in a process of its own. Those of the allocator run on a virtual GPU (`tightfit doctor`), the others on this machine's host. A leak is right if
its class, the line that allocates and the holder are those that the script says; a clean run if nothing is said.
"""

import argparse
import concurrent.futures
import gc
import multiprocessing
import sys
from collections import Counter

import torch

import tightfit
from benchmarks.leaks import clean_loops, clean_state, containers, cycles, fragmentation, graphs, outside  # noqa: F401 - they register their scripts
from benchmarks.leaks.judge import Judged, judged
from benchmarks.leaks.script import CLEAN, LEAKING, Script


def _in_a_process(script: Script) -> Judged:
    """The judgement by a process that is forked for it, so that no script meets what another one has left."""
    context = multiprocessing.get_context("fork")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(judged, script.name).result()


def main() -> int:
    """Prints the table; 1 if fewer than 95 % of the leaks are right, or more than 2 % of the clean runs are not."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default="")
    parser.add_argument("--here", action="store_true", help="in this process")
    options = parser.parse_args()
    # Imported once; what is there by then is not gone through by each collection of each script.
    with tightfit.leaks(quiet=True):
        torch.ones(8).sum()
    gc.freeze()
    right: Counter[str] = Counter()
    number: Counter[str] = Counter()
    print("| script | expected | said | right |\n|---|---|---|---|", flush=True)
    for script in (*LEAKING, *CLEAN):
        if options.only not in (script.name, script.cause, "", "virtual" if script.is_virtual else "host"):
            continue
        found = judged(script.name) if options.here else _in_a_process(script)
        kind = script.cause or "clean"
        number[kind] += 1
        right[kind] += found.is_right
        print(f"| {script.name} | {kind} | {found.said} | {'yes' if found.is_right else '**no**'} |", flush=True)
    print("\n| class | right | of |\n|---|---|---|")
    for kind in number:
        print(f"| {kind} | {right[kind]} | {number[kind]} |")
    leaks = sum(number.values()) - number["clean"]
    named = sum(right.values()) - right["clean"]
    false = number["clean"] - right["clean"]
    print(f"\nleaks named right: {named} of {leaks}; false alarms: {false} of {number['clean']}")
    return int(named < 0.95 * leaks or false > 0.02 * number["clean"])


if __name__ == "__main__":
    sys.exit(main())
