"""Calls of operators over dtypes and devices of their arguments: which of them a card refuses, and what the others give.

    python tests/gpu/calls.py RECORDING             on a card: writes the recording
    python tests/gpu/calls.py --virtual EVERY       the same on the virtual GPU, of one call in EVERY, as one line of JSON

The recording beside the others of the tests was made on an H200 under torch 2.11.
"""

import itertools
import json
import logging
import os
import sys
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import called_besides  # noqa: F401 - adds to the table
import torch
from called import ALL, CALLS

REFUSED = "refused"
__all__ = ["ALL", "CALLS", "REFUSED", "is_drawn", "jobs", "outcome"]


def jobs(name: str) -> Iterator[tuple[tuple[torch.dtype, ...], tuple[str, ...]]]:
    """The dtypes and devices of a call's arguments, in the order of the recording."""
    arguments = CALLS[name][1]
    yield from ((dtypes, ("cuda",) * len(arguments)) for dtypes in itertools.product(*(each[1] for each in arguments)))
    usual = tuple(each[2] for each in arguments)
    for devices in itertools.product(("cuda", "cpu"), repeat=len(arguments)):
        if len(set(devices)) > 1:
            yield usual, devices


def outcome(name: str, dtypes: tuple[torch.dtype, ...], devices: tuple[str, ...]) -> str:
    """What a call gives, or that it is refused."""
    function, arguments = CALLS[name]
    try:
        made = [
            torch.ones(argument[0], dtype=dtype, device=device)
            for argument, dtype, device in zip(arguments, dtypes, devices, strict=True)
        ]
        return _shown(function(*made))
    except Exception:  # noqa: BLE001 - whatever it is that a kernel raises
        return REFUSED


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        strides = list(value.stride()) if value.layout is torch.strided else None
        return f"{str(value.dtype)[6:]} {list(value.shape)} {strides} {value.device.type}"
    if isinstance(value, tuple | list):
        return "; ".join(map(_shown, value[:6]))
    return type(value).__name__


def is_drawn(name: str, number: int, every: int) -> bool:
    """Whether a call is one of those that are tried, of one in so many."""
    return zlib.crc32(f"{name} {number}".encode()) % every == 0


def _record(path: Path) -> None:
    found = {}
    for name in CALLS:
        outcomes = [outcome(name, *job) for job in jobs(name)]
        kinds = list(dict.fromkeys(outcomes))
        found[name] = {"kinds": kinds, "outcomes": [kinds.index(each) for each in outcomes]}
    path.write_text(json.dumps(found, separators=(",", ":")) + "\n")


def _on_virtual_gpu(every: int) -> None:
    from tightfit.capture.child_process.capture_session import CaptureSession

    logging.disable(logging.CRITICAL)
    session = CaptureSession("NVIDIA H200", 3, by_yield=True)
    session.watch.begin_yielded_step()
    found: dict[str, dict[int, str]] = {}
    for name in CALLS:
        with session.gpu:
            drawn = {n: outcome(name, *job) for n, job in enumerate(jobs(name)) if is_drawn(name, n, every)}
        found[name] = drawn
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    if sys.argv[1] == "--virtual":
        _on_virtual_gpu(int(sys.argv[2]))
    _record(Path(sys.argv[1]))
