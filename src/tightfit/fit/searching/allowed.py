"""What a user allows a plan to take, and what is left out on request."""

import dataclasses
import difflib
import fnmatch

from tightfit.errors import UsageError
from tightfit.fit.searching.permitted import modules_of
from tightfit.planner.option import Option

# Places of options that are of no module, and so of a program that has none of them too, as one without an optimizer.
_OF_NO_MODULE = frozenset({"allocator", "batch", "batches", "gradients", "optimizer", "precision"})


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

    def check_places(self, technique: str, modules: frozenset[str], *, has_options: bool = True) -> str | None:
        """Checks that what is to be left out names modules of the program; the sentence about it where there is nothing to leave out, as the technique has
        no options.

        Raises:
            UsageError: a place is none; leaving out nothing would look like a plan without it.
        """
        places = [place for each in self.without if each.technique == technique for place in each.places]
        known = modules if has_options else modules | _OF_NO_MODULE
        for place in places:
            if not any(fnmatch.fnmatchcase(module, place) for module in known):
                near = difflib.get_close_matches(place, known, n=3, cutoff=0.5)
                hint = f" (did you mean {' or '.join(near)}?)" if near else ""
                raise UsageError(f"--without {technique}@{place}: the program runs no module of that name{hint}")
        if has_options or not places:
            return None
        return (
            f"--without {technique}@{','.join(places)}: nothing is left out; {technique} has no place in this program"
        )
