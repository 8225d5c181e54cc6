"""The answer of a search for a layout, as plain data."""

import dataclasses
from typing import Any

from tightfit.layouts.answers.layout_costs import LayoutCost
from tightfit.layouts.exports.layout_run import Export
from tightfit.layouts.layout import Layout
from tightfit.layouts.rank_bytes import RankBytes
from tightfit.layouts.seconds.rank_seconds import StepSeconds

SCHEMA = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PricedLayout:
    """A layout with its seconds per step and the memory of the ranks of each stage of a pipeline."""

    layout: Layout
    seconds: StepSeconds
    ranks: tuple[RankBytes, ...]
    budget_bytes: int

    @property
    def worst(self) -> RankBytes:
        """The rank that needs most memory."""
        return max(self.ranks, key=lambda rank: rank.total_bytes)

    @property
    def fits(self) -> bool:
        """Whether each rank fits the budget."""
        return self.worst.total_bytes <= self.budget_bytes

    def to_json(self) -> dict[str, Any]:
        """The layout, its seconds and its ranks."""
        return {
            "layout": self.layout.to_json(),
            "fits": self.fits,
            "seconds_per_step": self.seconds.total,
            "seconds": self.seconds.parts(),
            "ranks": [
                {"rank": r.rank, "role": r.role, "total_bytes": r.total_bytes, "bytes": r.by_class} for r in self.ranks
            ],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutPlan:
    """The fastest layout that fits, the next ones, and the fastest of those that do not. `recomputed` are the modules of the blocks that each rank of the first recomputes. `examples` make one step of all cards; `tokens_per_example` is 0 where there are no tokens."""

    device: str
    node: str
    num_gpus: int
    num_nodes: int
    gpus_per_node: int
    budget_bytes: int
    examples: int
    tokens_per_example: int
    best: PricedLayout | None
    alternatives: tuple[PricedLayout, ...]
    refused: tuple[PricedLayout, ...]
    num_priced: int
    recomputed: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    exports: tuple[Export, ...] = ()
    cost: LayoutCost | None = None

    @property
    def fits(self) -> bool:
        """Whether any layout fits."""
        return self.best is not None

    def rate(self, found: PricedLayout) -> float:
        """Tokens per second of all cards together, or examples where there are no tokens."""
        return self.examples * (self.tokens_per_example or 1) / found.seconds.total

    def to_json(self) -> dict[str, Any]:
        """The object that `tightfit plan --gpus --json` prints, without `elapsed_seconds`."""
        key = "tokens_per_second" if self.tokens_per_example else "samples_per_second"
        best = self.best
        return {
            "schema": SCHEMA,
            "device": self.device,
            "node": self.node,
            "gpus": self.num_gpus,
            "nodes": self.num_nodes,
            "budget_bytes": self.budget_bytes,
            "global_batch": self.examples,
            "fits": self.fits,
            "layout": best.layout.to_json() if best else None,
            "recomputed": list(self.recomputed),
            "seconds_per_step": best.seconds.total if best else None,
            "seconds": best.seconds.parts() if best else None,
            key: self.rate(best) if best else None,
            "ranks": best.to_json()["ranks"] if best else [],
            "cost": self.cost.to_json() if self.cost else None,
            "alternatives": [{**p.to_json(), key: self.rate(p)} for p in self.alternatives],
            "refused": [p.to_json() for p in self.refused],
            "layouts_priced": self.num_priced,
            "exports": {export.tool: export.to_json() for export in self.exports},
            "assumptions": list(self.assumptions),
        }
