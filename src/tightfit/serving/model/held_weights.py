"""What the weights of a model hold on a card beyond their elements: unused ends of the blocks that the caching allocator gives, and the table of rotary positions of an engine.

A tensor of 10 MiB or more has a segment of its own in whole 2 MiB, of which an end of up to 1 MiB is not split off and counts as allocated (c10/cuda/CUDACachingAllocator.cpp, `get_allocation_size` and
`should_split`: `remaining > kSmallSize`). Qwen2.5-14B in bfloat16 on two cards loses 3.5 MiB in each of 48 layers: 168 of the 13,952 MiB that vLLM reports.
"""

import re
from collections.abc import Iterable, Sequence

from tightfit.serving.model.model_facts import ModelFacts
from tightfit.serving.model.weight_formats import WeightFormat, row_bytes, weights_bytes
from tightfit.units import MIB

_OWN_SEGMENT = 10 * MIB
_WHOLE_SEGMENTS = 2 * MIB
_NOT_SPLIT = 1 * MIB
_EXPERT = re.compile(r"(?<=experts\.)\d+\.")


def unused_end(num_bytes: int) -> int:
    """Bytes that a tensor of so many bytes has in its block and does not use, where it has a segment of its own."""
    rest = -num_bytes % _WHOLE_SEGMENTS
    return rest if num_bytes >= _OWN_SEGMENT and rest <= _NOT_SPLIT else 0


def held_weights_bytes(
    facts: ModelFacts, of: WeightFormat | None, degree: int = 1, fused: Sequence[Sequence[str]] = ()
) -> int:
    """Bytes that the weights on one of `degree` ranks take from the caching allocator; modules that an engine has as one are named in `fused`."""
    return weights_bytes(facts, of, degree) + sum(map(unused_end, _tensors(facts, of, degree, fused)))


def rotary_bytes(facts: ModelFacts, item_bytes: int = 0) -> int:
    """Bytes of the sines and cosines of all positions that an engine keeps, once for each kind of rotary embedding (vllm/model_executor/layers/rotary_embedding, `cos_sin_cache` in the type of the model); `item_bytes` of a number, 0: of the model's type."""
    items = item_bytes or max((row.item_bytes for row in facts.weights if row.role == "embedding"), default=2)
    return (facts.max_positions or 0) * sum(facts.rotary_widths) * items


def _tensors(facts: ModelFacts, of: WeightFormat | None, degree: int, fused: Sequence[Sequence[str]]) -> Iterable[int]:
    """Bytes of each tensor as the engine has it."""
    first_of = {name: names[0] for names in fused for name in names}
    sizes: dict[str, int] = {}
    for row in facts.weights:
        # Engines have all experts of a layer in one tensor.
        path, _, tensor = _EXPERT.sub("", row.name).rpartition(".")
        parent, _, module = path.rpartition(".")
        held, plain = row_bytes(row, of, degree), row_bytes(row, None, degree)
        if of is not None and held < plain:
            # Its scales are tensors of their own.
            held = min(held, int(plain / row.item_bytes * of.bits / 8))
        key = f"{parent}.{first_of.get(module, module)}.{tensor}"
        sizes[key] = sizes.get(key, 0) + held
    return sizes.values()
