"""Tiled convolutions: runs a chain of convolutions, poolings and activations on slabs of the image or volume, each with its halo.

As in spatial partitioning (Dryden et al., "Improving strong-scaling of CNN training by exploiting finer-grained parallelism", arXiv:1903.06681), one
slab after the other on one card instead of in parallel on several. Intermediate results exist for one slab at a time, in both passes.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs
from tightfit.techniques.tiling.tiled_convolutions_options import tiled_convolutions_options

if TYPE_CHECKING:
    from tightfit.techniques.session import Session


@final
class TiledConvolutions(AbstractTechnique):
    """Trades a second forward pass, and computing halos twice, for what a chain saves for backward and nearly all of its temporaries."""

    name = "tiled_convolutions"
    exact = True
    needs = Needs.DIVISIBLE
    exactness = "the same up to the order of sums; the gradient of a weight in half precision is summed in float32"
    # A tape has no kernel sizes: halos are reckoned as those of kernels of three.
    tolerance = 0.15

    def options(self, profile: Profile) -> Iterable[Option]:
        """For each chain, and parts of it, several numbers of tiles."""
        yield from tiled_convolutions_options(self.name, profile)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps each Sequential once, with code that runs its chains."""
        from tightfit.techniques.tiling.apply_tiled_convolutions import apply_tiled_convolutions

        apply_tiled_convolutions(session, chosen)
