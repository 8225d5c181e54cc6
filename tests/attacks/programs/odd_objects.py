"""Objects around a model that are seldom seen in tests and often in repositories: mocks, configurations with rules of their own, stacks of contexts."""

import argparse
import collections.abc
import contextlib
import copy
import dataclasses
import enum
import functools
import threading
import types
import typing
from unittest import mock

import torch
from tests.attacks.models import WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Tracked(Block):
    def __init__(self, run: object) -> None:
        super().__init__()
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        x = super().forward(x)
        self.run.log({"norm": float(x.detach().norm())})
        return x


@attack("recomputation", "a MagicMock stands for the run that blocks log to, and keeps its calls")
def mocked_run(t: Trial) -> None:
    run = mock.MagicMock()
    train(t, Net(_Tracked(run) for _ in range(2)), after=lambda _: t.note("calls", run.log.call_count))


@attack("recomputation", "a Mock with side effects gives the scale of each call")
def mocked_scale(t: Trial) -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scale = mock.Mock(side_effect=[1.0 + 0.1 * i for i in range(40)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale()

    train(t, Net(Scaled() for _ in range(2)))


class _Proud:
    """No two of these can be compared, hashed, printed or copied."""

    def __init__(self) -> None:
        self.calls = 0
        self.lock = threading.RLock()

    def __eq__(self, other: object) -> bool:
        raise TypeError("not comparable")

    __hash__ = None

    def __bool__(self) -> bool:
        raise ValueError("the truth of this is ambiguous")

    def __len__(self) -> int:
        raise ValueError("no length")

    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    def __deepcopy__(self, memo: object) -> "_Proud":
        raise RuntimeError("no copy")

    def __reduce_ex__(self, protocol: object) -> str:
        raise RuntimeError("no pickle")

    def next(self) -> float:
        with self.lock:
            self.calls += 1
            return 1.0 + 0.05 * self.calls


@attack(
    "recomputation",
    "a helper that cannot be compared, hashed, printed, copied or pickled counts the calls by which blocks scale",
)
def proud_helper(t: Trial) -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.helper = _Proud()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.helper.next()

    model = Net(Scaled() for _ in range(2))
    train(t, model, after=lambda _: t.note("calls", [b.helper.calls for b in model.blocks]))


class _Record(collections.abc.MutableMapping):
    """A configuration whose nodes are made when they are first read, and know their parents (as in OmegaConf)."""

    def __init__(self, parent: "_Record | None" = None, **values: object) -> None:
        self.__dict__["_values"], self.__dict__["_parent"] = values, parent

    def __getitem__(self, key: str) -> object:
        return self._values[key]

    def __setitem__(self, key: str, value: object) -> None:
        self._values[key] = value

    def __delitem__(self, key: str) -> None:
        del self._values[key]

    def __iter__(self) -> typing.Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._values.setdefault(name, _Record(self))

    def __setattr__(self, name: str, value: object) -> None:
        self._values[name] = value


@attack(
    "recomputation",
    "blocks count in a node of a configuration that is made at its first read and knows its parent (OmegaConf)",
)
def configuration_nodes(t: Trial) -> None:
    class Scaled(Block):
        def __init__(self, cfg: _Record) -> None:
            super().__init__()
            self.cfg = cfg

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = self.cfg.state
            state["calls"] = state.get("calls", 0) + 1
            return super().forward(x) * (1 + 0.1 * state["calls"])

    cfg = _Record(scale=1.0)
    train(t, Net(Scaled(cfg) for _ in range(2)), after=lambda _: t.note("calls", cfg.state["calls"]))


@attack("recomputation", "an argparse.Namespace held by all modules is advanced by the loop and by a block")
def namespace_of_arguments(t: Trial) -> None:
    args = argparse.Namespace(epoch=0, seen=0, drop=0.0)

    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.args = args

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            vars(self.args)["seen"] += 1
            return super().forward(functional.dropout(x, self.args.drop)) + 0.1 * self.args.seen

    def advance(step: int) -> None:
        args.epoch, args.drop = step, 0.1 * (step % 3)

    train(t, Net(Scaled() for _ in range(2)), before=advance, after=lambda _: t.note("args", vars(args)))


class _Mode(enum.Flag):
    PLAIN = 0
    SHIFT = enum.auto()
    SCALE = enum.auto()


@attack("recomputation", "a flag enum of the block is toggled by each of its calls")
def toggled_flags(t: Trial) -> None:
    class Toggled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mode = _Mode.SHIFT

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mode ^= _Mode.SHIFT | _Mode.SCALE
            x = super().forward(x)
            return x * 1.5 if _Mode.SCALE in self.mode else x + 0.5

    model = Net(Toggled() for _ in range(2))
    train(t, model, after=lambda _: t.note("modes", [b.mode.value for b in model.blocks]))


@attack("recomputation", "forwards are partialmethods of one method, with settings and a state given by reference")
def partial_methods(t: Trial) -> None:
    class Various(Block):
        def _run(self, x: torch.Tensor, *, gain: float, seen: list[int]) -> torch.Tensor:
            seen.append(len(seen))
            return x + gain * self.inner(x) / (1 + 0.1 * len(seen))

        forward = functools.partialmethod(_run, gain=0.7, seen=[])

    train(t, Net(Various() for _ in range(2)))


@attack("recomputation", "a singledispatchmethod chooses by the kind of input, and a dict of counts by kind is kept")
def dispatched_method(t: Trial) -> None:
    class Dispatched(Block):
        def __init__(self) -> None:
            super().__init__()
            self.kinds = {"tensor": 0, "list": 0}

        @functools.singledispatchmethod
        def forward(self, x: object) -> torch.Tensor:
            raise NotImplementedError

        @forward.register
        def _(self, x: torch.Tensor) -> torch.Tensor:
            self.kinds["tensor"] += 1
            return x + self.inner(x) * (1 + 0.1 * self.kinds["tensor"])

        @forward.register
        def _(self, x: list) -> torch.Tensor:
            self.kinds["list"] += 1
            return torch.cat([self.forward(each) for each in x])

    class Mixed(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.blocks[0](self.stem(x))
            return self.blocks[1](list(x.split(2)))

    train(t, Mixed([Dispatched(), Dispatched()]))


@attack("recomputation", "a stack of contexts (ExitStack) is opened by the first block and closed by the last")
def stack_of_contexts(t: Trial) -> None:
    class Stacked(Block):
        def __init__(self, place: int, shared: dict) -> None:
            super().__init__()
            self.place, self.shared = place, shared

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.place == 0:
                self.shared["depth"] = 0
                stack = self.shared["stack"] = contextlib.ExitStack()
                self.shared["opened"] = self.shared.get("opened", 0) + 1
                stack.callback(self.shared.__setitem__, "depth", -1)
            x = super().forward(x) * (1 + 0.1 * self.shared["depth"])
            self.shared["depth"] += 1
            if self.place == 2:
                self.shared.pop("stack").close()
            return x

    shared: dict = {}
    train(t, Net(Stacked(i, shared) for i in range(3)), after=lambda _: t.note("shared", dict(shared)))


@dataclasses.dataclass(eq=False)
class _Described(nn.Module):
    """A module that is a dataclass, with layers made in __post_init__."""

    width: int = WIDTH
    calls: int = 0
    history: list = dataclasses.field(default_factory=list, repr=False)

    def __post_init__(self) -> None:
        nn.Module.__init__(self)
        self.fc = nn.Linear(self.width, self.width)
        self.calls, self.history = 0, []

    def __new__(cls, *args: object, **kwargs: object) -> "_Described":
        made = super().__new__(cls)
        nn.Module.__init__(made)
        return made

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        self.calls += 1
        self.history = [*self.history[-2:], float(x.detach().mean())]
        return x + torch.tanh(self.fc(x)) * (1 + sum(self.history))


@attack("recomputation", "blocks are dataclasses with counters and a short history as fields")
def modules_as_dataclasses(t: Trial) -> None:
    model = Net([_Described(), _Described()])
    train(t, model, after=lambda _: t.note("history", [b.history for b in model.blocks]))


class _Watched(Block):
    """Each attribute that is set is counted, by class and by name."""

    num_set: typing.ClassVar[dict[str, int]] = {}

    def __setattr__(self, name: str, value: object) -> None:
        self.num_set[name] = self.num_set.get(name, 0) + 1
        super().__setattr__(name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        self.last = float(x.detach().sum())
        return super().forward(x) * (1 + 0.01 * self.num_set["last"])


@attack("recomputation", "a module's __setattr__ counts what is set on its class, and the forward scales by the count")
def counted_setattr(t: Trial) -> None:
    _Watched.num_set.clear()
    train(t, Net([_Watched(), _Watched()]), after=lambda _: t.note("set", _Watched.num_set["last"]))


@attack(
    "recomputation", "the keyword-only arguments' default is a mutable dict, in which the forward keeps the last mean"
)
def mutable_default_keyword(t: Trial) -> None:
    class Remembering(Block):
        def forward(self, x: torch.Tensor, *, memory: dict = {}) -> torch.Tensor:  # noqa: B006
            x = super().forward(x) + memory.get("mean", 0.0)
            memory["mean"] = float(x.detach().mean())
            return x

    train(t, Net(Remembering() for _ in range(2)))


@attack("recomputation", "a read-only view over a dict in which another object counts scales the block")
def read_only_view(t: Trial) -> None:
    table = {"calls": 0}

    class Viewing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.view = types.MappingProxyType(table)
            self.count = functools.partial(table.update)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count(calls=self.view["calls"] + 1)
            return super().forward(x) * (1 + 0.1 * self.view["calls"])

    train(t, Net(Viewing() for _ in range(2)), after=lambda _: t.note("calls", table["calls"]))


@attack(
    "recomputation",
    "training mode is a property that counts, of a class that keeps its norms in evaluation (frozen statistics)",
)
def train_is_overridden(t: Trial) -> None:
    class Frozen(Block):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(WIDTH)
            self.num_modes = 0

        def train(self, mode: bool = True) -> "Frozen":
            super().train(mode)
            self.num_modes += 1
            if self.num_modes > 3:
                self.bn.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.bn(x.flatten(0, 1)).view_as(x))

    model = Net([Frozen(), Frozen()])

    def evaluate(_: int) -> None:
        model.eval()
        with torch.no_grad():
            t.note("evaluation", model(*tokens(9)))
        model.train()

    train(t, model, after=evaluate)


@attack(
    "changes", "a subclass is made for each instance, with a method patched in (dynamic classes of an adapter library)"
)
def class_made_for_instance(t: Trial) -> None:
    model = Net()
    gains = iter([0.9, 1.1, 1.3, 0.7])
    for block in model.blocks:
        kind = type(block)

        def inner(self: Block, x: torch.Tensor, kind: type = kind) -> torch.Tensor:
            return kind.inner(self, x) * self.gain

        block.__class__ = type(f"Adapted{kind.__name__}", (kind,), {"inner": inner, "gain": 1.0})

    def gain(_: int) -> None:
        type(model.blocks[0]).gain = next(gains)

    train(t, model, before=gain)


@attack(
    "recomputation",
    "a typed view of a tensor dict: blocks take and return a container that is no tuple, and pop from it",
)
def tensor_dict(t: Trial) -> None:
    class Bag(collections.UserDict):
        pass

    class Bagged(Block):
        def forward(self, bag: Bag) -> Bag:
            x = bag.pop("x")
            bag["x"] = super().forward(x) + bag.get("skip", 0.0)
            bag["skip"] = x
            bag["num"] = bag.get("num", 0) + 1
            return bag

    class Bags(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            bag = Bag(x=self.stem(x))
            for block in self.blocks:
                bag = block(bag)
            return bag["x"] * bag["num"]

    train(t, Bags((Bagged() for _ in range(2)), sequential=False))


@attack(
    "recomputation",
    "settings are swapped by a context manager of the model's around single blocks, and restored from a stack",
    only=EXACT,
)
def settings_stack(t: Trial) -> None:
    class Settings(threading.local):
        stack = [1.0]  # noqa: RUF012

    settings = Settings()

    @contextlib.contextmanager
    def scaled(by: float) -> typing.Iterator[None]:
        settings.stack.append(by)
        try:
            yield
        finally:
            settings.stack.pop()

    class Reading(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * settings.stack[-1]

    class Scoped(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for i, block in enumerate(self.blocks):
                with scaled(1 + 0.5 * i):
                    x = block(x)
            return x

    train(t, Scoped(Reading() for _ in range(3)))


@attack("changes", "copies of the model are shallow, with a dict of modules swapped (a functional view by __dict__)")
def shallow_view_by_dict(t: Trial) -> None:
    model = Net()
    view = copy.copy(model)
    view._modules = dict(model._modules)
    view._modules["head"] = nn.Identity()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        loss = model(x, y) + 0.1 * view(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation", "an object pretends to be a tensor for torch's functions (__torch_function__ without a subclass)"
)
def pretends_to_be_a_tensor(t: Trial) -> None:
    class Lazy:
        num = 0

        def __init__(self, make: typing.Callable[[], torch.Tensor]) -> None:
            self.make = make

        @classmethod
        def __torch_function__(
            cls, func: object, kinds: object, args: tuple = (), kwargs: dict | None = None
        ) -> object:
            cls.num += 1
            return func(*(a.make() if isinstance(a, cls) else a for a in args), **(kwargs or {}))

    class Lazily(Block):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(WIDTH))
            self.lazy = Lazy(lambda: self.shift * (1 + Lazy.num))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.add(super().forward(x), self.lazy)

    model = Net(Lazily() for _ in range(2))
    train(t, model, sgd(model), after=lambda _: t.note("num", Lazy.num))
