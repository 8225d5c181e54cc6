"""Training loops of networks that are no Hugging Face config, as generators that yield once per step."""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.gpu import images


def resnet(*, batch_size: int, depths: tuple[int, ...], width: int, side: int) -> Iterator[Tensor]:
    """A bottleneck residual net in channels-last, autocast to float16, SGD with momentum; depths (3, 8, 36, 3) are ResNet-152."""
    with torch.device("cuda"):
        model = images.residual(depths=depths, width=width, recompute=False).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    while True:
        pixels = torch.randn(batch_size, 3, side, side, device="cuda").to(memory_format=torch.channels_last)
        labels = torch.randint(0, images.NUM_CLASSES, (batch_size,), device="cuda")
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(pixels, labels)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss


def diffusion(*, batch_size: int, side: int, autocast: str) -> Iterator[Tensor]:
    """The UNet of Stable Diffusion 1.5 (the default widths of diffusers' `UNet2DConditionModel`) predicting noise, AdamW."""
    from diffusers import UNet2DConditionModel

    with torch.device("cuda"):
        model = UNet2DConditionModel(cross_attention_dim=768)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    scaler = torch.amp.GradScaler("cuda")
    while True:
        latents = torch.randn(batch_size, 4, side, side, device="cuda")
        noise, text = torch.randn_like(latents), torch.randn(batch_size, 77, 768, device="cuda")
        times = torch.randint(0, 1000, (batch_size,), device="cuda")
        with torch.autocast("cuda", dtype=getattr(torch, autocast)):
            loss = functional.mse_loss(model(latents + noise, times, text).sample.float(), noise)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        yield loss


def volumes(*, batch_size: int, side: int, width: int) -> Iterator[Tensor]:
    """A 3D UNet on cubes of 4 channels, float32, AdamW."""
    with torch.device("cuda"):
        model = images.UNet(channels=4, width=width, dimensions=3, attends=False, recompute=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while True:
        values = torch.randn(batch_size, 4, side, side, side, device="cuda")
        labels = torch.randint(0, images.NUM_CLASSES, (batch_size,), device="cuda")
        loss = model(values, labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss


class _Small(nn.Module):
    def __init__(self, num_blocks: int, width: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(images.TransformerBlock(width) for _ in range(num_blocks))
        self.head = nn.Linear(width, width)

    def forward(self, values: Tensor) -> Tensor:
        for block in self.blocks:
            values = block(values)
        return self.head(values).square().mean()


def small(*, batch_size: int, num_blocks: int, width: int, num_tokens: int, autocast: str = "") -> Iterator[Tensor]:
    """A few transformer blocks with AdamW: small enough to trace every combination of choices."""
    with torch.device("cuda"):
        model = _Small(num_blocks, width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    while True:
        values = torch.randn(batch_size, num_tokens, width, device="cuda")
        with torch.autocast("cuda", dtype=getattr(torch, autocast)) if autocast else contextlib.nullcontext():
            loss = model(values)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
