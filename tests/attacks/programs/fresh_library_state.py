"""Blocks whose state lives in objects of Python's library and of configurations: caches, iterators, contexts, threads, clocks, registries."""

import collections
import contextvars
import dataclasses
import functools
import itertools
import random
import threading
import types
import weakref
from typing import Any

import numpy as np
import torch
from tests.attacks.models import WIDTH, Block, Net, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn

REGISTRY: dict[str, Any] = {}


@dataclasses.dataclass
class Config:
    """Shared by all blocks."""

    scale: float = 1.0
    seen: int = 0


@attack("recomputation", "a mutable dataclass of settings shared by the blocks, in which they count")
def shared_config_counts(t: Trial) -> None:
    config = Config()

    class Configured(Block):
        def __init__(self) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.config.seen += 1
            return x + self.inner(x) * (1.0 + 0.1 * self.config.seen)

    train(t, Net([Configured(), Configured()]))
    t.note("seen", config.seen)


@attack("recomputation", "a shared dataclass of settings that the loop changes between forward and backward pass")
def shared_config_changed(t: Trial) -> None:
    config = Config()

    class Configured(Block):
        def __init__(self) -> None:
            super().__init__()
            self.config = config

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * self.config.scale

    model = Net([Configured(), Configured()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        config.scale *= 0.5
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a nested namespace of settings (self.cfg.schedule.now) that a block advances")
def nested_namespace(t: Trial) -> None:
    cfg = types.SimpleNamespace(schedule=types.SimpleNamespace(now=1.0))

    class Configured(Block):
        def __init__(self) -> None:
            super().__init__()
            self.cfg = cfg

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.cfg.schedule.now *= 0.9
            return x + self.inner(x) * self.cfg.schedule.now

    train(t, Net([Configured(), Configured()]))


@attack("recomputation", "a property whose getter counts its reads and anneals")
def property_with_effect(t: Trial) -> None:
    class Annealed(Block):
        def __init__(self) -> None:
            super().__init__()
            self._reads = 0

        @property
        def temperature(self) -> float:
            self._reads += 1
            return 1.0 / self._reads

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * self.temperature

    train(t, Net([Annealed(), Annealed()]))


@attack("recomputation", "a __getattr__ that makes and keeps what it lacks, drawn at random")
def getattr_cache(t: Trial) -> None:
    class Lazy(Block):
        def __getattr__(self, name: str) -> Any:
            if name == "offset":
                value = torch.randn(WIDTH)
                self.__dict__["offset"] = value
                return value
            return super().__getattr__(name)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x + self.offset)

    train(t, Net([Lazy(), Lazy()]))


@attack("recomputation", "a position table that grows with the longest length seen, and is normalised by it")
def growing_position_table(t: Trial) -> None:
    class Positions(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.zeros(0, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] > self.table.shape[0]:
                at = torch.arange(x.shape[1]).view(-1, 1) / x.shape[1]
                self.table = at.expand(-1, WIDTH).to(x)
            return x + self.inner(x + self.table[: x.shape[1]])

    train(
        t, Net([Positions(), Positions()]), num_steps=5, batch=lambda step: tokens(step, length=[4, 6, 8, 6, 4][step])
    )


@attack("recomputation", "a context variable that the loop sets around the forward only")
def context_variable(t: Trial) -> None:
    strength: contextvars.ContextVar[float] = contextvars.ContextVar("strength", default=1.0)

    class Reading(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * strength.get()

    model = Net([Reading(), Reading()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    t.apply(model, optimizer)
    for step in range(4):
        token = strength.set(1.0 + 0.3 * step)
        loss = model(*tokens(step))
        strength.reset(token)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a threading.local that blocks count in")
def thread_local(t: Trial) -> None:
    local = threading.local()
    local.calls = 0

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            local.calls += 1
            return x + self.inner(x) / local.calls

    train(t, Net([Counting(), Counting()]))


@attack("recomputation", "a thread-local switch held on for the forward alone (a context manager of the library's)")
def thread_local_switch(t: Trial) -> None:
    local = threading.local()

    class Reading(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * (2.0 if getattr(local, "on", False) else 1.0)

    model = Net([Reading(), Reading()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    t.apply(model, optimizer)
    for step in range(4):
        local.on = True
        loss = model(*tokens(step))
        local.on = False
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a dict at module level, filled by the forward under a name, and averaged over")
def registry_filled(t: Trial) -> None:
    REGISTRY.clear()

    class Registering(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            norms = REGISTRY.setdefault("norms", [])
            norms.append(float(x.detach().norm()))
            return x + self.inner(x) * (sum(norms) / len(norms) / 10)

    train(t, Net([Registering(), Registering()]))


@attack("recomputation", "state in a dict held by a function of another module (a registry two calls away)")
def registry_two_calls_away(t: Trial) -> None:
    REGISTRY.clear()

    def outer(x: torch.Tensor) -> torch.Tensor:
        return _stored(x)

    class Registering(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(outer(x))

    train(t, Net([Registering(), Registering()]))


def _stored(x: torch.Tensor) -> torch.Tensor:
    REGISTRY["calls"] = REGISTRY.get("calls", 0) + 1
    return x * REGISTRY["calls"]


@attack("recomputation", "a WeakKeyDictionary keyed by module keeps a running value")
def weak_cache(t: Trial) -> None:
    cache: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()

    class Cached(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cache[self] = 0.5 * cache.get(self, 1.0) + 0.5 * float(x.detach().abs().mean())
            return x + self.inner(x) * cache[self]

    train(t, Net([Cached(), Cached()]))


@attack("recomputation", "an itertools.cycle of the block gives its scale")
def cycled(t: Trial) -> None:
    class Cycling(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales = itertools.cycle([0.5, 1.0, 2.0])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * next(self.scales)

    train(t, Net([Cycling(), Cycling()]))


@attack("recomputation", "an itertools.count shared through the class numbers the calls")
def counted(t: Trial) -> None:
    class Numbered(Block):
        numbers = itertools.count(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) / next(self.numbers)

    train(t, Net([Numbered(), Numbered()]))


@attack("recomputation", "a full deque(maxlen) of running means")
def deque_of_means(t: Trial) -> None:
    class Windowed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.window = collections.deque([1.0, 1.0], maxlen=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.window.append(float(x.detach().abs().mean()))
            return x + self.inner(x) * (sum(self.window) / len(self.window))

    train(t, Net([Windowed(), Windowed()]))


class Dice(random.Random):
    """A user's own source of chance."""

    def roll(self) -> float:
        """A number that is drawn."""
        return self.uniform(0.5, 1.5)


@attack("recomputation", "a subclass of random.Random, held by a helper object that is no module")
def own_random_subclass(t: Trial) -> None:
    helper = types.SimpleNamespace(dice=Dice(3))

    class Rolled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * helper.dice.roll()

    train(t, Net([Rolled(), Rolled()]))


@attack("recomputation", "a numpy RandomState on the class of the blocks")
def random_state_on_class(t: Trial) -> None:
    class Noisy(Block):
        chance = np.random.RandomState(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * float(self.chance.rand())

    train(t, Net([Noisy(), Noisy()]))


@attack("recomputation", "a schedule by a clock (a fake one, which goes on at each reading)")
def clocked(t: Trial) -> None:
    class Clock:
        now = 0.0

        def __call__(self) -> float:
            self.now += 1.0
            return self.now

    clock = Clock()

    class Timed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) / clock()

    train(t, Net([Timed(), Timed()]))


@attack("recomputation", "a schedule object with __slots__ that a partial hands to the block")
def slotted_schedule(t: Trial) -> None:
    class Schedule:
        __slots__ = ("value",)

        def __init__(self) -> None:
            self.value = 1.0

        def take(self, factor: float) -> float:
            self.value *= factor
            return self.value

    class Scheduled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.rate = functools.partial(Schedule().take, 0.9)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * self.rate()

    train(t, Net([Scheduled(), Scheduled()]))


@attack("recomputation", "a class attribute counted through type(self)")
def counted_on_class(t: Trial) -> None:
    class Counting(Block):
        total = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).total += 1
            return x + self.inner(x) / self.total

    train(t, Net([Counting(), Counting()]))


@attack("recomputation", "a counter kept in a function's default argument")
def counted_in_default(t: Trial) -> None:
    class Counting(Block):
        def forward(self, x: torch.Tensor, memory: list[int] = []) -> torch.Tensor:  # noqa: B006 - what the attack is about
            memory.append(1)
            return x + self.inner(x) / len(memory)

    train(t, Net([Counting(), Counting()]))


@attack("recomputation", "a counter kept as an attribute of a function")
def counted_on_function(t: Trial) -> None:
    def scale() -> float:
        scale.calls += 1  # type: ignore[attr-defined]
        return 1.0 / scale.calls  # type: ignore[attr-defined]

    scale.calls = 0  # type: ignore[attr-defined]

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * scale()

    train(t, Net([Counting(), Counting()]))


@attack("recomputation", "a back reference to the model (in a list) whose step counter the block reads and writes")
def back_reference(t: Trial) -> None:
    class Child(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            parent = self.parent[0]
            parent.calls += 1
            return x + self.inner(x) / parent.calls

    model = Net([Child(), Child()])
    model.calls = 0
    for block in model.blocks:
        block.parent = [model]
    train(t, model)


@attack("recomputation", "numpy arrays of the block are written in place (statistics off the graph)")
def numpy_statistics(t: Trial) -> None:
    class Tracking(Block):
        def __init__(self) -> None:
            super().__init__()
            self.stats = np.zeros(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.stats *= 0.9
            self.stats += 0.1 * x.detach().double().mean((0, 1)).numpy()
            return x + self.inner(x - torch.from_numpy(self.stats).to(x))

    train(t, Net([Tracking(), Tracking()]))


@attack("recomputation", "os.environ as a switch that the loop turns between forward and backward pass")
def environment_switch(t: Trial) -> None:
    import os

    class Switched(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * float(os.environ.get("ATTACK_SCALE", "1"))

    model = Net([Switched(), Switched()])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        os.environ["ATTACK_SCALE"] = "3"
        optimizer.zero_grad()
        try:
            loss.backward()
        finally:
            del os.environ["ATTACK_SCALE"]
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a bound generator-iterator (islice) that runs out and is made anew")
def exhausted_iterator(t: Trial) -> None:
    class Iterating(Block):
        def __init__(self) -> None:
            super().__init__()
            self.factors = iter(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            factor = next(self.factors, None)
            if factor is None:
                self.factors = iter([0.5, 1.0, 1.5])
                factor = next(self.factors)
            return x + self.inner(x) * factor

    train(t, Net([Iterating(), Iterating()]))


@attack("recomputation", "torch.get_rng_state of the moment decides the sign of a term")
def reads_random_state(t: Trial) -> None:
    class Reading(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch.rand(1)
            odd = int(torch.get_rng_state()[:64].sum()) % 2
            return x + self.inner(x) * (1.0 if odd else -1.0)

    train(t, Net([Reading(), Reading()]))


@attack(
    "recomputation", "initial_seed and manual_seed inside the forward make a mask that changes with a buffer of counts"
)
def seeded_by_buffer(t: Trial) -> None:
    class Seeded(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros((), dtype=torch.long))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(self.count))
                mask = torch.rand(WIDTH) > 0.3
            self.count += 1
            return x + self.inner(x) * mask

    train(t, Net([Seeded(), Seeded()]))


@attack("recomputation", "a weak proxy of the model in a list, through which the block counts")
def proxy_of_model(t: Trial) -> None:
    class Child(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.parent[0].calls += 1
            return x + self.inner(x / self.parent[0].calls)

    model = Net([Child(), Child()])
    model.calls = 0
    for block in model.blocks:
        block.parent = [weakref.proxy(model)]
    train(t, model)


@attack("recomputation", "a weak reference to a helper object, whose counter the block writes")
def weak_reference_to_helper(t: Trial) -> None:
    helper = Config()

    class Child(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.helper().seen += 1
            return x + self.inner(x / self.helper().seen)

    model = Net([Child(), Child()])
    for block in model.blocks:
        block.helper = weakref.ref(helper)
    train(t, model)
    t.note("seen", helper.seen)


@attack("recomputation", "a context variable that the blocks themselves raise")
def context_variable_counted(t: Trial) -> None:
    calls: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            calls.set(calls.get() + 1)
            return x + self.inner(x / calls.get())

    context = contextvars.copy_context()
    context.run(train, t, Net([Counting(), Counting()]))
