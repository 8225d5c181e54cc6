"""A headless Chromium, told what to do by chromedriver over HTTP (W3C WebDriver), with nothing but the standard library."""

import base64
import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_FLAGS = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--no-first-run", "--window-size=1400,1000"),
)
_KEYS = {"Tab": "\ue004", "Enter": "\ue007", "Shift": "\ue008", "Escape": "\ue00c", "End": "\ue010", "Home": "\ue011"}
_KEYS |= {"Left": "\ue012", "Right": "\ue014", "PageUp": "\ue00e", "PageDown": "\ue00f"}
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One window of a browser."""

    def __init__(self, session: str) -> None:
        self._session = session

    def open(self, path: Path) -> None:
        """Opens a file, and waits until it has drawn itself."""
        self.logs("performance")
        self.logs("browser")
        self.send("url", {"url": path.as_uri()})
        self.wait("return document.documentElement.dataset.ready === 'true'")

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns in the page."""
        return self.send("execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, seconds: float = 10.0) -> None:
        """Waits until a script returns something true."""
        deadline = time.monotonic() + seconds
        while not self.run(script):
            assert time.monotonic() < deadline, f"never came true: {script}; the console says {self.logs('browser')}"
            time.sleep(0.02)

    def press(self, *keys: str, shift: bool = False) -> None:
        """Presses keys one after another, where the focus is."""
        actions = [{"type": "keyDown", "value": _KEYS["Shift"]}] if shift else []
        for key in keys:
            value = _KEYS.get(key, key)
            actions += [{"type": "keyDown", "value": value}, {"type": "keyUp", "value": value}]
        actions += [{"type": "keyUp", "value": _KEYS["Shift"]}] if shift else []
        self._act({"type": "key", "id": "keys", "actions": actions})

    def click(self, selector: str) -> None:
        """Clicks the first element that a selector finds, as a mouse does."""
        found = self.send("element", {"using": "css selector", "value": selector})
        self.send(f"element/{found[_ELEMENT]}/click", {})

    def drag(self, selector: str, from_x: int, to_x: int) -> None:
        """Drags with the mouse inside an element, by pixels from its middle."""
        origin = self.send("element", {"using": "css selector", "value": selector})
        moves = [{"type": "pointerMove", "origin": origin, "x": x, "y": 0, "duration": 20} for x in (from_x, to_x)]
        actions = [moves[0], {"type": "pointerDown", "button": 0}, moves[1], {"type": "pointerUp", "button": 0}]
        self._act({"type": "pointer", "id": "mouse", "parameters": {"pointerType": "mouse"}, "actions": actions})

    def wheel(self, selector: str, down: int) -> None:
        """Turns the wheel over the middle of an element."""
        origin = self.send("element", {"using": "css selector", "value": selector})
        action = {"type": "scroll", "origin": origin, "x": 0, "y": 0, "deltaX": 0, "deltaY": down, "duration": 0}
        self._act({"type": "wheel", "id": "wheel", "actions": [action]})

    def pinch(self, selector: str, from_x: int, to_x: int) -> None:
        """Moves two fingers on an element, each on its side of the middle, from so many pixels away to so many."""
        origin = self.send("element", {"using": "css selector", "value": selector})
        sources = []
        for side in (-1, 1):
            moves = [
                {"type": "pointerMove", "origin": origin, "x": side * x, "y": 0, "duration": 50} for x in (from_x, to_x)
            ]
            actions = [moves[0], {"type": "pointerDown", "button": 0}, moves[1], {"type": "pointerUp", "button": 0}]
            touch = {"type": "pointer", "id": f"finger{side}", "parameters": {"pointerType": "touch"}}
            sources.append(touch | {"actions": actions})
        self.send("actions", {"actions": sources})

    def devtools(self, command: str, **parameters: Any) -> Any:
        """A command of the DevTools protocol."""
        return self.send("goog/cdp/execute", {"cmd": command, "params": parameters})

    def logs(self, kind: str) -> list[dict[str, Any]]:
        """What the browser has logged of a kind since it was last asked: `browser` is the console, `performance` the network too."""
        return self.send("se/log", {"type": kind})

    def requested(self) -> list[str]:
        """The addresses that were asked for since the page was opened, but for those of the browser's own first page."""
        messages = [json.loads(entry["message"])["message"] for entry in self.logs("performance")]
        requests = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
        return [r["request"]["url"] for r in requests if not r["documentURL"].startswith("chrome")]

    def picture(self, path: Path) -> None:
        """Writes what the window shows as a PNG."""
        with urllib.request.urlopen(f"{self._session}/screenshot", timeout=60) as answer:
            path.write_bytes(base64.b64decode(json.load(answer)["value"]))

    def send(self, command: str, body: dict[str, Any]) -> Any:
        """One command of the WebDriver protocol."""
        return _post(f"{self._session}/{command}", body)

    def _act(self, source: dict[str, Any]) -> None:
        self.send("actions", {"actions": [source]})


def _post(url: str, body: dict[str, Any]) -> Any:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{url.rpartition('/')[2]}: {json.load(error)['value']['message']}") from None


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a fresh profile in that folder; the test is skipped where Chromium or its driver is not installed."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs chromium and chromedriver (Debian: apt-get install chromium chromium-driver)")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([driver, f"--port={port}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait_for_port(port)
        options = {"binary": chromium, "args": [*_FLAGS, f"--user-data-dir={profile}"]}
        wanted = {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"}}
        url = f"http://127.0.0.1:{port}/session"
        session = f"{url}/{_post(url, {'capabilities': {'alwaysMatch': wanted}})['sessionId']}"
        try:
            yield Browser(session)
        finally:
            urllib.request.urlopen(urllib.request.Request(session, method="DELETE"), timeout=60).close()
    finally:
        process.terminate()
        process.wait()


def _wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.05)
    raise AssertionError("chromedriver does not answer")
