"""The nodes of autograd's graph behind some results."""

from collections.abc import Iterable, Iterator

from torch.autograd.graph import Node


def nodes_behind(roots: Iterable[Node | None]) -> Iterator[Node]:
    """Each node that a backward pass from `roots` may run, once."""
    waiting, seen = list(roots), set[Node]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            waiting.extend(following for following, _ in node.next_functions)
