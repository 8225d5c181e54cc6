"""A low-rank fine-tune that is mostly weights, for the virtual card."""

from collections.abc import Iterator

import torch
from tests.conformance.large_models import Decoder, _Adapted


def mostly_weights(num_layers: int = 8) -> Iterator[torch.Tensor]:
    """Layers of 1,024 numbers in float32, 48 MiB each, trained by adapters on 128 tokens; the model is made on the host, and moved."""
    model = Decoder(4000, 1024, num_layers, 8).requires_grad_(False)
    for block in model.blocks:
        for name in ("up", "down"):
            setattr(block, name, _Adapted(getattr(block, name), 2))
    model.cuda()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad])
    while True:
        loss = model(torch.randint(0, 4000, (1, 128), device="cuda"))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
