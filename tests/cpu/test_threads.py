"""Threads of the program that move batches to the GPU are followed, in turns: what is ahead counts, and the tape is the same each time."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tightfit.capture.trace_settings import TraceSettings
from tightfit.errors import CaptureError, ProgramError
from tightfit.fit import capture
from tightfit.tape import EventKind, Tape
from tightfit.units import MIB

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

BATCH_BYTES = 16 * MIB
HEAD = """\
import queue
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

model = torch.nn.Linear(1024, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(batch):
    model(batch).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def data():
    for _ in range(12):
        yield torch.zeros(4096, 1024)
"""
PREFETCHES = """
class Prefetcher:
    def __init__(self, depth):
        self.queue, self.stream = queue.Queue(maxsize=depth), torch.cuda.Stream()
        threading.Thread(target=self.load, daemon=True).start()

    def load(self):
        for batch in data():
            with torch.cuda.stream(self.stream):
                self.queue.put(batch.pin_memory().cuda(non_blocking=True))
        self.queue.put(None)

    def __iter__(self):
        while (batch := self.queue.get()) is not None:
            torch.cuda.current_stream().wait_stream(self.stream)
            yield batch


for batch in Prefetcher(int(sys.argv[1])):
    step(batch)
"""
MAKES = 'torch.tensor([[1.0] * 1024] * 4, device="cuda")'
TWO_THREADS = """
host, card = queue.Queue(2), queue.Queue(1)


def read():
    for batch in data():
        host.put(batch)
    host.put(None)


def move():
    while (batch := host.get()) is not None:
        card.put(batch.cuda())
    card.put(None)


threads = [threading.Thread(target=run) for run in (read, move)]
for thread in threads:
    thread.start()
while (batch := card.get()) is not None:
    step(batch)
for thread in threads:
    thread.join()
with torch.no_grad():
    model(torch.zeros(1 << 16, 1024).cuda())
"""
POOL = """
with ThreadPoolExecutor(4) as pool:
    for batch in pool.map(lambda batch: batch.cuda(), list(data())[:5]):
        step(batch)
"""
EVENT_LOOP = """
import asyncio


async def main():
    for batch in data():
        step(await asyncio.get_running_loop().run_in_executor(None, batch.cuda))


asyncio.run(main())
"""
FAILS = """
rows = queue.Queue(2)


def load():
    rows.put(torch.zeros(4, 1024).cuda())
    raise ValueError("a broken file")


threading.Thread(target=load, daemon=True).start()
while True:
    step(rows.get())
"""
TRAINS = """
def train():
    for batch in data():
        step(batch.cuda())


thread = threading.Thread(target=train)
thread.start()
thread.join()
"""


def traced(tmp_path: Path, program: str, *arguments: str, seconds: float = 60) -> Tape:
    path = tmp_path / "threads.py"
    path.write_text(HEAD + program)
    return capture(str(path), device="RTX 4090", arguments=arguments, tracing=TraceSettings(timeout=seconds))


def batches_at_the_peak(tape: Tape) -> int:
    """The largest number of batches that are on the GPU at once."""
    is_batch = tape.storages.num_bytes[tape.events.storage] == BATCH_BYTES
    changes = np.where(tape.events.kind == EventKind.ALLOCATE, 1, np.where(tape.events.kind == EventKind.FREE, -1, 0))
    return int(np.cumsum(np.where(is_batch & (tape.events.storage >= 0), changes, 0)).max())


def columns(tape: Tape) -> list[list[int]]:
    parts = (tape.operators, tape.storages, tape.events, tape.spans)
    return [getattr(part, name).tolist() for part in parts for name in part.__slots__]


@pytest.mark.parametrize("depth", [1, 3])
def test_a_prefetching_thread_holds_what_its_queue_takes_and_the_batch_in_its_hand(tmp_path: Path, depth: int) -> None:
    tape = traced(tmp_path, PREFETCHES, str(depth))
    # Beside these, the batch that the step is for; and the next one, which is taken before the name of that is bound again.
    assert batches_at_the_peak(tape) == depth + 1 + 2
    assert any("take turns while it is traced" in one.what for one in tape.assumptions)
    # Their memory is of the stream that they were copied on, and all of it belongs to the steps of the main thread.
    on = tape.storages.stream[tape.storages.num_bytes == BATCH_BYTES]
    assert (on > 0).all() and [tape.strings[name] for name in tape.spans.name].count("step 2") == 1
    if depth == 1:
        assert columns(traced(tmp_path, PREFETCHES, str(depth))) == columns(tape)


def test_two_threads_in_a_row_and_what_follows_them(tmp_path: Path) -> None:
    tape = traced(tmp_path, TWO_THREADS)
    assert batches_at_the_peak(tape) == 1 + 1 + 2
    # The thread that copies waits for its copies, and the main one does not.
    assert not tape.copies.is_blocking[tape.copies.num_bytes == BATCH_BYTES].any()
    # The loop was left after its steps, and so were theirs: the program goes on to its end.
    assert tape.coverage.stopped == "" and (tape.storages.num_bytes == (1 << 16) * 1024 * 4).any()


def test_a_thread_makes_tensors_of_numbers_on_the_gpu(tmp_path: Path) -> None:
    tape = traced(tmp_path, PREFETCHES.replace("batch.pin_memory().cuda(non_blocking=True)", MAKES), "1")
    # Built on the host and copied, as in the main thread.
    assert (tape.copies.num_bytes == 4 * 1024 * 4).sum() >= 3


@pytest.mark.parametrize(("program", "most"), [(POOL, 5), (EVENT_LOOP, 2)], ids=["map", "event loop"])
def test_a_pool_moves_what_it_was_given(tmp_path: Path, program: str, most: int) -> None:
    assert batches_at_the_peak(traced(tmp_path, program)) == most


def test_an_exception_in_a_thread_that_is_waited_for_is_the_programs(tmp_path: Path) -> None:
    with pytest.raises(ProgramError, match=r"threads\.py raised ValueError at .*threads\.py:\d+: a broken file"):
        traced(tmp_path, FAILS)


def test_a_thread_that_trains_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"threads\.py:\d+ runs a model in a thread of its own"):
        traced(tmp_path, TRAINS)


# Of a thread that only uses tensors that are there already, torch says nothing: their class takes the operator.
EVALUATES = """
held = torch.zeros(4096, 1024, device="cuda")
seen = []


def evaluate():
    try:
        with torch.no_grad():
            seen.append(held @ model.weight.T)
    except Exception:
        pass


for batch in data():
    thread = threading.Thread(target=evaluate)
    thread.start()
    step(batch.cuda())
    thread.join()
"""


def test_a_thread_that_computes_with_what_is_there_is_followed(tmp_path: Path) -> None:
    tape = traced(tmp_path, EVALUATES)
    assert any("take turns while it is traced" in one.what for one in tape.assumptions)
    # What it has computed counts: one result for each step, which the program keeps.
    assert (tape.storages.num_bytes == 4096 * 8 * 4).sum() >= 3
    assert columns(traced(tmp_path, EVALUATES)) == columns(tape)


def test_a_thread_that_runs_a_model_beside_a_backward_pass_is_refused(tmp_path: Path) -> None:
    program = EVALUATES.replace("held @ model.weight.T", "model(held)").replace("except Exception", "except KeyError")
    with pytest.raises(CaptureError, match=r"threads\.py:\d+ runs a model in a thread of its own"):
        traced(tmp_path, program)


# While the main thread begins its steps, the other one is inside of a module, and leaves it in the middle of one.
TRANSFORMS = """
inside, stepped = threading.Event(), threading.Event()


class Transform(torch.nn.Module):
    def forward(self, batch):
        inside.set()
        stepped.wait()
        return batch * 2


class Model(torch.nn.Sequential):
    def forward(self, batch):
        inside.wait()
        between = self[0](batch)
        stepped.set()
        other.join()
        return self[1](between)


model = Model(torch.nn.Linear(1024, 8), torch.nn.Linear(8, 8)).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
transform = Transform()
for batch in data():
    inside.clear()
    stepped.clear()
    other = threading.Thread(target=CALLED, args=(batch[:8],))
    other.start()
    step(batch.cuda())
"""


def test_a_module_in_a_thread_that_leaves_the_gpu_alone_is_none_of_the_step(tmp_path: Path) -> None:
    plain = traced(tmp_path, TRANSFORMS.replace("CALLED", "transform.forward"))
    seen = traced(tmp_path, TRANSFORMS.replace("CALLED", "transform"))
    assert columns(seen) == columns(plain) and not any("take turns" in one.what for one in seen.assumptions)


# The thread is inside of its model's call before the step begins, and asks for the GPU after it.
BESIDE = """
class Late(torch.nn.Linear):
    def forward(self, held):
        entered.set()
        ended.wait(10)
        return super().forward(held)


entered, ended = threading.Event(), threading.Event()
late = Late(1024, 8).cuda()
held = torch.zeros(4, 1024, device="cuda")
for batch in data():
    other = threading.Thread(target=late.CALLED, args=(held,))
    other.start()
    entered.wait()
    step(batch.cuda())
    ended.set()
    other.join()
"""


def test_a_model_that_a_thread_is_in_while_a_step_begins_is_refused(tmp_path: Path) -> None:
    program = BESIDE.replace("late.CALLED", "lambda: late(held)").replace(", args=(held,)", "")
    with pytest.raises(CaptureError, match=r"threads\.py:\d+ runs a model in a thread of its own"):
        traced(tmp_path, program)


# No line of the program is on the stack of such a thread.
@pytest.mark.parametrize("called", ["late", "late.__call__"])
def test_a_model_that_is_a_threads_target_is_refused(tmp_path: Path, called: str) -> None:
    with pytest.raises(CaptureError, match=r"^the program runs a model in a thread of its own"):
        traced(tmp_path, BESIDE.replace("late.CALLED", called))


def test_a_thread_that_never_waits_is_named(tmp_path: Path) -> None:
    # One call of C that outlasts the trace: where a thread is that runs Python is read while it goes on, and sometimes cannot be told.
    busy = "    seen.append(held @ model.weight.T)\n    sum(range(1 << 36))\n"
    begin, end = EVALUATES.index("    try:\n"), EVALUATES.index("\n\nfor batch")
    program = EVALUATES[:begin] + busy + EVALUATES[end:]
    with pytest.raises(CaptureError, match=r"while a thread of its own was at .*threads\.py:\d+: in a trace"):
        traced(tmp_path, program, seconds=10)


HOOKS = (
    HEAD
    + """
jobs, norms = queue.Queue(), queue.Queue()


def measure():
    while True:
        gradient = jobs.get()
        gradient.cpu()
        norms.put(1.0)


def hook(gradient):
    jobs.put(gradient)
    norms.get()


threading.Thread(target=measure, daemon=True).start()
model.weight.register_hook(hook)
for batch in data():
    step(batch.cuda())
"""
)


def test_a_hook_may_wait_for_a_thread(tmp_path: Path) -> None:
    tape = traced(tmp_path, HOOKS)
    assert batches_at_the_peak(tape) == 1
    assert columns(tape) == columns(traced(tmp_path, HOOKS))


ANSWERS = """
import sys, threading
from tightfit.capture.child_process import child

def answer(number):
    entered.wait()
    child.leave(sys.argv[1], {"ok": True, "number": number, "text": "x" * 4_000_000})

entered = threading.Barrier(4)
for number in range(4):
    threading.Thread(target=answer, args=(number,)).start()
"""


def test_of_threads_that_fail_at_once_one_has_answered_as_a_whole(tmp_path: Path) -> None:
    for _ in range(3):
        subprocess.run([sys.executable, "-c", ANSWERS, str(tmp_path / "request")], check=True)
        assert json.loads((tmp_path / "request.answer").read_text())["ok"]
