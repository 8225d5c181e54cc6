"""Memory that went back to the driver: by the program's wish it does so in every replay, by the allocator's own only where nothing is different."""

import pickle

import pytest

from tightfit.allocator.caching import CachingAllocator, OutOfDeviceMemory
from tightfit.allocator.settings import AllocatorSettings
from tightfit.recordings.read import read_recording
from tightfit.recordings.replayed import replay
from tightfit.recordings.returns import returns_of
from tightfit.units import GIB, MIB


def frames(function):
    return [{"filename": "train.py", "line": 1, "name": function}]


class Card:
    """A program on a card with a limit, recorded as torch does: what the allocator does for a request has the stack of the request."""

    def __init__(self, conf="", capacity_bytes=None, has_stacks=True):
        self.conf, self.has_stacks = conf, has_stacks
        self.allocator = CachingAllocator(
            AllocatorSettings.parse(conf), capacity_bytes=capacity_bytes, total_bytes=capacity_bytes
        )
        self.log = self.allocator.driver_log = []
        self.events = []
        self.live = {}

    def write(self, action, address, num_bytes, lane, function, **more):
        stack = frames(function) if self.has_stacks else []
        pool = {"stream": lane, "pool_id": (0, 0)} if lane >= 0 else {"stream": 0, "pool_id": (0, -lane)}
        where = {"device_free": more["free"]} if more else {"addr": address}
        self.events.append({"action": action, "size": num_bytes, "time_us": 0, "frames": stack, **pool, **where})

    def write_calls(self, since, lane, function):
        for action, address, num_bytes in self.log[since:]:
            self.write(action, address, num_bytes, lane, function)

    def malloc(self, num_bytes, function="forward", lane=0):
        since = len(self.log)
        try:
            block = self.allocator.malloc(num_bytes, lane)
        except OutOfDeviceMemory as error:
            self.write_calls(since, lane, function)
            self.write("oom", 0, error.requested_bytes, lane, function, free=error.free_bytes)
            return None
        self.write_calls(since, lane, function)
        self.write("alloc", block.address, num_bytes, lane, function)
        self.live[block] = lane
        return block

    def free(self, block):
        lane = self.live.pop(block)
        for action in ("free_requested", "free_completed"):
            self.write(action, block.address, block.requested_bytes, lane, "backward")
        self.allocator.free(block)

    def empty_cache(self):
        since = len(self.log)
        self.allocator.empty_cache()
        self.write_calls(since, 0, "empty_cache")

    def drop_pool(self, lane):
        since = len(self.log)
        for block in self.allocator.pools.free_blocks():
            if block.pool.stream == lane:
                self.allocator.driver.give_back(block)
        self.write_calls(since, lane, "__del__")

    def read(self, path):
        heads = {}
        for block in [*self.live, *self.allocator.pools.free_blocks()]:
            head = block
            while head.prev is not None and head.prev.is_mapped:
                head = head.prev
            heads[head.address] = head
        whole = {
            "segments": [self.segment(head) for head in heads.values()],
            "device_traces": [self.events],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.conf},
        }
        path.write_bytes(pickle.dumps(whole))
        return read_recording(path)

    def segment(self, head):
        lane, blocks, block = head.pool.stream, [], head
        while block is not None and block.is_mapped:
            state = "inactive" if block.is_free else "active_allocated"
            blocks.append({"size": block.size, "requested_size": block.requested_bytes, "state": state})
            block = block.next
        return {
            "device": 0,
            "address": head.address,
            "total_size": sum(entry["size"] for entry in blocks),
            "stream": max(lane, 0),
            "segment_pool_id": (0, max(-lane, 0)),
            "segment_type": "small" if head.pool.is_small else "large",
            "is_expandable": head.segment is not None,
            "blocks": blocks,
        }


def short_of_memory(has_stacks=True, conf=""):
    """40 MiB are cached when 50 MiB are asked for on a card of 80."""
    card = Card(conf, capacity_bytes=80 * MIB, has_stacks=has_stacks)
    card.free(card.malloc(40 * MIB))
    card.malloc(50 * MIB)
    return card


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_second_try_is_part_of_the_run_as_it_was(tmp_path, conf):
    card = short_of_memory(conf=conf)
    card.free(card.malloc(20 * MIB))
    assert card.allocator.num_alloc_retries == 1
    found = card.read(tmp_path / "run.pickle")
    again = replay(found)
    assert again.agrees
    assert again.oom is None
    assert (again.alloc_retries, again.peak_reserved_bytes) == (
        card.allocator.num_alloc_retries,
        card.allocator.peak_reserved_bytes,
    )


def test_a_larger_card_needs_no_second_try(tmp_path):
    found = short_of_memory().read(tmp_path / "run.pickle")
    larger = replay(found, capacity_bytes=GIB)
    assert (larger.alloc_retries, larger.peak_reserved_bytes) == (0, 90 * MIB)
    smaller = replay(found, capacity_bytes=60 * MIB)
    assert (smaller.alloc_retries, smaller.peak_reserved_bytes) == (1, 50 * MIB)


def test_the_program_gives_its_cache_back_on_every_card(tmp_path):
    card = Card()
    card.free(card.malloc(40 * MIB))
    card.empty_cache()
    card.malloc(50 * MIB)
    found = card.read(tmp_path / "run.pickle")
    assert replay(found).agrees
    assert replay(found).alloc_retries == 0
    assert replay(found, capacity_bytes=GIB).peak_reserved_bytes == 50 * MIB


def test_without_stacks_a_return_counts_as_the_programs(tmp_path):
    found = short_of_memory(has_stacks=False).read(tmp_path / "run.pickle")
    assert replay(found).agrees
    assert replay(found, capacity_bytes=GIB).peak_reserved_bytes == 50 * MIB


def collecting(has_stacks=True):
    """A card of 100 MiB that collects above 60: two old segments of 30 MiB when one of 32 is asked for, and a new one of 20."""
    card = Card("garbage_collection_threshold:0.6", capacity_bytes=100 * MIB, has_stacks=has_stacks)
    first, second, young = card.malloc(30 * MIB), card.malloc(30 * MIB), card.malloc(20 * MIB)
    card.free(first)
    card.free(second)
    for _ in range(6):
        card.free(card.malloc(30 * MIB))
    card.free(young)
    card.malloc(32 * MIB)
    return card


@pytest.mark.parametrize("has_stacks", [True, False])
def test_collected_garbage_is_that_of_the_recorded_card(tmp_path, has_stacks):
    card = collecting(has_stacks)
    freed = [event["size"] for event in card.events if event["action"] == "segment_free"]
    assert 0 < sum(freed) < 80 * MIB, "a part of the cache was collected"
    found = card.read(tmp_path / "run.pickle")
    (returned,) = returns_of(found.devices[0], found.settings)
    assert returned.is_by_request
    again = replay(found)
    assert again.agrees
    assert (again.alloc_retries, again.peak_reserved_bytes) == (0, card.allocator.peak_reserved_bytes)
    larger = replay(found, capacity_bytes=GIB)
    assert larger.peak_reserved_bytes == 112 * MIB, "nothing is collected below the threshold of a larger card"
    same = replay(found, capacity_bytes=100 * MIB)
    assert same.peak_reserved_bytes == card.allocator.peak_reserved_bytes
    assert same.segments == again.segments


def test_blocks_too_large_to_split_are_given_up_for_a_request(tmp_path):
    card = Card("max_split_size_mb:20", capacity_bytes=130 * MIB)
    large, other = card.malloc(40 * MIB), card.malloc(60 * MIB)
    card.free(large)
    card.malloc(70 * MIB)
    card.free(other)
    card.malloc(50 * MIB)
    found = card.read(tmp_path / "run.pickle")
    assert replay(found).agrees
    assert replay(found).peak_reserved_bytes == card.allocator.peak_reserved_bytes


def test_a_recorded_failure_is_told(tmp_path):
    card = Card(capacity_bytes=60 * MIB)
    kept = card.malloc(40 * MIB)
    assert card.malloc(50 * MIB) is None
    card.free(kept)
    card.malloc(50 * MIB)
    found = card.read(tmp_path / "run.pickle")
    again = replay(found)
    assert again.agrees
    assert again.alloc_retries == card.allocator.num_alloc_retries
    assert (again.oom.event, again.oom.requested_bytes, again.oom.allocated_bytes, again.oom.free_bytes) == (
        2,
        50 * MIB,
        40 * MIB,
        20 * MIB,
    )
    assert again.peak_reserved_bytes == 50 * MIB, "the program went on, and so does the replay"
    assert replay(found, capacity_bytes=GIB).oom is None


@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_private_pools_keep_their_cache_until_they_are_dropped(tmp_path, conf):
    card = Card(conf)
    card.free(card.malloc(40 * MIB))
    card.free(card.malloc(60 * MIB, lane=-1))
    card.empty_cache()
    card.drop_pool(-1)
    card.malloc(20 * MIB)
    found = card.read(tmp_path / "run.pickle")
    assert [(one.begin, one.end) for one in returns_of(found.devices[0], found.settings)] == [(8, 10)]
    again = replay(found)
    assert again.agrees
    assert again.peak_reserved_bytes == 100 * MIB
    assert replay(found, capacity_bytes=GIB).peak_reserved_bytes == 100 * MIB


def test_a_private_pool_is_no_reserve_for_others(tmp_path):
    card = Card()
    card.free(card.malloc(60 * MIB, lane=-1))
    card.malloc(60 * MIB)
    found = card.read(tmp_path / "run.pickle")
    assert replay(found).peak_reserved_bytes == 120 * MIB
    assert replay(found, capacity_bytes=100 * MIB).oom.event == 5


@pytest.mark.parametrize(("share", "fits"), [(0.5, False), (0.75, True)])
def test_a_fraction_in_the_settings_is_one_of_the_memory(tmp_path, share, fits):
    card = Card()
    card.malloc(60 * MIB)
    found = card.read(tmp_path / "run.pickle")
    settings = AllocatorSettings.parse(f"per_process_memory_fraction:{share}")
    assert (replay(found, settings=settings, capacity_bytes=100 * MIB).oom is None) == fits
