"""The suggestion about what forward passes leave allocated after every step, more with each: a sum or a list that retains graphs or tensors."""

from collections.abc import Sequence

import numpy as np

from tightfit.analysis.source.accumulations import (
    ADVICE_ON_GROWTH,
    Accumulation,
    accumulations_from,
    advice_on_accumulation,
)
from tightfit.diagnosis.growth import growing_sites
from tightfit.diagnosis.step_spans import saved_bytes, steps_of
from tightfit.planner.suggestion import Suggestion
from tightfit.recordings.frames import AllocationSite
from tightfit.simulate.history import History
from tightfit.tape import Column, Phase
from tightfit.units import format_bytes


def suggestions_on_growth(history: History, places: tuple[AllocationSite, ...], phases: Column) -> list[Suggestion]:
    """One suggestion where something grows that forward passes allocate; `places` has an entry per stack, `phases` (`Phase`) one per block."""
    steps = steps_of(history, kinds=("step",))
    blocks = history.blocks
    sites = [
        site
        for site in growing_sites(history, places, steps)
        if (phases[site.blocks] == Phase.FORWARD).all() and site.is_piled_up(blocks, steps)
    ]
    if not sites:
        return []
    chosen = np.concatenate([site.blocks for site in sites])
    # Until the step is over, its own blocks are needed; those from before the first step are held by no step.
    ends = np.array([step.end for step in steps])
    own = np.searchsorted(ends, blocks.allocated_at[chosen], side="right")
    own_end, next_end = (ends[np.minimum(step, len(ends) - 1)] for step in (own, own + 1))
    # What the next step replaces is held by a variable, and no sum or list.
    is_piled_up = blocks.freed_at[chosen] >= next_end
    chosen, own_end = chosen[is_piled_up], own_end[is_piled_up]
    lines = [(site.place.line, site.place.function) for site in sites]
    lines += [(caller, "") for site in sites for caller in site.place.callers]
    held = accumulations_from(lines, [line for place in places for line in (place.line, *place.callers) if line])
    return [
        Suggestion(
            what=advice_on_accumulation(held[0]) if held else ADVICE_ON_GROWTH,
            where=held[0].line if held else sites[0].place.name,
            saves_bytes=saved_bytes(history, blocks.block_bytes[chosen], own_end, blocks.freed_at[chosen]),
            adds_seconds=0.0,
            note=_note(sum(site.bytes_per_step for site in sites), held),
            is_one_line=True,
        )
    ]


def _note(bytes_per_step: int, held: Sequence[Accumulation]) -> str:
    others = ", ".join(f"{one.line.rpartition('/')[2]} `{one.text}`" for one in held[1:])
    return "; ".join(
        (
            f"each step leaves {format_bytes(bytes_per_step)} more allocated than the one before",
            *(["found by names in the source"] if held else []),
            *([f"the same of {others}"] if others else []),
        )
    )
