"""Programs are traced with whatever data loader they have: streams, loaders without a length, samplers of their own."""

from pathlib import Path

import pytest

import tightfit

PROGRAM = """
import itertools, torch
from torch.utils.data import *
class Stream(IterableDataset):
    def __iter__(self):
        for _ in range(64):
            yield torch.ones(8)
class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, index):
        return torch.ones(8)
class Endless(Sampler):
    def __iter__(self):
        return iter(itertools.cycle(range(64)))
class Buckets:
    def __iter__(self):
        for begin in range(0, 64, 4):
            yield list(range(begin, begin + 4))
loader = {loader}
model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(2):
    for batch in loader:
        batch = batch[0] if isinstance(batch, (list, tuple)) else batch
        model(batch.reshape(-1, 8).cuda()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
"""
LOADERS = {
    "a stream": "DataLoader(Stream(), batch_size=4)",
    "a stream with workers": "DataLoader(Stream(), batch_size=4, num_workers=2, persistent_workers=True)",
    "a stream that makes its batches itself": "DataLoader(Stream(), batch_size=None)",
    "a stream of streams": "DataLoader(ChainDataset([Stream(), Stream()]), batch_size=4, drop_last=True)",
    "a sampler without a length": "DataLoader(Rows(), batch_size=4, sampler=Endless())",
    "batches of the program's own": "DataLoader(Rows(), batch_sampler=Buckets(), pin_memory=True)",
    "weighted draws": "DataLoader(Rows(), batch_size=4, sampler=WeightedRandomSampler(torch.ones(64), 32))",
    "a part of a concatenation": "DataLoader(random_split(ConcatDataset([Rows(), Rows()]), [100, 28])[0], batch_size=4, shuffle=True)",
    "examples one by one": "DataLoader(Rows(), batch_size=None)",
    "an iterator kept by the program": "itertools.islice(DataLoader(Stream(), batch_size=4), 12)",
    "two loaders in turn": "zip(DataLoader(Rows(), batch_size=4), DataLoader(Stream(), batch_size=4))",
    "a list": "[torch.ones(4, 8)] * 12",
}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("kind", LOADERS)
@pytest.mark.parametrize("largest_batch", [False, True])
def test_a_program_with(kind: str, largest_batch: bool, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PROGRAM.format(loader=LOADERS[kind]))
    found = tightfit.estimate(str(path), "RTX 4090", largest_batch=largest_batch)
    assert found.fits
    assert found.peak.allocated_bytes >= 8 * 9 * 4 * 2
