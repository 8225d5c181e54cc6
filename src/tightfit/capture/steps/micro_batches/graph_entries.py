"""Where the graph of a loss, which the program has computed itself, comes to that of the call whose result it is computed from."""

from collections.abc import Sequence
from typing import Any

from torch.autograd.graph import GradientEdge

Edge = tuple[int, int]
"""A node of a graph by its sequence number, and the number of one of its outputs."""


def entries(roots: Sequence[Any], first: int, end: int) -> dict[Edge, Any] | None:
    """The nodes with sequence numbers from `first` up to but not including `end` that the graph comes to first, by the edges.

    None if the program's own part of it, which is younger, also goes elsewhere: to weights, or to an older part. The engine runs younger nodes first, so
    else all of the program's own part is over when the first of these runs.
    """
    waiting = [(r.node, r.output_nr) if isinstance(r, GradientEdge) else (r.grad_fn, r.output_nr) for r in roots]
    found, seen = dict[Edge, Any](), set[Any]()
    while waiting:
        node, number = waiting.pop()
        if node is None:
            continue
        if getattr(node, "variable", None) is not None:
            return None
        sequence = node._sequence_nr()
        if first <= sequence < end:
            found[sequence, number] = node
        elif sequence < first:
            return None
        elif node not in seen:
            seen.add(node)
            waiting.extend(node.next_functions)
    return found
