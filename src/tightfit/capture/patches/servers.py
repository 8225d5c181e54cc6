"""A script that starts a server waits for requests from then on, and a trace has none: it ends there."""

import functools
import threading
import types
from collections.abc import Callable
from typing import Any

from tightfit.capture.patches.libraries import answer_at_import
from tightfit.errors import faults

# What the main thread calls, and does not come back from. Others of Python's and of most small frameworks (http.server, wsgiref, Flask, Bottle) are the first one.
_WAIT_FOR_REQUESTS = {
    "socketserver": ("BaseServer.serve_forever",),
    "uvicorn.server": ("Server.run", "Server.serve"),
    "hypercorn.asyncio": ("serve",),
    "waitress": ("serve",),
    "aiohttp.web": ("run_app",),
    "tornado.ioloop": ("IOLoop.start",),
    "sanic.app": ("Sanic.run",),
    "gradio.blocks": ("Blocks.launch",),
    "litserve.server": ("LitServer.run",),
}


def install(starts: Callable[[], None]) -> None:
    """Calls `starts` where the program's main thread is about to wait for requests."""
    for module, names in _WAIT_FOR_REQUESTS.items():
        answer_at_import(module, functools.partial(_watch, names, starts))


def _watch(names: tuple[str, ...], starts: Callable[[], None], module: types.ModuleType) -> None:
    for name in names:
        owner, _, function = name.rpartition(".")
        held = getattr(module, owner, None) if owner else module
        serve = getattr(held, function, None)
        if held is not None and serve is not None:
            setattr(held, function, _watched(serve, starts))


def _watched(serve: Callable[..., Any], starts: Callable[[], None]) -> Callable[..., Any]:
    @faults.hands_over
    @functools.wraps(serve)
    def watched(*args: Any, **kwargs: Any) -> Any:
        # Gradio's server may be in a thread of its own, beside what the program does next.
        is_beside = kwargs.get("prevent_thread_lock") or threading.current_thread() is not threading.main_thread()
        if not is_beside:
            starts()
        return serve(*args, **kwargs)

    return watched
