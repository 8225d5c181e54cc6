"""What a technique is: options as pure numbers, worked out from a tape, and the code that puts the chosen ones on live objects.

A technique is put on the virtual model with the very code that runs on the card, and the result is traced: so `options` may estimate, and
`tolerance` says how far the traced saving may be from the promised one.
"""

import abc
import enum
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar, Protocol, TypeVar

from tightfit.analysis.profile import Profile
from tightfit.errors import ApplyError
from tightfit.planner.option import Advice, Option
from tightfit.techniques.session import Session

Checked = TypeVar("Checked")


class Choice(Protocol):
    """One choice of a plan, as far as a technique needs it; `tightfit.planner.plan.Choice` is one."""

    @property
    def where(self) -> str:
        """The place, as in `Option.where`."""
        ...

    @property
    def settings(self) -> Mapping[str, Any]:
        """As in `Option.settings`."""
        ...


class Needs(enum.Flag):
    """What a technique needs of the code that it changes, so that a plan leaves it out where the trace shows otherwise.

    `REPEATABLE`: that it can be run again. `DIVISIBLE`: that it can be run in parts. `GRADIENTS`: that nobody else waits for the gradients.
    `STEPS`: that no hook of an optimizer's step needs what the technique hides.
    """

    NOTHING = 0
    REPEATABLE = enum.auto()
    DIVISIBLE = enum.auto()
    GRADIENTS = enum.auto()
    STEPS = enum.auto()


class AbstractTechnique(abc.ABC):
    """One way to trade time for memory. Subclasses are final; nothing concrete is overridden.

    `exact` is what the field means by it: the same loss and gradients bit for bit, or up to the order of a reduction; `exactness` says which.
    A lossy technique is only offered where the user allows it. `tolerance` is relative to the promised saving.
    A planner leaves out options at places that do not give what the technique `needs`.
    """

    name: ClassVar[str]
    exact: ClassVar[bool]
    exactness: ClassVar[str]
    tolerance: ClassVar[float] = 0.1
    needs: ClassVar[Needs] = Needs.NOTHING

    @abc.abstractmethod
    def options(self, profile: Profile) -> Iterable[Option]:
        """The choices that there are on this profile.tape; none where it does not apply. Pure: no torch, nothing is changed."""

    @abc.abstractmethod
    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Puts the chosen options on the session's live objects, and tells the session how to undo it.

        Raises:
            ApplyError: it cannot be put on this model; nothing has been changed then.
        """

    def advice(self, profile: Profile) -> Iterable[Advice]:
        """What a person could do along these lines that a plan does not do for them; nothing by default."""
        return ()


def check_each(chosen: Iterable[Choice], check: Callable[[Choice], Checked]) -> list[Checked]:
    """What `check` returns of each choice.

    Raises:
        ApplyError: it raised one; the first, with the places of all for which it did, so that the others can do without them.
    """
    found: list[Checked] = []
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
