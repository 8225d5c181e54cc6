"""Suggestions about the input pipeline: workers, pinned memory, copies that nobody waits for, decoded samples that are kept.

They change no value that is computed, but a loader's order of random draws: with workers, each has a random state of its own.
"""

import math
from collections.abc import Iterator

from tightfit.planner.suggestion import Suggestion
from tightfit.simulate.input_pipeline import InputPipeline, LoaderCost
from tightfit.units import format_bytes, format_seconds

_LEAST_SHARE = 0.02
"""What takes less of a step is not worth a sentence."""
_LOAD = 0.8
"""How much of their time workers may be busy, so that a slow batch is waited for by none."""
_CORES_OF_ANY = 4  # that any machine with a GPU has
_MOST_WORKERS = 16
_PREFETCH = 2  # the default of torch.utils.data.DataLoader


def suggestions_on_loading(pipeline: InputPipeline | None, *, has_copies_beside: bool = False) -> Iterator[Suggestion]:
    """One for each loader that steps wait for, and one for copies that the host waits for, unless a plan `has_copies_beside` the computation."""
    if pipeline is None or not pipeline.step_seconds:
        return
    for cost in pipeline.loaders:
        yield from _on_loader(pipeline, cost)
    saved = pipeline.step_seconds - pipeline.async_seconds
    # A loader's batches are not written to again; host tensors of the program's own may be, while they are copied.
    if pipeline.loaders and not has_copies_beside and saved >= _LEAST_SHARE * pipeline.step_seconds:
        pins = "pin_memory=True in the DataLoader and " if pipeline.num_pageable else ""
        yield Suggestion(
            what=f"{pins}.to(device, non_blocking=True) for its batches",
            where=pipeline.copy_line,
            saves_bytes=0,
            adds_seconds=-saved,
            effect=f"would take {format_seconds(saved)} off a step of {format_seconds(pipeline.step_seconds)}",
            note=f"the host waits for copies of {format_bytes(pipeline.copied_bytes)} in each; not for host tensors that are written to before their copy has ended, where a plan with --host copies them so without a change",
            is_one_line=True,
        )


def _on_loader(pipeline: InputPipeline, cost: LoaderCost) -> Iterator[Suggestion]:
    step, use = pipeline.step_seconds, cost.use
    # With so many workers, what is loaded beside a step is there when it ends.
    wanted = math.ceil(cost.load_seconds / (_LOAD * step))
    waited = pipeline.with_loading_seconds - step if not use.num_workers else cost.seconds_per_step - step
    if waited < _LEAST_SHARE * step or wanted <= use.num_workers:
        return
    measured = f"a batch takes {format_seconds(cost.load_seconds / cost.batches)} to load on this machine"
    if wanted <= _MOST_WORKERS:
        ahead_bytes = wanted * (use.prefetch_factor or _PREFETCH) * cost.batch_bytes
        ahead = f"{format_bytes(ahead_bytes)} of batches" if ahead_bytes else "batches"
        cores = f", and {wanted} need as many processor cores" if wanted > _CORES_OF_ANY else ""
        persistent = "" if use.is_persistent else ", persistent_workers=True"
        yield Suggestion(
            what=f"num_workers={wanted}{persistent} in the DataLoader",
            where=use.line,
            saves_bytes=0,
            adds_seconds=-waited,
            effect=f"would take up to {format_seconds(waited)} off a step of {format_seconds(step + waited)}",
            note=f"{measured}, in one process{cores}; {ahead} ahead in host memory, and random numbers are drawn in the workers",
        )
    if use.num_examples and use.batch_size and cost.batch_bytes:
        decoded = use.num_examples * cost.batch_bytes // use.batch_size
        yield Suggestion(
            what="keep decoded samples in host memory, or in a memory-mapped file (numpy.memmap)",
            where=use.line,
            saves_bytes=0,
            adds_seconds=None,
            effect=f"would need {format_bytes(decoded)} for {use.num_examples:,} samples",
            note=f"{measured}; not where samples are augmented at random before they are kept",
        )
