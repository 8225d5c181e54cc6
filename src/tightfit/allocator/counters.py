"""The statistics of the simulated allocator: allocated, active, requested and reserved bytes, their peaks, and the calls of the driver.

The figures have the meaning of torch's `DeviceStats` (c10/core/CachingDeviceAllocator.h), for all pools together.
"""

from collections import Counter


class Counters:
    """Plain numbers, kept up to date by the allocator that inherits them.

    `allocated_bytes` are blocks in use, `requested_bytes` their sizes before rounding, `waiting_bytes` blocks that were freed while another
    stream still uses them, `reserved_bytes` all segments and mapped pages, `inactive_split_bytes` the free pieces of segments that are
    partly in use (expandable ones are left out, as in torch). `segments` counts every segment ever allocated by its size; `driver_log`,
    when it is made a list, records the calls of the driver in order, as (action, address, bytes).
    """

    def __init__(self) -> None:
        self.allocated_bytes = self.peak_allocated_bytes = self.ever_allocated_bytes = 0
        self.requested_bytes = self.peak_requested_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = self.ever_reserved_bytes = 0
        self.inactive_split_bytes = self.peak_inactive_split_bytes = 0
        self.waiting_bytes = 0
        self.num_live = self.peak_num_live = self.num_mallocs = 0
        self.num_segments = self.peak_num_segments = self.ever_num_segments = 0
        self.num_alloc_retries = 0
        self.num_ooms = 0
        self.segments: Counter[int] = Counter()
        self.driver_log: list[tuple[str, int, int]] | None = None
        self._peak_active_bytes = 0

    @property
    def active_bytes(self) -> int:
        """Allocated blocks, and freed ones that another stream still uses."""
        return self.allocated_bytes + self.waiting_bytes

    @property
    def peak_active_bytes(self) -> int:
        """The peak of `active_bytes`."""
        # Without waiting blocks active and allocated are equal, so `_count_malloc` keeps the extra peak only while some wait.
        return max(self._peak_active_bytes, self.peak_allocated_bytes)

    def reset_peaks(self) -> None:
        """Restarts every peak at the current value, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_requested_bytes = self.requested_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_inactive_split_bytes = self.inactive_split_bytes
        self.peak_num_live = self.num_live
        self.peak_num_segments = self.num_segments
        self._peak_active_bytes = self.active_bytes

    def memory_stats(self) -> dict[str, int]:
        """The figures under their names in `torch.cuda.memory_stats`."""
        # "active" accumulates as "allocated" does: both grow in alloc_found_block. They differ in when a free is subtracted.
        gauges = {
            "allocated_bytes": (self.allocated_bytes, self.peak_allocated_bytes, self.ever_allocated_bytes),
            "active_bytes": (self.active_bytes, self.peak_active_bytes, self.ever_allocated_bytes),
            "reserved_bytes": (self.reserved_bytes, self.peak_reserved_bytes, self.ever_reserved_bytes),
            "allocation": (self.num_live, self.peak_num_live, self.num_mallocs),
            "segment": (self.num_segments, self.peak_num_segments, self.ever_num_segments),
        }
        stats = {"num_alloc_retries": self.num_alloc_retries, "num_ooms": self.num_ooms}
        for name, (current, peak, ever) in gauges.items():
            stats |= {
                f"{name}.all.current": current,
                f"{name}.all.peak": peak,
                f"{name}.all.allocated": ever,
                f"{name}.all.freed": ever - current,
            }
        stats["requested_bytes.all.current"] = self.requested_bytes
        stats["requested_bytes.all.peak"] = self.peak_requested_bytes
        stats["inactive_split_bytes.all.current"] = self.inactive_split_bytes
        stats["inactive_split_bytes.all.peak"] = self.peak_inactive_split_bytes
        return stats

    def _count_malloc(self, size: int, num_bytes: int) -> None:
        """Counts a block of `size` bytes that was allocated for a request of `num_bytes`."""
        self.num_mallocs += 1
        self.ever_allocated_bytes += size
        self.requested_bytes += num_bytes
        # Peaks can only move up here: every other change of allocated bytes is a decrease.
        self.num_live += 1
        self.allocated_bytes += size
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, self.allocated_bytes)
        if self.waiting_bytes:
            self._peak_active_bytes = max(self._peak_active_bytes, self.active_bytes)
        self.peak_requested_bytes = max(self.peak_requested_bytes, self.requested_bytes)
        self.peak_num_live = max(self.peak_num_live, self.num_live)

    def _count_split(self, num_bytes: int) -> None:
        """Adds `num_bytes`, which can be negative, to the free pieces of split segments."""
        self.inactive_split_bytes += num_bytes
        self.peak_inactive_split_bytes = max(self.peak_inactive_split_bytes, self.inactive_split_bytes)

    def count_given(self, action: str, address: int, num_bytes: int) -> None:
        """Counts memory allocated from the driver: a segment, or pages of an expandable one."""
        self.reserved_bytes += num_bytes
        self.ever_reserved_bytes += num_bytes
        self.peak_reserved_bytes = max(self.peak_reserved_bytes, self.reserved_bytes)
        self.segments[num_bytes] += 1
        # Mapping pages changes reserved bytes but not the number of segments in torch's DeviceStats.
        if action == "segment_alloc":
            self.num_segments += 1
            self.ever_num_segments += 1
            self.peak_num_segments = max(self.peak_num_segments, self.num_segments)
        if self.driver_log is not None:
            self.driver_log.append((action, address, num_bytes))

    def count_returned(self, action: str, address: int, num_bytes: int) -> None:
        """Counts memory freed to the driver."""
        self.reserved_bytes -= num_bytes
        self.num_segments -= action == "segment_free"
        if self.driver_log is not None:
            self.driver_log.append((action, address, num_bytes))

    def count_adopted(self, num_bytes: int, *, is_segment: bool) -> None:
        """Counts `num_bytes` as reserved before the start: as one segment, or as pages of an expandable one."""
        self.reserved_bytes += num_bytes
        self.num_segments += is_segment
