"""Quantised optimizer states: 8 or 4 bits between steps; see `tightfit.techniques.optimizer.states.state_codecs` for the format and its sources.

Quantisation is by Triton kernels on NVIDIA GPUs (torch's wheels for Linux bring Triton), by torch operators elsewhere and where these cannot be used. If bitsandbytes
is installed, its kernels can be used for 8 bits.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, final

from tightfit.analysis.gradient_readers import updates_in_backward
from tightfit.analysis.optimizer_algorithm import family_of
from tightfit.analysis.profile import Profile
from tightfit.devices.device import Device
from tightfit.planner.option import Option
from tightfit.techniques.optimizer.states.quantized_state_options import Coding, coded_options
from tightfit.techniques.optimizer.states.state_sizes import BLOCK_SIZE, LIBRARY, Bits, is_installed
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# Of each piece: absolute values, their maxima, quotients, codes in 32 bits and in few, written and read again; then codes in 32 bits, looked
# up, scaled, rounded. 4 bits are also packed and unpacked. Lookups and maxima reach less of the bandwidth than what is read in order, so more
# bytes are counted for them: as many as the same operators are priced at where they are traced.
_CODINGS: dict[Bits, Coding] = {
    8: Coding(
        bytes_kept=1 + 4 / BLOCK_SIZE[8],
        bytes_moved=80,
        num_passes=2,
        kernels_per_piece=11,
        bytes_between=8,
        bytes_more_in_16_bits=4,
    ),
    4: Coding(
        bytes_kept=0.5 + 4 / BLOCK_SIZE[4],
        bytes_moved=90,
        num_passes=2,
        kernels_per_piece=16,
        bytes_between=8,
        bytes_more_in_16_bits=4,
    ),
}
# One kernel each way: codes written and read, and the element itself.
_CODINGS_OF_KERNELS: dict[Bits, Coding] = {
    bits: Coding(
        bytes_kept=bits / 8 + 4 / BLOCK_SIZE[bits],
        bytes_moved=bits // 4,
        num_passes=2,
        kernels_per_piece=2,
        numbers_per_piece=2**31,
        bytes_between=0,
    )
    for bits in _CODINGS
}
_CODING_OF_LIBRARY = Coding(
    bytes_kept=1 + 4 / BLOCK_SIZE[8],
    bytes_moved=2,
    num_passes=2,
    kernels_per_piece=2,
    numbers_per_piece=2**31,
    bytes_between=0,
)


@final
class LowBitStates(AbstractTechnique):
    """Trades precision of an optimizer's averages, and time to quantise them, for three quarters or seven eighths of their bytes."""

    name = "low_bit_states"
    exact = False
    needs = Needs.STEPS
    exactness = "lossy: averages of gradients and of their squares are rounded to 8 or 4 bits after each step; the update itself is that of the parameter's type"
    tolerance = 0.15
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """8 and 4 bits, each with and without updates in the backward pass, for an optimizer with running averages."""
        run = profile.optimizer
        if not run.step_ranges or updates_in_backward(run) or family_of(run) == "adagrad":
            return []
        if not len(run.state(run.step_ranges[-1])):
            return []
        codings: list[tuple[dict[str, Any], Coding]]
        if _has_kernels(profile.device):
            codings = [({"bits": bits, "compiled": True}, coding) for bits, coding in _CODINGS_OF_KERNELS.items()]
        else:
            codings = [({"bits": bits}, coding) for bits, coding in _CODINGS.items()]
        if is_installed():
            codings.append(({"bits": 8, "library": LIBRARY}, _CODING_OF_LIBRARY))
        return [
            option
            for settings, coding in codings
            for option in coded_options(run, coding, technique=self.name, settings=settings)
        ]

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Replaces the optimizers' steps."""
        from tightfit.techniques.optimizer.apply_low_bit_states import apply_low_bit_states

        apply_low_bit_states(session, chosen)


def _has_kernels(device: Device) -> bool:
    """Whether Triton compiles for it (its README: compute capability 7.0 or later)."""
    return device.vendor == "nvidia" and device.compute_capability >= (7, 0)
