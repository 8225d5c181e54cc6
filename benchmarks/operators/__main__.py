"""What becomes of every operator and module that torch tests itself by.

    python -m benchmarks.operators traced [--backward] [--dtype bfloat16]    on a virtual GPU, against the shapes, dtypes and strides of the host's results
    python -m benchmarks.operators rows       what is said of the independence of rows, against numbers
    python -m benchmarks.operators applied    in blocks that techniques are applied to, against plain training, to the bit
    python -m benchmarks.operators modules    likewise

Needs `pip install expecttest`; `--only NAME` takes one. Prints what is not right, then the counts. A quarter of an hour, `applied` an hour.
"""

import argparse
import collections
import json
import os
import subprocess
import sys
from pathlib import Path

from benchmarks.operators import applied, rows
from benchmarks.operators.listed import in_forks, operators

_SECONDS = 240


def _traced(dtype: str, *, backward: bool) -> collections.Counter[str]:
    program = Path(__file__).with_name("traced_program.py")
    command = [sys.executable, "-m", "tightfit", "estimate", str(program), "--device", "RTX 4090", "--show-output"]
    command += ["--timeout", "900", "--steps", "1000000", "--", dtype, *(["backward"] if backward else [])]
    # The program's own folder is what it finds modules in.
    env = os.environ | {"PYTHONPATH": str(program.parents[2])}
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    # A program without a step is run a second time.
    lines = done.stderr.rpartition("BEGIN\n")[2].splitlines()
    counts = collections.Counter[str]()
    for line in lines:
        if line.startswith("CALL "):
            # A library of the host may write behind it on its line.
            name, word, *rest = json.JSONDecoder().raw_decode(line.removeprefix("CALL "))[0]
            counts[word] += 1
            if word != "same":
                print(word, name, *rest, sep="  ")
    print(lines[-1])
    return counts


def main() -> None:
    """Runs one of them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operators", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["traced", "rows", "applied", "modules"])
    parser.add_argument("--backward", action="store_true", help="with the backward pass of each call")
    parser.add_argument("--dtype", default="float32", help="of what is traced")
    parser.add_argument("--only", metavar="NAME")
    chosen = parser.parse_args()
    if chosen.what == "traced":
        print(dict(_traced(chosen.dtype, backward=chosen.backward)))
        return
    works = {"rows": rows.found, "applied": applied.found_of_operator, "modules": applied.found_of_module}
    names = list(applied.modules()) if chosen.what == "modules" else [name for name, _ in operators()]
    counts = collections.Counter[tuple[str, ...]]()
    for name, found in in_forks([n for n in names if chosen.only in (None, n)], works[chosen.what], _SECONDS):
        for row in [(name, "", found, "")] if isinstance(found, str) else found:
            key = row[1:2] if chosen.what == "rows" else row[1:3]
            counts[tuple(map(str, key))] += 1
            if not {"right", "no place", "mixes"} & set(row):
                print(*row, sep="  ", flush=True)
    for key, number in sorted(counts.items()):
        print(number, *key, sep="  ")


if __name__ == "__main__":
    main()
