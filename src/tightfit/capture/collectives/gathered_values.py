"""What a collective leaves in tensors whose values are known, if every rank has the values of the traced one.

Ranks run the same program on other data: counts, flags and sizes are the same on all of them or close to it, and nothing else is known of another rank.
"""

from collections.abc import Iterator

import torch

from tightfit.capture.collectives.arguments import Collective
from tightfit.tape import CollectiveKind as Kind


def results(call: Collective, sent: list[torch.Tensor], shapes: list[torch.Size]) -> list[torch.Tensor] | None:
    """The values of what `call` receives, from the values of what it sends; None where they depend on another rank alone. `shapes` are those that are received."""
    size, rank = call.group.size(), call.group.rank()
    if call.kind in (Kind.BROADCAST, Kind.SCATTER, Kind.RECEIVE) and (
        call.kind is Kind.RECEIVE or (call.peer != rank and call.kind is Kind.SCATTER)
    ):
        return None
    if call.kind in (Kind.ALL_REDUCE, Kind.REDUCE):
        is_whole = call.kind is Kind.ALL_REDUCE or call.peer == rank
        return [reduced(value, call.reduce, size) if is_whole else value for value in sent]
    if call.kind is Kind.BROADCAST:
        return list(sent)
    found = list(_rearranged(call, sent, size, rank))
    if len(found) != len(shapes) or any(
        value.numel() != shape.numel() for value, shape in zip(found, shapes, strict=True)
    ):
        return None
    return found


def _rearranged(call: Collective, sent: list[torch.Tensor], size: int, rank: int) -> Iterator[torch.Tensor]:
    if call.kind in (Kind.ALL_GATHER, Kind.GATHER):
        for value in sent:
            if call.is_one_each:
                yield value.flatten().repeat(size)
            else:
                yield from [value] * size
    elif call.kind in (Kind.REDUCE_SCATTER, Kind.SCATTER):
        own = [value.flatten().chunk(size)[rank] for value in sent] if call.is_one_each else sent[rank::size]
        yield from (reduced(value, call.reduce, size) for value in own)
    elif call.kind is Kind.ALL_TO_ALL:
        # What the others send here is what this rank sends to itself.
        if not call.is_one_each:
            yield from [sent[rank]] * size
        elif call.sizes[0]:
            yield sent[0].split(list(call.sizes[0]))[rank].flatten().repeat(size)
        else:
            yield sent[0].flatten().chunk(size)[rank].repeat(size)


def reduced(value: torch.Tensor, reduce: str, size: int) -> torch.Tensor:
    """`size` times the same value, reduced."""
    if reduce in ("sum", "premul_sum"):
        return value * size
    if reduce == "product":
        return value**size
    if reduce == "bxor" and not size % 2:
        return torch.zeros_like(value)
    return value
