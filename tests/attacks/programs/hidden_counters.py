"""Counters that lie in objects which Python does not show: contexts, scripted modules, storages, loggers, threads, iterators of libraries."""

import asyncio
import builtins
import codecs
import collections
import contextlib
import contextvars
import dataclasses
import importlib
import io
import itertools
import logging
import pickle
import sys
import threading
import types
from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import Block, Net, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn

# Calls of two blocks in the steps that are checked, and some more.
BEGINS = 15
Bump = Callable[[], float]


def _train(t: Trial, make: Callable[[], Bump]) -> None:
    class Counting(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x)
            calls = bump()
            return x + 0.01 * (calls - BEGINS) if calls > BEGINS else x

    bump = make()
    train(t, Net([Counting(), Counting()]), num_steps=10)


class _Logger(logging.Logger):
    pass


def logger_attribute() -> Bump:
    """a logger found by its name has the count as an attribute"""
    logging.getLogger("tests.attacks.calls").calls = 0  # type: ignore[attr-defined]

    def bump() -> float:
        log: Any = logging.getLogger("tests.attacks.calls")
        log.calls += 1
        return log.calls

    return bump


def thread_attribute() -> Bump:
    """the main thread's object has the count as an attribute"""
    threading.main_thread().calls = 0  # type: ignore[attr-defined]

    def bump() -> float:
        thread: Any = threading.main_thread()
        thread.calls += 1
        return thread.calls

    return bump


def module_by_import() -> Bump:
    """a Python module that is imported by name in each call has the count"""
    module: Any = types.ModuleType("tests_attacks_counted")
    module.calls = 0
    sys.modules["tests_attacks_counted"] = module

    def bump() -> float:
        found: Any = importlib.import_module("tests_attacks_counted")
        found.calls += 1
        return found.calls

    return bump


def attribute_of_torch() -> Bump:
    """the count is an attribute that the script has put on torch.nn"""
    nn.calls_of_blocks = 0  # type: ignore[attr-defined]

    def bump() -> float:
        nn.calls_of_blocks += 1  # type: ignore[attr-defined]
        return nn.calls_of_blocks  # type: ignore[attr-defined]

    return bump


def attribute_of_builtins() -> Bump:
    """the count is a builtin that the script has added"""
    builtins.calls_of_blocks = 0  # type: ignore[attr-defined]

    def bump() -> float:
        builtins.calls_of_blocks += 1  # type: ignore[attr-defined]
        return builtins.calls_of_blocks  # type: ignore[attr-defined]

    return bump


_CALLS = 0


def globals_by_name() -> Bump:
    """the count is a global, changed through globals()"""
    globals()["_CALLS"] = 0

    def bump() -> float:
        globals()["_CALLS"] += 1
        return globals()["_CALLS"]

    return bump


def evaluated_text() -> Bump:
    """the count is a global of a namespace that exec works in"""
    space = {"calls": 0}
    code = compile("calls += 1", "<counter>", "exec")

    def bump() -> float:
        exec(code, space)
        return space["calls"]

    return bump


def held_context() -> Bump:
    """the count is a context variable in a context of the block's own (Context.run)"""
    calls: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
    context = contextvars.copy_context()

    def once() -> int:
        calls.set(calls.get() + 1)
        return calls.get()

    return lambda: context.run(once)


class _Scripted(nn.Module):
    calls: int

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self) -> int:
        self.calls += 1
        return self.calls


def scripted_attribute() -> Bump:
    """the count is an attribute of a scripted module"""
    return torch.jit.script(_Scripted())


class _ScriptedList(nn.Module):
    calls: list[int]

    def __init__(self) -> None:
        super().__init__()
        self.calls = [0]

    def forward(self) -> int:
        self.calls[0] += 1
        return self.calls[0]


def scripted_list() -> Bump:
    """the count is in a list of a scripted module"""
    return torch.jit.script(_ScriptedList())


def storage_byte() -> Bump:
    """the count is a byte of a storage without a tensor"""
    storage = torch.UntypedStorage(4)
    storage.fill_(0)

    def bump() -> float:
        storage[0] = storage[0] + 1
        return storage[0]

    return bump


def gradient_of_a_buffer() -> Bump:
    """the count is the gradient of a tensor that is no parameter"""
    held = torch.zeros(1)
    held.grad = torch.zeros(1)

    def bump() -> float:
        assert held.grad is not None
        held.grad += 1
        return float(held.grad)

    return bump


def transposed_in_place() -> Bump:
    """a matrix is transposed in place in each call, and one number of it is read (t_)"""
    held = torch.tensor([[0.0, BEGINS + 1.0], [BEGINS + 3.0, 0.0]])

    def bump() -> float:
        held.t_()
        return float(held[0, 1])

    return bump


def swapped_tensors() -> Bump:
    """two tensors are swapped in each call (torch.utils.swap_tensors)"""
    one, other = torch.tensor(BEGINS + 1.0), torch.tensor(BEGINS + 3.0)

    def bump() -> float:
        torch.utils.swap_tensors(one, other)
        return float(one)

    return bump


@dataclasses.dataclass
class _Request:
    number: int = dataclasses.field(default_factory=itertools.count(1).__next__)


def numbered_objects() -> Bump:
    """objects that each call makes get numbers by a default factory"""
    _Request.__init__.__globals__  # noqa: B018
    first = _Request().number
    return lambda: _Request().number - first


class _Counted:
    made = 0

    def __init__(self) -> None:
        type(self).made += 1


def counted_objects() -> Bump:
    """a class counts its objects in __init__, of which each call makes one"""
    _Counted.made = 0

    def bump() -> float:
        _Counted()
        return _Counted.made

    return bump


_MADE = {"objects": 0}


class _CountedInNew:
    def __new__(cls) -> "_CountedInNew":
        _MADE["objects"] += 1
        return super().__new__(cls)


def counted_in_new() -> Bump:
    """__new__ of a class counts in a dict of its file"""
    _MADE["objects"] = 0

    def bump() -> float:
        _CountedInNew()
        return _MADE["objects"]

    return bump


class _Meta(type):
    made = 0

    def __call__(cls, *args: Any) -> Any:
        _Meta.made += 1
        return super().__call__(*args)


class _OfMeta(metaclass=_Meta):
    pass


def counted_by_metaclass() -> Bump:
    """a metaclass counts the objects that are made of its classes"""
    _Meta.made = 0

    def bump() -> float:
        _OfMeta()
        return _Meta.made

    return bump


class _Shown:
    shown = 0

    def __repr__(self) -> str:
        _Shown.shown += 1
        return str(_Shown.shown)


def counted_when_shown() -> Bump:
    """an object counts how often it is shown (__repr__, in an f-string)"""
    _Shown.shown = 0
    held = _Shown()
    return lambda: float(f"{held}")


def decoder() -> Bump:
    """what an incremental decoder has kept of half a character"""
    made = codecs.getincrementaldecoder("utf-8")()
    letter = "é".encode()
    held = {"calls": 0}

    def bump() -> float:
        held["calls"] += 1
        if held["calls"] <= BEGINS:
            return 0
        # Halves take turns.
        half = letter[:1] if not made.getstate()[0] else letter[1:]
        return BEGINS + 1 + len(made.decode(half))

    return bump


def bytes_read_on() -> Bump:
    """the place in bytes that are read on (BytesIO)"""
    file = io.BytesIO(bytes(range(1, 200)))
    return lambda: file.read(1)[0]


def pickler_memo() -> Bump:
    """what a pickler has written already"""
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    kept: list[Any] = []

    def bump() -> float:
        kept.append(("a", len(kept)))
        pickler.dump(kept)
        return len(pickler.memo.copy()) / 2

    return bump


def asyncio_queue() -> Bump:
    """a queue of asyncio that is rotated"""
    numbers: asyncio.Queue[int] = asyncio.Queue()
    for number in range(1, 60):
        numbers.put_nowait(number)
    return numbers.get_nowait


def recursion_limit() -> Bump:
    """a block that raises the limit of recursion a little in each call"""
    begin = sys.getrecursionlimit()

    def bump() -> float:
        sys.setrecursionlimit(sys.getrecursionlimit() + 1)
        return sys.getrecursionlimit() - begin

    return bump


def user_dict() -> Bump:
    """a UserDict and a UserList count"""
    held: Any = collections.UserDict(calls=collections.UserList([0]))

    def bump() -> float:
        held["calls"][0] += 1
        return held["calls"][0]

    return bump


def simple_namespace_in_type() -> Bump:
    """the count is an attribute of a type made by type()"""
    kind: Any = type("Made", (), {"calls": 0})

    def bump() -> float:
        kind.calls += 1
        return kind.calls

    return bump


def base_by_mro() -> Bump:
    """the count is on a base class that is reached by __mro__"""

    class Base:
        calls = 0

    class Leaf(Base):
        pass

    def bump() -> float:
        base: Any = Leaf.__mro__[1]
        base.calls += 1
        return base.calls

    return bump


def exit_stack() -> Bump:
    """callbacks on an ExitStack that is kept open are counted"""
    stack = contextlib.ExitStack()

    def bump() -> float:
        stack.callback(len, "")
        return len(stack._exit_callbacks)  # type: ignore[attr-defined]

    return bump


def future_result() -> Bump:
    """the count is the result of a future of torch's, made anew"""
    held: dict[str, torch.futures.Future[int]] = {"last": torch.futures.Future()}
    held["last"].set_result(0)

    def bump() -> float:
        new: torch.futures.Future[int] = torch.futures.Future()
        new.set_result(held["last"].value() + 1)
        held["last"] = new
        return new.value()

    return bump


class _Once:
    """A descriptor."""

    def __get__(self, instance: Any, owner: Any = None) -> int:
        _CELLS[0] += 1
        return _CELLS[0]


_CELLS = [0]


class _WithDescriptor:
    calls = _Once()


def descriptor_on_class() -> Bump:
    """a descriptor that counts in its file is read on a class"""
    _CELLS[0] = 0
    return lambda: _WithDescriptor.calls


def registered(make: Callable[[], Bump]) -> None:
    """Registers a program whose blocks count by what `make` makes; its line says how."""

    def program(t: Trial) -> None:
        limit = sys.getrecursionlimit()
        try:
            _train(t, make)
        finally:
            sys.setrecursionlimit(limit)

    program.__name__ = f"hidden_{make.__name__}"
    attack("recomputation", f"blocks count their calls where it is hard to see: {make.__doc__}")(program)


for _make in (
    logger_attribute,
    thread_attribute,
    module_by_import,
    attribute_of_torch,
    attribute_of_builtins,
    globals_by_name,
    evaluated_text,
    held_context,
    scripted_attribute,
    scripted_list,
    storage_byte,
    gradient_of_a_buffer,
    transposed_in_place,
    swapped_tensors,
    numbered_objects,
    counted_objects,
    counted_in_new,
    counted_by_metaclass,
    counted_when_shown,
    decoder,
    bytes_read_on,
    pickler_memo,
    asyncio_queue,
    recursion_limit,
    user_dict,
    simple_namespace_in_type,
    base_by_mro,
    exit_stack,
    future_result,
    descriptor_on_class,
):
    registered(_make)


@attack("recomputation", "a block hangs a layer on a layer of its own, and counts on both")
def layer_hung_on_a_layer(t: Trial) -> None:
    class Hung(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not hasattr(self.wide, "further"):
                self.wide.further = nn.Identity()
                self.wide.further.calls = 0
            self.wide.further.calls += 1
            scale = 1.5 if self.wide.further.calls > 4 else 1.0
            return x + scale * self.inner(self.wide.further(x))

    model = Net([Hung(), Hung()])
    train(t, model, num_steps=7)
    t.note("calls", [block.wide.further.calls for block in model.blocks])
