"""A thread that runs a model is followed where nobody else uses the GPU meanwhile: its tape is that of the program that runs the model in the main thread."""

from pathlib import Path

import pytest

from tightfit.capture.trace_settings import TraceSettings
from tightfit.errors import CaptureError
from tightfit.fit import capture
from tightfit.tape import Tape

HEAD = """
import asyncio
import queue
import threading
from concurrent.futures import ThreadPoolExecutor

import torch

model = torch.nn.Sequential(torch.nn.Linear(1024, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 64)).cuda()
texts = queue.Queue()


@torch.no_grad()
def generate(given, num_tokens=4):
    cache = [given]
    for _ in range(num_tokens):
        cache.append(model(cache[-1]).repeat(1, 16))
        texts.put(str(cache[-1][0].cpu().tolist())[:1])
    texts.put(None)
    return cache[-1]


def prompt():
    return torch.zeros(64, 1024, device="cuda")


def said():
    while (text := texts.get()) is not None:
        print(text)


"""
STREAMED = """
for _ in range(2):
    given = prompt()
    thread = threading.Thread(target=generate, kwargs={"given": given})
    thread.start()
    said()
    LAST
"""
IN_A_POOL = """
with ThreadPoolExecutor(1) as pool:
    for _ in range(2):
        given = prompt()
        answer = pool.submit(generate, given).result()
        said()
        del answer
"""
IN_A_LOOP = """
async def answer():
    for _ in range(2):
        given = prompt()
        await asyncio.to_thread(generate, given)
        said()


asyncio.run(answer())
"""
SERVED = """
requests, done = queue.Queue(), threading.Event()


def serve():
    while requests.get() is not None:
        generate(prompt())
        done.set()


thread = threading.Thread(target=serve)
thread.start()
for number in range(2):
    requests.put(number)
    done.wait()
    done.clear()
    said()
requests.put(None)
thread.join()
"""
PLAIN = """
for _ in range(2):
    given = prompt()
    answer = generate(given)
    said()
    del answer
"""
# What the thread, or the event loop, holds for as long as it does.
PLAINLY_SERVED = """
for _ in range(2):
    generate(prompt())
    said()
"""
PLAINLY_AWAITED = """
def main():
    given = answer = None
    for _ in range(2):
        given = prompt()
        answer = None
        answer = generate(given)
        said()


main()
"""


def traced(folder: Path, program: str) -> Tape:
    path = folder / "threads.py"
    path.write_text(HEAD + program)
    return capture(str(path), device="RTX 4090", tracing=TraceSettings(timeout=60))


def rows(tape: Tape) -> list[list[object]]:
    names = [tape.strings[name] for name in tape.operators.name.tolist()]
    parts = (tape.operators.phase, tape.storages.num_bytes, tape.events.kind, tape.events.storage)
    return [names, *(part.tolist() for part in (*parts, tape.copies.is_blocking))]


@pytest.mark.parametrize(
    ("program", "plain"),
    [
        (STREAMED.replace("LAST", "thread.join()"), PLAIN),
        # The last text is handed over behind all work.
        (STREAMED.replace("LAST", "pass"), PLAIN),
        (STREAMED.replace("said()", "thread.join()").replace("LAST", "said()"), PLAIN),
        (STREAMED.replace("said()", "while thread.is_alive(): thread.join(0.01)").replace("LAST", "said()"), PLAIN),
        (IN_A_POOL, PLAIN),
        (IN_A_LOOP, PLAINLY_AWAITED),
        (SERVED, PLAINLY_SERVED),
    ],
    ids=["streamed and joined", "streamed", "joined", "asked", "pool", "asyncio", "served"],
)
def test_the_tape_is_that_of_the_main_thread(program: str, plain: str, tmp_path: Path) -> None:
    tape = traced(tmp_path, program)
    assert rows(tape) == rows(traced(tmp_path, plain))
    assert any("take turns while it is traced" in one.what for one in tape.assumptions)


@pytest.mark.parametrize(
    "program",
    [
        # What the loop of the main thread computes, frees, or asks for while the other one goes on.
        STREAMED.replace("said()", "texts.get(); model(given)").replace("LAST", "thread.join()"),
        STREAMED.replace("said()", "other = prompt()").replace("LAST", "thread.join()"),
        STREAMED.replace("    thread.start()", "    other = prompt()\n    thread.start()\n    del other").replace(
            "LAST", "thread.join()"
        ),
        STREAMED.replace(
            "thread.start()", "thread.start(); threading.Thread(target=generate, args=(given,)).start()"
        ).replace("LAST", "pass"),
        STREAMED.replace("said()", "texts.get()").replace("LAST", "pass"),
    ],
    ids=["runs", "allocates", "frees", "two", "does not wait"],
)
def test_what_works_beside_it_is_refused(program: str, tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError,
        match=r"runs a model in a thread of its own, while another thread uses the GPU.*thread\.join",
    ):
        traced(tmp_path, program)


def test_a_lock_says_nothing_of_the_order(tmp_path: Path) -> None:
    program = """
lock = threading.Lock()


def answer():
    with lock:
        generate(prompt())


thread = threading.Thread(target=answer)
thread.start()
answer()
thread.join()
"""
    with pytest.raises(CaptureError, match="runs a model in a thread of its own, while another thread"):
        traced(tmp_path, program)


def test_a_refusal_that_the_program_swallows_is_said(tmp_path: Path) -> None:
    program = STREAMED.replace(
        "said()",
        "\n    try:\n        other = prompt()\n        texts.get(timeout=1)\n    except Exception:\n        pass",
    ).replace("LAST", "thread.join()")
    with pytest.raises(CaptureError, match="while another thread uses the GPU"):
        traced(tmp_path, program)


TRAINED = """
def forward():
    outs.append(model(prompt()).square().mean())


outs = []
BEFORE
thread = threading.Thread(target=forward)
thread.start()
thread.join()
outs.pop().backward()
"""


@pytest.mark.parametrize("before", ["", "optimizer = torch.optim.SGD(model.parameters())"])
def test_a_graph_that_a_thread_has_made_is_not_trained_with(before: str, tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError,
        match="runs a model in a thread of its own, with gradients enabled, and the program trains",
    ):
        traced(tmp_path, TRAINED.replace("BEFORE", before))


def test_an_evaluation_in_a_thread_has_a_workspace_of_its_own(tmp_path: Path) -> None:
    program = """
optimizer = torch.optim.SGD(model.parameters())
for _ in range(3):
    model(prompt()).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    EVALUATES
    said()
"""
    started = "thread = threading.Thread(target=generate, args=(prompt(),)); thread.start(); thread.join()"
    tapes = [traced(tmp_path, program.replace("EVALUATES", words)) for words in ("generate(prompt())", started)]
    # cuBLAS gives each thread a handle, and torch each handle a workspace.
    plain, seen = ((tape.storages.num_bytes == 8_519_680).sum() for tape in tapes)
    assert seen == plain + 1
    plain, seen = (rows(tape)[0].count("aten.repeat") for tape in tapes)
    assert seen == plain


def test_a_thread_that_predicts_with_gradients_is_the_main_thread(tmp_path: Path) -> None:
    program = """
def predict():
    kept.append(model(prompt()))


kept = []
CALL
"""
    plain = traced(tmp_path, program.replace("CALL", "predict()"))
    started = "thread = threading.Thread(target=predict); thread.start(); thread.join()"
    tape = traced(tmp_path, program.replace("CALL", started))
    assert rows(tape) == rows(plain)
    assert "within `torch.no_grad()`" in tape.assumptions[0].what
