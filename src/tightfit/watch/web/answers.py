"""What the server answers to each address: the page, its data as JSON, metrics. Nothing is read from a path that a client names."""

import dataclasses
import json
import math
import sqlite3
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from tightfit.errors import UsageError, WatchError
from tightfit.forecast.series import Floats
from tightfit.units import parse
from tightfit.watch.machine.machine_state import MachineState
from tightfit.watch.metrics.exposition import content_type, exposition
from tightfit.watch.metrics.families import families
from tightfit.watch.outlook.admission_advice import JobAdvice
from tightfit.watch.outlook.planner import OutlookSettings
from tightfit.watch.store.stored_history import CardHistory, StoredHistory
from tightfit.watch.watching import Watching
from tightfit.watch.web.page import page_html

SPANS = (900, 3600, 21_600, 86_400, 604_800)
"""Seconds of history that can be asked for."""
_BINS, _LAYERS = 360, 12
_KEPT_SECONDS, _MAX_KEPT = 5.0, 64
_MAX_JOBS = 8
_HTML, _JSON = "text/html; charset=utf-8", "application/json; charset=utf-8"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Status, type and body of an answer."""

    status: int
    content_type: str
    body: bytes


class Answers:
    """Answers to the addresses that there are, for any thread. What costs time is worked out once in a while, and shared."""

    def __init__(self, watching: Watching, settings: OutlookSettings) -> None:
        self._watching, self._settings = watching, settings
        self._lock = threading.Lock()
        self._histories: dict[tuple[str, int], tuple[float, bytes]] = {}
        self._jobs: dict[int, JobAdvice] = {}
        self._routes: dict[str, Callable[[Mapping[str, str], str], Answer]] = {
            "/": lambda query, accept: _ok(_HTML, page_html().encode()),
            "/metrics": self._metrics,
            "/api/state.json": lambda query, accept: _json(self._state().to_json()),
            "/api/history.json": self._history,
            "/api/advice.json": self._advice,
        }

    def answer(self, path: str, query: Mapping[str, str], accept: str) -> Answer:
        """The answer to a path, with its query (the last value of each name) and the `Accept` header."""
        route = self._routes.get(path)
        if route is None:
            return failed(404, "there is nothing here")
        try:
            return route(query, accept)
        except UsageError as error:
            return failed(400, str(error))
        except LookupError as error:
            return failed(404, str(error))
        except (WatchError, sqlite3.Error) as error:
            return failed(503, str(error))

    def _state(self) -> MachineState:
        state = self._watching.state()
        if state is None:
            raise WatchError("there is no reading yet")
        return state

    def _metrics(self, query: Mapping[str, str], accept: str) -> Answer:
        kind = content_type(accept)
        return _ok(kind, exposition(families(self._state()), kind).encode())

    def _history(self, query: Mapping[str, str], accept: str) -> Answer:
        uuid, span = query.get("card", ""), query.get("seconds", "3600")
        if span not in map(str, SPANS):
            raise UsageError(f"seconds: one of {', '.join(map(str, SPANS))}")
        card = next((each for each in self._state().cards if each.reading.uuid == uuid), None)
        if card is None:
            raise LookupError("there is no such card")
        key, now = (uuid, int(span)), time.monotonic()
        # One at a time: those who ask for the same wait for it, and then have it.
        with self._lock:
            kept = self._histories.get(key)
            if kept is None or now - kept[0] >= _KEPT_SECONDS:
                history = StoredHistory(self._watching.database)
                try:
                    found = history.of_card(uuid, seconds=float(span), bins=_BINS, num_layers=_LAYERS)
                finally:
                    history.close()
                if len(self._histories) >= _MAX_KEPT:
                    self._histories.clear()
                kept = self._histories[key] = now, json.dumps(_history_json(uuid, found)).encode()
        return _ok(_JSON, kept[1])

    def _advice(self, query: Mapping[str, str], accept: str) -> Answer:
        job_bytes = parse(query.get("job", ""))
        if not 0 < job_bytes < 1 << 50:
            raise UsageError("job: write a size such as 12GiB")
        with self._lock:
            if job_bytes not in self._jobs and len(self._jobs) >= _MAX_JOBS:
                self._jobs.clear()
            advice = self._jobs.setdefault(job_bytes, JobAdvice(self._watching.database, job_bytes, self._settings))
            found = advice.of(self._state())
        return _json({"schema": 1, "job_bytes": job_bytes, "advice": [each.to_json() for each in found]})


def failed(status: int, words: str) -> Answer:
    """An answer that says what is wrong."""
    return Answer(status=status, content_type=_JSON, body=json.dumps({"error": words}).encode())


def _ok(content_type: str, body: bytes) -> Answer:
    return Answer(status=200, content_type=content_type, body=body)


def _json(value: Any) -> Answer:
    return _ok(_JSON, json.dumps(value).encode())


def _history_json(uuid: str, found: CardHistory) -> dict[str, Any]:
    return {
        "schema": 1,
        "card": uuid,
        "times": [round(each, 3) for each in found.times.tolist()],
        "used_bytes": _numbers(found.used),
        "others_bytes": _numbers(found.others),
        "processes": [
            {
                "pid": layer.pid,
                "user": layer.user,
                "command": layer.command,
                "container": layer.container,
                "used_bytes": _numbers(layer.values),
            }
            for layer in found.layers
        ],
    }


def _numbers(values: Floats) -> list[int | None]:
    """Whole bytes; None where there was no sample, as JSON has no NaN."""
    return [None if math.isnan(value) else int(value) for value in values.tolist()]
