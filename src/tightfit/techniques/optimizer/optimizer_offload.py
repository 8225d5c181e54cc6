"""Optimizer offload: the states of an optimizer wait in host memory between its steps, and each parameter's are on the card while it is updated.

Ren et al., "ZeRO-Offload" (arXiv:2101.06840), but with the update on the card, by the script's own optimizer: what moves are the states, in both
directions at once, and neither gradients nor weights.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.gradient_readers import updates_in_backward
from tightfit.analysis.optimizer import OptimizerProfile
from tightfit.analysis.optimizer_algorithm import element_bytes_of
from tightfit.analysis.profile import Profile
from tightfit.cost.copies import copy_seconds
from tightfit.planner.option import Option
from tightfit.techniques.optimizer.quantized_state_options import Coding, coded_options
from tightfit.techniques.optimizer.state_sizes import MIN_NUMBERS
from tightfit.techniques.technique import AbstractTechnique, Choice, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# Parts of the host memory begin at multiples of this.
_ALIGNMENT = 512


@final
class OptimizerOffload(AbstractTechnique):
    """Trades host memory and traffic on the link for nearly all of the optimizer's states."""

    name = "optimizer_offload"
    exact = True
    needs = Needs.STEPS
    exactness = "the optimizer itself updates one parameter after the other: bit for bit with its own implementation, up to rounding with the fused kernel"
    tolerance = 0.15

    def options(self, profile: Profile) -> Iterable[Option]:
        """With the optimizer's present implementation, tensor by tensor, and with the fused one."""
        run = profile.optimizer
        if not run.step_ranges or updates_in_backward(run) or not len(run.state(run.step_ranges[-1])):
            return []
        size = element_bytes_of(run)
        # The states of two parameters are there at the same time: those that come, and those that leave.
        coding = Coding(
            bytes_kept=0.0,
            bytes_moved=0,
            num_passes=0,
            kernels_per_piece=0,
            numbers_per_piece=1 << 40,
            bytes_between=2 * size,
        )
        offered = coded_options(run, coding, technique=self.name)
        return [_at_host(run, option) for option in offered if "in_backward" not in option.settings]

    def apply(self, session: "Session", chosen: Sequence[Choice]) -> None:
        """Replaces the optimizers' steps."""
        from tightfit.techniques.optimizer.apply_optimizer_offload import apply_optimizer_offload

        apply_optimizer_offload(session, chosen)


def _at_host(run: OptimizerProfile, option: Option) -> Option:
    states = run.state(run.step_ranges[-1])
    sizes = run.tape.storages.num_bytes[states]
    sizes = sizes[sizes >= MIN_NUMBERS * element_bytes_of(run)]
    host_bytes = int((-(-sizes // _ALIGNMENT) * _ALIGNMENT).sum())
    bytes_of_gradients = int(run.tape.storages.num_bytes[run.gradients(run.step_ranges[-1])].sum())
    num_states = max(1, round(int(sizes.sum()) / max(1, bytes_of_gradients)))
    back, out = ([copy_seconds(int(size), run.device, to_card=way) for size in sizes.tolist()] for way in (True, False))
    # While the states of one parameter leave, those of the next come; those of a parameter are allocated one after the other.
    beside = sum(max(pair) for pair in zip(out, back[num_states:], strict=False))
    seconds = sum(back[:num_states]) + beside + sum(out[len(out) - num_states :])
    seconds *= len(run.steady) / run.num_steps
    return dataclasses.replace(
        option,
        exact=True,
        settings={**option.settings, "host_bytes": host_bytes},
        seconds=option.seconds + seconds,
        host_bytes=host_bytes,
    )
