"""Blocks that compute once and keep it: `functools.cache`, cached properties, tables by length."""

import functools
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial

MADE: dict[str, Any] = {}


@attack("recomputation", "a cached_property computed from a weight at its first read")
def cached_property_of_weight(t: Trial) -> None:
    class Cached(Block):
        @functools.cached_property
        def base(self) -> torch.Tensor:
            return self.wide.weight.detach().sum(0) * torch.rand(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) + self.base

    train(t, Net([Cached(), Cached()]))


@attack(
    "recomputation",
    "an lru_cache that draws noise by length, with one place, so that lengths in turns evict each other",
)
def lru_cache_of_noise(t: Trial) -> None:
    @functools.lru_cache(maxsize=1)
    def table(length: int) -> torch.Tensor:
        return torch.randn(length, WIDTH)

    class Cached(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x + table(x.shape[1]))

    train(t, Net([Cached(), Cached()]), batch=lambda step: tokens(step, length=4 + 2 * (step % 2)))


@attack("recomputation", "an lru_cache whose function counts how often it ran, by which the block scales")
def lru_cache_counts(t: Trial) -> None:
    misses = [0]

    @functools.lru_cache(maxsize=1)
    def rotation(length: int) -> torch.Tensor:
        misses[0] += 1
        return torch.arange(length).view(-1, 1) / length * misses[0]

    class Cached(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rotation(3)
            return x + self.inner(x + rotation(x.shape[1]))

    train(t, Net([Cached(), Cached()]))
    t.note("misses", misses[0])


@attack("recomputation", "an lru_cache over a function that counts its calls in a global dict, and a state read seldom")
def lru_cache_with_registry(t: Trial) -> None:
    MADE.clear()

    @functools.cache
    def table(length: int, version: int) -> torch.Tensor:
        MADE["made"] = MADE.get("made", 0) + 1
        return torch.full((length, 1), 1.0 / MADE["made"])

    class Cached(Block):
        version = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.version += 1
            return x + self.inner(x + table(x.shape[1], self.version))

    train(t, Net([Cached(), Cached()]), num_steps=6)
    t.note("made", MADE["made"])


@attack("recomputation", "a table of sines in an lru_cache by length (rotary positions), made in the first forward")
def lru_cache_of_sines(t: Trial) -> None:
    @functools.cache
    def table(width: int) -> torch.Tensor:
        return torch.sin(torch.arange(width) * 0.5).to(torch.get_default_dtype())

    class Cached(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * table(x.shape[-1]))

    train(t, Net([Cached(), Cached()]))


@attack("recomputation", "a position table in an lru_cache by length, made anew for each new length")
def lru_cache_by_length(t: Trial) -> None:
    @functools.cache
    def table(length: int) -> torch.Tensor:
        return torch.cos(torch.arange(length).view(-1, 1) * 0.1).to(torch.get_default_dtype())

    class Cached(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * table(x.shape[1]))

    train(t, Net([Cached(), Cached()]), num_steps=5, batch=lambda step: tokens(step, length=[4, 4, 6, 4, 8][step]))


@attack("recomputation", "an lru_cache on a method of the block, and a cached_property, of tables")
def lru_cache_on_method(t: Trial) -> None:
    class Cached(Block):
        @functools.lru_cache(maxsize=8)  # noqa: B019 - what the attack is about
        def table(self, width: int) -> torch.Tensor:
            return torch.sin(torch.arange(width) * 0.5).to(torch.get_default_dtype())

        @functools.cached_property
        def other(self) -> torch.Tensor:
            return torch.cos(torch.arange(WIDTH) * 0.5).to(torch.get_default_dtype())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * self.table(x.shape[-1]) + self.other)

    train(t, Net([Cached(), Cached()]))
