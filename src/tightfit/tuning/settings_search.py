"""The search strategy: sweeps of single settings first, then refinements and combinations of those that helped, until the time is over."""

import itertools
import time
from collections.abc import Iterable, Sequence

from tightfit.allocator.settings import NUM_INTERVALS, AllocatorSettings
from tightfit.tuning.candidate_settings import (
    EXPANDABLE,
    busy_intervals,
    divisions_text,
    joined,
    keys_of,
    known_bad,
    large_segments,
    non_split_roundings,
    roundings,
    split_thresholds_mib,
    thinned,
)
from tightfit.tuning.program import Program, Trial

MIN_GAIN = 0.01
"""Settings that save less than this share of the default's reserved bytes are not worth recommending."""
NUM_COPIES = 6
"""Of the program, with every size changed."""
_DOWNWARDS = -1
_CUT_ABOVE = 1.1
"""A trial that reserves this many times the default's bytes is stopped: it will not help in a combination either."""
_NEAR_ENOUGH = 0.002
"""The search ends when a trial is above the lower bound by no more than this share of the default's bytes."""
_NUM_REFINEMENTS = 3
_NUM_BETWEEN = 6
_ABOVE_ALL = 1 << 60
_MAX_INTERVALS = 4
_INTERVAL_DIVISIONS = (2, 4, 8, 16)
_COLLECTION_THRESHOLDS = (0.6, 0.8, 0.9)
_SPLIT, _NON_SPLIT = "max_split_size_mb", "max_non_split_rounding_mb"
_LARGE, _ROUNDUP, _PAGED = "large_segment_size_mb", "roundup_power2_divisions", "expandable_segments"


class _Enough(Exception):
    """Raised when there is nothing left to gain."""


class _TimeOver(Exception):
    """Raised when the time limit is reached."""


class Trials:
    """The trials of one or several programs, by the text of the settings."""

    def __init__(
        self, programs: Sequence[Program], *, capacity_bytes: int | None, deadline: float, allows_expandable: bool
    ) -> None:
        self.trials: dict[str, Trial] = {}
        self.num_trials = 0
        self.live_bytes = sum(program.peak_live_bytes() for program in programs)
        self._programs = programs
        self.capacity_bytes = capacity_bytes
        self._deadline = deadline
        self._allows_expandable = allows_expandable
        self._settings: dict[str, AllocatorSettings] = {}
        self._copies: dict[int, Sequence[Program]] = {}
        self._copied: dict[tuple[int, str], Trial] = {}
        self.requests: dict[int, int] = {}
        for program in programs:
            for num_bytes, count in program.requests_by_size().items():
                self.requests[num_bytes] = self.requests.get(num_bytes, 0) + count

    def try_always(self, text: str, settings: AllocatorSettings | None = None) -> Trial:
        """The trial of `text`, run to its end whatever time is left; `settings` is its meaning where the text cannot be parsed."""
        if text not in self.trials:
            self._settings[text] = AllocatorSettings.parse(text) if settings is None else settings
            self.trials[text] = self.play(self._settings[text])
        return self.trials[text]

    def num_copies_passed(self, text: str, baselines: Sequence[str], *, until: float) -> int | None:
        """On how many copies with other sizes settings are no worse than the baselines; None where they are worse on one, or with the driver's
        addresses in the opposite order.

        Copies are tried while there is time; a baseline that runs out of memory on a copy does not count there, nor does a copy on which all do.
        """
        rivals = [self._trial_of_copy(_DOWNWARDS, baseline) for baseline in baselines]
        if not all(self._trial_of_copy(_DOWNWARDS, text).is_no_worse(rival) for rival in rivals):
            return None
        num_passed = 0
        for copy in range(NUM_COPIES):
            if time.monotonic() > until:
                break
            rivals = [self._trial_of_copy(copy, baseline) for baseline in baselines]
            fitting = [rival for rival in rivals if rival.oom_event is None]
            if not all(self._trial_of_copy(copy, text).is_no_worse(rival) for rival in fitting):
                return None
            num_passed += bool(fitting)
        return num_passed

    def _trial_of_copy(self, copy: int, text: str) -> Trial:
        if (copy, text) not in self._copied:
            if copy not in self._copies:
                is_same = copy == _DOWNWARDS
                self._copies[copy] = [p if is_same else p.with_other_sizes(copy) for p in self._programs]
            # Copies are cached by seed, so that every candidate is compared on the same altered programs.
            self._copied[copy, text] = self.play(
                self._settings[text], programs=self._copies[copy], places_downwards=copy == _DOWNWARDS
            )
        return self._copied[copy, text]

    def play(
        self,
        settings: AllocatorSettings,
        *,
        programs: Sequence[Program] | None = None,
        cut_above_bytes: int | None = None,
        places_downwards: bool = False,
    ) -> Trial:
        self.num_trials += 1
        return Trial.sum_of(
            [
                program.play(
                    settings,
                    capacity_bytes=self.capacity_bytes,
                    cut_above_bytes=cut_above_bytes,
                    places_downwards=places_downwards,
                )
                for program in programs or self._programs
            ]
        )

    def try_out(self, *parts: str) -> None:
        """Tries the combination of the parts, unless it is invalid or was tried before."""
        text = joined(*parts)
        if text is None or text in self.trials or (EXPANDABLE in text and not self._allows_expandable):
            return
        if time.monotonic() > self._deadline:
            raise _TimeOver
        self._settings[text] = AllocatorSettings.parse(text)
        # Trials of the search may be cut; those that are shown in any case (try_always) may not.
        trial = self.trials[text] = self.play(self._settings[text], cut_above_bytes=self._cut_above_bytes())
        near_bytes = self.live_bytes + _NEAR_ENOUGH * self.trials[""].peak_reserved_bytes
        if trial.is_calm and trial.peak_reserved_bytes <= near_bytes:
            raise _Enough

    def _cut_above_bytes(self) -> int | None:
        """The bound above which a trial is stopped; None for several devices, whose sum says nothing of one, or if the default itself failed."""
        default = self.trials[""]
        if len(self._programs) > 1 or default.oom_event is not None:
            return None
        return int(_CUT_ABOVE * default.peak_reserved_bytes)

    def best(self, *keys: str) -> str | None:
        """The best trial with exactly these keys."""
        return self.best_of(text for text in self.trials if keys_of(text).keys() == set(keys))

    def best_of(self, texts: Iterable[str]) -> str | None:
        """The best of some trials, the first of equals; None where each was cut or ran out of memory."""
        sound = [text for text in texts if not self.trials[text].is_cut and self.trials[text].oom_event is None]
        return min(sound, key=lambda text: self.trials[text].badness, default=None)


class SettingsSearch:
    """Sweeps, refinements and combinations of settings, of which each is tried in `trials`."""

    def __init__(self, trials: Trials) -> None:
        self._trials = trials
        self._try = trials.try_out
        self._requests = trials.requests

    def run(self) -> bool:
        """Runs the search after the default was tried; False if the time was over first."""
        try:
            self._sweep()
            self._refine()
            self._combine()
            self._round_by_size()
            self._collect_garbage()
        except _Enough:
            return True
        except _TimeOver:
            return False
        return True

    def _sweep(self) -> None:
        """Tries one setting at a time, and those that are valid with expandable segments on top of them."""
        # First, because it recovers nearly all of the waste in most programs (docs/tuning.md), and may end the search at once.
        self._try(EXPANDABLE)
        default = self._trials.trials[""]
        # The default is within 1 % of the lower bound already.
        if default.is_calm and default.peak_reserved_bytes * (1 - MIN_GAIN) <= self._trials.live_bytes:
            raise _Enough
        for text in large_segments(is_expandable=True):
            self._try(EXPANDABLE, text)
        # Not on top of expandable segments: with a split limit those grow without bound (pytorch issue #123548).
        for threshold_mib in thinned(split_thresholds_mib(self._requests)):
            self._try(f"{_SPLIT}:{threshold_mib}")
        for text in large_segments(is_expandable=False):
            self._try(text)
        for text in roundings():
            self._try(text)
            self._try(EXPANDABLE, text)

    def _refine(self) -> None:
        """Tries split thresholds around the best one, then values of `max_non_split_rounding_mb` for it."""
        values = split_thresholds_mib(self._requests)
        for _ in range(_NUM_REFINEMENTS):
            best = self._trials.best(_SPLIT)
            if best is None:
                return
            # A grid refinement between the neighbours of the best threshold: the peak is not monotonic in it.
            at = int(keys_of(best)[_SPLIT])
            tried = [int(keys_of(text)[_SPLIT]) for text in self._trials.trials if _SPLIT in keys_of(text)]
            below = max((value for value in tried if value < at), default=0)
            above = min((value for value in tried if value > at), default=_ABOVE_ALL)
            for value in thinned([value for value in values if below < value < above], _NUM_BETWEEN):
                self._try(f"{_SPLIT}:{value}")
        best = self._trials.best(_SPLIT)
        if best is not None:
            for text in non_split_roundings(int(keys_of(best)[_SPLIT])):
                self._try(best, text)

    def _combine(self) -> None:
        """Tries the best of each setting in pairs and triples."""
        splits = [self._trials.best(_SPLIT), self._trials.best(_SPLIT, _NON_SPLIT)]
        others = [self._trials.best(_ROUNDUP), self._trials.best(_LARGE)]
        paged = [self._trials.best(_PAGED, _ROUNDUP), self._trials.best(_PAGED, _LARGE)]
        for parts in (paged, *itertools.product(splits, others), others, *((split, *others) for split in splits)):
            texts = [text for text in parts if text is not None]
            # A setting without a sound trial takes part in no combination.
            if len(texts) == len(parts):
                self._try(*texts)

    def _round_by_size(self) -> None:
        """Coordinate descent over the divisions of each size interval, on top of the best settings without rounding."""
        # Both, as expandable segments may not be available where the settings are used.
        for is_paged in (True, False):
            base = self._trials.best_of(
                text
                for text in self._trials.trials
                if _ROUNDUP not in keys_of(text) and (EXPANDABLE in text) == is_paged and known_bad(text) is None
            )
            if base is None:
                continue
            divisions, best = (1,) * NUM_INTERVALS, base
            for interval in busy_intervals(self._requests)[:_MAX_INTERVALS]:
                unrounded = divisions
                for count in _INTERVAL_DIVISIONS:
                    changed = (*unrounded[:interval], count, *unrounded[interval + 1 :])
                    text = joined(base, divisions_text(changed))
                    self._try(base, divisions_text(changed))
                    if text in self._trials.trials and self._trials.best_of((best, text)) != best:
                        best, divisions = text, changed

    def _collect_garbage(self) -> None:
        """Tries garbage collection where memory is limited; without a limit torch never collects."""
        if self._trials.capacity_bytes is None:
            return
        base = self._trials.best_of(text for text in self._trials.trials if EXPANDABLE not in text)
        for threshold in _COLLECTION_THRESHOLDS:
            self._try(f"garbage_collection_threshold:{threshold}")
            self._try(base or "", f"garbage_collection_threshold:{threshold}")
