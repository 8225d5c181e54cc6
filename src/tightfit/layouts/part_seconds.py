"""Seconds of the parts of a model for a share of the traced batch and a degree of tensor parallelism: the traced operators, scaled and priced again.

FLOPs and bytes of an operator shrink with the tokens and with tp; the bytes of weights with tp alone. So all of a block's work is divided by tp, as it is with sequence
parallelism (Korthikanti et al. 2022), where norms and dropout run on a share of the tokens. Conversions of weights are left out: gathered weights arrive converted.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np

from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import is_kernel, operator_seconds
from tightfit.devices.device import Device
from tightfit.layouts.model_parts import ModelPart, ModelParts, Rows
from tightfit.tape import Operators, Table

_AnyTable = TypeVar("_AnyTable", bound=Table)
_KEPT = frozenset({"operators", "storages", "events", "spans"})
_PRODUCTS = {"sm_80": 1.08, "sm_90": 1.31}
_ATTENTION = 1.86
_OTHERS = 1.88
"""How much longer kernels take in a long run of many cards than alone: products because the clock falls under the power limit (an H100 reaches 0.58 of its peak in
training, 0.80 in a benchmark of one shape), attention because causal kernels do worse than the plain ones that are published, the others because frameworks convert and
copy besides. Fitted with `python -m benchmarks.shard` on four of nine sizes of MPT (llm-foundry's table); the other five and torchtitan's runs are judged by it.
They are of mixed precision: multiply-add units in float32 stay below the power limit, and nothing is converted."""
_MIXED = frozenset({"float16", "bfloat16"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartSeconds:
    """Seconds of one part for one micro-batch on one rank. `elementwise` is what selective recomputation runs again: the forward pass without products;
    `alternate` has every second matrix product besides."""

    forward: float
    backward: float
    elementwise: float
    alternate: float
    attention: float


class PricedParts:
    """The parts of a model, priced on a device for any share of the batch. Each pair of a share and a degree is priced once."""

    def __init__(self, model: ModelParts, device: Device) -> None:
        self.model = model
        self.device = device
        self._issue_seconds = efficiency_of(device).issue_seconds
        of_products = _PRODUCTS.get(device.isa, _PRODUCTS["sm_80"])
        is_mixed = model.computed_dtype in _MIXED
        self._factors = (_ATTENTION, of_products, _OTHERS) if is_mixed else (1.0, 1.0, 1.0)
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
        seconds, kernels = operator_seconds(tape, self.device), is_kernel(tape)
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
        seconds = seconds.copy()
        of_attention, of_products, of_others = self._factors
        for rows, of in ((part.forward, forward), (part.backward, backward)):
            seconds[of] *= np.where(rows.is_attention, of_attention, np.where(rows.is_product, of_products, of_others))

        def spent(of: slice, chosen: np.ndarray) -> float:
            # Kernels that are shorter than the host needs to issue them wait for the host.
            busy = float(seconds[of][chosen].sum())
            return max(busy, self._issue_seconds * int(kernels[of][chosen].sum()))

        return PartSeconds(
            forward=spent(forward, ~casts),
            backward=spent(backward, ~casts_back),
            elementwise=spent(forward, ~casts & ~part.forward.is_product),
            alternate=spent(forward, ~casts & (~part.forward.is_product | part.forward.is_second_product)),
            attention=float(seconds[forward][part.forward.is_attention].sum()),
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
