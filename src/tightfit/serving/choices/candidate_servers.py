"""The servers among which to choose: cards, degrees of tensor parallelism, formats of weights and cache, sizes of the batch."""

import dataclasses
from collections.abc import Iterator, Sequence

from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.serving.engine_rules import EngineRules
from tightfit.serving.model.weight_formats import WeightFormat
from tightfit.serving.serve_settings import ResolvedSettings, ServeSettings
from tightfit.serving.traced_server import Server, TracedModel

BATCHED_TOKENS = (512, 2048, 8192)
"""Tokens of a step that are tried; the engine's own default is always among them."""
SEQUENCES = (1, 8, 16, 32, 64, 128, 256, 512)
"""Requests at once that are tried, besides the engine's own default."""
SAMPLED_ROWS = (64, 256, 1024)
"""Rows that are sampled in the trace; fewer take what the next of these takes."""
CACHE_TYPES = ("auto", "fp8")
# CUDA cores for 8-bit floats came with Ada and Hopper; on older cards engines convert each number that they read.
_FLOAT8 = (8, 9)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PricedCard:
    """A kind of card, at most how many of them, and what one costs per hour (None: not said)."""

    device: Device
    most: int
    price_per_hour: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What candidates have in common that differ in their batch alone."""

    card: PricedCard
    degree: int
    weight_format: WeightFormat | None
    kv_dtype: str

    @property
    def replicas(self) -> int:
        """How many such servers the cards are enough for."""
        return self.card.most // self.degree

    @property
    def name(self) -> str:
        """`2 x NVIDIA L4, fp8 weights, fp8 cache`."""
        parts = [f"{self.degree} x {self.card.device.name}"]
        parts.append("weights as they are" if self.weight_format is None else f"{self.weight_format.name} weights")
        if self.kv_dtype != "auto":
            parts.append(f"{self.kv_dtype} cache")
        return ", ".join(parts)


def kinds(
    model: TracedModel,
    cards: Sequence[PricedCard],
    formats: Sequence[WeightFormat | None],
    cache_types: Sequence[str],
) -> Iterator[Kind]:
    """Every kind, those that change nothing first."""
    for card in cards:
        for degree in degrees(card.most):
            if degree in model.refused:
                continue
            for weight_format in formats:
                for kv_dtype in cache_types:
                    if kv_dtype != "fp8" or card.device.compute_capability >= _FLOAT8:
                        yield Kind(card=card, degree=degree, weight_format=weight_format, kv_dtype=kv_dtype)


def degrees(most: int) -> list[int]:
    """Powers of two up to `most`."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


def servers(
    model: TracedModel, kind: Kind, rules: EngineRules, asked: ServeSettings, max_model_lens: Sequence[int | None]
) -> Iterator[Server]:
    """The servers of a kind, by length of the longest request, tokens and requests of a step; what the user has set is not varied."""
    device = kind.card.device
    tokens = _tried(asked.max_num_batched_tokens, rules.chunk_tokens(device), BATCHED_TOKENS)
    sequences = _tried(asked.max_num_seqs, rules.max_sequences(device), SEQUENCES)
    for longest in max_model_lens:
        for num_tokens in tokens:
            for number in sequences:
                wanted = dataclasses.replace(
                    asked,
                    num_gpus=kind.degree,
                    kv_dtype=kind.kv_dtype,
                    max_model_len=longest,
                    max_num_batched_tokens=num_tokens,
                    max_num_seqs=min(number, num_tokens),
                )
                try:
                    settings = ResolvedSettings.of(wanted, rules, device, model.facts.max_positions)
                except UsageError:
                    # Without chunked prefill a batch is no smaller than the longest request.
                    continue
                yield Server(
                    model=model, device=device, rules=rules, settings=settings, weight_format=kind.weight_format
                )


def _tried(asked: int | None, default: int, others: Sequence[int]) -> list[int]:
    """What the user has set; else the engine's default first, then the others."""
    return [asked] if asked is not None else [default, *(other for other in others if other != default)]
