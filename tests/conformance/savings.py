"""What a technique promises on the workload where it promises most, and what the trace with it holds, in bytes at the peak."""

import dataclasses
from collections.abc import Callable

import numpy as np
from tests.conformance.conftest import CARD, Tapes, max_saved
from tests.conformance.models import MODELS

from tightfit.allocator.settings import AllocatorSettings
from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.planner import problem as problems
from tightfit.planner.option import Option
from tightfit.simulate.timeline_bytes import MemoryTimeline, replay_timeline
from tightfit.simulate.with_empty_cache import with_emptied_cache
from tightfit.simulate.workspaces import with_workspaces_of
from tightfit.tape import Tape
from tightfit.techniques.registry import technique
from tightfit.techniques.trained.adapters import peak_with_adapters

# Where the small models have little of what a technique saves.
WORKLOAD_OF = {
    "allocator_settings": "uneven",
    "empty_cache": "uneven",
    "update_in_backward": "wide",
    "optimizer_kernel": "wide",
    "weight_streaming": "with_adapters",
    **dict.fromkeys(("attention", "autocast", "pure_bf16", "low_bit_offload", "micro_batches", "freezing"), "decoder"),
    "trained_weight_streaming": "decoder",
    # Where the allocator's rounding is little beside what moves.
    **dict.fromkeys(("activation_offload", "offloaded_checkpointing"), "decoder"),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Saving:
    """Peaks in bytes: of the plain run, promised, and traced."""

    plain: int
    promised: int
    traced: int


def timeline(tape: Tape, settings: str = "") -> MemoryTimeline:
    """Allocated and reserved bytes after each event, with these settings of the allocator."""
    return replay_timeline(with_workspaces_of(find(CARD), tape), AllocatorSettings.parse(settings))


def allocated(tape: Tape) -> np.ndarray:
    """Allocated bytes after each event."""
    return timeline(tape).allocated


def saving_of(name: str, tapes: Tapes) -> Saving:
    """The saving of the technique `name`; nothing promised where it offers nothing that changes bytes."""
    if name in _OF_ADVICE:
        return _OF_ADVICE[name](tapes)
    model, options = _where_it_saves_most(name, tapes)
    if options and options[0].is_of_the_allocator:
        return _of_the_allocator(model, options[0], tapes)
    plain = allocated(tapes.of(model))
    problem = problems.build(plain, options)
    return Saving(
        plain=int(plain.max()),
        promised=int(problem.peak_bytes(range(len(problem.options)))),
        traced=int(allocated(tapes.of(model, options)).max()),
    )


def _where_it_saves_most(name: str, tapes: Tapes) -> tuple[str, list[Option]]:
    if name in WORKLOAD_OF:
        return WORKLOAD_OF[name], tapes.together(name, WORKLOAD_OF[name])
    offers = {model: tapes.together(name, model) for model in MODELS}

    def saved(item: tuple[str, list[Option]]) -> tuple[int, int]:
        problem = problems.build(allocated(tapes.of(item[0])), item[1])
        promised = problem.peak_bytes(()) - problem.peak_bytes(range(len(problem.options)))
        return int(promised), sum(map(max_saved, item[1]))

    return max(offers.items(), key=saved)


def _of_the_allocator(model: str, option: Option, tapes: Tapes) -> Saving:
    """Promised from the plain run, replayed with what the option does to the allocator: reserved bytes, as it leaves the allocated ones."""
    plain, traced = tapes.of(model), tapes.of(model, [option])
    emptied = with_emptied_cache(with_workspaces_of(find(CARD), plain), option.empties_at)
    promised = replay_timeline(emptied, AllocatorSettings.parse(option.alloc_conf))
    assert allocated(traced).max() == allocated(plain).max()
    return Saving(
        plain=int(timeline(plain).reserved.max()),
        promised=int(promised.reserved.max()),
        traced=int(timeline(traced, option.alloc_conf).reserved.max()),
    )


def _of_kept_alive(tapes: Tapes) -> Saving:
    """Promised by its advice; the program is then written as the advice says."""
    plain = tapes.of("lingering")
    (advice,) = technique("kept_alive").advice(Profile(plain, find(CARD)))
    peak = int(allocated(plain).max())
    return Saving(plain=peak, promised=peak - advice.saves_bytes, traced=int(allocated(tapes.of("clean")).max()))


def _of_adapters(tapes: Tapes) -> Saving:
    plain = tapes.of("decoder")
    assert list(technique("adapters").advice(Profile(plain, find(CARD))))
    return Saving(
        plain=int(allocated(plain).max()),
        promised=peak_with_adapters(Profile(plain, find(CARD)), 8),
        traced=int(allocated(tapes.of("with_adapters")).max()),
    )


# These say what to write, and are put on nothing.
_OF_ADVICE: dict[str, Callable[[Tapes], Saving]] = {"kept_alive": _of_kept_alive, "adapters": _of_adapters}
ADVICE_ONLY = frozenset(_OF_ADVICE)
