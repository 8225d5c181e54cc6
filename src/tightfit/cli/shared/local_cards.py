"""The GPUs of this machine, read from `nvidia-smi`, so that a command needs neither torch nor a working CUDA for them."""

import dataclasses
import shutil
import subprocess
import sys
from collections.abc import Sequence

from tightfit.devices.catalogue import find
from tightfit.devices.visible_cards import visible_cards
from tightfit.errors import UnknownDevice, UsageError
from tightfit.units import GIB, MIB, format_bytes

_QUERY = ("--query-gpu=uuid,name,memory.total,memory.used", "--format=csv,noheader")
# Without persistence mode the driver initialises every GPU first, which takes seconds on a large machine.
_MAX_SECONDS = 30
# What the driver and error correction keep for themselves: a sixteenth, and less than a tenth.
_LARGEST_DIFFERENCE = 0.12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalCard:
    """A GPU of this machine: what the driver knows it by, the name that it reports, its memory in bytes and what all processes hold of it, and its name in the catalogue."""

    uuid: str
    name: str
    total_bytes: int
    used_bytes: int
    known_as: str | None


def local_cards() -> list[LocalCard]:
    """The GPUs that `nvidia-smi` lists, in its order; none where that program is not installed, finds no driver or does not answer."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        answer = subprocess.run([program, *_QUERY], capture_output=True, text=True, timeout=_MAX_SECONDS, check=False)
    except subprocess.TimeoutExpired:
        print(f"nvidia-smi has not answered in {_MAX_SECONDS} s", file=sys.stderr)
        return []
    if answer.returncode != 0:
        reason = (answer.stdout + answer.stderr).strip().partition("\n")[0]
        print(f"nvidia-smi does not answer: {reason}", file=sys.stderr)
        return []
    # Other lines are remarks of the driver's.
    return [_local_card(line) for line in answer.stdout.splitlines() if line.count(",") >= 3]


def seen_cards() -> list[LocalCard]:
    """Those that a program started from here sees, its `cuda:0` first."""
    return visible_cards(local_cards(), uuid_of=lambda card: card.uuid, name_of=lambda card: card.name)


def name_of(card: LocalCard) -> str:
    """The catalogue's name of a card of this machine.

    Raises:
        UsageError: the catalogue has none of that name with as much memory.
    """
    if card.known_as is None:
        size = f" with {format_bytes(card.total_bytes)}" if card.total_bytes else ""
        raise UsageError(
            f"the GPU of this machine, {card.name}{size}, is not in the catalogue: name a similar one (tightfit devices lists them), or describe it in a TOML file, --device mycard.toml"
        )
    return card.known_as


def own_card(arguments: Sequence[str] = ()) -> str:
    """The catalogue's name of the first GPU that a program started from here sees, for a command without `--device`. `arguments` are the script's.

    Raises:
        UsageError: there is none, or the catalogue does not have it.
    """
    cards = seen_cards()
    if not cards:
        where = ""
        if any(each.partition("=")[0] == "--device" for each in arguments):
            where = "; your --device comes after --, where options belong to the script"
        raise UsageError(
            f'which GPU? There is none on this machine: name one, such as --device "RTX 4090" (tightfit devices lists them){where}'
        )
    return name_of(cards[0])


def _local_card(line: str) -> LocalCard:
    # From the right, as a product name may have a comma.
    uuid, _, rest = line.partition(",")
    name, *amounts = rest.rsplit(",", 2)
    total_bytes, used_bytes = map(_mebibytes, amounts)
    name = name.strip()
    known_as = _known_as(name, total_bytes)
    return LocalCard(uuid=uuid.strip(), name=name, total_bytes=total_bytes, used_bytes=used_bytes, known_as=known_as)


def _known_as(name: str, total_bytes: int) -> str | None:
    """The catalogue's name of a card that the driver calls `name`; None where none there has as much memory: some are sold in two sizes under one name."""
    sized = f"{name} {round(total_bytes / GIB)}GB"
    for query in (name, sized) if total_bytes else (name,):
        try:
            found = find(query)
        except UnknownDevice:
            continue
        if not total_bytes or abs(total_bytes / found.nominal_bytes - 1) <= _LARGEST_DIFFERENCE:
            return found.name
    return None


def _mebibytes(text: str) -> int:
    amount = text.strip().removesuffix(" MiB")
    # Boards with unified memory (Jetson, GB10) answer "[N/A]".
    return int(amount) * MIB if amount.isdigit() else 0
