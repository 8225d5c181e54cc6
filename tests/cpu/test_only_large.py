"""Recomputation of large batches only: smaller ones are left alone, results are the plain run's, and what is left alone fits."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import tightfit
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.registry import techniques

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "checkpointing": ("Net.blocks.0", {}),
    "selective_checkpointing": ("Net.blocks.0", {"keep": [0]}),
    "sequential_checkpointing": ("Net.blocks", {"begin": 0, "end": 2}),
    "nested_checkpointing": ("Net.blocks", {"begin": 0, "end": 2}),
}
LENGTHS = (3, 40, 7, 40, 20, 21, 3)
MOST = 4 * 20 * 8


class Runs(TorchDispatchMode):
    """The lengths of the batches that blocks were run with, first and second runs."""

    def __init__(self) -> None:
        super().__init__()
        self.lengths: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.tanh.default:
            self.lengths.append(args[0].shape[1])
        return func(*args, **(kwargs or {}))


class Block(nn.Module):
    """A block of a tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 8), nn.Dropout(0.1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows + self.layers(rows)


class Net(nn.Module):
    """Two blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks, self.head = nn.Embedding(50, 8), nn.Sequential(Block(), Block()), nn.Linear(8, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(ids)))


def choice(technique: str, only_above: object) -> Choice:
    where, settings = SETTINGS[technique]
    return Choice(
        technique=technique,
        where=where,
        settings=settings | {"only_above": only_above},
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
    )


def trained(technique: str, lengths: tuple[int, ...] = LENGTHS) -> tuple[nn.Module, list[float], list[int]]:
    """The model after a step for each length, the losses, and the lengths with which blocks were run."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters())
    session = apply_choices([choice(technique, [MOST])], model, [optimizer]) if technique else None
    losses = []
    runs = Runs()
    for length in lengths:
        with runs:
            loss = model(torch.arange(4 * length).reshape(4, length) % 50).square().mean()
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if session is not None:
        session.undo()
    return model, losses, runs.lengths


@pytest.mark.parametrize("technique", SETTINGS)
def test_large_batches_are_run_twice_and_others_are_left_alone(technique: str) -> None:
    plain, losses, calls = trained("")
    model, found, again = trained(technique)
    assert found == losses
    assert all(map(torch.equal, model.state_dict().values(), plain.state_dict().values()))
    for length in set(LENGTHS):
        more = again.count(length) > calls.count(length)
        assert more == (4 * length * 8 > MOST), (length, again)


@pytest.mark.parametrize("technique", SETTINGS)
def test_a_copy_of_the_model_has_the_same_limit(technique: str) -> None:
    model = Net()
    session = apply_choices([choice(technique, [MOST])], model, [])
    copied = copy.deepcopy(model)
    for length in (20, 21):
        with Runs() as runs:
            copied(torch.zeros(4, length, dtype=torch.long)).sum().backward()
        # Nested checkpointing is not copied.
        is_copied = technique != "nested_checkpointing"
        assert (len(runs.lengths) > 2) == (length == 21 and is_copied)
    session.undo()


@pytest.mark.parametrize("given", [-1, 2.5, "many", True, [-1], [2.5], ["many"], [True]])
def test_a_limit_that_is_no_number_is_refused(given: object) -> None:
    with pytest.raises(ApplyError, match=r"only_above is .*, and takes a list of numbers of elements"):
        apply_choices([choice("checkpointing", given)], Net(), [])


class Crossed(nn.Module):
    """A block with two inputs, as that of a decoder."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return target + self.down(torch.tanh(self.up(source))).mean(1, keepdim=True)


class Decoder(nn.Module):
    """One of them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Crossed()

    def forward(self, target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
        return self.block(target, source)


@pytest.mark.parametrize(("lengths", "is_again"), [((20, 20), False), ((3, 40), True), ((40, 3), True)])
def test_a_short_target_with_a_long_source_is_large(lengths: tuple[int, int], *, is_again: bool) -> None:
    model = Decoder()
    own = Choice(
        technique="checkpointing",
        where="Decoder.block",
        settings={"only_above": [MOST, MOST]},
        saves_bytes=0,
        adds_seconds=0.0,
        exact=True,
    )
    session = apply_choices([own], model, [])
    with Runs() as runs:
        model(*(torch.randn(4, length, 8) for length in lengths)).sum().backward()
    assert len(runs.lengths) == 1 + is_again
    session.undo()


PROGRAM = """
import torch, torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
class Sentences(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.arange(LONGEST if index == 40 else 40 + 9 * (index % 20)) % 50
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scores = nn.Linear(width, width)
    def forward(self, x):
        mixed = torch.softmax(self.scores(x) @ x.transpose(1, 2), -1) @ x
        return x + mixed + self.down(F.gelu(self.up(self.norm(x))))
class Net(nn.Module):
    def __init__(self, width=512):
        super().__init__()
        self.embedding = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(5))
        self.head = nn.Linear(width, 50)
    def forward(self, ids):
        x = self.embedding(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
loader = DataLoader(Sentences(), batch_size=8, collate_fn=lambda rows: pad_sequence(rows, batch_first=True))
model = Net().cuda()
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
for batch in loader:
    batch = batch.cuda()
    loss = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def written(folder: Path, longest: int) -> str:
    path = folder / f"train_{longest}.py"
    path.write_text(PROGRAM.replace("LONGEST", str(longest)))
    return str(path)


def test_a_plan_for_the_largest_batch_recomputes_only_batches_that_need_it(tmp_path: Path) -> None:
    script, budget = written(tmp_path, 1024), 1536 << 20
    others = sorted(set(techniques()) - {"checkpointing"})
    found = tightfit.plan(script, "RTX 4090", budget=budget, largest_batch=True, prove=False, without=others)
    assert found.fits and found.missing_bytes <= 0 < found.baseline.peak.device_bytes - budget
    (limit,) = {int(*c.settings["only_above"]) for c in found.choices if c.technique == "checkpointing"}
    longest = limit // (8 * 512)
    # A batch as large as that fits as it is.
    alone = tightfit.estimate(written(tmp_path, longest), "RTX 4090", largest_batch=True)
    assert alone.peak.device_high_bytes <= budget < 1.2 * alone.peak.device_high_bytes
