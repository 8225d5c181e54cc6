"""The settings of the allocator for a traced run: replayed, not traced again, as they change no operator."""

from collections.abc import Callable, Iterable

from tightfit.fit.searching.offers import Offers
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.planner.option import Option


class AllocatorChoice:
    """Replays runs with what the techniques offer to do to the allocator. `fits` says whether a run is within the budget."""

    def __init__(self, runs: TracedRuns, offers: Offers, fits: Callable[[TracedRun], bool]) -> None:
        self._runs = runs
        self._offers = offers
        self._fits = fits

    def smallest(self, run: TracedRun) -> TracedRun:
        """The run with those settings of the allocator with which it holds least."""
        runs = self.with_each(run)
        return min(runs, key=lambda each: (each.needed_bytes, each.seconds))

    def best(self, run: TracedRun, settings: Iterable[str], *, only_free: bool = False) -> TracedRun:
        """The run with the user's settings, if it fits with them; else with what the techniques `settings` do to the allocator: the fastest
        that fits, or what holds least. `only_free`: with those that take no time."""
        if self._fits(run):
            return run
        options = [option for name in sorted(settings) for option in self._offers.of(name, run.profile)]
        others = self._replayed(run, [o for o in options if not (only_free and o.seconds > 0)])
        return min(others, key=lambda r: (not self._fits(r), r.seconds if self._fits(r) else 0.0, r.needed_bytes))

    def with_each(self, run: TracedRun) -> list[TracedRun]:
        """The run as it is, and with each setting that is offered for it."""
        return self._replayed(run, self._offers.of_the_allocator(run.profile))

    def _replayed(self, run: TracedRun, options: Iterable[Option]) -> list[TracedRun]:
        return [run, *(self._runs.with_settings(run, option) for option in options)]
