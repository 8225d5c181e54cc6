"""Seconds of the parts of a model for a share of the traced batch and a degree of tensor parallelism: the traced operators, scaled and priced again.

FLOPs and bytes of an operator shrink with the tokens and with tp; the bytes of weights with tp alone. So all of a block's work is divided by tp, as it is with sequence
parallelism (Korthikanti et al. 2022), where norms and dropout run on a share of the tokens. Conversions of weights are apart: gathered weights arrive converted.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import is_kernel, operator_seconds
from tightfit.devices.device import Device
from tightfit.layouts.model.model_parts import ModelPart, ModelParts, Rows
from tightfit.tape import Operators, Table

_AnyTable = TypeVar("_AnyTable", bound=Table)
_KEPT = frozenset({"operators", "storages", "events", "spans"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartSeconds:
    """Seconds of one part for one micro-batch on one rank. `elementwise` is what selective recomputation runs again: the forward pass without products;
    `alternate` has every second matrix product besides. `converting` and `converting_back` are conversions of weights and of their gradients, which are in none of the others.
    `kernels` and `kernels_back` are how many the host issues, conversions among them.
    """

    forward: float
    backward: float
    elementwise: float
    alternate: float
    attention: float
    converting: float
    converting_back: float
    kernels: int
    kernels_back: int


class PricedParts:
    """The parts of a model, priced on a device for any share of the batch. Each pair of a share and a degree is priced once."""

    def __init__(self, model: ModelParts, device: Device) -> None:
        self.model = model
        self.device = device
        efficiency = efficiency_of(device)
        self.issue_seconds = efficiency.issue_seconds
        self.copy_bytes_per_second = device.dram_bytes_per_second * efficiency.of_bandwidth["copy"]
        self._known: dict[tuple[float, int], tuple[PartSeconds, ...]] = {}
        # Tables that refer to the operators of the whole tape by number say nothing of these.
        others = {f.name: getattr(model.tape, f.name) for f in dataclasses.fields(model.tape) if f.name not in _KEPT}
        empty: dict[str, Any] = {
            name: table.rows(slice(0, 0)) for name, table in others.items() if isinstance(table, Table)
        }
        self._tape = dataclasses.replace(model.tape, operators_of_steps=(), **empty)

    def seconds(self, share: float, tp: int) -> tuple[PartSeconds, ...]:
        """Seconds of each of `model.parts` on a rank that has `share` of the traced micro-batch's tokens and 1/`tp` of the weights."""
        key = (share, tp)
        if key not in self._known:
            self._known[key] = self._priced(share, tp)
        return self._known[key]

    def _priced(self, share: float, tp: int) -> tuple[PartSeconds, ...]:
        passes = [rows for part in self.model.parts for rows in (part.forward, part.backward)]
        starts = np.cumsum([0, *map(len, passes)])
        sizes = [rows.sizes.scaled(share, tp, int(first)) for rows, first in zip(passes, starts, strict=False)]
        tape = dataclasses.replace(
            self._tape, operators=_joined([scaled(rows, share, tp) for rows in passes]), geometry=_joined(sizes)
        )
        seconds, kernels = self.model.compute_scale * operator_seconds(tape, self.device), is_kernel(tape)
        found, at = [], 0
        for part in self.model.parts:
            spans = []
            for rows in (part.forward, part.backward):
                spans.append(slice(at, at + len(rows)))
                at += len(rows)
            found.append(self._part(part, seconds, kernels, *spans))
        return tuple(found)

    def _part(
        self, part: ModelPart, seconds: np.ndarray, kernels: np.ndarray, forward: slice, backward: slice
    ) -> PartSeconds:
        casts, casts_back = part.forward.is_cast, part.backward.is_cast

        def spent(of: slice, chosen: np.ndarray) -> float:
            return float(seconds[of][chosen].sum())

        return PartSeconds(
            forward=spent(forward, ~casts),
            backward=spent(backward, ~casts_back),
            elementwise=spent(forward, ~casts & ~part.forward.is_product),
            alternate=spent(forward, ~casts & (~part.forward.is_product | part.forward.is_second_product)),
            attention=spent(forward, part.forward.is_attention),
            converting=spent(forward, casts),
            converting_back=spent(backward, casts_back),
            kernels=int(kernels[forward].sum()),
            kernels_back=int(kernels[backward].sum()),
        )


def scaled(rows: Rows, share: float, tp: int) -> Operators:
    """The operators of `rows` for `share` of the tokens and 1/`tp` of the weights."""
    operators = rows.operators
    return dataclasses.replace(
        operators,
        flops=operators.flops * (share / tp),
        bytes_read=((operators.bytes_read - rows.fixed_read) * share + rows.fixed_read) / tp,
        bytes_written=((operators.bytes_written - rows.fixed_written) * share + rows.fixed_written) / tp,
    )


def _joined(tables: Sequence[_AnyTable]) -> _AnyTable:
    columns = [table.columns() for table in tables]
    return type(tables[0])(**{name: np.concatenate([c[name] for c in columns]) for name in columns[0]})
