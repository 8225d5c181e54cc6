"""The search for a layout: every combination of degrees that the batch allows, pruned by a lower bound of its time, with as little recomputation as fits.

Layouts that use fewer cards than there are stay among the candidates, so more cards or more memory never make the answer slower; so do all of FSDP with full recomputation.
A layout that cannot beat the best ones even if its collectives cost nothing is left out.
"""

import dataclasses
import heapq
from collections.abc import Hashable, Iterable, Sequence

from tightfit.devices.device import Device
from tightfit.devices.node import Node
from tightfit.devices.nodes import nodes_for
from tightfit.layouts.answers.layout_plan import LayoutPlan, PricedLayout
from tightfit.layouts.exports.tool import AbstractTool
from tightfit.layouts.layout import Layout, Recomputation
from tightfit.layouts.layout_candidates import LayoutCandidates
from tightfit.layouts.model.model_parts import ModelParts
from tightfit.layouts.rank_bytes import rank_bytes
from tightfit.layouts.seconds.part_seconds import PricedParts
from tightfit.layouts.seconds.rank_seconds import StepClock
from tightfit.layouts.stages import Stage, recomputed_paths, stages_of

NUM_ALTERNATIVES = 3


class LayoutSearch:
    """Finds the fastest layout of one model on `num_gpus` cards of a kind, under `budget_bytes` a card; with a `tool` the fastest of those that it runs, with what it keeps of the model."""

    def __init__(
        self, model: ModelParts, device: Device, node: Node, *, budget_bytes: int, tool: AbstractTool | None = None
    ) -> None:
        model = model if tool is None else tool.stored(model)
        self.model = model
        self.tool = tool
        self.device = device
        self.node = node
        self.budget_bytes = budget_bytes
        self.priced = PricedParts(model, device)
        self.clock = StepClock(model, self.priced, node)
        self.candidates = LayoutCandidates(model, node, self.priced, tool)
        self.num_priced = 0

    def run(self, num_gpus: int, examples: int) -> LayoutPlan:
        """The plan for `examples` in a step of all cards together."""
        fitting: dict[str, PricedLayout] = {}
        refused: dict[str, PricedLayout] = {}
        best: list[float] = []
        for bound, layout in sorted(self.candidates.of(num_gpus, examples), key=lambda pair: pair[0]):
            if len(best) > NUM_ALTERNATIVES and bound >= -best[0]:
                break
            found = self._with_least_recomputation(layout)
            name = str(layout)
            if not found.fits:
                if name not in refused or found.worst.total_bytes < refused[name].worst.total_bytes:
                    refused[name] = found
                continue
            if name not in fitting or found.seconds.total < fitting[name].seconds.total:
                fitting[name] = found
                # The bound is the slowest of the best few different layouts; duplicates only make it looser.
                best = [
                    -p.seconds.total
                    for p in sorted(fitting.values(), key=lambda p: p.seconds.total)[: NUM_ALTERNATIVES + 1]
                ]
                heapq.heapify(best)
        ordered = sorted(fitting.values(), key=_preference)
        others = [p for name, p in refused.items() if name not in fitting]
        # Beside one that fits the question is what would be faster; where none does, how much is missing.
        least = sorted(others, key=lambda p: p.seconds.total if ordered else p.worst.total_bytes)
        return LayoutPlan(
            device=self.device.name,
            node=self.node.name,
            num_gpus=num_gpus,
            num_nodes=nodes_for(self.node, num_gpus),
            gpus_per_node=min(num_gpus, self.node.num_gpus),
            budget_bytes=self.budget_bytes,
            examples=examples,
            tokens_per_example=self.model.batch.sequence_length,
            best=self.priced_layout(ordered[0].layout) if ordered else None,
            alternatives=tuple(self.priced_layout(p.layout) for p in ordered[1 : NUM_ALTERNATIVES + 1]),
            refused=tuple(self.priced_layout(p.layout) for p in least[:NUM_ALTERNATIVES]),
            num_priced=self.num_priced,
            recomputed=recomputed_paths(self.model, ordered[0].layout) if ordered else (),
        )

    def priced_layout(self, layout: Layout) -> PricedLayout:
        """One layout, with its seconds and the memory of the ranks of each stage."""
        return self._priced(layout, stages_of(self.model, layout))

    def _priced(self, layout: Layout, stages: Iterable[Stage]) -> PricedLayout:
        self.num_priced += 1
        ranks = tuple(rank_bytes(self.model, layout, stage, self.device, self.node) for stage in stages)
        return PricedLayout(layout=layout, seconds=self.clock.step(layout), ranks=ranks, budget_bytes=self.budget_bytes)

    def _priced_by_worst(self, layout: Layout) -> PricedLayout:
        """As `priced_layout`, of alike stages only the one that holds most micro-batches."""
        largest: dict[Hashable, Stage] = {}
        for stage in stages_of(self.model, layout):
            key = (stage.counts, stage.has_before, stage.has_after)
            if key not in largest or stage.in_flight > largest[key].in_flight:
                largest[key] = stage
        return self._priced(layout, largest.values())

    def _with_least_recomputation(self, layout: Layout) -> PricedLayout:
        """The fastest of: no recomputation, or the fewest blocks of any kind that make it fit. If nothing does, full recomputation."""
        plain = self._priced_by_worst(layout)
        if plain.fits or not self.model.order:
            return plain
        most = max(stage.num_blocks for stage in stages_of(self.model, layout))
        kinds: tuple[Recomputation, ...] = ("selective", "alternate", "full")
        tool = self.tool
        counts = [range(1, most + 1) if tool is None else tool.recomputed(kind, layout, most) for kind in kinds]
        found = [self._fewest(layout, kind, of) for kind, of in zip(kinds, counts, strict=True) if of]
        fitting = [p for p in found if p.fits]
        return min(fitting, key=lambda p: p.seconds.total) if fitting else (found or [plain])[-1]

    def _fewest(self, layout: Layout, kind: Recomputation, counts: Sequence[int]) -> PricedLayout:
        """The layout with the least of `counts` blocks recomputed that makes it fit; with the most where none does."""
        high = self._priced_by_worst(dataclasses.replace(layout, recompute=kind, num_recomputed=counts[-1]))
        if not high.fits:
            return high
        low_at, high_at = -1, len(counts) - 1
        while high_at - low_at > 1:
            middle = (low_at + high_at) // 2
            found = self._priced_by_worst(dataclasses.replace(layout, recompute=kind, num_recomputed=counts[middle]))
            if found.fits:
                high, high_at = found, middle
            else:
                low_at = middle
        return high


def _preference(found: PricedLayout) -> tuple[float, int, int]:
    # Of two that take as long, the simpler one, on fewer cards.
    layout = found.layout
    return found.seconds.total, layout.num_gpus, layout.tp + layout.pp + layout.cp
