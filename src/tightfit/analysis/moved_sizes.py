"""What moves of a block, as sizes with their numbers: what that saves on the card, takes of the host, and adds to a step."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from tightfit.analysis.hidden_copies import TimeForCopies, copy_time
from tightfit.analysis.recomputable import RecomputableBlock
from tightfit.analysis.step_sides import host_waits
from tightfit.cost.host_python import HostWork
from tightfit.planner.option import Change
from tightfit.planner.sides import Sides

if TYPE_CHECKING:
    from tightfit.analysis.profile import Profile

# Parts of the slab begin at multiples of this, and blocks of the card's allocator too.
_ALIGNMENT = 512
# Parts of a file.
_PAGE = 4096

Sizes = Counter[int]
"""How many storages of each size, in bytes."""


class MovedSizes:
    """The storages of these `sizes` of each call of a block."""

    def __init__(
        self,
        profile: "Profile",
        block: RecomputableBlock,
        following: RecomputableBlock,
        sizes: Sequence[Sizes],
        *,
        to_disk: bool = False,
    ) -> None:
        self._profile = profile
        self._block, self._following = block, following
        self._num_calls = len(block.calls)
        self._sizes = sizes
        self._to_disk = to_disk

    def changes(self) -> Iterator[Change]:
        """Their memory is free once the block that follows is over, and taken again when the backward pass comes to that one; that of copies of weights once
        autocast's cache lets go of them."""
        num_bytes, until = self._profile.tape.storages.num_bytes, self._profile.lifetimes.cached_until
        for sizes, call, after in zip(self._sizes, self._block.calls, self._following.calls, strict=True):
            held = call.saved[until[call.saved] > after.end_event]
            cached = sizes & Counter(num_bytes[held].tolist())
            yield Change(begin=after.end_event, end=after.back_event, num_bytes=-_aligned(sizes - cached, _ALIGNMENT))
            begin = int(until[held].max(initial=0))
            if begin < after.back_event and cached:
                yield Change(begin=begin, end=after.back_event, num_bytes=-_aligned(cached, _ALIGNMENT))

    def bytes_away(self) -> int:
        """The bytes that they take of the host's memory, or of the file."""
        # Of several rounds of a step each gives that back before the next.
        calls_at_once = -(-self._num_calls // max(1, self._profile.modules.num_rounds))
        return -(
            -sum(_aligned(sizes, _PAGE if self._to_disk else _ALIGNMENT) for sizes in self._sizes)
            * calls_at_once
            // self._num_calls
        )

    def exposed(self) -> Sides:
        """What their copies add to each step: to the card's side what it waits for, and to the host's the Python that makes them."""
        found = 0.0
        for sizes, after in zip(self._sizes, self._following.calls, strict=True):
            found += copy_time(self._profile, after, to_disk=self._to_disk).exposed_seconds(
                bytes_of(sizes), sizes.total()
            )
        in_python = len(self._sizes) * HostWork.OFFLOADED_CALL.value / self._profile.num_steps
        waited = found / self._profile.num_steps
        # A host that waits for the card in each step waits for these too; another one is ahead of it meanwhile.
        return Sides(on_card=waited, on_host=in_python + (waited if host_waits(self._profile.tape) else 0.0))


def largest_hidden(there: Sizes, times: Sequence[TimeForCopies]) -> Sizes:
    """As many of these as hide in each of the `times`, the largest first: they are the fewest copies."""
    found: Sizes = Counter()
    for size in sorted(there, reverse=True):
        for _ in range(there[size]):
            longer = found + Counter({size: 1})
            if not all(time.hides(bytes_of(longer), longer.total()) for time in times):
                break
            found = longer
    return found


def selection_settings(sizes: Sizes, share: float) -> dict[str, Any]:
    """The settings of a choice that moves so many of each size, or, of another batch, the `share` of the bytes."""
    return {"storages": [[size, sizes[size]] for size in sorted(sizes, reverse=True)], "share": round(share, 4)}


def bytes_of(sizes: Sizes) -> int:
    """Their bytes."""
    return sum(size * number for size, number in sizes.items())


def _aligned(sizes: Sizes, alignment: int) -> int:
    return sum(-(-size // alignment) * alignment * number for size, number in sizes.items())
