"""The shape of an autograd graph: its nodes and edges, without numbers. Where it is another one, the code has taken another way."""

from typing import Any

# A reshape ends in one or the other, depending on whether something in Python sees the operators.
_SAME = {"ReshapeAliasBackward0": "ViewBackward0"}
_KINDS: dict[type, Any] = {}


def graph_shape(root: Any) -> int:
    """A number for the graph below the node `root`, the same for graphs of the same operators in the same order; 0 without a graph."""
    if root is None:
        return 0
    numbers: dict[Any, int] = {None: 0, root: 1}
    number_of, found, waiting, kind_of = numbers.setdefault, list[Any](), [root], _KINDS.get
    # A type and then the edges of its node, which are numbers: no two graphs have one row of these.
    for node in waiting:
        kind = type(node)
        found.append(kind_of(kind) or _kind_of(kind))
        for below, position in node.next_functions:
            number = number_of(below, following := len(numbers))
            if number == following:
                waiting.append(below)
            found += (number, position)
    return hash(tuple(found))


def _kind_of(kind: type) -> Any:
    if not kind.__name__.endswith("Backward0"):
        # Of an autograd function in Python, perhaps, which is gone with the program's class.
        return kind
    _KINDS[kind] = _SAME.get(kind.__name__, kind.__name__)
    return _KINDS[kind]
