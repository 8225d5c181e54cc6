"""Weights that a model trains and does not have among its parameters: of layers in a plain list, in a closure, or handed over from elsewhere."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from tightfit.effects.call_trails import CallTrail
from tightfit.effects.independence.row_flow import Flow
from tightfit.techniques.wrappers.first_order import Refuse


class FurtherWeights:
    """Those of one model, which it refers to weakly. `refuse` makes the error to raise."""

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        self._last: list[weakref.ref[torch.Tensor]] = []

    def of_before(self) -> list[torch.Tensor]:
        """Those of the last call that had any."""
        return [each for ref in self._last if (each := ref()) is not None]

    def found(
        self, outputs: Iterable[torch.Tensor], known: Iterable[torch.Tensor], number: int, calls: CallTrail
    ) -> list[torch.Tensor]:
        """Those that gradients of a call's `outputs` flow to, which are so many in the proof; `known` are parameters and arguments. Leaves that its `calls` have made are none.

        Raises:
            ApplyError: there are others.
        """
        found = _further_weights(outputs, known)
        found = None if found is None else [each for each in found if not calls.has_made(each)]
        if found is None:
            raise self._refuse(
                "gradients go through it to what another model has returned, which it was not called with: give it that as an argument"
            )
        if len(found) != number:
            raise self._refuse(
                "it trains weights that are not its parameters, and another number of them than in the proof"
            )
        self._last = [weakref.ref(each) for each in found]
        return found


def _further_weights(outputs: Iterable[torch.Tensor], known: Iterable[torch.Tensor]) -> list[torch.Tensor] | None:
    """The leaves that gradients flow to from `outputs`, but for `known` ones, in the order of the graph; None where they flow through another model that was divided."""
    seen = {id(each) for each in known}
    waiting: list[Any] = [output.grad_fn for output in outputs]
    nodes: set[Any] = set()
    found = []
    for node in waiting:
        if node is None or node in nodes:
            continue
        nodes.add(node)
        if getattr(node, "call", None) is not None:
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None and id(leaf) not in seen:
            seen.add(id(leaf))
            found.append(leaf)
        waiting += [below for below, _ in node.next_functions]
    return found


def number_of_further(flow: Flow, outputs: Iterable[torch.Tensor], known: Iterable[torch.Tensor]) -> int:
    """How many leaves gradients flow to from the `outputs` of a run that was followed, but for `known` ones, and for those that it has made itself, of its inputs too (`x.detach().requires_grad_()`)."""
    return sum(not flow.sources.is_within(leaf) for leaf in _further_weights(outputs, known) or ())
