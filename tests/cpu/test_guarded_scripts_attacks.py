"""`tightfit run --guard` and loops that keep state where it is easily missed: each ends as the plain run, to the bit, or is refused with one line why."""

import textwrap
from pathlib import Path

import pytest
from tests.cpu.guarded_scripts import Scripts

# `fail()` raises once in a run: what it counts with is out of reach of the guard, as an allocator is.
HEAD = """
import os, queue, random, sys, threading
from tests.unseen_queue import unseen_queue
import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
data = TensorDataset(torch.randn(24, 8), torch.randn(24, 1))
losses, calls = [], unseen_queue()
def fail():
    calls.put(1)
    if calls.qsize() in FAILS:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
def mean_square(x, y):
    loss = (model(x) - y).square().mean()
    fail()
    return loss
def update(loss):
    loss.backward()
    fail()
    optimizer.step()
    fail()
"""
MODULE = """
history, count = [], 0
def note(value):
    global count
    count += 1
    history.append(value)
"""
# As packages that are installed have it: objects within objects, none of them the program's.
LIBRARY = """
import highspy
import numpy as np
calls, chance = 0, np.random.default_rng(4)
class Inner:
    made = 0
    def __init__(self):
        Inner.made += 1
        self.at, self.chance = np.zeros(2), np.random.default_rng(3)
    def step(self):
        global calls
        calls += 1
        self.at = self.at + self.chance.random(2)
        return float(self.at.sum()) + calls * chance.random() + len(vars(World(Inner()))) * Inner.made
class Emulated:
    def __init__(self):
        self.emulator = highspy._core._Highs()
    def step(self):
        return 1.0 + self.emulator.getNumCol()
class World:
    def __init__(self, inner):
        self.inner = inner
    def step(self):
        return self.inner.step()
"""
TAKEN_BACK = {
    "a world of a library's": """
        sys.path.append(os.path.join(os.path.dirname(__file__), "site-packages"))
        import worlds
        worlds.calls, worlds.Inner.made, worlds.chance = 0, 0, np.random.default_rng(4)
        world = worlds.World(worlds.World(worlds.Inner()))
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            losses.append(world.step())
            update(mean_square(x, y))
        """,
    "a world of the program's in one of a library's": """
        sys.path.append(os.path.join(os.path.dirname(__file__), "site-packages"))
        import worlds
        class Mine:
            at = 0
            def step(self):
                self.at += 1
                return self.at
        world = worlds.World(worlds.World(Mine()))
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            losses.append(world.step())
            update(mean_square(x, y))
        """,
    "separate numpy generators": """
        new, old, bits = np.random.default_rng(1), np.random.RandomState(2), np.random.Philox(3)
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            losses.append((new.random(), old.randn(), bits.random_raw()))
            update(mean_square(x * new.normal(), y))
        """,
    "a scheduler that steps first": """
        schedule = torch.optim.lr_scheduler.LambdaLR(torch.optim.SGD(model.parameters(), lr=1.0), lambda n: 0.9**n)
        schedule.optimizer.step()
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            schedule.step()
            optimizer.zero_grad()
            update(mean_square(x, y))
            losses.append((schedule.last_epoch, schedule.get_last_lr()[0]))
        """,
    "functions in decorators of libraries": """
        import contextlib, functools
        seen = []
        @torch.no_grad()
        def evaluate():
            evaluate.calls = getattr(evaluate, "calls", 0) + 1
            seen.append(evaluate.calls)
        @contextlib.contextmanager
        def timed():
            seen.append("begin")
            yield len(seen)
            seen.append("end")
        @functools.singledispatch
        def note(value): pass
        @note.register
        def _(value: int): seen.append(value)
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            evaluate()
            with timed() as count:
                note(count)
                update(mean_square(x, y))
        losses += seen
        """,
    "batches that are asked for, and what they are made with": """
        class Stream:
            def __init__(self): self.at, self.seen = 0, []
            def __iter__(self): return self
            def __next__(self):
                self.at += 1
                rows = torch.randint(0, 24, (6,), generator=chance)
                return {"x": data[rows][0], "y": data[rows][1], "n": [self.at]}
        chance, stream = torch.Generator().manual_seed(5), Stream()
        for step in range(3):
            batch = next(stream)
            stream.seen.append(step)
            batch["n"].append(step)
            y = batch.pop("y")
            x = batch["x"].mul_(2).add_(torch.randn((), generator=chance))
            update(mean_square(x, y))
            losses.append((batch["n"], stream.at, list(stream.seen), x.sum().item()))
        """,
    "hooks that nothing names, and counts per example": """
        def noted():
            notes = []
            model[0].weight.register_hook(lambda gradient: notes.append("a gradient"))
            model[0].bias.register_post_accumulate_grad_hook(lambda weight: notes.append("a sum"))
            def before(*given):
                notes.append("a step")
                fail()
            optimizer.register_step_pre_hook(before)
            return notes
        def collate(rows):
            counts[len(rows)] += 1
            return torch.stack([row for row, _ in rows]) * chance.random()
        notes, counts, chance = noted(), [0] * 100_000, random.Random(2)
        held_out = DataLoader(data, batch_size=13, collate_fn=collate)
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            losses.append(sum(model(rows).sum().item() for rows in held_out))
            counts[77_777] += 1
            mean_square(x, y).backward()
            optimizer.step()
        losses += [*notes, counts[77_777], counts[13]]
        """,
    "names that are texts": """
        import noted
        noted.count, total = 0, 0
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            globals()["total"] += 1
            setattr(noted, "count", getattr(noted, "count") + 1)
            update(mean_square(x, y))
        losses += [total, noted.count]
        """,
    "a learning rate set by hand": """
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            for group in optimizer.param_groups:
                group["lr"] *= 0.9
            optimizer.zero_grad()
            update(mean_square(x, y))
            losses.append(group["lr"])
        """,
    "an evaluation whose loader has workers": """
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            held_out = DataLoader(data, batch_size=12, shuffle=True, num_workers=1, multiprocessing_context="fork")
            losses.append([rows.sum().item() for rows, _ in held_out])
            update(mean_square(x, y))
        """,
    "the state of a module of the program": """
        import noted
        noted.history.clear()
        noted.count = 0
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            noted.note("begin")
            noted.count += 10
            optimizer.zero_grad()
            update(mean_square(x, y))
        losses += [*noted.history, noted.count]
        """,
    "a scaler and a schedule deep inside of objects": """
        class Part: pass
        state = Part()
        state.inner = Part()
        state.inner.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        state.inner.schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        def step(x, y):
            scaler = state.inner.scaler
            optimizer.zero_grad()
            scaler.scale(mean_square(x, y)).backward()
            scaler.unscale_(optimizer)
            fail()
            scaler.step(optimizer)
            scaler.update()
            state.inner.schedule.step()
            losses.append((scaler.get_scale(), state.inner.schedule.last_epoch))
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            step(x, y)
        """,
    "hooks that a turn registers": """
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            model[0].register_forward_hook(lambda m, i, o: losses.append(len(losses)))
            model[4].weight.register_hook(lambda g: g * 0.5)
            optimizer.zero_grad()
            update(mean_square(x, y))
        """,
    "names that a turn declares": """
        def main():
            total = [0]
            for x, y in DataLoader(data, batch_size=8, shuffle=True):
                global count
                count += 1
                total[0] += 1
                optimizer.zero_grad()
                update(mean_square(x, y))
                del x, y
            else:
                total.append("else")
            return total
        count = 0
        losses.append(main())
        """,
    "batches that are written to": """
        batches = [{"x": torch.randn(6, 8), "y": torch.randn(6, 1), "n": k} for k in range(3)]
        for batch in batches:
            y = batch.pop("y")
            batch["n"] += 1
            x = batch["x"].mul_(2)
            optimizer.zero_grad()
            update(mean_square(x, y))
            losses.append((batch["n"], batch["x"].sum().item()))
        """,
    "settings of torch": """
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            losses.append(str(torch.ones(1).dtype))
            torch.set_default_dtype(torch.float64)
            torch.set_grad_enabled(False)
            losses.append(model(x).sum().item())
            torch.set_grad_enabled(True)
            optimizer.zero_grad()
            loss = mean_square(x, y)
            torch.set_default_dtype(torch.float32)
            update(loss)
        """,
    "text to a stream of the program's own": """
        import contextlib, io
        stream = io.StringIO()
        with contextlib.redirect_stdout(stream):
            for x, y in DataLoader(data, batch_size=8, shuffle=True):
                print("a turn")
                optimizer.zero_grad()
                update(mean_square(x, y))
        losses.append(stream.getvalue())
        """,
    "an evaluation inside, and text": """
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            print("a turn", end="")
            model.eval()
            with torch.no_grad():
                for a, b in DataLoader(data, batch_size=12, shuffle=True):
                    losses.append((model(a) - b).square().mean().item())
            model.train()
            optimizer.zero_grad()
            update(mean_square(x, y))
            print(" is over")
        """,
}
REFUSED = {
    "counts[4096:] was advanced or written to": """
        counts = [{"seen": 0} for _ in range(5_000)]
        for x, y in DataLoader(data, batch_size=8):
            counts[-1]["seen"] += 1
            update(mean_square(x, y))
        """,
    "it wrote to log.gz": """
        import gzip
        with gzip.open("log.gz", "wt") as log:
            for x, y in DataLoader(data, batch_size=8):
                log.write("a line")
                update(mean_square(x, y))
        """,
    "compressed was advanced or written to": """
        import zlib
        compressed = zlib.compressobj()
        for x, y in DataLoader(data, batch_size=8):
            losses.append(compressed.compress(b"a batch"))
            update(mean_square(x, y))
        """,
    "it wrote to log.txt": """
        with open("log.txt", "w") as log:
            for x, y in DataLoader(data, batch_size=8):
                log.write("a line")
                update(mean_square(x, y))
        """,
    "started a process": """
        import os
        for x, y in DataLoader(data, batch_size=8):
            if not (child := os.fork()):
                os._exit(0)
            os.waitpid(child, 0)
            update(mean_square(x, y))
        """,
    "took something from another thread": """
        items = queue.Queue()
        threading.Thread(target=lambda: [items.put(batch) for batch in DataLoader(data, batch_size=8)]).start()
        for _ in range(3):
            update(mean_square(*items.get()))
        """,
    "gave something to another thread": """
        writer = queue.Queue()
        for x, y in DataLoader(data, batch_size=8):
            writer.put(1)
            update(mean_square(x, y))
        """,
    "written was advanced": """
        written = queue.SimpleQueue()
        for x, y in DataLoader(data, batch_size=8):
            written.put(1)
            update(mean_square(x, y))
        """,
    "a batch that it got from a data loader": """
        batches = iter(DataLoader(data, batch_size=8))
        def batch():
            return next(batches)
        for step in range(3):
            update(mean_square(*batch()))
        """,
    "lines was advanced": """
        import csv
        lines = csv.reader(str(number) for number in range(100))
        def line():
            return int(next(lines)[0])
        for x, y in DataLoader(data, batch_size=8):
            update(mean_square(x * line(), y))
        """,
    "rows was advanced": """
        import sqlite3
        rows = sqlite3.connect(":memory:").execute("select 1 union all select 2 union all select 3 union all select 4")
        for x, y in DataLoader(data, batch_size=8):
            update(mean_square(x * rows.fetchone()[0], y))
        """,
    "numbers was advanced": """
        import struct
        numbers = struct.iter_unpack("B", bytes(range(100)))
        for x, y in DataLoader(data, batch_size=8):
            update(mean_square(x * numbers.__next__()[0], y))
        """,
    "memory was advanced": """
        import mmap
        memory = mmap.mmap(-1, 100)
        for x, y in DataLoader(data, batch_size=8):
            update(mean_square(x + memory.read(1)[0], y))
        """,
    "rng was advanced": """
        rng = np.random.default_rng(1)
        for x, y in DataLoader(data, batch_size=8):
            x = x * rng.spawn(1)[0].random()
            update(mean_square(x, y))
        """,
    "world.inner.emulator was advanced": """
        sys.path.append(os.path.join(os.path.dirname(__file__), "site-packages"))
        import worlds
        world = worlds.World(worlds.Emulated())
        for x, y in DataLoader(data, batch_size=8):
            update(mean_square(x * world.step(), y))
        """,
    "Numbers.values was advanced": """
        numbers = (number for number in range(100))
        class Numbers:
            values = numbers
        for x, y in DataLoader(data, batch_size=8):
            x = x * Numbers.values.__next__()
            update(mean_square(x, y))
        """,
    "weights had been updated in it already": """
        for x, y in DataLoader(data, batch_size=8):
            update(mean_square(x, y))
            mean_square(x, y)
        """,
    "it changed the settings of an optimizer": """
        for x, y in DataLoader(data, batch_size=8):
            optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
            update(mean_square(x, y))
        """,
    "no plan that holds less is left": """
        for x, y in DataLoader(data, batch_size=8):
            mean_square(x, y)
            update(mean_square(x, y))
        """,
    "outside of the turns": """
        for x, y in DataLoader(data, batch_size=8):
            update(mean_square(x, y))
        fail()
        """,
}
# The calls of `fail` that raise.
AT = {
    "weights had been updated in it already": {4},
    "no plan that holds less is left": {2, 4},
    "outside of the turns": {10},
}


@pytest.fixture
def scripts(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Scripts:
    (tmp_path / "noted.py").write_text(MODULE)
    packages = tmp_path / "site-packages"
    packages.mkdir()
    (packages / "worlds.py").write_text(LIBRARY)
    return Scripts(tmp_path, capsys, monkeypatch)


def text(body: str, fails: set[int]) -> str:
    return f"FAILS = {fails or '()'}\n" + HEAD + textwrap.dedent(body)


# In the first turn; in the two after it.
@pytest.mark.parametrize("fails", [{2}, {4, 8}], ids=str)
@pytest.mark.parametrize("kind", TAKEN_BACK)
def test_a_turn_that_is_run_again_leaves_no_trace(kind: str, fails: set[int], scripts: Scripts) -> None:
    plain = scripts.run(scripts.write(text(TAKEN_BACK[kind], set())), guard=False)
    found = scripts.run(scripts.write(text(TAKEN_BACK[kind], fails)))
    assert plain.error is None
    assert found.error is None, found.notes
    assert found.is_same(plain)
    assert found.statistics["replays"] == len(fails)


@pytest.mark.parametrize("reason", REFUSED)
def test_what_cannot_be_taken_back_ends_the_script_with_its_error_and_the_reason(reason: str, scripts: Scripts) -> None:
    found = scripts.run(scripts.write(text(REFUSED[reason], AT.get(reason, {2}))))
    assert isinstance(found.error, RuntimeError)
    assert reason in found.notes, found.notes
    assert list(scripts.folder.glob("tightfit-out-of-memory-*.json"))
