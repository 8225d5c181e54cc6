"""A page that is served, over a machine that a test controls."""

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from tightfit.watch.agent.agent import AgentSettings
from tightfit.watch.outlook.planner import OutlookSettings
from tightfit.watch.sources.abstract_source import AbstractSource
from tightfit.watch.store.folder import StoreFolder
from tightfit.watch.watching import Watching
from tightfit.watch.web.access import Access
from tightfit.watch.web.answers import Answers
from tightfit.watch.web.server import WatchServer

SETTINGS = AgentSettings(outlooks=OutlookSettings(share=1e9))


@contextlib.contextmanager
def served(
    folder: Path, source: AbstractSource, *, address: str = "127.0.0.1", token: str | None = None
) -> Iterator[WatchServer]:
    """A server on a free port, once its agent has read the source."""
    watching = Watching(StoreFolder(folder), lambda: source, SETTINGS)
    answers = Answers(watching, SETTINGS.outlooks)
    with WatchServer(address, 0, answers, Access(address, token)) as server:
        watching.start()
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            deadline = time.monotonic() + 60
            while watching.state() is None:
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield server
        finally:
            server.shutdown()
            thread.join()
            watching.close()
    assert server.fault is None
