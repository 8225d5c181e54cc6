"""Bytes of llama.cpp's server: which layers are on the card, their part of the cache, and the buffer of the graph.

The last layers go to the card first, each with its cache; the output is one more of them (`--n-gpu-layers`), the first or the last to go there, by version. A graph is reserved for a micro-batch,
whose activations and logits are in float32.
"""

import dataclasses
import math
import re
from collections import defaultdict

from tightfit.serving.batches.batch_memory import TracedPeaks
from tightfit.serving.batches.batch_rules import BatchRules
from tightfit.serving.model.cache_size import CacheSize
from tightfit.serving.model.model_facts import ModelFacts, WeightRow
from tightfit.serving.model.weight_formats import WeightFormat, row_bytes

_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")
_FLOAT32 = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SplitModel:
    """A model whose layers are shared out between card and host: bytes of the `layers` in order and of their `caches`, of the `output`, of what stays at the host, and of the graph's buffer."""

    layers: tuple[int, ...]
    caches: tuple[int, ...]
    output: int
    embedding: int
    compute: int
    output_first: bool = False

    @property
    def most(self) -> int:
        """Layers that can be on the card, the output among them."""
        return len(self.layers) + 1

    def on_card(self, num_layers: int) -> tuple[int, int]:
        """Bytes of weights and of cache on the card with so many layers there."""
        has_output = self._has_output(num_layers)
        first = len(self.layers) - (num_layers - has_output)
        return sum(self.layers[first:]) + has_output * self.output, sum(self.caches[first:])

    def at_host(self, num_layers: int) -> int:
        """Bytes at the host, weights and cache."""
        weights, caches = self.on_card(num_layers)
        return self.embedding + self.output + sum(self.layers) + sum(self.caches) - weights - caches

    def layers_at_host(self, num_layers: int) -> tuple[int, int]:
        """Bytes of the layers and of their caches at the host, without the output."""
        first = len(self.layers) - (num_layers - self._has_output(num_layers))
        return sum(self.layers[:first]), sum(self.caches[:first])

    def output_at_host(self, num_layers: int) -> int:
        """Bytes of the output at the host."""
        return 0 if self._has_output(num_layers) else self.output

    def _has_output(self, num_layers: int) -> bool:
        return num_layers > 0 and (self.output_first or num_layers == self.most)

    def largest_within(self, free_bytes: int) -> int | None:
        """The most layers for which there is room, None: not even for the graph's buffer."""
        fitting = [n for n in range(self.most + 1) if sum(self.on_card(n)) + self.compute <= free_bytes]
        return max(fitting, default=None)


def split_model(
    facts: ModelFacts,
    traced: TracedPeaks,
    size: CacheSize,
    rules: BatchRules,
    weight_format: WeightFormat | None,
    *,
    slots: int,
    context: int,
) -> SplitModel:
    """The parts of `facts` with so many slots, each with a context of so many tokens; `traced` is of a micro-batch."""
    layers: defaultdict[int, int] = defaultdict(int)
    caches: defaultdict[int, int] = defaultdict(int)
    output = embedding = 0
    num_layers = _number_of_layers(facts)
    heads = [row for row in facts.weights if row.role == "head"]
    tied = _tied_head(facts) if not heads else None
    for row in facts.weights:
        # A matrix that is the output too has the output's type in the file.
        num_bytes = row_bytes(row if row is not tied else dataclasses.replace(row, role="head"), weight_format)
        at = _layer(row.name)
        if at is not None and row.role not in ("embedding", "head"):
            layers[min(at, num_layers - 1)] += num_bytes
        elif row.role == "embedding":
            embedding += num_bytes
        else:
            output += num_bytes
    if tied is not None:
        # The matrix of the tokens stays at the host, and the output has a copy of its own on the card.
        output += row_bytes(dataclasses.replace(tied, role="head"), weight_format)
    padded = math.ceil(context / rules.context_step) * rules.context_step
    for tensor in size.tensors:
        at = _layer(tensor.path) or 0
        only = dataclasses.replace(size, tensors=(tensor,))
        caches[at] += only.request_bytes(padded) * slots
    vocabulary = max((row.shape[0] for row in (*heads, *([tied] if tied else []))), default=0)
    # ggml computes in float32, whatever the type of the weights.
    items = max((row.item_bytes for row in facts.weights), default=_FLOAT32)
    forward = traced.at(rules.micro_batch, 1).allocated_bytes * _FLOAT32 // items
    logits = vocabulary * (min(slots, rules.micro_batch) if rules.logits_of_slots else rules.micro_batch)
    # The mask of attention, of each token and each place of its slot, is there through all layers.
    mask = rules.micro_batch * padded * rules.mask_bytes
    return SplitModel(
        layers=tuple(layers[at] for at in range(num_layers)),
        caches=tuple(caches[at] for at in range(num_layers)),
        output=output,
        embedding=embedding,
        compute=mask + max(forward, (logits + _width(facts) * rules.micro_batch) * _FLOAT32),
        output_first=rules.output_first,
    )


def _number_of_layers(facts: ModelFacts) -> int:
    places = [_layer(tensor.path) for tensor in facts.cache]
    return max((at for at in places if at is not None), default=0) + 1


def _tied_head(facts: ModelFacts) -> WeightRow | None:
    matrices = [row for row in facts.weights if row.role == "embedding"]
    return max(matrices, key=lambda row: row.num_elements, default=None)


def _width(facts: ModelFacts) -> int:
    matrices = [row.shape[-1] for row in facts.weights if row.role in ("embedding", "head")]
    return max(matrices, default=0)


def _layer(name: str) -> int | None:
    found = _LAYER.search(name)
    return None if found is None else int(found.group())
