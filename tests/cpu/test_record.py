"""A run on the host is recorded as torch records one on a card, and is not changed by it."""

import json
import pickle
import runpy
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

import tightfit
from tightfit.cli.main import run
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.fit import capture
from tightfit.recordings.marks import KEY, Marks
from tightfit.recordings.write import snapshot_of_tape, write_tape
from tightfit.runtime.record_host import HostRecorder
from tightfit.simulate.history import CATEGORIES
from tightfit.tape import Tape

WEIGHT_BYTES = 64 * 256 * 4
LOSS_BYTES = 4

WORKLOAD = """
import torch

def workload(device="cuda", steps=3):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 16)).to(device)
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.randn(32, 64, device=device)).sum().backward()
        optimizer.step()
        yield
        optimizer.zero_grad()
"""
SCRIPT = WORKLOAD + "import sys\nfor at, _ in enumerate(workload('cpu', int(sys.argv[1]))):\n    print('turn', at)\n"


def train(num_steps: int) -> list[float]:
    torch.manual_seed(0)
    model = torch.nn.Linear(64, 256, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(num_steps):
        loss = model(torch.randn(32, 64)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def read(path: Path | str) -> tuple[list[dict[str, Any]], Marks]:
    plain = pickle.loads(Path(path).read_bytes())
    marks = Marks.from_plain(plain[KEY])
    return plain["device_traces"][marks.trace], marks


def alive_at(trace: list[dict[str, Any]], marks: Marks, event: int) -> Counter[tuple[str, int]]:
    """The category and size of each block that was born in the trace and lives before `event`."""
    categories = marks.category_of_events(len(trace)).tolist()
    alive: dict[int, tuple[str, int]] = {}
    for at, entry in enumerate(trace[:event]):
        if entry["action"] == "alloc":
            alive[entry["addr"]] = (CATEGORIES[categories[at]], entry["size"])
        elif entry["action"] == "free_requested":
            alive.pop(entry["addr"], None)
    return Counter(alive.values())


def test_what_lives_at_the_end_of_a_step_is_what_one_counts_by_hand(tmp_path: Path) -> None:
    with tightfit.record(tmp_path / "x.pickle") as recording:
        train(4)
    assert recording.written is not None
    assert (recording.written.num_steps, recording.written.origin) == (4, "host")
    trace, marks = read(tmp_path / "x.pickle")
    steps = [span for span in marks.spans if span.kind == "step"]
    assert alive_at(trace, marks, steps[1].end) == {
        ("parameters", WEIGHT_BYTES): 1,
        ("gradients", WEIGHT_BYTES): 1,
        ("optimizer_state", WEIGHT_BYTES): 1,
        ("activations", LOSS_BYTES): 1,
    }
    assert marks.modules == ("Linear",)
    assert recording.written.num_events == len(trace)


def test_the_run_is_not_changed(tmp_path: Path) -> None:
    plain = train(5)
    with tightfit.record(tmp_path / "x.pickle"):
        recorded = train(5)
    assert recorded == plain
    assert train(5) == plain
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward


def test_what_was_there_before_is_the_start_and_has_its_category(tmp_path: Path) -> None:
    model = torch.nn.Linear(64, 256, bias=False)
    with tightfit.record(tmp_path / "x.pickle"):
        model(torch.randn(32, 64)).sum().backward()
    trace, marks = read(tmp_path / "x.pickle")
    assert not [entry for entry in trace if entry["action"] == "alloc" and entry["size"] == WEIGHT_BYTES][1:]
    assert CATEGORIES.index("parameters") in marks.start_categories
    assert tightfit.replay(tmp_path / "x.pickle").agrees
    assert [span.name for span in marks.spans][:2] == ["set-up", "step 1"]
    assert model.weight.grad is not None


def test_an_error_passes_through_and_its_recording_is_written(tmp_path: Path) -> None:
    recording = tightfit.record(tmp_path / "x.pickle")

    def fail() -> None:
        with recording:
            train(2)
            torch.nn.Linear(4, 4)(torch.ones(1, 4))
            raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    trace, marks = read(tmp_path / "x.pickle")
    assert recording.written is not None
    assert [span.name for span in marks.spans][-2:] == ["step 2", "step 3"]
    assert marks.spans[-1].end == len(trace)


def test_an_error_is_not_hidden_by_a_file_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    recording = tightfit.record(folder / "x.pickle")

    def fail() -> None:
        with recording:
            folder.rmdir()
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        fail()
    assert recording.written is None
    assert "could not be written" in capsys.readouterr().err


def test_a_program_that_changes_its_folder_finds_the_recording_where_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with tightfit.record("x.pickle"):
        train(1)
        monkeypatch.chdir(tmp_path / "run")
    assert (tmp_path / "x.pickle").is_file()
    assert not (tmp_path / "run" / "x.pickle").exists()


def test_the_user_may_say_where_steps_end(tmp_path: Path) -> None:
    with tightfit.record(tmp_path / "x.pickle") as recording:
        for _ in range(3):
            train(2)
            recording.step()
    assert recording.written is not None
    assert recording.written.num_steps == 3


def test_a_step_ends_with_the_optimizer_that_steps_least_often(tmp_path: Path) -> None:
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    often, seldom = (torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, second))
    with tightfit.record(tmp_path / "x.pickle") as recording:
        for _ in range(3):
            for optimizer, model in ((often, first), (often, first), (seldom, second)):
                model(torch.ones(1, 4)).sum().backward()
                optimizer.step()
    assert recording.written is not None
    assert recording.written.num_steps == 3


def optimizers_of(num: int) -> list[torch.optim.Optimizer]:
    return [torch.optim.SGD(torch.nn.Linear(4, 4).parameters(), lr=0.1, momentum=0.9) for _ in range(num)]


def turn(optimizer: torch.optim.Optimizer) -> None:
    torch.stack([parameter.sum() for parameter in optimizer.param_groups[0]["params"]]).sum().backward()
    optimizer.step()


def test_an_optimizer_of_a_run_before_that_still_lives_has_no_say(tmp_path: Path) -> None:
    (left_over,) = optimizers_of(1)
    turn(left_over)
    with tightfit.record(tmp_path / "x.pickle") as recording:
        train(4)
    assert recording.written is not None
    assert recording.written.num_steps == 4


@pytest.mark.parametrize(
    ("turns", "num_steps"),
    [
        ("01 01 01", 3),
        ("001", 1),  # cut short in its first turn
        ("001 001 00", 3),  # the last turn is the start of one that goes on
        ("000 1111", 7),  # one stage after the other
    ],
)
def test_the_slowest_optimizer_ends_the_steps_of_its_stage(tmp_path: Path, turns: str, num_steps: int) -> None:
    optimizers = optimizers_of(2)
    path = tmp_path / "x.pickle"

    def run() -> None:
        with tightfit.record(path):
            for who in turns.replace(" ", ""):
                turn(optimizers[int(who)])
            if turns.endswith("00"):
                raise RuntimeError("out of memory")

    if turns.endswith("00"):
        with pytest.raises(RuntimeError, match="out of memory"):
            run()
    else:
        run()
    assert sum(span.kind == "step" for span in read(path)[1].spans) == num_steps


def test_an_optimizer_made_anew_for_the_same_parameters_and_one_inside_another_are_one(tmp_path: Path) -> None:
    class Outer(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        def step(self, closure: Any = None) -> None:
            self.inner.step()
            self.inner.step()

    parameters = list(torch.nn.Linear(4, 4).parameters())
    with tightfit.record(tmp_path / "x.pickle") as recording:
        for _ in range(3):
            turn(Outer(torch.optim.SGD(parameters, lr=0.1)))
    assert recording.written is not None
    assert recording.written.num_steps == 3


def test_a_step_that_raised_and_an_optimizer_without_parameters_hide_no_later_steps(tmp_path: Path) -> None:
    class Failing(torch.optim.SGD):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, lr=0.1)
            self.turns = 0

        def step(self, closure: Any = None) -> None:
            self.turns += 1
            if self.turns == 2:
                raise RuntimeError("once")
            super().step()

    optimizer = Failing(torch.nn.Linear(4, 4).parameters())
    empty = torch.optim.SGD([{"params": []}], lr=0.1)
    with tightfit.record(tmp_path / "x.pickle") as recording:
        for number in range(5):
            if number == 1:
                with pytest.raises(RuntimeError, match="once"):
                    turn(optimizer)
            else:
                turn(optimizer)
            empty.step()
    assert recording.written is not None
    assert recording.written.num_steps == 4


def test_stacks_are_those_of_the_user(tmp_path: Path) -> None:
    with tightfit.record(tmp_path / "with.pickle"):
        train(1)
    with tightfit.record(tmp_path / "without.pickle", stacks=False):
        train(1)
    with_stacks = [e for e in read(tmp_path / "with.pickle")[0] if e["action"] == "alloc"]
    assert all(any(frame["filename"] == __file__ for frame in event["frames"]) for event in with_stacks)
    own = str(Path(tightfit.__file__).parent)
    assert not any(frame["filename"].startswith(own) for event in with_stacks for frame in event["frames"])
    assert not any(event["frames"] for event in read(tmp_path / "without.pickle")[0])


def test_one_recording_at_a_time_and_only_where_it_can_be_written(tmp_path: Path) -> None:
    with tightfit.record(tmp_path / "x.pickle"), pytest.raises(UsageError, match="under way"):
        tightfit.record(tmp_path / "y.pickle").__enter__()
    with pytest.raises(UsageError, match="there is no folder"):
        tightfit.record(tmp_path / "nowhere" / "x.pickle")
    with pytest.raises(UsageError, match="at least one event"):
        tightfit.record(tmp_path / "x.pickle", max_events=0)
    with pytest.raises(UsageError, match="nothing is being recorded"):
        tightfit.record(tmp_path / "x.pickle").step()


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")  # torch 2.11
def test_checkpointing_sparse_tensors_resized_storages_and_higher_order_operators_are_recorded(tmp_path: Path) -> None:
    from torch.nn.attention.flex_attention import flex_attention
    from torch.utils.checkpoint import checkpoint

    with tightfit.record(tmp_path / "x.pickle"):
        checkpoint(torch.nn.Linear(8, 8), torch.ones(4, 8, requires_grad=True), use_reentrant=False).sum().backward()
        sparse = torch.sparse_coo_tensor([[0], [1]], [1.0], (2, 2), check_invariants=True)
        assert (sparse + sparse).to_dense().sum() == 2
        grown = torch.ones(3).resize_(100_000)
        with torch.inference_mode():
            query = torch.ones(1, 2, 16, 16)
            assert flex_attention(query, query, query).shape == query.shape
    trace, _ = read(tmp_path / "x.pickle")
    assert 4 * len(grown) in [event["size"] for event in trace if event["action"] == "alloc"]
    assert tightfit.replay(tmp_path / "x.pickle").agrees


@pytest.fixture(scope="module")
def workload(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workload")
    (folder / "work.py").write_text(WORKLOAD)
    (folder / "train.py").write_text(SCRIPT)
    return folder


@pytest.fixture(scope="module")
def tape(workload: Path) -> Tape:
    return capture(f"{workload / 'work.py'}:workload", device="RTX 4090")


def test_an_estimate_and_a_recording_hold_the_same_parameters_gradients_and_states(
    workload: Path, tape: Tape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for Adam's step counters, which torch keeps on the host also where the parameters are on a card."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    out = str(tmp_path / "x.pickle")
    assert (
        run(["record", "--host", f"{workload / 'work.py'}:workload", "-p", "device=cpu", "--steps", "3", "-o", out])
        == 0
    )
    write_tape(tmp_path / "y.pickle", tape, find("RTX 4090"))
    found = []
    for path in (out, tmp_path / "y.pickle"):
        trace, marks = read(path)
        step = next(span for span in marks.spans if span.name == "step 2")
        alive = alive_at(trace, marks, step.end)
        found.append(
            {
                key: count
                for key, count in alive.items()
                if key[0] in ("parameters", "gradients", "optimizer_state") and key[1] > 4
            }
        )
    assert found[0] == found[1]
    assert sum(found[0].values()) == 16


@pytest.mark.skipif(sys.platform == "win32", reason="needs a shell script")
@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
@pytest.mark.parametrize("of", ["estimate", "recording"])
def test_torchs_own_viewer_reads_it(
    of: str, conf: str, tape: Tape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", conf)
    path = tmp_path / "x.pickle"
    if of == "estimate":
        write_tape(path, tape, find("RTX 4090"), tightfit.fit.allocator_settings())
    else:
        kept = [torch.ones(100_000)]
        with tightfit.record(path):
            train(3)
            kept.append(torch.ones(200_000))
    # The viewer's flame graphs are drawn by a script that it would fetch from the net. It writes all lines before it reads one, so this one waits.
    script = tmp_path / ".cache" / "flamegraph.pl"
    script.parent.mkdir()
    script.write_text('#!/bin/sh\nlines=$(cat)\nprintf "%s\\n" "$lines"\n')
    script.chmod(0o755)
    monkeypatch.setenv("HOME", str(tmp_path))
    output = tmp_path / "out"
    for command in ("trace_plot", "segment_plot", "segments", "memory"):
        monkeypatch.setattr(sys, "argv", ["_memory_viz.py", command, str(path), "-o", str(output)])
        runpy.run_module("torch.cuda._memory_viz", run_name="__main__")
        assert len(output.read_text()) > 100
        assert command in ("trace_plot", "segment_plot") or "active_allocated" in output.read_text()
        output.unlink()
    for command in ("stats", "trace"):
        monkeypatch.setattr(sys, "argv", ["_memory_viz.py", command, str(path)])
        runpy.run_module("torch.cuda._memory_viz", run_name="__main__")
        assert "total_allocated" in (said := capsys.readouterr().out) or "TOTAL MEM" in said
    assert tightfit.replay(path).agrees


def record_script(workload: Path, *arguments: str, script: str = "train.py") -> subprocess.CompletedProcess[str]:
    program = str(Path(sys.executable).with_name("tightfit"))
    return subprocess.run(
        [program, "record", "--host", *arguments[:-1], script, "--", *arguments[-1:]],
        cwd=workload,
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_script_runs_as_it_would_and_is_recorded_to_its_end(workload: Path) -> None:
    answer = record_script(workload, "3")
    assert answer.returncode == 0
    assert answer.stdout.split("\n") == ["turn 0", "turn 1", "turn 2", ""]
    assert answer.stderr.startswith("tightfit: wrote train.recording.pickle: ")
    assert " events in 3 steps on host" in answer.stderr
    assert "next: tightfit doctor train.recording.pickle" in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert tightfit.replay(workload / "train.recording.pickle").agrees


def in_this_process(
    workload: Path, monkeypatch: pytest.MonkeyPatch, text: str, *arguments: str, after: tuple[str, ...] = ()
) -> int:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.chdir(workload)
    (workload / "other.py").write_text(text)
    return run(["record", "--host", "-o", "other.pickle", *arguments, "other.py", *(("--", *after) if after else ())])


def test_it_ends_after_the_steps_that_were_asked_for(
    workload: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    left_over = optimizers_of(1)
    assert in_this_process(workload, monkeypatch, SCRIPT, "--steps", "2", after=("1000",)) == 0
    assert left_over
    said = capsys.readouterr()
    assert said.out == "turn 0\nturn 1\n"
    assert " events in 2 steps on host" in said.err


@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("sys.exit(7)", 7, "tightfit: wrote"),
        ("sys.exit()", 0, "tightfit: wrote"),
        ("sys.exit('no more')", 1, "no more\ntightfit: wrote"),
        ("raise ValueError('boom')", 1, "ValueError: boom\ntightfit: wrote"),
        ("raise KeyboardInterrupt", 130, "tightfit: interrupted; wrote"),
    ],
)
def test_however_a_script_ends_its_recording_is_written_and_its_exit_code_is_its_own(
    end: str,
    code: int,
    says: str,
    workload: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    script = f"import sys, torch\nkept = torch.ones(1000)\n{end}\n"
    assert in_this_process(workload, monkeypatch, script) == code
    said = capsys.readouterr().err
    assert says in said
    assert "tightfit/cli" not in said
    trace, _ = read(workload / "other.pickle")
    assert 4000 in [event["size"] for event in trace]


# A callback that runs no Python: the interrupt is there when the callbacks of older references to the same object are called.
INTERRUPTED_DEATH = """
import _thread, functools, itertools, signal, sys, torch, weakref
signal.signal(signal.SIGINT, signal.default_int_handler)
interrupts = map(_thread.interrupt_main, itertools.repeat(signal.SIGINT))
{made}
reference = weakref.ref({dies}, functools.partial(next, interrupts))
del x
for _ in range(10):
    pass
print('the interrupt was lost')
"""


@pytest.mark.parametrize(
    ("made", "dies"),
    [
        pytest.param("x = torch.ones(1000)", "x.untyped_storage()", id="storage"),
        pytest.param(
            "p = torch.ones(2, requires_grad=True)\np.sum().backward()\nx = torch.optim.SGD([p])\nx.step()",
            "x",
            id="optimizer",
        ),
    ],
)
def test_an_interrupt_at_the_death_of_what_is_followed_is_not_lost(
    made: str, dies: str, workload: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = INTERRUPTED_DEATH.format(made=made, dies=dies)
    before = signal.getsignal(signal.SIGINT)
    try:
        assert in_this_process(workload, monkeypatch, script) == 130
    finally:
        signal.signal(signal.SIGINT, before)
    said = capsys.readouterr()
    assert "lost" not in said.out
    assert "tightfit: interrupted; wrote other.pickle" in said.err


def test_a_death_stands_where_it_happened_and_has_its_own_time(tmp_path: Path) -> None:
    """Nothing runs between the death and the end that the recorder could see; the death is not of the time of the end."""
    with tightfit.record(tmp_path / "x.pickle"):
        first = torch.ones(1000)
        address = first.untyped_storage()._cdata
        del first
        after_us = time.time_ns() // 1000
        while time.time_ns() // 1000 <= after_us + 1:
            pass
        kept = torch.ones(2000)
        again = torch.ones(1000)
    sizes = [(e["action"], e["size"]) for e in read(tmp_path / "x.pickle")[0] if e["size"] in (4000, 8000)]
    frees = [e for e in read(tmp_path / "x.pickle")[0] if (e["action"], e["size"]) == ("free_requested", 4000)]
    assert address and kept is not again
    assert sizes == [
        ("alloc", 4000),
        ("free_requested", 4000),
        ("free_completed", 4000),
        ("alloc", 8000),
        ("alloc", 4000),
    ]
    assert [event["time_us"] <= after_us for event in frees] == [True]


def test_what_interrupts_the_beginning_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = torch.autograd._engine_run_backward
    recording = tightfit.record(tmp_path / "x.pickle")
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in a suite in the background
    monkeypatch.setattr(HostRecorder, "__enter__", lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt), recording:
        pytest.fail("the block ran")
    signal.signal(signal.SIGINT, former)
    assert torch.autograd._engine_run_backward is plain
    assert not torch.nn.modules.module._global_forward_hooks
    monkeypatch.undo()
    with tightfit.record(tmp_path / "x.pickle"):
        train(1)
    assert tightfit.replay(tmp_path / "x.pickle").agrees


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        (["record", "no_such.py"], 2, "there is no file"),
        (["record", "gpt2"], 2, "only those can be run"),
        (["record", __file__, "--steps", "0"], 2, "at least one step"),
        (["record", __file__, "--host", "--max-events", "0"], 2, "--max-events 0: at least one event"),
        (["record", __file__, "--device", "4090", "--no-stacks"], 2, "a virtual one records all events"),
        (["record", __file__, "--max-events", "9"], 2, "a virtual one records all events"),
        (["record", f"{__file__}:train"], 2, "is not a generator function"),
        (["record", f"{__file__}:train", "--host"], 2, "is not a generator function"),
        (["record", __file__, "--host", "--device", "4090"], 2, "give one of them"),
        (["record", __file__, "--device", "4909"], 2, "no GPU is called"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(
    arguments: list[str], code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.setattr("tightfit.cli.record._has_card", lambda: False)
    assert run(arguments) == code
    said = capsys.readouterr()
    assert says in said.err
    assert (said.out, said.err.count("\n")) == ("", 1)


def test_the_estimate_of_a_workload_opens_with_its_steps(tape: Tape) -> None:
    plain = snapshot_of_tape(tape, find("RTX 4090"))
    marks = Marks.from_plain(json.loads(json.dumps(plain[KEY])))
    assert [span.name for span in marks.spans if span.kind == "step"] == ["step 1", "step 2", "step 3"]
    frames = {f["filename"] for event in plain["device_traces"][0] for f in event["frames"]}
    assert any(name.endswith("work.py") for name in frames)
