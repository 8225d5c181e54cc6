"""Counter tracks for Perfetto: exact at every event, in order, on the clock of torch.profiler."""

import dataclasses
import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.histories import nothing, training, with_a_predicted_step

from tightfit.errors import RecordingError
from tightfit.reports.perfetto import STEP_PROCESS, merged, perfetto_text, trace_events

BEGAN_US = 1_780_000_000_000_000
BASE_NS = 1_779_999_000_000_000_000


def counters(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "C" and event["name"] == name]


@pytest.fixture
def events() -> list[dict[str, Any]]:
    return json.loads(perfetto_text(training()))["traceEvents"]


class TestTheTracks:
    def test_have_every_event_of_a_run_that_is_not_long(self, events: list[dict[str, Any]]) -> None:
        history = training()
        bytes_held = counters(events, "bytes")
        assert [event["args"]["allocated"] for event in bytes_held] == history.allocated.tolist()
        assert [event["args"]["reserved"] for event in bytes_held] == history.reserved.tolist()
        assert [event["ts"] for event in bytes_held] == history.time_us.tolist()

    def test_of_categories_add_up(self, events: list[dict[str, Any]]) -> None:
        of_categories = counters(events, "bytes of")
        assert set(of_categories[0]["args"]) == {"parameters", "activations", "temporaries"}
        assert [sum(event["args"].values()) for event in of_categories] == training().allocated.tolist()

    def test_have_the_steps_and_the_peak(self, events: list[dict[str, Any]]) -> None:
        slices = [(event["name"], event["ts"], event["dur"]) for event in events if event["ph"] == "X"]
        assert slices == [("step 1", 0, 399 * 7), ("step 2", 400 * 7, 399 * 7), ("step 3", 800 * 7, 399 * 7)]
        (peak,) = (event for event in events if event["ph"] == "i")
        assert peak["ts"] == training().peak_event * 7
        assert peak["args"]["allocated"] == training().allocated.max()

    def test_events_of_one_microsecond_stay_apart_and_in_order(self) -> None:
        history = training()
        crowded = dataclasses.replace(history, time_us=np.arange(history.num_events) // 500)
        times = [event["ts"] for event in counters(list(trace_events(crowded)), "bytes")]
        assert len(set(times)) == len(times)
        assert times == sorted(times)
        assert all(0 <= at - when < 1 for at, when in zip(times, crowded.time_us.tolist(), strict=True))

    def test_without_times_count_events(self) -> None:
        timeless = dataclasses.replace(training(), time_us=np.zeros(0, dtype=np.int64))
        assert [event["ts"] for event in counters(list(trace_events(timeless)), "bytes")] == list(range(1200))

    def test_of_a_very_long_run_are_thinned_and_keep_the_peak(self) -> None:
        history = training(num_steps=4, num_layers=40_000)
        held = [event["args"]["allocated"] for event in counters(list(trace_events(history)), "bytes")]
        assert len(held) < 250_000 < history.num_events
        assert max(held) == history.allocated.max()
        assert held[-1] == history.allocated[-1]

    def test_a_run_of_nothing(self) -> None:
        assert [event["ph"] for event in trace_events(nothing())] == ["M", "M"]


class TestOverAProfile:
    def profile(self, path: Path, first_us: float, **more: Any) -> Path:
        kernel = {"ph": "X", "cat": "kernel", "name": "gemm", "pid": 0, "tid": 7, "ts": first_us, "dur": 50.0}
        text = json.dumps({"schemaVersion": 1, "traceEvents": [kernel], **more})
        path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
        return path

    @pytest.mark.parametrize("name", ["profile.json", "profile.json.gz"])
    def test_counts_from_where_the_profile_does(self, tmp_path: Path, name: str) -> None:
        profile = self.profile(tmp_path / name, BEGAN_US - BASE_NS / 1000 + 100, baseTimeNanoseconds=BASE_NS)
        text, overlaps = merged(training(), profile, began_us=BEGAN_US)
        trace = json.loads(text)
        assert overlaps
        assert trace["schemaVersion"] == 1
        assert trace["traceEvents"][0]["name"] == "gemm"
        first = counters(trace["traceEvents"], "bytes")[0]
        assert first["ts"] == BEGAN_US - BASE_NS / 1000 == trace["traceEvents"][0]["ts"] - 100

    def test_of_an_older_torch_counts_from_1970(self, tmp_path: Path) -> None:
        text, overlaps = merged(training(), self.profile(tmp_path / "p.json", BEGAN_US + 5), began_us=BEGAN_US)
        assert overlaps
        assert counters(json.loads(text)["traceEvents"], "bytes")[0]["ts"] == BEGAN_US

    def test_of_another_run_does_not_overlap(self, tmp_path: Path) -> None:
        profile = self.profile(tmp_path / "p.json", 0.0, baseTimeNanoseconds=BASE_NS)
        assert not merged(training(), profile, began_us=BEGAN_US)[1]

    @pytest.mark.parametrize("content", [b"", b"[]", b'{"traceEvents": 3}', b"\x1f\x8b123"])
    def test_what_is_no_profile_is_refused(self, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "p.json"
        path.write_bytes(content)
        with pytest.raises(RecordingError, match=r"p\.json is not a trace of torch\.profiler"):
            merged(training(), path, began_us=BEGAN_US)

    def test_without_times_nothing_can_be_merged(self, tmp_path: Path) -> None:
        profile = self.profile(tmp_path / "p.json", 0.0)
        with pytest.raises(RecordingError, match="no times to merge by"):
            merged(nothing(), profile, began_us=0)


class TestAPredictedStep:
    def test_has_a_thread_for_each_resource_from_where_the_last_step_begins(self) -> None:
        history = with_a_predicted_step()
        events = [event for event in trace_events(history) if event["pid"] == STEP_PROCESS]
        threads = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
        assert list(threads.values()) == ["host", "stream 0", "copy engine to the GPU"]
        slices = [event for event in events if event["ph"] == "X" and threads[event["tid"]] == "stream 0"]
        begin = history.time_us[history.spans[-1].begin]
        assert [(event["ts"] - begin, event["dur"]) for event in slices] == [(0, 5000), (5000, 3000)]
        assert all(event["args"]["on the critical path"] for event in slices)

    def test_is_not_there_for_a_recording(self) -> None:
        assert not [event for event in trace_events(training()) if event["pid"] == STEP_PROCESS]
