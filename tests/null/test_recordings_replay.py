"""Replays: of real recordings where they stand beside the checkout, and of recordings that the simulated allocator made itself."""

import json
import pickle
import random
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.settings import AllocatorSettings
from tightfit.cli.replay import replay as replay_command
from tightfit.errors import RecordingError, UsageError
from tightfit.recordings.read import read_recording
from tightfit.recordings.replayed import replay
from tightfit.units import GIB, KIB, MIB

REAL = sorted((Path(__file__).parents[3] / "shared/data/snapshots").glob("*.pickle"))


class Recorder:
    """Drives an allocator and writes down what torch would have: a recording that can begin at any moment."""

    def __init__(self, conf="", place_segment=None, device=0):
        self.conf = conf
        self.device = device
        self.place_segment = place_segment or (lambda num_bytes, stream: (1 << 44) + len(self.streams) * (2 << 40))
        self.streams = {}
        self.allocator = CachingAllocator(AllocatorSettings.parse(conf), place_segment=self.place)
        self.live = []
        self.waiting = []
        self.begin()

    def begin(self):
        self.events = []
        self.allocator.driver_log = []
        self.allocator.reset_peaks()
        self.allocator.segments.clear()

    def place(self, num_bytes, stream):
        address = self.place_segment(num_bytes, stream)
        self.streams[address] = stream
        return address

    def write(self, action, address, num_bytes, stream):
        event = {
            "action": action,
            "addr": address,
            "size": num_bytes,
            "stream": stream,
            "time_us": 1000 + len(self.events),
        }
        self.events.append(event | {"frames": []})

    def write_driver_calls(self, since):
        for action, address, num_bytes in self.allocator.driver_log[since:]:
            start = max(start for start in self.streams if start <= address)
            self.write(action, address, num_bytes, self.streams[start])

    def malloc(self, num_bytes, stream=0):
        since = len(self.allocator.driver_log)
        block = self.allocator.malloc(num_bytes, stream)
        self.write_driver_calls(since)
        self.write("alloc", block.address, num_bytes, stream)
        self.live.append(block)
        return block

    def free(self, block):
        self.live.remove(block)
        where = (block.address, block.requested_bytes, block.pool.stream)
        self.write("free_requested", *where)
        if block.uses:
            self.waiting.append((block, where))
        else:
            self.write("free_completed", *where)
        self.allocator.free(block)

    def complete(self):
        if self.waiting:
            block, where = self.waiting.pop(0)
            self.write("free_completed", *where)
            self.allocator.complete(block)

    def empty_cache(self):
        while self.waiting:
            self.complete()
        since = len(self.allocator.driver_log)
        self.allocator.empty_cache()
        self.write_driver_calls(since)

    def snapshot(self):
        pools = [*self.allocator.pools.small.values(), *self.allocator.pools.large.values()]
        known = [b for pool in pools for b in pool.blocks.values()] + self.live + [b for b, _ in self.waiting]
        heads = [b for b in known if b.prev is None or not b.prev.is_mapped]
        return {
            "segments": sorted((self.segment(head) for head in heads), key=lambda segment: segment["address"]),
            "device_traces": [[]] * self.device + [self.events],
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.conf},
        }

    def segment(self, block):
        head, blocks = block, []
        while block is not None and block.is_mapped:
            state = "inactive" if block.is_free else "active_allocated" if block.is_live else "active_awaiting_free"
            blocks.append(
                {"address": block.address, "size": block.size, "requested_size": block.requested_bytes, "state": state}
            )
            block = block.next
        return {
            "device": self.device,
            "address": head.address,
            "total_size": sum(block["size"] for block in blocks),
            "stream": head.pool.stream,
            "segment_type": "small" if head.pool.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": head.segment is not None,
            "blocks": blocks,
        }

    def save(self, path):
        path.write_bytes(pickle.dumps(self.snapshot()))
        return path


def recorded_totals(path):
    """The peak of reserved bytes and the segments that were given, read off the recorded segment events alone."""
    whole = pickle.loads(path.read_bytes())
    given, reserved, peak = Counter(), 0, 0
    events = [event for trace in whole["device_traces"] for event in trace]
    for event in events:
        if event["action"] == "segment_alloc":
            given[event["size"]] += 1
            reserved += event["size"]
        elif event["action"] == "segment_free":
            reserved -= event["size"]
        peak = max(peak, reserved)
    start = sum(segment["total_size"] for segment in whole["segments"]) - reserved
    return start + peak, given


@pytest.mark.skipif(not REAL, reason="no real recordings beside the checkout (../shared/data/snapshots)")
@pytest.mark.parametrize("path", REAL, ids=lambda path: path.stem)
def test_real_recordings_are_reproduced_to_the_byte(path):
    result = replay(read_recording(path))
    peak, given = recorded_totals(path)
    assert result.peak_reserved_bytes == peak
    assert result.segments == given
    assert result.agrees
    assert result.num_moved_blocks == 0
    assert result.oom is None


def scattered(seed):
    """Puts segments at addresses that go up and down, far apart."""
    spots = iter(random.Random(seed).sample(range(200), 200))
    return lambda num_bytes, stream: (1 << 44) + next(spots) * (2 << 40)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["malloc", "malloc", "malloc", "free", "free", "use", "complete", "empty"]),
        st.one_of(st.integers(1, 8 * KIB), st.integers(1, 3 * MIB), st.integers(MIB, 40 * MIB)),
        st.integers(0, 1),
    ),
    max_size=60,
)


def drive(recorder, steps):
    for what, number, stream in steps:
        if what == "malloc":
            recorder.malloc(number, stream)
        elif what == "complete":
            recorder.complete()
        elif what == "empty":
            recorder.empty_cache()
        elif recorder.live:
            block = recorder.live[number % len(recorder.live)]
            if what == "free":
                recorder.free(block)
            else:
                block.record_stream(9)


@pytest.mark.parametrize(
    "conf",
    ["", "roundup_power2_divisions:4", "large_segment_size_mb:32", "expandable_segments:True", "max_split_size_mb:20"],
)
@settings(max_examples=100, deadline=None)
@given(before=STEPS, during=STEPS, seed=st.integers(0, 999))
def test_a_recording_of_any_run_from_any_start_is_reproduced(tmp_path_factory, conf, before, during, seed):
    recorder = Recorder(conf, place_segment=scattered(seed))
    drive(recorder, before)
    recorder.begin()
    drive(recorder, during)
    result = replay(read_recording(recorder.save(tmp_path_factory.getbasetemp() / "run.pickle")))
    allocator = recorder.allocator
    assert result.peak_reserved_bytes == allocator.peak_reserved_bytes
    assert result.segments == allocator.segments
    assert result.agrees
    assert result.num_moved_blocks == 0
    assert result.events == len(recorder.events)


@pytest.fixture
def cold(tmp_path):
    """Three requests of 12, 30 and 50 MiB, with the first two freed before the third."""
    recorder = Recorder()
    blocks = [recorder.malloc(12 * MIB), recorder.malloc(30 * MIB)]
    for block in blocks:
        recorder.free(block)
    recorder.malloc(50 * MIB)
    return recorder.save(tmp_path / "cold.pickle")


def test_a_limit_makes_the_cache_be_given_back(cold):
    free = replay(read_recording(cold))
    assert (free.peak_reserved_bytes, free.alloc_retries, free.agrees) == (92 * MIB, 0, True)
    tight = replay(read_recording(cold), capacity_bytes=60 * MIB)
    assert (tight.peak_reserved_bytes, tight.alloc_retries, tight.oom) == (50 * MIB, 1, None)
    assert tight.segments == {12 * MIB: 1, 30 * MIB: 1, 50 * MIB: 1}


def test_too_tight_a_limit_says_where_it_fails(cold):
    oom = replay(read_recording(cold), capacity_bytes=45 * MIB).oom
    assert (oom.event, oom.requested_bytes, oom.allocated_bytes, oom.reserved_bytes, oom.free_bytes) == (
        9,
        50 * MIB,
        0,
        0,
        45 * MIB,
    )


def test_a_request_that_failed_is_made_again_where_something_is_different(tmp_path):
    recorder = Recorder()
    recorder.malloc(12 * MIB)
    recorder.events.append({"action": "oom", "device_free": 0, "size": 40 * MIB, "stream": 0, "time_us": 9})
    found = read_recording(recorder.save(tmp_path / "oom.pickle"))
    assert replay(found).peak_reserved_bytes == 12 * MIB
    assert replay(found, device=0).agrees
    assert replay(found, capacity_bytes=60 * MIB).peak_reserved_bytes == 52 * MIB
    assert replay(found, capacity_bytes=50 * MIB).oom.event == 2


def test_other_settings_show_what_would_have_happened(cold):
    result = replay(read_recording(cold), settings=AllocatorSettings.parse("expandable_segments:True"))
    assert result.peak_reserved_bytes == 60 * MIB
    assert result.segments == {20 * MIB: 1, 40 * MIB: 1}
    assert not result.agrees


def test_a_warm_cache_counts_from_the_start_and_is_given_back_where_it_does_not_fit(tmp_path):
    recorder = Recorder()
    kept, cached = recorder.malloc(12 * MIB), recorder.malloc(40 * MIB)
    recorder.free(cached)
    recorder.begin()
    recorder.free(kept)
    path = recorder.save(tmp_path / "warm.pickle")
    assert replay(read_recording(path)).peak_reserved_bytes == 52 * MIB
    assert replay(read_recording(path)).peak_allocated_bytes == 12 * MIB
    assert replay(read_recording(path), capacity_bytes=20 * MIB).peak_reserved_bytes == 12 * MIB
    oom = replay(read_recording(path), capacity_bytes=10 * MIB).oom
    assert (oom.event, oom.reserved_bytes) == (0, 12 * MIB)


def test_blocks_of_private_pools_stay_in_them(tmp_path):
    recorder = Recorder()
    recorder.free(recorder.malloc(12 * MIB))
    whole = recorder.snapshot()
    for event in whole["device_traces"][0]:
        event["pool_id"] = (0, 7)
    address = 1 << 45
    whole["device_traces"][0] += [
        {"action": "segment_alloc", "addr": address, "size": 12 * MIB, "stream": 0, "pool_id": (0, 0)},
        {"action": "alloc", "addr": address, "size": 12 * MIB, "stream": 0, "pool_id": (0, 0)},
    ]
    block = {"size": 12 * MIB, "requested_size": 12 * MIB, "state": "active_allocated"}
    whole["segments"][0]["segment_pool_id"] = (0, 7)
    whole["segments"].append(
        {
            "device": 0,
            "address": address,
            "total_size": 12 * MIB,
            "stream": 0,
            "segment_type": "large",
            "blocks": [block],
        }
    )
    path = tmp_path / "private.pickle"
    path.write_bytes(pickle.dumps(whole))
    result = replay(read_recording(path))
    assert result.peak_reserved_bytes == 24 * MIB
    assert result.agrees


def test_devices_are_replayed_apart(tmp_path):
    recorder = Recorder(device=2)
    recorder.malloc(12 * MIB)
    found = read_recording(recorder.save(tmp_path / "third.pickle"))
    assert replay(found).device == 2
    assert replay(found, device=0).peak_reserved_bytes == 0
    with pytest.raises(UsageError, match="device 5"):
        replay(found, device=5)


def test_the_command_prints_the_json_that_is_promised(cold, capsys):
    assert replay_command(cold, json=True) == 0
    assert json.loads(capsys.readouterr().out) == {
        "schema": 1,
        "events": 10,
        "peak_allocated_bytes": 50 * MIB,
        "peak_reserved_bytes": 92 * MIB,
        "segments": {str(12 * MIB): 1, str(30 * MIB): 1, str(50 * MIB): 1},
        "alloc_retries": 0,
        "oom": None,
    }


def test_the_command_ends_with_1_where_memory_runs_out(cold, capsys):
    assert replay_command(cold, memory="45MiB", json=True) == 1
    assert json.loads(capsys.readouterr().out)["oom"] == {
        "event": 9,
        "requested_bytes": 50 * MIB,
        "allocated_bytes": 0,
        "reserved_bytes": 0,
        "free_bytes": 45 * MIB,
    }
    assert replay_command(cold, memory="45MiB") == 1
    assert "out of memory" in capsys.readouterr().out


@pytest.fixture
def two_devices(tmp_path):
    """The same 12 MiB on devices 0 and 3."""
    recorder = Recorder()
    recorder.malloc(12 * MIB)
    whole = recorder.snapshot()
    whole["device_traces"] = [recorder.events, [], [], list(recorder.events)]
    whole["segments"] += [whole["segments"][0] | {"device": 3}]
    path = tmp_path / "two.pickle"
    path.write_bytes(pickle.dumps(whole))
    return path


def test_the_command_sums_devices_and_says_so(two_devices, capsys):
    assert replay_command(two_devices, json=True) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["peak_reserved_bytes"] == 24 * MIB
    assert answer["segments"] == {str(12 * MIB): 2}
    assert [(one["device"], one["peak_reserved_bytes"]) for one in answer["devices"]] == [(0, 12 * MIB), (3, 12 * MIB)]
    assert "2 devices" in err
    assert replay_command(two_devices) == 0
    assert "device 3" in capsys.readouterr().out


def test_one_device_can_be_chosen(two_devices, capsys):
    assert replay_command(two_devices, device=3, json=True) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["peak_reserved_bytes"] == 12 * MIB
    assert "devices" not in json.loads(out)
    assert not err
    with pytest.raises(UsageError, match="device 4; it has 0, 1, 2, 3"):
        replay_command(two_devices, device=4)


def test_what_runs_out_on_any_device_is_the_answer(two_devices, capsys):
    assert replay_command(two_devices, memory="11MiB", json=True) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["oom"] == answer["devices"][0]["oom"]
    assert answer["oom"]["requested_bytes"] == 12 * MIB


def test_the_command_refuses_bad_arguments(cold):
    with pytest.raises(UsageError, match="expandable_segment'"):
        replay_command(cold, alloc_conf="expandable_segment:True")
    with pytest.raises(UsageError, match="is not a size"):
        replay_command(cold, memory="much")


def test_far_addresses_do_no_harm(tmp_path):
    recorder = Recorder(place_segment=lambda num_bytes, stream: (1 << 63) - GIB)
    recorder.malloc(12 * MIB)
    assert replay(read_recording(recorder.save(tmp_path / "far.pickle"))).agrees


def tampered(events, source):
    """The events with a few dropped, repeated or changed to what no allocator does."""
    addresses = [event["addr"] for event in events] + [0, (1 << 63) - 1]
    actions = [
        "alloc",
        "free_requested",
        "free_completed",
        "segment_alloc",
        "segment_free",
        "segment_map",
        "segment_unmap",
        "oom",
    ]
    events = list(events)
    for _ in range(5):
        at = source.randrange(len(events))
        change = {
            "size": source.choice([0, 1, 2 * MIB, 1 << 62, source.randrange(GIB)]),
            "addr": source.choice(addresses),
            "action": source.choice(actions),
        }
        kept = source.choice(list(change))
        events.insert(source.randrange(len(events)), events[at] | {kept: change[kept]})
        del events[source.randrange(len(events))]
    return events


@pytest.mark.parametrize(
    "conf", ["", "expandable_segments:True", "max_split_size_mb:20", "garbage_collection_threshold:0.5"]
)
def test_inconsistent_recordings_are_refused_or_replayed_as_far_as_they_go(tmp_path, conf):
    num_refused = 0
    for seed in range(60):
        source = random.Random(seed)
        recorder = Recorder(conf, place_segment=scattered(seed))
        for at in range(25):
            recorder.malloc(
                source.choice([source.randrange(1, MIB), source.randrange(MIB, 40 * MIB)]), source.randrange(2)
            )
            if at % 3:
                recorder.free(source.choice(recorder.live))
            if at == 12:
                recorder.empty_cache()
                recorder.begin()
        whole = recorder.snapshot()
        whole["device_traces"] = [tampered(recorder.events, source)]
        path = tmp_path / "tampered.pickle"
        path.write_bytes(pickle.dumps(whole))
        capacity_bytes = source.choice([None, 200 * MIB])
        try:
            found = read_recording(path)
        except RecordingError:
            num_refused += 1
            continue
        result = replay(found, capacity_bytes=capacity_bytes)
        assert result.events == len(recorder.events)
        assert result.peak_reserved_bytes >= result.peak_allocated_bytes
    assert 0 < num_refused < 60
