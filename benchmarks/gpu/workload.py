"""The training loop of every row, as a generator that yields once per step; also what is traced to predict it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.gpu import images

VOCABULARY = 32_000
_KERNELS = {
    "flash": [SDPBackend.FLASH_ATTENTION],
    "efficient": [SDPBackend.EFFICIENT_ATTENTION],
    "math": [SDPBackend.MATH],
}
_ON_TOKENS = {
    "encoder": "encoder",
    "decoder": "decoder",
    "encoder-decoder": "encoder_decoder",
    "experts": "experts",
    "state-space": "StateSpace",
}
_FORMS: Mapping[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "loop": {"foreach": False},
}


def network_of(family: str, model: Mapping[str, Any], data: int, recompute: bool) -> nn.Module:
    """The network of a family, on the default device."""
    if family in _ON_TOKENS:
        from benchmarks.gpu import tokens

        return getattr(tokens, _ON_TOKENS[family])(**model, vocabulary=VOCABULARY, recompute=recompute)
    makers: dict[str, Callable[..., nn.Module]] = {
        "residual": images.residual,
        "depthwise": images.depthwise,
        "vit": lambda **own: images.VisionTransformer(side=data, **own),
        "dit": images.DiffusionTransformer,
        "diffusion-unet": lambda **own: images.UNet(channels=4, dimensions=2, attends=True, **own),
        "unet-3d": lambda **own: images.UNet(channels=4, dimensions=3, attends=False, **own),
    }
    return makers[family](**model, recompute=recompute)


def batch_of(family: str, data: int, batch_size: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels of one step, made on the device."""
    if family in _ON_TOKENS:
        tokens = torch.randint(0, VOCABULARY, (batch_size, data), device=device)
        return tokens, tokens.clone()
    channels, num_sides = {"dit": (4, 2), "diffusion-unet": (4, 2), "unet-3d": (4, 3)}.get(family, (3, 2))
    values = torch.randn(batch_size, channels, *[data] * num_sides, device=device)
    return values, torch.randint(0, images.NUM_CLASSES, (batch_size,), device=device)


def optimizer_of(name: str, network: nn.Module) -> torch.optim.Optimizer:
    """The optimizer that a row names, such as `adamw-fused`."""
    kind, _, form = name.partition("-")
    if kind == "adafactor":
        return torch.optim.Adafactor(network.parameters())
    options: dict[str, Any] = {**_FORMS[form]}
    if kind == "sgd":
        return torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, **options)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](network.parameters(), lr=1e-4, **options)


def train(
    *,
    family: str,
    model: Mapping[str, Any],
    data: int,
    batch_size: int,
    precision: str,
    optimizer: str,
    recompute: bool,
    attention: str,
    device: str = "cuda",
) -> Iterator[torch.Tensor]:
    """Trains on random data; the parameters are those of a `rows.Row`. Gradients are cleared after the optimizer's step."""
    torch.manual_seed(0)
    with torch.device(device):
        network = network_of(family, model, data, recompute)
    if precision == "bf16":
        network.to(torch.bfloat16)
    network.train()
    chosen = optimizer_of(optimizer, network)
    autocast_type = {"amp-fp16": torch.float16, "amp-bf16": torch.bfloat16}.get(precision)
    scaler = torch.amp.GradScaler(device, enabled=precision == "amp-fp16")
    kernels = sdpa_kernel(_KERNELS[attention]) if attention else contextlib.nullcontext()
    with kernels:
        while True:
            values, labels = batch_of(family, data, batch_size, device)
            if precision == "bf16" and values.is_floating_point():
                values = values.to(torch.bfloat16)
            with torch.autocast(device, dtype=autocast_type, enabled=autocast_type is not None):
                loss = network(values, labels)
            scaler.scale(loss).backward()
            scaler.step(chosen)
            scaler.update()
            chosen.zero_grad()
            yield loss
