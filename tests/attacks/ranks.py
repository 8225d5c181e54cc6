"""Programs of two processes whose models DistributedDataParallel or fully_shard wraps, each tried with techniques: put on the model inside, or on the wrapped one.

python -m tests.attacks.ranks FOLDER [PROGRAM ...]
"""

import datetime
import json
import multiprocessing
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from tests.attacks.harness import Outcome, Verdict, tried
from tests.attacks.models import Net, tokens
from tests.attacks.places import VARIANTS, Variant, choice
from tests.attacks.registry import Attack
from tests.attacks.trial import Trial
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

_FREEZING = Variant(
    name="freezing",
    technique="freezing",
    find=lambda model, _: [choice("freezing", f"{type(model).__name__}.blocks", num_blocks=1, before="")],
    is_bitwise=False,
    is_lossy=True,
)
TRIED = {**VARIANTS, "freezing": _FREEZING}
_STEPS = 6
# A rank that waits for one that was refused alone ends with an error.
_TIMEOUT = datetime.timedelta(seconds=30)


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def _averaged(t: Trial, *, is_outside: bool, **settings: bool) -> None:
    """Each rank has batches of its own; gradients are averaged, and clipped from step 4 on."""
    rank = distributed.get_rank()
    model = Net()
    wrapped = DistributedDataParallel(model, **settings)  # pyrefly: ignore[bad-argument-type]
    optimizer = _optimizer(wrapped)
    t.apply(wrapped if is_outside else model, optimizer)
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss = wrapped(*tokens(2 * step + rank))
        loss.backward()
        if step >= 4:
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


def _accumulated(t: Trial) -> None:
    """Gradients of two batches are averaged once (no_sync), of a last batch that is smaller on one rank."""
    rank = distributed.get_rank()
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = _optimizer(wrapped)
    t.apply(model, optimizer)
    for step in range(_STEPS):
        optimizer.zero_grad()
        with wrapped.no_sync():
            wrapped(*tokens(4 * step + rank)).backward()
        loss = wrapped(*tokens(4 * step + 2 + rank, batch=4 - rank))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


def _sharded(t: Trial) -> None:
    """Weights, gradients and states are shards, of which the whole is noted."""
    rank = distributed.get_rank()
    model = Net()
    mesh = init_device_mesh("cpu", (2,))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = _optimizer(model)
    t.compares_models = False
    t.apply(model, optimizer)
    for step in range(_STEPS):
        optimizer.zero_grad()
        loss = model(*tokens(2 * step + rank))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.note("weights", [p.full_tensor() for p in model.parameters()])  # pyrefly: ignore[not-callable]
        t.end_step()


PROGRAMS: dict[str, Callable[[Trial], None]] = {
    "averaged": lambda t: _averaged(t, is_outside=False),
    "averaged, plan outside": lambda t: _averaged(t, is_outside=True),
    "averaged in buckets": lambda t: _averaged(t, is_outside=False, gradient_as_bucket_view=True),
    "accumulated": _accumulated,
    "sharded": _sharded,
}


def verdicts(folder: Path, names: Sequence[str], techniques: Sequence[str]) -> list[dict[str, dict[str, Verdict]]]:
    """What each of two ranks finds of each program with each technique."""
    # Of a server of its own each rank would import torch again.
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=_rank, args=(folder, rank, names, techniques)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    return [
        {
            name: {v: Verdict(outcome=Outcome(outcome), reason=reason) for v, (outcome, reason) in found.items()}
            for name, found in json.loads((folder / f"{rank}.json").read_text()).items()
        }
        for rank in range(2)
    ]


def _rank(folder: Path, rank: int, names: Sequence[str], techniques: Sequence[str]) -> None:
    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), 2)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_TIMEOUT)
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for name in names:
        attack = Attack(name=f"{name} of rank {rank}", kind="gradients", what=name, program=PROGRAMS[name])
        of_program = found[name] = {}
        for technique in techniques:
            verdict = tried(attack, TRIED[technique])
            of_program[technique] = str(verdict.outcome), verdict.reason
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.destroy_process_group()


if __name__ == "__main__":
    for rank, each in enumerate(verdicts(Path(sys.argv[1]), sys.argv[2:] or list(PROGRAMS), list(TRIED))):
        for name, found in each.items():
            for technique, verdict in found.items():
                if verdict.outcome is not Outcome.NO_PLACE:
                    print(f"{rank} {name:24} {technique:36} {verdict.outcome:8} {verdict.reason}")
