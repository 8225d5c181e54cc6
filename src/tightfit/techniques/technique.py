"""The interface of a technique: options as pure numbers, computed from a tape, and code that applies the chosen ones to live objects.

A technique is applied to the virtual model with the same code that runs on the card, and the result is traced: so `options` may estimate, and
`tolerance` says how far the traced saving may be from the predicted one.
"""

import abc
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from tightfit.analysis.profile import Profile
from tightfit.errors import ApplyError
from tightfit.planner.option import Option
from tightfit.planner.suggestion import Suggestion

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

Checked = TypeVar("Checked")
_BOOLS = {True: True, False: False, "True": True, "False": False}


class ChosenOption(Protocol):
    """An option that is applied, as far as its technique needs it; a `tightfit.planner.plan.Choice` is one."""

    @property
    def where(self) -> str:
        """The place, as in `Option.where`."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """As in `Option.settings`."""
        ...


class Needs(enum.Flag):
    """What a technique needs of the code that it changes, so that a plan leaves it out if the trace shows otherwise.

    `REPEATABLE`: it can be run again. `DIVISIBLE`: it can be run in parts. `GRADIENTS`: nothing else uses the gradients.
    `STEPS`: no hook of an optimizer's step needs what the technique hides.
    """

    NOTHING = 0
    REPEATABLE = enum.auto()
    DIVISIBLE = enum.auto()
    GRADIENTS = enum.auto()
    STEPS = enum.auto()


class AbstractTechnique(abc.ABC):
    """One way to trade time for memory. Subclasses are final; nothing concrete is overridden.

    `exact`: the same loss and gradients bit for bit, or up to the order of a reduction; `exactness` says which. A lossy technique is only offered
    if the user allows it, and so are options of an exact one that are lossy where the program is as `lossy_where` says. `tolerance` is relative to the predicted saving. The planner leaves out options at places that do not meet the
    technique's `needs`. `is_alike_in_batches`: what it does in a micro-batch of a step does not depend on the micro-batches before and behind it, so that a trace may repeat those that are alike.
    `is_for_speed`: it saves no memory, and is taken where a program fits as it is, if the host memory that it needs is given.
    `of_the_allocator`: its options are the allocator's, replayed and not traced; those of the others never are.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    exactness: ClassVar[str]
    lossy_where: ClassVar[str] = ""
    tolerance: ClassVar[float] = 0.1
    needs: ClassVar[Needs] = Needs.NOTHING
    is_alike_in_batches: ClassVar[bool] = False
    is_for_speed: ClassVar[bool] = False
    of_the_allocator: ClassVar[bool] = False

    @abc.abstractmethod
    def options(self, profile: Profile) -> Iterable[Option]:
        """The options on this profile; none if the technique does not apply. Pure: no torch, no side effects."""

    @abc.abstractmethod
    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Applies the chosen options to the session's live objects, and registers with the session how to undo it.

        Raises:
            ApplyError: it cannot be applied to this model; nothing has been changed then.
        """

    def reason(self, profile: Profile) -> str:
        """Why there are no options on this profile, for a user who has been told that nothing fits; empty where there are some, or nothing is to be said."""
        return ""

    def advice(self, profile: Profile) -> Iterable[Suggestion]:
        """Related changes that a user could make and a plan does not; none by default."""
        return ()


def check_each(chosen: Iterable[ChosenOption], check: Callable[[ChosenOption], Checked]) -> list[Checked]:
    """The result of `check` for each choice.

    Raises:
        ApplyError: the first error of a check, with the places of all choices that failed, so that a plan can be made without them.
    """
    found: list[Checked] = []
    # All choices are checked, so that one new plan can leave out every place that fails.
    first, places = None, []
    for choice in chosen:
        try:
            found.append(check(choice))
        except ApplyError as error:
            first = first or error
            places.append(choice.where)
    if first is not None:
        raise ApplyError(str(first), places=places) from first
    return found


def the_only(chosen: Sequence[ChosenOption]) -> ChosenOption:
    """The choice of a technique that a plan has once.

    Raises:
        ApplyError: it has several, as a plan that was edited may.
    """
    if len(chosen) > 1:
        raise ApplyError(
            f"the plan has it {len(chosen)} times, and it can be applied once", places=[c.where for c in chosen]
        )
    return chosen[0]


def parse_bool(name: str, value: Any) -> bool:
    """The setting `name` of a choice as a bool: in a plan that was written by hand, or given as arguments, it is a string.

    Raises:
        ApplyError: `value` is neither.
    """
    # A list has no hash.
    if not isinstance(value, bool | str) or value not in _BOOLS:
        raise ApplyError(f"{name}={value!r} is neither True nor False")
    return _BOOLS[value]
