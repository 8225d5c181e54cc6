"""Watches for side effects during one capture, of modules and on gradients. Called by the step detector."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.effects.gradients import GradientWatch
from tightfit.capture.steps.effects.regions import RegionWatch
from tightfit.capture.steps.graph_nodes import nodes_behind
from tightfit.tape import Effect


class EffectWatch:
    """Both watches; `optimizers` is the detector's own list, which grows as the program constructs them."""

    def __init__(
        self,
        gpu: VirtualGpu,
        optimizers: Iterable[torch.optim.Optimizer],
        is_in_step: Callable[[], bool],
    ) -> None:
        self._regions = RegionWatch(gpu)
        self._gradients = GradientWatch(optimizers, is_in_step)
        self._gradients.install()

    def call(
        self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], run: Callable[[], Any]
    ) -> Any:
        """Runs a module call."""
        return self._regions.call(module, args, kwargs, run)

    def backward(self, roots: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """A backward pass begins; with the arguments of `torch.autograd.graph._engine_run_backward` after its roots."""
        create_graph = bool(args[2]) if len(args) > 2 else False
        leaves, numbers = _graph_of(roots)
        self._regions.backward(numbers, create_graph=create_graph)
        accumulates = bool(kwargs.get("accumulate_grad", True))
        self._gradients.backward(leaves, create_graph=create_graph, accumulates=accumulates)

    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer is about to step."""
        self._gradients.before_step(optimizer)

    def end_step(self) -> None:
        """A step of the user's loop has ended."""
        self._regions.begin_step()

    def effects(self) -> tuple[Effect, ...]:
        """All observed effects, those of modules first, in the order of their paths."""
        return (*sorted(self._regions.effects(), key=lambda effect: effect.module), *self._gradients.effects())


def _graph_of(roots: Sequence[Any]) -> tuple[list[torch.Tensor], list[int]]:
    """The leaves of a graph, and the sequence numbers of its other nodes in ascending order."""
    leaves, numbers = [], []
    for node in nodes_behind(root.node if isinstance(root, GradientEdge) else root.grad_fn for root in roots):
        # AccumulateGrad nodes all have the largest number there is, so that the engine runs them first
        # (torch/csrc/autograd/functions/accumulate_grad.cpp): it says nothing about a call.
        leaf = getattr(node, "variable", None)
        if leaf is None:
            numbers.append(node._sequence_nr())
        else:
            leaves.append(leaf)
    return leaves, sorted(numbers)
