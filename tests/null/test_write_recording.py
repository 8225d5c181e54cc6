"""A tape written as a recording: replayed, it is the estimate to the byte, and torch's viewer can read all of it."""

import dataclasses
import pickle
import pickletools
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from tightfit.allocator.settings import NUM_INTERVALS, AllocatorSettings
from tightfit.cli.main import run
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of
from tightfit.recordings.allocator_trace import plain_settings
from tightfit.recordings.marks import KEY, Marks
from tightfit.recordings.read import read_recording
from tightfit.recordings.replayed import replay
from tightfit.recordings.write import snapshot_of_tape, write_snapshot, write_tape
from tightfit.simulate.history import CATEGORIES
from tightfit.simulate.peak import estimate_peak
from tightfit.tape import Category, Collectives, EventKind, Events, Operators, Source, SpanKind, Spans, Storages, Tape
from tightfit.units import GIB, MIB

CARD = find("RTX 4090")
SETTINGS = [
    "",
    "expandable_segments:True",
    "max_split_size_mb:64,garbage_collection_threshold:0.8",
    "roundup_power2_divisions:[1:4,256:8,>:2],large_segment_size_mb:32",
]
# What torch's viewer understands (torch/utils/viz/MemoryViz.js, unpickle); a pickle with anything else does not open there.
VIEWER_OPCODES = {
    *("PROTO", "STOP", "FRAME", "MARK", "MEMOIZE", "BINPUT", "LONG_BINPUT", "BINGET", "LONG_BINGET", "NONE"),
    *("NEWTRUE", "NEWFALSE", "BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"),
    *("EMPTY_DICT", "DICT", "SETITEM", "SETITEMS", "EMPTY_LIST", "LIST", "APPEND", "APPENDS"),
    *("EMPTY_TUPLE", "TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"),
}
Step = tuple[EventKind, int, int]  # the kind of an event, its storage, its value


def tape_of(sizes: list[int], events: list[Step], *, streams: list[int] | None = None) -> Tape:
    """Each storage has an operator of its own, in one of two modules; there are two steps, of half the events each."""
    number = len(sizes)
    half = len(events) // 2
    steps = [row for row in ((5, SpanKind.STEP, 0, half), (6, SpanKind.STEP, half, len(events))) if row[2] < row[3]]
    zeros = [0] * number
    allocated_at = np.cumsum([kind == EventKind.ALLOCATE for kind, _, _ in events]).tolist()
    return Tape(
        target="toy.py:workload",
        versions={"torch": "2.13.0"},
        traced_for=CARD.name,
        strings=("", "aten.mm", "Model.layers.0", "train.py:7", "float32", "step 1", "step 2", "Model.layers.1"),
        operators=Operators.from_columns(
            dict.fromkeys(("phase", "stream", "flops"), zeros)
            | {"name": [1] * number, "line": [3] * number, "dtype": [4] * number}
            | {"module": [2 if at % 2 else 7 for at in range(number)]}
            | {"bytes_read": sizes, "bytes_written": sizes}
        ),
        storages=Storages.from_columns(
            dict.fromkeys(("num_bytes", "low_bytes", "high_bytes"), sizes)
            | {"category": [at % len(Category) for at in range(number)], "source": [Source.TENSOR] * number}
            | {"operator": [at - 1 for at in range(number)], "stream": streams or zeros}
        ),
        events=Events.from_columns(
            {"kind": [e[0] for e in events], "storage": [e[1] for e in events], "value": [e[2] for e in events]}
            | {"operator": allocated_at}
        ),
        spans=Spans.from_columns(
            {key: [row[at] for row in steps] for at, key in enumerate(("name", "kind", "begin", "end"))}
        ),
        assumptions=(),
        host_peak_bytes=0,
    )


@st.composite
def tapes(draw: st.DrawFn) -> Tape:
    """Births and deaths in any order, on two streams, with blocks that the other stream uses too, waits, and caches given back."""
    sizes = draw(st.lists(st.sampled_from([0, 1, 700, 4096, MIB, 3 * MIB, 9 * MIB, 40 * MIB, 130 * MIB]), max_size=30))
    streams = [draw(st.integers(0, 1)) for _ in sizes]
    events: list[Step] = []
    alive: list[int] = []
    for storage in range(len(sizes)):
        events.append((EventKind.ALLOCATE, storage, 0))
        alive.append(storage)
        if draw(st.booleans()):
            events.append((EventKind.USE, draw(st.sampled_from(alive)), 1))
        while alive and draw(st.booleans()):
            events.append((EventKind.FREE, alive.pop(draw(st.integers(0, len(alive) - 1))), 0))
        if draw(st.integers(0, 5)) == 0:
            events.append((draw(st.sampled_from([EventKind.SYNCHRONIZE, EventKind.EMPTY_CACHE])), -1, 0))
    return tape_of(sizes, events, streams=streams)


@pytest.mark.parametrize("text", SETTINGS)
@hypothesis_settings(max_examples=60, deadline=None)
@given(tape=tapes())
def test_replayed_it_is_the_estimate_to_the_byte(
    text: str, tape: Tape, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / f"written{SETTINGS.index(text)}.pickle"
    settings = AllocatorSettings.parse(text)
    write_tape(path, tape, CARD, settings)
    recording = read_recording(path)
    found = replay(recording)
    expected = estimate_peak(tape, CARD, settings).peak
    assert (found.peak_allocated_bytes, found.peak_reserved_bytes) == (
        expected.allocated_bytes,
        expected.reserved_bytes,
    )
    assert found.agrees
    assert found.num_moved_blocks == 0
    assert recording.settings == settings


def test_a_card_that_is_nearly_full_gives_its_cache_back_in_the_recording_too(tmp_path: Path) -> None:
    tape = tape_of(
        [12 * GIB, 14 * GIB], [(EventKind.ALLOCATE, 0, 0), (EventKind.FREE, 0, 0), (EventKind.ALLOCATE, 1, 0)]
    )
    write_tape(tmp_path / "x.pickle", tape, CARD)
    found = replay(read_recording(tmp_path / "x.pickle"))
    assert found.agrees
    assert found.peak_reserved_bytes == estimate_peak(tape, CARD).peak.reserved_bytes == 14 * GIB


def test_what_does_not_fit_is_recorded_as_if_there_were_no_limit(tmp_path: Path) -> None:
    tape = tape_of([30 * GIB], [(EventKind.ALLOCATE, 0, 0)])
    write_tape(tmp_path / "x.pickle", tape, CARD)
    assert replay(read_recording(tmp_path / "x.pickle")).peak_reserved_bytes == 30 * GIB


def test_events_are_those_that_torch_would_have_recorded() -> None:
    events = [
        *((EventKind.ALLOCATE, 1, 0), (EventKind.USE, 1, 1), (EventKind.FREE, 1, 0)),
        *((EventKind.ALLOCATE, 2, 0), (EventKind.SYNCHRONIZE, -1, 0), (EventKind.EMPTY_CACHE, -1, 0)),
    ]
    (trace,) = snapshot_of_tape(tape_of([0, 20 * MIB, 700], events), CARD)["device_traces"]
    assert [(event["action"], event["size"]) for event in trace] == [
        *(("segment_alloc", 20 * MIB), ("alloc", 20 * MIB), ("free_requested", 20 * MIB)),
        *(("segment_alloc", 2 * MIB), ("alloc", 700)),
        *(("free_completed", 20 * MIB), ("segment_free", 20 * MIB)),
    ]
    frame = {"filename": "train.py", "line": 7, "name": "aten.mm"}
    assert trace[1] | {"frames": [frame], "category": "gradients", "user_metadata": "Model.layers.1"} == trace[1]
    times = [event["time_us"] for event in trace]
    assert times == sorted(times)
    assert times[-1] > 0


def test_segments_are_filled_by_their_blocks() -> None:
    events = [(EventKind.ALLOCATE, at, 0) for at in range(3)] + [(EventKind.FREE, 1, 0)]
    snapshot = snapshot_of_tape(tape_of([700, 4096, 3 * MIB], events), CARD)
    small, large = snapshot["segments"]
    assert (small["segment_type"], small["total_size"], small["allocated_size"]) == ("small", 2 * MIB, 1024)
    assert [(b["size"], b["requested_size"], b["state"]) for b in small["blocks"]] == [
        (1024, 700, "active_allocated"),
        (2 * MIB - 1024, 0, "inactive"),
    ]
    assert (large["segment_type"], large["total_size"], large["is_expandable"]) == ("large", 20 * MIB, False)
    assert large["blocks"][0]["frames"] == [{"filename": "train.py", "line": 7, "name": "aten.mm"}]


def test_marks_say_which_step_each_event_belongs_to_and_what_each_block_is() -> None:
    sizes = [700, 800, 3 * MIB, 900]
    events = [(EventKind.ALLOCATE, at, 0) for at in range(4)]
    snapshot = snapshot_of_tape(tape_of(sizes, events), CARD)
    (trace,) = snapshot["device_traces"]
    marks = Marks.from_plain(snapshot[KEY])
    assert (marks.origin, marks.device, marks.capacity_bytes) == ("estimate", CARD.name, CARD.capacity_bytes)
    assert [[e["size"] for e in trace[s.begin : s.end] if e["action"] == "alloc"] for s in marks.spans] == [
        sizes[:2],
        sizes[2:],
    ]
    found = [
        (event["size"], CATEGORIES[category], marks.modules[module])
        for event, category, module in zip(
            trace, marks.category_of_events(len(trace)), marks.module_of_events(len(trace)), strict=True
        )
        if event["action"] == "alloc"
    ]
    assert found == [
        (700, "parameters", ""),
        (800, "gradients", "Model.layers.1"),
        (3 * MIB, "optimizer_state", "Model.layers.0"),
        (900, "activations", "Model.layers.1"),
    ]
    names = [(note["name"], note["stage"]) for note in snapshot["external_annotations"]]
    assert names == [(f"step {number}", stage) for number in (1, 2) for stage in ("START", "END")]


@pytest.mark.parametrize("text", SETTINGS)
def test_the_viewer_knows_every_opcode_and_finds_the_category_that_it_needs(text: str, tmp_path: Path) -> None:
    sizes = [700, 3 * MIB, 40 * MIB] * 100
    events = [(EventKind.ALLOCATE, at, 0) for at in range(300)] + [(EventKind.FREE, at, 0) for at in range(150)]
    write_tape(tmp_path / "x.pickle", tape_of(sizes, events), CARD, AllocatorSettings.parse(text))
    data = (tmp_path / "x.pickle").read_bytes()
    opcodes = {opcode.name for opcode, _, _ in pickletools.genops(data)}
    assert opcodes <= VIEWER_OPCODES
    snapshot = pickle.loads(data)
    assert "unknown" in {event.get("category") for event in snapshot["device_traces"][0]}
    assert all(event["addr"] < 1 << 53 for event in snapshot["device_traces"][0])  # the viewer's numbers are doubles


whole_mebibytes = st.integers(11, 1 << 20).map(lambda number: number * MIB)


@given(
    st.builds(
        AllocatorSettings,
        max_split_size_bytes=st.none() | whole_mebibytes,
        max_non_split_rounding_bytes=whole_mebibytes,
        garbage_collection_threshold=st.sampled_from([0.0, 0.1, 0.625, 0.999]),
        roundup_power2_divisions=st.tuples(*[st.sampled_from([0, 1, 2, 16])] * NUM_INTERVALS),
        large_segment_size_bytes=whole_mebibytes,
        per_process_memory_fraction=st.sampled_from([0.0, 0.5, 1.0]),
    ).filter(
        lambda s: (s.max_split_size_bytes or 1 << 60) >= s.large_segment_size_bytes <= s.max_non_split_rounding_bytes
    )
)
def test_settings_are_read_as_they_were_written(settings: AllocatorSettings) -> None:
    assert AllocatorSettings.parse(plain_settings(settings)["PYTORCH_CUDA_ALLOC_CONF"]) == settings


def test_an_empty_run_is_a_recording_too(tmp_path: Path) -> None:
    write_tape(tmp_path / "x.pickle", tape_of([], []), CARD)
    assert replay(read_recording(tmp_path / "x.pickle")).peak_reserved_bytes == 0


def test_a_write_that_fails_leaves_the_file_that_was_there(tmp_path: Path) -> None:
    path = tmp_path / "x.pickle"
    write_snapshot(path, {"segments": [], "device_traces": []})
    before = path.read_bytes()
    with pytest.raises((pickle.PicklingError, AttributeError)):
        write_snapshot(path, {"segments": lambda: None})
    assert path.read_bytes() == before


def test_the_command_writes_it_beside_its_answer(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tape = tape_of([3 * MIB], [(EventKind.ALLOCATE, 0, 0)])
    tape.save(tmp_path / "run.npz")
    out = str(tmp_path / "x.pickle")
    arguments = ["estimate", str(tmp_path / "run.npz"), "--json", "--save-recording", out]
    assert run([*arguments, "--device", "4090", "--alloc-conf", "expandable_segments:True"]) == 0
    assert capsys.readouterr().out.count("\n") == 1
    recording = read_recording(out)
    assert recording.settings.expandable_segments
    assert replay(recording).peak_reserved_bytes == 20 * MIB
    assert run([*arguments, "--device", "4090", "--device", "4080"]) == 2
    assert "one GPU" in capsys.readouterr().err
    assert run([*arguments[:-1], str(tmp_path / "nowhere" / "x.pickle"), "--device", "4090"]) == 2
    assert "there is no folder" in capsys.readouterr().err


def test_a_recording_has_what_communicators_leave_of_the_card(tmp_path: Path) -> None:
    """The cache is given back where two halves of the card do not fit beside NCCL, as in the estimate."""
    half = (CARD.capacity_bytes - CARD.context_bytes) // 2 // MIB * MIB
    plain = tape_of(
        [half - 64 * MIB, half + 32 * MIB],
        [(EventKind.ALLOCATE, 0, 0), (EventKind.FREE, 0, 0), (EventKind.ALLOCATE, 1, 0), (EventKind.FREE, 1, 0)],
    )
    ranks = dataclasses.replace(
        plain,
        num_ranks=2,
        communicators=((0, 1),),
        collectives=Collectives.from_rows([(0, 0, 1024, 0, 2, -1)]),
    )
    path = tmp_path / "rank.pickle"
    write_tape(path, ranks, CARD)
    expected = estimate_peak(ranks, CARD, node=node_of(CARD)).peak.reserved_bytes
    assert replay(read_recording(path)).peak_reserved_bytes == expected < 2 * half - 32 * MIB
