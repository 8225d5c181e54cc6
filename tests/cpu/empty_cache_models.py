"""A workload whose optimizer asks for larger blocks than its passes leave."""

from collections.abc import Iterator

import torch
from torch import nn


def uneven() -> Iterator[torch.Tensor]:
    """Many medium activations, then an optimizer with one very large temporary."""
    layers = nn.Sequential(*(m for _ in range(24) for m in (nn.Linear(1024, 1024), nn.GELU()))).cuda()
    table = nn.Parameter(torch.zeros(128 * 1024, 1024, device="cuda"))
    optimizer = torch.optim.AdamW([*layers.parameters(), table], foreach=False)
    while True:
        loss = layers(torch.randn(9 * 1024, 1024, device="cuda")).sum() + table[:4].sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
