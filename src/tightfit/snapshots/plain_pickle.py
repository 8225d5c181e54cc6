"""Reads pickles of plain data: dicts, lists, tuples, text, bytes, numbers, booleans and None, of any protocol from 0 to 5.

A recording from a stranger must not run code, and must not hang or eat all memory either. Python's own unpickler can be kept from finding
classes, but still allocates what a forged length or memo index asks for, and hashes nested tuples for ever when they are dict keys. So keys
are text here, and the few opcodes that plain data needs (Lib/pickletools.py describes them) are carried out one by one, and every
other one is refused. What this builds is never larger than a small multiple of the file.
"""

import struct
from collections.abc import Callable
from typing import Any

PlainValue = Any

_UNPACK_I = struct.Struct("<i").unpack_from
_UNPACK_FLOAT = struct.Struct(">d").unpack_from
_MOST_DIGITS = 100


class NotPlain(Exception):
    """The bytes are not a whole pickle of plain data; the message says at which byte, and why."""


class _Mark:
    """Stands on the stack where a collection begins."""


_MARK = _Mark()


def loads(data: bytes) -> PlainValue:
    """The value that `data` holds.

    Raises:
        NotPlain: `data` is truncated or damaged, or holds anything but plain data.
    """
    reader = _Reader(data)
    try:
        return reader.run()
    except (IndexError, KeyError, struct.error) as error:
        raise NotPlain(f"damaged or cut off near byte {reader.at}") from error
    except (ValueError, TypeError, OverflowError) as error:
        raise NotPlain(f"{error} near byte {reader.at}") from error


class _Reader:
    """The stack machine. `at` is the byte after the opcode that is being carried out."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.at = 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> PlainValue:
        """Carries out opcodes up to STOP. The commonest ones are written out; a recording has hundreds of thousands of them."""
        data, stack, memo = self.data, self.stack, self.memo
        push = stack.append
        rare = _RARE
        at = 0
        while True:
            op = data[at]
            at += 1
            if op == 0x68:  # BINGET
                push(memo[data[at]])
                at += 1
            elif op == 0x6A:  # LONG_BINGET
                push(memo[int.from_bytes(data[at : at + 4], "little")])
                at += 4
            elif op == 0x94:  # MEMOIZE
                memo[len(memo)] = stack[-1]
            elif op == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif op == 0x4A:  # BININT
                push(_UNPACK_I(data, at)[0])
                at += 4
            elif op == 0x2E:  # STOP
                self.at = at
                return self._result()
            else:
                self.at = at
                carry_out = rare.get(op)
                if carry_out is None:
                    raise NotPlain(f"opcode {op:#04x} at byte {at - 1} is not one of plain data")
                carry_out(self)
                at = self.at

    def _result(self) -> PlainValue:
        if len(self.stack) != 1 or self.stack[0] is _MARK:
            raise NotPlain(f"the pickle ends at byte {self.at} with {len(self.stack)} values instead of one")
        return self.stack[0]

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        end = self.at + count
        if end > len(self.data):
            raise NotPlain(f"{count} bytes are announced at byte {self.at}, and {len(self.data) - self.at} are left")
        piece = self.data[self.at : end]
        self.at = end
        return piece

    def take_counted(self, width: int) -> bytes:
        """The bytes whose count stands before them in `width` bytes."""
        return self.take(int.from_bytes(self.take(width), "little"))

    def line(self) -> bytes:
        """The bytes up to the end of the line."""
        end = self.data.index(b"\n", self.at)
        piece = self.data[self.at : end]
        self.at = end + 1
        return piece

    def cut_to_mark(self) -> list[Any]:
        """What was pushed since the last mark, which goes as well."""
        stack = self.stack
        at = len(stack) - 1
        while stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise NotPlain("a collection ends that never began")
        items = stack[at + 1 :]
        del stack[at:]
        return items

    def put(self, index: int) -> None:
        """Remembers the top of the stack under a number of the file's choosing."""
        self.memo[index] = self.stack[-1]

    def append(self, items: list[Any]) -> None:
        """Adds `items` to the list on top of the stack."""
        target = self.stack[-1]
        if type(target) is not list:
            raise NotPlain("something is appended to what is no list")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        """Adds keys and values, in turn, to the dict on top of the stack."""
        target = self.stack[-1]
        if type(target) is not dict:
            raise NotPlain("a key is set in what is no dict")
        target.update(_pairs(items))


def _pairs(items: list[Any]) -> dict[Any, Any]:
    keys = items[::2]
    if len(items) % 2 or not all(type(key) is str for key in keys):
        raise NotPlain("a dict has a key without a value, or one that is not text")
    return dict(zip(keys, items[1::2], strict=True))


def _decimal(text: bytes) -> int:
    if len(text) > _MOST_DIGITS:
        raise NotPlain("a number of too many digits")
    return int(text)


def _int_line(reader: _Reader) -> int | bool:
    text = reader.line()
    return text == b"01" if text in (b"00", b"01") else _decimal(text)


def _long_line(reader: _Reader) -> int:
    return _decimal(reader.line().removesuffix(b"L"))


def _long(reader: _Reader, width: int) -> int:
    digits = reader.take_counted(width)
    if len(digits) > _MOST_DIGITS:
        raise NotPlain("a number of too many digits")
    return int.from_bytes(digits, "little", signed=True)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _pushes(make: Callable[[_Reader], Any]) -> Callable[[_Reader], None]:
    def carry_out(reader: _Reader) -> None:
        reader.stack.append(make(reader))

    return carry_out


def _tuple_of(count: int) -> Callable[[_Reader], None]:
    def carry_out(reader: _Reader) -> None:
        items = reader.stack[-count:]
        if len(items) != count or any(item is _MARK for item in items):
            raise NotPlain("a tuple of more values than there are")
        reader.stack[-count:] = [tuple(items)]

    return carry_out


def _pop(reader: _Reader) -> None:
    reader.stack.pop()


def _append(reader: _Reader) -> None:
    value = reader.stack.pop()
    if value is _MARK:
        raise NotPlain("a collection begins where a value is expected")
    reader.append([value])


def _set_item(reader: _Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    reader.set_items([key, value])


def _protocol(reader: _Reader) -> None:
    if reader.take(1)[0] > 5:
        raise NotPlain("a pickle protocol above 5")


_RARE: dict[int, Callable[[_Reader], None]] = {
    ord("("): _pushes(lambda _: _MARK),
    ord("}"): _pushes(lambda _: {}),
    ord("]"): _pushes(lambda _: []),
    ord(")"): _pushes(lambda _: ()),
    ord("u"): lambda reader: reader.set_items(reader.cut_to_mark()),
    ord("e"): lambda reader: reader.append(reader.cut_to_mark()),
    ord("a"): _append,
    ord("s"): _set_item,
    ord("t"): _pushes(lambda reader: tuple(reader.cut_to_mark())),
    ord("l"): _pushes(lambda reader: reader.cut_to_mark()),
    ord("d"): _pushes(lambda reader: _pairs(reader.cut_to_mark())),
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("N"): _pushes(lambda _: None),
    0x88: _pushes(lambda _: True),
    0x89: _pushes(lambda _: False),
    ord("M"): _pushes(lambda reader: int.from_bytes(reader.take(2), "little")),
    0x8A: _pushes(lambda reader: _long(reader, 1)),
    0x8B: _pushes(lambda reader: _long(reader, 4)),
    ord("I"): _pushes(_int_line),
    ord("L"): _pushes(_long_line),
    ord("G"): _pushes(lambda reader: _UNPACK_FLOAT(reader.take(8))[0]),
    ord("F"): _pushes(lambda reader: float(reader.line())),
    0x8C: _pushes(lambda reader: _text(reader.take_counted(1))),
    ord("X"): _pushes(lambda reader: _text(reader.take_counted(4))),
    0x8D: _pushes(lambda reader: _text(reader.take_counted(8))),
    ord("V"): _pushes(lambda reader: reader.line().decode("raw-unicode-escape")),
    ord("C"): _pushes(lambda reader: reader.take_counted(1)),
    ord("B"): _pushes(lambda reader: reader.take_counted(4)),
    0x8E: _pushes(lambda reader: reader.take_counted(8)),
    ord("q"): lambda reader: reader.put(reader.take(1)[0]),
    ord("r"): lambda reader: reader.put(int.from_bytes(reader.take(4), "little")),
    ord("p"): lambda reader: reader.put(_decimal(reader.line())),
    ord("g"): _pushes(lambda reader: reader.memo[_decimal(reader.line())]),
    ord("0"): _pop,
    ord("1"): lambda reader: _ignore(reader.cut_to_mark()),
    ord("2"): _pushes(lambda reader: reader.stack[-1]),
    0x80: _protocol,
    0x95: lambda reader: _ignore(reader.take(8)),
}


def _ignore(_value: object) -> None:
    """Some opcodes only move on."""
