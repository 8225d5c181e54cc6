"""The history of a run: from a tape it says what the estimate says, block by block."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tightfit.devices.catalogue import find
from tightfit.simulate.history import CATEGORIES, UNKNOWN, History, user_frame
from tightfit.simulate.peak import estimate_peak
from tightfit.simulate.settings import AllocatorSettings
from tightfit.snapshots.history import history_of_tape
from tightfit.tape import Category, EventKind, Events, Operators, Phase, Source, SpanKind, Spans, Storages, Tape
from tightfit.units import MIB

CARD = find("RTX 4090")


def tape_of(sizes, events, *, categories=None, sources=None, lines=None, spans=None, capacity_gib=None) -> Tape:
    """A tape of one operator per storage; `events` are storage numbers, negative ones (minus one) for frees."""
    num = len(sizes)
    lines = lines or ["train.py:7"] * num
    strings = ("", "aten.mm", "net.0", "step 1", "step 2", "step 3", "step 4", "setup", *dict.fromkeys(lines))
    kinds = [EventKind.ALLOCATE if e >= 0 else EventKind.FREE for e in events]
    issued, counts = 0, []
    for kind in kinds:
        issued = min(num, issued + (kind == EventKind.ALLOCATE))
        counts.append(issued)
    spans = spans or [("step 1", SpanKind.STEP, 0, len(events))]
    return Tape(
        target="toy.py:workload",
        versions={"torch": "2.13.0"},
        traced_for=CARD.name,
        strings=strings,
        operators=Operators.from_columns(
            dict.fromkeys(("dtype", "stream"), [0] * num)
            | {"name": [1] * num, "module": [2] * num, "line": [strings.index(line) for line in lines]}
            | {"flops": [1e9] * num, "bytes_read": sizes, "bytes_written": sizes, "phase": [Phase.FORWARD] * num}
        ),
        storages=Storages.from_columns(
            dict.fromkeys(("num_bytes", "low_bytes", "high_bytes"), sizes)
            | {"category": categories or [Category.TEMPORARIES] * num, "source": sources or [Source.TENSOR] * num}
            | {"operator": list(range(num)), "stream": [0] * num}
        ),
        events=Events.from_columns(
            {
                "kind": kinds,
                "storage": [e if e >= 0 else -e - 1 for e in events],
                "operator": counts,
                "value": [0] * len(events),
            }
        ),
        spans=Spans.from_columns(
            {
                "name": [strings.index(name) for name, _, _, _ in spans],
                "kind": [kind for _, kind, _, _ in spans],
                "begin": [begin for _, _, begin, _ in spans],
                "end": [end for _, _, _, end in spans],
            }
        ),
        assumptions=(),
        host_peak_bytes=0,
    )


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
    assert blocks.born.tolist() == [0, 1, 3]
    assert blocks.died.tolist() == [4, 2, 4]
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
    assert np.all(np.diff(history.blocks.born) > 0)
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
