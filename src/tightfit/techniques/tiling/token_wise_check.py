"""Token-wise check: proves that a module may be run on some tokens at a time, by following them through its operators."""

from collections.abc import Callable, Iterable
from typing import Any

import torch

from tightfit.effects.independence.row_flow import NeedsValues
from tightfit.effects.independence.row_proof import Computation, Leaves, Unfollowed, check_graph, check_hooks, prove
from tightfit.effects.independence.row_states import key_of
from tightfit.effects.independence.rows import Mixes, RowLayout
from tightfit.effects.state import RegionState, differences, is_moved
from tightfit.effects.values.value_checks import has_values
from tightfit.techniques.wrappers.forwards import plain_forwards
from tightfit.techniques.wrappers.without_node_hooks import without_node_hooks

__all__ = ["Mixes", "check_token_wise"]
# Of the largest number: the same kernels, some of which add in no fixed order on a card.
_TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9}
_TOLERANCE_OF_HALVES = 2e-2


def check_token_wise(
    module: torch.nn.Module,
    run: Callable[[torch.Tensor], Any],
    value: torch.Tensor,
    dim: int,
    parts: Iterable[int],
    *,
    first_call: Callable[[], Any] | None = None,
) -> None:
    """Proves that `run`, which runs `module`, gives the same for `value` as for parts of these lengths along `dim`, concatenated.

    `first_call` is run if the proof has a side effect that is the same for any tokens: a cache that a module fills in its first call and finds in
    all later ones is no obstacle; and an error of the module's own is raised as it is.

    Raises:
        Mixes: it is not proved. The message names the operator and the line.
    """
    check_hooks(module)
    away = [name for name, p in module.named_parameters() if p.device.type != value.device.type and is_moved(p)]
    if away:
        # Its own block brings it, and a proof runs without what brings it.
        raise Mixes(f"{away[0]} is streamed to the GPU for one block inside, and is not there for the whole module")
    subject = Computation(
        call=lambda inputs: run(inputs[0]),
        inputs=[value.detach()],
        dims=[dim],
        module=module,
        is_contiguous=True,
        around=without_node_hooks,
    )
    parts = list(parts)
    try:
        with plain_forwards():
            try:
                proof = prove(subject, value.shape[dim], parts)
            except (Leaves, Unfollowed) as error:
                if first_call is None:
                    raise
                _run_first(module, first_call, is_followed=isinstance(error, Leaves))
                proof = prove(subject, value.shape[dim], parts)
    except NeedsValues:
        raise Mixes("it reads a tensor's value in Python, and may branch on it") from None
    result = proof.result
    if not isinstance(result, torch.Tensor):
        raise Mixes(f"it returns a {type(result).__name__}")
    if proof.flow.rows.is_uniform(result) or proof.flow.rows.layout(result) != RowLayout(dim=dim):
        raise Mixes("its output does not have one row for each row of the input")
    # The program may write to the one and read the other.
    if key_of(result) in {key_of(proof.inputs[0]), *map(key_of, module.parameters())}:
        raise Mixes("it returns its input or a view of it, and tiles are joined in new memory")
    reached = check_graph(result, [*proof.inputs, *module.parameters()])
    if not reached or (value.requires_grad and id(proof.inputs[0]) not in reached):
        # Tiles would give a gradient of zeros, for which an optimizer does more than for none.
        raise Mixes("its input gets no gradient")


def _run_first(module: torch.nn.Module, first_call: Callable[[], Any], *, is_followed: bool) -> None:
    """Runs the first call. If no proof could follow its side effects, it may have none; if one could, the call gives the same after them: the whole runs from the state before."""
    state = RegionState()
    before = state.snapshot(module)
    first = first_call()
    if is_followed:
        if isinstance(first, torch.Tensor) and has_values(first):
            again = first_call()
            largest = _TOLERANCE.get(first.dtype, _TOLERANCE_OF_HALVES) * first.abs().max() if first.numel() else 0
            if first.shape != again.shape or bool(((again - first).abs() > largest).any()):
                raise Mixes("its first call gives something else than the next one with the same input")
        return
    found = differences(before, state.snapshot(module))
    if found:
        raise Mixes(f"{found[0]} in its first call, which cannot be followed")
