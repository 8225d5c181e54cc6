"""A script that starts a server is traced up to there; where nothing has called a model before, a line says what to do."""

from pathlib import Path

import pytest

from tightfit import fit
from tightfit.capture.trace_settings import TraceSettings
from tightfit.errors import CaptureError
from tightfit.tape import SpanKind, Tape

_SERVES = """
import asyncio
import http.server
import threading

import torch

model = torch.nn.Linear(256, 256).cuda()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        predict()


def predict():
    with torch.no_grad():
        return model(torch.zeros(4, 256, device="cuda")).sum().item()


{before}
{server}
"""
_OF_PYTHON = 'http.server.HTTPServer(("127.0.0.1", 0), Handler).serve_forever()'
_OF_A_LIBRARY = "import uvicorn\nuvicorn.run(None)"
_OF_GRADIO = "import gradio.blocks\ngradio.blocks.Blocks().launch(prevent_thread_lock=True)"
_UVICORN = """
import asyncio


class Server:
    async def serve(self):
        await asyncio.sleep(60)

    def run(self):
        asyncio.run(self.serve())
"""


def _traced(folder: Path, **parts: str) -> Tape:
    (folder / "uvicorn").mkdir()
    (folder / "uvicorn" / "__init__.py").write_text(
        "from uvicorn.server import Server\n\n\ndef run(app):\n    Server().run()\n"
    )
    (folder / "uvicorn" / "server.py").write_text(_UVICORN)
    (folder / "gradio").mkdir()
    (folder / "gradio" / "blocks.py").write_text("class Blocks:\n    def launch(self, **options): ...\n")
    path = folder / "app.py"
    path.write_text(_SERVES.format(**{"before": "", "server": _OF_PYTHON, **parts}))
    return fit.capture(str(path), device="RTX 4090", tracing=TraceSettings(timeout=20))


@pytest.mark.parametrize("server", [_OF_PYTHON, _OF_A_LIBRARY], ids=["of Python", "of a library"])
def test_what_ran_before_it_counts(server: str, tmp_path: Path) -> None:
    tape = _traced(tmp_path, before="predict()", server=server)
    assert list(tape.spans.kind).count(SpanKind.STEP) == 1
    assert tape.coverage.stopped == "it waits for requests"
    assert ".py:" in tape.coverage.left_at


@pytest.mark.parametrize("server", [_OF_PYTHON, _OF_A_LIBRARY], ids=["of Python", "of a library"])
def test_one_that_has_called_nothing_is_told_what_to_do(server: str, tmp_path: Path) -> None:
    with pytest.raises(
        CaptureError, match=r"\.py:\d+ starts a server and waits for requests.*call the request handler once"
    ):
        _traced(tmp_path, server=server)


@pytest.mark.parametrize(
    "started",
    [f"threading.Thread(target={_OF_PYTHON.removesuffix('()')}, daemon=True).start()", _OF_GRADIO],
    ids=["thread", "gradio"],
)
def test_a_server_in_a_thread_is_none_of_it(started: str, tmp_path: Path) -> None:
    tape = _traced(tmp_path, before=started, server="predict()")
    assert not tape.coverage.stopped
