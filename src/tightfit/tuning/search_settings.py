"""Searches `PYTORCH_CUDA_ALLOC_CONF` for a recorded program by replaying it: the settings that reserve least, and whether they are worth it.

Every trial has the same start (see `program`). First each setting is tried by itself, with thresholds from the program's own sizes, then those
that helped are refined and combined. A trial far above the default is stopped early. The recommendation is never worse than the default or the
recorded settings on this recording, with the driver's addresses in the opposite order, and with other sizes.
"""

import dataclasses
import time
from collections.abc import Iterable, Sequence
from typing import Any

from tightfit.allocator.settings import AllocatorSettings
from tightfit.errors import UsageError
from tightfit.recordings.read import Recording
from tightfit.tuning.candidate_settings import Refused, keys_of, known_bad, needs, spelled, without_effect
from tightfit.tuning.program import Program
from tightfit.tuning.settings_search import MIN_GAIN, SettingsSearch, Trials
from tightfit.tuning.static_placement import StaticPlacement, place_statically

_SEARCHED_BY, _CHECKED_BY = 0.6, 0.75
"""The parts of the time after which the search and the checks of its result end; the rest is for the static placement."""
_NUM_ROWS = 8
_MAX_CHECKS = 12
_FITTED_PRICE = 0.05
"""What each key but expandable_segments must save, as a share of the default's bytes: such values fit one recording. On other seeds of twenty
synthetic workloads, 1 % instead chose worse than expandable segments alone in 16 of 180 cases, 5 % in none (docs/log.md)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TriedSettings:
    """One set of settings; the empty text is torch's default.

    `saved_bytes` is relative to the default, and `recovered_share` is its share of what the default reserves above the peak of allocated bytes;
    both are None where the default runs out of memory. `driver_calls` are segments or pages allocated or freed after the start.
    `is_at_least`: stopped early, so the peak may be higher.
    """

    settings: str
    peak_reserved_bytes: int
    saved_bytes: int | None
    recovered_share: float | None
    driver_calls: int
    alloc_retries: int
    fits: bool
    is_at_least: bool
    needs: tuple[str, ...]
    note: str | None

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data."""
        return dataclasses.asdict(self) | {"needs": list(self.needs)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tuning:
    """The result of a search. `recommended` are the settings to use (empty: the default), None where nothing that was tried fits.

    `as_recorded` and `given` are None where they are the default or were not given (or refused). `rows` are the best that were tried, the
    default among them, by reserved bytes. `live_bytes` is the peak of allocated blocks, a lower bound for any allocator. `is_complete`: the
    search ended before its time limit. `num_copies`: on how many copies with other sizes the recommended settings were no worse than the default and the
    recorded ones; None where they are one of these.
    """

    default: TriedSettings
    as_recorded: TriedSettings | None
    given: TriedSettings | None
    rows: tuple[TriedSettings, ...]
    refused: tuple[Refused, ...]
    recommended: TriedSettings | None
    reason: str
    live_bytes: int
    static: StaticPlacement
    capacity_bytes: int | None
    num_trials: int
    num_copies: int | None
    is_complete: bool
    elapsed_seconds: float

    def to_json(self) -> dict[str, Any]:
        """The object that `tightfit replay --tune --json` prints as `tune`."""
        return {
            "recommended": None if self.recommended is None else self.recommended.settings,
            "reason": self.reason,
            "live_bytes": self.live_bytes,
            "static": dataclasses.asdict(self.static),
            "default": self.default.to_json(),
            "as_recorded": None if self.as_recorded is None else self.as_recorded.to_json(),
            "given": None if self.given is None else self.given.to_json(),
            "rows": [row.to_json() for row in self.rows],
            "refused": [dataclasses.asdict(one) for one in self.refused],
            "capacity_bytes": self.capacity_bytes,
            "trials": self.num_trials,
            "copies_checked": self.num_copies,
            "complete": self.is_complete,
            "elapsed_seconds": round(self.elapsed_seconds, 3),
        }


def tune(
    recording: Recording,
    *,
    alloc_conf: str | None = None,
    capacity_bytes: int | None = None,
    device: int | None = None,
    seconds: float = 30.0,
    is_windows: bool = False,
) -> Tuning:
    """The settings with which the recorded program reserves least, found within about `seconds`.

    `alloc_conf` gets a row of its own. `capacity_bytes` limits reserved bytes on each device. Settings apply to a process, so the devices are
    counted together unless one is named. `is_windows`: the settings are going to be used on Windows.

    Raises:
        UsageError: the recording has no events of `device`, or torch would refuse `alloc_conf` (a pair that is only known to be bad is no error, but refused with its reason).
    """
    began = time.monotonic()
    programs = _programs(recording, device)
    trials = Trials(
        programs,
        capacity_bytes=capacity_bytes,
        deadline=began + seconds * _SEARCHED_BY,
        allows_expandable=not is_windows,
    )
    recorded = spelled(recording.settings)
    given, refused = _given(alloc_conf, is_windows=is_windows)
    trials.try_always("")
    # With the parsed settings: their text may have keys of another version of torch.
    trials.try_always(recorded, settings=recording.settings)
    if given is not None:
        trials.try_always(given)
    refused += _refusal(recorded, is_windows=is_windows) + _refusal("expandable_segments:True", is_windows=is_windows)
    is_complete = SettingsSearch(trials).run()
    rows = _Rows(trials, capacity_bytes)
    choice = _Choice(trials, rows, recorded, is_windows=is_windows, until=began + seconds * _CHECKED_BY)
    recommended, reason = choice.make()
    # What is left of the time; its bound tells how much any setting could still save.
    static = place_statically(programs, seconds=seconds * (1 - _CHECKED_BY))
    shown = [recommended] if recommended is not None else []
    return Tuning(
        default=rows.of(""),
        as_recorded=rows.of(recorded) if recorded else None,
        given=None if given is None else rows.of(given),
        rows=rows.best({"", recorded, *(row.settings for row in shown), *(() if given is None else (given,))}),
        refused=refused,
        recommended=recommended,
        reason=reason,
        live_bytes=trials.live_bytes,
        static=static,
        capacity_bytes=capacity_bytes,
        num_trials=trials.num_trials,
        num_copies=choice.num_copies,
        is_complete=is_complete,
        elapsed_seconds=time.monotonic() - began,
    )


def _programs(recording: Recording, device: int | None) -> list[Program]:
    found = [one for one in recording.devices if device in (None, one.device)]
    with_events = [one for one in found if one.num_events]
    if not with_events:
        place = recording.path if device is None else f"device {device} of {recording.path}"
        raise UsageError(
            f"{place} has no events to tune for; record with _record_memory_history() before the first step"
        )
    return [Program.of(one, recording.settings) for one in with_events]


def _given(text: str | None, *, is_windows: bool) -> tuple[str | None, tuple[Refused, ...]]:
    """The user's settings if they can be tried, and those of them that are refused."""
    if text is None:
        return None, ()
    refused = _refusal(text, is_windows=is_windows)
    try:
        AllocatorSettings.parse(text)
    # A pair that is known to be bad is refused with its reason; what torch itself refuses is the user's error.
    except UsageError:
        if refused:
            return None, refused
        raise
    return ",".join(f"{key}:{value}" for key, value in keys_of(text).items()), refused


def _refusal(text: str, *, is_windows: bool) -> tuple[Refused, ...]:
    reason = known_bad(text, is_windows=is_windows)
    return () if reason is None else (Refused(settings=text, reason=reason),)


class _Rows:
    """The trials of a search as rows."""

    def __init__(self, trials: Trials, capacity_bytes: int | None) -> None:
        self._trials = trials
        self._has_limit = capacity_bytes is not None
        default = trials.trials[""]
        self._default_bytes = default.peak_reserved_bytes if default.oom_event is None else None

    def of(self, text: str) -> TriedSettings:
        """One row."""
        trial = self._trials.trials[text]
        saved_bytes = None
        if self._default_bytes is not None and trial.oom_event is None:
            saved_bytes = self._default_bytes - trial.peak_reserved_bytes
        spare_bytes = (self._default_bytes or 0) - self._trials.live_bytes
        return TriedSettings(
            settings=text,
            peak_reserved_bytes=trial.peak_reserved_bytes,
            saved_bytes=saved_bytes,
            recovered_share=saved_bytes / spare_bytes if saved_bytes is not None and spare_bytes > 0 else None,
            driver_calls=trial.num_driver_calls,
            alloc_retries=trial.alloc_retries,
            fits=trial.oom_event is None,
            is_at_least=trial.is_cut,
            needs=needs(text),
            note=without_effect(text, has_limit=self._has_limit),
        )

    def best(self, always: Iterable[str]) -> tuple[TriedSettings, ...]:
        """The rows of `always`, and the best of each combination of keys that beats every shown one with fewer keys."""
        trials = self._trials.trials
        always = set(always)
        shown: list[str] = []
        for text in sorted(trials, key=lambda text: (len(keys_of(text)), trials[text].badness)):
            keys = keys_of(text).keys()
            # A combination must beat its own parts, or the simpler one is all that a reader needs.
            rivals = [other for other in shown if keys_of(other).keys() <= keys]
            is_sound = trials[text].oom_event is None and not trials[text].is_cut
            # Without the number of driver calls: fewer of those alone make no row worth showing.
            is_better = is_sound and all(trials[text].badness[:-1] < trials[rival].badness[:-1] for rival in rivals)
            if text in always or is_better:
                shown.append(text)
        shown.sort(key=lambda text: trials[text].badness)
        kept = {*shown[:_NUM_ROWS], *always}
        return tuple(self.of(text) for text in shown if text in kept)


class _Choice:
    """Chooses the recommendation."""

    def __init__(self, trials: Trials, rows: _Rows, recorded: str, *, is_windows: bool, until: float) -> None:
        self._trials = trials
        self._rows = rows
        # Recorded settings that are known to be bad are no baseline.
        is_sound = recorded and known_bad(recorded, is_windows=is_windows) is None
        self._baselines = ["", recorded] if is_sound else [""]
        self._is_windows = is_windows
        self._until = until
        self.num_copies: int | None = None
        """On how many copies the chosen settings were compared; None where they are a baseline."""

    def make(self) -> tuple[TriedSettings | None, str]:
        """The row to recommend, and the sentence that says why."""
        trials = self._trials.trials
        sound = [
            text
            for text, trial in trials.items()
            if trial.oom_event is None
            and not trial.is_cut
            and known_bad(text, is_windows=self._is_windows) is None
            and all(trial.is_no_worse(trials[baseline]) for baseline in self._baselines)
        ]
        # Each check on an altered copy costs as much as a trial, so only the preferred candidate is checked, until one passes.
        for _ in range(_MAX_CHECKS):
            chosen = self._preferred(sound)
            if chosen is None or chosen in self._baselines:
                break
            self.num_copies = self._trials.num_copies_passed(chosen, self._baselines, until=self._until)
            if self.num_copies is not None:
                break
            sound.remove(chosen)
        else:
            chosen = self._preferred([text for text in sound if text in self._baselines])
        if chosen is None:
            return None, "no setting that was tried makes it fit"
        return self._rows.of(chosen), self._reason(chosen)

    def _preferred(self, sound: Sequence[str]) -> str | None:
        """Of those with the fewest retries the one with the least bytes, with a price on each key; of equals the fewest driver calls."""
        trials = self._trials.trials
        fewest = min((trials[text].alloc_retries for text in sound), default=0)

        def cost(text: str) -> tuple[float, int, int]:
            trial = trials[text]
            # Each key is one more thing to explain and to keep up, so it must pay for itself.
            price = sum(MIN_GAIN if key == "expandable_segments" else _FITTED_PRICE for key in keys_of(text))
            price_bytes = price * trials[""].peak_reserved_bytes
            return trial.peak_reserved_bytes + price_bytes, trial.num_driver_calls, trial.peak_reserved_bytes

        return min((text for text in sound if trials[text].alloc_retries == fewest), key=cost, default=None)

    def _reason(self, chosen: str) -> str:
        trials, default = self._trials.trials, self._trials.trials[""]
        if chosen == "":
            min_bytes = min(trial.peak_reserved_bytes for trial in trials.values() if trial.is_calm or trial == default)
            if min_bytes >= (1 - MIN_GAIN) * default.peak_reserved_bytes:
                return f"nothing that was tried saves more than {MIN_GAIN:.0%}: keep the default"
            return "what saves more fits this recording only, or saves too little for that risk: keep the default"
        trial = trials[chosen]
        keeps = ": keep the recorded settings" if chosen in self._baselines else ""
        if default.oom_event is not None:
            return f"the default runs out of memory and this does not{keeps}"
        if trial.alloc_retries < default.alloc_retries:
            return f"{trial.alloc_retries} instead of {default.alloc_retries} allocation retries{keeps}"
        share = 1 - trial.peak_reserved_bytes / default.peak_reserved_bytes
        return f"{share:.1%} less than the default{keeps}"
