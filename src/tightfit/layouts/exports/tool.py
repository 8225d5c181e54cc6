"""The interface of a tool that runs layouts: which ones it can run, how much of them it can recompute, what it keeps of a model, and its file.

The search for a layout asks it, so a layout that is exported is one that the tool runs as it was priced.
"""

import abc
import dataclasses
from collections.abc import Sequence

from tightfit.analysis.optimizer_algorithm import UPDATES_EACH_ALONE
from tightfit.layouts.exports.layout_run import Export, LayoutRun
from tightfit.layouts.layout import Layout, Recomputation
from tightfit.layouts.model.model_parts import ModelParts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AbstractTool(abc.ABC):
    """A tool that runs layouts, of a release; with `streams_weights` those whose weights are at the host too, with `updates_shares` each rank makes the program's own step for its share of the parameters, where their states are sharded. Subclasses are final; nothing concrete is overridden."""

    name: str
    version: str
    streams_weights: bool = False
    updates_shares: bool = False

    @abc.abstractmethod
    def refusal(self, layout: Layout, model: ModelParts) -> str:
        """Why the tool cannot run the layout, recomputation aside; empty if it can."""

    @abc.abstractmethod
    def recomputed(self, kind: Recomputation, layout: Layout, most: int) -> Sequence[int]:
        """How many of the `most` blocks of a rank can be recomputed in that way, in ascending order; none of them if it cannot be done."""

    @abc.abstractmethod
    def stored(self, model: ModelParts) -> ModelParts:
        """The model with the weights, gradients and states that the tool keeps of it."""

    @abc.abstractmethod
    def export(self, run: LayoutRun) -> Export:
        """The file for a layout that it does not refuse."""


def with_master_weights(model: ModelParts) -> ModelParts:
    """The model as Megatron-LM and DeepSpeed train it in half precision: of each parameter 2 bytes, 4 of its gradient, 4 of a master copy in float32 that is
    sharded as the optimizer states are, and the states in float32 (Megatron-LM, docs of the distributed optimizer: 18 bytes, or 6 + 12/d over d ranks; ZeRO, Rajbhandari et al. 2020).
    """
    # Gradients are summed up in buffers that are there all the time, and reduced in them.
    model = dataclasses.replace(model, has_buckets=False, early_gradients=1.0)
    if model.computed_dtype == "float32":
        return model
    # States per element, whatever the program stores weights in.
    num_states = model.states_per_parameter
    return dataclasses.replace(
        model,
        stored_per_parameter=model.stored_per_parameter * (0.5 if model.stored_dtype == "float32" else 1.0),
        gathered_per_parameter=1.0,
        gradients_per_parameter=2.0,
        states_per_parameter=2.0 * (1 + num_states),
        reduced_per_gathered=2.0,
    )


def joint_optimizers(model: ModelParts) -> str:
    """Which optimizers of the program are not known to update each parameter by itself, as a sentence; empty where all are."""
    joint = [name for name in model.tape.optimizers if name not in UPDATES_EACH_ALONE]
    return f"{' and '.join(joint)} is not known to update each parameter independently" if joint else ""


def first_reason(*cases: tuple[bool, str]) -> str:
    """The reason of the first case that holds; empty if none does."""
    return next((reason for holds, reason in cases if holds), "")


def all_or_none(kind: Recomputation, most: int) -> tuple[int, ...]:
    """The counts of a tool that recomputes all blocks as a whole, or none."""
    return (most,) if kind == "full" and most else ()
