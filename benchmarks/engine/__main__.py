"""The memory engine, measured.

python -m benchmarks.engine [traffic] [--layers 6] [--tokens 8192]   bytes, host memory and hidden copies, beside `save_on_cpu` and torchtune's offload
python -m benchmarks.engine optimizers    where optimizer states at the host are updated, beside torchao's offload of them
python -m benchmarks.engine storages      which part of a layer moves, by GPU and length
python -m benchmarks.engine budgets       plans that mix, beside those that do one thing
python -m benchmarks.engine reach         how large a model is trained in full with a host of so much memory
python -m benchmarks.engine exactness     six models, everything that is moved, host and disk: the same to the bit?
python -m benchmarks.engine growth        whether a thousand steps take more than a hundred
python -m benchmarks.engine faults        what is left after copies that fail, interrupts, forks, full disks
python -m benchmarks.engine batches       what copies of batches that nobody waits for save per step
python -m benchmarks.engine published     torchtune's ladder of techniques, row by row
python -m benchmarks.engine convergence   whether states in few bits at the host train to the same loss, five seeds
"""

import argparse
import sys
from pathlib import Path

from benchmarks.engine.batches import batches
from benchmarks.engine.convergence import convergence
from benchmarks.engine.exactness import exactness
from benchmarks.engine.faults import faults
from benchmarks.engine.growth import growth
from benchmarks.engine.optimizers import print_optimizers
from benchmarks.engine.published import published
from benchmarks.engine.reach import reach
from benchmarks.engine.storages import budgets, storages
from benchmarks.engine.traffic import traffic


def main() -> int:
    """Runs one of them; 1 if something is not as it should be."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", nargs="?", default="traffic")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--streamed", type=int, help="layers that are streamed, the first ones; all if it is not given")
    parser.add_argument("--card", default="RTX 4090")
    parser.add_argument("--host", default="64GiB")
    parser.add_argument("--steps", type=int)
    parser.add_argument("--places", type=int, default=12)
    parser.add_argument("--only", nargs="*", default=(), help="ladders of published")
    parser.add_argument("--csv", type=Path)
    given = parser.parse_args()
    if given.what == "traffic":
        traffic(given.layers, given.tokens, given.csv)
    elif given.what == "optimizers":
        print_optimizers(given.csv)
    elif given.what == "storages":
        storages(given.layers)
    elif given.what == "budgets":
        budgets(given.layers, given.tokens, given.card, given.host, given.csv)
    elif given.what == "reach":
        reach(given.layers, given.streamed or given.layers, given.width, given.tokens, given.card, given.host)
    elif given.what == "exactness":
        return int(exactness(given.steps or 50, given.csv) > 0)
    elif given.what == "batches":
        batches(given.csv)
    elif given.what == "published":
        published(given.csv, given.only)
    elif given.what == "growth":
        return int(growth(given.steps or 1000, given.csv) > 0)
    elif given.what == "convergence":
        return int(convergence(given.steps or 400, given.csv) > 0)
    elif given.what == "faults":
        return int(faults(given.places, given.csv) > 0)
    else:
        parser.error(f"there is no {given.what}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
