"""What steps of an engine cost and requests hold, in whole numbers: femtoseconds and bytes, so that a run of a million steps adds up to the same time however it is summed.

The seconds are the middles of the ranges of `tightfit.serving.costs.step_costs`.
"""

import dataclasses
from collections.abc import Sequence

from tightfit.serving.costs.step_costs import StepCosts
from tightfit.serving.model.cache_size import CacheSize

FEMTOSECONDS = 10**15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTimes:
    """Femtoseconds of attention in the layers with one `window` of tokens (None: without end)."""

    window: int | None
    chunk: int
    pair: int
    cached_token: int

    def of_chunk(self, num_tokens: int, context: int) -> int:
        """Of `num_tokens` of a prompt that follow `context` of them: each sees those before it, as far as the window shows."""
        window = self.window
        if window is None or context + num_tokens <= window:
            pairs = num_tokens * context + num_tokens * (num_tokens + 1) // 2
        else:
            growing = max(0, window - context)
            pairs = growing * context + growing * (growing + 1) // 2 + (num_tokens - growing) * window
        return self.chunk + self.pair * pairs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadCosts:
    """Femtoseconds of all but attention: `mixed` by the tokens of a step with a prompt, `decode` by the requests of one without; both as long as a step can be."""

    mixed: Sequence[int]
    decode: Sequence[int]
    attention: tuple[AttentionTimes, ...]

    @classmethod
    def of(cls, costs: StepCosts, *, max_tokens: int, max_requests: int) -> "LoadCosts":
        """Of steps with at most so many tokens and requests."""
        return cls(
            mixed=_whole(costs.expected(costs.mixed, max_tokens).tolist()),
            decode=_whole(costs.expected(costs.decode, max_requests).tolist()),
            attention=tuple(
                AttentionTimes(
                    window=each.window,
                    chunk=round(each.chunk.middle * FEMTOSECONDS),
                    pair=round(each.pair.middle * FEMTOSECONDS),
                    cached_token=round(each.cached_token * FEMTOSECONDS),
                )
                for each in costs.attention
            ),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CachePages:
    """The cache of an engine: `capacity` bytes, pages of `block_tokens`, and `growth`, which has pairs of a number of pages and the bytes of each page beyond it, the first
    for none. `fixed` bytes are held by a request of any length."""

    capacity: int
    block_tokens: int
    fixed: int
    growth: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, size: CacheSize, capacity: int) -> "CachePages":
        """Of a cache whose layers grow as `size` says."""
        block = size.block_tokens
        last = {0, *(size.pages_of_window(t.max_tokens) for t in size.tensors if t.max_tokens is not None)}
        fixed = size.request_bytes(0)
        growth = tuple(
            (pages, size.request_bytes((pages + 1) * block) - size.request_bytes(pages * block))
            for pages in sorted(last)
        )
        return cls(capacity=capacity, block_tokens=block, fixed=fixed, growth=growth)

    def num_bytes(self, num_tokens: int) -> int:
        """Bytes of a request of `num_tokens`, in whole pages."""
        pages = -(-num_tokens // self.block_tokens)
        total = self.fixed
        ends = [*(begin for begin, _ in self.growth[1:]), pages]
        for (begin, each), end in zip(self.growth, ends, strict=True):
            total += each * max(0, min(end, pages) - begin)
        return total


def _whole(seconds: Sequence[float]) -> list[int]:
    return [round(each * FEMTOSECONDS) for each in seconds]
