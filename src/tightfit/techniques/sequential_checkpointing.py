"""Sequential checkpointing: consecutive children of a Sequential are computed again together, cut where little is handed on.

Chen et al., "Training deep nets with sublinear memory cost" (arXiv:1604.06174), for chains that have no blocks: a stack of convolutions, norms and
activations in one Sequential. Segments are halves, halves of halves and so on, each cut where the boundary is smallest (after a pooling, say).
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, final

import torch

from tightfit.cost.roofline import operator_seconds
from tightfit.devices.device import Device
from tightfit.errors import ApplyError
from tightfit.planner.option import Option
from tightfit.simulate.anatomy import Anatomy
from tightfit.tape import Tape
from tightfit.techniques.blocks import Block, recompute_option
from tightfit.techniques.recompute import Recomputed
from tightfit.techniques.sequential_ranges import Runner, check_sequential, put_range
from tightfit.techniques.session import Session
from tightfit.techniques.stretches import Row, Stretch, rows, waiting_bytes, with_settings
from tightfit.techniques.technique import AbstractTechnique, Choice

# Of all that waits; a segment that saves less is noise in a plan, and there are many.
_SMALLEST_SHARE = 0.01
# A cut leaves each side at least this share of what waits, if there is one that does.
_SMALLER_SIDE = 0.25


@final
class SequentialCheckpointing(AbstractTechnique):
    """Trades a second forward pass of some children of a Sequential for all that they keep but the input of the first."""

    name = "sequential_checkpointing"
    exact = True
    exactness = "bit for bit: the same operators on the same values, random state and autocast included"

    def options(self, tape: Tape, device: Device) -> Iterable[Option]:
        """One for each segment of each row of children; segments lie inside one another or apart."""
        anatomy, seconds = Anatomy(tape), operator_seconds(tape, device)
        least = _SMALLEST_SHARE * waiting_bytes(anatomy)
        for row in rows(anatomy):
            for stretch in _segments(row, 0, len(row)):
                if anatomy.bytes_of(stretch.visits[-1].waiting) >= least:
                    yield _option(self.name, anatomy, stretch, seconds)

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Puts one code around each Sequential, that runs its segments."""
        for choice in chosen:
            check_sequential(session, choice.where, choice.settings["begin"], choice.settings["end"])
        for choice in chosen:
            put_range(session, choice.where, choice.settings["begin"], choice.settings["end"], _recomputed)


def _option(technique: str, anatomy: Anatomy, stretch: Stretch, seconds: Any) -> Option:
    alike = stretch.alike(anatomy)
    block = Block(path=stretch.path, alike=alike, visits=stretch.visits, slots=stretch.slots)
    return with_settings(recompute_option(technique, anatomy, block, seconds), stretch, alike)


def _segments(row: Row, begin: int, end: int) -> Iterator[Stretch]:
    """This segment and, cut in two and again, all inside it; a segment never begins with what writes over its input."""
    if begin == 0 and row.begins_in_place(0):
        begin = 1
    if end - begin < 2:
        return
    yield row.stretch(begin, end)
    cuts = [c for c in range(begin + 1, end) if not row.begins_in_place(c)]
    if not cuts:
        return
    smaller = {c: min(row.waiting_bytes(begin, c), row.waiting_bytes(c, end)) for c in cuts}
    balanced = [c for c in cuts if smaller[c] >= _SMALLER_SIDE * row.waiting_bytes(begin, end)]
    at = min(balanced, key=row.boundary_bytes) if balanced else max(cuts, key=lambda c: smaller[c])
    yield from _segments(row, begin, at)
    yield from _segments(row, at, end)


def _recomputed(children: Sequence[torch.nn.Module]) -> Runner:
    chain = torch.nn.Sequential(*children)
    recomputed = Recomputed(chain)

    def run(value: Any) -> Any:
        version = value._version if isinstance(value, torch.Tensor) else 0
        result = recomputed(chain.forward, value)
        if isinstance(value, torch.Tensor) and value._version != version:
            raise ApplyError(
                f"the segment that begins with a {type(children[0]).__name__} writes over its own input; leave sequential_checkpointing out"
            )
        return result

    return run
