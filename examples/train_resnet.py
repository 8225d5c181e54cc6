"""ResNet-50 on images of 224 pixels with SGD, written out: the loop of a convolutional network, to try things on.

tightfit estimate examples/train_resnet.py:train --device "RTX 3060" -p batch_size=64
"""

import torch
from torch import nn

STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))


class Bottleneck(nn.Module):
    """Three convolutions around a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.conv3, self.norm3 = nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = nn.functional.relu(self.norm1(self.conv1(x)), inplace=True)
        y = nn.functional.relu(self.norm2(self.conv2(y)), inplace=True)
        return nn.functional.relu(self.norm3(self.conv3(y)) + self.shortcut(x), inplace=True)


class ResNet50(nn.Module):
    """The network of He, Zhang, Ren and Sun (2015), for 1000 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True))
        blocks, inputs = [], 64
        for i, (width, number) in enumerate(STAGES):
            for j in range(number):
                blocks.append(Bottleneck(inputs, width, 2 if i and not j else 1))
                inputs = 4 * width
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, 1000)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        features = self.blocks(nn.functional.max_pool2d(self.stem(images), 3, 2, 1))
        return self.head(features.mean((2, 3)))


def train(batch_size: int = 64, image_size: int = 224):
    """A step a turn."""
    model = ResNet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)
    while True:
        images = torch.randn(batch_size, 3, image_size, image_size, device="cuda")
        labels = torch.randint(1000, (batch_size,), device="cuda")
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
