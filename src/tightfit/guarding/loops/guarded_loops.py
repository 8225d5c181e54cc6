"""What rewritten loops call: each turn of a training loop is an attempt that is taken back where it finds no memory (`rewrite_loops`)."""

import builtins
import sys
import threading
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch

from tightfit.effects.users_code import is_users_class, is_users_file
from tightfit.errors.ends import end_all, ended_by
from tightfit.guarding.attempts import Attempt, Attempts
from tightfit.guarding.loops.names_of_turn import TurnNames
from tightfit.guarding.loops.outside_effects import OutsideEffects
from tightfit.guarding.loops.turn_variables import TurnVariables
from tightfit.guarding.memory.out_of_memory import without_frames
from tightfit.guarding.named_values import attributes_named_by
from tightfit.guarding.replayed_batches import ReplayedBatches
from tightfit.guarding.told_to_end import ToldToEnd


class LoopGuard:
    """Guards the loops of a program. A loop whose turn contains a turn of another one is not taken back: the inner one is.

    While a turn runs, what the program does at SIGTERM waits for its end.
    """

    def __init__(self, attempts: Attempts, effects: OutsideEffects) -> None:
        self.names: list[TurnNames] = []
        self.attempts = attempts
        self.effects = effects
        self.told_to_end = ToldToEnd()
        self._thread = threading.get_ident()
        self._running: Turn | None = None
        self._outer = set[int]()

    def loop(self, number: int) -> "GuardedLoop":
        """The program comes to the loop of this number."""
        return GuardedLoop(self, number)

    def enter(self, turn: "Turn", number: int) -> bool:
        """A turn begins; whether it is guarded."""
        if threading.get_ident() != self._thread or number in self._outer:
            return False
        if self._running is not None:
            self._outer.add(self._running.number)
            self._running.abandon()
        self._running = turn
        self.told_to_end.begin()
        return True

    def leave(self, turn: "Turn", *, is_good: bool) -> None:
        """The turn is over."""
        if self._running is turn:
            self._running = None
        if is_good:
            self.attempts.climb()


class GuardedLoop:
    """One loop while the program is in it."""

    def __init__(self, guard: LoopGuard, number: int) -> None:
        self.guard = guard
        self.number = number
        self.sources: list[ReplayedBatches[Any]] = []
        self.tried: list[str] = []
        self._of_iterators: dict[int, tuple[Any, ReplayedBatches[Any]]] = {}
        self._is_again = False

    def turns(self, items: Iterable[Any]) -> Iterator[Any]:
        """The items, each again as often as its turn is."""
        iterator = iter(items)
        while True:
            try:
                item = next(iterator)
            except StopIteration:
                return
            yield item
            while self.is_again():
                yield item
            # As in a plain loop, the program alone decides how long a batch lives.
            del item

    def is_again(self) -> bool:
        """Whether the turn before is run again, once for each time that it was taken back."""
        is_again, self._is_again = self._is_again, False
        return is_again

    def begin(self, drawn: Sequence[str], own_next: Callable[..., Any] = builtins.next) -> "Turn":
        """A turn begins. `drawn` are the variables whose iterators it asks for items by `next`, which is `own_next` there, and uses in no other way: a program may
        import a `next` from anywhere."""
        turn = Turn(self, frozenset(drawn) if own_next is builtins.next else frozenset(), own_next)
        if self.guard.names[self.number].reads_all_globals:
            turn.variables.at_begin["globals()"] = sys._getframe(1).f_globals
        return turn

    def source(self, iterator: Any, attempt: Attempt) -> ReplayedBatches[Any]:
        """What hands out the items of an iterator, in this attempt at a turn."""
        known = self._of_iterators.get(id(iterator))
        if known is None:
            known = self._of_iterators[id(iterator)] = iterator, ReplayedBatches(iterator)
            known[1].begin(attempt.draws)
            self.sources.append(known[1])
        return known[1]

    def succeeded(self) -> None:
        """The turn has come to its end."""
        self.tried.clear()
        self._of_iterators = {key: known for key, known in self._of_iterators.items() if known[1].is_waiting}
        self.sources[:] = [source for _, source in self._of_iterators.values()]

    def failed(self) -> None:
        """The turn was taken back, and is run again."""
        self._is_again = True


class Turn:
    """One attempt at a turn of a loop. The rewritten loop calls it, and hands its `variables` over."""

    def __init__(self, loop: GuardedLoop, drawn: frozenset[str], own_next: Callable[..., Any]) -> None:
        self.has_failed = False
        self.number = loop.number
        self._loop = loop
        self._guard = loop.guard
        self._names = loop.guard.names[loop.number]
        self._drawn = drawn
        self._own_next = own_next
        self.variables = TurnVariables(self._names)
        self._attempt: Attempt | None = None
        self._error: BaseException | None = None
        self._is_good = True
        self._place = ""

    def enter(self) -> None:
        """All variables were seen: the turn runs."""
        guard = self._guard
        if not guard.enter(self, self.number):
            self.variables.at_begin.clear()
            return
        if not self._loop.tried:
            guard.attempts.num_steps += 1
        reached = {name: value for name, value in self.variables.at_begin.items() if name not in self._drawn}
        reached |= guard.effects.clear()
        try:
            self._attempt = guard.attempts.begin(
                reached,
                attributes=self._names.attributes,
                names_data=lambda: (
                    "data" in self._names.attributes or _name_data(reached.values(), self._names.attributes)
                ),
                sources=self._loop.sources,
            )
        except BaseException as error:
            # There was no memory for its copies, say: there is no turn, and the program may go on behind the error.
            with ended_by(*self._ends(is_good=False)):
                raise error

    def next(self, iterator: Any, *default: Any, **others: Any) -> Any:
        """`next(iterator, *default)`: the item comes again when the turn does."""
        if self._attempt is None or self._own_next is not builtins.next:
            return self._own_next(iterator, *default, **others)
        # Making a batch is not done again: what it prints and opens is none of the turn's.
        with self._guard.effects.apart():
            return builtins.next(self._loop.source(iterator, self._attempt), *default)

    def failed(self, error: BaseException) -> bool:
        """Whether the turn is to be taken back, after an error in it."""
        self._is_good = False
        if self._attempt is None or not self._guard.attempts.are_taken_back_after(error):
            return False
        self._place = _place_of(error)
        self._error = without_frames(error)
        self.has_failed = True
        return True

    def end(self) -> None:
        """The turn is over, whatever its end."""
        if self._attempt is None:
            return
        is_good, attempts = False, self._guard.attempts
        try:
            if self._is_good:
                attempts.succeeded(self._attempt)
            is_good = self._is_good
        finally:
            attempts.leave(self._attempt)
            if not self.has_failed:
                end_all(*self._ends(is_good=is_good))

    def _ends(self, *, is_good: bool) -> Sequence[Callable[[], object]]:
        """What is done when the turn is over, and is not taken back."""
        self._attempt = None
        self.variables.at_begin.clear()
        if is_good:
            self._loop.succeeded()
        guard = self._guard
        return guard.effects.printed.stop, lambda: guard.leave(self, is_good=is_good), guard.told_to_end.end

    def abandon(self) -> None:
        """A turn of a loop inside of this one begins: this one is not taken back."""
        assert self._attempt is not None
        self._guard.attempts.leave(self._attempt)
        self._attempt = None
        self.variables.at_begin.clear()

    def take_back(self) -> None:
        """Restores the state at the beginning of the turn.

        Raises:
            BaseException: the error of the turn, where that cannot be done.
        """
        attempt, error = self._attempt, self._error
        assert attempt is not None
        assert error is not None
        self._attempt = self._error = None
        effects = self._guard.effects
        effects.printed.stop()
        self._guard.leave(self, is_good=False)
        first = f"it {effects.first}" if effects.first else ""
        try:
            self._guard.attempts.take_back(attempt, error, self._loop.tried, refusal=lambda: first)
        except BaseException as final:
            final.add_note(f"tightfit: {self._place}")
            self._guard.told_to_end.end()
            raise
        effects.printed.again()
        self._loop.failed()


def _functions(value: Any, attributes: frozenset[str]) -> Iterator[Any]:
    """The user's code that a turn runs by a value: the function itself, or the methods whose names it has."""
    if isinstance(value, types.FunctionType | types.MethodType):
        yield value
    elif is_users_class(type(value)) and not isinstance(value, torch.Tensor):
        for name in attributes:
            method = next((vars(base)[name] for base in type(value).__mro__ if name in vars(base)), None)
            if isinstance(method, types.FunctionType):
                yield types.MethodType(method, value)


def _name_data(values: Iterable[Any], attributes: frozenset[str]) -> bool:
    return any("data" in attributes_named_by(f) for value in values for f in _functions(value, attributes))


def _place_of(error: BaseException) -> str:
    """Where in the user's code an error was raised: the frames are dropped with the tensors that they hold."""
    traceback, place = error.__traceback__, "raised outside of the user's code"
    while traceback is not None:
        file = traceback.tb_frame.f_code.co_filename
        if is_users_file(file):
            place = f"raised at {file}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    return place
