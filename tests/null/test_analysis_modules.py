"""What a tape tells of the modules that ran: visits, what waits for the backward pass, and which storage is the output."""

import numpy as np

from tightfit.analysis.lifetimes import StorageLifetimes
from tightfit.analysis.modules import ModuleCalls
from tightfit.tape import Category, EventKind, Events, Operators, Phase, Source, SpanKind, Spans, Storages, Tape

KIB = 1024


class Scribe:
    """Writes a tape by hand: operators with the storages that they make, and frees."""

    def __init__(self) -> None:
        self.strings = {"": 0}
        self.operators: list[tuple[int, int, int]] = []
        self.storages: list[tuple[int, int, int]] = []
        self.events: list[tuple[int, int, int]] = []

    def operator(self, module: str, phase: Phase, *kib: int, source: Source = Source.TENSOR) -> list[int]:
        index = self.strings.setdefault(module, len(self.strings))
        name = self.strings.setdefault("aten.mul", len(self.strings))
        self.operators.append((name, index, phase))
        made = []
        for size in kib:
            self.storages.append((size * KIB, len(self.operators) - 1, source))
            self.events.append((EventKind.ALLOCATE, len(self.storages) - 1, len(self.operators)))
            made.append(len(self.storages) - 1)
        return made

    def free(self, *storages: int) -> None:
        self.events += [(EventKind.FREE, storage, len(self.operators)) for storage in storages]

    def tape(self) -> Tape:
        num, blocks = len(self.operators), len(self.storages)
        name, module, phase = zip(*self.operators, strict=True)
        sizes, allocated_at, sources = zip(*self.storages, strict=True)
        kind, storage, at = zip(*self.events, strict=True)
        zeros = [0] * num
        return Tape(
            target="by hand",
            versions={},
            traced_for="",
            strings=tuple(self.strings),
            operators=Operators.from_columns(
                {
                    "name": name,
                    "module": module,
                    "line": zeros,
                    "dtype": zeros,
                    "phase": phase,
                    "stream": zeros,
                    "flops": zeros,
                    "bytes_read": zeros,
                    "bytes_written": zeros,
                }
            ),
            storages=Storages.from_columns(
                {
                    "num_bytes": sizes,
                    "low_bytes": sizes,
                    "high_bytes": sizes,
                    "category": [Category.ACTIVATIONS] * blocks,
                    "source": sources,
                    "operator": allocated_at,
                    "stream": [0] * blocks,
                }
            ),
            events=Events.from_columns({"kind": kind, "storage": storage, "operator": at, "value": [0] * len(kind)}),
            spans=Spans.from_columns({"name": [0], "kind": [SpanKind.STEP], "begin": [0], "end": [len(self.events)]}),
            assumptions=(),
            host_peak_bytes=0,
        )


def two_steps() -> tuple[Tape, dict[str, int]]:
    """Two blocks with an inner module each, forwards and backwards, twice; the first forward of all asks for a workspace."""
    scribe, seen = Scribe(), {}
    for step in range(2):
        waiting = []
        for block in range(2):
            path = f"Net.h.{block}"
            (saved,) = scribe.operator(f"{path}.mlp", Phase.FORWARD, 40)
            if step == block == 0:
                scribe.operator(f"{path}.mlp", Phase.FORWARD, 8192, source=Source.CUBLAS)
            (passing,) = scribe.operator(f"{path}.mlp", Phase.FORWARD, 30)
            out, statistics = scribe.operator(path, Phase.FORWARD, 10, 1)
            scribe.free(passing)
            waiting.append((path, saved, out, statistics))
            seen |= {f"saved {step} {block}": saved, f"out {step} {block}": out, f"mean {step} {block}": statistics}
        for path, saved, out, statistics in reversed(waiting):
            scribe.operator(path, Phase.BACKWARD)
            scribe.operator(f"{path}.mlp", Phase.BACKWARD)
            scribe.free(saved, out, statistics)
        scribe.operator("", Phase.OPTIMIZER)
    return scribe.tape(), seen


def test_a_module_is_visited_once_a_step() -> None:
    tape, _ = two_steps()
    module_calls = ModuleCalls(StorageLifetimes(tape))
    calls = module_calls.calls("Net.h.1")
    assert len(calls) == module_calls.num_rounds == 2
    assert module_calls.modules_inside("Net.h.1") == ["Net.h.1", "Net.h.1.mlp"]
    assert [v.end - v.begin for v in calls] == [3, 3]
    assert all(v.end <= v.back_begin < v.back_end for v in calls)


def test_what_waits_is_what_the_backward_pass_finds_but_for_the_output() -> None:
    tape, seen = two_steps()
    for step, call in enumerate(ModuleCalls(StorageLifetimes(tape)).calls("Net.h.0")):
        # The output is born before the statistics that come with it, and a workspace of a library is nobody's.
        assert call.output == seen[f"out {step} 0"]
        assert call.saved.tolist() == [seen[f"saved {step} 0"], seen[f"mean {step} 0"]]


def test_the_input_is_the_last_large_storage_that_was_there_before() -> None:
    tape, seen = two_steps()
    module_calls = ModuleCalls(StorageLifetimes(tape))
    assert [v.input for v in module_calls.calls("Net.h.1")] == [seen["out 0 0"], seen["out 1 0"]]
    assert [v.input for v in module_calls.calls("Net.h.0")] == [-1, -1]


def test_an_output_that_nothing_waits_for_is_an_output_still() -> None:
    scribe = Scribe()
    (saved,) = scribe.operator("Net.a", Phase.FORWARD, 40)
    (out,) = scribe.operator("Net.a", Phase.FORWARD, 10)
    (copy,) = scribe.operator("Net.b", Phase.FORWARD, 20)
    scribe.free(out)
    scribe.operator("Net.b", Phase.BACKWARD)
    scribe.free(copy)
    scribe.operator("Net.a", Phase.BACKWARD)
    scribe.free(saved)
    module_calls = ModuleCalls(StorageLifetimes(scribe.tape()))
    (first,), (second,) = module_calls.calls("Net.a"), module_calls.calls("Net.b")
    assert (first.output, first.saved.tolist()) == (out, [saved])
    assert second.input == out and module_calls.lifetimes.freed_at[out] < second.back_event


def test_events_frame_the_visit() -> None:
    tape, seen = two_steps()
    module_calls = ModuleCalls(StorageLifetimes(tape))
    call = module_calls.calls("Net.h.1")[-1]
    kinds, storages = tape.events.kind, tape.events.storage
    inside = range(call.begin_event, call.end_event)
    allocations = [storages[i] for i in inside if kinds[i] == EventKind.ALLOCATE]
    assert allocations[0] == seen["saved 1 1"] and allocations[-1] == seen["mean 1 1"]
    (freed,) = np.flatnonzero((kinds == EventKind.FREE) & (storages == seen["saved 1 1"]))
    assert call.back_event <= freed


def test_a_module_that_ran_nothing_has_no_visits() -> None:
    tape, _ = two_steps()
    assert ModuleCalls(StorageLifetimes(tape)).calls("Net.h.7") == ()
    assert ModuleCalls(StorageLifetimes(tape)).modules_inside("Net.h.7") == []


def test_a_container_that_is_never_called_is_a_path_nevertheless() -> None:
    tape, _ = two_steps()
    assert ModuleCalls(StorageLifetimes(tape)).paths == [
        "Net",
        "Net.h",
        "Net.h.0",
        "Net.h.0.mlp",
        "Net.h.1",
        "Net.h.1.mlp",
    ]


def test_a_call_without_gradients_is_no_visit() -> None:
    scribe = Scribe()
    for is_trained in (False, True):
        (inner,) = scribe.operator("Net.block.0", Phase.FORWARD, 64)
        (output,) = scribe.operator("Net.block", Phase.FORWARD, 64)
        if not is_trained:
            scribe.free(inner, output)
            scribe.operator("Net.head", Phase.FORWARD, 64)
    scribe.operator("Net.block", Phase.BACKWARD, 64)
    scribe.free(inner, output)
    (call,) = ModuleCalls(StorageLifetimes(scribe.tape())).calls("Net.block")
    assert (call.begin, call.end) == (3, 5)
    assert call.saved.tolist() == [inner]


def test_visits_of_one_round_go_backwards_one_after_the_other() -> None:
    scribe, waiting = Scribe(), []
    for _ in range(3):
        (saved,) = scribe.operator("Policy.inner", Phase.FORWARD, 40)
        waiting.append((saved, *scribe.operator("Policy", Phase.FORWARD, 10)))
        scribe.operator("", Phase.FORWARD)
    for storages in reversed(waiting):
        scribe.operator("", Phase.BACKWARD, 10)
        scribe.operator("Policy", Phase.BACKWARD)
        scribe.operator("Policy.inner", Phase.BACKWARD)
        scribe.free(*storages)
        scribe.operator("", Phase.BACKWARD)
    first, second, third = ModuleCalls(StorageLifetimes(scribe.tape())).calls("Policy")
    assert [(v.back_begin, v.back_end) for v in (third, second, first)] == [(10, 12), (14, 16), (18, 20)]
    assert third.back_event < third.back_end_event <= second.back_event


def test_sums_of_gradients_at_the_end_belong_to_the_visit_before() -> None:
    scribe, saved = Scribe(), []
    for _ in range(2):
        saved += scribe.operator("Net.encoder.layer", Phase.FORWARD, 40)
        scribe.operator("Net.encoder.layer", Phase.FORWARD, 10)
        scribe.operator("Net.encoder", Phase.FORWARD)
    for storage in reversed(saved):
        for _ in range(3):
            scribe.operator("Net.encoder", Phase.BACKWARD, 10)
        scribe.operator("Net.encoder.layer", Phase.BACKWARD)
        scribe.operator("", Phase.BACKWARD)
        scribe.operator("Net.encoder.layer", Phase.BACKWARD)
        scribe.free(storage)
        # The gradients of its inputs are added up when nothing is saved any more, with an operator of no module in between.
        scribe.operator("", Phase.BACKWARD)
        scribe.operator("Net.encoder.layer", Phase.BACKWARD)
    first, second = ModuleCalls(StorageLifetimes(scribe.tape())).calls("Net.encoder.layer")
    assert [(v.back_begin, v.back_end) for v in (second, first)] == [(9, 14), (17, 22)]


def test_visits_that_go_backwards_side_by_side_share_the_backward_pass() -> None:
    scribe, saved = Scribe(), []
    for _ in range(2):
        saved += scribe.operator("Net.tower", Phase.FORWARD, 40)
        scribe.operator("Net.tower", Phase.FORWARD, 10)
        scribe.operator("", Phase.FORWARD)
    scribe.operator("", Phase.BACKWARD, 10)
    for storage in saved:
        scribe.operator("Net.tower", Phase.BACKWARD)
        scribe.free(storage)
    first, second = ModuleCalls(StorageLifetimes(scribe.tape())).calls("Net.tower")
    assert (first.back_begin, first.back_end) == (second.back_begin, second.back_end) == (7, 9)
