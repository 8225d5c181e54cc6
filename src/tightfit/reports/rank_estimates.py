"""The ranks of a distributed program that were traced, and their collectives, as JSON and in words."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tightfit.cost.traced_collectives import traced_collective_seconds
from tightfit.devices.node import Node
from tightfit.simulate.estimate import Estimate
from tightfit.tape import CollectiveKind, Tape
from tightfit.units import format_bytes, format_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankEstimate:
    """The estimate of one traced rank. `role` is what it is among the others."""

    role: str
    tape: Tape
    estimate: Estimate


def worst_of(ranks: Sequence[RankEstimate]) -> RankEstimate:
    """The rank that needs most GPU memory, which decides whether the program fits."""
    return max(ranks, key=lambda rank: rank.estimate.peak.device_bytes)


def ranks_of(ranks: Sequence[RankEstimate], node: Node) -> dict[str, Any]:
    """What `tightfit estimate --json` adds for a distributed program, else nothing: the rank that the other figures are of, the traced ranks, and the collectives
    of its last step by kind and size of the group; `bytes` and `seconds` are those of all `count` calls, each on its own, `bytes` as in `tightfit.tape.Collectives.num_bytes`.
    """
    worst = worst_of(ranks)
    tape = worst.tape
    if tape.num_ranks == 1:
        return {}
    return {
        "rank": tape.rank,
        "world_size": tape.num_ranks,
        "nodes": tape.num_nodes,
        "node": node.name,
        "ranks": [
            {
                "rank": rank.tape.rank,
                "role": rank.role,
                "fits": rank.estimate.fits,
                "peak": dataclasses.asdict(rank.estimate.peak),
                "host_bytes": rank.estimate.host_peak_bytes,
                "seconds_per_step": rank.estimate.seconds_per_step,
            }
            for rank in ranks
        ],
        "collectives": _collectives(tape, node),
        "communicators": len(tape.communicators),
    }


def _collectives(tape: Tape, node: Node) -> list[dict[str, Any]]:
    begin, end = tape.operators_of_steps[-1] if tape.operators_of_steps else (0, len(tape.operators))
    chosen = (tape.collectives.operator >= begin) & (tape.collectives.operator < end)
    table, seconds = tape.collectives.rows(chosen), traced_collective_seconds(tape, node)[chosen]
    found: dict[tuple[int, int], list[float]] = {}
    for kind, size, num_bytes, taken in zip(
        table.kind.tolist(), table.group_size.tolist(), table.num_bytes.tolist(), seconds.tolist(), strict=True
    ):
        total = found.setdefault((kind, size), [0, 0, 0.0])
        total[0] += num_bytes
        total[1] += 1
        total[2] += taken
    return [
        {
            "kind": CollectiveKind(kind).name.lower(),
            "bytes": num_bytes,
            "group_size": size,
            "count": count,
            "seconds": taken,
        }
        for (kind, size), (num_bytes, count, taken) in found.items()
    ]


def rank_words(ranks: dict[str, Any]) -> str:
    """The same as lines."""
    lines = [
        f"rank {rank['rank']} ({rank['role']}): peak {format_bytes(rank['peak']['device_bytes'])}, {format_seconds(rank['seconds_per_step'])} per step"
        for rank in ranks["ranks"]
    ]
    if len(lines) == 1:
        lines = [f"rank {ranks['rank']} of {ranks['world_size']}, traced for {ranks['ranks'][0]['role']}"]
    elif lines:
        lines.append(
            f"all else is of rank {ranks['rank']} of {ranks['world_size']}, which needs most; ranks of other stages lie between these"
        )
    sent = ", ".join(
        f"{c['count']} {c['kind'].replace('_', '-')} of {format_bytes(c['bytes'])} in all among {c['group_size']} ({format_seconds(c['seconds'])})"
        for c in ranks["collectives"]
    )
    if not sent and not ranks["communicators"]:
        sent = (
            "none on the GPU, as the program makes no group of its processes: each has the whole model "
            f"(tightfit plan --gpus {ranks['world_size']} finds how to lay one out over them)"
        )
    return "\n".join([*lines, f"collectives of a step: {sent or 'none on the GPU'}"])
