"""A name that is replaced stands for its old object again once nobody needs it, in whatever order owners and other people come and go."""

import _thread
import dataclasses
import functools
import gc
import inspect
import itertools
import signal
import sys
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tests.forked_python import forked_python

from tightfit.effects.code import Code
from tightfit.errors import ApplyError
from tightfit.errors.private_names import Name, known
from tightfit.torch_hooks import manifest
from tightfit.torch_hooks.replaced import Replaced

NAME = known("library_of_a_test:compute", "to test", "tests", first="1", last="1")


class Owner:
    """Somebody who wants to know."""

    def __init__(self) -> None:
        self.calls = 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    module: Any = types.ModuleType(NAME.module)
    module.compute = lambda value: value + 1
    monkeypatch.setitem(sys.modules, NAME.module, module)
    return module


def replaced() -> Replaced[Owner]:
    def put(inner: Callable[..., Any], owners: Callable[[], list[Owner]]) -> Callable[..., Any]:
        def compute(value: int) -> int:
            for owner in owners():
                owner.calls += 1
            return inner(value)

        return compute

    return Replaced(NAME, put)


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_owners_leave_in_any_order(library: Any, order: tuple[int, ...]) -> None:
    plain, name = library.compute, replaced()
    owners = [Owner() for _ in range(3)]
    leave = [name.enter(owner) for owner in owners]
    ours = library.compute
    assert ours is not plain
    for number, index in enumerate(order):
        assert library.compute is ours and library.compute(1) == 2
        leave[index]()
        assert owners[index].calls == number + 1
    assert library.compute is plain
    leave[0]()  # once more is nothing
    assert library.compute is plain


def test_an_owner_that_is_collected_has_left(library: Any) -> None:
    plain, name, owner = library.compute, replaced(), Owner()
    owner.itself = owner  # type: ignore[attr-defined]
    name.enter(owner)
    del owner
    gc.collect()
    assert library.compute is plain


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Where a shell started the tests in the background, interrupts are ignored, also by `interrupt_main`."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interrupt_that_arrives_while_an_owner_is_collected_is_not_lost(library: Any) -> None:
    plain, name = library.compute, replaced()
    # A hook of a debugger or of a guarded run is Python code, and Python never takes it away again.
    sys.addaudithook(lambda event, arguments: None)

    owners = [Owner()]
    name.enter(owners[0])
    # The youngest reference is called first, by code in C: the interrupt is handled at the next instruction of Python, wherever that is.
    interrupt = functools.partial(next, map(_thread.interrupt_main, itertools.repeat(signal.SIGINT)))
    interrupting = weakref.ref(owners[0], interrupt)
    with pytest.raises(KeyboardInterrupt):
        owners.clear()
    assert library.compute is plain and interrupting() is None


def around(inner: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(inner)
    def wrapper(*args: Any) -> Any:
        return inner(*args) * 10

    return wrapper


class Around:
    """The same as an object."""

    def __init__(self, inner: Callable[..., Any]) -> None:
        self.inner = inner

    def __call__(self, *args: Any) -> Any:
        return self.inner(*args) * 10


@pytest.mark.parametrize("wrap", [around, Around, lambda inner: functools.partial(around(functools.partial(inner)))])
def test_what_somebody_put_around_it_stays_and_ours_is_used_again(library: Any, wrap: Callable[..., Any]) -> None:
    plain, name, owner = library.compute, replaced(), Owner()
    leave = name.enter(owner)
    library.compute = theirs = wrap(library.compute)
    leave()
    assert library.compute is theirs and theirs(1) == 20 and not owner.calls
    gone = weakref.ref(owner)
    del owner
    assert gone() is None
    for _ in range(3):
        owner = Owner()
        leave = name.enter(owner)
        assert library.compute is theirs and theirs(1) == 20 and owner.calls == 1
        leave()
    library.compute = plain
    leave = name.enter(owner)
    assert library.compute(1) == 2 and owner.calls == 2
    leave()
    assert library.compute is plain


def test_what_was_left_behind_takes_itself_away_when_it_is_called_alone(library: Any) -> None:
    plain, name, owner = library.compute, replaced(), Owner()
    leave = name.enter(owner)
    ours = library.compute
    library.compute = around(ours)
    leave()
    library.compute = ours  # they put back what they had found
    assert library.compute(1) == 2
    assert library.compute is plain


def test_one_that_somebody_threw_away_is_put_there_anew_and_asks_once(library: Any) -> None:
    plain, name, owners = library.compute, replaced(), [Owner(), Owner()]
    leave = [name.enter(owners[0])]
    kept = library.compute
    library.compute = plain
    leave.append(name.enter(owners[1]))
    assert library.compute(1) == 2 and [owner.calls for owner in owners] == [1, 1]
    assert kept(1) == 2 and [owner.calls for owner in owners] == [1, 1]
    for each in leave:
        each()
    assert library.compute is plain


def test_a_method_that_a_class_has_from_its_base_is_inherited_again(library: Any) -> None:
    class Base:
        def compute(self) -> int:
            return 1

    class Kind(Base):
        pass

    library.Kind = Kind
    told = []

    def put(inner: Callable[..., Any], owners: Callable[[], list[Owner]]) -> Callable[..., Any]:
        def compute(self: Any) -> int:
            told.extend(owners())
            return inner(self)

        return compute

    name = Replaced(dataclasses.replace(NAME, path="library_of_a_test:Kind.compute"), put)
    owners = [Owner(), Owner()]
    leave = [name.enter(owner) for owner in owners]
    assert Kind().compute() == 1 and told == owners and Base().compute() == 1 and told == owners
    for each in (*leave, *leave):
        each()
    assert "compute" not in vars(Kind) and Kind().compute() == 1


@pytest.mark.parametrize("is_inherited", [False, True])
def test_code_is_the_programs_whether_ours_is_put_there_or_not(library: Any, *, is_inherited: bool) -> None:
    class Base:
        def compute(self) -> int:
            return 1

    library.Kind = type("Kind", (Base,), {} if is_inherited else {"compute": lambda self: 2})
    answer = library.Kind().compute()

    def put(inner: Callable[..., Any], owners: Callable[[], list[Owner]]) -> Callable[..., Any]:
        @functools.wraps(inner)
        def compute(*args: Any) -> Any:
            return inner(*args), owners()

        return compute

    name, owner = Replaced(dataclasses.replace(NAME, path="library_of_a_test:Kind.compute"), put), Owner()
    plain, replaced_by_us = Code(), Code()
    plain.of_class(library.Kind, ["compute"])
    leave = name.enter(owner)
    replaced_by_us.of_class(library.Kind, ["compute"])
    assert plain.is_same() and replaced_by_us.is_same()
    ours = library.Kind.compute
    # With what ours has for attributes, which is what `wraps` does.
    library.Kind.compute = functools.wraps(ours)(lambda self: 3)
    assert not plain.is_same() and not replaced_by_us.is_same()
    library.Kind.compute = ours
    assert plain.is_same() and replaced_by_us.is_same()
    leave()
    assert plain.is_same() and replaced_by_us.is_same() and library.Kind().compute() == answer
    library.Kind.compute = lambda self: 3
    assert not plain.is_same() and not replaced_by_us.is_same()


def test_a_name_that_is_missing_is_an_error_that_says_so(library: Any) -> None:
    library.__version__ = "0.9"
    del library.compute
    with pytest.raises(
        ApplyError, match=r"library_of_a_test 0.9 has no library_of_a_test.compute, which is needed to test; .* \(1\)"
    ):
        replaced().enter(Owner())
    assert not hasattr(library, "compute")


@pytest.mark.parametrize("name", [*manifest.REPLACED, *manifest.READ], ids=str)
def test_the_names_of_the_manifest_are_there(name: Name) -> None:
    pytest.importorskip(name.library)
    if not name.is_checked and name.library == "torch" and torch.__version__ < name.first:
        pytest.skip(f"torch has it since {name.first}")
    value = name.value()
    is_key = isinstance(value, torch._C.DispatchKey)
    assert is_key or callable(value) or isinstance(value, property) or inspect.isgetsetdescriptor(value)


def test_a_program_that_ends_with_owners_ends_without_a_word() -> None:
    script = """
import torch
from tightfit.torch_hooks.backward import on_backward
class Owner:
    def concerned_parameters(self): return None
    def around_backward(self, backward): return backward.run()
model = torch.nn.Linear(1, 1)
model.owner = torch.kept = Owner()
model.owner.model = model
on_backward(model.owner)
"""
    done = forked_python("-c", script, check=True)
    assert done.stdout == done.stderr == ""
    assert torch.autograd._engine_run_backward is torch.autograd.graph._engine_run_backward
