"""The server: GET and HEAD, one answer a connection, few connections at a time, nothing that a client sends without an end."""

import io
import socket
import socketserver
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from tightfit.errors import TightfitError, UsageError
from tightfit.watch.web.access import Access
from tightfit.watch.web.answers import Answer, Answers, failed
from tightfit.watch.web.page import page_policy
from tightfit.watch.web.request_reader import RequestReader

MAX_CONNECTIONS = 32
_MAX_FIELDS = 8
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class WatchServer(ThreadingHTTPServer):
    """Serves answers at an address. A connection above the number that is served at once is closed."""

    daemon_threads = True
    # Of a server that has ended a moment ago; another one that runs keeps its port.
    allow_reuse_address = True

    def __init__(self, address: str, port: int, answers: Answers, access: Access) -> None:
        """Binds the address.

        Raises:
            UsageError: it cannot be bound.
        """
        self.answers, self.access = answers, access
        self.fault: BaseException | None = None
        """The first fault of ours in a request. It ends that request alone: whoever may connect could else end the agent, without a token."""
        self._places = threading.BoundedSemaphore(MAX_CONNECTIONS)
        if not 0 <= port < 1 << 16:
            raise UsageError(f"--port {port}: a port is from 0 to 65535")
        try:
            family, *_, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
            self.address_family = family
            super().__init__(place, _Handler)  # type: ignore[arg-type]
        except OSError as error:
            words = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"{address} port {port}: {words}; name another with --port or --bind") from error

    @property
    def url(self) -> str:
        """Where the page is."""
        host, port = self.server_address[:2]
        name = f"[{host!s}]" if ":" in str(host) else str(host)
        return f"http://{name}:{port}/"

    def server_bind(self) -> None:
        # HTTPServer would ask the network for the name of this host.
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = map(str, self.server_address[:2])  # type: ignore[assignment]

    def process_request(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Serves in a thread, if there is a place."""
        if not self._places.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: socket.socket, client_address: object) -> None:  # type: ignore[override]
        """Serves, and gives the place back."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """Keeps a fault of ours for whoever runs the server; a client that goes away, or takes too long, is none."""
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, OSError):
            self.keep(error)

    def keep(self, fault: BaseException) -> None:
        """Keeps a fault of ours; later ones may follow from the first."""
        self.fault = self.fault or fault


class _Handler(BaseHTTPRequestHandler):
    """One request."""

    server: WatchServer  # pyrefly: ignore[bad-override-mutable-attribute]

    def setup(self) -> None:
        super().setup()
        self.rfile = io.BufferedReader(RequestReader(self.connection))  # type: ignore[assignment]

    def parse_request(self) -> bool:
        """Reads the head of the request; what has no version (HTTP/0.9) is not answered."""
        return super().parse_request() and self.request_version != "HTTP/0.9"

    def do_GET(self) -> None:
        """Answers."""
        self._send(*self._answer())

    def do_HEAD(self) -> None:
        """Answers without the body."""
        self._send(*self._answer(), is_head=True)

    def version_string(self) -> str:
        """Which server this is; not of which version, nor of Python's."""
        return "tightfit"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - so the base class names it
        """Says nothing: addresses may have tokens in them."""

    def _answer(self) -> tuple[Answer, dict[str, str]]:
        try:
            address = urllib.parse.urlsplit(self.path)
            fields = dict(urllib.parse.parse_qsl(address.query, max_num_fields=_MAX_FIELDS, errors="replace"))
        except ValueError:
            return failed(400, "this is no address, or one with too many fields"), {}
        try:
            return self._answer_to(address.path, fields)
        except TightfitError as error:
            return failed(500, str(error)), {}
        # Ours, kept and said by whoever runs the server. The client may be anybody, and learns nothing of it.
        except Exception as fault:  # noqa: BLE001 - kept, not hidden
            self.server.keep(fault)
            return failed(500, "a fault of tightfit; what runs the server says more"), {}

    def _answer_to(self, path: str, fields: dict[str, str]) -> tuple[Answer, dict[str, str]]:
        access, token = self.server.access, fields.pop("token", "")
        if not access.is_allowed(self.headers, token):  # type: ignore[arg-type]
            if access.needs_token:
                return failed(401, "a token is needed"), {"WWW-Authenticate": "Bearer"}
            return failed(403, "this server is for localhost; open it by that name"), {}
        if token and path == "/":
            # On without the token in the address, which histories and screenshots keep.
            return Answer(status=303, content_type="text/plain", body=b""), {
                "Location": "/",
                "Set-Cookie": access.cookie(),
            }
        return self.server.answers.answer(path, fields, self.headers.get("Accept", "")), {}

    def _send(self, answer: Answer, headers: dict[str, str], *, is_head: bool = False) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Content-Security-Policy", page_policy())
        for name, value in (_HEADERS | headers).items():
            self.send_header(name, value)
        self.end_headers()
        if not is_head:
            # Reading had a deadline of its own.
            self.connection.settimeout(30.0)
            self.wfile.write(answer.body)
