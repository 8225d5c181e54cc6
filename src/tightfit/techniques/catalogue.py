"""All techniques there are: ours, and those that installed packages offer under the entry point `tightfit.techniques`.

Ours are in the order in which they are put on a model: what works inside a module before what is wrapped around it.
"""

import importlib
from functools import cache
from importlib.metadata import entry_points

from tightfit.errors import PlanError
from tightfit.techniques.technique import AbstractTechnique

_OURS: tuple[str, ...] = (
    "tightfit.techniques.allocator_settings:AllocatorSettings",
    "tightfit.techniques.empty_cache:EmptyCache",
    "tightfit.techniques.zero_grad:ZeroGrad",
    "tightfit.techniques.optimizer_kernel:OptimizerKernel",
    "tightfit.techniques.update_in_backward:UpdateInBackward",
    "tightfit.techniques.attention:Attention",
    "tightfit.techniques.tiled_tokens:TiledTokens",
    "tightfit.techniques.tiled_convolutions:TiledConvolutions",
    "tightfit.techniques.sequential_checkpointing:SequentialCheckpointing",
    "tightfit.techniques.autocast:Autocast",
    "tightfit.techniques.pure_bf16:PureBf16",
    "tightfit.techniques.low_bit_states:LowBitStates",
    "tightfit.techniques.factored_states:FactoredStates",
    "tightfit.techniques.selective_checkpointing:SelectiveCheckpointing",
    "tightfit.techniques.checkpointing:Checkpointing",
    "tightfit.techniques.nested_checkpointing:NestedCheckpointing",
    "tightfit.techniques.chunked_loss:ChunkedLoss",
    "tightfit.techniques.micro_batches:MicroBatches",
    "tightfit.techniques.kept_alive:KeptAlive",
    "tightfit.techniques.freezing:Freezing",
    "tightfit.techniques.adapters:Adapters",
)


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
        raise PlanError(f"there is no technique '{name}'; there are {', '.join(sorted(known))}")
    return known[name]


def _load(place: str) -> AbstractTechnique:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)()
