"""Activation offload: what a block saves for backward waits in host memory or on disk, and comes back before its backward pass.

Rhu et al., "vDNN" (arXiv:1602.08124), per block of the module tree and by storage: a storage that is saved several times, or as views, moves once, and
parameters not at all. The copies run beside the blocks that follow and precede, so they cost time only where the link is slower than a block: each
block has an option that moves all of it, and where that does not hide, one that moves as much as does.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.hidden_copies import copy_time, following_block, movable
from tightfit.analysis.moved_sizes import MovedSizes, Sizes, bytes_of, largest_hidden, selection_settings
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import RecomputableBlock
from tightfit.analysis.relative_places import relative_place
from tightfit.engine.disk.disk_sizes import buffer_bytes_for, in_pages
from tightfit.planner.option import Option
from tightfit.tape import Column
from tightfit.techniques.offload.streamed_blocks import smallest_of
from tightfit.techniques.technique import AbstractTechnique, ChosenOption

if TYPE_CHECKING:
    from tightfit.techniques.session import Session


@final
class ActivationOffload(AbstractTechnique):
    """Trades host memory or disk, and traffic on the link, for what a block saves for backward, or for as much of it as the next block hides."""

    name = "activation_offload"
    exact = True
    exactness = "bit for bit: the same values are copied to the host and back"

    def options(self, profile: Profile) -> Iterable[Option]:
        """For each block that another one follows, all of it and what hides, to the host and to disk; they share slots with the modules inside and around it."""
        for block in profile.blocks:
            following = following_block(profile, block)
            if following is not None:
                for to_disk in (False, True):
                    yield from _options(self.name, profile, block, following, to_disk=to_disk)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps the forward of each block, and of each that follows one."""
        from tightfit.techniques.offload.apply_activation_offload import apply_activation_offload

        apply_activation_offload(session, chosen)


def _options(
    technique: str, profile: Profile, block: RecomputableBlock, following: RecomputableBlock, *, to_disk: bool
) -> Iterator[Option]:
    sizes = profile.tape.storages.num_bytes
    smallest = smallest_of(sizes[block.calls[-1].saved])
    pairs = list(zip(block.calls, following.calls, strict=True))
    there = [_large(sizes[movable(profile, call, after)], smallest) for call, after in pairs]
    if not any(there):
        return
    yield _option(technique, profile, block, following, there, smallest, 1.0, to_disk=to_disk)
    hidden = largest_hidden(there[-1], [copy_time(profile, after, to_disk=to_disk) for after in following.calls])
    if hidden.total() and hidden != there[-1]:
        # Calls of one block that save other sizes move as many of those as there are.
        found = [hidden & each for each in there]
        saved = bytes_of(_large(sizes[block.calls[-1].saved], smallest))
        share = bytes_of(hidden) / max(1, saved)
        yield _option(technique, profile, block, following, found, smallest, share, to_disk=to_disk)


def _option(
    technique: str,
    profile: Profile,
    block: RecomputableBlock,
    following: RecomputableBlock,
    sizes: Sequence[Sizes],
    smallest: int,
    share: float,
    *,
    to_disk: bool,
) -> Option:
    """The option of moving these sizes of each call."""
    moved = MovedSizes(profile, block, following, sizes, to_disk=to_disk)
    host_bytes, disk_bytes = moved.bytes_away(), 0
    if to_disk:
        host_bytes, disk_bytes = buffer_bytes_for(host_bytes), in_pages(host_bytes)
    kind = "all" if share == 1.0 else "hidden"
    return Option(
        technique=technique,
        where=block.path,
        equivalence_class=f"{technique}:{kind}:{block.equivalence_class}:{following.equivalence_class}:{'disk' * to_disk}",
        settings={
            "following": relative_place(block.path, following.path),
            "smallest_bytes": smallest,
            **selection_settings(sizes[-1], share),
            "host_bytes": host_bytes,
            **({"tier": "disk", "disk_bytes": disk_bytes} if to_disk else {}),
        },
        changes=tuple(moved.changes()),
        seconds=profile.step.added(moved.exposed()),
        sides=moved.exposed(),
        exact=True,
        slots=block.slots,
        host_bytes=host_bytes,
        disk_bytes=disk_bytes,
    )


def _large(num_bytes: Column, smallest: int) -> Sizes:
    return Counter(num_bytes[num_bytes >= smallest].tolist())
