"""A timm model trained as its recipes train it: stochastic depth, dropout, channels last."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch

import benchmarks.workloads.torchvision_without_kernels  # noqa: F401 - timm imports torchvision


def train(
    *,
    name: str,
    settings: Mapping[str, Any],
    batch_size: int = 4,
    image_size: int = 64,
    channels_last: bool = False,
    device: str = "cuda",
) -> Iterator[torch.Tensor]:
    """`settings` are arguments of `timm.create_model`; 10 classes, cross entropy, float32."""
    import timm

    layout = torch.channels_last if channels_last else torch.contiguous_format
    model = timm.create_model(name, pretrained=False, num_classes=10, **settings).to(device, memory_format=layout)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    while True:
        images = torch.rand(batch_size, 3, image_size, image_size).to(device, memory_format=layout)
        labels = torch.randint(0, 10, (batch_size,)).to(device)
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        yield loss
