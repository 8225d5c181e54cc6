"""A window that moves over the bytes of a pickle, so that a file of any length is read in little memory."""

from collections.abc import Callable

_WINDOW_BYTES = 1 << 20
# Events leave this count when they go into columns; four million others is far more than blocks and segments of a real file.
_MAX_CONTAINERS = 1 << 22
# Longer than any opcode that is handled inline, together with the bytes that it looks at beyond it.
_MARGIN_BYTES = 64


class NotPlain(Exception):
    """The bytes are not a complete pickle of plain data; the message says at which byte and why."""


class Containers:
    """The number of lists, dicts and tuples that were read and are still there; their number is bounded."""

    def __init__(self) -> None:
        self.num = 0

    def check(self, position: int) -> None:
        """Raises NotPlain if there are too many by the byte `position`."""
        if self.num > _MAX_CONTAINERS:
            raise NotPlain(f"more than {_MAX_CONTAINERS} collections that are no events, at byte {position}")


class ByteWindow:
    """`data` is the window, and `at` the byte in it after the current opcode; up to `limit` an opcode fits into it."""

    def __init__(
        self, read: Callable[[int], bytes], advance: Callable[[int], None] | None, containers: Containers
    ) -> None:
        """`read(n)` returns the next bytes of the file, at most n, and none at its end; `advance(n)` is called for each n bytes done.

        The number of `containers` is checked before the window moves.
        """
        self._read = read
        self._advance = advance
        self._containers = containers
        self._done_bytes = 0
        self.limit = 0
        self.data = b""
        self.at = 0

    @property
    def position(self) -> int:
        """The offset of `at` in the file."""
        return self._done_bytes + self.at

    def position_of(self, at: int) -> int:
        """The offset in the file of a byte of the window."""
        return self._done_bytes + at

    def refill(self, wanted_bytes: int = 0) -> None:
        """Moves the window forward, so that it holds a window's bytes more, or `wanted_bytes` if those are more, if the file has them."""
        self._containers.check(self.position)
        more = self._read(max(_WINDOW_BYTES, wanted_bytes))
        if self._advance is not None:
            self._advance(self.at)
        self._done_bytes += self.at
        self.data = self.data[self.at :] + more
        self.at = 0
        # The end of the file needs no margin: reading past it raises IndexError, which `load` turns into NotPlain.
        self.limit = len(self.data) - _MARGIN_BYTES if more else len(self.data)

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        while self.at + count > len(self.data):
            before = len(self.data) - self.at
            # At most doubled at a time: an announced length of 4 GiB in a file of 100 bytes allocates nothing.
            self.refill(min(count, before))
            if len(self.data) == before:
                raise NotPlain(f"{count} bytes are announced at byte {self.position}, and {before} are left")
        piece = self.data[self.at : self.at + count]
        self.at += count
        return piece

    def take_counted(self, width: int) -> bytes:
        """Bytes that are preceded by their count in `width` bytes."""
        return self.take(int.from_bytes(self.take(width), "little"))

    def line(self) -> bytes:
        """The bytes up to the end of the line."""
        while (end := self.data.find(b"\n", self.at)) < 0:
            before = len(self.data) - self.at
            self.refill(before)
            if len(self.data) == before:
                raise NotPlain(f"a line that begins at byte {self.position} does not end")
        piece = self.data[self.at : end]
        self.at = end + 1
        return piece
