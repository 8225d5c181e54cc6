"""Programs whose loops are held by generators, that do something when their process exits, or that change what they train; as in `after_steps_programs`."""

COUNTED = {
    "of an endless generator that holds the loop": """
def training():
    while True:
        step()
        yield


ticks = training()
for i in range(100):
    next(ticks)
evaluate()
""",
    "of a generator without an end, in an object that is asked for one step": """
import itertools


class Trainer:
    def __init__(self):
        self.ticks = self.run()

    def run(self):
        for epoch in itertools.count():
            for i in range(50):
                yield step()

    def tick(self):
        return next(self.ticks)


trainer, ticks = Trainer(), 0
while ticks < 500:
    trainer.tick()
    ticks += 1
evaluate()
""",
    "of an epoch that unfreezes weights": """
model = nn.Sequential(nn.Linear(64, 1 << 17), nn.Linear(1 << 17, 1)).cuda()
model[0].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for epoch in range(20):
    for i in range(10):
        step()
    model.requires_grad_(True)
""",
    "when the process exits": """
import atexit

atexit.register(evaluate)
for i in range(10):
    step()
""",
    "when the process exits, in an object that is called": """
import atexit


class Closes:
    def __call__(self):
        evaluate()


atexit.register(Closes())
for i in range(10):
    step()
""",
    "when an object is let go of at the end": """
import weakref


class Keeper:
    pass


keeper = Keeper()
weakref.finalize(keeper, evaluate)
for i in range(10):
    step()
""",
    "in a __del__ of what is left, deep in objects": """
class Logger:
    def __del__(self):
        evaluate()
        raise RuntimeError("which Python prints and forgets")


class Trainer:
    pass


trainer = Trainer()
trainer.loggers = [{"first": Logger()}]
for i in range(10):
    step()
""",
    "in a task of a pool that nobody waits for": """
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(1)
for i in range(10):
    step()
pool.submit(torch.randn, ROWS, 64, device="cuda")
""",
    "in a task of a pool that runs a model, and that nobody waits for": """
from concurrent.futures import ThreadPoolExecutor

pool = ThreadPoolExecutor(1)
for i in range(10):
    step()
pool.submit(evaluate)
""",
    "in a thread that begins late": """
import threading, time


def later():
    time.sleep(0.3)
    torch.randn(ROWS, 64, device="cuda")


for i in range(10):
    step()
threading.Thread(target=later).start()
""",
    "when the process exits by itself": """
import atexit, functools

atexit.register(functools.partial(print, "closed"))
atexit.register(evaluate)
atexit.unregister(step)
for i in range(10):
    step()
raise SystemExit
""",
}

NAMED = {
    "a lambda and a table of functions decide": (
        """
rows = lambda at: 8 if at < 500 else 1 << 20
phases = {0: lambda: None, 100: evaluate, 200: lambda: model.requires_grad_(True)}
kinds = {"plain": step, "other": evaluate}

def train(kind):
    for i in range(1000):
        phases.get(i, print)()
        kinds[kind](rows(i))

train("plain")
""",
        ("model() at", "a size of 1 << 20 at", "unless at < 500", "model.requires_grad_() at"),
    ),
    "in a case": (
        """
for i in range(10_000):
    match i % 500:
        case 499:
            evaluate()
        case _:
            step()
""",
        ("evaluate() at", "case 499 of i % 500"),
    ),
    "beside a generator that trains": (
        """
def training():
    for i in range(10_000):
        step()
        yield i

for i in training():
    if i % 500 == 499:
        evaluate()
""",
        ("evaluate() at", "if i % 500 == 499"),
    ),
    "rows that double with each epoch": (
        """
rows = 8
for epoch in range(20):
    for i in range(10):
        step(rows)
    rows = min(2 * rows, 1 << 20)
""",
        ("rows = min(2 * rows, 1 << 20) at", "in each turn"),
    ),
    "weights that are unfrozen": (
        """
model = nn.Sequential(model, nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for p in model[0].parameters():
    p.requires_grad = False
for i in range(10_000):
    if i == 5000:
        for p in model[0].parameters():
            p.requires_grad = True
    step()
""",
        ("p.requires_grad = True at", "if i == 5000"),
    ),
    "weights that a method unfreezes": (
        """
model = nn.Sequential(model, nn.Linear(64, 64).cuda())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model[0].requires_grad_(False)
for i in range(10_000):
    if i == 5000:
        model[0].requires_grad_(True)
    if i == 6000:
        optimizer = torch.optim.Adam(model.parameters())
    step()
""",
        ("model[0].requires_grad_() at", "if i == 5000", "torch.optim.Adam() at", "if i == 6000"),
    ),
    "weights that each epoch unfreezes before its steps": (
        """
model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))).cuda()
model[:7].requires_grad_(False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

def unfreeze(num_layers):
    for p in model[-num_layers:].parameters():
        p.requires_grad = True

for epoch in range(8):
    unfreeze(epoch + 1)
    for i in range(10):
        step()
""",
        ("unfreeze() at", "in a later turn"),
    ),
    "sizes that a function returns": (
        """
def size(i):
    if i < 1000:
        return 8
    return 1 << 20

for i in range(10_000):
    step(size(i))
""",
        ("return 1 << 20 at", "unless i < 1000"),
    ),
    "a thread that goes on for ever": (
        """
import threading, time


def beats():
    while True:
        time.sleep(0.1)


for i in range(10):
    step()
threading.Thread(target=beats).start()
""",
        ("its threads went on for",),
    ),
    "an error that the program reports by itself": (
        """
import sys

sys.excepthook = lambda *error: evaluate()
for i in range(10):
    step()
raise ValueError("wrong in the end")
""",
        ("it raised ValueError",),
    ),
    "at the end of a generator that the loop takes its data from": (
        """
def data():
    for i in range(50):
        yield i
    evaluate()


for i in data():
    step()
""",
        ("evaluate() at", "when its loop at line"),
    ),
    "at the end of an iterator": (
        """
class Data:
    def __init__(self):
        self.number = 0

    def __iter__(self):
        return self

    def __next__(self):
        self.number += 1
        if self.number > 50:
            evaluate()
            raise StopIteration
        return self.number


for i in Data():
    step()
""",
        ("evaluate() at", "if self.number > 50"),
    ),
    "behind an error when the process exits": (
        """
import atexit


@atexit.register
def close():
    raise ValueError("no such file")
    evaluate()


for i in range(10):
    step()
""",
        ("evaluate() at", "no such file"),
    ),
}

PLAIN = {
    "a setting selects from a table of functions": """
kinds = {"plain": step, "other": lambda: evaluate()}
kind = "plain"
for i in range(100):
    kinds[kind]()
""",
}
