"""Bytes that an engine keeps for adapters (LoRA), and what a second model that drafts tokens adds: both are there before the cache is sized."""

import dataclasses
import math
from typing import Self

from tightfit.errors import UsageError
from tightfit.serving.model.model_facts import ModelFacts, WeightRow

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those that vLLM takes as the largest rank (vllm/config/lora.py, MaxLoRARanks)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterSlots:
    """Room for `number` adapters at once, of at most `rank`."""

    rank: int
    number: int

    @classmethod
    def parsed(cls, text: str) -> Self:
        """Of `16` (one adapter) or `16:4` (four).

        Raises:
            UsageError: it is neither, or vLLM has no such rank.
        """
        rank, _, number = text.partition(":")
        try:
            found = cls(rank=int(rank), number=int(number or 1))
        except ValueError:
            raise UsageError(f"--lora {text}: write the largest rank and how many at once, 16:4") from None
        if found.number < 1:
            raise UsageError(f"--lora {text}: at least one adapter at once")
        if found.rank not in RANKS:
            raise UsageError(f"--lora {text}: vLLM takes the ranks {', '.join(map(str, RANKS))}")
        return found

    def num_bytes(self, facts: ModelFacts, degree: int) -> int:
        """Bytes on one of `degree` ranks: for each weight of a product two matrices for each adapter, of which one is cut with the weight (`fully_sharded_loras` is off)."""
        return sum(self._of(row, degree) for row in facts.weights if row.role == "linear" and row.takes_adapters)

    def _of(self, row: WeightRow, degree: int) -> int:
        *others, num_outputs, num_inputs = row.shape
        if row.cut.startswith("col") or row.cut == "packed_colwise":
            num_outputs = math.ceil(num_outputs / min(degree, row.parts or degree))
        elif row.cut in ("rowwise", "packed_rowwise", "rowwise_rep"):
            num_inputs = math.ceil(num_inputs / degree)
        return self.number * self.rank * math.prod(others) * (num_outputs + num_inputs) * row.item_bytes


def with_draft(facts: ModelFacts, draft: ModelFacts) -> ModelFacts:
    """`facts` with the weights and the cache of a model that drafts tokens for it."""
    weights = tuple(dataclasses.replace(row, name=f"draft.{row.name}", takes_adapters=False) for row in draft.weights)
    cache = tuple(dataclasses.replace(tensor, path=f"draft.{tensor.path}") for tensor in draft.cache)
    widths = (*facts.rotary_widths, *draft.rotary_widths)
    return dataclasses.replace(
        facts, weights=(*facts.weights, *weights), cache=(*facts.cache, *cache), rotary_widths=widths
    )
