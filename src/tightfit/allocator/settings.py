"""The settings of torch's CUDA caching allocator, as `PYTORCH_CUDA_ALLOC_CONF` spells them.

`AllocatorSettings.parse` reads the string with the keys, ranges and number forms of torch 2.13 (c10/core/AllocatorConfig.cpp and
c10/cuda/CUDAAllocatorConfig.cpp). Two things are refused here that torch accepts: separators in the wrong place, which torch skips
silently, and `max_split_size_mb` together with `expandable_segments:True`, which makes reserved memory grow without bound
(pytorch/pytorch issue #123548). Keys that concern host memory or locking are checked and then ignored: they change no device memory.
"""

import dataclasses
import difflib
import os
import re
from collections.abc import Iterator
from typing import Self

from tightfit.errors import UsageError
from tightfit.errors.private_names import installed_torch
from tightfit.units import MIB

_CUDA_CONF, _CONF = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
NUM_INTERVALS = 16
"""Powers of two from 1 MiB to 32 GiB, each with its own number of divisions (kRoundUpPowerOfTwoIntervals)."""

# torch computes value * 1024 * 1024 in a size_t and clamps values that would overflow.
_MAX_MIB = (1 << 64) // MIB - 1
_MIN_LARGE_ALLOC_MIB = 10
_MAX_REGISTER_THREADS = 128
_SPECIAL = frozenset(",:[]")
_WHOLE = re.compile(r"[+-]?\d+", re.ASCII)
# std::stod, like std::stoull below, reads a prefix and ignores what follows: "0.8x" is 0.8.
_DECIMAL = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?", re.ASCII)

_SWITCHES = frozenset(
    {
        "expandable_segments",
        "graph_capture_record_stream_reuse",
        "pinned_free_catch_all",
        "pinned_use_background_threads",
        "pinned_use_cuda_host_register",
        "pinned_use_hip_host_register",
        "release_lock_on_cudamalloc",
        "release_lock_on_hipmalloc",
        "throw_on_cudamalloc_oom",
    }
)
_WHOLE_KEYS = frozenset(
    {
        "large_segment_size_mb",
        "max_non_split_rounding_mb",
        "max_split_size_mb",
        "pinned_max_cached_size_mb",
        "pinned_max_round_threshold_mb",
        "pinned_num_register_threads",
        "pinned_reserve_segment_size_mb",
    }
)
_FRACTIONS = frozenset({"garbage_collection_threshold", "per_process_memory_fraction"})
KEYS = tuple(sorted(_SWITCHES | _WHOLE_KEYS | _FRACTIONS | {"backend", "roundup_power2_divisions"}))
"""Every key that torch 2.13 knows."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AllocatorSettings:
    """The settings of `PYTORCH_CUDA_ALLOC_CONF` that affect device memory, with torch's defaults.

    `max_split_size_bytes` None is no limit, `garbage_collection_threshold` 0 is off, and `roundup_power2_divisions` holds the divisions
    between one power of two and the next, from 1 MiB up, 0 where there is no such rounding.
    """

    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = 20 * MIB
    garbage_collection_threshold: float = 0.0
    roundup_power2_divisions: tuple[int, ...] = (0,) * NUM_INTERVALS
    expandable_segments: bool = False
    large_segment_size_bytes: int = 20 * MIB
    per_process_memory_fraction: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Self:
        """The settings that `text` names, such as `max_split_size_mb:128,roundup_power2_divisions:[64:8,>:1]`.

        Raises:
            UsageError: a key that torch does not know, a value out of its range, a malformed string, or a pair that is known to be harmful.
        """
        pairs = list(_pairs(_tokens(text)))
        values = dict(pairs)
        _check_ignored(values)
        large_mib = _mebibytes(values, "large_segment_size_mb", 20, _MIN_LARGE_ALLOC_MIB + 1)
        # torch refuses either below the large segment size: the shared 20 MiB segments would be oversize themselves.
        rounding_mib = _mebibytes(values, "max_non_split_rounding_mb", large_mib, large_mib)
        split_mib = _mebibytes(values, "max_split_size_mb", 0, large_mib)
        expandable = _switch(values, "expandable_segments")
        if split_mib and expandable:
            raise UsageError(
                "max_split_size_mb and expandable_segments:True do not go together: reserved memory then grows without bound"
                " (pytorch issue #123548); drop max_split_size_mb"
            )
        return cls(
            max_split_size_bytes=split_mib * MIB or None,
            max_non_split_rounding_bytes=rounding_mib * MIB,
            garbage_collection_threshold=_collection_threshold(values),
            roundup_power2_divisions=_divisions([value for key, value in pairs if key == "roundup_power2_divisions"]),
            expandable_segments=expandable,
            large_segment_size_bytes=large_mib * MIB,
            per_process_memory_fraction=_memory_fraction(values),
        )


def settings_of_environment() -> str:
    """What the environment writes, as the installed torch reads it: `PYTORCH_CUDA_ALLOC_CONF`, else `PYTORCH_ALLOC_CONF`, which torch knows from 2.9 on.

    The order is that of `CUDAAllocatorConfig::instance` (c10/cuda/CUDAAllocatorConfig.h).
    """
    if _CUDA_CONF in os.environ or _CONF not in os.environ:
        return os.environ.get(_CUDA_CONF, "")
    return os.environ[_CONF] if installed_torch() >= (2, 9) else ""


def add_to_environment(settings: str) -> None:
    """Adds settings to those that torch reads when it is imported, whichever variable has them."""
    own = settings_of_environment()
    os.environ[_CUDA_CONF] = ",".join(part for part in (own, settings) if part)


_Value = str | tuple[tuple[str, str], ...]


def _tokens(text: str) -> list[str]:
    """`text` without white space, split at `,:[]`, each of which is a token of its own. A space that is not ASCII belongs to a token, as in torch."""
    return re.findall(r"[,:\[\]]|[^,:\[\]]+", re.sub(r"\s", "", text, flags=re.ASCII))


def _pairs(tokens: list[str]) -> Iterator[tuple[str, _Value]]:
    """Each key with its value, a list as pairs of text."""
    at = 0
    while at < len(tokens):
        key = tokens[at]
        if key not in KEYS:
            near = difflib.get_close_matches(key.lower(), KEYS, n=2, cutoff=0.5)
            hint = f"did you mean {' or '.join(near)}?" if near else f"torch 2.13 knows {', '.join(KEYS)}"
            raise UsageError(f"'{key}' is no key of PYTORCH_CUDA_ALLOC_CONF: {hint}")
        if tokens[at + 1 : at + 2] != [":"] or at + 2 >= len(tokens):
            raise UsageError(f"{key} needs a value: write {key}:VALUE")
        if tokens[at + 2] == "[":
            if "]" not in tokens[at:]:
                raise UsageError(f"the list of {key} is not closed: write {key}:[A:B,C:D]")
            end = tokens.index("]", at)
            yield key, _items(key, tokens[at + 3 : end])
        elif tokens[at + 2] in _SPECIAL:
            raise UsageError(f"{key} needs a value, not '{tokens[at + 2]}': write {key}:VALUE")
        else:
            end = at + 2
            yield key, tokens[end]
        if tokens[end + 1 : end + 2] not in ([], [","]):
            raise UsageError(f"'{tokens[end + 1]}' after the value of {key}: settings are separated by commas")
        at = end + 2


def _items(key: str, tokens: list[str]) -> tuple[tuple[str, str], ...]:
    """The items `A:B` of a list."""
    # Four tokens an item: A, the colon, B and the comma, which the last item lacks.
    items = []
    for at in range(0, len(tokens), 4):
        item = tokens[at : at + 4]
        if (
            len(item) < 3
            or item[1] != ":"
            or item[3:] not in ([], [","])
            or not _SPECIAL.isdisjoint((item[0], item[2]))
        ):
            raise UsageError(f"the list of {key} is malformed near '{''.join(item)}': write {key}:[A:B,C:D]")
        items.append((item[0], item[2]))
    return tuple(items)


def _text(key: str, value: _Value) -> str:
    if isinstance(value, tuple):
        raise UsageError(f"{key} takes one value, not a list")
    return value


def _whole(key: str, text: str) -> int:
    """The number that C++'s `std::stoull` reads: the leading digits; a negative number wraps around."""
    match = _WHOLE.match(text)
    if match is None or abs(int(match[0])) >= 1 << 64:
        raise UsageError(f"{key} needs a whole number, not '{text}'")
    return int(match[0]) % (1 << 64)


def _fraction(values: dict[str, _Value], key: str, default: float) -> float:
    if key not in values:
        return default
    text = _text(key, values[key])
    match = _DECIMAL.match(text)
    if match is None:
        raise UsageError(f"{key} needs a number, not '{text}'")
    return float(match[0])


def _collection_threshold(values: dict[str, _Value]) -> float:
    threshold = _fraction(values, "garbage_collection_threshold", 0.0)
    if "garbage_collection_threshold" in values and not 0.0 < threshold < 1.0:
        raise UsageError(f"garbage_collection_threshold must lie between 0 and 1, both excluded, and is {threshold:g}")
    return threshold


def _memory_fraction(values: dict[str, _Value]) -> float:
    fraction = _fraction(values, "per_process_memory_fraction", 1.0)
    if not 0.0 <= fraction <= 1.0:
        raise UsageError(f"per_process_memory_fraction must lie in 0 to 1 and is {fraction:g}")
    return fraction


def _switch(values: dict[str, _Value], key: str) -> bool:
    text = _text(key, values.get(key, "False"))
    if text not in ("True", "False"):
        raise UsageError(f"{key} must be True or False, with a capital letter, and is '{text}'")
    return text == "True"


def _mebibytes(values: dict[str, _Value], key: str, default: int, least: int) -> int:
    """The value of `key` in MiB; 0 stays 0 where it is the default that means off."""
    if key not in values:
        return default
    count = _whole(key, _text(key, values[key]))
    if count < least:
        raise UsageError(f"{key} must be at least {least} here, and is {count}")
    return min(count, _MAX_MIB)


def _check_ignored(values: dict[str, _Value]) -> None:
    """Raises for what torch would refuse among the settings that change no device memory."""
    # cudaMallocAsync pools memory inside the driver (cudaMemPool), by rules that NVIDIA does not publish.
    backend = _text("backend", values.get("backend", "native"))
    if backend != "native":
        known = (
            "cudaMallocAsync is CUDA's own allocator, which is not simulated"
            if backend == "cudaMallocAsync"
            else "unknown to torch"
        )
        raise UsageError(f"backend:{backend}: {known}; only backend:native can be")
    for key in sorted(_SWITCHES & values.keys()):
        _switch(values, key)
    for key in sorted(_WHOLE_KEYS & values.keys()):
        _whole(key, _text(key, values[key]))
    threads = _whole(
        "pinned_num_register_threads",
        _text("pinned_num_register_threads", values.get("pinned_num_register_threads", "1")),
    )
    # pinned_max_register_threads() of c10/cuda/CUDAAllocatorConfig.h is 128.
    if threads.bit_count() != 1 or threads > _MAX_REGISTER_THREADS:
        raise UsageError(
            f"pinned_num_register_threads must be a power of two up to {_MAX_REGISTER_THREADS}, and is {threads}"
        )
    if values.get("pinned_reserve_segment_size_mb") == "0":
        raise UsageError("pinned_reserve_segment_size_mb must be greater than 0")


def _divisions(values: list[_Value]) -> tuple[int, ...]:
    """The divisions of each interval. Where the key is there twice, torch writes the second value over the first and leaves what it does not name."""
    divisions = (0,) * NUM_INTERVALS
    for value in values:
        divisions = _divided(divisions, value)
    return divisions


def _divided(before: tuple[int, ...], value: _Value) -> tuple[int, ...]:
    """`before` with one value. The items of a list count in MiB; the first one also covers what lies below it, `>` all above the last."""
    key = "roundup_power2_divisions"
    if isinstance(value, str):
        count = _whole(key, value)
        if count.bit_count() != 1:
            raise UsageError(f"{key} must be a power of two, and is {count}")
        return (count,) * NUM_INTERVALS
    divisions = list(before)
    last, first = 0, True
    for bound, text in value:
        count = _whole(key, text)
        if count.bit_count() > 1:
            raise UsageError(f"{key}: the divisions '{bound}:{text}' must be a power of two, or 0 for none")
        if bound == ">":
            divisions[last + 1 :] = [count] * (NUM_INTERVALS - last - 1)
            continue
        boundary = _whole(key, bound)
        if boundary.bit_count() != 1:
            raise UsageError(f"{key}: the bound of '{bound}:{text}' must be a power of two, in MiB, or '>'")
        index = min(boundary.bit_length() - 1, NUM_INTERVALS - 1)
        if first:
            divisions[:index] = [count] * index
            first = False
        # torch writes each interval by itself; intervals between two listed ones stay as they were, only the ends are filled.
        divisions[index] = count
        last = index
    return tuple(divisions)
