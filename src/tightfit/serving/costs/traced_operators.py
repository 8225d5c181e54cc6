"""The operators of a step that was traced at several sizes, as functions of the size: tokens of a prompt, or requests of a decoding step.

Shapes are affine in the size, so what an operator reads, writes and computes at any other size follows from the traced ones: between two of them by a line, beyond
them by the line through the last two, or for what grows faster, as attention does, by the parabola through the last three. Operators are told by their module, name and
place among those; what a model calls more often for a larger size is a loop over tokens, and is taken for one kernel, as engines have one.
"""

import dataclasses
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from tightfit.cost.roofline import operator_seconds
from tightfit.cost.steps import step_operators
from tightfit.devices.device import Device
from tightfit.tape import Column, Geometry, Operators, Tape

# An operator whose work grows faster than this power of the size is of attention.
_POWER_OF_LINES = 1.15
_COUNTS = ("flops", "bytes_read", "bytes_written")
_SIZES = ("batch", "num_rows", "num_columns", "depth")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayers:
    """A list of layers of which the first were traced: `path` within the module that was called, the kind of each layer as a number."""

    path: str
    kinds: tuple[int, ...]
    num_kept: int

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> list[Self]:
        """The lists of a report of `tightfit.capture.inference.inference_run`."""
        base = f"{report['base']}." if report["base"] else ""
        return [
            cls(path=row["path"].removeprefix(base), kinds=tuple(row["kinds"]), num_kept=row["num_kept"])
            for row in report["layers"]
        ]

    def times(self, place: int) -> int:
        """How many layers the traced one at `place` stands for: the last of its kind for those that were left out."""
        kind, kept = self.kinds[place], self.kinds[: self.num_kept]
        is_last = kind not in kept[place + 1 :]
        return 1 + (self.kinds[self.num_kept :].count(kind) if is_last else 0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedOperators:
    """`sizes` are the traced ones, shape (s,); of n operators `counts` has FLOPs, bytes read and bytes written and `geometry` the sizes of products and attention, shape (s, n, 3) and
    (s, n, 4). `times` is how often the model has each, with all its layers; `modules` is the path of each within the module that was called."""

    tape: Tape
    sizes: Column
    rows: Operators
    counts: Column
    geometry: Column
    has_geometry: Column
    is_loop: Column
    times: Column
    modules: tuple[str, ...]

    @classmethod
    def of_steps(
        cls, tape: Tape, steps: Sequence[int], sizes: Sequence[int], layers: Sequence[TracedLayers]
    ) -> "TracedOperators":
        """The operators of those steps of `tape`, which are the same at `sizes`."""
        ranges = [step_operators(tape)[step] for step in steps]
        first, counts, geometry, is_loop = _aligned(tape, ranges)
        shaped = np.isin(first, tape.geometry.operator) & ~is_loop
        paths = tuple(tape.strings[name].partition(".")[2] for name in tape.operators.module[first].tolist())
        return cls(
            tape=tape,
            sizes=np.array(sizes, dtype=float),
            rows=tape.operators.rows(first),
            counts=counts,
            geometry=geometry,
            has_geometry=shaped,
            is_loop=is_loop,
            times=layer_times(paths, layers),
            modules=paths,
        )

    @property
    def names(self) -> list[str]:
        """The name of each operator, shape (n,)."""
        return [self.tape.strings[name] for name in self.rows.name.tolist()]

    @property
    def is_superlinear(self) -> Column:
        """Whether the work of each operator grows faster than the size, shape (n,)."""
        if len(self.sizes) < 3:
            return np.zeros(len(self.rows), dtype=bool)
        work = np.maximum(self.counts.max(axis=2), 1.0)
        power = np.log(work[-1] / work[-2]) / np.log(self.sizes[-1] / self.sizes[-2])
        return (power > _POWER_OF_LINES) & ~self.is_loop

    def counts_at(self, sizes: Column) -> tuple[Column, Column]:
        """Counts and geometry at `sizes`, shapes (len(sizes), n, 3) and (len(sizes), n, 4)."""
        return self._at(self.counts, sizes), self._at(self.geometry, sizes)

    def _at(self, values: Column, sizes: Column) -> Column:
        curved = np.where(
            self.is_superlinear[None, :, None],
            _parabola(self.sizes, values, sizes),
            _lines(self.sizes, values, sizes),
        )
        return np.maximum(0.0, curved)

    def seconds(self, device: Device, counts: Column, geometry: Column, *, dtype: str | None = None) -> Column:
        """Seconds of each operator, once, with these counts and geometry, shape (sizes, n); `dtype`: all compute in that type."""
        number, width = counts.shape[:2]
        flat = counts.reshape(-1, len(_COUNTS))
        columns = {name: np.tile(column, number) for name, column in self.rows.columns().items()}
        columns |= {name: flat[:, at] for at, name in enumerate(_COUNTS)}
        if dtype is not None:
            columns["dtype"] = np.full(number * width, len(self.tape.strings))
        shaped = np.flatnonzero(np.tile(self.has_geometry, number))
        sizes = np.maximum(1, np.rint(geometry.reshape(-1, len(_SIZES))[shaped]))
        plain = Geometry.from_columns(
            {
                "operator": shaped,
                **{name: sizes[:, at] for at, name in enumerate(_SIZES)},
                **dict.fromkeys(("taps", "gradients", "is_channels_last", "images"), np.zeros(len(shaped))),
                "stride": np.ones(len(shaped)),
            }
        )
        made = dataclasses.replace(
            self.tape,
            strings=(*self.tape.strings, dtype or ""),
            operators=Operators.from_columns(columns),
            geometry=plain,
            copies=self.tape.copies.rows(slice(0)),
            collectives=self.tape.collectives.rows(slice(0)),
        )
        return operator_seconds(made, device).reshape(number, width)


def _aligned(tape: Tape, ranges: Sequence[tuple[int, int]]) -> tuple[Column, Column, Column, Column]:
    """Of each operator of the steps: its row at the largest size, its counts and geometry at each, and whether it stands for a loop."""
    shapes = dict(zip(tape.geometry.operator.tolist(), range(len(tape.geometry)), strict=True))
    sizes = np.stack([getattr(tape.geometry, name) for name in _SIZES], axis=1).astype(float).reshape(-1, len(_SIZES))
    counts = np.stack([getattr(tape.operators, name) for name in _COUNTS], axis=1).astype(float)
    found: list[dict[tuple[int, int], list[int]]] = []
    for begin, end in ranges:
        of_step = defaultdict(list)
        for at in range(begin, end):
            of_step[int(tape.operators.module[at]), int(tape.operators.name[at])].append(at)
        found.append(of_step)
    first, rows, shaped, is_loop = [], [], [], []
    for key, last in found[-1].items():
        each = [of_step.get(key, []) for of_step in found]
        if all(len(of_size) == len(last) for of_size in each):
            first += last
            rows += [[counts[of_size[at]] for of_size in each] for at in range(len(last))]
            shaped += [[_shape(shapes, sizes, of_size[at]) for of_size in each] for at in range(len(last))]
            is_loop += [False] * len(last)
        else:
            first.append(last[0])
            rows.append([counts[of_size].sum(axis=0) for of_size in each])
            shaped.append([np.zeros(len(_SIZES))] * len(each))
            is_loop.append(True)
    return (
        np.array(first, dtype=np.int64),
        np.array(rows).transpose(1, 0, 2),
        np.array(shaped).transpose(1, 0, 2),
        np.array(is_loop, dtype=bool),
    )


def _shape(shapes: Mapping[int, int], sizes: Column, operator: int) -> Column:
    at = shapes.get(operator)
    return np.zeros(len(_SIZES)) if at is None else sizes[at]


def _lines(known: Column, values: Column, wanted: Column) -> Column:
    """`values` (s, n, k) of the sizes `known` at `wanted`, by the line through the two that are nearest."""
    at = np.clip(np.searchsorted(known, wanted), 1, len(known) - 1)
    share = ((wanted - known[at - 1]) / (known[at] - known[at - 1]))[:, None, None]
    return values[at - 1] + share * (values[at] - values[at - 1])


def _parabola(known: Column, values: Column, wanted: Column) -> Column:
    """`values` at `wanted`, by the parabola through the last three."""
    if len(known) < 3:
        return _lines(known, values, wanted)
    a, b, c = known[-3:]
    x = wanted
    weights = np.stack(
        [
            (x - b) * (x - c) / ((a - b) * (a - c)),
            (x - a) * (x - c) / ((b - a) * (b - c)),
            (x - a) * (x - b) / ((c - a) * (c - b)),
        ]
    )
    return np.einsum("ks,knc->snc", weights, values[-3:])


def layer_times(modules: Sequence[str], layers: Sequence[TracedLayers]) -> Column:
    """How often the whole model has an operator in each of `modules`, of which `layers` were shortened."""
    times = np.ones(len(modules))
    for each in layers:
        pattern = re.compile(rf"(?:^|\.){re.escape(each.path)}\.(\d+)(?:\.|$)")
        for at, module in enumerate(modules):
            found = pattern.search(module)
            if found is not None:
                times[at] = each.times(int(found.group(1)))
    return times
