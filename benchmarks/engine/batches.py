"""What `asynchronous_copies` saves per step: loops whose batches are made on the host, planned on the virtual GPU with host memory for it.

    python -m benchmarks.engine batches [--csv docs/engine/batches.csv]

Each loop as it is, and with its loss read in every step; seconds are of the traced step, plain and planned. Loading the batches counts for nothing.
"""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import tightfit
from benchmarks.engine.traffic import write_rows
from benchmarks.gpu import images
from tightfit.units import format_bytes, format_seconds

CARDS = ("RTX 4060", "RTX 4090", "A100-SXM4-80GB", "H200")
LOOPS = ("pictures", "pictures_of_bytes", "volumes", "tokens")
_HOST = "4GiB"


def _steps(
    model: torch.nn.Module, batch: tuple[torch.Tensor, ...], reads: int, in_float: bool = False
) -> Iterator[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    while True:
        first, *others = (each.to("cuda") for each in batch)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(first.float().div(255) if in_float else first, *others)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if reads:
            loss.item()
        yield loss


def _resnet(pixels: torch.Tensor, reads: int, in_float: bool) -> Iterator[torch.Tensor]:
    with torch.device("cuda"):
        model = images.residual(depths=(3, 4, 6, 3), width=64, recompute=False).to(memory_format=torch.channels_last)
    labels = torch.zeros(len(pixels), dtype=torch.int64)
    yield from _steps(model, (pixels.to(memory_format=torch.channels_last), labels), reads, in_float)


def pictures(reads: int = 0) -> Iterator[torch.Tensor]:
    """ResNet-50 on 64 images of 224 x 224 in float32."""
    yield from _resnet(torch.zeros(64, 3, 224, 224), reads, in_float=False)


def pictures_of_bytes(reads: int = 0) -> Iterator[torch.Tensor]:
    """The same in bytes, made floating point on the card."""
    yield from _resnet(torch.zeros(64, 3, 224, 224, dtype=torch.uint8), reads, in_float=True)


def volumes(reads: int = 0) -> Iterator[torch.Tensor]:
    """A 3D UNet on two cubes of 4 channels and a side of 64."""
    with torch.device("cuda"):
        model = images.UNet(channels=4, width=16, dimensions=3, attends=False, recompute=False)
    yield from _steps(model, (torch.zeros(2, 4, 64, 64, 64), torch.zeros(2, dtype=torch.int64)), reads)


def tokens(reads: int = 0) -> Iterator[torch.Tensor]:
    """GPT-2 on 4 sequences of 512 tokens."""
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(n_layer=6)).cuda()

    class WithLoss(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, ids: torch.Tensor) -> Any:
            return self.inner(ids, labels=ids, use_cache=False).loss

    yield from _steps(WithLoss(), (torch.zeros(4, 512, dtype=torch.int64),), reads)


def batches(path: Path | None) -> None:
    """Plans all loops for all cards, prints a row each, and writes them."""
    rows = []
    for loop, reads, card in itertools.product(LOOPS, (0, 1), CARDS):
        plan = tightfit.plan(f"{__file__}:{loop}", device=card, host=_HOST, parameters=[f"reads={reads}"], prove=False)
        plain, planned = plan.baseline.seconds_per_step, plan.run.seconds_per_step
        settings = next((choice.settings for choice in plan.choices if choice.technique == "asynchronous_copies"), {})
        rows.append(
            {
                "loop": loop,
                "reads_loss": bool(reads),
                "device": card,
                "plain_seconds": plain,
                "planned_seconds": planned,
                "saved_share": 1 - planned / plain,
                "host_bytes": settings.get("host_bytes", 0),
                "card_bytes": settings.get("card_bytes", 0),
                "choices": " ".join(choice.technique for choice in plan.choices),
            }
        )
        print(
            f"{loop:18} {'reads its loss' if reads else '':14} {card:15} {format_seconds(plain):>9} -> {format_seconds(planned):>9}"
            f" {1 - planned / plain:6.1%}  {format_bytes(settings.get('host_bytes', 0))} at the host",
            flush=True,
        )
    if path is not None:
        write_rows(path, rows)
