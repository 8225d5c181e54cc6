"""The largest categories at the peak, and what to try when a workload does not fit, in words."""

from tightfit.simulate.estimate import Estimate
from tightfit.units import format_bytes

LABELS = {
    "optimizer_state": "optimizer state",
    "workspace": "library workspaces",
    "cache": "unused cache",
    "context": "CUDA context",
}
_NUM_NAMED = 3
_HELD_BY_THE_MODEL = ("parameters", "gradients", "optimizer_state")
_HELD_BY_THE_BATCH = ("activations", "temporaries", "inputs")


def largest_allocations(estimate: Estimate) -> str:
    """The largest categories at the peak, with their bytes."""
    # The cache and the context are among the categories, so the answer can also be that the program is not to blame.
    largest = sorted(estimate.at_peak.items(), key=lambda item: -item[1])[:_NUM_NAMED]
    return ", ".join(f"{LABELS.get(name, name)} {format_bytes(num_bytes)}" for name, num_bytes in largest if num_bytes)


def to_try(estimate: Estimate) -> str:
    """What could make a workload fit, by the categories at its peak."""
    held, too_much = estimate.at_peak, -estimate.headroom_bytes
    model = sum(held.get(name, 0) for name in _HELD_BY_THE_MODEL)
    batch = sum(held.get(name, 0) for name in _HELD_BY_THE_BATCH)
    tries = []
    # Reserved but unused memory is more than what is missing, so a setting may do without any change of the program.
    if held.get("cache", 0) >= too_much:
        tries.append("the allocator setting expandable_segments:True (here with --alloc-conf)")
    # Weights, gradients and optimizer state do not shrink with the batch.
    if batch + held.get("cache", 0) >= too_much:
        tries.append("a smaller batch")
        # Recomputation pays where activations dominate; elsewhere it costs a forward pass for little. What a whole model and the loss behind it save (logits) is
        # there with it too.
        outside = (s for s in estimate.allocation_sites if s.category == "activations" and "." not in s.module)
        if held.get("activations", 0) - sum(site.num_bytes for site in outside) >= max(1, model):
            tries.append("gradient checkpointing")
    else:
        tries.append("smaller weights, LoRA or an optimizer with less state (no batch is small enough)")
    return ", ".join(tries)
