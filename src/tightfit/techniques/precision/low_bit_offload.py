"""Low-bit offload: optimizer states in 8 bits, or in bfloat16, in host memory between the steps, encoded on the card so that only codes move.

With `master`, weights are in bfloat16 on the card too, and what was cut off of them in 8 bits more at the host: 3 bytes for each parameter of Adam's there, where
float32 states and master weights are 12. See `tightfit.techniques.precision.master_residual` and `tightfit.techniques.optimizer.states.state_codecs`.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, final

from tightfit.analysis.gradient_readers import updates_in_backward
from tightfit.analysis.intervals import changes
from tightfit.analysis.optimizer import OptimizerProfile, sides_of_update
from tightfit.analysis.optimizer_algorithm import element_bytes_of, family_of
from tightfit.analysis.profile import Profile
from tightfit.cost.copies import copy_seconds
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.host_python import HostWork
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.techniques.optimizer.states.quantized_state_options import Coding, coded_options, smaller_states
from tightfit.techniques.optimizer.states.state_sizes import BLOCK_SIZE, MIN_NUMBERS
from tightfit.techniques.precision.lower_precision import (
    can_be_lowered,
    changes_in_bfloat16,
    seconds_saved_in_bfloat16,
    sides_of_updates_in_float32,
)
from tightfit.techniques.technique import AbstractTechnique, ChosenOption, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

# Parts of the host memory begin at multiples of this.
_ALIGNMENT = 512
# Memory on the card for codes of so many parameters, of the largest one: what comes, is updated, and leaves.
_WINDOW = 3
# For each element: codes and scales at the host.
_HOST_BYTES = {"8-bit": (1.0, 4 / BLOCK_SIZE[8]), "bf16": (2.0,)}
# Nothing is kept on the card. In 8 bits the operators are those of `low_bit_states`; in bfloat16 random numbers are added to the bits, masked, compared and cast.
_CODINGS = {
    "8-bit": Coding(
        bytes_kept=0.0, bytes_moved=80, num_passes=2, kernels_per_piece=11, bytes_between=8, bytes_more_in_16_bits=4
    ),
    "bf16": Coding(bytes_kept=0.0, bytes_moved=44, num_passes=2, kernels_per_piece=8, bytes_between=14),
}
# The rest of a weight: its last bit, the quotient, random numbers, rounding, and the sums that say whether the weight is the one it was made of.
_RESIDUAL_BYTES_MOVED = 60
_RESIDUAL_KERNELS = 24
_RESIDUAL_BYTES_BETWEEN = 12


@final
class LowBitOffload(AbstractTechnique):
    """Trades precision of an optimizer's states, time to encode them and traffic on the link for all of their bytes on the card and most of those at the host."""

    name = "low_bit_offload"
    exact = False
    needs = Needs.STEPS
    exactness = "lossy: states are rounded to 8 bits, or to bfloat16 at random, after each step; with master weights in 24 bits, passes in bfloat16"
    tolerance = 0.4
    is_alike_in_batches = True

    def options(self, profile: Profile) -> Iterable[Option]:
        """8 bits and bfloat16, each with and without updates in the backward pass; and 8 bits with weights in bfloat16 for a run in float32."""
        run = profile.optimizer
        if not run.step_ranges or updates_in_backward(run) or family_of(run) in ("adagrad", "other"):
            return
        if not _large(run):
            return
        for kept, coding in _CODINGS.items():
            for option in coded_options(run, coding, technique=self.name, settings={"format": kept}):
                yield _at_host(run, option, kept)
        if can_be_lowered(run):
            yield _with_master(self.name, profile, run)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Replaces the optimizers' steps."""
        from tightfit.techniques.precision.apply_low_bit_offload import apply_low_bit_offload

        apply_low_bit_offload(session, chosen)


def _large(run: OptimizerProfile) -> list[int]:
    """The elements of each state that moves."""
    sizes = run.tape.storages.num_bytes[run.state(run.step_ranges[-1])] // element_bytes_of(run)
    return [count for count in sizes.tolist() if count >= MIN_NUMBERS]


def _host_bytes(counts: Iterable[int], kept: str) -> int:
    return sum(-(-round(part * count) // _ALIGNMENT) * _ALIGNMENT for count in counts for part in _HOST_BYTES[kept])


def _at_host(run: OptimizerProfile, option: Option, kept: str) -> Option:
    """The option with its codes at the host."""
    counts = _large(run)
    of_codes = _host_bytes(counts, kept)
    window = _WINDOW * _num_states(run) * _host_bytes([max(counts)], kept)
    # Encoding is much longer than the way of the codes, which are under way meanwhile.
    own = option.added_sides + run.sides
    sides = option.added_sides + Sides(on_card=_not_hidden(run, of_codes, own.on_card), on_host=_of_copies(run))
    return dataclasses.replace(
        option,
        settings={**option.settings, "host_bytes": of_codes, "window_bytes": window},
        changes=(*option.changes, *_in_steps(run, window)),
        seconds=run.step.added(sides),
        sides=sides,
        host_bytes=of_codes,
    )


def _with_master(technique: str, profile: Profile, run: OptimizerProfile) -> Option:
    counts, coding = _large(run), _CODINGS["8-bit"]
    num_states = _num_states(run)
    weights = counts[::num_states]
    residuals = sum(-(-count // _ALIGNMENT) * _ALIGNMENT for count in weights)
    host_bytes = _host_bytes(counts, "8-bit") + residuals
    window = _WINDOW * (num_states * _host_bytes([max(counts)], "8-bit") + max(counts))
    # Its states in float32, and what encoding the largest of them takes.
    beside = num_states * element_bytes_of(run) + max(_RESIDUAL_BYTES_BETWEEN, coding.bytes_between)
    changed: list[Change] = [*changes_in_bfloat16(run, "stochastic"), *smaller_states(run, coding)]
    changed += _in_steps(run, window + beside * max(counts))
    encoding = sides_of_update(
        run,
        coding.bytes_moved * sum(counts) + _RESIDUAL_BYTES_MOVED * sum(weights),
        coding.kernels_per_piece * len(counts) + _RESIDUAL_KERNELS * len(weights),
    )
    updates = sides_of_updates_in_float32(run) + encoding
    sides = (
        updates
        - run.sides
        + Sides(
            on_card=_not_hidden(run, host_bytes, updates.on_card) - seconds_saved_in_bfloat16(profile, everything=True),
            on_host=_of_copies(run),
        )
    )
    settings: Mapping[str, Any] = {"format": "8-bit", "master": "residual"}
    return Option(
        technique=technique,
        where="optimizer",
        settings={**settings, "host_bytes": host_bytes, "window_bytes": window},
        changes=tuple(change for change in changed if change.end > change.begin and change.num_bytes),
        seconds=profile.step.added(sides),
        sides=sides,
        exact=False,
        slots=frozenset({"precision", "optimizer"}),
        needs_new_trace=True,
        host_bytes=host_bytes,
    )


def _num_states(run: OptimizerProfile) -> int:
    gradients = run.tape.storages.num_bytes[run.gradients(run.step_ranges[-1])] // element_bytes_of(run)
    return max(1, round(len(_large(run)) / max(1, int((gradients >= MIN_NUMBERS).sum()))))


def _of_copies(run: OptimizerProfile) -> float:
    """The host's seconds for the copies of all states, both ways, and for the Python around them."""
    issue = 2 * efficiency_of(run.device).issue_seconds * len(_large(run))
    return issue + HostWork.OFFLOADED_PARAMETER.value * len(_large(run)) / _num_states(run)


def _in_steps(run: OptimizerProfile, num_bytes: int) -> Iterator[Change]:
    return iter(changes(((each.begin_event, each.end_event, num_bytes) for each in run.step_ranges), 1.0))


def _not_hidden(run: OptimizerProfile, num_bytes: int, seconds: float) -> float:
    """Seconds of the way of all codes, in the slower direction, beyond those of a step of `seconds`."""
    way = max(copy_seconds(num_bytes, run.device, to_card=to_card) for to_card in (True, False))
    return max(0.0, way - seconds)
