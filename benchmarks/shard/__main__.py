"""`python -m benchmarks.shard [mpt] [torchtitan] [four-cards] [recipes] [scale]`: all of them without a name."""

import sys
from pathlib import Path

from benchmarks.shard import four_cards, mpt, recipes, scale, torchtitan

DATA = Path(__file__).parents[3] / "shared" / "data"
COMPARED = {
    "mpt": mpt.compare, "torchtitan": torchtitan.compare, "four-cards": four_cards.compare, "recipes": recipes.compare,
}  # fmt: skip


def main() -> None:
    """Prints what is asked for."""
    chosen = sys.argv[1:] or [*COMPARED, "scale"]
    for name in chosen:
        print(f"{name}:")
        if name == "scale":
            scale.measure()
        elif DATA.is_dir():
            COMPARED[name](DATA)
        else:
            print(f"no {DATA}: nothing to compare with", file=sys.stderr)


if __name__ == "__main__":
    main()
