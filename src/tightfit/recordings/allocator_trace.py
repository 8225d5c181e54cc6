"""Records a simulated allocator in the format of torch's own recordings: a trace of events, and the segments at the end.

The format is that of `torch.cuda.memory._snapshot` (written by torch/csrc/cuda/Module.cpp of torch 2.13). Each allocation also has a `category`,
by which torch's viewer colours, and `user_metadata`, which holds the module here.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.pools import Block
from tightfit.allocator.settings import NUM_INTERVALS, AllocatorSettings
from tightfit.units import MIB

Frames = Sequence[Mapping[str, Any]]

NO_FRAMES: Frames = []
# The viewer refuses a trace whose categories do not include this one (annotate_snapshot in MemoryViz.js); segments have it.
NO_CATEGORY = "unknown"
_DEFAULT_POOL = (0, 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Held:
    block: Block
    address: int
    num_bytes: int
    frames: Frames


class TraceBuilder:
    """Records the events of one allocator as they are reported to it; `time_us` is the time of the next event."""

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self.events: list[dict[str, Any]] = []
        self.time_us = 0
        self._log = allocator.driver_log = []
        # Addresses are copied on allocation: a freed block merges with its neighbours, which changes its own address.
        self._held: dict[int, _Held] = {}
        self._waiting: list[_Held] = []
        self._streams: set[int] = set()

    def begin(self) -> None:
        """Begins the recording: what was reported so far shows in the segments, but not as events."""
        self._settle(0)
        self.events.clear()

    def allocated(self, key: int, block: Block, frames: Frames = NO_FRAMES, *, category: str, module: str = "") -> int:
        """Reports that `block` was allocated, under `key` until it is freed; returns the index of its event."""
        stream = block.pool.stream
        self._streams.add(stream)
        self._settle(stream)
        self._held[key] = _Held(block=block, address=block.address, num_bytes=block.requested_bytes, frames=frames)
        extra = {"category": category, "user_metadata": module}
        self._add("alloc", block.address, block.requested_bytes, stream, frames, extra)
        return len(self.events) - 1

    def freed(self, key: int) -> None:
        """Reports that the block `key` was freed."""
        held = self._held.pop(key)
        self._note(held, "free_requested")
        if held.block.uses:
            self._waiting.append(held)
        else:
            self._note(held, "free_completed")

    def caught_up(self) -> None:
        """Reports that the streams were synchronised, or the cache was emptied."""
        self._settle(0)

    def failed(self, num_bytes: int, free_bytes: int, frames: Frames = NO_FRAMES) -> None:
        """Reports that an allocation of `num_bytes` (rounded) failed, with `free_bytes` left on the GPU."""
        self._settle(0)
        self.events.append(
            {
                "action": "oom",
                "device_free": free_bytes,
                "size": num_bytes,
                "stream": 0,
                "time_us": self.time_us,
                "frames": frames,
                "pool_id": _DEFAULT_POOL,
            }
        )

    def segments(self) -> list[dict[str, Any]]:
        """The current segments by address; of an expandable one each mapped range."""
        frames_at = {held.address: held.frames for held in self._held.values()}
        chains = {}
        for block in self._known_blocks():
            first = block
            # torch's segments list all of their blocks, so each chain is followed from its head.
            while first.prev is not None:
                first = first.prev
            chains[first.address] = first
        return [_segment(run, frames_at) for _, first in sorted(chains.items()) for run in _mapped_runs(first) if run]

    def _known_blocks(self) -> Iterable[Block]:
        for held in (*self._held.values(), *self._waiting):
            yield held.block
        # The allocator lists free blocks only; segments are found from them and from the allocated ones.
        for stream in self._streams:
            for is_small in (True, False):
                yield from self.allocator.pools.of(stream, is_small=is_small).free_blocks()

    def _settle(self, stream: int) -> None:
        """Adds what the allocator did by itself: completed frees, then its driver calls."""
        still = []
        for held in self._waiting:
            if held.block.uses:
                still.append(held)
            else:
                self._note(held, "free_completed")
        self._waiting = still
        for action, address, num_bytes in self._log:
            self._add(action, address, num_bytes, stream, NO_FRAMES, {"category": NO_CATEGORY})
        self._log.clear()

    def _note(self, held: _Held, action: str) -> None:
        self._add(action, held.address, held.num_bytes, held.block.pool.stream, NO_FRAMES, {})

    def _add(
        self, action: str, address: int, num_bytes: int, stream: int, frames: Frames, extra: dict[str, Any]
    ) -> None:
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": num_bytes,
                "stream": stream,
                "time_us": self.time_us,
                "frames": frames,
                "pool_id": _DEFAULT_POOL,
                **extra,
            }
        )


def _mapped_runs(first: Block) -> Iterable[list[Block]]:
    """The blocks of a segment from its first one, split at unmapped ranges."""
    run: list[Block] = []
    block: Block | None = first
    while block is not None:
        if block.is_mapped:
            run.append(block)
        else:
            yield run
            run = []
        block = block.next
    yield run


def _segment(run: Sequence[Block], frames_at: dict[int, Frames]) -> dict[str, Any]:
    first = run[0]
    blocks = [
        {
            "address": block.address,
            "size": block.size,
            "requested_size": 0 if block.is_free else block.requested_bytes,
            "state": _state(block),
            "frames": frames_at.get(block.address, NO_FRAMES) if block.is_live else NO_FRAMES,
        }
        for block in run
    ]
    return {
        "device": 0,
        "address": first.address,
        "total_size": sum(block.size for block in run),
        "allocated_size": sum(block.size for block in run if block.is_live),
        "active_size": sum(block.size for block in run if not block.is_free),
        "requested_size": sum(block["requested_size"] for block in blocks),
        "stream": first.pool.stream,
        "segment_type": "small" if first.pool.is_small else "large",
        "segment_pool_id": _DEFAULT_POOL,
        "is_expandable": first.segment is not None,
        "frames": NO_FRAMES,
        "blocks": blocks,
    }


def _state(block: Block) -> str:
    if block.is_free:
        return "inactive"
    return "active_allocated" if block.is_live else "active_pending_free"


def plain_settings(settings: AllocatorSettings) -> dict[str, Any]:
    """`settings` in the form of a recording: the text of `PYTORCH_CUDA_ALLOC_CONF`, and the figures in force."""
    divisions = {str(1 << power): settings.roundup_power2_divisions[power] for power in range(NUM_INTERVALS)}
    return {
        "PYTORCH_CUDA_ALLOC_CONF": settings_text(settings),
        "max_split_size": -1 if settings.max_split_size_bytes is None else settings.max_split_size_bytes,
        "garbage_collection_threshold": settings.garbage_collection_threshold,
        "expandable_segments": settings.expandable_segments,
        "roundup_power2_divisions": divisions,
    }


def settings_text(settings: AllocatorSettings) -> str:
    """The `PYTORCH_CUDA_ALLOC_CONF` for `settings`: everything that is not torch's default."""
    usual = AllocatorSettings()
    divisions = settings.roundup_power2_divisions
    written = {
        "max_split_size_mb": (settings.max_split_size_bytes or 0) // MIB or None,
        "max_non_split_rounding_mb": settings.max_non_split_rounding_bytes // MIB,
        "garbage_collection_threshold": settings.garbage_collection_threshold or None,
        "roundup_power2_divisions": "[" + ",".join(f"{1 << at}:{n}" for at, n in enumerate(divisions)) + "]",
        "expandable_segments": settings.expandable_segments,
        "large_segment_size_mb": settings.large_segment_size_bytes // MIB,
        "per_process_memory_fraction": settings.per_process_memory_fraction,
    }
    is_usual = {
        # Its default follows the large segment size (AcceleratorAllocatorConfig), and not a constant.
        "max_non_split_rounding_mb": settings.max_non_split_rounding_bytes == settings.large_segment_size_bytes,
        "roundup_power2_divisions": divisions == usual.roundup_power2_divisions,
        "expandable_segments": not settings.expandable_segments,
        "large_segment_size_mb": settings.large_segment_size_bytes == usual.large_segment_size_bytes,
        "per_process_memory_fraction": settings.per_process_memory_fraction == usual.per_process_memory_fraction,
    }
    return ",".join(f"{key}:{value}" for key, value in written.items() if value is not None and not is_usual.get(key))
