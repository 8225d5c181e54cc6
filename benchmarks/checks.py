"""What the checks of a real run cost: the step of a small decoder with its blocks run twice, beside torch.utils.checkpoint alone.

    python -m benchmarks.checks [--width 256] [--blocks 4] [--tokens 128] [--batch 4] [--steps 20]

Prints, for the first steps (in which results are compared) and for those after them, milliseconds per step, the ratio to plain checkpointing, and
the host's microseconds for each call of a block. Steps of both kinds alternate, and the medians are compared.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import CHECK_STEPS


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = hidden.shape
        split = self.qkv(self.first(hidden)).view(batch, tokens, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        hidden = hidden + self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, tokens, width)))
        return hidden + self.dropout(self.down(nn.functional.gelu(self.up(self.second(hidden)))))


class Decoder(nn.Module):
    """Blocks between an embedding and a head; `runs_twice` puts torch's own checkpoint around each block."""

    def __init__(self, width: int, num_blocks: int, *, runs_twice: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(1000, width), nn.Linear(width, 1000)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.runs_twice = runs_twice

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.runs_twice else block(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def main(arguments: list[str]) -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="benchmarks.checks")
    for name, default in (("width", 256), ("blocks", 4), ("tokens", 128), ("batch", 4), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    plain, checked = (Decoder(given.width, given.blocks, runs_twice=each) for each in (True, False))
    choices = [
        Choice(
            technique="checkpointing",
            where=f"Decoder.blocks.{number}",
            settings={},
            saves_bytes=0,
            adds_seconds=0.0,
            exact=True,
        )
        for number in range(given.blocks)
    ]
    session = apply_choices(choices, checked, [])
    ids = torch.randint(1000, (given.batch, given.tokens))
    seconds: dict[str, list[float]] = {"plain": [], "checked": []}
    for _ in range(given.steps + CHECK_STEPS):
        seconds["plain"].append(_timed(lambda: plain(ids).backward()))
        seconds["checked"].append(_timed(lambda: checked(ids).backward()))
    session.undo()
    for name, chosen in (("first steps", slice(1, CHECK_STEPS)), ("after them", slice(CHECK_STEPS, None))):
        without, with_checks = (statistics.median(seconds[kind][chosen]) for kind in ("plain", "checked"))
        per_call = (with_checks - without) / given.blocks * 1e6
        print(
            f"{name}: {with_checks * 1e3:.1f} ms a step, {without * 1e3:.1f} ms with torch.utils.checkpoint alone: "
            f"ratio {with_checks / without:.3f}, {per_call:.0f} us for each block"
        )


def _timed(run: Callable[[], object]) -> float:
    begin = time.process_time()
    run()
    return time.process_time() - begin


if __name__ == "__main__":
    main(sys.argv[1:])
