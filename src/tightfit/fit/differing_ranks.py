"""The ranks of a distributed program that differ: which ones to trace, and what each of them is."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from tightfit.capture.collectives.rank_traces import RankTraces
from tightfit.capture.collectives.world import World
from tightfit.tape import CollectiveKind, Tape

_MESSAGES = (CollectiveKind.SEND, CollectiveKind.RECEIVE)


def trace_ranks(capture: Callable[[World, RankTraces], Tape], world: World, *, is_chosen: bool) -> tuple[Tape, ...]:
    """The tapes of the ranks that differ, the one of `world` first; that one alone if the user has chosen it (`is_chosen`).

    Ranks differ where they send each other messages, as the stages of a pipeline do: the first, the last and one in the middle are traced.
    """
    traces = RankTraces()
    tapes = [capture(world, traces)]
    if not is_chosen:
        for rank in ranks_that_differ(tapes[0]):
            if rank != world.rank:
                tapes.append(capture(dataclasses.replace(world, rank=rank), traces))
    return tuple(tapes)


def ranks_that_differ(tape: Tape) -> tuple[int, ...]:
    """The ranks to trace of a program of which `tape` is one: of a pipeline the first, one in the middle and the last, else none besides."""
    members = pipeline_of(tape)
    return tuple(dict.fromkeys((members[0], members[len(members) // 2], members[-1]))) if members else (tape.rank,)


def pipeline_of(tape: Tape) -> tuple[int, ...]:
    """The ranks of the group in which the traced rank sends messages, in its order; none without messages."""
    table = tape.collectives
    groups = np.unique(table.group[np.isin(table.kind, _MESSAGES)]).tolist()
    return max((tape.communicators[group] for group in groups), key=len, default=())


def role_of(tape: Tape, tapes: Sequence[Tape]) -> str:
    """What the traced rank is among the `tapes` of one program: its place in a pipeline (of which it may have several stages), or one for all."""
    members = pipeline_of(tape)
    if not members:
        return "every rank" if len(tapes) == 1 else f"rank {tape.rank}"
    place = members.index(tape.rank)
    if place in (0, len(members) - 1):
        return "last of the pipeline" if place else "first of the pipeline"
    return f"{place + 1} of {len(members)} of the pipeline"
