"""Bytes on a card of one batch of requests, from the traced model: its weights, its cache while it grows, and what a forward pass and its next tokens allocate."""

import dataclasses
from collections.abc import Sequence

from tightfit.serving.batches.batch_rules import BatchRules
from tightfit.serving.costs.profiled_batch import StepMemory, TracedStep, peaks
from tightfit.serving.model.cache_size import CacheSize
from tightfit.serving.model.held_weights import held_weights_bytes
from tightfit.serving.model.model_facts import ModelFacts
from tightfit.serving.model.weight_formats import WeightFormat, row_bytes
from tightfit.tape import Tape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedPeaks:
    """Peaks of forward passes by their tokens, and of next tokens by their rows, both traced at several sizes, between and beyond which they are affine."""

    forward: tuple[tuple[int, StepMemory], ...]
    sampler: tuple[tuple[int, StepMemory], ...]

    @classmethod
    def of_tape(cls, tape: Tape, steps: Sequence[TracedStep]) -> "TracedPeaks":
        """Of the batches in a trace; each is followed by its samplers, that of the first batch count."""
        batches = [place for place, step in enumerate(steps) if step.kind == "batch"]
        forward, sampler = [], []
        for place in batches:
            samplers = []
            for step in steps[place + 1 :]:
                if step.kind != "sample":
                    break
                samplers.append(step)
            found = peaks(tape, [steps[place].at, *(step.at for step in samplers)])
            forward.append((steps[place].size, found[0]))
            if not sampler:
                sampler = list(zip((step.size for step in samplers), found[1:], strict=True))
        return cls(forward=tuple(sorted(forward, key=_size)), sampler=tuple(sorted(sampler, key=_size)))

    def at(self, num_tokens: int, rows: int) -> StepMemory:
        """The larger of both peaks, for so many tokens, `rows` of which get a next one."""
        first, second = _affine(self.forward, num_tokens), _affine(self.sampler, rows)
        return StepMemory(
            allocated_bytes=max(first.allocated_bytes, second.allocated_bytes),
            reserved_bytes=max(first.reserved_bytes, second.reserved_bytes),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchMemory:
    """Bytes of one card: `weights` and `cache` (at its largest, with what of it is there twice), `activations` the rest of the peak, `unused` what the caching allocator reserves beyond
    that; and what is at the host."""

    weights: int
    cache: int
    activations: int
    unused: int
    host: int

    @property
    def allocated(self) -> int:
        """The peak of tensors (`torch.cuda.max_memory_allocated`)."""
        return self.weights + self.cache + self.activations

    @property
    def reserved(self) -> int:
        """The peak of what the caching allocator takes."""
        return self.allocated + self.unused


def batch_memory_of(
    facts: ModelFacts,
    traced: TracedPeaks,
    size: CacheSize,
    rules: BatchRules,
    weight_format: WeightFormat | None,
    *,
    cache: str,
    requests: int,
    prompt: int,
    answer: int,
) -> BatchMemory:
    """What `generate` holds for `requests` at once, with prompts and answers of so many tokens."""
    weights = held_weights_bytes(facts, weight_format) + kept_buffer_bytes(facts, weight_format)
    written_out = dequantised_bytes(facts, weight_format)
    held = held_at_end(facts, prompt, answer)
    begins = held if cache == "static" else held_at_end(facts, prompt, 0)
    phases = []
    for tokens, rows, sizes in ((requests * prompt, requests, begins), (requests, requests, held)):
        step = traced.at(tokens, rows)
        on_card, host = _cache_bytes(size, rules, cache, *sizes)
        fused = weight_format is not None and tokens <= weight_format.fused_rows
        phases.append(
            BatchMemory(
                weights=weights,
                cache=on_card * requests,
                activations=step.allocated_bytes + (0 if fused else written_out),
                unused=step.reserved_bytes - step.allocated_bytes,
                host=host * requests,
            )
        )
    peak, last = max(phases, key=lambda phase: phase.allocated), phases[-1]
    # Whichever phase has the peak, the cache is named as it is in the end, which is what grows with the lengths.
    return dataclasses.replace(last, activations=peak.allocated - weights - last.cache, unused=peak.unused)


def dequantised_bytes(facts: ModelFacts, weight_format: WeightFormat | None) -> int:
    """Bytes of the largest weight that products of many rows write out in the model's own type first, in as many copies as the format's kernels make."""
    if weight_format is None or not weight_format.fused_rows:
        return 0
    sizes = (row.num_bytes for row in facts.weights if row_bytes(row, weight_format) < row.num_bytes)
    return max(sizes, default=0) * weight_format.written_copies


def kept_buffer_bytes(facts: ModelFacts, weight_format: WeightFormat | None) -> int:
    """Bytes of the buffers that the format's kernels keep for the largest weight in the model's own type, as long as the model is there."""
    if weight_format is None or not weight_format.kept_copies:
        return 0
    sizes = (row.num_bytes for row in facts.weights if row_bytes(row, weight_format) < row.num_bytes)
    return max(sizes, default=0) * weight_format.kept_copies


def held_at_end(facts: ModelFacts, prompt: int, answer: int) -> tuple[int, int]:
    """Tokens in the cache, and those of the encoder: the last token of an answer is never read."""
    return (answer + 1, prompt) if facts.is_encoder_decoder else (prompt + max(0, answer - 1), 0)


def _cache_bytes(size: CacheSize, rules: BatchRules, cache: str, num_tokens: int, encoded: int) -> tuple[int, int]:
    """Bytes on the card for one request while its cache has so many tokens and grows by one more, and bytes at the host."""
    whole = size.request_bytes(num_tokens, encoded)
    if cache == "static":
        return whole, 0
    layers: dict[str, int] = {}
    moved: dict[str, int] = {}
    for tensor in size.tensors:
        own = dataclasses.replace(size, tensors=(tensor,)).request_bytes(num_tokens, encoded)
        layers[tensor.layer] = layers.get(tensor.layer, 0) + own
        # Layers with a window, or with states, are never offloaded (Cache, offload_only_non_sliding).
        if tensor.max_tokens is None and (tensor.token_bytes or tensor.encoder_token_bytes):
            moved[tensor.layer] = moved.get(tensor.layer, 0) + own
    largest = max(layers.values(), default=0)
    # Keys are replaced first, then values: one of the two is there twice.
    twice = largest // 2 if rules.copies == "tensor" else whole
    if cache == "offloaded":
        at_host = sum(moved.values())
        on_card = sum(sorted(moved.values())[-rules.layers_on_card :])
        return whole - at_host + on_card + twice, at_host
    if cache == "quantized":
        recent = size.request_bytes(min(num_tokens, rules.residual_tokens), encoded)
        bits = rules.quantized_bits + 32 / rules.quantized_group
        older = round((whole - recent) * bits / (8 * _item_bytes(size)))
        # A layer's keys and values are dequantised, and joined with the recent ones.
        return recent + older + 2 * largest, 0
    if cache == "fp8":
        item = _item_bytes(size)
        # Keys are joined and dequantised, then values, whose numbers are in float32 on the way.
        grows = round(largest / 2 / item)
        return round(whole / item) + grows + round(largest * (1 + 2 / item)), 0
    return whole + twice, 0


def _item_bytes(size: CacheSize) -> float:
    return size.element_bytes or max((tensor.item_bytes for tensor in size.tensors), default=2)


def _size(item: tuple[int, StepMemory]) -> int:
    return item[0]


def _affine(traced: Sequence[tuple[int, StepMemory]], size: int) -> StepMemory:
    (low, less), (high, more) = traced[0], traced[-1]
    factor = (size - low) / (high - low) if high > low else 0.0
    values = {
        name: max(0, round(getattr(less, name) + factor * (getattr(more, name) - getattr(less, name))))
        for name in ("allocated_bytes", "reserved_bytes")
    }
    return StepMemory(**values)
