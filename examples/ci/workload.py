"""The training step that the checks beside this file are about: set up, then yield once per step."""

import itertools

import torch
from torch import nn


def workload(batch_size: int = 64):
    """A convolutional classifier of 224 pixels a side, trained with SGD."""
    channels = (3, 64, 128, 256)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in itertools.pairwise(channels)
    ]
    model = nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(256, 1000)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    while True:
        images = torch.randn(batch_size, 3, 224, 224, device="cuda")
        classes = torch.randint(0, 1000, (batch_size,), device="cuda")
        loss = nn.functional.cross_entropy(model(images), classes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
