"""The catalogue of GPUs, and the search by name.

GPUs are described in TOML files, one per architecture: `[architecture]` holds what its cards share and each `[[card]]` the rest. A file of your
own has all keys at the top level.

Names are compared word by word: case, punctuation and vendor words (NVIDIA, GeForce, Instinct, ...) do not count, `80g` is `80GB`, and letters
are split from digits, so that `rtx4090`, `4090` and `NVIDIA GeForce RTX 4090` are the same. A full match of a name or alias wins; otherwise the
card must have every word of the query, and the first of several in the catalogue is taken: within an architecture the common variant comes
first. So `a100` is the 80 GB SXM card, `h100` the SXM one, `v100` the 16 GB SXM one, `3060` has 12 GB, `3080` 10 GB and `4060 ti` 8 GB.
"""

import difflib
import functools
import os
import re
import tomllib
from pathlib import Path

from tightfit.devices.card import read_card
from tightfit.devices.device import Device
from tightfit.errors import UnknownDevice, UsageError
from tightfit.errors.missing_files import no_file
from tightfit.units import GIB

_FOLDER = Path(__file__).with_name("catalogue")
_MAKERS = {"nvidia", "geforce", "tesla", "amd", "ati", "instinct", "radeon"}
_MAKERS |= {"gpu", "gpus", "graphics", "card", "generation", "edition", "series", "memory", "corporation"}
# "80 GB", "80G" and "80GiB" become one word; the look-arounds leave "h100g" and other model names alone.
_SIZE = re.compile(r"(?<![a-z0-9])(\d+)\s*g(?:i?b)?(?![a-z0-9])")
_WORD = re.compile(r"\d+gb|\d+|[a-z]+")
# Another card than the one without the word: a "3080 12GB" is no 3080 Ti.
_VARIANTS = frozenset({"ti", "super", "laptop"})
# Of the names that an unknown one is answered with: how many, and how alike at least (two names with nothing in common have up to 0.5).
_NUM_NEAREST = 4
# Letters that are typed for digits, within or beside a number: "4O60", "A10O".
_TYPED_FOR_0 = re.compile(r"(?<=\d)o+|o+(?=\d)")
_TYPED_FOR_1 = re.compile(r"(?<=\d)[il](?=\d)")
# What torch calls devices, and numbers of cards on a machine.
_TORCH_NAME = re.compile(r"\s*(?:(?:cuda|cpu|gpu|mps|xpu|auto)(?::\d*)?|\d?)\s*", re.IGNORECASE)
_LEAST_LIKENESS = 0.6
_HOW_TO_NAME = 'write its name, such as "RTX 4090", or leave --device out for the GPU of this machine'


@functools.cache
def all_devices() -> tuple[Device, ...]:
    """Every GPU of the catalogue, in its order. Parsed once per process, in about 20 ms."""
    devices = []
    # Sorted by file name, because the order of the catalogue decides which of several matches is taken.
    for file in sorted(_FOLDER.glob("*.toml")):
        content = tomllib.loads(file.read_text(encoding="utf-8"))
        shared = content["architecture"]
        for card in content["card"]:
            source = [*card.get("source", []), *shared["source"]]
            # A card's own keys override its architecture's; sources add up.
            devices.append(read_card({**shared, **card, "source": source}, where=f"{file.name}, {card['name']}"))
    return tuple(devices)


def find(text: str | os.PathLike[str]) -> Device:
    """The GPU that `text` names, or that the TOML file at the path `text` describes (a path ends in `.toml`).

    Raises:
        UnknownDevice: no GPU has that name; the message lists the nearest ones.
        UsageError: the TOML file cannot be read, or a key of it is wrong (a line each).
    """
    if str(text).endswith(".toml"):
        return _read_file(Path(text))
    query = words(str(text))
    if query:
        for device in all_devices():
            if query in (words(name) for name in (device.name, *device.aliases)):
                return device
        # Without a number a query such as "rtx" or "ti" would match half of the catalogue, and a size as many.
        if any(word[0].isdigit() and not word.endswith("gb") for word in query):
            for device in all_devices():
                if query <= _all_words(device) and not words(device.name) & _VARIANTS - query:
                    return device
    nearest = _HOW_TO_NAME if _TORCH_NAME.fullmatch(str(text)) else _nearest(str(text))
    of_size = [device.name for device in all_devices() if query and query <= {_size_of(device)}]
    if of_size:
        nearest = f"name one: {len(of_size)} have that much memory, such as {', '.join(of_size[:_NUM_NEAREST])}"
    if "," in str(text):
        nearest = "give --device once for each GPU"
    raise UnknownDevice(f"no GPU is called '{text}'; {nearest} (all of them: tightfit devices)")


def words(text: str) -> frozenset[str]:
    """The words of a GPU's name that are compared: `NVIDIA A100-SXM4-80GB` has `a`, `100`, `sxm`, `4` and `80gb`."""
    return frozenset(_in_order(text))


def _all_words(device: Device) -> frozenset[str]:
    return frozenset({_size_of(device)}).union(*(words(name) for name in (device.name, *device.aliases)))


def _size_of(device: Device) -> str:
    return f"{round(device.nominal_bytes / GIB)}gb"


def _read_file(path: Path) -> Device:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"the GPU file: {no_file(str(path))}") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UsageError(f"the GPU file {path} cannot be read: {error}") from error
    return read_card(content, where=str(path))


def _nearest(text: str) -> str:
    text = _TYPED_FOR_1.sub("1", _TYPED_FOR_0.sub(lambda found: "0" * len(found[0]), text.lower()))
    likeness: dict[str, float] = {}
    for device in all_devices():
        likeness[device.name] = max(_likeness(text, name) for name in (device.name, *device.aliases))
    near = [
        name for name in sorted(likeness, key=likeness.__getitem__, reverse=True) if likeness[name] > _LEAST_LIKENESS
    ]
    if not near:
        return "nothing is near to it"
    return "the nearest are " + ", ".join(near[:_NUM_NEAREST])


def _likeness(text: str, name: str) -> float:
    """How alike two names are: their letters, and their model numbers as text (a digit was mistyped) and as numbers (a card that there is not)."""
    ours, theirs = _in_order(text), _in_order(name)
    letters = difflib.SequenceMatcher(None, "".join(ours), "".join(theirs), autojunk=False).ratio()
    number, other = (next((word for word in words if word.isdigit()), "") for words in (ours, theirs))
    if not number or not other:
        return letters
    digits = difflib.SequenceMatcher(None, number, other, autojunk=False).ratio()
    distance = min(int(number), int(other)) / max(int(number), int(other), 1)
    return letters + (digits + distance) / 3


def _in_order(text: str) -> list[str]:
    return [word for word in _WORD.findall(_SIZE.sub(r"\1gb", text.lower())) if word not in _MAKERS]
