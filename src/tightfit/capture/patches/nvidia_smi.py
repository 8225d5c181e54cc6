"""A `nvidia-smi` for programs that ask it which GPU there is: on a machine without one it is not there, and on another it speaks of the machine's own GPU.

It answers with the virtual one, as `torch.cuda.mem_get_info` does when a program begins, and stands first on the PATH of the traced process. This file is
also what it runs: Python's standard library alone, so that it starts in milliseconds.
"""

import json
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

_MIB = 1 << 20
_UNKNOWN = "[N/A]"


def install(
    folder: str, *, name: str, nominal_bytes: int, free_bytes: int, compute_capability: tuple[int, int]
) -> None:
    """Puts a `nvidia-smi` into `folder`, which is made, and that on the PATH of this process and of those that it starts."""
    if sys.platform == "win32":
        return
    total = nominal_bytes // _MIB
    free = min(total, free_bytes // _MIB)
    values = {
        "index": "0",
        "count": "1",
        "name": name,
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "driver_version": "570.00",
        "memory.total": f"{total} MiB",
        "memory.free": f"{free} MiB",
        "memory.used": f"{total - free} MiB",
        "memory.reserved": "0 MiB",
        "utilization.gpu": "0 %",
        "utilization.memory": "0 %",
        "compute_cap": ".".join(map(str, compute_capability)),
        "pci.bus_id": "00000000:01:00.0",
        "compute_mode": "Default",
    }
    os.makedirs(folder)
    command = [sys.executable, "-S", "-E", os.path.abspath(__file__), json.dumps(values)]
    program = Path(folder, "nvidia-smi")
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join((folder, *filter(None, [os.environ.get("PATH")])))


def answer(values: Mapping[str, str], words: Sequence[str]) -> str:
    """What is printed for the arguments `words`; fields that are not known read as they do on a card that has no such figure."""
    options = {name: value for name, _, value in (word.partition("=") for word in _joined(words))}
    if "-L" in options or "--list-gpus" in options:
        return f"GPU 0: {values['name']} (UUID: {values['uuid']})\n"
    if any(option.startswith(("--query-compute-apps", "--query-accounted-apps")) for option in options):
        return ""
    if "--query-gpu" not in options:
        return _table(values)
    form = options.get("--format", "csv").replace(" ", "").split(",")
    fields = [field.strip() for field in options["--query-gpu"].split(",")]
    row = [values.get(field.removeprefix("gpu_"), _UNKNOWN) for field in fields]
    lines = [", ".join(value.split(" ")[0] if _has_unit(value) and "nounits" in form else value for value in row)]
    if "noheader" not in form:
        heads = [values.get(field.removeprefix("gpu_"), "") for field in fields]
        units = [f" [{value.split(' ')[1]}]" if _has_unit(value) and "nounits" not in form else "" for value in heads]
        lines.insert(0, ", ".join(field + unit for field, unit in zip(fields, units, strict=True)))
    return "\n".join(lines) + "\n"


def _has_unit(value: str) -> bool:
    return value.endswith((" MiB", " %"))


def _joined(words: Sequence[str]) -> list[str]:
    """`--name value` as `--name=value`."""
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and not word.startswith("-"):
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined


def _table(values: Mapping[str, str]) -> str:
    memory = f"{values['memory.used']} / {values['memory.total']}".replace(" MiB", "MiB")
    return f"| NVIDIA-SMI {values['driver_version']}    CUDA Version: 12.8 |\n|   0  {values['name']}  |  {memory} |  0% Default |\n"


if __name__ == "__main__":
    sys.stdout.write(answer(json.loads(sys.argv[1]), sys.argv[2:]))
