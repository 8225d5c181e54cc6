"""Detects data loaders without batches, which a loop that waits for its first batch would iterate forever, and notes how many examples there are."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler

from tightfit.capture.observe.attribution import user_line
from tightfit.capture.replace import replace
from tightfit.errors import CaptureError

# A program may read an empty loader in earnest, such as one of a small validation set; it does not do so many times between two steps.
_MAX_READINGS_BETWEEN_STEPS = 100
# Of these it is known that asking for their length changes nothing.
_SAMPLERS = (SequentialSampler, RandomSampler)

num_examples: dict[int, int] = {}
"""By the size of a batch, the most examples that a loader with such batches reads."""


def install(num_steps: Callable[[], int]) -> None:
    """Ends a loop that iterates an empty loader again and again; `num_steps` returns the number of finished steps."""
    begin = DataLoader.__iter__
    readings: Counter[tuple[int, int]] = Counter()

    def begun(loader: Any) -> Any:
        if type(loader.sampler) in _SAMPLERS and loader.batch_size is not None:
            known = num_examples.get(loader.batch_size, 0)
            num_examples[loader.batch_size] = max(known, len(loader.sampler))
        # An iterable data set has a sampler without an end, and without a length.
        is_known = type(loader.batch_sampler) is BatchSampler and type(loader.batch_sampler.sampler) in _SAMPLERS
        if is_known and not len(loader.batch_sampler):
            key = id(loader), num_steps()
            readings[key] += 1
            if readings[key] > _MAX_READINGS_BETWEEN_STEPS:
                raise CaptureError(_no_batch(loader))
        return begin(loader)

    replace(DataLoader, __iter__=begun)


def _no_batch(loader: Any) -> str:
    has = f"{user_line()} reads a DataLoader that has no batch, again and again"
    if loader.drop_last and loader.batch_size is not None:
        return f"{has}: its batches are of {loader.batch_size}, there are {len(loader.sampler)} examples, and drop_last is set; give it smaller batches"
    return has
