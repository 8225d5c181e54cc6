"""Tiled tokens: runs a token-wise module on some tokens at a time, and again in its backward pass.

The memory-centric tiling of Rajbhandari et al., "ZeRO-Infinity" (arXiv:2104.07857), section 5.1.3, along tokens instead of weights, as in Jacobs et
al., "Arctic Long Sequence Training" (arXiv:2506.13996), for any module: intermediate results exist for one tile at a time, even while its own
backward pass runs, unlike with checkpointing.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.profile import Profile
from tightfit.planner.option import Option
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs
from tightfit.techniques.tiling.tiled_tokens_options import tiled_tokens_options

if TYPE_CHECKING:
    from tightfit.techniques.session import Session


@final
class TiledTokens(AbstractTechnique):
    """Trades a second forward pass of a token-wise module, in small kernels, for what it saves for backward and nearly all of its temporaries."""

    name = "tiled_tokens"
    exact = True
    needs = Needs.DIVISIBLE
    exactness = "the same up to the order of sums; the gradient of a weight in half precision is summed in float32"
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """For each module several numbers of tiles, with and without a recomputed module around it."""
        yield from tiled_tokens_options(self.name, profile)

    def reason(self, profile: Profile) -> str:
        """That no module is of the kind."""
        if next(iter(self.options(profile)), None) is not None:
            return ""
        return "no module that treats each token independently, such as an MLP, has large enough intermediate tensors"

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps the forward of each module; that it is token-wise is proved on its first tile, before any result is used."""
        from tightfit.techniques.tiling.apply_tiled_tokens import apply_tiled_tokens

        apply_tiled_tokens(session, chosen)
