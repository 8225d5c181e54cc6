"""A diagnosis: who holds the peak, what grows, what is wasted and what to do, of runs whose answers are known."""

import io
import json
import pickle

import numpy as np
import pytest
from rich.console import Console
from tests.null.history_runs import CARD, FORWARD, LEAK, Recorder, tape_of, training

from tightfit.cli.shared.recorded_devices import shown_device
from tightfit.diagnosis.diagnose import diagnose
from tightfit.diagnosis.diagnosed_run import subject_of_recording, subject_of_tape
from tightfit.diagnosis.histories import history_of_tape
from tightfit.diagnosis.step_spans import saved_bytes
from tightfit.errors import UsageError
from tightfit.recordings.read import read_recording
from tightfit.reports.text.diagnosis import DiagnosisText
from tightfit.reports.text.folders import without_common_folder
from tightfit.simulate.peak import estimate_peak
from tightfit.tape import Category, Phase, SpanKind
from tightfit.units import GIB, MIB


def diagnosis_of(path):
    return diagnose(subject_of_recording(read_recording(path)), seconds=0.5)


def text_of(diagnosis, width=120) -> str:
    out = io.StringIO()
    Console(file=out, width=width, highlight=False).print(DiagnosisText(diagnosis))
    return out.getvalue()


def test_a_recordings_peak_is_split_by_category_and_by_stack(tmp_path):
    found = diagnosis_of(training(tmp_path / "run.pickle"))
    assert sum(found.at_peak.values()) == found.peak_allocated_bytes
    assert 16 * MIB <= found.at_peak["optimizer_state"] < 20 * MIB, "blocks may be larger than the 16 MiB asked for"
    holder = next(holder for holder in found.allocation_sites if holder.category == "activations")
    assert (holder.where, holder.callers, holder.operator) == ("model.py:7", ("train.py:20",), "aten.mm")
    assert found.moment.step in ("step 2", "step 3")
    assert found.growth == ()
    assert found.growth_note == ""
    json.dumps(found.to_json())


def test_a_leak_is_named_with_its_line_and_its_rate(tmp_path):
    found = diagnosis_of(training(tmp_path / "run.pickle", num_steps=5, leak_bytes=3 * MIB))
    (leak,) = found.growth
    assert (leak.where, leak.bytes_per_step, leak.num_blocks) == ("train.py:24", 3 * MIB, 5)
    assert "+3.0 MiB" in text_of(found)


def test_two_steps_are_too_few_to_say_what_grows(tmp_path):
    found = diagnosis_of(training(tmp_path / "run.pickle", num_steps=2, leak_bytes=3 * MIB))
    assert found.growth == ()
    assert "needs 3 steps; this run has 2" in text_of(found)


def test_the_peaks_of_a_tape_are_those_of_its_estimate():
    tape = tape_of([300 * MIB, 30 * MIB, 11 * MIB], [0, 1, -2, 2])
    found, estimate = diagnose(subject_of_tape(tape, CARD)), estimate_peak(tape, CARD)
    assert found.peak_allocated_bytes == estimate.peak.allocated_bytes
    assert found.peak_reserved_bytes == estimate.peak.reserved_bytes
    assert found.capacity_bytes == estimate.capacity_bytes


def test_a_run_that_does_not_fit_says_by_how_much():
    found = diagnose(subject_of_tape(tape_of([CARD.capacity_bytes], [0]), CARD))
    assert "more than its capacity" in text_of(found)
    assert "more than its capacity" not in text_of(diagnose(subject_of_tape(tape_of([MIB], [0]), CARD)))


def test_an_error_is_told_with_what_was_asked_for_and_what_was_free(tmp_path):
    recorder = Recorder()
    first = recorder.malloc(40 * MIB, FORWARD)
    recorder.malloc(100 * MIB, FORWARD)
    recorder.free(first)
    recorder.write("oom", 0, 90 * MIB, 0, LEAK)
    recorder.events[-1]["device_free"] = 10 * MIB
    found = diagnosis_of(recorder.save(tmp_path / "run.pickle"))
    assert found.oom is not None
    assert (found.oom.where, found.oom.requested_bytes) == ("train.py:24", 90 * MIB)
    assert (found.oom.allocated_bytes, found.oom.largest_free_bytes) == (100 * MIB, 40 * MIB)
    assert found.fragmentation.returnable_bytes == 40 * MIB
    assert "out of memory" in text_of(found)


def test_the_first_of_several_errors_is_told_with_the_gpus_free_memory(tmp_path):
    recorder = Recorder()
    recorder.malloc(40 * MIB, FORWARD)
    for _ in range(3):
        recorder.write("oom", 0, 90 * MIB, 0, LEAK)
        recorder.events[-1]["device_free"] = 10 * MIB
    text = " ".join(text_of(diagnosis_of(recorder.save(tmp_path / "run.pickle"))).split())
    assert "10.0 MiB free on the GPU" in text
    assert "the first of 3 such errors" in text


def test_a_snapshot_without_events_is_its_state(tmp_path):
    recorder = Recorder()
    recorder.malloc(40 * MIB, FORWARD)
    path = recorder.save(tmp_path / "run.pickle")
    whole = pickle.loads(path.read_bytes())
    path.write_bytes(pickle.dumps({"segments": whole["segments"]}))
    found = diagnosis_of(path)
    assert found.peak_allocated_bytes == 40 * MIB == sum(found.at_peak.values())
    assert found.allocation_sites[0].where == "model.py:7", "blocks have stacks of their own"
    assert "this is the state at the snapshot" in " ".join(text_of(found).split())


def test_of_several_gpus_the_one_that_failed_is_shown(tmp_path, capsys):
    recorder = Recorder()
    recorder.malloc(40 * MIB, FORWARD)
    whole = pickle.loads(recorder.save(tmp_path / "run.pickle").read_bytes())
    trace, segments = whole["device_traces"][0], whole["segments"]
    failed = {"action": "oom", "size": 90 * MIB, "device_free": 0, "stream": 0, "frames": []}
    whole["device_traces"] = [list(trace), [], [*trace, failed], list(trace)]
    whole["segments"] = [one | {"device": at} for at in (0, 2, 3) for one in segments]
    path = tmp_path / "several.pickle"
    path.write_bytes(pickle.dumps(whole))
    recording = read_recording(path)
    assert shown_device(recording, [None]) == 2
    said = capsys.readouterr().err
    assert "cuda:2, which ran out of memory" in said
    assert "cuda:0, cuda:3" in said
    assert shown_device(recording, ["RTX 4090", "cuda:3"]) == 3
    assert not capsys.readouterr().err
    with pytest.raises(UsageError, match="nothing of device 9; it has 0, 1, 2, 3"):
        shown_device(recording, ["cuda:9"])


def test_who_pins_a_segment_is_named(tmp_path):
    recorder = Recorder()
    first, _ = recorder.malloc(9 * MIB, FORWARD), recorder.malloc(3 * MIB, LEAK)
    recorder.free(first)
    recorder.malloc(30 * MIB, FORWARD)
    found = diagnosis_of(recorder.save(tmp_path / "run.pickle"))
    (pin,) = found.pinned_by
    assert (pin.where, pin.live_bytes, pin.pinned_bytes) == ("train.py:24", 3 * MIB, 17 * MIB)


def test_an_output_that_outlives_its_step_is_named():
    """Step 1 makes 50 MiB at line 9, step 2 as much; `kept` lets go of the first only then."""
    spans = [("step 1", SpanKind.STEP, 0, 2), ("step 2", SpanKind.STEP, 2, 4)]
    sizes, categories = [50 * MIB, 50 * MIB], [Category.ACTIVATIONS] * 2
    lines = ["train.py:9"] * 2
    kept = tape_of(
        sizes, [0, 1, -1, -2], lines=lines, categories=categories, spans=[("step 1", 1, 0, 1), ("step 2", 1, 1, 4)]
    )
    let_go = tape_of(sizes, [0, -1, 1, -2], lines=lines, categories=categories, spans=spans)
    remedies = [diagnose(subject_of_tape(tape, CARD)).suggestions for tape in (kept, let_go)]
    found = [[one for one in some if one.what.startswith("`del`")] for some in remedies]
    assert [(one.where, one.saves_bytes, one.adds_seconds) for one in found[0]] == [("train.py:9", 50 * MIB, 0.0)]
    assert found[1] == []


def test_checkpointing_keeps_the_outputs_and_one_inside():
    """Three blocks of 10 MiB inside and 2 MiB of output: without the insides but for one, the peak is 20 MiB lower."""
    sizes = [10 * MIB, 2 * MIB] * 3
    tape = tape_of(sizes, [0, 1, 2, 3, 4, 5, -6, -5, -4, -3, -2, -1], categories=[Category.ACTIVATIONS] * 6)
    strings = (*tape.strings, "net.1", "net.2")
    first = len(tape.strings)
    tape.operators.module[:] = [2, 2, first, first, first + 1, first + 1]
    object.__setattr__(tape, "strings", strings)
    found = diagnose(subject_of_tape(tape, CARD))
    (remedy,) = [remedy for remedy in found.suggestions if remedy.what.startswith("checkpoint")]
    assert (remedy.where, remedy.saves_bytes) == ("net.*", 20 * MIB)
    assert remedy.adds_seconds is not None
    assert remedy.adds_seconds > 0


STEPS = [(f"step {n}", SpanKind.STEP, 2 * n - 2, 2 * n) for n in (1, 2, 3, 4)]


def suggested(tape, name, phase, dtype=""):
    """What is suggested of a tape whose operators are all of that name, phase and type."""
    first = len(tape.strings)
    object.__setattr__(tape, "strings", (*tape.strings, name, dtype))
    tape.operators.name[:], tape.operators.dtype[:], tape.operators.phase[:] = first, first + 1, phase
    return {one.what: one.saves_bytes for one in diagnose(subject_of_tape(tape, CARD)).suggestions}


def test_gradients_of_every_step_that_are_kept_grow_and_no_other_use_of_them_mends_it():
    tape = tape_of([5 * MIB] * 8, list(range(8)), categories=[Category.GRADIENTS] * 8, spans=STEPS)
    assert suggested(tape, "aten.mm", Phase.BACKWARD) == {}
    (grown,) = diagnose(subject_of_tape(tape, CARD)).growth
    assert (grown.category, grown.bytes_per_step, grown.num_blocks, grown.num_bytes) == (
        "gradients",
        10 * MIB,
        6,
        30 * MIB,
    )
    # Those of the last step alone, as in a recording that ends before they are freed, do not.
    tape = tape_of([MIB, MIB, MIB, MIB], [0, -1, 1, -2, 2, -3, 3], categories=[Category.GRADIENTS] * 4, spans=STEPS[:3])
    assert diagnose(subject_of_tape(tape, CARD)).growth == ()


def test_an_output_that_is_larger_in_each_step_is_held_by_nothing():
    """Its bytes grow with the sizes of the program: no sum or list holds outputs of several steps."""
    events = [0, 4, 1, -1, 2, -2, 3, -3]
    tape = tape_of(
        [10 * MIB, 20 * MIB, 30 * MIB, 40 * MIB, MIB], events, categories=[Category.ACTIVATIONS] * 5, spans=STEPS
    )
    found = diagnose(subject_of_tape(tape, CARD))
    assert [one.bytes_per_step for one in found.growth] == [10 * MIB]
    assert not [one for one in found.suggestions if "holds a loss or an output" in one.what]


SPANS = ("setup", "step 1", "step 2", "step 3", "step 4")


@pytest.mark.parametrize(("late", "grows"), [((3,), False), ((2, 4), True)])
def test_what_is_made_late_once_does_not_grow(late, grows):
    """As the states of a layer that is unfrozen in one of the steps."""
    sizes, events, spans = [], [], []
    for step, name in enumerate(SPANS):
        begin = len(events)
        for is_kept in (False, *([True] if step in late else [])):
            sizes.append(MIB)
            events += [len(sizes) - 1, *([] if is_kept else [-len(sizes)])]
        spans.append((name, SpanKind.STEP, begin, len(events)))
    assert bool(diagnose(subject_of_tape(tape_of(sizes, events, spans=spans), CARD)).growth) is grows


def test_what_the_next_step_replaces_does_not_grow_whatever_the_last_one_is_called():
    """An average that each step makes anew is freed by the next: an activation, but for the last, which is freed by none."""
    events = [0, 1, -1, 2, -2, 3, -3]
    spans = [(f"step {n + 1}", SpanKind.STEP, max(0, 2 * n - 1), 2 * n + 1) for n in range(4)]
    tape = tape_of([MIB] * 4, events, categories=[*[Category.ACTIVATIONS] * 3, Category.TEMPORARIES], spans=spans)
    assert diagnose(subject_of_tape(tape, CARD)).growth == ()


def test_suggestions_are_about_the_program_that_ran():
    def of(category, *rest):
        return suggested(tape_of([40 * MIB], [0, -1], categories=[category]), *rest)

    fused, eighth = "fused=True in the optimizer, or foreach=False where it has none", "an optimizer with 8-bit state"
    assert (
        list(of(Category.TEMPORARIES, "aten._foreach_sqrt", Phase.OPTIMIZER)) == []
    )  # its one temporary is the largest
    pair = [20 * MIB, 20 * MIB], [0, 1, -2, -1]
    assert suggested(tape_of(*pair), "aten._foreach_sqrt", Phase.OPTIMIZER) == {fused: 20 * MIB}
    assert suggested(tape_of(*pair), "aten._foreach_norm", Phase.OTHER) == {}
    history = tape_of([40 * MIB], [0, -1], categories=[Category.OPTIMIZER_STATE])
    object.__setattr__(history, "optimizers", ("LBFGS",))
    assert suggested(history, "aten.zeros", Phase.OPTIMIZER, "float32") == {}
    state = Category.OPTIMIZER_STATE
    assert of(state, "aten.zeros", Phase.OPTIMIZER, "float32") == {eighth: 30 * MIB}
    assert of(state, "aten.zeros", Phase.OPTIMIZER, "bfloat16") == {eighth: 20 * MIB}
    assert of(state, "aten.zeros", Phase.OPTIMIZER, "uint8") == {}
    assert of(Category.TEMPORARIES, "aten._log_softmax", Phase.FORWARD) == {}


def test_one_line_for_nothing_comes_before_what_saves_more():
    """Line 9 keeps 50 MiB for a step; 4 GiB of gradients could be freed one by one at no cost either, with a change of the loop."""
    sizes = [50 * MIB, 2 << 30, 2 << 30, 50 * MIB]
    categories = [Category.ACTIVATIONS, Category.GRADIENTS, Category.GRADIENTS, Category.ACTIVATIONS]
    spans = [("step 1", 1, 0, 1), ("step 2", 1, 1, 8)]
    tape = tape_of(sizes, [0, 1, 2, 3, -1, -2, -3, -4], lines=["train.py:9"] * 4, categories=categories, spans=spans)
    first, second, *_ = diagnose(subject_of_tape(tape, CARD)).suggestions
    assert (first.what.split()[0], first.is_one_line) == ("`del`", True)
    assert second.saves_bytes > 10 * first.saves_bytes
    assert second.adds_seconds == 0


def test_remedies_come_by_bytes_per_second_and_unknown_costs_last():
    categories = [Category.OPTIMIZER_STATE, Category.GRADIENTS, Category.GRADIENTS]
    tape = tape_of([400 * MIB, 200 * MIB, 100 * MIB], [0, 1, 2, -3, -2], categories=categories)
    costs = [remedy.adds_seconds for remedy in diagnose(subject_of_tape(tape, CARD)).suggestions]
    known = [cost for cost in costs if cost is not None]
    assert costs == known + [None] * (len(costs) - len(known))
    assert known == sorted(known)
    assert len(costs) > len(known) > 0


def test_a_saving_counts_only_where_no_other_moment_is_as_high():
    history = history_of_tape(tape_of([100 * MIB, 100 * MIB, 90 * MIB], [0, -1, 1, -2, 2]), CARD)
    one = np.array([0]), np.array([1])
    assert saved_bytes(history, np.array([100 * MIB]), *one) == 0
    both = saved_bytes(history, np.array([100 * MIB] * 2), np.array([0, 2]), np.array([1, 3]))
    assert both == 10 * MIB
    kept = saved_bytes(history, np.array([100 * MIB] * 2), np.array([0, 2]), np.array([1, 3]), kept_bytes=95 * MIB)
    assert kept == 5 * MIB


def test_a_run_that_asked_for_nothing_is_no_fault(tmp_path):
    found = diagnose(subject_of_tape(tape_of([], []), CARD))
    assert (found.peak_allocated_bytes, found.allocation_sites, found.suggestions) == (0, (), ())
    assert "peak allocated    0 B" in text_of(found)
    recorded = diagnosis_of(Recorder(before=[2 * GIB]).save(tmp_path / "run.pickle"))
    assert recorded.start_reserved_bytes == 2 * GIB


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_page_fits_the_console(tmp_path, width):
    found = diagnosis_of(training(tmp_path / "run.pickle", num_steps=4, leak_bytes=3 * MIB))
    assert max(map(len, text_of(found, width).splitlines())) <= width


@pytest.mark.parametrize(
    ("places", "shown"),
    [
        (["/home/me/a/x.py:1", "/home/me/b/y.py:2", "backward of X"], ["a/x.py:1", "b/y.py:2", "backward of X"]),
        (["/home/me/x.py:1"], ["x.py:1"]),
        (["C:\\work\\x.py:1", "C:\\work\\lib\\y.py:2"], ["x.py:1", "lib/y.py:2"]),
        (["train.py:1", ""], ["train.py:1", ""]),
    ],
)
def test_folders_that_all_lines_share_are_left_out(places, shown):
    strip = without_common_folder(places)
    assert [strip(place) for place in places] == shown
