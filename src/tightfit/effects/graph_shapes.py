"""The shape of an autograd graph: its nodes and edges, without numbers. Where it is another one, the code has taken another way."""

from typing import Any


def graph_shape(root: Any) -> int:
    """A number for the graph below the node `root`, the same for graphs of the same operators in the same order; 0 without a graph."""
    if root is None:
        return 0
    numbers: dict[Any, int] = {None: 0, root: 1}
    number_of, found, waiting = numbers.setdefault, list[Any](), [root]
    # A type and then the edges of its node, which are numbers: no two graphs have one row of these.
    for node in waiting:
        found.append(type(node))
        for below, position in node.next_functions:
            number = number_of(below, following := len(numbers))
            if number == following:
                waiting.append(below)
            found += (number, position)
    return hash(tuple(found))
