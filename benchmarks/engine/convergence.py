"""Whether training with optimizer states in few bits at the host ends where plain training does: a decoder of characters, on the text of this project's pages.

    python -m benchmarks.engine convergence [--steps 400] [--csv docs/engine/convergence.csv]

Five seeds for each format. The loss is that of pages which were not trained on, in nats for each character; *noise* is the spread of the plain runs over their seeds.
"""

import csv
import dataclasses
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices

_PAGES = Path(__file__).parents[2] / "docs"
_LENGTH, _BATCH, _WIDTH, _LAYERS = 64, 16, 96, 3
_HELD_OUT = 16
SEEDS = 5
_SETTINGS = {"host_bytes": 1 << 23, "window_bytes": 1 << 20}
WAYS: Mapping[str, Mapping[str, Any] | None] = {
    "plain": None,
    "8-bit": {"format": "8-bit"},
    "bf16": {"format": "bf16"},
    "8-bit, master residual": {"format": "8-bit", "master": "residual"},
}


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(_WIDTH), nn.LayerNorm(_WIDTH)
        self.qkv, self.out = nn.Linear(_WIDTH, 3 * _WIDTH), nn.Linear(_WIDTH, _WIDTH)
        self.up, self.down = nn.Linear(_WIDTH, 4 * _WIDTH), nn.Linear(4 * _WIDTH, _WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        queries, keys, values = self.qkv(self.norm_1(hidden)).unflatten(2, (3, 3, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(functional.gelu(self.up(self.norm_2(hidden))))


class Characters(nn.Module):
    """A decoder of bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.positions = nn.Embedding(256, _WIDTH), nn.Embedding(_LENGTH, _WIDTH)
        self.blocks = nn.ModuleList(_Block() for _ in range(_LAYERS))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, 256)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        inputs, targets = text[:, :-1], text[:, 1:]
        hidden = self.embedding(inputs) + self.positions(torch.arange(inputs.shape[1], device=text.device))
        for block in self.blocks:
            hidden = block(hidden)
        return functional.cross_entropy(self.head(self.norm(hidden)).flatten(0, 1), targets.flatten())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The losses of one run at its end: of the pages that were held out, and of the last tenth of its steps."""

    way: str
    seed: int
    num_steps: int
    held_out: float
    trained: float


def text() -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of the pages, but for the log and the tables, in two parts: to train on, and held out."""
    pages = sorted(page for page in _PAGES.rglob("*.md") if page.name not in ("log.md", "exactness.md"))
    train = b"".join(page.read_bytes() for at, page in enumerate(pages) if at % 5)
    other = b"".join(page.read_bytes() for page in pages[::5])
    return tuple(torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in (train, other))  # type: ignore[return-value]


def _batch(characters: torch.Tensor, generator: torch.Generator, size: int) -> torch.Tensor:
    begins = torch.randint(0, len(characters) - _LENGTH - 1, (size,), generator=generator)
    return characters[begins[:, None] + torch.arange(_LENGTH + 1)]


def train(way: str, seed: int, num_steps: int) -> Trained:
    """One run."""
    torch.manual_seed(seed)
    train_on, held_out = text()
    model = Characters()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=num_steps + 1)
    settings = WAYS[way]
    choices = [
        Choice(
            technique="low_bit_offload",
            where="optimizer",
            settings={**_SETTINGS, **settings},
            saves_bytes=0,
            adds_seconds=0.0,
            exact=False,
        )
        for settings in ([settings] if settings is not None else [])
    ]
    apply_choices(choices, model, [optimizer])
    generator, losses = torch.Generator().manual_seed(seed), []
    for _ in range(num_steps):
        loss = model(_batch(train_on, generator, _BATCH))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    always = torch.Generator().manual_seed(0)
    with torch.no_grad():
        found = [model(_batch(held_out, always, 4 * _BATCH)).item() for _ in range(_HELD_OUT)]
    last = losses[-max(1, num_steps // 10) :]
    return Trained(
        way=way, seed=seed, num_steps=num_steps, held_out=statistics.mean(found), trained=statistics.mean(last)
    )


def runs(num_steps: int) -> Iterator[Trained]:
    """All ways and seeds."""
    for seed in range(SEEDS):
        for way in WAYS:
            yield train(way, seed, num_steps)


def convergence(num_steps: int, path: Path | None) -> int:
    """Prints each run and what they say together, and writes them to `path`; how many formats are beyond the noise."""
    torch.set_num_threads(1)
    found = []
    for run in runs(num_steps):
        found.append(run)
        print(f"seed {run.seed}  {run.way:24} held out {run.held_out:.4f}  trained {run.trained:.4f}", flush=True)
    if path is not None:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [field.name for field in dataclasses.fields(Trained)], lineterminator="\n")
            writer.writeheader()
            writer.writerows(map(dataclasses.asdict, found))
    plain = {run.seed: run.held_out for run in found if run.way == "plain"}
    noise = statistics.stdev(plain.values())
    beyond = 0
    for way in WAYS:
        differences = [run.held_out - plain[run.seed] for run in found if run.way == way]
        mean = statistics.mean(differences)
        beyond += abs(mean) > noise
        print(
            f"{way:24} held out {statistics.mean(plain.values()) + mean:.4f}, {mean:+.4f} beside plain; noise {noise:.4f}"
        )
    return beyond
