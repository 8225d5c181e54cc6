"""Programs whose evaluation, checkpoint or sampling needs more than their steps, in the shapes in which people write them.

Each makes `LARGE_BYTES` somewhere after its first three steps. A program is a prelude, its text, and the name of the call that makes them.
"""

LARGE_BYTES = 1 << 26

PRELUDE = """
import copy
import torch
from torch import nn

ROWS = 1 << 18  # of 64 numbers of four bytes: 64 MiB
model = nn.Linear(64, 64).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def step(rows=8):
    loss = model(torch.randn(rows, 64, device="cuda")).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()


def evaluate():
    with torch.no_grad():
        model(torch.randn(ROWS, 64, device="cuda"))

"""

MODULE = """
import torch


def report(model, rows):
    model.eval()
    with torch.inference_mode():
        model(torch.randn(rows, 64, device="cuda"))
"""

COUNTED = {
    "after the loop": """
for i in range(100):
    step()
evaluate()
""",
    "at the end of an epoch": """
for epoch in range(10):
    for i in range(20):
        step()
    evaluate()
""",
    "of epochs shorter than the steps asked for": """
for epoch in range(10):
    for i in range(2):
        step()
evaluate()
""",
    "in a function of another module": """
from another import report
for i in range(100):
    step()
report(model, ROWS)
""",
    "in a callback of the program's own trainer": """
class Trainer:
    def __init__(self, callbacks):
        self.callbacks, self.is_done = callbacks, False

    def fit(self):
        while not self.is_done:
            for i in range(50):
                step()
            for callback in self.callbacks:
                callback()

Trainer([lambda: None, evaluate]).fit()
""",
    "in finally": """
try:
    for i in range(100):
        step()
finally:
    evaluate()
""",
    "after break": """
for i in range(1000):
    step()
    if i == 200:
        break
evaluate()
""",
    "while True with a condition": """
num = 0
while True:
    step()
    num += 1
    if num > 1000:
        break
evaluate()
""",
    "in main with argparse": """
import argparse

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=9)
    parser.add_argument("--debug", action="store_true")
    options = parser.parse_args()
    for epoch in range(options.epochs):
        if options.debug:
            evaluate()
        for i in range(30):
            step()
    evaluate()

if __name__ == "__main__":
    main()
""",
    "in a second stage": """
for i in range(50):
    step()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for i in range(50):
    step(ROWS if i == 2 else 8)
""",
    "in the last of a list of stages": """
for rows in (8, 16, ROWS):
    for i in range(40):
        step(rows)
""",
    "in a list of stages of as many steps as are asked for, with an optimizer for each": """
for rows in (8, 16, ROWS):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for i in range(3):
        step(rows)
""",
    "in a list of stages with an evaluation after each": """
for rows in (8, 16, ROWS):
    for i in range(3):
        step(rows)
    with torch.no_grad():
        model(torch.randn(8, 64, device="cuda"))
""",
    "in a stage that a number selects": """
sizes = [8, 16, ROWS]
for stage in range(len(sizes)):
    for i in range(40):
        step(sizes[stage])
""",
    "sampling with a cache of keys": """
for i in range(100):
    step()
with torch.no_grad():
    cache = torch.zeros(1, 1 << 17, device="cuda")
    for token in range(64):
        cache = torch.cat([cache, cache[-1:]])
""",
    "copies of the weights": """
table = nn.Embedding(ROWS, 64).cuda().requires_grad_(False)
for i in range(100):
    step()
best = {name: value.clone() for name, value in table.state_dict().items()}
""",
    "an average of the weights at the end": """
table = nn.Embedding(ROWS, 64).cuda().requires_grad_(False)
for i in range(100):
    step()
average = copy.deepcopy(table)
""",
    "with a larger batch, through enumerate, zip and tqdm": """
from tqdm import tqdm
from torch.utils.data import DataLoader, TensorDataset
data = DataLoader(TensorDataset(torch.randn(256, 64)), batch_size=8)
for epoch in tqdm(range(3)):
    for i, ((x,), _) in enumerate(tqdm(zip(data, range(1000)))):
        step()
model.eval()
with torch.no_grad():
    for i, (x,) in enumerate(data):
        model(x.cuda().repeat(1 << 15, 1))
""",
    "a second model after the first is gone": """
for i in range(100):
    step()
del model, optimizer
model = nn.Linear(64, ROWS).cuda()
with torch.no_grad():
    model(torch.randn(1, 64, device="cuda"))
""",
    "models one after the other, the last of them large": """
for i in range(100):
    step()
with torch.no_grad():
    for width in [64] * 5 + [ROWS]:
        model = None
        model = nn.Linear(64, width).cuda()
        model(torch.randn(1, 64, device="cuda"))
""",
    "an evaluation of Trainer": """
from transformers import Trainer, TrainingArguments


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x):
        return {"loss": self.linear(x if self.training else x.repeat(ROWS // 64, 1)).square().mean()}


rows = [{"x": torch.ones(64)} for i in range(128)]
arguments = TrainingArguments(
    "out", max_steps=1000, per_device_train_batch_size=4, per_device_eval_batch_size=64, eval_strategy="steps", eval_steps=500,
    prediction_loss_only=True, report_to=[], save_strategy="no", disable_tqdm=True, remove_unused_columns=False,
)
Trainer(Model(), arguments, train_dataset=rows, eval_dataset=rows).train()
""",
    "a generator of batches": """
def batches():
    while True:
        yield 8

stream = batches()
for rows in stream:
    step(rows)
    if rows > 8:
        break
evaluate()
""",
    "training in a generator": """
def training():
    for i in range(1000):
        step()
        yield i

for i in training():
    pass
evaluate()
""",
    "in the else of a loop": """
for i in range(100):
    step()
else:
    evaluate()
""",
    "evaluation with gradients": """
for i in range(100):
    step()
for i in range(5):
    model(torch.randn(ROWS, 64, device="cuda"))
""",
    "a list of outputs that grows": """
for i in range(100):
    step()
outputs = []
with torch.no_grad():
    for i in range(64):
        outputs.append(model(torch.randn(ROWS // 64, 64, device="cuda")))
""",
}

# With what the verdict names: a call, or the reason for the end of the trace.
NAMED = {
    "larger batches after a warm-up": (
        """
for i in range(1000):
    count = 8 if i < 5 else ROWS << 1
    step(count)
""",
        ("count = ROWS << 1 at", "unless i < 5"),
    ),
    "larger batches in the call": (
        """
for i in range(1000):
    step(8 if i < 5 else 1 << 20)
""",
        ("a size of 1 << 20 at", "unless i < 5"),
    ),
    "longer sequences later": (
        """
length = 8
for i in range(1000):
    loss = model(torch.randn(16, 64, device="cuda")[:length]).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if i == 500:
        length *= 2
""",
        ("length *= 2 at", "if i == 500"),
    ),
    "a list of sizes with a late large one": (
        """
for epoch, rows in enumerate([8] * 100 + [262144]):
    step(rows)
""",
        ("rows = 262144 at", "in a later turn"),
    ),
    "sizes by a table of the steps": (
        """
schedule = {0: 8, 500: 262144}
for i in range(1000):
    if i in schedule:
        rows = schedule[i]
    step(rows)
""",
        ("a size of 262144 from schedule[i] at", "in a later turn"),
    ),
    "every so many steps": (
        """
for i in range(1000):
    step()
    if (i + 1) % 500 == 0:
        evaluate()
""",
        ("evaluate() at", "if (i + 1) % 500 == 0"),
    ),
    "behind continue": (
        """
for i in range(1000):
    step()
    if (i + 1) % 500:
        continue
    evaluate()
""",
        ("evaluate() at", "unless (i + 1) % 500"),
    ),
    "in a method that counts by itself": (
        """
class Run:
    num = 0

    def after(self):
        self.num += 1
        if self.num % 500 == 0:
            self.save()

    def save(self):
        torch.save({k: v.clone() for k, v in model.state_dict().items()}, "weights.pt")

run = Run()
while run.num < 10_000:
    step()
    run.after()
""",
        ("self.save() at", "if self.num % 500 == 0"),
    ),
    "in a conditional expression": (
        """
for i in range(10_000):
    step()
    result = evaluate() if i % 500 == 499 else None
""",
        ("evaluate() at", "if i % 500 == 499"),
    ),
    "behind an and": (
        """
for i in range(10_000):
    step()
    i % 500 == 499 and evaluate()
""",
        ("evaluate() at", "if i % 500 == 499"),
    ),
    "on an interrupt": (
        """
try:
    while True:
        step()
except KeyboardInterrupt:
    evaluate()
""",
        ("evaluate() at", "on KeyboardInterrupt"),
    ),
    "in a loop that cannot be left": (
        """
losses = [step() for i in range(1000)]
evaluate()
""",
        ("evaluate() at", "its training loop cannot be left"),
    ),
    "behind an error": (
        """
for i in range(100):
    step()
raise ValueError("no such metric")
evaluate()
""",
        ("evaluate() at", "no such metric"),
    ),
    "behind a bare except in an endless loop that cannot be left": (
        """
while True:
    try:
        [step() for i in range(1000)]
    except:
        continue
    evaluate()
""",
        ("evaluate() at", "its training loop cannot be left"),
    ),
    "in an evaluation that grows beyond the bound": (
        """
for i in range(100):
    step()
outputs = []
with torch.no_grad():
    for i in range(100_000):
        outputs.append(torch.ones(1 << 12, device="cuda").add(1).mul(2).sub(1).relu())
""",
        ("iterations of the loop after the first", "more allocated"),
    ),
}

PLAIN = {
    "numbers that are no sizes change": """
stage, patience = 0, 1
for i in range(100):
    step()
    factor = 1 if i < 50 else 2
    for group in optimizer.param_groups:
        group["lr"] = 0.1 * factor
    if i == 50:
        stage = 1
        patience += 1
    rows = 8 if optimizer is not None else 1 << 20
    step(rows)
""",
    "tables that give no larger size": """
rates, labels, sizes = [1, 10, 1000], (0, 7, 900), [8] * 50 + [8]
for i, rows in zip(range(100), sizes + sizes):
    step(rows)
    factor = rates[i % 3]
    label = labels[i % 3]
    largest = torch.zeros(sizes[i % 3])
""",
    "a position in the data and a rate grow": """
data = torch.randn(800, 64)
at, rate = 0, 1
for i in range(100):
    batch = data[at : at + 8]
    at += 8
    rate *= 2
    rows = 2
    for level in range(2):
        rows *= 2
    step(rows)
""",
    "weights are frozen later, and numbers are returned": """
def patience(i):
    if i < 50:
        return 1
    return 2

for i in range(100):
    step()
    limit = patience(i)
    match i:
        case 50:
            model.bias.requires_grad_(False)
        case 60:
            model.bias.requires_grad = False
""",
    "nothing follows": """
for i in range(100):
    step()
""",
    "only numbers and files follow": """
import json
best = float("inf")
for i in range(100):
    step()
    if i % 50 == 49:
        print("step", i)
        torch.save(model.state_dict(), "weights.pt")
    if optimizer is None:
        evaluate()
    evaluate() if optimizer is None else print(i)
    optimizer is None and evaluate()
json.dumps({"best": best})
""",
    "the loop ends by itself": """
for i in range(3):
    step()
""",
}

# What each turn holds in names, until the next turn binds them anew.
HELD_IN_NAMES = """
@torch.no_grad()
def validate(batches):
    total = 0.0
    for batch in range(batches):
        rows = torch.randn(4096, 64, device="cuda")
        scores = model(rows).double()
        total += scores.sum().item()
    return total


for epoch in range(3):
    for i in range(3):
        step()
    validate(300)
validate(300)
"""

WEIGHTS = """
import contextlib
import torch
from torch import nn

num_begun = num_ended = num_closed = 0
model = nn.Linear(4096, 4096, bias=False).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


@contextlib.contextmanager
def counted():
    global num_closed
    try:
        yield
    finally:
        num_closed += 1


def step():
    global num_ended
    loss = model(torch.randn(8, 4096, device="cuda")).sum()
    loss.backward()
    optimizer.step()
    num_ended += 1

"""
"""What the programs of `LEFT_EARLY` begin with; their weights are of `LARGE_BYTES`."""

LEFT_EARLY = {
    "gradients are dropped at the head of a turn": """
for i in range(TURNS):
    optimizer.zero_grad()
    step()
""",
    "gradients are dropped at its end": """
for i in range(TURNS):
    step()
    optimizer.zero_grad()
""",
    "gradients are zeroed, not dropped": """
for i in range(TURNS):
    optimizer.zero_grad(set_to_none=False)
    step()
""",
    "a loop over micro-batches in each turn": """
for i in range(TURNS):
    optimizer.zero_grad()
    for part in range(2):
        model(torch.randn(8, 4096, device="cuda")).sum().backward()
    optimizer.step()
    num_ended += 1
""",
    "a handler that catches everything": """
for i in range(TURNS):
    optimizer.zero_grad()
    try:
        step()
    except:
        num_begun += 1
""",
    "contexts and clean-up around the step": """
for i in range(TURNS):
    with counted(), torch.autocast("cuda", torch.bfloat16):
        optimizer.zero_grad()
        try:
            step()
        finally:
            del i
""",
    "a while loop in a function that is a generator": """
def steps():
    i = 0
    while i < TURNS:
        optimizer.zero_grad()
        step()
        i += 1
        yield i

for i in steps():
    pass
""",
    "an else of the loop": """
for i in range(TURNS):
    optimizer.zero_grad()
    step()
else:
    kept = torch.empty(1 << 20, device="cuda")
""",
}
"""Training loops that are left before their fourth step, `TURNS` to be replaced: what follows finds what the end of a whole turn leaves."""
