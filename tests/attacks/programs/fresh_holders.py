"""State in holders that ordinary search by attributes does not reach, and blocks whose second run meets another world."""

import collections
import decimal
import fractions
import gc
import heapq
import inspect
import math
import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any

import numpy as np
import torch
from tests.attacks.models import BATCH, TOKENS, WIDTH, Block, Net, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _seldom(calls: int) -> float:
    return 0.25 if calls % 7 == 6 else 1.0


class Kept:
    """A descriptor that keeps its value beside the object, by identity."""

    def __init__(self) -> None:
        self.of: dict[int, int] = {}

    def __get__(self, owner: Any, kind: type | None = None) -> Any:
        return self if owner is None else self.of.get(id(owner), 0)

    def __set__(self, owner: Any, value: int) -> None:
        self.of[id(owner)] = value


@attack("recomputation", "a counter in a descriptor on a helper's class")
def holder_descriptor(t: Trial) -> None:
    class Helper:
        calls = Kept()

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.helper = Helper()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.helper.calls += 1
            return x + self.inner(x * _seldom(self.helper.calls))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a counter on the metaclass of the block's class")
def holder_metaclass(t: Trial) -> None:
    class Meta(type):
        calls = 0

    class Counting(Block, metaclass=Meta):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Meta.calls += 1
            return x + self.inner(x * _seldom(Meta.calls))

    train(t, Net([Counting(), Counting()]), num_steps=9)


class Registry(MutableMapping[str, Any]):
    """A mapping whose storage is in a slot."""

    __slots__ = ("_inner",)

    def __init__(self) -> None:
        self._inner: list[tuple[str, Any]] = []

    def __getitem__(self, key: str) -> Any:
        for name, value in self._inner:
            if name == key:
                return value
        raise KeyError(key)

    def __setitem__(self, key: str, value: Any) -> None:
        self._inner = [(n, v) for n, v in self._inner if n != key] + [(key, value)]

    def __delitem__(self, key: str) -> None:
        self._inner = [(n, v) for n, v in self._inner if n != key]

    def __iter__(self) -> Iterator[str]:
        return iter([n for n, _ in self._inner])

    def __len__(self) -> int:
        return len(self._inner)


@attack("recomputation", "a running mean in a mapping of the user's own")
def holder_own_mapping(t: Trial) -> None:
    registry = Registry()

    class Scaling(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            registry["mean"] = 0.9 * registry.get("mean", 0.0) + 0.1 * float(x.detach().abs().mean())
            return x + self.inner(x * (1.0 + registry["mean"]))

    train(t, Net([Scaling(), Scaling()]), num_steps=5)


@attack("recomputation", "a memoryview over bytes counts the calls")
def holder_memoryview(t: Trial) -> None:
    view = memoryview(bytearray(4))

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            view[1] = (view[1] + 1) % 250
            return x + self.inner(x * _seldom(view[1]))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a heap of the last losses of the block's output")
def holder_heap(t: Trial) -> None:
    heap: list[float] = [0.5]

    class Heaped(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x + self.inner(x * (1 + heap[0]))
            heapq.heappushpop(heap, float(out.detach().std()))
            return out

    train(t, Net([Heaped(), Heaped()]), num_steps=5)


@attack("recomputation", "a Decimal that grows with each call, and a Fraction")
def holder_decimal(t: Trial) -> None:
    class Exact(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.part = decimal.Decimal("1.0"), fractions.Fraction(1, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale *= decimal.Decimal("1.01")
            self.part += fractions.Fraction(1, 7)
            return x + self.inner(x * float(self.scale) * math.sin(float(self.part)))

    train(t, Net([Exact(), Exact()]), num_steps=5)


@attack("recomputation", "the context of decimal counts: its precision is changed by the block")
def holder_decimal_context(t: Trial) -> None:
    class Precise(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            context = decimal.getcontext()
            context.prec = context.prec % 9 + 1
            return x + self.inner(x * float(decimal.Decimal(1) / decimal.Decimal(3)))

    with decimal.localcontext():
        train(t, Net([Precise(), Precise()]), num_steps=5)


@attack("recomputation", "the block writes to a variable of the loop that called it")
def holder_frame(t: Trial) -> None:
    record = {"calls": 0}

    class Peeking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            frame = inspect.currentframe()
            while frame is not None and "record_of_the_loop" not in frame.f_locals:
                frame = frame.f_back
            calls = 0
            if frame is not None:
                frame.f_locals["record_of_the_loop"]["calls"] += 1
                calls = frame.f_locals["record_of_the_loop"]["calls"]
            return x + self.inner(x * _seldom(calls))

    def loop(record_of_the_loop: dict[str, int]) -> None:
        train(t, Net([Peeking(), Peeking()]), num_steps=9)

    loop(record)
    t.note("calls", record["calls"])


@attack("recomputation", "a finalizer of an object that the block makes and drops counts")
def holder_finalizer(t: Trial) -> None:
    class Dropped:
        pass

    counts = collections.Counter[str]()

    def dropped() -> None:
        counts["dropped"] += 1

    class Dropping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            made = Dropped()
            weakref.finalize(made, dropped)
            del made
            return x + self.inner(x * _seldom(counts["dropped"]))

    train(t, Net([Dropping(), Dropping()]), num_steps=9)


@attack("recomputation", "__del__ of an object that the block makes and drops counts on its class")
def holder_del(t: Trial) -> None:
    class Dropped:
        calls = 0

        def __del__(self) -> None:
            type(self).calls += 1

    class Dropping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Dropped()
            return x + self.inner(x * _seldom(Dropped.calls))

    train(t, Net([Dropping(), Dropping()]), num_steps=9)


@attack("recomputation", "numbers of garbage collections decide")
def holder_collections(t: Trial) -> None:
    class Collecting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.first = gc.get_stats()[2]["collections"]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            gc.collect(2)
            return x + self.inner(x * _seldom(gc.get_stats()[2]["collections"] - self.first))

    del Collecting  # What others collect meanwhile counts too: the plain run is not the same twice.

    class Enabled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (gc.disable if gc.isenabled() else gc.enable)()
            return x + self.inner(x * (1.0 if gc.isenabled() else 0.5))

    gc.enable()
    train(t, Net([Enabled(), Enabled(), Enabled()]), num_steps=5)
    gc.enable()


@attack("recomputation", "an int that is a subclass with a counter in its attribute")
def holder_int_subclass(t: Trial) -> None:
    class Number(int):
        calls = 0

    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.number = Number(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.number.calls += 1
            return x + self.inner(x * _seldom(self.number.calls))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "a counter on a bound method's function, on a property's function and on a staticmethod's")
def holder_functions_of_class(t: Trial) -> None:
    class Counting(Block):
        @property
        def scale(self) -> float:
            getter = type(self).scale.fget
            getter.calls = getattr(getter, "calls", 0) + 1  # type: ignore[union-attr]
            return _seldom(getter.calls)  # type: ignore[union-attr]

        @staticmethod
        def second() -> float:
            Counting.second.calls = getattr(Counting.second, "calls", 0) + 1  # type: ignore[attr-defined]
            return _seldom(Counting.second.calls + 3)  # type: ignore[attr-defined]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * self.scale * self.second())

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "an exhausted generator is made anew after seven calls")
def holder_restarted_generator(t: Trial) -> None:
    def scales() -> Iterator[float]:
        yield from [1.0] * 5
        yield 0.25

    class Restarting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales: Iterator[float] = scales()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = next(self.scales, None)
            if scale is None:
                self.scales = scales()
                scale = next(self.scales)
            return x + self.inner(x * scale)

    train(t, Net([Restarting(), Restarting()]), num_steps=9)


@attack("recomputation", "a structured numpy array of the module's file counts by a view")
def holder_numpy_view(t: Trial) -> None:
    table = np.zeros(4, dtype=[("calls", "i4"), ("scale", "f4")])
    view = table["calls"][1:3]

    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            view[0] += 1
            return x + self.inner(x * _seldom(int(view[0])))

    train(t, Net([Counting(), Counting()]), num_steps=9)


@attack("recomputation", "the block grows a tensor of its own by resize_ and set_")
def holder_resized(t: Trial) -> None:
    class Growing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen = torch.zeros(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            size = len(self.seen)
            self.seen.set_(torch.cat([self.seen, x.detach().mean().reshape(1)]))
            return x + self.inner(x * (1 + self.seen[size] / size))

    train(t, Net([Growing(), Growing()]), num_steps=5)


@attack("recomputation", "an output and a cache share memory: the next call writes over the cache")
def holder_shared_output(t: Trial) -> None:
    class Caching(Block):
        def __init__(self) -> None:
            super().__init__()
            self.room = torch.zeros(BATCH, TOKENS, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.room.mul_(0.5).add_(x)
            return x + self.inner(x) * self.room.clone().sigmoid()

    train(t, Net([Caching(), Caching()]), num_steps=5)


@attack("recomputation", "one room in memory is shared by both blocks and written by each")
def holder_shared_room(t: Trial) -> None:
    room = torch.zeros(BATCH, TOKENS, WIDTH)

    class Sharing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            room.copy_(x.detach()).sigmoid_()
            return x + self.inner(x) * (room + 0.0)

    train(t, Net([Sharing(), Sharing()]), num_steps=5)


@attack("recomputation", "blocks find each other by a list on the class: the second reads what the first left")
def holder_list_of_instances(t: Trial) -> None:
    class Linked(Block):
        instances: list["Linked"] = []  # noqa: RUF012

        def __init__(self) -> None:
            super().__init__()
            self.last = 0.0
            self.instances.append(self)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            total = sum(each.last for each in self.instances)
            self.last = float(x.detach().mean())
            return x + self.inner(x * (1 + total))

    train(t, Net([Linked(), Linked()]), num_steps=5)


@attack("recomputation", "the block is called by its forward, past its hooks, every second step")
def called_by_forward(t: Trial) -> None:
    class Direct(Net):
        calls = 0

        def features(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            x = self.stem(x)
            for block in self.blocks:
                x = block.forward(x) if self.calls % 2 else block(x)
            return x

    train(t, Direct([Block(), Block()], sequential=False), num_steps=5)


@attack("second order", "a directional derivative by forward-mode through the model beside the step")
def forward_mode_beside(t: Trial) -> None:
    import torch.autograd.forward_ad as forward_ad

    model = Net([Block(), Block()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            slope = forward_ad.unpack_dual(model(dual).sum()).tangent
        t.note("slope", round(float(slope), 9))
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss.detach())
        t.end_step()


@attack("recomputation", "the model recomputes by torch's own checkpoint, and the blocks' counters go on")
def checkpoint_of_torch_inside(t: Trial) -> None:
    from torch.utils.checkpoint import checkpoint

    class Inner(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(self.inner, functional.dropout(x, 0.2), use_reentrant=False)

    train(t, Net([Inner(), Inner()]), num_steps=5)


@attack("recomputation", "torch's reentrant checkpoint inside of the block")
def reentrant_checkpoint_inside(t: Trial) -> None:
    from torch.utils.checkpoint import checkpoint

    class Inner(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(self.inner, functional.dropout(x, 0.2), use_reentrant=True)

    train(t, Net([Inner(), Inner()]), num_steps=5)


@attack("gradients", "weights in shared memory, gradients summed by hand into a second model that the optimizer steps")
def hogwild_gradients(t: Trial) -> None:
    model, shared = Net([Block(), Block()]), Net([Block(), Block()])
    shared.load_state_dict(model.state_dict())
    shared.share_memory()
    optimizer = torch.optim.Adam(shared.parameters(), lr=1e-2)
    t.apply(model)
    t.track(shared)
    for step in range(4):
        model.load_state_dict(shared.state_dict())
        x, y = tokens(step)
        model.zero_grad()
        loss = model(x, y)
        loss.backward()
        for mine, theirs in zip(model.parameters(), shared.parameters(), strict=True):
            theirs._grad = mine.grad
        optimizer.step()
        t.note("loss", loss.detach())
        t.end_step()


@attack("gradients", "each parameter is a view of one flat tensor that the optimizer holds")
def flat_views(t: Trial) -> None:
    model = Net([Block(), Block()])
    names = [name for name, _ in model.named_parameters()]
    flat = nn.Parameter(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    begin = 0
    for name in names:
        parent = model.get_submodule(name.rpartition(".")[0])
        old = getattr(parent, name.rpartition(".")[2])
        old.data = flat.detach()[begin : begin + old.numel()].view_as(old)
        begin += old.numel()
    flat.grad = torch.zeros_like(flat)
    optimizer = torch.optim.SGD([flat], lr=0.05, momentum=0.9)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        loss = model(x, y)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        flat.grad.copy_(torch.cat([g.reshape(-1) for g in gradients]))
        optimizer.step()
        t.note("loss", loss.detach())
        t.end_step()


@attack("recomputation", "a lazily opened room: the first call of each mode makes a table by the batch's statistics")
def table_by_mode(t: Trial) -> None:
    class Tabled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.tables: dict[tuple[bool, int], torch.Tensor] = {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            key = (self.training, x.shape[0])
            if key not in self.tables:
                self.tables[key] = x.detach().mean((0, 1))
            return x + self.inner(x - self.tables[key])

    model = Net([Tabled(), Tabled()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        x, y = (x, y) if step < 3 else (x[:2], y[:2])
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            t.note("validation", model(x, y))
        model.train()
        t.note("loss", loss.detach())
        t.end_step()


@attack("recomputation", "the block's output is a view of a buffer that the loop writes between forward and backward")
def buffer_scaled_between(t: Trial) -> None:
    class Holding(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x * self.scale.clone())

    model = Net([Holding(), Holding()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        loss = model(x, y)
        for block in model.blocks:
            block.scale.mul_(0.9)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss.detach())
        t.end_step()


@attack("recomputation", "dropout's rate follows a schedule that the loop sets between forward and backward")
def dropout_rate_set_between(t: Trial) -> None:
    class Dropping(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.inner(x))

    model = Net([Dropping(), Dropping()])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        loss = model(x, y)
        for block in model.blocks:
            block.drop.p = 0.1 * (step + 2)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss.detach())
        t.end_step()


@attack("recomputation", "a hyper-network's weights are put on the block by setattr, and taken off after the forward")
def weights_put_on(t: Trial) -> None:
    class Soft(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * self.__dict__.get("gain", 1.0)

    class Hyper(Net):
        def __init__(self) -> None:
            super().__init__([Soft(), Soft()], sequential=False)
            self.maker = nn.Linear(WIDTH, WIDTH)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            gain = self.maker(x.mean((0, 1))).sigmoid()
            x = self.stem(x)
            for block in self.blocks:
                block.__dict__["gain"] = gain
                x = block(x)
                del block.__dict__["gain"]
            return x

    train(t, Hyper(), num_steps=4)
