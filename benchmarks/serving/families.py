"""An answer for each of the families that are served most, and the processor time that it takes: `python -m benchmarks.serving.families`.

Each config of `families.toml` is given to the command `tightfit serve` in a process of its own, with lengths, on a card that holds it. Printed are the weights against the published number
of parameters, the cache per token, and seconds of processor time, which other programs on the machine change little.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FAMILIES = Path(__file__).with_name("families.toml")
_RESULTS = Path(__file__).with_name("families.json")
_DEVICE, _LONGEST = "B200", 2048


def families() -> Mapping[str, Mapping[str, Any]]:
    """The configs by name, with what is published of them."""
    return tomllib.loads(_FAMILIES.read_text(encoding="utf-8"))


def answer_of(name: str, config: Mapping[str, Any], folder: Path, longest: int = _LONGEST) -> dict[str, Any]:
    """What the command says of a config, for requests of half of `longest` tokens and a tenth more, with the seconds of processor time that it took; or what its error says."""
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"dtype": "bfloat16", **config}), encoding="utf-8")
    lengths = f"{longest // 2 - 24}:{longest // 20}"
    arguments = ["--device", _DEVICE, "--lengths", lengths, "--max-model-len", str(longest), "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [str(Path(sys.executable).with_name("tightfit")), "serve", str(path), *arguments],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_COLOR": "1"},
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    if done.returncode > 1:
        return {"error": done.stderr.strip().rpartition("\n")[2], "processor_seconds": round(seconds, 2)}
    return {**json.loads(done.stdout), "processor_seconds": round(seconds, 2)}


def main() -> None:
    """Prints a line per family, and writes all of them to a file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[], help="names of families")
    given = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, family in families().items():
            if given.only and name not in given.only:
                continue
            found = answer_of(name, family["config"], Path(folder), family.get("longest", _LONGEST))
            rows[name] = _row(family, found)
            print(f"{name:22} {family['kind']:8} {_words(rows[name])}", flush=True)
    if not given.only:
        _RESULTS.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _row(family: Mapping[str, Any], found: Mapping[str, Any]) -> dict[str, Any]:
    if "error" in found:
        return {key: found[key] for key in ("error", "processor_seconds")}
    billions = found["weights_bytes"] / 2e9
    return {
        "kind": family["kind"],
        "billions": round(billions, 3),
        "error_of_weights": round(billions / family["billions"] - 1, 4) if family["billions"] else None,
        **{key: found[key] for key in ("activation_bytes", "kv_bytes_per_token", "request_bytes", "fits")},
        **{key: found[key] for key in ("time_to_first_token_seconds", "time_per_output_token_seconds")},
        "processor_seconds": found["processor_seconds"],
    }


def _words(row: Mapping[str, Any]) -> str:
    if "error" in row:
        return f"{row['processor_seconds']:5.1f} s  {row['error']}"
    published = "" if row["error_of_weights"] is None else f" ({row['error_of_weights']:+.2%})"
    return f"{row['processor_seconds']:5.1f} s  {row['billions']:.3f} billion weights{published}, {row['kv_bytes_per_token']:,} bytes of cache per token"


if __name__ == "__main__":
    main()
