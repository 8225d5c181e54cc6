"""The allocator settings that are worth a trial on a recording, and those that must not be recommended whatever a trial says.

Thresholds come from the sizes that the program allocates: `max_split_size` changes something only where it separates two of them.
A candidate is text in the form of `PYTORCH_CUDA_ALLOC_CONF`, because that is what a user pastes.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from tightfit.allocator.pools import MIN_LARGE_BYTES, SMALL_BYTES
from tightfit.allocator.settings import NUM_INTERVALS, AllocatorSettings
from tightfit.errors import UsageError
from tightfit.units import MIB

EXPANDABLE = "expandable_segments:True"
_LARGE_SEGMENT_MIB = 20
# torch 2.10 and later accept 20, earlier versions want more than a large segment.
_MIN_SPLIT_MIB = _LARGE_SEGMENT_MIB + 1
_MIN_LARGE_SEGMENT_MIB = MIN_LARGE_BYTES // MIB + 1
# Every threshold is a replay of the whole recording.
_NUM_THRESHOLDS = 12
# 1 TiB: any cached block of that size or less may serve an oversize request.
_UNLIMITED_MIB = 1 << 20

NEEDS: Mapping[str, str] = {
    "expandable_segments": "Linux",
    "large_segment_size_mb": "torch >= 2.10",
}
"""What a key needs where it is not understood everywhere: the CUDA allocator of Windows has no expandable segments; the size of large
segments became a setting in torch 2.10 (c10/core/AllocatorConfig.h)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Settings that are known to be bad, and why."""

    settings: str
    reason: str


def keys_of(text: str) -> dict[str, str]:
    """The keys of a well-formed settings string with their values, lists as one text."""
    found, depth, piece = {}, 0, ""
    for letter in f"{''.join(text.split())},":
        depth += (letter == "[") - (letter == "]")
        if letter == "," and depth == 0:
            key, _, value = piece.partition(":")
            found |= {key: value} if key else {}
            piece = ""
        else:
            piece += letter
    return found


def joined(*texts: str) -> str | None:
    """Several settings as one string, later ones overriding earlier ones; None where torch or `known_bad` refuses the combination."""
    keys: dict[str, str] = {}
    for text in texts:
        # torch would accept a key twice, with the last value; here each is written once.
        keys |= keys_of(text)
    whole = ",".join(f"{key}:{value}" for key, value in keys.items())
    if known_bad(whole) is not None:
        return None
    try:
        AllocatorSettings.parse(whole)
    except UsageError:
        return None
    return whole


def known_bad(text: str, *, is_windows: bool = False) -> str | None:
    """Why the settings must not be recommended, or None.

    Sources: pytorch issue #123548 (unbounded growth), pull request #134338 (what does not apply to expandable segments), pull request
    #192722 (heap overflow with the two pinned keys).
    """
    keys = keys_of(text)
    is_expandable = keys.get("expandable_segments") == "True"
    if is_expandable and is_windows:
        return "expandable_segments is not supported on Windows: torch warns and ignores it"
    if is_expandable and "max_split_size_mb" in keys:
        return "max_split_size_mb with expandable_segments:True lets reserved memory grow without bound (pytorch issue #123548)"
    if is_expandable and "garbage_collection_threshold" in keys:
        return "garbage_collection_threshold never frees expandable segments (pytorch pull request #134338)"
    # Host memory: no trial on the device's allocator could show what these do.
    pinned = [key for key in ("pinned_max_round_threshold_mb", "pinned_max_cached_size_mb") if key in keys]
    if pinned:
        return f"{pinned[0]} moves no byte on the device, and can overflow the host heap (pytorch pull request #192722)"
    return None


def without_effect(text: str, *, has_limit: bool) -> str | None:
    """Why some of the settings change nothing, or None. `has_limit`: the allocator is bounded."""
    keys = keys_of(text)
    if "garbage_collection_threshold" in keys and not has_limit and "per_process_memory_fraction" not in keys:
        return "garbage_collection_threshold acts only below a memory limit (set_per_process_memory_fraction)"
    if "max_non_split_rounding_mb" in keys and "max_split_size_mb" not in keys:
        return "max_non_split_rounding_mb acts only together with max_split_size_mb"
    return None


def needs(text: str) -> tuple[str, ...]:
    """The requirements of the settings."""
    return tuple(need for key, need in NEEDS.items() if key in keys_of(text) and keys_of(text)[key] != "False")


def spelled(settings: AllocatorSettings) -> str:
    """The settings as `AllocatorSettings.parse` reads them, without those that have torch's default; empty for the default."""
    plain = AllocatorSettings()
    parts = []
    if settings.expandable_segments:
        parts.append(EXPANDABLE)
    if settings.large_segment_size_bytes != plain.large_segment_size_bytes:
        parts.append(f"large_segment_size_mb:{settings.large_segment_size_bytes // MIB}")
    if settings.max_split_size_bytes is not None:
        parts.append(f"max_split_size_mb:{settings.max_split_size_bytes // MIB}")
    # torch's default follows the size of large segments.
    if settings.max_non_split_rounding_bytes != settings.large_segment_size_bytes:
        parts.append(f"max_non_split_rounding_mb:{settings.max_non_split_rounding_bytes // MIB}")
    if any(count > 1 for count in settings.roundup_power2_divisions):
        parts.append(divisions_text(settings.roundup_power2_divisions))
    if settings.garbage_collection_threshold:
        parts.append(f"garbage_collection_threshold:{settings.garbage_collection_threshold:g}")
    if settings.per_process_memory_fraction != plain.per_process_memory_fraction:
        parts.append(f"per_process_memory_fraction:{settings.per_process_memory_fraction:g}")
    return ",".join(parts)


def divisions_text(divisions: tuple[int, ...]) -> str:
    """`roundup_power2_divisions` for these divisions of each interval, as short as the form allows; 1 and 0 are both no rounding."""
    counts = [count if count > 1 else 1 for count in divisions]
    if len(set(counts)) == 1:
        return f"roundup_power2_divisions:{counts[0]}"
    # Only the part that differs from what follows is written out, as users paste the result.
    last = max(at for at in range(NUM_INTERVALS) if counts[at] != counts[-1])
    # The first item also covers all below it, and what is not named between two items is off.
    first = next(at for at in range(NUM_INTERVALS) if counts[at] != counts[at + 1])
    named = [at for at in range(first, last + 1) if at == first or counts[at] > 1]
    items = [f"{1 << at}:{counts[at]}" for at in named]
    if counts[-1] > 1:
        # `>` begins right after the last interval that is named.
        items += [f"{1 << last}:1"] if named[-1] != last else []
        items.append(f">:{counts[-1]}")
    return f"roundup_power2_divisions:[{','.join(items)}]"


def split_thresholds_mib(requests: Mapping[int, int]) -> list[int]:
    """Values of `max_split_size_mb` that separate the requested sizes, ascending: each just above one size and not above the next.

    The smallest is 21: torch before 2.10 requires more than the 20 MiB of a large segment.
    """
    return sorted({_MIN_SPLIT_MIB, *(-(-size // MIB) for size in requests if size > _MIN_SPLIT_MIB * MIB)})


def thinned(values: list[int], count: int = _NUM_THRESHOLDS) -> list[int]:
    """At most `count` of the values, evenly spaced in their order, both ends included."""
    if len(values) <= count:
        return values
    return sorted({values[round(at * (len(values) - 1) / (count - 1))] for at in range(count)})


def roundings() -> Iterator[str]:
    """One number of divisions for all sizes."""
    # Powers of two, which torch insists on; from 64 divisions on nearly nothing is rounded.
    for count in (2, 4, 8, 16, 32, 64):
        yield f"roundup_power2_divisions:{count}"


def large_segments(*, is_expandable: bool) -> Iterator[str]:
    """Sizes of large segments; with expandable segments these are the pages, and smaller ones waste less."""
    for size_mib in (_MIN_LARGE_SEGMENT_MIB, 12, 16, 32, 64) if is_expandable else (12, 16, 32, 64, 128, 256):
        yield f"large_segment_size_mb:{size_mib}"


def non_split_roundings(threshold_mib: int) -> Iterator[str]:
    """Values of how much larger than the request an oversize block may be; the last is unlimited."""
    for rounding_mib in (2 * _LARGE_SEGMENT_MIB, threshold_mib // 2, threshold_mib, 4 * threshold_mib, _UNLIMITED_MIB):
        if rounding_mib > _LARGE_SEGMENT_MIB:
            yield f"max_non_split_rounding_mb:{rounding_mib}"


def busy_intervals(requests: Mapping[int, int], min_share: float = 0.01) -> list[int]:
    """The intervals between powers of two (as `roundup_power2_divisions` counts them) with several sizes and a relevant share of bytes, most first."""
    traffic: dict[int, int] = {}
    variety: dict[int, int] = {}
    for size, count in requests.items():
        interval = min(max(size.bit_length() - SMALL_BYTES.bit_length(), 0), NUM_INTERVALS - 1)
        traffic[interval] = traffic.get(interval, 0) + size * count
        variety[interval] = variety.get(interval, 0) + 1
    min_bytes = min_share * sum(traffic.values())
    # An interval with one size has nothing to make equal.
    busy = [at for at in traffic if variety[at] > 1 and traffic[at] >= min_bytes]
    return sorted(busy, key=lambda at: -traffic[at])
