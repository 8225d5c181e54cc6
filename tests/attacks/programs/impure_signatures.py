"""Blocks with unusual signatures: what they take, what they return, and how often they are called."""

import dataclasses
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


@attack("recomputation", "LazyLinear layers that take their shape in the first forward")
def lazy_modules(t: Trial) -> None:
    class Lazy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.wide = nn.LazyLinear(2 * WIDTH)

    model = Net([Lazy(), Lazy()])
    model(*tokens(0))
    train(t, model)


@attack("recomputation", "one block is shared and called twice (ALBERT)")
def shared_block(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for _ in range(2):
                for block in self.blocks:
                    x = block(x)
            return x

    train(t, Model(sequential=False))


@attack("recomputation", "the same block object stands twice in the list")
def block_listed_twice(t: Trial) -> None:
    block = Block()
    train(t, Net([block, block]))


@attack("recomputation", "a block that calls itself (a recursive net)")
def recursive_block(t: Trial) -> None:
    class Recursive(Block):
        def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
            x = x + self.inner(x)
            return self(x, depth - 1) if depth else x

    train(t, Net([Recursive(), Recursive()]))


class _Carrying(Net):
    """Blocks whose output is taken apart by `taken`."""

    def taken(self, output: Any) -> torch.Tensor:
        return output

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = self.taken(block(x))
        return x


@attack("recomputation", "blocks that return a tuple with None")
def returns_tuple(t: Trial) -> None:
    class Pair(Block):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
            return x + self.inner(x), None

    class Model(_Carrying):
        def taken(self, output: Any) -> torch.Tensor:
            return output[0]

    train(t, Model([Pair(), Pair()], sequential=False))


@attack("recomputation", "blocks that return a dict")
def returns_dict(t: Trial) -> None:
    class Named(Block):
        def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
            y = self.inner(x)
            return {"hidden": x + y, "inner": y}

    class Model(_Carrying):
        def taken(self, output: Any) -> torch.Tensor:
            return output["hidden"] - 0.1 * output["inner"]

    train(t, Model([Named(), Named()], sequential=False))


@dataclasses.dataclass
class _Output:
    hidden: torch.Tensor
    norm: torch.Tensor


@attack("recomputation", "blocks that return a dataclass")
def returns_dataclass(t: Trial) -> None:
    class Structured(Block):
        def forward(self, x: torch.Tensor) -> _Output:
            y = self.inner(x)
            return _Output(hidden=x + y, norm=y.norm())

    class Model(_Carrying):
        def taken(self, output: Any) -> torch.Tensor:
            return output.hidden / (1.0 + output.norm)

    train(t, Model([Structured(), Structured()], sequential=False))


@attack("recomputation", "blocks that return their input, a view of it, or None")
def returns_input_or_view(t: Trial) -> None:
    class Odd(Block):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind = kind

        def forward(self, x: torch.Tensor) -> torch.Tensor | None:
            if self.kind == "none":
                return None
            if self.kind == "view":
                return (x + self.inner(x)).transpose(0, 1).transpose(0, 1)
            return x

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                result = block(x)
                x = x if result is None else result
            return x

    train(t, Model([Odd("none"), Odd("view"), Odd("input")], sequential=False))


@attack("recomputation", "blocks that are called by keywords alone, with a flag and a mask")
def keywords_only(t: Trial) -> None:
    class Keyed(Block):
        def forward(
            self, *, hidden: torch.Tensor, mask: torch.Tensor | None = None, scale: float = 1.0
        ) -> torch.Tensor:
            inner = self.inner(hidden)
            return hidden + scale * (inner if mask is None else inner * mask)

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            mask = (x.detach().mean(-1, keepdim=True) > 0).to(x.dtype)
            for number, block in enumerate(self.blocks):
                x = block(hidden=x, mask=mask, scale=0.5 + number)
            return x

    train(t, Model([Keyed(), Keyed()], sequential=False))


@attack("recomputation", "blocks whose inputs do not require gradients (a frozen stem)")
def input_without_gradient(t: Trial) -> None:
    model = Net()
    model.stem.requires_grad_(False)
    train(t, model)
