"""Scripts of `scripts/planned` from end to end: planned by the command at a tight budget, run on the host plain and with the plan, and compared.

python -m tests.attacks.planned [--share SHARE] [--host SIZE] [NAME ...]

Here they run in float64, where another order of sums is told from another training; plans are made for what they do on a card, in float32.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

SCRIPTS = Path(__file__).with_name("scripts") / "planned"
CARD = "RTX 4090"
# What the context holds on the card, at most: a budget is this and a share of the rest.
_CONTEXT_BYTES = 480 << 20
_DOES_NOT_FIT = 1
_CLOSE = 1e-9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended."""

    code: int
    out: str
    err: str


def compared(script: Path, share: float, host: str, folder: Path) -> tuple[str, str]:
    """How a script ended with a plan for a budget of that share of its memory, or of one closer to all of it: `same`, `no plan`, `refused` or `wrong`, and the rest in words."""
    plain, planned = folder / "plain", folder / "planned"
    plain.mkdir(parents=True)
    planned.mkdir()
    before = _run([sys.executable, str(script)], plain)
    assert before.code == 0, before.err
    made = _plan(script, share, host, planned)
    if made.code:
        return "no plan", _last_line(made.err or made.out)
    plan = json.loads((planned / "plan.json").read_text())
    mixed = dict(Counter(choice["technique"] for choice in plan["choices"]))
    after = _run([*_TIGHTFIT, "run", "--plan", "plan.json", str(script)], planned)
    if after.code:
        return "refused", f"{mixed} {_last_line(after.err)}"
    told = difference(before.out, after.out, plain, planned)
    return ("wrong", f"{mixed} {told}") if told else ("same", str(mixed))


def difference(before: str, after: str, plain: Path, planned: Path) -> str:
    """In what two runs differ: what they have printed, word by word, and the weights and buffers that they have left."""
    said, says = before.split(), after.split()
    if len(said) != len(says):
        return f"{len(says)} words instead of {len(said)}"
    other = [(one, two) for one, two in zip(said, says, strict=True) if one != two and not _are_close(one, two)]
    if other:
        return f"says {other[0][1]} instead of {other[0][0]}"
    first, second = (torch.load(path / "out.pt") for path in (plain, planned))
    if first.keys() != second.keys():
        return f"weights are {sorted(second)}"
    return next((f"{n} differs" for n, one in first.items() if not _are_alike(one, second[n])), "")


def _are_close(one: str, other: str) -> bool:
    try:
        return abs(float(one) - float(other)) <= _CLOSE * max(1.0, abs(float(one)))
    except ValueError:
        return False


def _are_alike(one: Any, other: Any) -> bool:
    scale = float(one.abs().max()) if one.numel() else 0.0
    return one.dtype == other.dtype and torch.allclose(one, other, rtol=0.0, atol=_CLOSE * max(scale, 1e-3))


_TIGHTFIT = [sys.executable, "-m", "tightfit"]


def _plan(script: Path, share: float, host: str, folder: Path) -> Ended:
    estimate = _run([*_TIGHTFIT, "estimate", str(script), "--device", CARD, "--json"], folder)
    if estimate.code:
        return estimate
    peak = json.loads(estimate.out)["peak"]["device_high_bytes"]
    made = estimate
    for each in (share, (share + 1) / 2, (share + 3) / 4):
        budget = _CONTEXT_BYTES + int((peak - _CONTEXT_BYTES) * each)
        given = ["--device", CARD, "--budget", f"{budget >> 20}MiB", "-o", "plan.json"]
        made = _run([*_TIGHTFIT, "plan", str(script), *given, *(["--host", host] if host else [])], folder)
        if made.code != _DOES_NOT_FIT:
            break
    return made


def _run(command: Sequence[str], folder: Path) -> Ended:
    given = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    found = subprocess.run(command, cwd=folder, env=given, capture_output=True, text=True, check=False)
    return Ended(code=found.returncode, out=found.stdout, err=found.stderr)


def _last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")


def main(arguments: list[str]) -> int:
    """One line for each script; 1 if one is wrong or refused what was planned."""
    parser = argparse.ArgumentParser(prog="tests.attacks.planned", description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--share", type=float, default=0.5, help="of what the plain run holds beside the context")
    parser.add_argument("--host", default="8GiB", help="host memory for what is moved; empty: nothing is moved")
    given = parser.parse_args(arguments)
    counts: Counter[str] = Counter()
    for script in sorted(SCRIPTS.glob("*.py")):
        if given.names and script.stem not in given.names:
            continue
        with tempfile.TemporaryDirectory() as folder:
            outcome, told = compared(script, given.share, given.host, Path(folder))
        counts[outcome] += 1
        print(f"{script.stem}: {outcome}: {told}", flush=True)
    print(dict(counts))
    return int(bool(counts["wrong"] or counts["refused"]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
