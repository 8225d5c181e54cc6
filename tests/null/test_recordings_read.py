"""Recordings are read as plain data: whatever else is in the file, the answer is one RecordingError line."""

import gzip
import os
import pickle
import re
import struct
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.allocator.settings import AllocatorSettings
from tightfit.errors import RecordingError
from tightfit.recordings import byte_window, plain_pickle
from tightfit.recordings.read import Action, Annotation, read_recording
from tightfit.units import MIB

ADDRESS = 0x7F0000000000
SMALL_RECORDING = {
    "segments": [
        {
            "device": 0,
            "address": ADDRESS,
            "total_size": 20 * MIB,
            "allocated_size": 3 * MIB,
            "stream": 0,
            "segment_type": "large",
            "segment_pool_id": (0, 0),
            "is_expandable": False,
            "frames": [],
            "blocks": [
                {
                    "address": ADDRESS,
                    "size": 3 * MIB,
                    "requested_size": 3 * MIB - 7,
                    "state": "active_allocated",
                    "frames": [],
                },
                {
                    "address": ADDRESS + 3 * MIB,
                    "size": 17 * MIB,
                    "requested_size": 0,
                    "state": "inactive",
                    "frames": [],
                },
            ],
        }
    ],
    "device_traces": [
        [
            {"action": "segment_alloc", "addr": ADDRESS, "size": 20 * MIB, "stream": 0, "time_us": 5, "frames": []},
            {"action": "alloc", "addr": ADDRESS, "size": 3 * MIB - 7, "stream": 0, "time_us": 6, "frames": []},
            {"action": "snapshot", "addr": 0, "size": 3 * MIB, "stream": 0, "time_us": 7, "frames": []},
        ]
    ],
    "allocator_settings": {
        "PYTORCH_CUDA_ALLOC_CONF": "max_non_split_rounding_mb:40,later_key:1",
        "max_split_size": 64 * MIB,
        "garbage_collection_threshold": 0.5,
        "expandable_segments": False,
        "roundup_power2_divisions": {"1": 4} | {str(1 << n): 0 for n in range(1, 16)},
    },
    "external_annotations": [],
}

SCALARS = st.none() | st.booleans() | st.integers(-(1 << 200), 1 << 200) | st.floats(allow_nan=False) | st.text()


def nested(leaves):
    """Plain containers of `leaves`, with text as keys."""
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.text(), inner)
            | st.tuples(inner)
            | st.tuples(inner, inner)
            | st.tuples(inner, inner, inner)
        ),
        max_leaves=30,
    )


def write(tmp_path, data):
    path = tmp_path / "recording.pickle"
    path.write_bytes(data if isinstance(data, bytes) else pickle.dumps(data))
    return path


def refusal(path):
    with pytest.raises(RecordingError) as caught:
        read_recording(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


@given(value=nested(SCALARS), protocol=st.integers(0, 5))
def test_plain_data_is_read_as_python_reads_it(value, protocol):
    assert plain_pickle.loads(pickle.dumps(value, protocol)) == value


@given(value=nested(SCALARS | st.binary()), protocol=st.integers(3, 5))
def test_bytes_are_plain_data_too(value, protocol):
    assert plain_pickle.loads(pickle.dumps(value, protocol)) == value


@pytest.mark.parametrize("protocol", range(6))
def test_a_recording_is_read_from_every_protocol(tmp_path, protocol):
    recording = read_recording(write(tmp_path, pickle.dumps(SMALL_RECORDING, protocol)))
    (device,) = recording.devices
    assert device.num_events == 3
    assert device.action.tolist() == [Action.SEGMENT_ALLOC, Action.ALLOC, Action.OTHER]
    assert device.address.tolist() == [ADDRESS, ADDRESS, 0]
    assert device.num_bytes.tolist() == [20 * MIB, 3 * MIB - 7, 3 * MIB]
    assert device.time_us.tolist() == [5, 6, 7]
    assert device.address.dtype == np.int64
    assert [(b.num_bytes, b.requested_bytes, b.is_live) for b in device.segments[0].blocks] == [
        (3 * MIB, 3 * MIB - 7, True),
        (17 * MIB, 0, False),
    ]


def test_settings_are_the_figures_in_force(tmp_path):
    settings = read_recording(write(tmp_path, SMALL_RECORDING)).settings
    # The text has a key that this version does not know; the other one was in force.
    assert settings == AllocatorSettings(
        max_split_size_bytes=64 * MIB,
        max_non_split_rounding_bytes=40 * MIB,
        garbage_collection_threshold=0.5,
        roundup_power2_divisions=(4,) + (0,) * 15,
    )
    known = SMALL_RECORDING | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "large_segment_size_mb:32"}}
    assert read_recording(write(tmp_path, known)).settings.large_segment_size_bytes == 32 * MIB
    # Neither a key of a newer torch nor a pair that is refused for plans hides the others.
    text = "later_key:[a:1,b:2],expandable_segments:True,max_split_size_mb:64,large_segment_size_mb:32,roundup_power2_divisions:[1:2,>:4]"
    known = SMALL_RECORDING | {"allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": text, "max_split_size": 64 * MIB}}
    assert read_recording(write(tmp_path, known)).settings == AllocatorSettings(
        expandable_segments=True,
        max_split_size_bytes=64 * MIB,
        large_segment_size_bytes=32 * MIB,
        max_non_split_rounding_bytes=32 * MIB,
        roundup_power2_divisions=(2,) + (4,) * 15,
    )
    assert read_recording(write(tmp_path, SMALL_RECORDING | {"allocator_settings": {}})).settings == AllocatorSettings()


def frame(filename, line, name):
    return {"filename": filename, "line": line, "name": name}


INNER, OUTER = frame("/somewhere/torch/nn.py", 7, "forward"), frame("", 0, "at::empty(long, bool)")
MARKED_RECORDING = SMALL_RECORDING | {
    "segments": [
        SMALL_RECORDING["segments"][0]
        | {
            "blocks": [
                SMALL_RECORDING["segments"][0]["blocks"][0] | {"frames": [INNER, OUTER]},
                SMALL_RECORDING["segments"][0]["blocks"][1],
            ]
        }
    ],
    "device_traces": [
        [
            SMALL_RECORDING["device_traces"][0][0] | {"frames": [OUTER], "user_metadata": "", "compile_context": "N/A"},
            SMALL_RECORDING["device_traces"][0][1] | {"frames": [INNER, OUTER], "user_metadata": "mine"},
            SMALL_RECORDING["device_traces"][0][2] | {"compile_context": "0/1"},
        ]
    ],
    "external_annotations": [{"stage": "START", "name": "Optimizer.step#AdamW.step", "device": 0, "time_us": 6}],
    "tightfit": {
        "schema": 1,
        "device": "h200",
        "capacity_bytes": 150 << 30,
        "context_bytes": None,
        "spans": [["setup", "setup", 0, 1], ["step 0", "step", 1, 3]],
        "categories": {"0": "parameters"},
    },
}


@pytest.mark.parametrize("protocol", range(6))
def test_stacks_notes_annotations_and_marks_are_kept(tmp_path, protocol):
    recording = read_recording(write(tmp_path, pickle.dumps(MARKED_RECORDING, protocol)))
    (device,) = recording.devices
    inner, outer = "/somewhere/torch/nn.py:7 forward", "??:0 at::empty(long, bool)"
    assert [recording.stacks[i] for i in device.stack] == [(outer,), (inner, outer), ()]
    assert [recording.stacks[block.stack] for block in device.segments[0].blocks] == [(inner, outer), ()]
    assert recording.stacks[0] == ()
    assert [recording.notes[i] for i in device.user_metadata] == ["", "mine", ""]
    assert [recording.notes[i] for i in device.compile_context] == ["", "", "0/1"]
    assert recording.annotations == (Annotation(stage="START", name="Optimizer.step#AdamW.step", device=0, time_us=6),)
    assert recording.extra == MARKED_RECORDING["tightfit"]
    assert type(recording.extra["spans"]) is type(recording.extra["spans"][0]) is list
    assert read_recording(write(tmp_path, SMALL_RECORDING)).extra is None


@pytest.mark.parametrize("line", [-1, (1 << 64) - 1, (1 << 32) - 1])
def test_a_line_that_torch_does_not_know_is_no_huge_one(tmp_path, line):
    whole = changed(("device_traces", 0, 1, "frames"), [frame("train.py", line, "step")])
    recording = read_recording(write(tmp_path, whole))
    assert ("train.py:0 step",) in recording.stacks


def test_paths_in_the_working_directory_are_relative_to_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    whole = changed(("device_traces", 0, 1, "frames"), [frame(str(tmp_path / "train.py"), 3, "step")])
    assert ("train.py:3 step",) in read_recording(write(tmp_path, whole)).stacks


class Evil:
    """Would run code where a pickle is loaded without care."""

    def __reduce__(self):
        return os.mkdir, (os.environ["TIGHTFIT_EVIL_TARGET"],)


@pytest.mark.parametrize("protocol", range(6))
def test_no_code_runs(tmp_path, monkeypatch, protocol):
    target = tmp_path / "made"
    monkeypatch.setenv("TIGHTFIT_EVIL_TARGET", str(target))
    path = write(tmp_path, pickle.dumps(SMALL_RECORDING | {"external_annotations": [Evil()]}, protocol))
    assert re.search("not (one of )?plain data", refusal(path))
    assert not target.exists()


@pytest.mark.parametrize("value", [print, object(), {1, 2}, frozenset({1}), bytearray(b"x"), np.float64(1.0), 1j])
def test_anything_but_plain_containers_is_refused(tmp_path, value):
    refusal(write(tmp_path, SMALL_RECORDING | {"external_annotations": value}))


HOSTILE = {
    "nothing": b"",
    "text": b"hello",
    "only stop": b".",
    "two values": b"\x80\x04NN.",
    "no stop": b"\x80\x04N",
    "bytes of 2**62": b"\x80\x04\x8e" + struct.pack("<Q", 1 << 62) + b"x.",
    "text of 2**63": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 63) + b"x.",
    "memo of 2**32": b"\x80\x02Nr\xff\xff\xff\xff.",
    "memo by name": b"Np99999999999999999999999999999999999999999999\n.",
    "number of many digits": b"L" + b"9" * 100_000 + b"L\n.",
    "long of many bytes": b"\x80\x02\x8b" + struct.pack("<I", 100_000) + b"\x7f" * 100_000 + b".",
    "protocol 200": b"\x80\xc8N.",
    "extension": b"\x80\x02\x82\x01.",
    "persistent": b"Pfoo\n.",
    "append to a number": b"\x80\x02K\x01K\x02a.",
    "key that is a list": b"\x80\x02}(]Nu.",
    "mark in a list": b"\x80\x02](a.",
    "list of itself": b"\x80\x02]q\x00h\x00a.",
    "dict of itself": b"\x80\x02}q\x00X\x08\x00\x00\x00segmentsh\x00X\x0d\x00\x00\x00device_tracesh\x00u.",
    "deeply nested": b"\x80\x02" + b"]" * 100_000 + b"a" * 99_999 + b".",
    "nested tuples as a key": b"\x80\x02})" + b"q\x00h\x00\x86" * 60 + b"Ns.",
    "colliding keys": b"\x80\x02}("
    + b"".join(b"\x8a\x09" + (n * ((1 << 61) - 1)).to_bytes(9, "little") + b"N" for n in range(2000))
    + b"u.",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_pickles_are_refused_at_once(tmp_path, name):
    began = time.monotonic()
    refusal(write(tmp_path, HOSTILE[name]))
    assert time.monotonic() - began < 5


def nested_lists(depth):
    value = {"schema": 1}
    for _ in range(depth):
        value = {"spans": [value]}
    return value


def changed(path, value):
    """SMALL_RECORDING with one value changed."""
    whole = pickle.loads(pickle.dumps(SMALL_RECORDING))
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return whole


@pytest.mark.parametrize(
    ("whole", "says"),
    [
        ([], "no dict"),
        ({}, "lacks 'segments'"),
        ({"segments": []}, "lacks 'segments' or 'device_traces'"),
        (changed(("segments",), 3), "'segments'"),
        (changed(("segments", 0), None), "segment"),
        (changed(("segments", 0, "address"), -1), "'address'"),
        (changed(("segments", 0, "total_size"), 1 << 80), "'total_size'"),
        (changed(("segments", 0, "total_size"), 21 * MIB), "do not fill it"),
        (changed(("segments", 0, "blocks"), []), "do not fill it"),
        (changed(("segments", 0, "blocks", 0, "size"), 3.5), "'size'"),
        (changed(("segments", 0, "segment_pool_id"), (1,)), "pool"),
        (changed(("device_traces",), {}), "'device_traces'"),
        (changed(("device_traces", 0), "x"), "trace"),
        (changed(("device_traces", 0, 1), []), "event"),
        (changed(("device_traces", 0, 1, "addr"), None), "'addr'"),
        (changed(("device_traces", 0, 1, "action"), 7), "'action'"),
        (changed(("device_traces", 0, 1, "size"), True), "'size'"),
        (changed(("device_traces", 0, 1, "frames"), 5), "'frames'"),
        (changed(("device_traces", 0, 1, "frames"), ["main.py"]), "frame"),
        (changed(("device_traces", 0, 1, "frames"), [{"filename": "main.py", "line": 1.5, "name": "f"}]), "frame"),
        (changed(("device_traces", 0, 1, "user_metadata"), 5), "'user_metadata'"),
        (changed(("external_annotations",), [{"stage": 1}]), "'stage'"),
        (changed(("tightfit",), []), "'tightfit'"),
        (changed(("tightfit",), {"spans": [{"action": "alloc", "addr": 0}]}), "'tightfit'"),
        (changed(("tightfit",), nested_lists(50)), "'tightfit'"),
        (changed(("allocator_settings",), 5), "'allocator_settings'"),
        (SMALL_RECORDING | {"segments": SMALL_RECORDING["segments"] * 2}, "overlap"),
    ],
)
def test_malformed_recordings_say_what_is_wrong(tmp_path, whole, says):
    assert says in refusal(write(tmp_path, whole))


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "it is empty"),
        (gzip.compress(pickle.dumps(SMALL_RECORDING)), "compressed: unpack it first (gunzip)"),
        (b"\n<!DOCTYPE html><html>404", "a web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1", "git lfs pull"),
        (b"PK\x03\x04", "checkpoint of torch.save"),
        (pickle.dumps(SMALL_RECORDING | {"x": np.int64(3)}, 4), "scalar at byte"),
        (pickle.dumps(SMALL_RECORDING | {"x": np.int64(3)}, 2), "it holds an object (numpy"),
        (b"\x80\x02c\xff\x1b[31m\nx\n.", "it holds an object (at byte"),
    ],
)
def test_what_is_no_recording_is_named(tmp_path, data, says):
    assert says in refusal(write(tmp_path, data))


def test_segments_alone_are_a_recording_without_events(tmp_path):
    for value in ({"segments": SMALL_RECORDING["segments"]}, SMALL_RECORDING["segments"]):
        (device,) = read_recording(write(tmp_path, value)).devices
        assert device.num_events == 0
        assert len(device.segments) == len(SMALL_RECORDING["segments"])


def rounds(*actions):
    """Three blocks, one after another at one address, with these of their events."""
    every = [
        {"action": action, "addr": 1 << 20, "size": 2 * MIB, "stream": 0}
        for _ in range(3)
        for action in ("alloc", "free_requested", "free_completed")
    ]
    trace = [event for event in every if event["action"] in actions]
    failed = {"action": "oom", "device_free": 7, "size": 5, "stream": 0}
    return SMALL_RECORDING | {"device_traces": [[failed, *trace] * 2]}


@pytest.mark.parametrize("left_out", ["free_requested", "free_completed", ""])
def test_halves_of_frees_that_were_left_out_are_put_back(tmp_path, left_out):
    kept = {"alloc", "free_requested", "free_completed"} - {left_out}
    (device,) = read_recording(write(tmp_path, rounds(*kept))).devices
    one = [Action.OOM, *[Action.ALLOC, Action.FREE_REQUESTED, Action.FREE_COMPLETED] * 3]
    assert device.action.tolist() == one * 2
    assert device.free_bytes_at_oom == {0: 7, 10: 7}


@pytest.mark.parametrize(
    ("kept", "says"),
    [(["alloc"], "frees are missing"), (["free_requested", "free_completed"], "contradict each other")],
)
def test_events_that_contradict_each_other_are_refused(tmp_path, kept, says):
    assert says in refusal(write(tmp_path, rounds(*kept)))


def test_a_file_that_is_not_there_is_one_line_too(tmp_path):
    assert "cannot be read" in refusal(tmp_path / "missing.pickle")
    assert "cannot be read" in refusal(tmp_path)


@pytest.mark.parametrize("protocol", [0, 2, 4])
def test_events_and_frames_that_are_met_again_after_a_thousand_others_are_the_same(tmp_path, protocol):
    def event(number, frames):
        more = {"pool_id": (0, 7), "user_metadata": "mine"} if number % 2 else {}
        # Frees that are waited for: blocks allocated twice at one address are refused.
        return {
            "action": "free_requested",
            "addr": number << 20,
            "size": 512 + number,
            "stream": 3,
            "frames": frames,
        } | more

    own = [event(n, [frame("main.py", n, "one"), INNER]) for n in range(1500)]
    shared = [event(n, [INNER, OUTER]) for n in range(1500, 3000)]
    failed = {"action": "oom", "device_free": 77, "size": 1 << 30, "stream": 3, "frames": own[0]["frames"]}
    trace = [*own, failed, *shared, own[1], own[2], failed]
    whole = SMALL_RECORDING | {"segments": [], "device_traces": [trace, [own[1], shared[-1]]]}
    found = read_recording(write(tmp_path, pickle.dumps(whole, protocol)))
    first, second = found.devices
    assert first.num_events == 3004
    assert first.address[-3:].tolist() == [1 << 20, 2 << 20, 0]
    for column in ("action", "num_bytes", "lane", "stack", "user_metadata"):
        values = getattr(first, column)
        assert values[[-3, -2, -1]].tolist() == values[[1, 2, 1500]].tolist()
    assert first.lane[1] < 0 == first.lane[1] - first.lane[3]
    assert first.free_bytes_at_oom == {1500: 77, 3003: 77}
    assert found.stacks[first.stack[1]] == ("main.py:1 one", "/somewhere/torch/nn.py:7 forward")
    assert found.stacks[first.stack[-4]] == ("/somewhere/torch/nn.py:7 forward", "??:0 at::empty(long, bool)")
    assert second.address.tolist() == [1 << 20, 2999 << 20]
    assert [found.stacks[i] for i in second.stack] == [found.stacks[first.stack[1]], found.stacks[first.stack[-4]]]


def test_frames_that_are_written_anew_for_every_event_do_not_pile_up(tmp_path, monkeypatch):
    monkeypatch.setattr(byte_window, "_MAX_CONTAINERS", 12_000)
    monkeypatch.setattr(byte_window, "_WINDOW_BYTES", 1 << 12)
    trace = [
        {"action": "free_requested", "addr": n, "frames": [frame("a.py", i, "f") for i in range(4)]}
        for n in range(6000)
    ]
    found = read_recording(write(tmp_path, SMALL_RECORDING | {"segments": [], "device_traces": [trace]}))
    assert found.devices[0].num_events == 6000
    assert len(found.stacks) == 2
    path = write(tmp_path, SMALL_RECORDING | {"external_annotations": [[] for _ in range(13_000)]})
    assert "collections" in refusal(path)
