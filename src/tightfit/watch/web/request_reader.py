"""Reads a request's bytes with an end to them and to the time they may take, however slowly a client sends."""

import io
import socket
import time

MAX_REQUEST_BYTES = 16 * 1024
_SECONDS = 10.0


class RequestReader(io.RawIOBase):
    """What comes in on a connection, up to a number of bytes and a deadline, for `io.BufferedReader`."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._left = MAX_REQUEST_BYTES
        self._deadline = time.monotonic() + _SECONDS

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """The next bytes.

        Raises:
            TimeoutError: the deadline has passed.
            ConnectionAbortedError: there have been too many bytes.
        """
        seconds = self._deadline - time.monotonic()
        if seconds <= 0:
            raise TimeoutError("the request took too long")
        if not self._left:
            raise ConnectionAbortedError("the request is too long")
        self._connection.settimeout(seconds)
        count = self._connection.recv_into(buffer[: self._left])
        self._left -= count
        return count
