"""The optimizer steps of a tape: which implementation ran, the gradients and states it used, its temporaries, and its seconds.

A `Stretch` is a range of consecutive operators of the phase OPTIMIZER. torch.optim implements each algorithm three times: one kernel per tensor
and operation (for-loop), one per operation over many tensors (foreach), one for everything (fused); their operators have different names. Bytes
are those of the allocator's blocks.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np

from tightfit.analysis.modules import Anatomy
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import is_kernel, operator_seconds
from tightfit.devices.device import Device
from tightfit.planner.option import Change
from tightfit.tape import Category, Column, EventKind, Phase, SpanKind, Tape

Implementation = Literal["fused", "foreach", "for-loop"]
Family = Literal["adam", "sgd", "adagrad", "other"]

# Clipping or logging gradient norms between backward and step reads about all gradients; printing a loss reads next to nothing.
_FRACTION_THAT_IS_A_LOOK = 0.3
_LOW_PRECISION = ("bfloat16", "float16")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """One optimizer step: operators `[begin, end)`, events `[begin_event, end_event)`, estimated `seconds`."""

    begin: int
    end: int
    begin_event: int
    end_event: int
    seconds: float


class OptimizerTape:
    """The optimizer steps of a tape, with their time on a device."""

    def __init__(self, tape: Tape, device: Device) -> None:
        self.tape = tape
        self.device = device
        self._anatomy = Anatomy(tape)
        self._seconds = operator_seconds(tape, device)
        self._is_kernel = is_kernel(tape)
        self.block_bytes = self._anatomy.block_bytes
        self.died = self._anatomy.died
        births = np.flatnonzero(tape.events.kind == EventKind.ALLOCATE)
        self.born = np.zeros(len(tape.storages), dtype=np.int64)
        self.born[tape.events.storage[births]] = births
        self.stretches = self._find_stretches()

    def _find_stretches(self) -> tuple[Stretch, ...]:
        runs = runs_of(self.tape.operators.phase == Phase.OPTIMIZER)
        return tuple(
            Stretch(
                begin=begin,
                end=end,
                begin_event=int(self._anatomy.event_of(begin)),
                end_event=int(self._anatomy.event_of(end)),
                seconds=self.seconds_of(begin, end),
            )
            for begin, end in runs
            # A step that finds no gradient can leave views and host operators in the phase, but launches no kernel.
            if self._is_kernel[begin:end].any()
        )

    def seconds_of(self, begin: int, end: int) -> float:
        """Seconds of these operators: the GPU's time, or the host's time to issue them where that is longer."""
        # A for-loop optimizer over many small parameters is bound by the host: thousands of kernels of a few microseconds each.
        issued = efficiency_of(self.device).issue_seconds * int(self._is_kernel[begin:end].sum())
        return max(float(self._seconds[begin:end].sum()), issued)

    def seconds_of_update(self, num_bytes: float, num_kernels: int) -> float:
        """Seconds of `num_kernels` kernels that together read and write `num_bytes`."""
        efficiency = efficiency_of(self.device)
        traffic = num_bytes / (self.device.dram_bytes_per_second * efficiency.of_bandwidth["optimizer"])
        return max(traffic + num_kernels * efficiency.launch_seconds, num_kernels * efficiency.issue_seconds)

    def seconds_of_kernels(self, stretch: Stretch, num_kernels: int) -> float:
        """Seconds of an optimizer step if it did the same with this many kernels."""
        efficiency = efficiency_of(self.device)
        more = num_kernels - int(self._is_kernel[stretch.begin : stretch.end].sum())
        on_card = float(self._seconds[stretch.begin : stretch.end].sum()) + more * efficiency.launch_seconds
        return max(on_card, num_kernels * efficiency.issue_seconds)

    def events_of(self, runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Ranges of operators as ranges of events."""
        return [(int(self._anatomy.event_of(begin)), int(self._anatomy.event_of(end))) for begin, end in runs]

    def passes(self) -> list[tuple[int, int]]:
        """Each forward pass with the backward pass that follows it, as a range of events."""
        phases = self.tape.operators.phase
        at = np.flatnonzero(np.isin(phases, (Phase.FORWARD, Phase.BACKWARD)))
        if not len(at):
            return []
        breaks = np.flatnonzero((phases[at][:-1] == Phase.BACKWARD) & (phases[at][1:] == Phase.FORWARD))
        begins, ends = at[np.r_[0, breaks + 1]], at[np.r_[breaks, len(at) - 1]] + 1
        return self.events_of(zip(begins.tolist(), ends.tolist(), strict=True))

    @property
    def updates_in_backward(self) -> bool:
        """Whether updates run within a backward pass: it continues after one, or a step finds no gradient. Then there is no step to change."""
        if not all(len(self.gradients(stretch)) for stretch in self.stretches):
            return True
        phases = self.tape.operators.phase
        matters = np.flatnonzero(np.isin(phases, (Phase.FORWARD, Phase.BACKWARD)))
        following = np.searchsorted(matters, [stretch.end for stretch in self.stretches])
        return bool((phases[matters[following[following < len(matters)]]] == Phase.BACKWARD).any())

    @property
    def num_steps(self) -> int:
        """Steps of the user's loop on the tape."""
        return max(1, int((self.tape.spans.kind == SpanKind.STEP).sum()))

    @property
    def steady(self) -> tuple[Stretch, ...]:
        """The optimizer steps of the last step of the user's loop, which stands for all: the first one allocates the states as well."""
        spans = self.tape.spans
        begins = spans.begin[spans.kind == SpanKind.STEP]
        last = tuple(s for s in self.stretches if len(begins) and s.begin_event >= begins[-1])
        return last or self.stretches[-1:]

    @property
    def seconds(self) -> float:
        """Seconds of the optimizers per step of the user's loop."""
        return sum(s.seconds for s in self.steady)

    def names(self, stretch: Stretch) -> list[str]:
        """The operators of an optimizer step that launch kernels, without namespace and overload: `_foreach_add_`."""
        at = np.flatnonzero(self._is_kernel[stretch.begin : stretch.end]) + stretch.begin
        return [self.tape.strings[n].split(".")[1] for n in self.tape.operators.name[at].tolist()]

    def gradients(self, stretch: Stretch) -> Column:
        """The gradients, as indices of storages, that are allocated when an optimizer step begins."""
        return self._alive(stretch.begin_event, Category.GRADIENTS)

    def state(self, stretch: Stretch) -> Column:
        """The optimizer states, as indices of storages, that are allocated when an optimizer step ends."""
        return self._alive(stretch.end_event, Category.OPTIMIZER_STATE)

    @property
    def bytes_per_number(self) -> int:
        """Bytes per element of what the optimizer updates: 2 where most of its kernels are in 16 bits, else 4."""
        stretch = self.stretches[-1]
        dtypes = self.tape.operators.dtype[stretch.begin : stretch.end][self._is_kernel[stretch.begin : stretch.end]]
        return 2 if self.tape.strings[int(np.bincount(dtypes).argmax())] in _LOW_PRECISION else 4

    def _alive(self, event: int, category: Category) -> Column:
        of_kind = self.tape.storages.category == category
        return np.flatnonzero(of_kind & (self.born < event) & (self.died >= event))

    @property
    def implementation(self) -> Implementation:
        """Which of torch's three implementations ran."""
        names = [name for stretch in self.stretches for name in self.names(stretch)]
        if any(name.startswith("_fused_") for name in names):
            return "fused"
        return "foreach" if any(name.startswith("_foreach_") for name in names) else "for-loop"

    @property
    def family(self) -> Family:
        """The algorithm, inferred from its operators: those that torch has a fused kernel for, and "other".

        The operator sequences are those of `torch/optim/{adam,sgd,adagrad}.py`.
        """
        kinds = {
            name.removeprefix("_foreach_").removeprefix("_fused_").rstrip("_"): None
            for stretch in self.stretches
            for name in self.names(stretch)
        }
        for family in ("adam", "sgd", "adagrad"):
            if any(kind.startswith(family) for kind in kinds):
                return family
        # torch updates the first moment of Adam and NAdam by lerp. RMSprop (mul, addcmul, sqrt, addcdiv) is none of the three.
        if {"lerp", "addcmul", "sqrt", "addcdiv"} <= set(kinds) and self._updates_once():
            return "adam"
        if {"addcmul", "sqrt", "addcdiv"} <= set(kinds) and not {"lerp", "mul", "sub"} & set(kinds):
            return "adagrad"
        if set(kinds) <= {"add", "mul", "clone", "zeros_like", "neg", "copy", "_to_copy"} and "add" in kinds:
            return "sgd"
        return "other"

    def _updates_once(self) -> bool:
        """Whether each parameter is updated as often as its first moment: NAdam calls addcdiv twice."""
        names = self.names(self.stretches[-1])
        counts = {kind: sum(kind in name for name in names) for kind in ("lerp", "addcdiv")}
        return counts["addcdiv"] == counts["lerp"]

    def held(self, stretch: Stretch) -> list[tuple[int, int, int]]:
        """The optimizer's temporaries during a step, states not included: (begin event, end event, bytes), disjoint, in order."""
        inside = (self.born >= stretch.begin_event) & (self.died <= stretch.end_event)
        temporary = np.flatnonzero(inside & (self.tape.storages.category == Category.TEMPORARIES))
        return levels(self.born[temporary], self.died[temporary], self.block_bytes[temporary])

    @property
    def num_backwards_per_update(self) -> int:
        """The largest number of backward passes before one optimizer step."""
        phases = self.tape.operators.phase
        passes = [end for _, end in runs_of(_joined(phases) == Phase.BACKWARD)]
        most, before = 0, 0
        for stretch in self.stretches:
            most = max(most, sum(before < end <= stretch.begin for end in passes))
            before = stretch.end
        return most

    @property
    def looks_at_gradients(self) -> frozenset[str]:
        """The operators that read most of the gradients between backward pass and optimizer step, without namespace and overload."""
        operators = self.tape.operators
        found: set[str] = set()
        for stretch in self.stretches:
            backward = np.flatnonzero(operators.phase[: stretch.begin] == Phase.BACKWARD)
            begin = int(backward[-1]) + 1 if len(backward) else stretch.begin
            held = int(self.block_bytes[self.gradients(stretch)].sum())
            read: Counter[str] = Counter()
            for name, num_bytes in zip(
                operators.name[begin : stretch.begin].tolist(),
                operators.bytes_read[begin : stretch.begin].tolist(),
                strict=True,
            ):
                read[self.tape.strings[name].split(".")[1]] += num_bytes
            found.update(name for name, num_bytes in read.items() if num_bytes > _FRACTION_THAT_IS_A_LOOK * held > 0)
        return frozenset(found)

    @property
    def scales_loss(self) -> bool:
        """Whether the run uses a `GradScaler`."""
        # GradScaler.unscale_ calls _amp_foreach_non_finite_check_and_unscale_, and update() _amp_update_scale_.
        return any("_amp_" in self.tape.strings[n] for n in np.unique(self.tape.operators.name).tolist())

    @property
    def fraction_in_low_precision(self) -> float:
        """The share of all FLOPs that is computed in 16 bits."""
        operators = self.tape.operators
        low = np.isin(operators.dtype, [i for i, text in enumerate(self.tape.strings) if text in _LOW_PRECISION])
        total = float(operators.flops.sum())
        return float(operators.flops[low].sum()) / total if total else 0.0


def runs_of(is_member: Column) -> list[tuple[int, int]]:
    """The ranges of consecutive true values: (first, one past the last)."""
    edges = np.flatnonzero(np.diff(np.r_[False, is_member, False].astype(np.int8)))
    return [(int(b), int(e)) for b, e in zip(edges[::2], edges[1::2], strict=True)]


def levels(born: Column, died: Column, num_bytes: Column) -> list[tuple[int, int, int]]:
    """The memory timeline of blocks with these lifetimes: (begin event, end event, bytes) where bytes are allocated, disjoint, in order."""
    moments, index = np.unique(np.r_[born, died], return_inverse=True)
    difference = np.zeros(len(moments), dtype=np.int64)
    np.add.at(difference, index, np.r_[num_bytes, -num_bytes].astype(np.int64))
    alive = np.cumsum(difference)
    return [
        (int(begin), int(end), int(level))
        for begin, end, level in zip(moments[:-1], moments[1:], alive[:-1], strict=True)
        if level
    ]


def changes(stretches: Iterable[tuple[int, int, int]], factor: float = 1.0) -> tuple[Change, ...]:
    """Changes of `factor` times the bytes of these ranges of events, without empty ones."""
    found = (Change(begin=b, end=e, num_bytes=round(factor * n)) for b, e, n in stretches if e > b)
    return tuple(change for change in found if change.num_bytes)


def _joined(phases: Column) -> Column:
    """The phases with OTHER replaced by the phase before it, so that a hook or a callback inside of a backward pass does not split it."""
    known: Sequence[int] = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)
    matters = np.isin(phases, known)
    if not matters.any():
        return phases
    last = np.maximum.accumulate(np.where(matters, np.arange(len(phases)), -1))
    return np.where(last >= 0, phases[np.maximum(last, 0)], phases)
