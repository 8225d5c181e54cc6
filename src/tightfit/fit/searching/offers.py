"""What the techniques offer on a profile, without what the user leaves out, the program's effects forbid, or was refused on the way."""

from collections.abc import Iterable, Sequence

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.errors import ApplyError, CaptureError
from tightfit.errors.faults import answering
from tightfit.fit.searching.allowed import Allowed
from tightfit.fit.searching.permitted import obstacle
from tightfit.fit.searching.refusals import Refusals
from tightfit.fit.traced_runs import TracedRuns
from tightfit.planner.option import Option
from tightfit.tape import Assumption, Tape
from tightfit.techniques.registry import techniques


class Offers:
    """The options of one search, but for its `refusals`."""

    def __init__(self, runs: TracedRuns, allowed: Allowed) -> None:
        self.refusals = Refusals()
        self.notes: list[Assumption] = []
        """What was to be left out and is not there."""
        self._runs = runs
        self._allowed = allowed
        self._has_checked: set[str] = set()
        self._forbidden: dict[str, Option] = {}
        self._offered: dict[tuple[str, Profile], list[Option]] = {}

    @property
    def forbidden(self) -> tuple[Option, ...]:
        """Lossy options that the user does not allow."""
        return tuple(self._forbidden.values())

    def options(self, profile: Profile) -> list[Option]:
        """What the techniques offer on `profile`, but for what is not allowed or was refused."""
        return self._options_of(techniques(), profile)

    def of_the_allocator(self, profile: Profile) -> list[Option]:
        """Those of `options(profile)` that are the allocator's. The other techniques, which take longer, are not asked."""
        return self._options_of((name for name, each in techniques().items() if each.of_the_allocator), profile)

    def places(self, profile: Profile) -> set[tuple[str, str]]:
        """The technique and the place of each of `options(profile)`."""
        return {(option.technique, option.where) for option in self.options(profile)}

    def options_beside(self, later: Profile, profile: Profile) -> list[Option]:
        """As `options(later)`, without those of techniques all of whose options on `profile` need a new trace or are the allocator's: what
        these change is found by a trace or a replay."""
        names = []
        for name in techniques():
            offered = [] if name in self.refusals.techniques else self.of(name, profile)
            if not offered or any(not (o.needs_new_trace or o.is_of_the_allocator) for o in offered):
                names.append(name)
        return self._options_of(names, later)

    def _options_of(self, names: Iterable[str], profile: Profile) -> list[Option]:
        found = []
        for name in names:
            if name in self.refusals.techniques:
                continue
            for option in self.of(name, profile):
                if self.refusals.is_refused_at(option):
                    continue
                if self._allowed.permits(option):
                    found.append(option)
                else:
                    self._forbidden.setdefault(option.key, option)
        return found

    def of(self, name: str, profile: Profile) -> list[Option]:
        """What one technique offers on `profile` and the effects of the program permit, asked once."""
        if (name, profile) not in self._offered:
            with answering(f"technique {name}", technique=name):
                offered = list(techniques()[name].options(profile))
                of_the_allocator = techniques()[name].of_the_allocator
                assert all(option.is_of_the_allocator is of_the_allocator for option in offered), "of_the_allocator"
            if name not in self._has_checked:
                self._has_checked.add(name)
                places = _modules(profile.tape) | {option.where for option in offered}
                note = self._allowed.check_places(name, places, has_options=bool(offered))
                if note is not None:
                    self.notes.append(Assumption(where=name, what=note))
            wanted = [option for option in offered if not self._allowed.leaves_out(option)]
            self._offered[name, profile] = [option for option in wanted if self._is_permitted(option, profile)]
        return self._offered[name, profile]

    def _is_permitted(self, option: Option, profile: Profile) -> bool:
        effect = obstacle(profile.tape, option, techniques()[option.technique].needs)
        if effect is not None and self._allowed.permits(option):
            self.refusals.forbid(option, effect.reason)
        return effect is None

    def refuse(self, options: Sequence[Option], error: ApplyError | CaptureError) -> None:
        """Leaves out from now on what is to blame for `error`, which came of a run with `options`: a place, or a technique."""
        names = list(dict.fromkeys(option.technique for option in options))
        if isinstance(error, ApplyError) and error.technique in names:
            reason = str(error).removeprefix(f"{error.technique}: ")
            offered = [o for (name, _), found in self._offered.items() if name == error.technique for o in found]
            self.refusals.refuse_at(error.technique, error.places, reason, chosen=options, offered=offered)
            if not error.places:
                self.refusals.techniques[error.technique] = reason
            return
        for name in names:
            if len(names) > 1:
                try:
                    self._runs.run_with([option for option in options if option.technique == name])
                except (ApplyError, CaptureError) as own:
                    self.refusals.techniques[name] = str(own)
            else:
                self.refusals.techniques[name] = str(error)
        if not any(name in self.refusals.techniques for name in names):
            self.refusals.techniques[names[-1]] = str(error)


def _modules(tape: Tape) -> frozenset[str]:
    """The paths of the modules that ran, and of those that they are parts of."""
    inside = {tape.strings[index] for index in np.unique(tape.operators.module).tolist()}
    paths = set()
    for path in inside:
        parts = path.split(".")
        paths.update(".".join(parts[:end]) for end in range(1, len(parts) + 1))
    return frozenset(paths)
