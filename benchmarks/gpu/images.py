"""Networks on images, volumes and latents, each with a loss as its output: residual and depthwise convolutions, ViT, diffusion UNet, DiT, 3D UNet.

Written after their papers, for a machine that has torch and nothing else: He et al. 2015 (bottleneck residual nets), Sandler et al. 2018 (inverted
residuals), Dosovitskiy et al. 2020 (ViT), Ho et al. 2020 (diffusion UNet), Peebles and Xie 2022 (DiT), Cicek et al. 2016 (3D UNet).
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

NUM_CLASSES = 1000


def run_blocks(blocks: Iterable[nn.Module], values: Tensor, *others: Tensor, recompute: bool) -> Tensor:
    """The blocks one after the other, each recomputed in the backward pass or not."""
    for block in blocks:
        call: Callable[..., Any] = block
        values = checkpoint(call, values, *others, use_reentrant=False) if recompute else call(values, *others)
    return values


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut."""

    def __init__(self, inner: int, width: int, stride: int) -> None:
        super().__init__()
        outer = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
            *(nn.Conv2d(width, outer, 1, bias=False), nn.BatchNorm2d(outer)),
        )
        plain = inner == outer and stride == 1
        self.shortcut = (
            nn.Identity()
            if plain
            else nn.Sequential(nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))
        )

    def forward(self, images: Tensor) -> Tensor:
        return functional.relu(self.body(images) + self.shortcut(images), inplace=True)


class InvertedResidual(nn.Module):
    """A wide depthwise convolution between two narrow 1 x 1 ones."""

    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        wide = 6 * inner
        self.body = nn.Sequential(
            *(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU(inplace=True)),
            nn.Conv2d(wide, wide, 3, stride, 1, groups=wide, bias=False),
            *(
                nn.BatchNorm2d(wide),
                nn.SiLU(inplace=True),
                nn.Conv2d(wide, outer, 1, bias=False),
                nn.BatchNorm2d(outer),
            ),
        )
        self.adds = inner == outer and stride == 1

    def forward(self, images: Tensor) -> Tensor:
        return images + self.body(images) if self.adds else self.body(images)


class Classifier(nn.Module):
    """A stem, stages of blocks and a linear head on images of 3 channels."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], width: int, recompute: bool) -> None:
        super().__init__()
        self.stem, self.blocks, self.recompute = stem, nn.ModuleList(blocks), recompute
        self.head = nn.Linear(width, NUM_CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        features = run_blocks(self.blocks, self.stem(images), recompute=self.recompute)
        return functional.cross_entropy(self.head(features.mean((2, 3))), labels)


def residual(*, depths: tuple[int, ...], width: int, recompute: bool) -> nn.Module:
    """A bottleneck residual net; depths (3, 4, 6, 3) and width 64 are ResNet-50."""
    stem = nn.Sequential(
        *(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(inplace=True)),
        nn.MaxPool2d(3, 2, 1),
    )
    blocks: list[nn.Module] = []
    inner = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            own = width << stage
            blocks.append(Bottleneck(inner, own, 2 if stage and not index else 1))
            inner = 4 * own
    return Classifier(stem, blocks, inner, recompute)


def depthwise(*, depths: tuple[int, ...], width: int, recompute: bool) -> nn.Module:
    """A net of inverted residuals, its width doubled from stage to stage."""
    stem = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.SiLU(inplace=True))
    blocks: list[nn.Module] = []
    inner = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            own = width << stage
            blocks.append(InvertedResidual(inner, own, 2 if not index else 1))
            inner = own
    return Classifier(stem, blocks, inner, recompute)


class Attention(nn.Module):
    """Self-attention with heads of 64 over `(batch, tokens, width)`."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inputs, self.output = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, values: Tensor) -> Tensor:
        batch, length, width = values.shape
        heads = (part.view(batch, length, -1, 64).transpose(1, 2) for part in self.inputs(values).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads)
        return self.output(mixed.transpose(1, 2).reshape(batch, length, width))


class TransformerBlock(nn.Module):
    """Attention and a feed-forward net; with a condition, both are scaled, shifted and gated by it (adaLN-Zero of DiT)."""

    def __init__(self, width: int, is_conditioned: bool = False) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width, elementwise_affine=not is_conditioned) for _ in range(2))
        self.attention = Attention(width)
        self.feed_forward = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
        self.modulation = nn.Linear(width, 6 * width) if is_conditioned else None

    def forward(self, values: Tensor, condition: Tensor | None = None) -> Tensor:
        if self.modulation is None or condition is None:
            values = values + self.attention(self.norms[0](values))
            return values + self.feed_forward(self.norms[1](values))
        parts = self.modulation(functional.silu(condition)).unsqueeze(1).chunk(6, -1)
        for norm, part, (shift, scale, gate) in zip(
            self.norms, (self.attention, self.feed_forward), (parts[:3], parts[3:]), strict=True
        ):
            values = values + gate * part(norm(values) * (1 + scale) + shift)
        return values


class VisionTransformer(nn.Module):
    """Patches of 16 x 16 of images of `side`, as tokens."""

    def __init__(self, *, depth: int, width: int, side: int, recompute: bool) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.positions = nn.Parameter(torch.zeros(1, (side // 16) ** 2, width))
        self.blocks = nn.ModuleList(TransformerBlock(width) for _ in range(depth))
        self.norm, self.head, self.recompute = nn.LayerNorm(width), nn.Linear(width, NUM_CLASSES), recompute

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        tokens = run_blocks(self.blocks, tokens, recompute=self.recompute)
        return functional.cross_entropy(self.head(self.norm(tokens).mean(1)), labels)


class DiffusionTransformer(nn.Module):
    """Predicts the noise in latents of 4 channels, patches of 2 x 2 as tokens, told the time."""

    def __init__(self, *, depth: int, width: int, recompute: bool) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv2d(4, width, 2, 2), nn.Linear(256, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, is_conditioned=True) for _ in range(depth))
        self.norm, self.head, self.recompute = nn.LayerNorm(width), nn.Linear(width, 16), recompute

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        condition = self.time(functional.one_hot(labels % 256, 256).to(images.dtype))
        tokens = self.patches(images + noise).flatten(2).transpose(1, 2)
        tokens = run_blocks(self.blocks, tokens, condition, recompute=self.recompute)
        side = images.shape[-1] // 2
        found = self.head(self.norm(tokens)).transpose(1, 2).reshape(-1, 16, side, side)
        return functional.mse_loss(functional.pixel_shuffle(found, 2), noise)


class ResidualNorm(nn.Module):
    """Group norm, SiLU and convolution, twice, beside a shortcut, in two or three dimensions; with attention over all places if asked."""

    def __init__(self, inner: int, outer: int, *, dimensions: int = 2, attends: bool = False) -> None:
        super().__init__()
        conv = nn.Conv2d if dimensions == 2 else nn.Conv3d
        self.body = nn.Sequential(
            *(nn.GroupNorm(8, inner), nn.SiLU(), conv(inner, outer, 3, padding=1)),
            *(nn.GroupNorm(8, outer), nn.SiLU(), conv(outer, outer, 3, padding=1)),
        )
        self.shortcut = conv(inner, outer, 1)
        self.attention = Attention(outer) if attends else None

    def forward(self, images: Tensor) -> Tensor:
        images = self.shortcut(images) + self.body(images)
        if self.attention is None:
            return images
        return images + self.attention(images.flatten(2).transpose(1, 2)).transpose(1, 2).reshape(images.shape)


class UNet(nn.Module):
    """Down to an eighth of the side and up again, with shortcuts; two blocks a level, attention at the two lowest if asked."""

    def __init__(self, *, channels: int, width: int, dimensions: int, attends: bool, recompute: bool) -> None:
        super().__init__()
        conv = nn.Conv2d if dimensions == 2 else nn.Conv3d
        widths = [width, 2 * width, 4 * width, 4 * width]
        self.first, self.last = conv(channels, width, 3, padding=1), conv(width, channels, 3, padding=1)
        self.down, self.up = nn.ModuleList(), nn.ModuleList()
        inner = width
        for level, own in enumerate(widths):
            kind: dict[str, Any] = {"dimensions": dimensions, "attends": attends and level >= 2}
            self.down.append(nn.ModuleList([ResidualNorm(inner, own, **kind), ResidualNorm(own, own, **kind)]))
            inner = own
        for level, own in reversed(list(enumerate(widths))):
            kind = {"dimensions": dimensions, "attends": attends and level >= 2}
            self.up.append(nn.ModuleList([ResidualNorm(inner + own, own, **kind), ResidualNorm(own, own, **kind)]))
            inner = own
        self.recompute, self.mode = recompute, "nearest"

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        noise = torch.randn_like(images)
        values = self.first(images + noise)
        kept = []
        pool = functional.avg_pool2d if values.dim() == 4 else functional.avg_pool3d
        for level, blocks in enumerate(self.down):
            values = run_blocks(blocks, pool(values, 2) if level else values, recompute=self.recompute)
            kept.append(values)
        for level, blocks in enumerate(self.up):
            if level:
                values = functional.interpolate(values, scale_factor=2.0, mode=self.mode)
            values = run_blocks(blocks, torch.cat((values, kept.pop()), 1), recompute=self.recompute)
        return functional.mse_loss(self.last(values), noise)
