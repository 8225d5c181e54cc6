"""The shape of an autograd graph: its nodes and edges, without numbers. Where it is another one, the code has taken another way."""

from typing import Any


def graph_shape(root: Any) -> int:
    """A number for the graph below the node `root`, the same for graphs of the same operators in the same order; 0 without a graph."""
    if root is None:
        return 0
    numbers: dict[Any, int] = {root: 0}
    rows: list[tuple[Any, ...]] = []
    waiting = [root]
    while waiting:
        node = waiting.pop()
        edges = []
        for below, position in node.next_functions:
            if below is not None and below not in numbers:
                numbers[below] = len(numbers)
                waiting.append(below)
            edges.append((-1 if below is None else numbers[below], position))
        rows.append((numbers[node], type(node), *edges))
    return hash(tuple(rows))
