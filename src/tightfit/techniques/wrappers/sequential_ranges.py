"""Runs ranges of the children of a Sequential by other functions, and the remaining children one by one.

Several techniques may have ranges of the same Sequential. A copy of the model (an EMA, say) gets runners of its own.
"""

import operator
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tightfit.effects.users_code import is_users_function
from tightfit.errors import ApplyError
from tightfit.techniques.wrappers.forwards import WrappedForward, own_forward
from tightfit.techniques.wrappers.unwrap_model import module_of
from tightfit.torch_hooks.weak_references import WeakTable

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# Takes the input of the first child of a range, and gives the output of the last.
Runner = Callable[[Any], Any]
MakeRunner = Callable[[Sequence[torch.nn.Module]], Runner]


class Ranges:
    """The wrapper around the forward of one Sequential."""

    def __init__(self) -> None:
        self.makers: dict[tuple[int, int], MakeRunner] = {}
        self._runners: WeakTable[torch.nn.Module, dict[tuple[int, int], tuple[Sequence[torch.nn.Module], Runner]]] = (
            WeakTable()
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> "Ranges":
        return self

    def __call__(self, forward: Callable[..., Any], input: Any) -> Any:  # noqa: A002 - the name that Sequential has
        sequential = module_of(forward)
        if not _is_run_in_order(type(sequential)):
            # The program has put another forward into the class since.
            return forward(input)
        children = [child for child in sequential._modules.values() if child is not None]
        runners = self._runners.setdefault(sequential, {})
        position, value = 0, input
        while position < len(children):
            place = next((place for place in self.makers if place[0] == position), None)
            if place is None:
                value = children[position](value)
                position += 1
                continue
            own = children[place[0] : place[1]]
            known, runner = runners.get(place, ([], None))
            # A child may be replaced at any time.
            if runner is None or len(known) != len(own) or not all(map(operator.is_, known, own)):
                runner = self.makers[place](own)
                runners[place] = own, runner
            value = runner(value)
            position = place[1]
        return value


def _is_run_in_order(kind: type[torch.nn.Module]) -> bool:
    """Whether the forward of a class is that of torch's Sequential, which goes through its children by `__iter__`."""
    # A subclass may leave children out, or have another order.
    own = torch.nn.Sequential
    is_torchs = kind.forward is own.forward and getattr(kind, "__iter__", None) is own.__iter__
    return is_torchs and not any(map(is_users_function, (own.forward, own.__iter__)))


def put_range(session: "Session", where: str, begin: int, end: int, make: MakeRunner) -> None:
    """Runs the children in `range(begin, end)` of the Sequential at `where` by the runner that `make` makes of them.

    Raises:
        ApplyError: it is no plain Sequential, has no such children, or some of them have another runner already.
    """
    sequential = check_sequential(session, where, begin, end)
    current = own_forward(sequential)
    if current is None:
        ranges = Ranges()
        session.wrap_forward(sequential, ranges)
    else:
        assert isinstance(current, WrappedForward) and isinstance(current.around, Ranges)
        ranges = current.around
    if any(begin < other_end and other_begin < end for other_begin, other_end in ranges.makers):
        raise ApplyError(
            f"children {begin} to {end - 1} of {where} are chosen twice; choose ranges that do not overlap"
        )
    ranges.makers[begin, end] = make

    def undo() -> None:
        del ranges.makers[begin, end]

    session.when_undone(undo)


def check_sequential(session: "Session", where: str, begin: int, end: int) -> torch.nn.Module:
    """The Sequential at `where`, if its children in `range(begin, end)` can have another runner.

    Raises:
        ApplyError: they cannot.
    """
    sequential = session.module(where)
    if not _is_run_in_order(type(sequential)):
        kind = type(sequential).__name__
        told = f"{where} is a {kind}, and a torch.nn.Sequential is needed"
        if type(sequential) is torch.nn.Sequential:
            told = f"the script has replaced the forward or the iteration of torch.nn.Sequential, the class of {where}"
        raise ApplyError(f"{told}; leave it out")
    current = own_forward(sequential)
    if current is not None and not (isinstance(current, WrappedForward) and isinstance(current.around, Ranges)):
        told = (
            "another technique of the plan runs" if isinstance(current, WrappedForward) else "the script has replaced"
        )
        raise ApplyError(f"{told} the forward of {where}; leave it out")
    if not 0 <= begin < end <= len(sequential._modules):
        raise ApplyError(f"{where} has no children {begin} to {end - 1}; make a plan for this model")
    return sequential
