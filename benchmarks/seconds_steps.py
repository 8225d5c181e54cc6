"""Whole steps of timm's models and of transformers against their predictions, from tapes that are traced once and kept."""

import csv
import gzip
import hashlib
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.seconds_rows import SecondsRow
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.errors import CaptureError, UsageError
from tightfit.simulate.seconds_band import SecondsBand, seconds_band
from tightfit.simulate.step_work import priced
from tightfit.simulate.timeline import seconds_of_steps
from tightfit.tape import Tape
from tightfit.tape.load import read_tape

_WORKLOADS = Path(__file__).parent / "workloads" / "published_seconds.py"
# While the constants were chosen, the first so many models of each mode were looked at.
_NUM_SEEN = {"train": 65, "infer": 44}
# Their tapes do not depend on the card but for workspaces; it has to be large enough.
_TRACED_ON = "H200"


def step_rows(data: Path, tapes: Path, *, num_models: int, may_trace: bool) -> Iterator[SecondsRow]:
    """The rows of both tables of whole steps; those without a tape are left out, with a line on stderr."""
    tapes.mkdir(parents=True, exist_ok=True)
    yield from _transformers(data, tapes, may_trace)
    with gzip.open(data / "timm_times" / "rows.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    for mode in ("train", "infer"):
        ordered = sorted({row["model"] for row in rows if row["mode"] == mode}, key=_hash)[:num_models]
        place = {model: number for number, model in enumerate(ordered)}
        for row in rows:
            if row["mode"] == mode and row["model"] in place:
                is_held = place[row["model"]] >= _NUM_SEEN[mode]
                yield from _timm(row, tapes, may_trace, "held" if is_held else "seen")


def _hash(model: str) -> int:
    return int(hashlib.sha1(model.encode(), usedforsecurity=False).hexdigest()[:8], 16)


def _transformers(data: Path, tapes: Path, may_trace: bool) -> Iterator[SecondsRow]:
    with (data / "model_times" / "neusight_given.csv").open() as file:
        for row in csv.DictReader(file):
            card = _card(row["device"])
            if card is None or row["layout"] or row["model"].startswith("switch"):
                continue
            parameters = {
                "model": row["model"],
                "mode": row["mode"],
                "sequence": int(row["sequence"]),
                "batch": int(row["batch"]),
            }
            tape = _tape("transformer", parameters, tapes, may_trace)
            if tape is not None:
                seconds, roofline, band = _predicted(tape, card, tf32_convolution=False)
                yield SecondsRow(
                    group=f"transformers float32, {card.vendor} ({'held' if card.vendor == 'nvidia' else 'seen'})",
                    device=row["device"],
                    name=" ".join(map(str, parameters.values())),
                    measured_seconds=float(row["step_ms"]) / 1e3,
                    predicted_seconds=seconds,
                    roofline_seconds=roofline,
                    neusight_seconds=float(row["neusight_ms"] or 0) / 1e3,
                    low_seconds=band.low_seconds,
                    high_seconds=band.high_seconds,
                )


def _timm(row: Mapping[str, str], tapes: Path, may_trace: bool, part: str) -> Iterator[SecondsRow]:
    parameters = {
        "model": row["model"],
        "mode": row["mode"],
        "batch": int(row["batch"]),
        "image_size": int(row["image_size"]),
        "layout": row["layout"],
    }
    card = _card(row["device"])
    tape = _tape("timm_step", parameters, tapes, may_trace) if card is not None else None
    if card is not None and tape is not None:
        seconds, roofline, band = _predicted(tape, card, tf32_convolution=True)
        yield SecondsRow(
            group=f"timm {row['mode']} ({part})",
            device=f"{row['device']}, torch {row['torch']}",
            name=" ".join(map(str, parameters.values())),
            measured_seconds=float(row["step_ms"]) / 1e3,
            predicted_seconds=seconds,
            roofline_seconds=roofline,
            low_seconds=band.low_seconds,
            high_seconds=band.high_seconds,
        )


def _card(name: str) -> Device | None:
    try:
        return find(name)
    except UsageError:
        return None


def _predicted(tape: Tape, card: Device, *, tf32_convolution: bool) -> tuple[float, float, SecondsBand]:
    """Seconds of the last step, what a plain roofline says (the peak of the type and the memory's limit, operator by operator), and the range."""
    prices = priced(tape, card, tf32_convolution=tf32_convolution)
    seconds = seconds_of_steps(prices)[-1]
    begin, end = tape.operators_of_steps[-1]
    operators = tape.operators.rows(slice(begin, end))
    peaks = [card.flops_per_second("float16" if tape.strings[d] == "float16" else "float32") for d in operators.dtype]
    num_bytes = operators.bytes_read + operators.bytes_written
    bounds = zip(operators.flops.tolist(), peaks, num_bytes.tolist(), strict=True)
    roofline = sum(max(flops / peak, moved / card.dram_bytes_per_second) for flops, peak, moved in bounds)
    return seconds, roofline, seconds_band(prices, card, tf32_convolution=tf32_convolution)


def _tape(function: str, parameters: Mapping[str, Any], tapes: Path, may_trace: bool) -> Tape | None:
    path = tapes / f"{function}-{'-'.join(map(str, parameters.values()))}.npz"
    if path.exists():
        return read_tape(path)
    if not may_trace:
        return None
    from tightfit.capture.targets.target_kinds import GeneratorFunction
    from tightfit.capture.trace import trace

    target = GeneratorFunction(location=str(_WORKLOADS), function=function, parameters=dict(parameters))
    try:
        tape = trace(target, label=path.stem, device=_TRACED_ON, num_steps=2).tape
    except CaptureError as error:
        print(f"{path.stem}: {error}", file=sys.stderr)
        return None
    tape.save(path)
    return tape
