"""Sequential checkpointing: consecutive children of a Sequential are recomputed together, cut where the boundary tensor is small.

Chen et al., "Training deep nets with sublinear memory cost" (arXiv:1604.06174), for chains that have no blocks: a stack of convolutions, norms and
activations in one Sequential. Segments are halves, halves of halves and so on, each cut where the boundary is smallest (after a pooling, say).
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import RecomputableBlock, recompute_option
from tightfit.analysis.sequences import LayerRange, saved_bytes, segments, with_settings
from tightfit.planner.option import Option
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# Of all that waits; a segment that saves less is noise in a plan, and there are many.
_SMALLEST_SHARE = 0.01


@final
class SequentialCheckpointing(AbstractTechnique):
    """Trades a second forward pass of some children of a Sequential for all that they save for backward except the input of the first."""

    name = "sequential_checkpointing"
    exact = True
    needs = Needs.REPEATABLE
    exactness = "bit for bit: the same operators on the same values, random state and autocast included"

    def options(self, profile: Profile) -> Iterable[Option]:
        """One for each segment of each sequence of children; segments are nested or disjoint."""
        module_calls = profile.modules
        least = _SMALLEST_SHARE * saved_bytes(module_calls)
        for sequence in profile.sequences:
            for layer_range in segments(sequence, 0, len(sequence)):
                if module_calls.lifetimes.bytes_of(layer_range.calls[-1].saved) >= least:
                    yield _option(self.name, profile, layer_range)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps each Sequential once, with code that runs its segments."""
        from tightfit.techniques.recomputation.apply_sequential_checkpointing import apply_sequential_checkpointing

        apply_sequential_checkpointing(session, chosen)


def _option(technique: str, profile: Profile, layer_range: LayerRange) -> Option:
    equivalence_class = layer_range.equivalence_class(profile.modules)
    path, numbers = layer_range.path, range(layer_range.begin, layer_range.end)
    block = RecomputableBlock(
        path=path,
        equivalence_class=equivalence_class,
        calls=layer_range.calls,
        slots=layer_range.slots | {f"segments@{path}.{number}" for number in numbers},
        num_saved_weights=sum(profile.modules.saved_weights[f"{path}.{number}"] for number in numbers),
    )
    return with_settings(recompute_option(technique, profile, block), layer_range, equivalence_class)
