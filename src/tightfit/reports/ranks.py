"""The rank of a distributed program that a tape was recorded of, and its collectives, as JSON and in words."""

from typing import Any

from tightfit.tape import CollectiveKind, Tape
from tightfit.units import format_bytes


def rank_of(tape: Tape) -> dict[str, Any]:
    """What `tightfit estimate --json` adds for a distributed program, else nothing: the rank, and the collectives of the last step by kind and size of the
    group; `bytes` are those of all `count` calls, as in `tightfit.tape.Collectives.num_bytes`.
    """
    if tape.num_ranks == 1:
        return {}
    begin, end = tape.operators_of_steps[-1] if tape.operators_of_steps else (0, len(tape.operators))
    table = tape.collectives.rows((tape.collectives.operator >= begin) & (tape.collectives.operator < end))
    found: dict[tuple[int, int], list[int]] = {}
    for kind, size, num_bytes in zip(
        table.kind.tolist(), table.group_size.tolist(), table.num_bytes.tolist(), strict=True
    ):
        total = found.setdefault((kind, size), [0, 0])
        total[0] += num_bytes
        total[1] += 1
    collectives = [
        {"kind": CollectiveKind(kind).name.lower(), "bytes": num_bytes, "group_size": size, "count": count}
        for (kind, size), (num_bytes, count) in found.items()
    ]
    return {
        "rank": tape.rank,
        "world_size": tape.num_ranks,
        "nodes": tape.num_nodes,
        "collectives": collectives,
        "communicators": len(tape.communicators),
    }


def rank_words(rank: dict[str, Any]) -> str:
    """The same as a line."""
    sent = ", ".join(
        f"{c['count']} {c['kind'].replace('_', '-')} of {format_bytes(c['bytes'])} in all among {c['group_size']}"
        for c in rank["collectives"]
    )
    return f"rank {rank['rank']} of {rank['world_size']}; collectives of a step: {sent or 'none on the GPU'}"
