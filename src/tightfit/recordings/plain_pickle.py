"""Reads pickles of plain data: dicts, lists, tuples, text, bytes, numbers, booleans and None, of any protocol from 0 to 5.

A recording from an unknown source must not run code, and must not hang or exhaust memory either. Python's own unpickler can be kept from finding
classes, but still allocates what a forged length or memo index asks for, and hashes nested tuples for ever when they are dict keys. So keys
must be text here, only the few opcodes that plain data needs (Lib/pickletools.py describes them) are implemented, and any other one is refused.
The file is read through a window, and the number of containers and their depth are bounded.
"""

import io
import re
import struct
from collections.abc import Callable
from typing import Any, Final

from tightfit.recordings.byte_window import ByteWindow, Containers, NotPlain

PlainValue = Any

_UNPACK_I = struct.Struct("<i").unpack_from
_UNPACK_FLOAT = struct.Struct(">d").unpack_from
# int() of a long decimal is quadratic, so a forged number could take minutes.
_MAX_DIGITS = 100
# Nested containers are walked by recursive functions later, under Python's own limit of 1000 frames.
_MAX_DEPTH = 1000
# Picklers number the memo consecutively. A forged index of 2**31 must not make a list of that length.
_WIDEST_GAP = 1 << 10
_GLOBAL, _STACK_GLOBAL = ord("c"), 0x93
_NAME = re.compile(r"[\w.]{1,60}", re.ASCII)


class _Gone:
    """Marks an empty entry of the memo."""


GONE: Final = _Gone()


def loads(data: bytes) -> PlainValue:
    """The value that `data` holds.

    Raises:
        NotPlain: `data` is truncated or damaged, or holds anything but plain data.
    """
    return load(Reader(io.BytesIO(data).read))


def load(reader: "Reader") -> PlainValue:
    """The value that `reader` finds.

    Raises:
        NotPlain: the bytes are truncated or damaged, or hold anything but plain data.
    """
    try:
        return reader.run()
    except (IndexError, struct.error) as error:
        raise NotPlain(f"damaged or cut off near byte {reader.window.position}") from error


class Reader:
    """The stack machine.

    `stack` holds what was pushed since the last mark, and `outer` what was pushed before each mark.
    """

    def __init__(self, read: Callable[[int], bytes], advance: Callable[[int], None] | None = None) -> None:
        """`read(n)` returns the next bytes of the file, at most n, and none at its end; `advance(n)` is called for each n bytes done."""
        self.containers = Containers()
        self.window = ByteWindow(read, advance, self.containers)
        self.stack: list[Any] = []
        self.outer: list[list[Any]] = []
        self.memo: list[Any] = []

    def run(self) -> PlainValue:  # noqa: PLR0912, PLR0915 a call for each of a hundred million opcodes is too slow
        """Executes opcodes up to STOP; the most frequent ones are inlined."""
        window = self.window
        window.refill()
        # Local names: attribute look-ups would slow down a loop that runs once per opcode.
        data, at, limit = window.data, window.at, window.limit
        stack, outer, memo = self.stack, self.outer, self.memo
        push = stack.append
        last_keys: list[Any] = []
        while True:
            if at > limit:
                window.at = at
                window.refill()
                data, at, limit = window.data, window.at, window.limit
            op = data[at]
            at += 1
            if op == 0x68:  # BINGET
                value = memo[data[at]]
                push(self.recall(data[at]) if value is GONE else value)
                at += 1
            elif op == 0x6A:  # LONG_BINGET
                index = int.from_bytes(data[at : at + 4], "little")
                value = memo[index]
                push(self.recall(index) if value is GONE else value)
                at += 4
            elif op == 0x94:  # MEMOIZE
                memo.append(stack[-1])
            elif op == 0x4B:  # BININT1
                push(data[at])
                at += 1
            elif op == 0x28:  # MARK
                if len(outer) > _MAX_DEPTH:
                    raise NotPlain(f"collections are nested too deeply at byte {window.position_of(at)}")
                outer.append(stack)
                self.stack = stack = []
                push = stack.append
            elif op == 0x75:  # SETITEMS
                items = stack
                self.stack = stack = outer.pop()
                push = stack.append
                keys = items[::2]
                # All events of a recording have the same keys, and comparing a list is cheaper than checking each of its items.
                if keys != last_keys or len(items) % 2:
                    _check_keys(items)
                    last_keys = keys
                if type(stack[-1]) is not dict:
                    raise NotPlain("a key is set in what is no dict")
                stack[-1].update(zip(keys, items[1::2], strict=True))
            elif op == 0x7D:  # EMPTY_DICT
                self.containers.num += 1
                push({})
            elif op == 0x8A and data[at] <= 8:  # LONG1
                end = at + 1 + data[at]
                push(int.from_bytes(data[at + 1 : end], "little", signed=True))
                at = end
            elif op == 0x4A:  # BININT
                push(_UNPACK_I(data, at)[0])
                at += 4
            elif op == 0x2E:  # STOP
                window.at = at
                if len(self.stack) != 1 or self.outer:
                    raise NotPlain(f"the pickle ends at byte {window.position} with more or fewer values than one")
                return self.stack[0]
            else:
                window.at = at
                carry_out = RARE.get(op)
                if carry_out is None:
                    raise NotPlain(_refused(self, op))
                try:
                    carry_out(self)
                except (ValueError, TypeError, OverflowError) as error:
                    raise NotPlain(f"{error} near byte {window.position}") from error
                data, at, limit = window.data, window.at, window.limit
                stack = self.stack
                push = stack.append

    def forget_runs(self) -> None:
        """Called when a memo entry was overwritten."""

    def recall(self, index: int) -> Any:
        """The former value of an empty memo entry."""
        raise NotPlain(f"memo entry {index} is used before it is there")

    def new_list(self) -> list[Any]:
        """An empty list."""
        return []

    def open_list(self) -> None:
        """Pushes a new list."""
        self.containers.num += 1
        self.stack.append(self.new_list())

    def close_list(self, items: list[Any]) -> None:
        """Pushes a new list of `items`."""
        self.containers.num += 1
        self.stack.append(self.new_list())
        self.append(items)

    def append(self, items: list[Any]) -> None:
        """Adds `items` to the list on top of the stack."""
        target = self.stack[-1]
        if type(target) is not list:
            raise NotPlain("something is appended to what is no list")
        target.extend(items)

    def push_tuple(self, items: list[Any]) -> None:
        """Pushes a tuple of `items`."""
        self.containers.num += 1
        self.stack.append(tuple(items))

    def text(self, data: bytes) -> str:
        """Decodes UTF-8; surrogates pass, as pickle writes them."""
        return data.decode("utf-8", "surrogatepass")


def _refused(reader: Reader, op: int) -> str:
    """Why an opcode is not carried out: most often it names a class or function, which is called to make an object."""
    at = f"at byte {reader.window.position - 1}"
    if op not in (_GLOBAL, _STACK_GLOBAL) and reader.window.position == 1:
        return "it does not begin as a pickle does"
    if op not in (_GLOBAL, _STACK_GLOBAL):
        return f"opcode {op:#04x} {at} is not one of plain data"
    names = reader.stack[-2:] if op == _STACK_GLOBAL else [reader.window.line().decode("latin-1") for _ in range(2)]
    is_named = len(names) == 2 and all(type(name) is str and _NAME.fullmatch(name) for name in names)
    what = f"{'.'.join(names)} {at}" if is_named else at
    return f"it is not plain data: it holds an object ({what}), and making one can run code"


def cut_to_mark(reader: Reader) -> list[Any]:
    """Pops everything since the last mark, and the mark."""
    items = reader.stack
    reader.stack = reader.outer.pop()
    return items


def _recalled(reader: Reader, index: int) -> Any:
    """The value of a memo entry."""
    value = reader.memo[index]
    return reader.recall(index) if value is GONE else value


def memoise(reader: Reader, index: int) -> None:
    """Stores the top of the stack under an index of the file's choosing; picklers count it up."""
    memo, value = reader.memo, reader.stack[-1]
    if index > len(memo):
        if index > len(memo) + _WIDEST_GAP:
            raise NotPlain(f"a memo of {index} entries is asked for where {len(memo)} are used")
        memo.extend([GONE] * (index - len(memo)))
    if index == len(memo):
        memo.append(value)
    else:
        memo[index] = value
        reader.forget_runs()


def _check_keys(items: list[Any]) -> None:
    if len(items) % 2 or not all(type(key) is str for key in items[::2]):
        raise NotPlain("a dict has a key without a value, or one that is not text")


def _set_items(reader: Reader, items: list[Any]) -> None:
    _check_keys(items)
    target = reader.stack[-1]
    if type(target) is not dict:
        raise NotPlain("a key is set in what is no dict")
    target.update(zip(items[::2], items[1::2], strict=True))


def _decimal(text: bytes) -> int:
    if len(text) > _MAX_DIGITS:
        raise NotPlain("a number of too many digits")
    return int(text)


def _float_line(reader: Reader) -> float:
    text = reader.window.line()
    if len(text) > _MAX_DIGITS:
        raise NotPlain("a number of too many digits")
    return float(text)


def _index(text: bytes) -> int:
    index = _decimal(text)
    if index < 0:
        raise NotPlain("a memo index below 0")
    return index


def _int_line(reader: Reader) -> int | bool:
    text = reader.window.line()
    # Protocols 0 and 1 write False and True as I00 and I01.
    return text == b"01" if text in (b"00", b"01") else _decimal(text)


def _long_line(reader: Reader) -> int:
    return _decimal(reader.window.line().removesuffix(b"L"))


def _long(reader: Reader, width: int) -> int:
    digits = reader.window.take_counted(width)
    if len(digits) > _MAX_DIGITS:
        raise NotPlain("a number of too many digits")
    return int.from_bytes(digits, "little", signed=True)


def _pushes(make: Callable[[Reader], Any]) -> Callable[[Reader], None]:
    def carry_out(reader: Reader) -> None:
        value = make(reader)
        reader.stack.append(value)

    return carry_out


def _tuple_of(count: int) -> Callable[[Reader], None]:
    def carry_out(reader: Reader) -> None:
        items = reader.stack[-count:]
        if len(items) != count:
            raise NotPlain("a tuple of more values than there are")
        del reader.stack[-count:]
        reader.push_tuple(items)

    return carry_out


def _pop(reader: Reader) -> None:
    if reader.stack:
        reader.stack.pop()
    else:
        cut_to_mark(reader)


def _append(reader: Reader) -> None:
    reader.append([reader.stack.pop()])


def _set_item(reader: Reader) -> None:
    value, key = reader.stack.pop(), reader.stack.pop()
    _set_items(reader, [key, value])


def _dict(reader: Reader) -> None:
    items = cut_to_mark(reader)
    reader.containers.num += 1
    reader.stack.append({})
    _set_items(reader, items)


def _protocol(reader: Reader) -> None:
    if reader.window.take(1)[0] > 5:
        raise NotPlain("a pickle protocol above 5")


RARE: dict[int, Callable[[Reader], None]] = {
    ord("]"): lambda reader: reader.open_list(),
    ord(")"): _pushes(lambda _: ()),
    ord("e"): lambda reader: reader.append(cut_to_mark(reader)),
    ord("a"): _append,
    ord("s"): _set_item,
    ord("t"): lambda reader: reader.push_tuple(cut_to_mark(reader)),
    ord("l"): lambda reader: reader.close_list(cut_to_mark(reader)),
    ord("d"): _dict,
    0x85: _tuple_of(1),
    0x86: _tuple_of(2),
    0x87: _tuple_of(3),
    ord("N"): _pushes(lambda _: None),
    ord("M"): _pushes(lambda reader: int.from_bytes(reader.window.take(2), "little")),
    0x88: _pushes(lambda _: True),
    0x89: _pushes(lambda _: False),
    0x8A: _pushes(lambda reader: _long(reader, 1)),
    0x8B: _pushes(lambda reader: _long(reader, 4)),
    ord("I"): _pushes(_int_line),
    ord("L"): _pushes(_long_line),
    ord("G"): _pushes(lambda reader: _UNPACK_FLOAT(reader.window.take(8))[0]),
    ord("F"): _pushes(_float_line),
    0x8C: _pushes(lambda reader: reader.text(reader.window.take_counted(1))),
    ord("X"): _pushes(lambda reader: reader.text(reader.window.take_counted(4))),
    0x8D: _pushes(lambda reader: reader.text(reader.window.take_counted(8))),
    ord("V"): _pushes(lambda reader: reader.window.line().decode("raw-unicode-escape")),
    ord("C"): _pushes(lambda reader: reader.window.take_counted(1)),
    ord("B"): _pushes(lambda reader: reader.window.take_counted(4)),
    0x8E: _pushes(lambda reader: reader.window.take_counted(8)),
    ord("q"): lambda reader: memoise(reader, reader.window.take(1)[0]),
    ord("r"): lambda reader: memoise(reader, int.from_bytes(reader.window.take(4), "little")),
    ord("p"): lambda reader: memoise(reader, _index(reader.window.line())),
    ord("g"): _pushes(lambda reader: _recalled(reader, _index(reader.window.line()))),
    ord("0"): _pop,
    ord("1"): lambda reader: _ignore(cut_to_mark(reader)),
    ord("2"): _pushes(lambda reader: reader.stack[-1]),
    0x80: _protocol,
    # FRAME is a hint on buffering for readers.
    0x95: lambda reader: _ignore(reader.window.take(8)),
}


def _ignore(_value: object) -> None:
    """For opcodes whose operand has no effect here."""
