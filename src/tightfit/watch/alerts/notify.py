"""Where notices go: a log, a webhook, a command; each in a thread of its own, with an end to how long it may take."""

import contextlib
import json
import os
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from pathlib import Path

from tightfit.watch.alerts.alert_rules import AlertSettings
from tightfit.watch.alerts.episodes import Notice
from tightfit.watch.background import Background

_MAX_WAITING = 256
_SECONDS = 10.0
_COMMAND_SECONDS = 30.0
_PAUSES = (1.0, 5.0, 25.0)
"""Before the second, third and fourth attempt to reach a webhook."""


def open_channels(settings: AlertSettings) -> tuple[Background[Notice], ...]:
    """A thread for each place that the settings name."""
    handlers: dict[str, Callable[[Notice], None]] = {}
    if settings.log is not None:
        handlers["alert log"] = LogFile(settings.log)
    if settings.webhook:
        handlers["alert webhook"] = Webhook(settings.webhook, settings.webhook_headers)
    if settings.command:
        handlers["alert command"] = Command(settings.command)
    return tuple(Background(name, handle, max_waiting=_MAX_WAITING) for name, handle in handlers.items())


class LogFile:
    """A line of JSON for each notice. The file is opened anew each time, so that it can be rotated."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __call__(self, notice: Notice) -> None:
        """Appends the notice.

        Raises:
            OSError: the file cannot be written.
        """
        with open(self._path, "ab") as file:
            # One write, so that lines of two agents do not mix.
            file.write(json.dumps(notice.to_json()).encode() + b"\n")


class Webhook:
    """An HTTP POST of JSON for each notice, tried again where the other side does not answer or says that it failed (5xx, 429)."""

    def __init__(self, url: str, headers: Mapping[str, str], *, pauses: tuple[float, ...] = _PAUSES) -> None:
        self._url, self._pauses = url, pauses
        self._headers = {"Content-Type": "application/json", "User-Agent": "tightfit", **headers}
        self._opener = urllib.request.build_opener(_NoRedirects)

    def __call__(self, notice: Notice) -> None:
        """Sends the notice.

        Raises:
            OSError: it was not taken, after all attempts.
        """
        body = json.dumps(notice.to_json()).encode()
        for attempt in range(len(self._pauses) + 1):
            try:
                request = urllib.request.Request(self._url, body, self._headers)
                # The answer is not read: its status says all.
                with self._opener.open(request, timeout=_SECONDS):
                    return
            except urllib.error.HTTPError as error:
                error.close()
                if attempt == len(self._pauses) or (error.code < 500 and error.code != 429):
                    raise OSError(f"HTTP {error.code}") from None
            except (OSError, HTTPException) as error:
                if attempt == len(self._pauses):
                    raise OSError(getattr(error, "reason", None) or str(error) or type(error).__name__) from None
            time.sleep(self._pauses[attempt])


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """The address is the one that was written, and gets what its headers hold."""

    def redirect_request(self, *_: object) -> None:  # type: ignore[override]
        return None


class Command:
    """A program for each notice: arguments with `{event}`, `{rule}`, `{subject}`, `{message}` filled in, no shell, and the notice as JSON on its standard input."""

    def __init__(self, arguments: tuple[str, ...], *, seconds: float = _COMMAND_SECONDS) -> None:
        self._arguments, self._seconds = arguments, seconds

    def __call__(self, notice: Notice) -> None:
        """Runs the program to its end.

        Raises:
            OSError: it cannot be started, fails, or takes too long and is killed.
        """
        content = notice.to_json()
        words = {key: str(content[key]) for key in ("event", "host", "rule", "subject", "message")}
        arguments = [self._arguments[0], *(_filled(each, words) for each in self._arguments[1:])]
        with subprocess.Popen(
            arguments,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            # A group of its own, so that what it has started ends with it, and Ctrl-C is not for it.
            start_new_session=True,
        ) as process:
            try:
                process.communicate(json.dumps(content).encode() + b"\n", timeout=self._seconds)
            except subprocess.TimeoutExpired:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise OSError(f"{self._arguments[0]} was killed after {self._seconds:.0f} s") from None
        if process.returncode:
            raise OSError(f"{self._arguments[0]} ended with {process.returncode}")


def _filled(argument: str, words: Mapping[str, str]) -> str:
    """The argument with the words in it, in one pass: braces in a process's name are not filled in again."""
    parts = argument.split("{")
    filled = [parts[0]]
    for part in parts[1:]:
        name, closing, rest = part.partition("}")
        filled.append(f"{words[name]}{rest}" if closing and name in words else "{" + part)
    return "".join(filled)
