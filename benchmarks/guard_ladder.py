"""Injected out-of-memory errors under `guard` with plans: `python -m benchmarks.guard_ladder --plans FOLDER [--failures 200]`.

For each of six architectures, `tightfit plan --ladder` makes plans once, kept in FOLDER. Then each trains eight steps under a
guard with that ladder; one to four operators in a row fail, within the attempts at a step, so that the run goes down by up to three plans, and two steps without an
error take it up again. What it ends with is compared to the bit with the plain run, and with a run without errors on which the same plans were put by hand before
the same steps: a plan with sums in another order differs from the plain run by that, and from the second one not at all. The largest difference from the plain run is a share of
the largest element of its tensor: that of a key's bias, whose gradient is rounding alone, may be all of it.
"""

import argparse
import math
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import tightfit
from benchmarks.guard import ARCHITECTURES, Failing, Training
from tightfit.fit.ladder import ladder
from tightfit.planner.plan import Plan
from tightfit.runtime.apply import apply
from tightfit.simulate.estimate import needed_bytes

NUM_STEPS = 8
# A recurrent layer is one kernel, for which there is no plan; in its place there is one of torch's own encoders.
NAMES = ("GPT-2", "Llama", "BERT", "T5", "convolutions", "encoder")
BATCH_SIZE = 16
# What is planned for: larger batches than are run, beside which the CUDA context is not all that there is.
PLANNED_BATCH_SIZES = {"convolutions": 16384}
NUM_PLANS = 2
DEVICE = "RTX 4090"


class Encoder(torch.nn.Module):
    """Two layers of torch's encoder on embedded tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(200, 64)
        self.layers = torch.nn.ModuleList(
            torch.nn.TransformerEncoderLayer(64, 4, 256, dropout=0.1, batch_first=True) for _ in range(2)
        )
        self.head = torch.nn.Linear(64, 200)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The cross-entropy of each token by itself."""
        rows = self.table(ids)
        for layer in self.layers:
            rows = layer(rows)
        return torch.nn.functional.cross_entropy(self.head(rows).flatten(0, 1), ids.flatten())


def _encoder() -> tuple[torch.nn.Module, Callable[[Any], Any]]:
    model = Encoder()
    return model, model


ARCHITECTURES["encoder"] = (_encoder, torch.optim.AdamW)


def workload(name: str = "GPT-2", batch_size: int = 64) -> Iterator[torch.Tensor]:
    """What is planned for."""
    make, optimizer_of = ARCHITECTURES[name]
    with torch.device("cuda"):
        model, loss_of = make()
    model.train()
    optimizer = optimizer_of(model.parameters(), lr=1e-3)
    while True:
        optimizer.zero_grad()
        loss = loss_of(torch.randint(0, 200, (batch_size, 64), device="cuda"))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        yield loss


def plans_for(name: str, folder: Path) -> list[Plan]:
    """The ladder of an architecture: from a budget that the plain run is just too large for."""
    files = sorted(folder.glob(f"{name}-[0-9].json"))
    if not files:
        target = f"{__file__}:workload"
        settings: dict[str, Any] = {"parameters": [f"name={name}", f"batch_size={PLANNED_BATCH_SIZES.get(name, 64)}"]}
        plain = tightfit.estimate(target, DEVICE, **settings)
        budget = needed_bytes(plain.peak, "safe") - plain.peak.allocated_bytes // 50
        found = ladder(
            target, DEVICE, num_plans=NUM_PLANS, budget=budget, host="1GiB", disk="1GiB", prove=False, **settings
        )
        for number, plan in enumerate(found, 1):
            plan.save(folder / f"{name}-{number}.json")
        files = sorted(folder.glob(f"{name}-[0-9].json"))
    return [Plan.load(each) for each in files]


def _training(name: str) -> Training:
    return Training(name, num_steps=NUM_STEPS, batch_size=BATCH_SIZE)


def plain(name: str) -> tuple[list[torch.Tensor], int]:
    """The results of the plain run, and its number of operators."""
    training = _training(name)
    with Failing() as failing, failing.counting():
        losses = [training.step(batch) for batch in training.batches]
    return training.result(losses), failing.num_operators


def guarded(
    name: str, plans: Sequence[Plan], numbers: Sequence[int]
) -> tuple[list[torch.Tensor], list[int], Counter[str]]:
    """The results of a guarded run whose operators of these numbers fail, the plan of each step, and the counts of the guard."""
    training, failing, used = _training(name), Failing(*numbers), list[int]()
    with tightfit.guard(training.model, training.optimizer, plans=plans, calm_steps=2) as guard, failing:

        def step(batch: torch.Tensor) -> torch.Tensor:
            # Taken back with the step.
            used.append(guard.plan_in_use)
            with failing.counting():
                return training.step(batch)

        losses = [guard.step(step, batch) for batch in training.batches]
    return training.result(losses), used, guard.statistics


def by_hand(name: str, plans: Sequence[Plan], used: Sequence[int]) -> list[torch.Tensor]:
    """The results of a run without errors, with the same plans put on before the same steps."""
    training, session, losses, at = _training(name), None, [], -1
    for position, batch in zip(used, training.batches, strict=True):
        if position != at:
            if session is not None:
                session.undo()
            at, session = position, None
            if at >= 0:
                session = apply(plans[at], training.model, training.optimizer)
        losses.append(training.step(batch))
    if session is not None:
        session.undo()
    return training.result(losses)


def _numbers(draw: random.Random, num_operators: int, num_plans: int) -> list[int]:
    """Operators in a row: at most one more than there are plans, beyond which a step ends with its error."""
    of_step = num_operators // NUM_STEPS
    numbers = [draw.randint(1, num_operators - 4 * of_step)]
    for _ in range(draw.randint(0, min(3, num_plans))):
        numbers.append(numbers[-1] + draw.randint(2, of_step * 6 // 10))
    return numbers


def _difference(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    """The largest difference of a tensor, as a share of its largest element."""
    pairs = [(a.double(), b.double()) for a, b in zip(expected, found, strict=True) if a.numel()]
    return max(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)) for a, b in pairs) if pairs else math.nan


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plans", type=Path, required=True)
    parser.add_argument("--failures", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.plans.mkdir(exist_ok=True)
    draw = random.Random(options.seed)
    head = f"{'architecture':13} {'runs':>4} {'errors':>6} {'as by hand':>10} {'as plain':>8} {'difference':>10} {'replays':>7} {'climbs':>6} {'refused':>7}"
    print(head, flush=True)
    left = options.failures
    for number, name in enumerate(NAMES):
        plans = plans_for(name, options.plans)
        expected, num_operators = plain(name)
        share, counts, largest, steps = left // (len(NAMES) - number), Counter[str](), 0.0, Counter[int]()
        while counts["errors"] < share:
            numbers = _numbers(draw, num_operators, len(plans))
            try:
                found, used, statistics = guarded(name, plans, numbers)
            except torch.OutOfMemoryError as error:
                print(f"  {numbers}: {error.__notes__}", flush=True)
                counts += Counter(runs=1, errors=len(numbers))
                continue
            steps.update(used)
            counts += Counter(runs=1, errors=statistics["out of memory"] + statistics["retried operators"])
            counts += Counter(
                hand=all(map(torch.equal, by_hand(name, plans, used), found)),
                plain=all(map(torch.equal, expected, found)),
                **{key: statistics[key] for key in ("replays", "climbs")},
                refused=statistics["refused plans"],
            )
            largest = max(largest, _difference(expected, found))
        left -= share
        print(
            f"{name:13} {counts['runs']:4} {counts['errors']:6} {counts['hand']:10} {counts['plain']:8} {largest:10.1e} {counts['replays']:7} {counts['climbs']:6} {counts['refused']:7}"
        )
        for at, plan in enumerate(plans):
            techniques = Counter(choice.technique for choice in plan.choices)
            chosen = ", ".join(f"{count} x {technique}" for technique, count in techniques.items())
            print(f"  plan {at + 1}: {steps[at]} steps with {chosen}", flush=True)


if __name__ == "__main__":
    main()
