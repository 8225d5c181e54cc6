"""The blocks whose weights and gradients lie at the host, as `trained_weight_streaming` has them on one card: what a layout that streams has of each on a rank's card."""

import dataclasses
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BlocksAtHost:
    """The blocks of the model `where`, with the settings of the technique. `weight_bytes` are those of what is streamed, `block_bytes` those of all weights of these blocks, `trained_bytes` of those that are trained, `largest_bytes` those of the
    largest one: a block and the one that follows are on the card at once, with their gradients in the backward pass."""

    where: str
    settings: Mapping[str, Any]
    weight_bytes: int
    block_bytes: int
    trained_bytes: int
    largest_bytes: int

    @property
    def share(self) -> float:
        """The share of the blocks' weights that is streamed: small ones stay on the card."""
        return min(1.0, self.weight_bytes / max(1, self.block_bytes))

    @property
    def trained_share(self) -> float:
        """The share of the streamed weights that is trained, at least: what of adapters is large enough to be streamed is not known."""
        frozen = self.block_bytes - self.trained_bytes
        return max(0, self.weight_bytes - frozen) / max(1, self.weight_bytes)

    @property
    def gone_bytes(self) -> float:
        """What is away from the card when most of it is there."""
        return max(0.0, self.weight_bytes - 2 * self.largest_bytes * self.share)

    def to_json(self) -> dict[str, Any]:
        """The object `streamed` of the file that `tightfit run --gpus --plan` reads."""
        return {"where": self.where, **self.settings}
