"""The server: what it answers, to whom, and how little a client can do to it."""

import http.client
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.watch.machines import ScriptedSource
from tests.watch.served import served

from tightfit.errors import UsageError
from tightfit.units import GIB
from tightfit.watch.web import request_reader
from tightfit.watch.web import server as server_module
from tightfit.watch.web.access import Access
from tightfit.watch.web.server import WatchServer

TOKEN = "a secret of some length"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchServer]:
    with served(tmp_path_factory.mktemp("store"), ScriptedSource({10: 3 * GIB})) as found:
        yield found


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WatchServer]:
    with served(tmp_path_factory.mktemp("store"), ScriptedSource({10: GIB}), address="0.0.0.0", token=TOKEN) as found:
        yield found


def ask(server: WatchServer, path: str, *, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=30)
    try:
        connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def raw(server: WatchServer, data: bytes) -> bytes:
    """What comes back for these bytes, until the server closes the connection."""
    with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
        try:
            connection.sendall(data)
            found = b""
            while piece := connection.recv(65536):
                found += piece
        except ConnectionResetError:
            pass
        return found


class TestAnswers:
    def test_the_page_loads_and_runs_nothing_but_what_is_in_it(self, server: WatchServer) -> None:
        status, headers, body = ask(server, "/")
        assert status == 200
        assert b"http" not in body.replace(b"http://www.w3.org/2000/svg", b"")
        policy = headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
        assert (headers["X-Content-Type-Options"], headers["Referrer-Policy"]) == ("nosniff", "no-referrer")
        assert headers["Server"] == "tightfit"

    def test_state_history_and_advice_are_json(self, server: WatchServer) -> None:
        state = json.loads(ask(server, "/api/state.json")[2])
        assert state["processes"][0]["used_bytes"] == 3 * GIB
        history = json.loads(ask(server, "/api/history.json?card=GPU-0&seconds=900")[2])
        assert history["used_bytes"][-1] == 3 * GIB
        assert (history["schema"], history["processes"][0]["pid"]) == (1, 10)
        advice = json.loads(ask(server, "/api/advice.json?job=12GiB")[2])
        assert advice["job_bytes"] == 12 * GIB

    def test_metrics_in_both_formats(self, server: WatchServer) -> None:
        assert ask(server, "/metrics")[1]["Content-Type"].startswith("text/plain; version=0.0.4")
        status, headers, body = ask(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0")
        assert status == 200
        assert headers["Content-Type"].startswith("application/openmetrics-text")
        assert body.endswith(b"# EOF\n")

    def test_head_is_get_without_the_body(self, server: WatchServer) -> None:
        status, headers, body = ask(server, "/", method="HEAD")
        assert (status, body) == (200, b"")
        assert int(headers["Content-Length"]) > 10_000

    @pytest.mark.parametrize(
        ("path", "status"),
        [
            ("/nothing", 404),
            ("/../../../../etc/passwd", 404),
            ("/%2e%2e/%2e%2e/etc/passwd", 404),
            ("//etc/passwd", 404),
            ("/page/scripts/main.js", 404),
            ("/api/state.json/..", 404),
            ("/api/history.json", 404),
            ("/api/history.json?card=GPU-0%27%3B%20DROP%20TABLE%20cards", 404),
            ("/api/history.json?card=GPU-0&seconds=1e9", 400),
            ("/api/history.json?card=GPU-0&seconds=-1", 400),
            ("/api/advice.json", 400),
            ("/api/advice.json?job=much", 400),
            ("/api/advice.json?job=-1GiB", 400),
            ("/api/advice.json?job=999999999TiB", 400),
            ("/api/advice.json?" + "&".join(f"a{i}=1" for i in range(50)), 400),
        ],
    )
    def test_anything_else_is_an_error_without_a_trace(self, server: WatchServer, path: str, status: int) -> None:
        found, _, body = ask(server, path)
        assert found == status
        assert set(json.loads(body)) == {"error"}
        assert b"Traceback" not in body

    @pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE"])
    def test_there_is_nothing_but_reading(self, server: WatchServer, method: str) -> None:
        assert ask(server, "/", method=method)[0] == 501

    @pytest.mark.parametrize("target", [b"http://[", b"http://[::1", b"http://\xe2\x84\x80[/"])
    def test_a_target_that_is_no_address_is_refused_and_ends_nothing(
        self, server: WatchServer, guarded: WatchServer, target: bytes
    ) -> None:
        for each in (server, guarded):
            assert raw(each, b"GET " + target + b" HTTP/1.1\r\nHost: localhost\r\n\r\n").split()[1] in (b"400", b"401")
            assert each.fault is None

    def test_a_fault_of_ours_ends_that_request_alone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        with served(tmp_path, ScriptedSource({10: GIB})) as server:
            with monkeypatch.context() as patch:
                patch.setattr(server.answers, "answer", lambda *_: {}["secret"])
                status, _, body = ask(server, "/")
            assert (status, b"secret" in body) == (500, False)
            assert isinstance(server.fault, KeyError)
            assert ask(server, "/")[0] == 200
            server.fault = None


class TestAccess:
    @pytest.mark.parametrize("host", ["localhost:1234", "127.0.0.1", "[::1]:80", "127.0.0.2"])
    def test_by_a_name_of_this_machine(self, server: WatchServer, host: str) -> None:
        assert ask(server, "/api/state.json", Host=host)[0] == 200

    @pytest.mark.parametrize(
        "host", ["evil.example", "evil.example:8778", "127.0.0.1.evil.example", "", "10.0.0.1", "[::2]"]
    )
    def test_a_name_that_was_pointed_here_is_refused(self, server: WatchServer, host: str) -> None:
        assert ask(server, "/api/state.json", Host=host)[0] == 403

    @pytest.mark.parametrize("path", ["/", "/metrics", "/api/state.json", "/nothing"])
    def test_without_the_token_there_is_nothing(self, guarded: WatchServer, path: str) -> None:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": f"Basic {TOKEN}"},
            {"Cookie": f"tightfit_watch={TOKEN}"},
        ):
            status, sent, body = ask(guarded, path, **headers)
            assert (status, sent["WWW-Authenticate"]) == (401, "Bearer")
            assert TOKEN.encode() not in body
        assert ask(guarded, f"{path}?token=wrong")[0] == 401
        assert ask(guarded, f"{path}?token=%C3%A9%FF")[0] == 401

    def test_with_the_token_and_for_browsers_with_a_cookie_that_is_another_secret(self, guarded: WatchServer) -> None:
        assert ask(guarded, "/metrics", Authorization=f"Bearer {TOKEN}")[0] == 200
        status, headers, _ = ask(guarded, f"/?token={TOKEN.replace(' ', '+')}")
        assert (status, headers["Location"]) == (303, "/")
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and TOKEN not in cookie
        assert ask(guarded, "/api/state.json", Cookie=cookie.partition(";")[0], Host="node-1.example")[0] == 200

    @pytest.mark.parametrize(
        ("address", "token"),
        [("0.0.0.0", None), ("::", None), ("node-1", None), ("0.0.0.0", "short"), ("127.0.0.1", "é" * 20)],
    )
    def test_others_are_not_let_in_without_a_secret(self, address: str, token: str | None) -> None:
        with pytest.raises(UsageError, match="--token"):
            Access(address, token)


class TestClients:
    def test_a_request_without_an_end_is_cut_off(self, server: WatchServer) -> None:
        for data in (
            b"GET /" + b"a" * 100_000,
            b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"A: b\r\n" * 20_000,
            b"GET / HTTP/1.1\r\nHost: localhost\r\nA: " + b"b" * 200_000,
        ):
            # Too many headers have an answer of Python's own.
            assert raw(server, data).split(b"\r\n")[0] in (b"", b"HTTP/1.0 431 Too many headers")
        assert raw(server, b"GET /api/state.json\r\n\r\n") == b""
        assert ask(server, "/api/state.json")[0] == 200

    @pytest.mark.parametrize(
        "data", [b"", b"\x00\xff\r\n\r\n", b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n"]
    )
    def test_what_is_no_request_harms_nothing(self, server: WatchServer, data: bytes) -> None:
        with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
            connection.sendall(data)
        assert ask(server, "/api/state.json")[0] == 200

    def test_a_client_that_dribbles_has_its_time(self, server: WatchServer, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(request_reader, "_SECONDS", 0.3)
        with socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30) as connection:
            connection.sendall(b"GET / HTT")
            assert connection.recv(1) == b""

    def test_so_many_connections_and_no_more(self, server: WatchServer) -> None:
        held = [
            socket.create_connection(("127.0.0.1", server.server_address[1]), timeout=30)
            for _ in range(server_module.MAX_CONNECTIONS)
        ]
        try:
            assert raw(server, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") == b""
        finally:
            for connection in held:
                connection.close()
        for _ in range(100):
            if raw(server, b"GET /api/state.json HTTP/1.1\r\nHost: localhost\r\n\r\n"):
                break
        assert ask(server, "/api/state.json")[0] == 200

    def test_a_port_that_is_taken(self, server: WatchServer) -> None:
        with pytest.raises(UsageError, match="in use; name another with --port"):
            WatchServer("127.0.0.1", server.server_address[1], server.answers, server.access)
        for address, port in (("127.0.0.1", 70_000), ("no.such.host.invalid", 0)):
            with pytest.raises(UsageError, match="--port"):
                WatchServer(address, port, server.answers, server.access)


def test_before_the_first_reading_it_says_so(tmp_path: Path) -> None:
    source = ScriptedSource({})
    source.is_lost = True
    from tests.watch.served import SETTINGS

    from tightfit.watch.store.folder import StoreFolder
    from tightfit.watch.watching import Watching
    from tightfit.watch.web.answers import Answers

    watching = Watching(StoreFolder(tmp_path), lambda: source, SETTINGS)
    watching.start()
    answer = Answers(watching, SETTINGS.outlooks).answer("/api/state.json", {}, "")
    watching.close()
    assert (answer.status, json.loads(answer.body)) == (503, {"error": "there is no reading yet"})
