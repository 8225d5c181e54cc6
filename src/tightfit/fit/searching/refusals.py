"""What a search leaves out: techniques, or techniques at places, each with the reason."""

from collections.abc import Iterable, Sequence

from tightfit.fit.searching.permitted import grouped, modules_of
from tightfit.planner.option import Option


class Refusals:
    """`techniques` are refused for the whole program, by name, with the reason."""

    def __init__(self) -> None:
        self.techniques: dict[str, str] = {}
        self._places: dict[tuple[str, str], str] = {}
        self._kinds: set[str] = set()
        # By technique and place: what the effects of the program forbid.
        self._forbidden: dict[tuple[str, str], str] = {}

    @property
    def key(self) -> tuple[str, ...]:
        """What was refused so far, as a key: the same options are offered on a profile as long as it is the same."""
        return (*self.techniques, *(f"{name}@{where}" for name, where in self._places))

    def rows(self) -> tuple[tuple[str, str], ...]:
        """Techniques, or techniques at places, each with the reason why it is left out."""
        left_out = self._forbidden | self._places
        at_places = grouped(
            (name, place, reason) for (name, place), reason in left_out.items() if name not in self.techniques
        )
        return (*self.techniques.items(), *at_places)

    def is_refused_at(self, option: Option) -> bool:
        """Whether the technique of an option is refused at its place."""
        return (option.technique, option.where) in self._places

    def is_refused(self, option: Option) -> bool:
        """Whether an option is left out by now: its technique, or that at its place."""
        return option.technique in self.techniques or self.is_refused_at(option)

    def is_any_refused(self, options: Iterable[Option]) -> bool:
        """Whether one of these, which may be on a traced run, was refused since, in company with others."""
        return any(map(self.is_refused, options))

    def forbid(self, option: Option, reason: str) -> None:
        """The effects of the program forbid an option."""
        self._forbidden.setdefault((option.technique, option.where), reason)

    def refuse_at(
        self, technique: str, places: Sequence[str], reason: str, *, chosen: Sequence[Option], offered: Iterable[Option]
    ) -> None:
        """Leaves `places` of some `chosen` options of a technique out; once one of its kind was refused before, all places of the `offered` that are alike, so that
        a model of many blocks does not need a trace for each."""
        own = [option for option in chosen if option.technique == technique]
        meant = [o for o in own if o.where in places] or [o for o in own if modules_of(o) & set(places)]
        equivalence_class = {option.equivalence_class for option in meant if option.equivalence_class}
        again = equivalence_class & self._kinds
        self._kinds |= equivalence_class
        alike = [o for o in offered if o.equivalence_class in again]
        for place in dict.fromkeys([*places, *(o.where for o in (*meant, *alike))]):
            self._places[technique, place] = reason
