"""The GPUs of this machine, read from `nvidia-smi`, so that a command needs neither torch nor a working CUDA for them."""

import dataclasses
import shutil
import subprocess
import sys

from tightfit.devices.catalogue import find
from tightfit.errors import UnknownDevice, UsageError
from tightfit.units import MIB

_QUERY = ("--query-gpu=name,memory.total,memory.used", "--format=csv,noheader")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalCard:
    """A GPU of this machine: the name that the driver reports, its memory in bytes and what all processes hold of it, and its name in the catalogue."""

    name: str
    total_bytes: int
    used_bytes: int
    known_as: str | None


def local_cards() -> list[LocalCard]:
    """The GPUs that `nvidia-smi` lists; none where that program is not installed or finds no driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    # 30 s: without persistence mode the driver initialises every GPU first, which takes seconds on a large machine.
    answer = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=30, check=False)
    if answer.returncode != 0:
        reason = (answer.stdout + answer.stderr).strip().partition("\n")[0]
        print(f"nvidia-smi does not answer: {reason}", file=sys.stderr)
        return []
    return [_local_card(line) for line in answer.stdout.splitlines() if line.strip()]


def own_card() -> str:
    """The name of this machine's first GPU, for a command without `--device`.

    Raises:
        UsageError: there is none.
    """
    cards = local_cards()
    if not cards:
        raise UsageError(
            'which GPU? There is none on this machine: name one, such as --device "RTX 4090" (tightfit devices lists them)'
        )
    return cards[0].name


def _local_card(line: str) -> LocalCard:
    # From the right, as a product name may have a comma.
    name, *amounts = line.rsplit(",", 2)
    total_bytes, used_bytes = map(_mebibytes, amounts)
    name = name.strip()
    try:
        known_as = find(name).name
    except UnknownDevice:
        known_as = None
    return LocalCard(name=name, total_bytes=total_bytes, used_bytes=used_bytes, known_as=known_as)


def _mebibytes(text: str) -> int:
    amount = text.strip().removesuffix(" MiB")
    # Boards with unified memory (Jetson, GB10) answer "[N/A]".
    return int(amount) * MIB if amount.isdigit() else 0
