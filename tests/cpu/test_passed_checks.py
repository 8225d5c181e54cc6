"""Which answer a check of the program's own passes with, told from its source: the same on every Python."""

import ast
import textwrap

import pytest

from tightfit.capture.dispatch.passed_checks import answer_at

# `read()` is the condition on the card.
CHECKS = {
    "assert read()": True,
    "assert not read(), 'message'": False,
    "assert read() and other": True,
    "assert read() or other": None,
    "if read(): raise ValueError": False,
    "if not read():\n    message = 'bad'\n    print(message)\n    raise ValueError(message)": True,
    "if read() or other: raise ValueError": False,
    "if read() and other: raise ValueError": None,
    "if not (other or not bool(read())): raise ValueError": None,
    "if other and not read(): pass\nelse: raise ValueError": False,
    "if (bad := read()): raise ValueError": False,
    "if read():\n    pass\nelse:\n    raise ValueError": True,
    "if read():\n    if other: raise ValueError\n    else: sys.exit(1)": False,
    "if read():\n    with other: raise ValueError": False,
    "if read():\n    sys.exit('no')": False,
    "ok = read()\nprint('checked')\nif not ok: raise ValueError": True,
    "ok = bool(read())\nassert ok": True,
    "if other:\n    ok = read()\n    if not ok: raise ValueError": True,
    "if read(): return x\nraise ValueError": True,
    "for x in y:\n    if not read(): continue\n    raise ValueError": False,
    # One that decides over something else.
    "if read(): total += 1": None,
    "if read():\n    if other: return\n    raise ValueError": None,
    "if read():\n    raise ValueError\nelse:\n    raise KeyError": None,
    "ok = read()\nlog(ok)\nif not ok: raise ValueError": None,
    "ok = read()": None,
    "while read(): step()": None,
    "return read()": None,
    "x = 1 if read() else 2": None,
    "count = count_of(read())\nif count: raise ValueError": None,
}


@pytest.mark.parametrize("source", CHECKS)
def test_the_answer_that_passes(source: str) -> None:
    program = "def check():\n" + textwrap.indent(source, "    ")
    (read,) = (
        node
        for node in ast.walk(ast.parse(program))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "read"
    )
    place = read.lineno, read.end_lineno, read.col_offset, read.end_col_offset
    assert answer_at(program, place) is CHECKS[source]


@pytest.mark.parametrize(
    ("source", "answers"),
    [
        ("assert a", [True]),
        ("if not a: raise ValueError", [True]),
        ("if a or not b: raise ValueError", [False, True]),
        ("if a and b: raise ValueError", [None, None]),
        ("assert a and (b or c)", [True, None, None]),
        ("assert 0 <= a <= 1 and b", [True, True, True]),
        ("while a: raise ValueError", [None]),
    ],
)
def test_the_answers_of_operands_by_the_place_of_their_statement(source: str, answers: list[bool | None]) -> None:
    place = 1, 1, 0, len(source)
    assert [answer_at(source, place, number) for number in range(len(answers))] == answers


@pytest.mark.parametrize("source", ["", "def (", "assert other()"])
def test_a_place_that_the_source_does_not_have_decides_nothing(source: str) -> None:
    assert answer_at(source, (1, 1, 7, 13)) is None
    assert answer_at(source, (None, None, None, None)) is None
