"""`--largest-batch`: a program whose longest sample comes late is estimated with it, though its first steps have short ones."""

from pathlib import Path

import pytest

import tightfit
from tightfit.simulate.estimate import Estimate

PROGRAM = """
import random, torch, torch.nn.functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
class Sentences(Dataset):
    def __len__(self):
        return 600
    def __getitem__(self, index):
        random.random(), torch.rand(())
        return torch.ones(900 if index == 451 else 10 + index % 7, dtype=torch.long)
def collate(rows):
    return {{"ids": pad_sequence(rows, batch_first=True), "count": len(rows)}}
loader = DataLoader(Sentences(), collate_fn=collate, {loader})
model = torch.nn.Sequential(torch.nn.Embedding(50, 64), torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
drawn = torch.rand(3)
for batch in loader:
    loss = model(batch["ids"].cuda()).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
"""
LOADERS = {
    "in order": "batch_size=8",
    "shuffled, with workers and pinned memory": "batch_size=8, shuffle=True, num_workers=2, pin_memory=True",
    "batches of the program's own": "batch_sampler=[[0, 1, 2], [3, 4], [451, 450, 449, 448, 447, 446, 445, 444], [5]] * 3",
}


def estimated(folder: Path, loader: str, *, largest_batch: bool) -> Estimate:
    path = folder / "train.py"
    path.write_text(PROGRAM.format(loader=loader))
    return tightfit.estimate(str(path), "RTX 4090", largest_batch=largest_batch)


@pytest.mark.parametrize("kind", LOADERS)
def test_the_longest_sample_is_in_the_peak(kind: str, tmp_path: Path) -> None:
    short = estimated(tmp_path, LOADERS[kind], largest_batch=False) if kind == "in order" else None
    found = estimated(tmp_path, LOADERS[kind], largest_batch=True)
    (said,) = [str(each) for each in found.assumptions if "largest batch" in str(each)]
    assert "largest batch of 600 examples: 7,200 elements (8x900); the first one had" in said
    # The activations alone: 8 x 900 rows of 64 + 2 x 256 + 1 numbers.
    assert found.peak.allocated_bytes > 8 * 900 * 577 * 4
    assert found.peak.device_bytes > (0 if short is None else short.peak.device_bytes + 10e6)


def test_what_cannot_be_looked_through_is_said(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        PROGRAM.format(loader="batch_size=8")
        .replace("class Sentences(Dataset)", "class Sentences(torch.utils.data.IterableDataset)")
        .replace(
            "    def __getitem__",
            "    def __iter__(self):\n        yield from map(self.one, range(600))\n    def one",
        )
    )
    found = tightfit.estimate(str(tmp_path / "train.py"), "RTX 4090", largest_batch=True)
    assert any("the largest batch of this data set is not known" in str(each) for each in found.assumptions)


def test_a_larger_evaluation_is_looked_through_too(tmp_path: Path) -> None:
    more = "with torch.no_grad():\n    for batch in DataLoader(Sentences(), batch_size=64, collate_fn=collate):\n        model(batch['ids'].cuda())\n"
    (tmp_path / "train.py").write_text(PROGRAM.format(loader="batch_size=8") + more)
    found = tightfit.estimate(str(tmp_path / "train.py"), "RTX 4090", largest_batch=True)
    assert found.peak.allocated_bytes > 64 * 900 * (64 + 256) * 4
