"""The instructions of a function read the same in every version of Python that runs the tests."""

from types import CodeType

from tightfit.effects.bytecode.instructions import instructions_of

SOURCE = """
def backward(ctx, gradient, cache):
    a, b = ctx.saved_tensors
    c = ctx.saved_tensors[0]
    if a is b or type(a) is torch.Tensor: a.data.add_(1)
    cache[0] = a + c
    super().noted(a,
                  b)
    return a.kept
"""
EXPECTED = """
3 LOAD_FAST ctx, LOAD_ATTR saved_tensors, UNPACK_SEQUENCE 2, STORE_FAST a, STORE_FAST b
4 LOAD_FAST ctx, LOAD_ATTR saved_tensors, LOAD_CONST 0, BINARY_SUBSCR, STORE_FAST c
5 LOAD_FAST a, LOAD_FAST b, IS_OP 0, IF_TRUE, LOAD_GLOBAL type, LOAD_FAST a, CALL 1, LOAD_GLOBAL torch, LOAD_ATTR Tensor, IS_OP 0, IF_FALSE
5 LOAD_FAST a, LOAD_ATTR data, LOAD_ATTR add_, LOAD_CONST 1, CALL 1, POP_TOP
6 LOAD_FAST a, LOAD_FAST c, BINARY_OP 0, LOAD_FAST cache, LOAD_CONST 0, STORE_SUBSCR
7 LOAD_GLOBAL super, CALL 0, LOAD_ATTR noted, LOAD_FAST a
8 LOAD_FAST b
7 CALL 2, POP_TOP
9 LOAD_FAST a, LOAD_ATTR kept, RETURN_VALUE
"""


def test_they_are_those_of_one_version() -> None:
    module = compile(SOURCE, "program.py", "exec")
    code = next(each for each in module.co_consts if isinstance(each, CodeType))
    found = [(each.line, _words(each.opname, each.argval)) for each in instructions_of(code)]
    expected = [
        (int(number), word)
        for number, _, words in (line.partition(" ") for line in EXPECTED.strip().splitlines())
        for word in words.split(", ")
    ]
    assert found == expected
    offsets = [each.offset for each in instructions_of(code)]
    assert offsets == sorted(offsets)


def _words(name: str, value: object) -> str:
    # Where a jump goes to is counted in bytes, and Python 3.11 says in its name whether it goes forward.
    if "_IF_" in name:
        return "IF_" + name.partition("_IF_")[2]
    return name if value is None or name in ("STORE_SUBSCR", "BINARY_SUBSCR", "RETURN_VALUE") else f"{name} {value}"
