"""Predicted against measured on the card of this machine, over workloads that were chosen by rule.

    PYTHONPATH=src python -m benchmarks.gpu --out results                    all of it, about 15 minutes on an H200
    PYTHONPATH=src python -m benchmarks.gpu --out results --minutes 9        what nine minutes hold; run again to go on
    PYTHONPATH=src python -m benchmarks.gpu --out results --shard 1/2        half of it, with rows of every family
    PYTHONPATH=src python -m benchmarks.gpu --out results --virtual --tiny   every line of it, without a card, in seconds

Each row runs in a fresh process: three steps for the peaks, more for the time of a step; then again, limited to what was predicted, and if that fails,
to the upper end of the range. A dozen rows are recorded. Predictions are traced meanwhile, on the other processor cores. Only torch, numpy and
transformers are needed. In --out: results.jsonl (a line as each row is done; what is there is not done again), table.csv, summary.txt and recordings.zip.
"""

import argparse
import concurrent.futures
import datetime
import json
import os
import platform
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu import estimates, recordings, table
from benchmarks.gpu.rows import ON_TRANSFORMERS, Row, all_rows, shard, tiny_rows, to_record
from tightfit.devices.calibration import Calibration

NUM_RECORDED = 12
_DEFAULT_VIRTUAL_DEVICE = "H200"
_MAX_TRACERS = 6


def arguments(words: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--shard", default="1/1", help="part i/n of the rows")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no row after this time")
    parser.add_argument("--match", default="", help="only rows whose name contains this")
    parser.add_argument("--device", help="the card in the catalogue; default: what the driver calls it")
    parser.add_argument("--calibration", type=Path, help="a file of tightfit calibrate, read for the predictions")
    parser.add_argument("--calibrate", type=Path, help="first measure the card, write this file and read it")
    parser.add_argument("--recordings", type=int, default=NUM_RECORDED, help="how many rows to record")
    parser.add_argument("--tracers", type=int, default=max(1, min(_MAX_TRACERS, (os.cpu_count() or 2) // 2)))
    parser.add_argument("--timeout", type=float, default=180, help="seconds that one run may take")
    parser.add_argument("--virtual", action="store_true", help="without a card: the virtual GPU is what is measured")
    parser.add_argument("--tiny", action="store_true", help="three small rows")
    parser.add_argument("--predict-only", action="store_true", help="predict, and measure nothing")
    return parser.parse_args(words)


class Benchmark:
    """One run of the program over its rows."""

    def __init__(self, options: argparse.Namespace, rows: Sequence[Row]) -> None:
        from benchmarks.gpu import processes

        self.options, self.rows = options, rows
        self.remarks: dict[str, Any] = {
            "command": shlex.join(["python", "-m", "benchmarks.gpu", *sys.argv[1:]]),
            "date": datetime.date.today().isoformat(),
            "python": platform.python_version(),
        }
        self.processes: processes.Processes | None = None
        here: dict[str, Any] = {}
        if not options.predict_only:
            on_transformers = any(row.family in ON_TRANSFORMERS for row in rows)
            self.processes, here = processes.started(virtual=options.virtual, with_transformers=on_transformers)
        self.device = options.device or here.get("card") or _DEFAULT_VIRTUAL_DEVICE
        self.remarks |= here or {"card": f"none: {self.device} simulated, nothing here is a measurement"}
        self.calibration = self._calibration()
        self.file = options.out / "results.jsonl"
        self.recorded = to_record(rows, options.recordings)

    def _calibration(self) -> Calibration | None:
        if self.options.calibrate:
            from tightfit.calibration.calibrate import measure
            from tightfit.devices.calibration_file import to_toml

            content = measure(device=self.device, virtual=self.options.virtual, disk_folder=self.options.out)
            self.options.calibrate.write_text(to_toml(content), encoding="utf-8")
        path = self.options.calibration or self.options.calibrate
        found = None if path is None else Calibration.load(path)
        # A simulated calibration is refused by estimates; here it was made to try the program out.
        return None if found is None or found.is_virtual else found

    def results(self) -> list[dict[str, Any]]:
        """What is done, one result a row, in the rows' order."""
        if not self.file.exists():
            return []
        done = {result["name"]: result for result in map(json.loads, self.file.read_text().splitlines())}
        return [done[row.name] for row in self.rows if row.name in done]

    def run(self) -> None:
        """Goes through the rows that are not done yet."""
        end = time.monotonic() + 60 * self.options.minutes
        done = {result["name"] for result in self.results()}
        left = [row for row in self.rows if row.name not in done]
        print(f"{len(left)} of {len(self.rows)} rows to do", file=sys.stderr)
        with concurrent.futures.ThreadPoolExecutor(self.options.tracers) as pool:
            predicted = [pool.submit(estimates.estimate, row, self.device, self.calibration) for row in left]
            for number, (row, estimate) in enumerate(zip(left, predicted, strict=True), 1):
                if time.monotonic() > end:
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
                result = self._result(row, estimate)
                with self.file.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(result) + "\n")
                print(f"{number:3} {_say(result)}", file=sys.stderr, flush=True)
        self.write()

    def _result(self, row: Row, estimate: "concurrent.futures.Future[dict[str, Any]]") -> dict[str, Any]:
        fields = {"name": row.name, "row": row.parameters() | {"expandable_segments": row.expandable_segments}}
        if self.options.predict_only:
            return fields | {"estimate": estimate.result()}
        measured = self._measure(row, limit_bytes=None)
        found = estimate.result()
        limited: dict[str, bool | None] = {}
        if "fault" not in found and "fault" not in measured and not measured["failed"]:
            limited["at_estimate"] = self._fails(row, found["reserved_bytes"])
            if limited["at_estimate"]:
                limited["at_upper_end"] = self._fails(row, found["reserved_high_bytes"])
        if row.name in self.recorded and "fault" not in measured:
            self._record(row)
        return fields | {"measured": measured, "estimate": found, "limited": limited}

    def _measure(self, row: Row, *, limit_bytes: int | None, recording: Path | None = None) -> dict[str, Any]:
        from benchmarks.gpu import measure

        assert self.processes is not None
        work, own = (measure.on_virtual_gpu, {"device": self.device}) if self.options.virtual else (measure.measure, {})
        found = self.processes.run(
            work, self.options.timeout, row=row, limit_bytes=limit_bytes, recording=recording, **own
        )
        return {**found.pop("ok", {}), **found}

    def _fails(self, row: Row, limit_bytes: int) -> bool | None:
        return self._measure(row, limit_bytes=limit_bytes).get("failed")

    def _record(self, row: Row) -> None:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "recording.pickle")
            self._measure(row, limit_bytes=None, recording=path)
            if path.exists():
                recordings.add(self.options.out / "recordings.zip", row.name, path)

    def write(self) -> None:
        """The table and the summary of all that is done."""
        results = self.results()
        text = table.summary(results)
        (self.options.out / "table.csv").write_text(table.to_csv(results, self.remarks), encoding="utf-8")
        (self.options.out / "summary.txt").write_text(text + "\n", encoding="utf-8")
        print(text)


def _say(result: dict[str, Any]) -> str:
    shown = []
    for figure in table.FIGURES:
        error = table.error_of(result, figure)
        shown.append(f"{figure} {'-' if error is None else f'{100 * error:+.1f} %'}")
    fault = (result.get("measured") or {}).get("fault") or result["estimate"].get("fault", "")
    return f"{result['name']}: {', '.join(shown)} {fault}".rstrip()


def main(words: Sequence[str] | None = None) -> int:
    """Runs the benchmark; see the module's docstring."""
    options = arguments(sys.argv[1:] if words is None else words)
    estimates.find_own_packages()
    try:
        rows = shard(tiny_rows() if options.tiny else all_rows(), options.shard)
    except ValueError as error:
        print(f"--shard: {error}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    try:
        benchmark = Benchmark(options, [row for row in rows if options.match in row.name])
    except RuntimeError as error:
        print(f"no card to measure: {error}; --virtual runs everything without one", file=sys.stderr)
        return 2
    benchmark.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
