"""How low buffers are placed: the bound, five greedy orders and the search, on hard published problems, beside what they are known to fit.

python benchmarks/placement.py [--seconds S] FILE.CAPACITY.csv ...      the problems of MiniMalloc are named like that: https://github.com/google/minimalloc
"""

import argparse
from pathlib import Path

from tightfit.placement.buffers import PlacementProblem, read_problem, worst_crowd
from tightfit.placement.greedy import ORDERS, greedy
from tightfit.placement.offsets import faults, height_of
from tightfit.placement.strategies import solve

DEFAULT_SECONDS = 60.0


def row(name: str, problem: PlacementProblem, capacity: int, seconds: float) -> str:
    """One line of the table; heights are parts of the capacity, and every placement has passed the validator."""
    solution = solve(problem, seconds=seconds)
    unlimited = PlacementProblem(buffers=problem.buffers, alignment=problem.alignment)
    wrong = faults(problem if solution.fits else unlimited, solution.offsets)
    if wrong:
        raise SystemExit(f"{name}: {wrong[0]}")
    heights = [height_of(problem, greedy(problem, order)) for order in ORDERS]
    cells = [f"{height / capacity:9.3f}" for height in (worst_crowd(problem).num_bytes, *heights, solution.height)]
    verdict = "fits" if solution.fits else "does not fit"
    return f"{name:<12}{len(problem.buffers):>8}{''.join(cells)}{solution.seconds:9.2f}  {verdict}"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--seconds", type=float, default=DEFAULT_SECONDS)
    arguments = parser.parse_args()
    heading = "".join(f"{word:>9}" for word in ("bound", *ORDERS, "ours", "seconds"))
    print(f"{'problem':<12}{'buffers':>8}{heading}")
    for path in arguments.files:
        name, capacity = path.stem.rsplit(".", 1)
        problem = read_problem(path, capacity=int(capacity))
        print(row(name, problem, int(capacity), arguments.seconds), flush=True)


if __name__ == "__main__":
    main()
