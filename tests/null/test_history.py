"""The history of a run: from a tape it says what the estimate says, from a recording what the replay says, block by block."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.null.history_runs import BACKWARD, CARD, FORWARD, LEAK, SCRATCH, Recorder, tape_of, training

from tightfit.allocator.settings import AllocatorSettings
from tightfit.diagnosis.histories import history_of_recording, history_of_tape
from tightfit.errors import UsageError
from tightfit.recordings.frames import place_of
from tightfit.recordings.marks import Marks
from tightfit.recordings.read import read_recording
from tightfit.recordings.replayed import replay
from tightfit.simulate.history import CATEGORIES, UNKNOWN, History, HistorySpan, user_frame
from tightfit.simulate.peak import estimate_peak
from tightfit.tape import Category, Source
from tightfit.units import GIB, MIB

REAL = Path(__file__).parents[3] / "shared/data/snapshots"
needs_recordings = pytest.mark.skipif(not REAL.is_dir(), reason="the real recordings are not here")


def bytes_after_each_event(history: History) -> list[int]:
    """What the blocks of a history add up to, event by event."""
    return [int(history.blocks.block_bytes[history.alive_at(event)].sum()) for event in range(history.num_events)]


def test_each_block_says_when_it_lived_how_large_it_was_and_who_asked_for_it():
    tape = tape_of(
        [3 * MIB + 1, 100, 5 * MIB],
        [0, 1, -2, 2],
        categories=[Category.PARAMETERS, Category.TEMPORARIES, Category.GRADIENTS],
        lines=["train.py:3", "train.py:4", "train.py:3"],
    )
    history = history_of_tape(tape, CARD)
    blocks = history.blocks
    assert blocks.num_bytes.tolist() == [3 * MIB + 1, 100, 5 * MIB]
    assert blocks.block_bytes.tolist() == [3 * MIB + 512, 512, 5 * MIB]
    assert blocks.allocated_at.tolist() == [0, 1, 3]
    assert blocks.freed_at.tolist() == [4, 2, 4]
    assert [CATEGORIES[category] for category in blocks.category] == ["parameters", "temporaries", "gradients"]
    assert [history.stacks[stack] for stack in blocks.stack] == [
        ("train.py:3 aten.mm",),
        ("train.py:4 aten.mm",),
        ("train.py:3 aten.mm",),
    ]
    assert {history.modules[module] for module in blocks.module} == {"net.0"}
    assert [(span.name, span.kind, span.begin, span.end) for span in history.spans] == [("step 1", "step", 0, 4)]
    assert (history.label, history.origin, history.device) == ("toy.py:workload", "estimate", CARD.name)
    assert history.peak_event == 3
    assert UNKNOWN not in blocks.category


def test_time_is_that_of_the_operators_before_the_event():
    history = history_of_tape(tape_of([512 * MIB, 512 * MIB], [0, -1, 1]), CARD)
    first, same, later = history.time_us.tolist()
    assert 0 < first == same < later


def test_a_storage_of_no_bytes_or_no_operator_is_told_apart():
    tape = tape_of([0, 1024], [0, 1])
    assert len(history_of_tape(tape, CARD).blocks) == 1
    orphan = tape_of([1024], [0])
    orphan.storages.operator[:] = -1
    blocks = history_of_tape(orphan, CARD).blocks
    history = history_of_tape(orphan, CARD)
    assert history.stacks[blocks.stack[0]] == ()
    assert history.modules[blocks.module[0]] == ""


def test_a_workspace_of_cudnn_that_finds_no_room_is_no_block():
    room = CARD.capacity_bytes - CARD.context_bytes
    tape = tape_of([room - 30 * MIB, 100 * MIB], [0, 1], sources=[Source.TENSOR, Source.CUDNN])
    history = history_of_tape(tape, CARD)
    assert history.blocks.num_bytes.tolist() == [room - 30 * MIB]
    assert int(history.allocated.max()) == estimate_peak(tape, CARD).peak.allocated_bytes


def test_a_run_that_does_not_fit_has_its_whole_history():
    tape = tape_of([CARD.capacity_bytes, 2 * MIB], [0, 1])
    history = history_of_tape(tape, CARD)
    assert len(history.blocks) == 2
    assert int(history.reserved.max()) == estimate_peak(tape, CARD).peak.reserved_bytes


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 64 * MIB), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
    expandable=st.booleans(),
)
def test_the_blocks_add_up_to_the_levels_and_never_overlap(sizes, order, expandable):
    events, alive = [], []
    for storage in range(len(sizes)):
        events.append(storage)
        alive.append(storage)
        while alive and order.random() < 0.4:
            events.append(-1 - alive.pop(order.randrange(len(alive))))
    tape = tape_of(sizes, events)
    chosen = AllocatorSettings(expandable_segments=expandable)
    history, estimate = history_of_tape(tape, CARD, chosen), estimate_peak(tape, CARD, chosen)
    assert bytes_after_each_event(history) == history.allocated.tolist()
    assert int(history.allocated.max()) == estimate.peak.allocated_bytes
    assert int(history.reserved.max()) == estimate.peak.reserved_bytes
    assert np.all(np.diff(history.blocks.allocated_at) > 0)
    for event in range(history.num_events):
        alive_now = history.alive_at(event)
        begins, lengths = history.blocks.address[alive_now], history.blocks.block_bytes[alive_now]
        by_address = np.argsort(begins)
        assert np.all((begins + lengths)[by_address][:-1] <= begins[by_address][1:])


def test_the_users_frame_is_the_innermost_that_is_no_library():
    stack = (
        "RegisterCUDA.cpp:0 at::native::mul",
        "/x/site-packages/torch/nn/modules/module.py:9 _call_impl",
        "/home/me/train.py:4 main",
    )
    assert user_frame(stack) == "/home/me/train.py:4 main"
    assert user_frame(("??:0 at::_ops::mul_Tensor::call(at::Tensor const&)", "train.py:1 step")) == "train.py:1 step"
    assert user_frame(("train.py:41 aten.addmm",)) == "train.py:41 aten.addmm"
    assert user_frame(()) == ""


def by_category(history: History, chosen) -> dict[str, int]:
    """Bytes of the chosen blocks by category, in MiB."""
    blocks = history.blocks
    found = {name: int(blocks.num_bytes[chosen & (blocks.category == i)].sum()) for i, name in enumerate(CATEGORIES)}
    return {name: num_bytes // MIB for name, num_bytes in found.items() if num_bytes}


def test_a_recording_of_a_training_loop_is_told_apart_by_stacks_and_lifetimes(tmp_path):
    history = history_of_recording(read_recording(training(tmp_path / "run.pickle", leak_bytes=2 * MIB)))
    assert [span.name for span in history.spans] == ["step 1", "step 2", "step 3"]
    assert [span.begin for span in history.spans[1:]] == [span.end for span in history.spans[:-1]]
    assert history.spans[-1].end == history.num_events
    blocks, first = history.blocks, history.spans[0]
    in_first = (blocks.allocated_at >= first.begin) & (blocks.allocated_at < first.end)
    assert by_category(history, blocks.allocated_at < 0) == {"parameters": 8}
    assert by_category(history, in_first) == {
        "gradients": 8,
        "optimizer_state": 16,
        "activations": 2 * 6 + 2,
        "temporaries": 2 * 2 + 2 * 5 + 2 * 4,
        "inputs": 3,
    }
    assert bytes_after_each_event(history) == history.allocated.tolist()
    assert "guessed" in history.assumptions[0].what


def test_a_recording_that_began_after_the_first_step_tells_parameters_from_state_by_the_gradients(tmp_path):
    recorder = Recorder(before=[4 * MIB] * 3 + [7 * MIB])
    activation = recorder.malloc(6 * MIB, FORWARD)
    recorder.malloc(4 * MIB, BACKWARD)
    recorder.free(activation)
    recorder.malloc(1 * MIB, SCRATCH)
    history = history_of_recording(read_recording(recorder.save(tmp_path / "run.pickle")))
    assert by_category(history, history.blocks.allocated_at < 0) == {"parameters": 11, "optimizer_state": 8}


def test_python_stacks_alone_leave_the_backward_pass_without_a_frame(tmp_path):
    recorder = Recorder()
    activation = recorder.malloc(6 * MIB, FORWARD[1:])
    recorder.malloc(4 * MIB, ())
    recorder.free(activation)
    recorder.malloc(1 * MIB, SCRATCH[1:])
    history = history_of_recording(read_recording(recorder.save(tmp_path / "run.pickle")))
    assert by_category(history, history.blocks.allocated_at >= 0) == {
        "activations": 6,
        "gradients": 4,
        "optimizer_state": 1,
    }


def test_a_recording_without_stacks_says_that_it_does_not_know(tmp_path):
    recorder = Recorder()
    recorder.malloc(2 * MIB, ())
    history = history_of_recording(read_recording(recorder.save(tmp_path / "run.pickle")))
    assert history.blocks.category.tolist() == [UNKNOWN]
    assert [span.name for span in history.spans] == ["step 1"]


def annotation(stage: str, name: str, time_us: int) -> dict[str, object]:
    return {"stage": stage, "name": name, "device": 0, "time_us": time_us}


def test_annotations_tell_the_steps(tmp_path):
    """A request each at 1010, 1040 and 1070 us. Of two optimizers, the one that steps least often ends the steps."""
    recorder = Recorder()
    for _ in range(3):
        recorder.free(recorder.malloc(30 * MIB, ()))
    annotations = [
        annotation("END", f"Optimizer.step#{name}.step", time_us)
        for name, times in (("Adam", (1031, 1061, 1091)), ("SGD", (1061, 1091)))
        for time_us in times
    ]
    path = recorder.save(tmp_path / "run.pickle", external_annotations=annotations)
    spans = history_of_recording(read_recording(path)).spans
    assert [(span.name, span.begin, span.end) for span in spans] == [("step 1", 0, 7), ("step 2", 7, 10)]
    profiled = [annotation("START", f"ProfilerStep#{n}", time_us) for n, time_us in enumerate((1000, 1040, 1070))]
    path = recorder.save(tmp_path / "run.pickle", external_annotations=[*annotations, *profiled])
    assert [span.begin for span in history_of_recording(read_recording(path)).spans] == [0, 4, 7]


def test_a_device_that_was_not_recorded_is_an_error(tmp_path):
    recording = read_recording(training(tmp_path / "run.pickle"))
    with pytest.raises(UsageError, match="has nothing of device 3"):
        history_of_recording(recording, 3)


def test_marks_say_what_need_not_be_guessed(tmp_path):
    recorder = Recorder(before=[4 * MIB])
    recorder.malloc(6 * MIB, FORWARD)
    recorder.malloc(1 * MIB, FORWARD)
    events = [index for index, event in enumerate(recorder.events) if event["action"] == "alloc"]
    start = next(block.address for block, _ in recorder.live.values())
    marks = Marks(
        origin="estimate",
        trace=0,
        device="RTX 4090",
        capacity_bytes=GIB,
        context_bytes=MIB,
        spans=(HistorySpan(name="evaluation", kind="aside", begin=0, end=len(recorder.events)),),
        category_events=np.array(events[:1]),
        categories=np.array([Category.INPUTS]),
        start_addresses=np.array([start]),
        start_categories=np.array([Category.OPTIMIZER_STATE]),
        module_events=np.array(events[1:]),
        module_values=np.array([0]),
        modules=("net.0",),
        assumptions=(),
    )
    recording = read_recording(recorder.save(tmp_path / "run.pickle"))
    history = history_of_recording(dataclasses.replace(recording, extra=marks.to_plain()))
    blocks = history.blocks
    assert [CATEGORIES[category] for category in blocks.category] == ["optimizer_state", "inputs", "unknown"]
    assert [history.modules[module] for module in blocks.module] == ["", "", "net.0"]
    assert (history.origin, history.device, history.capacity_bytes) == ("estimate", "RTX 4090", GIB)
    assert [span.name for span in history.spans] == ["evaluation"]
    assert history.assumptions == ()


def test_a_place_is_the_users_line_the_operator_and_who_called():
    place = place_of(FORWARD)
    assert (place.line, place.function, place.callers) == ("model.py:7", "forward", ("train.py:20",))
    assert (place.operator, place.phase, place.name) == ("aten.mm", "forward", "model.py:7")
    backward = place_of(BACKWARD)
    assert (backward.phase, backward.name, backward.operator) == ("backward", "backward of MmBackward0", "aten.mm")
    traced = place_of(("folder name/train.py:41 aten.sum.dim_IntList",))
    assert (traced.line, traced.operator) == ("folder name/train.py:41", "aten.sum.dim_IntList")
    assert place_of(()).name == ""
    assert not place_of(LEAK).in_module


@needs_recordings
@pytest.mark.parametrize(
    ("name", "at_peak"),
    [
        ("lm_2.7b_ctx256_step", {"parameters": 12.82, "gradients": 12.69, "optimizer_state": 25.38}),
        ("lm_medium_ctx256_step", {"parameters": 1.58, "optimizer_state": 3.16, "activations": 3.66}),
        ("lm_2.7b_ctx128_forward", {"parameters": 12.82, "activations": 5.31}),
        ("lm_medium_ctx128_inference", {"parameters": 1.58}),
    ],
)
def test_real_recordings(name, at_peak):
    """AdamW with two copies of each parameter: the bytes of state are twice those of the gradients, which are those of the parameters."""
    recording = read_recording(REAL / f"{name}.pickle")
    at_start = []
    history = history_of_recording(
        recording, watch=lambda event, allocator, _: event < 0 and at_start.append(allocator.reserved_bytes)
    )
    found = replay(recording)
    assert int(history.allocated.max()) == found.peak_allocated_bytes
    assert max(*at_start, int(history.reserved.max())) == found.peak_reserved_bytes
    blocks, alive = history.blocks, history.alive_at(history.peak_event)
    assert int(blocks.block_bytes[alive].sum()) == found.peak_allocated_bytes
    for category, gib in at_peak.items():
        chosen = alive & (blocks.category == CATEGORIES.index(category))
        assert blocks.block_bytes[chosen].sum() / GIB == pytest.approx(gib, abs=0.006)
