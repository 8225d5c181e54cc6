"""Fails proofs about code that registers hooks on autograd nodes, which a dispatch mode does not see."""

import contextlib
from collections.abc import Iterator
from typing import Any

from tightfit.effects.independence.row_flow import FakeRun
from tightfit.effects.reads import line_of_code
from tightfit.torch_hooks.node_hooks import on_node_hooks


@contextlib.contextmanager
def without_node_hooks(run: FakeRun) -> Iterator[None]:
    """Fails `run` if a hook is registered on a node: it would see the gradients of each part instead of those of the whole."""
    owner = _Refusing(run)
    leave = on_node_hooks(owner)
    try:
        yield
    finally:
        leave()


class _Refusing:
    def __init__(self, run: FakeRun) -> None:
        self._run = run

    def before_node_hook(self, hook: Any) -> None:
        line = line_of_code()
        raise self._run.fail(f"registers a hook on a gradient{f' at {line}' if line else ''}")
