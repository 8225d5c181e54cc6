"""Whether what the engine moves trains to the same bits: six models, everything that is moved, to the host and to disk, real numbers on the host.

    python -m benchmarks.engine exactness [--steps 50] [--csv docs/engine/exactness.csv]

The same engine as on a card, with a thread for the copy engine. Of each step the loss, all gradients and all weights are compared with the plain run's, at the end
buffers, optimizer states and the random state too: bit for bit, with AdamW, clipped gradients, a schedule and dropout.
"""

import csv
import dataclasses
import hashlib
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from torch import nn

from benchmarks.engine.architectures import ARCHITECTURES
from benchmarks.engine.ways import TIERS, WAYS, freeze
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.lazy_tensors.lazy_tensor import LazyTensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """Digests of the bits of each step's losses, gradients and weights, and of what is there at the end; `moved` counts bytes that were moved."""

    losses: list[float]
    gradients: list[str]
    weights: list[str]
    end: str
    moved: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Up to which step each of them was the same; `num_steps` if all were."""

    model: str
    moved: str
    tier: str
    num_steps: int
    same_losses: int
    same_gradients: int
    same_weights: int
    same_end: bool
    moved_bytes: int
    plain_seconds: float
    seconds: float

    @property
    def is_exact(self) -> bool:
        """Whether something was moved, and all of it was the same."""
        return (
            self.moved_bytes > 0
            and self.same_end
            and {self.same_losses, self.same_gradients, self.same_weights} == {self.num_steps}
        )


def train(name: str, way: str = "", tier: str = "host", *, num_steps: int, freezes: bool = False) -> Trained:
    """Trains a model from the same beginning every time, plainly or with a way of moving on it."""
    torch.manual_seed(0)
    model, loss_of = ARCHITECTURES[name]()
    if freezes:
        freeze(model)
    model.train()
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=num_steps)
    session = apply_choices(WAYS[way](model, tier) if way else [], model, [optimizer])
    begin = time.perf_counter()
    losses, gradients, weights = [], [], []
    for step in range(num_steps):
        loss = loss_of(step)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        gradients.append(_digest(p.grad for p in parameters))
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        weights.append(_digest(model.parameters()))
    seconds = time.perf_counter() - begin
    states = (v for s in optimizer.state_dict()["state"].values() for v in s.values() if isinstance(v, torch.Tensor))
    end = _digest([*model.buffers(), *states, torch.get_rng_state()])
    moved = sum(count for what, count in session.statistics.items() if what.endswith(("bytes", "card", "host")))
    # States are away after each step.
    away = (v for s in optimizer.state.values() for v in dict.values(s) if isinstance(v, LazyTensor))
    moved += num_steps * sum(v.numel() * v.element_size() for v in away)
    session.undo()
    return Trained(losses=losses, gradients=gradients, weights=weights, end=end, moved=moved, seconds=seconds)


def _digest(tensors: Iterable[torch.Tensor | None]) -> str:
    found = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        if tensor is not None:
            found.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def compared(name: str, way: str, tier: str, num_steps: int, plain: Trained | None = None) -> Row:
    """One model with one way of moving on it, against the plain run, which is made if it is not given."""
    freezes = way == "frozen weights"
    plain = plain or train(name, num_steps=num_steps, freezes=freezes)
    moved = train(name, way, tier, num_steps=num_steps, freezes=freezes)
    return Row(
        model=name,
        moved=way,
        tier=tier,
        num_steps=num_steps,
        same_losses=_same(plain.losses, moved.losses),
        same_gradients=_same(plain.gradients, moved.gradients),
        same_weights=_same(plain.weights, moved.weights),
        same_end=plain.end == moved.end,
        moved_bytes=moved.moved,
        plain_seconds=round(plain.seconds, 2),
        seconds=round(moved.seconds, 2),
    )


def _same(ones: Sequence[object], others: Sequence[object]) -> int:
    return next((at for at, (a, b) in enumerate(zip(ones, others, strict=True)) if a != b), len(ones))


def rows(num_steps: int) -> Iterator[Row]:
    """All models with all ways and tiers."""
    for name in ARCHITECTURES:
        plain = {freezes: train(name, num_steps=num_steps, freezes=freezes) for freezes in (False, True)}
        for way in WAYS:
            for tier in TIERS:
                yield compared(name, way, tier, num_steps, plain[way == "frozen weights"])


def exactness(num_steps: int, path: Path | None) -> int:
    """Prints a row for each, and writes them to `path`; how many are not exact."""
    torch.set_num_threads(1)
    found = []
    for row in rows(num_steps):
        found.append(row)
        verdict = "the same to the bit" if row.is_exact else "OTHER"
        print(
            f"{row.model:8} {row.moved:15} {row.tier:5} {row.num_steps} steps  {verdict}  {row.moved_bytes:>12,} bytes moved",
            flush=True,
        )
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Row)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(dataclasses.asdict, found))
    return sum(not row.is_exact for row in found)
