"""Checkpointing with what it keeps at the host: a block is recomputed in its backward pass, and its input, or what hides of its products, waits in host memory.

Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models" (arXiv:1910.02054), section 6.1 (activation checkpoints moved
to the host), per block and beside the block that follows. An input is small beside what a block computes, so its copies hide nearly always.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.hidden_copies import copy_time, following_block, movable, own_input
from tightfit.analysis.moved_sizes import MovedSizes, Sizes, bytes_of, largest_hidden, selection_settings
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import RecomputableBlock, recompute_option
from tightfit.analysis.relative_places import relative_place
from tightfit.planner.option import Option
from tightfit.techniques.recomputation.kept_products import KeptProducts, kept_products
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

_SMALLEST_BYTES = 1 << 20
# Products below this share of what could move are not worth a copy.
_SMALLEST_SHARE = 0.01


@final
class OffloadedCheckpointing(AbstractTechnique):
    """Trades a second forward pass of a block and a little host memory for everything that it saves for backward, its input included."""

    name = "offloaded_checkpointing"
    exact = True
    needs = Needs.REPEATABLE
    exactness = "bit for bit, random state and autocast included; up to the order of a reduction where a decoder would fill a key-value cache"

    def options(self, profile: Profile) -> Iterable[Option]:
        """For each block that another one follows, all of it computed again, and all but its products, of which as much moves as hides."""
        for block in profile.blocks:
            following = following_block(profile, block)
            if following is None:
                continue
            inputs = [own_input(profile, call, after) for call, after in zip(block.calls, following.calls, strict=True)]
            if min(inputs) >= 0:
                yield _Moved(profile, block, following, _sizes_of_inputs(profile, inputs)).option(self.name)
            kept = kept_products(profile, block)
            if kept is not None:
                moved = _sizes_of_products(profile, block, following, inputs, kept)
                if moved is not None:
                    yield moved.option(self.name, kept)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps the forward of each block, and of each that follows one."""
        from tightfit.techniques.recomputation.apply_offloaded_checkpointing import apply_offloaded_checkpointing

        apply_offloaded_checkpointing(session, chosen)


class _Moved:
    """The sizes that move of each call of a block, as many of each, and which share they are of what could."""

    def __init__(
        self,
        profile: Profile,
        block: RecomputableBlock,
        following: RecomputableBlock,
        sizes: Sequence[Sizes],
        share: float = 1.0,
    ) -> None:
        self._profile = profile
        self._block, self._following = block, following
        self._sizes, self._share = sizes, share

    def option(self, technique: str, kept: KeptProducts | None = None) -> Option:
        """The option of moving these and recomputing all of the block but what is `kept`."""
        profile, block = self._profile, self._block
        again = recompute_option(technique, profile, block, None if kept is None else kept.is_kept)
        moves = MovedSizes(profile, block, self._following, self._sizes)
        host_bytes, sides = moves.bytes_away(), again.added_sides + moves.exposed()
        settings = {
            "following": relative_place(block.path, self._following.path),
            "smallest_bytes": min(_SMALLEST_BYTES, *self._sizes[-1]),
            **selection_settings(self._sizes[-1], self._share),
            "host_bytes": host_bytes,
            **({} if kept is None else kept.settings),
        }
        kind = "all" if kept is None else "cheap"
        return dataclasses.replace(
            again,
            equivalence_class=f"{again.equivalence_class}:{kind}:{self._following.equivalence_class}",
            settings=settings,
            changes=(*again.changes, *moves.changes()),
            seconds=profile.step.added(sides),
            sides=sides,
            host_bytes=host_bytes,
        )


def _sizes_of_inputs(profile: Profile, inputs: Sequence[int]) -> list[Sizes]:
    return [Counter({int(profile.tape.storages.num_bytes[storage]): 1}) for storage in inputs]


def _sizes_of_products(
    profile: Profile, block: RecomputableBlock, following: RecomputableBlock, inputs: Sequence[int], kept: KeptProducts
) -> _Moved | None:
    stored = profile.tape.storages.num_bytes
    there: list[Sizes] = []
    for call, after, given in zip(block.calls, following.calls, inputs, strict=True):
        products = np.intersect1d(call.saved[kept.is_kept(call)], movable(profile, call, after))
        large = stored[products if given < 0 else np.append(products, given)]
        there.append(Counter(large[large >= _SMALLEST_SHARE * large.sum()].tolist()))
    hidden = largest_hidden(there[-1], [copy_time(profile, after) for after in following.calls])
    if not hidden.total():
        return None
    share = bytes_of(hidden) / max(1, bytes_of(there[-1]))
    return _Moved(profile, block, following, [hidden & each for each in there], share)
