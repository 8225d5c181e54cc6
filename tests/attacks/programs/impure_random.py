"""Blocks that draw random numbers, from every generator there is, and rates that change."""

import random

import numpy as np
import torch
from tests.attacks.models import WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack("recomputation", "Python's random decides whether the block is skipped (stochastic depth)")
def stochastic_depth_python(t: Trial) -> None:
    class Dropped(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and random.random() < 0.5:
                return x
            return x + self.inner(x)

    train(t, Net([Dropped(), Dropped()]), num_steps=6)


@attack("recomputation", "numpy's random scales the block's output")
def numpy_random(t: Trial) -> None:
    class Noisy(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * float(np.random.uniform(0.5, 1.5))

    train(t, Net([Noisy(), Noisy()]))


@attack("recomputation", "a numpy Generator of the block's own")
def numpy_generator(t: Trial) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.chance = np.random.default_rng(7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * float(self.chance.uniform(0.5, 1.5))

    train(t, Net([Noisy(), Noisy()]))


@attack("recomputation", "a random.Random of the block's own")
def own_python_random(t: Trial) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.chance = random.Random(7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * self.chance.random()

    train(t, Net([Noisy(), Noisy()]))


@attack("recomputation", "a torch.Generator of the block's own")
def own_generator(t: Trial) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.chance = torch.Generator(torch.get_default_device()).manual_seed(7)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = torch.rand(x.shape, generator=self.chance, dtype=x.dtype)
            return x + self.inner(x) * noise

    train(t, Net([Noisy(), Noisy()]))


@attack("recomputation", "a torch.Generator that all blocks share through a module-level name")
def shared_generator(t: Trial) -> None:
    CHANCE.manual_seed(5)
    train(t, Net([_SharedNoise(), _SharedNoise()]))
    t.note("generator", CHANCE)


CHANCE = torch.Generator(torch.get_default_device())


class _SharedNoise(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) * torch.rand(x.shape, generator=CHANCE, dtype=x.dtype)


@attack("recomputation", "torch's own dropout in the blocks")
def plain_dropout(t: Trial) -> None:
    train(t, Net([_Dropping(0.3), _Dropping(0.3)]))


class _Dropping(Block):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.drop = nn.Dropout(rate)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.inner(x))


@attack("recomputation", "a dropout rate that starts at 0 and is raised by the loop")
def dropout_that_starts_at_zero(t: Trial) -> None:
    model = Net([_Dropping(0.0), _Dropping(0.0)])

    def warm_up(step: int) -> None:
        for block in model.blocks:
            block.drop.p = 0.2 * max(0, step - 1)

    train(t, model, num_steps=5, before=warm_up)


@attack("recomputation", "a dropout rate that is changed between forward and backward pass")
def dropout_rate_before_backward(t: Trial) -> None:
    model = Net([_Dropping(0.5), _Dropping(0.5)])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        for block in model.blocks:
            block.drop.p = 0.5
        loss = model(*tokens(step))
        for block in model.blocks:
            block.drop.p = 0.1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "layerdrop: the model leaves out blocks by torch.rand in its own forward")
def layerdrop(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                if not self.training or torch.rand(()) > 0.4:
                    x = block(x)
            return x

    train(t, Model([Block(), Block(), Block()], sequential=False), num_steps=6)


@attack("recomputation", "the block seeds torch itself before it draws")
def seeds_inside(t: Trial) -> None:
    class Seeding(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.manual_seed(3)
            return x + functional.dropout(self.inner(x), 0.5)

    train(t, Net([Seeding(), Seeding()]))


@attack("recomputation", "noise drawn under fork_rng inside the block")
def fork_rng_inside(t: Trial) -> None:
    class Forking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                noise = torch.rand_like(x)
            return x + self.inner(x) * noise

    train(t, Net([Forking(), Forking()]))


@attack("recomputation", "the loop seeds torch between forward and backward pass")
def seeded_before_backward(t: Trial) -> None:
    model = Net([_Dropping(0.3), _Dropping(0.3)])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        torch.manual_seed(1000 + step)
        random.seed(step)
        optimizer.zero_grad()
        loss.backward()
        t.note("drawn", torch.rand(2))
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a noise buffer refilled with normal_() on every call")
def noise_buffer_refilled(t: Trial) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("noise", torch.zeros(WIDTH), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.noise.normal_()
            return x + self.inner(x) + 0.1 * self.noise

    train(t, Net([Noisy(), Noisy()]))


@attack("recomputation", "augmentation by Python's random inside the forward, seldom (one call in eight)")
def seldom_random(t: Trial) -> None:
    class Seldom(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = random.random() if x[0, 0, 0] > 0.6 else 1.0
            return x + self.inner(x) * scale

    train(t, Net([Seldom(), Seldom()]), num_steps=6)


@attack("recomputation", "random.shuffle of the blocks' branches")
def shuffled_branches(t: Trial) -> None:
    class Branches(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            order = [self.norm, self.wide, torch.tanh, self.narrow]
            first, second = random.sample([torch.sin, torch.tanh], 2)
            del order
            return x + first(self.inner(second(x)))

    train(t, Net([Branches(), Branches()]))


@attack("recomputation", "gumbel_softmax routing in the block")
def gumbel_routing(t: Trial) -> None:
    class Routed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(WIDTH, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gate = functional.gumbel_softmax(self.router(x), hard=True)
            return x + gate[..., :1] * self.inner(x)

    train(t, Net([Routed(), Routed()]))
