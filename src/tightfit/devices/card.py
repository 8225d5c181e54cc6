"""Reads the TOML description of a GPU into a `Device`, with one line for every key that is wrong.

The file uses the units of data sheets (GiB of memory as sold, GB/s, TFLOP/s, MHz); this module is the only one that converts them.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Mapping
from typing import Any, cast

from tightfit.devices.context import modelled_context
from tightfit.devices.device import DTYPES, KINDS, VENDORS, Context, Device, HostLink
from tightfit.errors import UsageError
from tightfit.units import GIB, KIB, MIB

# Bytes per second of one lane and direction, in GB/s: transfer rate x line code (PCI Express base specifications 3.0 to 6.0).
_PCIE_LANE_GIGABYTES = {3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
# 900 GB/s in both directions together (NVIDIA Grace Hopper Superchip data sheet).
_C2C_BYTES_PER_SECOND = 450e9
_LINK = re.compile(r"pcie([3-6])x(1|2|4|8|16)|(nvlink-c2c)|(shared)")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Key:
    """The rule of a key: a test, its wording, and the default where the key is absent and not required."""

    test: Callable[[Any], bool]
    says: str
    default: Any = None
    is_required: bool = True


def _is_positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_texts(value: Any) -> bool:
    return isinstance(value, list) and all(_is_text(item) for item in value)


def _is_capability(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(part) is int and part >= 0 for part in value)


def _is_teraflops(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and "float32" in value
        # float32 is the type that every other one falls back to (Device.flops_per_second).
        and set(value) <= set(DTYPES)
        and all(map(_is_positive, value.values()))
    )


def _is_reached(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) <= set(DTYPES)
        and all(_is_positive(v) and v <= 1 for v in value.values())
    )


def _is_context(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(map(_is_positive, value))
        and value[0] <= value[1] <= value[2]
    )


def _one_of(names: tuple[str, ...]) -> _Key:
    return _Key(test=lambda value: value in names, says="one of " + ", ".join(names))


_COUNT = _Key(test=_is_count, says="a whole number above zero")
_POSITIVE = _Key(test=_is_positive, says="a number above zero")
_TEXT = _Key(test=_is_text, says="a text that is not empty")

KEYS: Mapping[str, _Key] = {
    "name": _TEXT,
    "aliases": _Key(test=_is_texts, says="a list of texts", default=[], is_required=False),
    "vendor": _one_of(VENDORS),
    "kind": _one_of(KINDS),
    "architecture": _TEXT,
    "isa": _TEXT,
    "compute_capability": _Key(test=_is_capability, says="two whole numbers, such as [8, 9]"),
    "multiprocessors": _COUNT,
    "threads_per_multiprocessor": _COUNT,
    "clock_mhz": _POSITIVE,
    "memory_gib": _POSITIVE,
    "capacity_bytes": _COUNT,
    "register_file_kib": _COUNT,
    "shared_memory_kib": _COUNT,
    "l2_mib": _POSITIVE,
    "l2_gb_per_second": _Key(test=_is_positive, says=_POSITIVE.says, is_required=False),
    "dram": _TEXT,
    "dram_gb_per_second": _POSITIVE,
    "link": _Key(
        test=lambda value: isinstance(value, str) and _LINK.fullmatch(value) is not None,
        says="'nvlink-c2c', 'shared' or such as 'pcie4x16'",
    ),
    "teraflops": _Key(test=_is_teraflops, says="numbers above zero for float32 and any of " + ", ".join(DTYPES)),
    "reached": _Key(
        test=_is_reached, says="shares of `teraflops`, above zero and up to 1, by type", default={}, is_required=False
    ),
    "context_mib": _Key(test=_is_context, says="three numbers: lowest, likely, highest", is_required=False),
    "system_mib": _Key(test=_is_positive, says=_POSITIVE.says, is_required=False),
    "source": _Key(test=lambda value: _is_texts(value) and bool(value), says="a list of where the numbers are from"),
}


def read_card(table: Mapping[str, Any], *, where: str) -> Device:
    """The device that `table` (the content of a TOML file) describes; `where` begins each line of the error.

    Raises:
        UsageError: one line for each key that is missing, unknown or has a wrong value.
    """
    faults = [f"{where}: {fault}" for fault in _faults(table)]
    if faults:
        raise UsageError("\n".join(faults))
    # Data sheets give decimal GB/s and TFLOP/s but binary sizes of memory, caches and registers.
    values = {key: table.get(key, rule.default) for key, rule in KEYS.items()}
    return Device(
        name=values["name"],
        aliases=tuple(values["aliases"]),
        vendor=values["vendor"],
        kind=values["kind"],
        architecture=values["architecture"],
        isa=values["isa"],
        compute_capability=cast(tuple[int, int], tuple(values["compute_capability"])),
        num_multiprocessors=values["multiprocessors"],
        max_threads_per_multiprocessor=values["threads_per_multiprocessor"],
        max_clock_hertz=values["clock_mhz"] * 1e6,
        nominal_bytes=round(values["memory_gib"] * GIB),
        capacity_bytes=values["capacity_bytes"],
        register_file_bytes=values["register_file_kib"] * KIB,
        shared_memory_bytes=values["shared_memory_kib"] * KIB,
        l2_bytes=round(values["l2_mib"] * MIB),
        l2_bytes_per_second=values["l2_gb_per_second"] and values["l2_gb_per_second"] * 1e9,
        dram=values["dram"],
        dram_bytes_per_second=values["dram_gb_per_second"] * 1e9,
        flops={dtype: teraflops * 1e12 for dtype, teraflops in values["teraflops"].items()},
        reached=dict(values["reached"]),
        link=_link(values["link"], values["dram_gb_per_second"] * 1e9),
        context=_context(values),
        source=tuple(values["source"]),
        system_bytes=round((values["system_mib"] or 0) * MIB),
    )


def _faults(table: Mapping[str, Any]) -> list[str]:
    faults = []
    for key in table.keys() - KEYS.keys():
        # Card files are written by hand from data sheets, so a misspelt key is the most frequent fault.
        near = difflib.get_close_matches(key, KEYS, n=1)
        faults.append(f"unknown key {key!r}" + (f"; did you mean {near[0]!r}?" if near else ""))
    for key, rule in KEYS.items():
        if key not in table:
            if rule.is_required:
                faults.append(f"{key} is missing; it must be {rule.says}")
        elif not rule.test(table[key]):
            faults.append(f"{key} = {table[key]!r} must be {rule.says}")
    if not faults and (table["link"] == "shared") != ("system_mib" in table):
        faults.append(
            "link = 'shared' and system_mib belong together: what the machine's own programs hold of the memory"
        )
    return faults


def _link(text: str, dram_bytes_per_second: float) -> HostLink:
    match = _LINK.fullmatch(text)
    assert match is not None, "the rule of the key has matched"
    if match[4]:
        # A copy reads and writes the one memory.
        return HostLink(kind="shared", generation=1, num_lanes=1, bytes_per_second=dram_bytes_per_second / 2)
    if match[3]:
        return HostLink(kind="nvlink-c2c", generation=1, num_lanes=1, bytes_per_second=_C2C_BYTES_PER_SECOND)
    # "pcie4x16": the link that the card has, which a slot can narrow; a calibration measures the one in place.
    generation, num_lanes = int(match[1]), int(match[2])
    speed = _PCIE_LANE_GIGABYTES[generation] * num_lanes * 1e9
    return HostLink(kind="pcie", generation=generation, num_lanes=num_lanes, bytes_per_second=speed)


def _context(values: Mapping[str, Any]) -> Context:
    if values["context_mib"] is None:
        return modelled_context(
            vendor=values["vendor"],
            compute_capability=cast(tuple[int, int], tuple(values["compute_capability"])),
            num_multiprocessors=values["multiprocessors"],
            max_threads_per_multiprocessor=values["threads_per_multiprocessor"],
        )
    low, measured, high = (round(mib * MIB) for mib in values["context_mib"])
    return Context(num_bytes=measured, low_bytes=low, high_bytes=high, is_measured=True)
