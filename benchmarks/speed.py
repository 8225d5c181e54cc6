"""How long an answer takes, as a user waits for it: whole commands, with the start of the interpreter, and the memory they need.

    python -m benchmarks.speed [--csv docs/speed.csv] [NAME ...]

Each case is run in a fresh process, `--repeat` times, and the fastest counts. Peak memory is that of the largest process of the command.
"""

import argparse
import csv
import dataclasses
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from tightfit.units import GIB, format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A command, and what it may take; None: no limit is set."""

    name: str
    arguments: tuple[str, ...]
    max_seconds: float
    max_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What a case took."""

    name: str
    seconds: float
    peak_bytes: int
    max_seconds: float
    max_bytes: int | None

    @property
    def is_within_limits(self) -> bool:
        """Whether both limits are kept."""
        return self.seconds <= self.max_seconds and self.peak_bytes <= (self.max_bytes or self.peak_bytes)


def _config(source: str, batch_size: int, num_tokens: int, dtype: str, device: str) -> tuple[str, ...]:
    shape = ("--batch-size", str(batch_size), "--sequence-length", str(num_tokens), "--dtype", dtype)
    return ("estimate", source, "--task", "causal-lm", *shape, "--device", device, "--json")


CASES = (
    Case(name="help", arguments=("--help",), max_seconds=0.5),
    Case(name="devices", arguments=("devices",), max_seconds=1.0),
    Case(name="gpt2-124m", arguments=_config("gpt2", 8, 512, "float32", "RTX 4090"), max_seconds=5.0),
    Case(
        name="llama-8b",
        arguments=_config("llama-3-8b", 1, 4096, "bfloat16", "H200"),
        max_seconds=15.0,
        max_bytes=2 * GIB,
    ),
    Case(name="llama-70b", arguments=_config("llama-3-70b", 1, 4096, "bfloat16", "H200"), max_seconds=45.0),
)


def run(case: Case) -> Timing:
    """Runs one case once.

    Raises:
        RuntimeError: the command failed otherwise than by not fitting.
    """
    started = time.monotonic()
    with subprocess.Popen(
        [sys.executable, "-m", "tightfit", *case.arguments], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr is not None
        said = process.stderr.read().decode(errors="replace")
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):
        raise RuntimeError(f"{case.name}: exit code {process.returncode}: {said.strip()}")
    return Timing(
        name=case.name,
        seconds=time.monotonic() - started,
        peak_bytes=usage.ru_maxrss * 1024,
        max_seconds=case.max_seconds,
        max_bytes=case.max_bytes,
    )


def fastest(case: Case, num_runs: int) -> Timing:
    """The fastest of several runs."""
    return min((run(case) for _ in range(num_runs)), key=lambda timing: timing.seconds)


def rows(timings: Sequence[Timing]) -> Iterator[tuple[str, ...]]:
    """The table, heading first."""
    yield ("case", "seconds", "at most", "peak memory", "at most", "within limits")
    for t in timings:
        most = format_bytes(t.max_bytes) if t.max_bytes else ""
        within = "yes" if t.is_within_limits else "no"
        yield (t.name, f"{t.seconds:.2f}", f"{t.max_seconds:g}", format_bytes(t.peak_bytes), most, within)


def main() -> int:
    """Prints the table; 1 if a limit is broken."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.speed", description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(case.name for case in CASES)}")
    parser.add_argument("--repeat", type=int, default=2, help="runs of each case; the fastest counts")
    parser.add_argument("--csv", type=Path, help="also write the table to this file")
    asked = parser.parse_args()
    timings = [fastest(case, asked.repeat) for case in CASES if not asked.names or case.name in asked.names]
    table = list(rows(timings))
    for row in table:
        sys.stdout.write("  ".join(cell.ljust(14) for cell in row).rstrip() + "\n")
    if asked.csv is not None:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows(table)
        partial = asked.csv.with_suffix(".partial")
        partial.write_text(text.getvalue())
        partial.replace(asked.csv)
    return 0 if all(t.is_within_limits for t in timings) else 1


if __name__ == "__main__":
    sys.exit(main())
