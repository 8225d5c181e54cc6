"""Seconds of one step of an engine, for any prompt and any batch, from the operators that were traced at a few sizes.

    step = weights' part(tokens in the step) + attention of each prompt's chunk + attention of each decoding request

What reads weights, norms and activations depends on how many tokens there are, not on whose they are. Attention of a chunk costs by its pairs of a query and a key, that of a
decoding request by the bytes of its cache, which FlashDecoding reads at the rate of memory. Layers with a window have no more keys than it shows.

The lower end of a range has products and attention alone, as if an engine fused all else; the upper one every kernel that transformers runs. Engines capture their
steps, so that the host does not hold them up.
"""

import dataclasses
import re
from collections.abc import Callable, Sequence

import numpy as np

from tightfit.cost.classes import operator_class
from tightfit.cost.efficiency import efficiency_of
from tightfit.devices.device import Device
from tightfit.serving.costs.profiled_batch import TracedStep
from tightfit.serving.costs.seconds_range import SecondsRange
from tightfit.serving.costs.traced_operators import TracedLayers, TracedOperators
from tightfit.serving.costs.weight_products import WeightProducts
from tightfit.serving.model.cache_size import CacheSize
from tightfit.tape import Column, Tape

_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
# Sizes at which seconds are worked out; between them they follow lines.
_GRID = np.unique(np.rint(np.geomspace(1, 65_536, 97)))
# Two chunks whose difference shows what a pair of a query and a key costs.
_CHUNKS = np.array([1024.0, 4096.0])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCosts:
    """Attention of the layers with one `window` (None: of those without): seconds of a chunk by `chunk` and by pair of query and key, and by cached token of a request."""

    window: int | None
    chunk: SecondsRange
    pair: SecondsRange
    cached_token: float

    def kept(self, num_tokens: int) -> int:
        """Tokens that these layers keep of a request of `num_tokens`."""
        return num_tokens if self.window is None else min(num_tokens, self.window)

    def pairs(self, num_tokens: int, context: int) -> float:
        """Pairs of a query and a key where `num_tokens` follow `context` of them."""
        if self.window is None or context + num_tokens <= self.window:
            return num_tokens * context + num_tokens * (num_tokens + 1) / 2
        growing = max(0, self.window - context)
        return growing * context + growing * (growing + 1) / 2 + (num_tokens - growing) * self.window


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """`sizes` are those of the grid, shape (n,); `mixed` and `decode` are the ends of the range at each, shape (n, 2), of all but attention: of so many tokens in a step
    with a prompt, and of so many requests in one without."""

    sizes: Column
    mixed: Column
    decode: Column
    attention: tuple[AttentionCosts, ...]

    def of_prompt(self, num_tokens: int, context: int = 0) -> SecondsRange:
        """Seconds of a step with `num_tokens` of one prompt, of which `context` are in the cache, and nothing else."""
        total = self._at(self.mixed, num_tokens)
        for each in self.attention:
            total = total + each.chunk + each.pair.times(each.pairs(num_tokens, context))
        return total

    def of_decoding(self, contexts: Sequence[int]) -> SecondsRange:
        """Seconds of a step in which requests that have so many tokens in the cache get one more each."""
        reading = sum(each.cached_token * each.kept(tokens) for each in self.attention for tokens in contexts)
        return self._at(self.decode, len(contexts)) + SecondsRange(low=reading, high=reading)

    def _at(self, table: Column, size: int) -> SecondsRange:
        low, high = (float(np.interp(size, self.sizes, table[:, end])) for end in (0, 1))
        return SecondsRange(low=low, high=high)

    def expected(self, table: Column, limit: int) -> Column:
        """The middle of the range of `table` at 0, 1 ... `limit`, shape (limit + 1,)."""
        values = np.interp(np.arange(limit + 1), self.sizes, table.mean(axis=1))
        values[0] = 0.0
        return values


def step_costs(
    tape: Tape,
    steps: Sequence[TracedStep],
    layers: Sequence[TracedLayers],
    *,
    device: Device,
    cache: CacheSize,
    products: WeightProducts,
    reductions: Callable[[int], float],
) -> StepCosts:
    """The costs from the prompts and decoding steps among the `steps` of `tape`.

    `products` says how the format of the weights changes those of theirs, and `reductions` what the all-reduces of so many tokens cost.
    """
    prompt, decode = (_traced(tape, steps, kind, layers) for kind in ("prompt", "decode"))
    return StepCosts(
        sizes=_GRID,
        mixed=_tables(prompt, device, products, reductions),
        decode=_tables(decode, device, products, reductions, keeps_attention=True),
        attention=_attention(prompt, device, cache, products),
    )


def _traced(tape: Tape, steps: Sequence[TracedStep], kind: str, layers: Sequence[TracedLayers]) -> TracedOperators:
    chosen = [step for step in steps if step.kind == kind]
    return TracedOperators.of_steps(tape, [step.at for step in chosen], [step.size for step in chosen], layers)


def _tables(
    operators: TracedOperators,
    device: Device,
    products: WeightProducts,
    reductions: Callable[[int], float],
    *,
    keeps_attention: bool = False,
) -> Column:
    seconds = products.seconds(operators, device, _GRID) * operators.times
    is_attention, is_product = _classes(operators)
    # Of a decoding step only what attention costs beside reading the cache is left, as it was traced with next to none.
    counts = np.ones(len(is_attention), dtype=bool) if keeps_attention else ~is_attention
    needed = counts & (is_product | is_attention) & ~operators.is_loop
    reduced = np.array([reductions(int(size)) for size in _GRID])
    return np.stack([seconds[:, needed].sum(axis=1) + reduced, seconds[:, counts].sum(axis=1) + reduced], axis=1)


def _classes(operators: TracedOperators) -> tuple[Column, Column]:
    """Which operators are of attention, and which are matrix products."""
    kinds = np.array([operator_class(name) for name in operators.names])
    return (kinds == "attention") | operators.is_superlinear, np.isin(kinds, ("matmul", "attention"))


def _attention(
    operators: TracedOperators, device: Device, cache: CacheSize, products: WeightProducts
) -> tuple[AttentionCosts, ...]:
    windows = {_layer(tensor.path): tensor.max_tokens for tensor in cache.tensors}
    rate = device.dram_bytes_per_second * efficiency_of(device).of_bandwidth["attention"]
    is_attention, is_product = _classes(operators)
    seconds = products.seconds(operators, device, _CHUNKS) * operators.times
    of_layer = [None if "encoder." in path else windows.get(_layer(path)) for path in operators.modules]
    found = []
    for window in sorted({*of_layer, *windows.values()}, key=lambda value: value or 0):
        own = is_attention & np.array([each == window for each in of_layer])
        pairs = (_CHUNKS * (_CHUNKS + 1) / 2).tolist()
        ends = []
        for chosen in (own & is_product, own):
            first, second = seconds[:, chosen].sum(axis=1).tolist()
            each_pair = max(0.0, (second - first) / (pairs[1] - pairs[0]))
            ends.append((each_pair, max(0.0, first - each_pair * pairs[0])))
        (low, low_fixed), (high, high_fixed) = ends
        found.append(
            AttentionCosts(
                window=window,
                chunk=SecondsRange(low=low_fixed, high=max(low_fixed, high_fixed)),
                pair=SecondsRange(low=low, high=high),
                cached_token=cache.bytes_of_token(window) / rate,
            )
        )
    return tuple(found)


def _layer(path: str) -> int | None:
    found = _LAYER.search(path)
    return None if found is None else int(found.group())
