"""All techniques: ours, and those of installed packages with the entry point `tightfit.techniques`.

Ours are in the order in which they are applied to a model: techniques inside of a module before those that wrap it.
"""

import difflib
import importlib
from functools import cache
from importlib.metadata import entry_points

from tightfit.errors import PlanError
from tightfit.techniques.technique import AbstractTechnique

# A wrapper that is applied later is outside of the earlier ones: checkpoints must see attention and tiles
# inside of them, and micro-batches run the checkpointed model. Ranges of a Sequential replace its forward and come
# before all that wraps a whole model, which may be a Sequential itself.
_OURS: tuple[str, ...] = (
    "tightfit.techniques.lifetimes.allocator_settings:ExpandableSegments",
    "tightfit.techniques.lifetimes.zero_grad:ZeroGrad",
    "tightfit.techniques.optimizer.optimizer_kernel:OptimizerKernel",
    "tightfit.techniques.attention.attention_kernels:Attention",
    "tightfit.techniques.tiling.tiled_tokens:TiledTokens",
    "tightfit.techniques.tiling.tiled_convolutions:TiledConvolutions",
    "tightfit.techniques.recomputation.sequential_checkpointing:SequentialCheckpointing",
    "tightfit.techniques.lifetimes.empty_cache:EmptyCache",
    "tightfit.techniques.optimizer.update_in_backward:UpdateInBackward",
    "tightfit.techniques.precision.autocast:Autocast",
    "tightfit.techniques.precision.pure_bf16:PureBf16",
    "tightfit.techniques.optimizer.low_bit_states:LowBitStates",
    "tightfit.techniques.optimizer.factored_states:FactoredStates",
    "tightfit.techniques.optimizer.optimizer_offload:OptimizerOffload",
    "tightfit.techniques.precision.low_bit_offload:LowBitOffload",
    "tightfit.techniques.recomputation.selective_checkpointing:SelectiveCheckpointing",
    "tightfit.techniques.recomputation.checkpointing:Checkpointing",
    "tightfit.techniques.recomputation.offloaded_checkpointing:OffloadedCheckpointing",
    "tightfit.techniques.recomputation.nested_checkpointing:NestedCheckpointing",
    "tightfit.techniques.offload.weight_streaming:WeightStreaming",
    "tightfit.techniques.offload.trained_weight_streaming:TrainedWeightStreaming",
    "tightfit.techniques.offload.activation_offload:ActivationOffload",
    "tightfit.techniques.loss_head.chunked_loss:ChunkedLoss",
    "tightfit.techniques.micro_batches.micro_batches:MicroBatches",
    "tightfit.techniques.offload.asynchronous_copies:AsynchronousCopies",
    "tightfit.techniques.lifetimes.kept_alive:KeptAlive",
    "tightfit.techniques.trained.freezing:Freezing",
    "tightfit.techniques.trained.adapters:Adapters",
)


def import_ours() -> None:
    """Imports what our techniques offer; the code that puts them on a model is imported with its first use."""
    for place in _OURS:
        importlib.import_module(place.partition(":")[0])


@cache
def techniques() -> dict[str, AbstractTechnique]:
    """Every technique by its name."""
    found = [_load(place) for place in _OURS]
    found += [point.load()() for point in entry_points(group="tightfit.techniques")]
    return {technique.name: technique for technique in found}


def technique(name: str) -> AbstractTechnique:
    """The technique `name`.

    Raises:
        PlanError: there is none.
    """
    known = techniques()
    if name not in known:
        near = difflib.get_close_matches(str(name), known, n=1)
        nearest = f" (did you mean {near[0]}?)" if near else ""
        raise PlanError(f"there is no technique '{name}'{nearest}; there are {', '.join(sorted(known))}")
    return known[name]


def _load(place: str) -> AbstractTechnique:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)()
