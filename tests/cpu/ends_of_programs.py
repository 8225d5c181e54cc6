"""Programs whose loops are held by generators, and that do something when their process exits; as in `after_steps_programs`."""

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
