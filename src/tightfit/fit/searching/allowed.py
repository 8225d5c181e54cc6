"""What a user allows a plan to take, and what is left out on request."""

import dataclasses
import fnmatch

from tightfit.fit.searching.permitted import modules_of
from tightfit.planner.option import Option


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Without:
    """A technique that a user wants left out: at all places, or wherever it would run a module whose path matches one of `places` (`GPT.h.*`)."""

    technique: str
    places: tuple[str, ...] = ()

    def matches(self, option: Option) -> bool:
        """Whether `option` is left out."""
        if option.technique != self.technique:
            return False
        return not self.places or any(fnmatch.fnmatchcase(m, p) for p in self.places for m in modules_of(option))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allowed:
    """Which lossy techniques a user allows: all of them, or those that are named; and what is left out."""

    all_lossy: bool = False
    names: frozenset[str] = frozenset()
    without: tuple[Without, ...] = ()

    def permits(self, option: Option) -> bool:
        """Whether a plan may take `option`, as far as its exactness goes."""
        return option.exact or self.all_lossy or option.technique in self.names

    def leaves_out(self, option: Option) -> bool:
        """Whether the user wants it left out."""
        return any(each.matches(option) for each in self.without)
