"""Ranges of numbered children that run right after each other on a tape, for techniques that treat several layers as one.

As far as a tape can tell they belong to a Sequential: other modules that are called in a loop have operators in between, or numbered children
with submodules. The techniques check it again on the live model.
"""

import dataclasses
import re
from collections.abc import Iterator

import numpy as np

from tightfit.analysis.modules import ModuleCall, ModuleCalls
from tightfit.analysis.recomputable import input_kept
from tightfit.planner.option import Change, Option

# A cut leaves each side at least this share of what is saved for backward, where such a cut exists.
_SMALLER_SIDE = 0.25


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayerRange:
    """The children `[begin, end)` of the module at `path`, with its module calls and the slots of all modules inside.

    `inputs` are the inputs that recomputation retains and the plain run frees: a ReLU, say, saves its output only.
    """

    path: str
    begin: int
    end: int
    calls: tuple[ModuleCall, ...]
    slots: frozenset[str]
    inputs: tuple[Change, ...]

    @property
    def settings(self) -> dict[str, int]:
        """The settings of an option for this range."""
        return {"begin": self.begin, "end": self.end}

    def equivalence_class(self, module_calls: ModuleCalls) -> str:
        """The equivalence class: equal for the same range of children in modules that do the same."""
        path = re.sub(r"\d+", "*", self.path)
        return f"{path}[{self.begin}:{self.end}]#{[module_calls.lifetimes.bytes_of(call.saved) for call in self.calls]}"


class LayerSequence:
    """The numbered children of one module that ran one after another each time the module was called."""

    def __init__(
        self, module_calls: ModuleCalls, path: str, numbers: list[int], rounds: list[list[ModuleCall]]
    ) -> None:
        self.module_calls = module_calls
        self.path = path
        self.numbers = numbers
        self._rounds = rounds

    def __len__(self) -> int:
        return len(self.numbers)

    def layer_range(self, begin: int, end: int) -> LayerRange:
        """The children at positions `[begin, end)` among those that ran."""
        calls = tuple(joined(self.module_calls, self.path, round_calls[begin:end]) for round_calls in self._rounds)
        inside = [m for n in self.numbers[begin:end] for m in self.module_calls.modules_inside(f"{self.path}.{n}")]
        return LayerRange(
            path=self.path,
            begin=self.numbers[begin],
            end=self.numbers[end] if end < len(self) else self.numbers[-1] + 1,
            calls=calls,
            slots=frozenset(f"activations@{module}" for module in inside),
            inputs=tuple(
                c
                for round_calls, call in zip(self._rounds, calls, strict=True)
                for c in self._kept(round_calls[:begin], call)
            ),
        )

    def _kept(self, before: list[ModuleCall], call: ModuleCall) -> Iterator[Change]:
        """The input of `call`, from where the plain run frees it to the end of the backward pass of `call`."""
        if not before:
            # What came before the whole sequence made it: a norm's result, which the first linear layer saves as a copy in another order, say.
            alone = self.module_calls.call(call.path, call.begin, call.end, call.back_begin, call.back_end)
            yield from input_kept(self.module_calls, alone)
            return
        output = self.module_calls.lifetimes.output_of(before[0].begin, before[-1].end)
        if output >= 0 and self.module_calls.lifetimes.freed_at[output] < call.back_end_event:
            begin, size = (
                int(self.module_calls.lifetimes.freed_at[output]),
                int(self.module_calls.lifetimes.block_bytes[output]),
            )
            yield Change(begin=begin, end=call.back_end_event, num_bytes=size)

    def operator_names(self, position: int) -> tuple[str, ...]:
        """The forward operators of one child."""
        call = self._rounds[-1][position]
        return self.module_calls.operator_names(call.begin, call.end)

    def saved_bytes(self, begin: int, end: int) -> int:
        """The bytes that these children save for backward in one call, without the output of the last one."""
        return self.module_calls.lifetimes.bytes_of(
            joined(self.module_calls, self.path, self._rounds[-1][begin:end]).saved
        )

    def boundary_bytes(self, position: int) -> int:
        """The bytes of the input of the child at `position`, which recomputing it retains; doubled if nothing else retains that input."""
        output = joined(self.module_calls, self.path, self._rounds[-1][:position]).output
        return (
            int(self.module_calls.lifetimes.block_bytes[output])
            * (1 if self.module_calls.saved_for_backward[output] else 2)
            if output >= 0
            else 0
        )

    def begins_in_place(self, position: int) -> bool:
        """Whether the first operator of this child overwrites its input (ReLU(inplace=True)), which cannot be an input to recompute from then."""
        return writes_in_place(self.operator_names(position)[0])


def writes_in_place(operator: str) -> bool:
    """Whether an operator writes to its first argument: `aten.relu_.default`."""
    return operator.partition(".")[2].partition(".")[0].endswith("_")


def layer_sequences(module_calls: ModuleCalls) -> Iterator[LayerSequence]:
    """The sequences of two or more children, some of them leaf modules."""
    children: dict[str, list[str]] = {}
    for path in module_calls.paths:
        parent, _, last = path.rpartition(".")
        if parent and last.isdigit():
            children.setdefault(parent, []).append(path)
    for path, found in children.items():
        # Blocks with submodules are candidates of their own in `recomputable`; a container with operators of its own is not a
        # Sequential.
        has_layers = any(module_calls.modules_inside(child) == [child] for child in found)
        if has_layers and path not in module_calls.modules_inside(path) and module_calls.is_called(path):
            sequence = _sequence(module_calls, path, sorted(int(child.rpartition(".")[2]) for child in found))
            if sequence is not None:
                yield sequence


def _sequence(module_calls: ModuleCalls, path: str, numbers: list[int]) -> LayerSequence | None:
    """The sequence of `path`, if each of its calls ran the same children once and in order."""
    calls = {number: module_calls.calls(f"{path}.{number}") for number in numbers}
    ran: set[tuple[int, ...]] = set()
    rounds = []
    for whole in module_calls.calls(path):
        inside = [(n, v) for n in numbers for v in calls[n] if whole.begin <= v.begin and v.end <= whole.end]
        ran.add(tuple(n for n, _ in inside))
        rounds.append([v for _, v in inside])
    if len(ran) != 1:
        return None
    names = list(ran.pop())
    begins = [v.begin for v in rounds[0]]
    if len(names) < 2 or len(set(names)) < len(names) or begins != sorted(begins):
        return None
    return LayerSequence(module_calls, path, names, rounds)


def segments(sequence: LayerSequence, begin: int, end: int) -> Iterator[LayerRange]:
    """This segment and, by bisection, all segments inside it; no segment begins with an operator that overwrites its input."""
    if begin == 0 and sequence.begins_in_place(0):
        begin = 1
    if end - begin < 2:
        return
    yield sequence.layer_range(begin, end)
    cuts = [c for c in range(begin + 1, end) if not sequence.begins_in_place(c)]
    if not cuts:
        return
    smaller = {c: min(sequence.saved_bytes(begin, c), sequence.saved_bytes(c, end)) for c in cuts}
    balanced = [c for c in cuts if smaller[c] >= _SMALLER_SIDE * sequence.saved_bytes(begin, end)]
    # Among balanced cuts the smallest boundary wins, which in a ConvNet lies behind a pooling layer.
    at = min(balanced, key=sequence.boundary_bytes) if balanced else max(cuts, key=lambda c: smaller[c])
    yield from segments(sequence, begin, at)
    yield from segments(sequence, at, end)


def joined(module_calls: ModuleCalls, path: str, calls: list[ModuleCall]) -> ModuleCall:
    """Consecutive module calls merged into one, without an input, which `LayerRange.inputs` holds."""
    back_begin, back_end = min(v.back_begin for v in calls), max(v.back_end for v in calls)
    return dataclasses.replace(module_calls.call(path, calls[0].begin, calls[-1].end, back_begin, back_end), input=-1)


def saved_bytes(module_calls: ModuleCalls) -> float:
    """The bytes that are saved for backward, on average over the rounds of a run."""
    return module_calls.lifetimes.bytes_of(np.flatnonzero(module_calls.saved_for_backward)) / max(
        1, module_calls.num_rounds
    )


def with_settings(option: Option, layer_range: LayerRange, equivalence_class: str, **settings: int) -> Option:
    """`option` for this range of children, with further settings."""
    named = ",".join(f"{name}={value}" for name, value in settings.items())
    return dataclasses.replace(
        option,
        settings={**layer_range.settings, **settings},
        equivalence_class=f"{option.technique}:{equivalence_class}:{named}",
        changes=(*option.changes, *layer_range.inputs),
    )
