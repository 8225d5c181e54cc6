"""Updates at the host of parameters whose memory there is shown as a tensor of the card (`engine.zero_copy`).

The optimizer steps on twins, tensors at the host over the same bytes with the gradients there, so the processor reads and writes them and not the card
over the link. What it keeps for a twin are the parameter's states. The parameter's version says that it was written to.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tightfit.engine.weights.streamed_weights import Twin
from tightfit.techniques.optimizer.updates.optimizer_steps import beside, groups_by_parameter

Flags = Callable[[torch.Tensor, Any, dict[str, Any]], dict[str, Any]]


def update_twins(
    optimizer: torch.optim.Optimizer,
    step: Callable[[torch.optim.Optimizer], Any],
    twins: Mapping[torch.Tensor, Twin],
    flags: Flags,
) -> None:
    """Updates the parameters of `twins`, which have gradients, as `step` would; `flags` gives the group of a twin with its states and its parameter's group.

    What the card still writes to them is to be over.
    """
    group_of = groups_by_parameter(optimizer)
    states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    # Implementations for many tensors take those of one group together.
    groups: dict[tuple[int, bool], dict[str, Any]] = {}
    for parameter, pair in twins.items():
        twin, gradient, index = pair.weight, parameter.grad, group_of[parameter]
        assert gradient is not None
        twin.requires_grad_(parameter.requires_grad)
        # What stays on the card because others refer to it.
        twin.grad = gradient.to("cpu") if pair.gradient is None else pair.gradient
        known = optimizer.state.get(parameter)
        if known is not None:
            _to_host(known, parameter)
            states[twin] = known
        own = optimizer.param_groups[index]
        given = flags(twin, known or {}, own)
        groups.setdefault((index, given is own), {**given, "params": []})["params"].append(twin)
    step(beside(optimizer, list(groups.values()), states))
    for parameter, pair in twins.items():
        if states.get(pair.weight):
            optimizer.state[parameter] = states[pair.weight]
        torch.autograd.graph.increment_version(parameter)


def _to_host(states: Any, parameter: torch.Tensor) -> None:
    """States that were loaded are where the parameter is shown to be."""
    for name, value in list(dict.items(states)) if isinstance(states, dict) else ():
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.device.type != "cpu":
            states[name] = value.to("cpu")
