"""Data loaders of a traced program: which ones, how long loading takes in the main process and in workers, and that nothing else is changed by it."""

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import tightfit

SECONDS = 0.004


class Slow(Dataset[Any]):
    """Samples that take some time each."""

    def __init__(self, num_numbers: int) -> None:
        self.num_numbers = num_numbers

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> torch.Tensor:
        time.sleep(SECONDS)
        return torch.full((self.num_numbers,), float(number))


def training(num_workers: int = 0, pins: int = 0) -> Iterator[torch.Tensor]:
    loader = DataLoader(Slow(1 << 18), batch_size=4, num_workers=num_workers, pin_memory=bool(pins))
    model = nn.Linear(1 << 18, 8).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in loader:
        loss = model(batch.to("cuda", non_blocking=bool(pins))).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


@pytest.mark.parametrize(("num_workers", "pins"), [(0, 0), (2, 0), (0, 1)])
def test_loading_and_copies_are_told(num_workers: int, pins: int) -> None:
    estimate = tightfit.estimate(
        f"{__file__}:training", "RTX 4090", parameters=[f"num_workers={num_workers}", f"pins={pins}"]
    )
    pipeline = estimate.input_pipeline
    assert pipeline is not None
    (cost,) = pipeline.loaders
    assert cost.use.line.startswith("tests/cpu/test_loading_times.py:") or "test_loading_times.py:" in cost.use.line
    assert (cost.use.num_workers, cost.use.pins_memory, cost.use.batch_size, cost.use.num_examples) == (
        num_workers,
        bool(pins),
        4,
        64,
    )
    assert cost.batches == 1 and cost.batch_bytes == 4 << 20
    assert cost.load_seconds >= 4 * SECONDS
    assert pipeline.with_loading_seconds > max(pipeline.step_seconds, cost.seconds_per_step * 0.99)
    assert (pipeline.async_seconds < pipeline.step_seconds) is (not pins)
    assert estimate.to_json()["input_pipeline"]["loaders"][0]["num_workers"] == num_workers
