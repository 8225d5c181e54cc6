"""Updates at the host of parameters whose memory there is shown as a tensor of the card (`engine.zero_copy`).

The optimizer steps on twins, tensors at the host over the same bytes with the gradients there, so the processor reads and writes them and not the card
over the link. What it keeps for a twin are the parameter's states. The parameter's version says that it was written to.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from tightfit.engine.weights.streamed_weights import Twin
from tightfit.techniques.offload.shown_states import ShownStates
from tightfit.techniques.optimizer.updates.optimizer_kernels import has_momentum
from tightfit.techniques.optimizer.updates.optimizer_steps import beside, groups_by_parameter

# What a `GradScaler` leaves on an optimizer that unscales by itself (torch/amp/grad_scaler.py, `step`).
_OF_SCALERS = ("grad_scale", "found_inf")
Flags = Callable[[torch.Tensor, Any, dict[str, Any]], dict[str, Any]]


def update_twins(
    optimizer: torch.optim.Optimizer,
    step: Callable[[torch.optim.Optimizer], Any],
    twins: Mapping[torch.Tensor, Twin],
    flags: Flags,
    shown: ShownStates | None,
) -> None:
    """Updates the parameters of `twins`, which have gradients, as `step` would; `flags` gives the group of a twin with its states and its parameter's group.

    States are `shown` as tensors of the card, or are at the host as they are. What the card still writes is to be over.
    """
    # States are made by the first update, and then moved to where they are shown: one parameter's at a time.
    fresh = {
        p: twin for p, twin in twins.items() if shown is not None and shown.awaits_states(p, optimizer.state.get(p))
    }
    for parameter, twin in fresh.items():
        _update(optimizer, step, {parameter: twin}, flags, shown)
    known = {parameter: twin for parameter, twin in twins.items() if parameter not in fresh}
    if known:
        _update(optimizer, step, known, flags, shown)


def _update(
    optimizer: torch.optim.Optimizer,
    step: Callable[[torch.optim.Optimizer], Any],
    twins: Mapping[torch.Tensor, Twin],
    flags: Flags,
    shown: ShownStates | None,
) -> None:
    group_of = groups_by_parameter(optimizer)
    states: defaultdict[torch.Tensor, Any] = defaultdict(dict)
    # Implementations for many tensors take those of one group together.
    groups: dict[tuple[int, bool, bool], dict[str, Any]] = {}
    for parameter, pair in twins.items():
        twin, gradient, index = pair.weight, parameter.grad, group_of[parameter]
        assert gradient is not None
        twin.requires_grad_(parameter.requires_grad)
        # What stays on the card because others refer to it.
        twin.grad = gradient.to("cpu") if pair.gradient is None else pair.gradient
        known = optimizer.state.get(parameter)
        if known is not None:
            states[twin] = known if shown is None else shown.at_host(known, parameter)
        own = optimizer.param_groups[index]
        of_twin = states[twin] if known is not None else {}
        given = flags(twin, of_twin, own)
        groups.setdefault((index, given is own, has_momentum(of_twin)), {**_at_host(given), "params": []})[
            "params"
        ].append(twin)
    made = beside(optimizer, list(groups.values()), states)
    vars(made).update(_at_host(vars(made), *_OF_SCALERS))
    step(made)
    for parameter, pair in twins.items():
        updated = states.get(pair.weight)
        if updated and shown is None:
            optimizer.state[parameter] = updated
        elif updated and shown is not None:
            shown.put(optimizer.state[parameter], updated, parameter)
        torch.autograd.graph.increment_version(parameter)


def _at_host(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    """Those of `names`, or all, with tensors at the host: fused implementations copy a rate or a scale there and do not wait for it."""
    found = {name: values[name] for name in names or values if name in values}
    return {name: value.to("cpu") if isinstance(value, torch.Tensor) else value for name, value in found.items()}
