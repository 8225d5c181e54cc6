"""A timm model trained with SGD and momentum (source of the measurements: itu-rad/GPUMemNet, whose settings for this
sweep are not published; read slopes over batch size from it, not levels)."""

from collections.abc import Iterator

import torch

import benchmarks.workloads.torchvision_without_kernels  # noqa: F401 - timm imports torchvision


def train(
    *, model: str = "resnet18", batch_size: int = 32, image_size: int = 0, device: str = "cuda"
) -> Iterator[torch.Tensor]:
    """`image_size` 0 means the model's own default input size; 1000 classes, cross entropy, float32."""
    import timm

    network = timm.create_model(model, pretrained=False, num_classes=1000).to(device)
    network.train()
    pixels = image_size or network.default_cfg["input_size"][-1]
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9)
    criterion = torch.nn.CrossEntropyLoss()
    while True:
        images = torch.rand(batch_size, 3, pixels, pixels).to(device)
        labels = torch.randint(0, 1000, (batch_size,)).to(device)
        optimizer.zero_grad()
        outputs = network(images)
        loss = criterion(outputs, labels)
        loss.backward()
        optimizer.step()
        yield loss
