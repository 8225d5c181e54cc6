"""Seconds of the operators of a step with weights in another format than they were traced in, and of experts of which a small batch needs only some.

A product of quantised weights reads fewer bytes, at the share of the memory's rate that its kernel reaches; it computes in the model's type, or in that of the format where activations are quantised
too and the card has units for it. Formats without a kernel for many rows write the weights out in the model's type first, and read them again.

R rows that choose among E experts with equal chance hit E (1 - (1 - 1/E)^R) of them; only those are read.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from tightfit.cost.classes import operator_class
from tightfit.cost.efficiency import efficiency_of
from tightfit.devices.device import Device
from tightfit.serving.costs.traced_operators import TracedOperators
from tightfit.serving.model.model_facts import ModelFacts, WeightRow
from tightfit.serving.model.weight_formats import WeightFormat, row_bytes
from tightfit.tape import Column

_READ = 1
_BATCH, _COLUMNS, _DEPTH = 0, 2, 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightProducts:
    """The weights of a model by the path of their module within the module that was called, and the format that they are served in (None: as they were traced)."""

    rows: Mapping[str, Sequence[WeightRow]]
    item_bytes: int
    weight_format: WeightFormat | None

    @classmethod
    def of(cls, facts: ModelFacts, base: str, weight_format: WeightFormat | None) -> "WeightProducts":
        """Of the model with those facts, whose module `base` was called."""
        rows: dict[str, list[WeightRow]] = {}
        for row in facts.weights:
            if row.role == "linear":
                module = row.name.rpartition(".")[0]
                rows.setdefault(module.removeprefix(f"{base}.") if base else module, []).append(row)
        items = [row.item_bytes for row in facts.weights if row.role == "linear"]
        return cls(rows=rows, item_bytes=items[0] if items else 2, weight_format=weight_format)

    def seconds(self, operators: TracedOperators, device: Device, sizes: Column) -> Column:
        """Seconds of each operator once at each of `sizes`, shape (len(sizes), n)."""
        counts, geometry = operators.counts_at(sizes)
        weights = np.where(self._is_of_weights(operators), geometry[..., [_BATCH, _COLUMNS, _DEPTH]].prod(axis=2), 0.0)
        plain = weights * self.item_bytes
        hit = _share_of_experts(operators, counts, geometry)
        counts, geometry = counts.copy(), geometry.copy()
        geometry[..., _BATCH] *= hit
        counts[..., _READ] = np.maximum(0.0, counts[..., _READ] - plain * (1 - hit))
        seconds = operators.seconds(device, counts, geometry)
        of = self.weight_format
        if of is None:
            return seconds
        smaller = self._smaller(operators)
        if not smaller.any():
            return seconds
        return np.where(
            smaller < 1, self._quantised(operators, device, of, counts, geometry, plain * hit, smaller), seconds
        )

    def _quantised(
        self,
        operators: TracedOperators,
        device: Device,
        of: WeightFormat,
        counts: Column,
        geometry: Column,
        plain: Column,
        smaller: Column,
    ) -> Column:
        """As if all products were of quantised weights: `plain` bytes of them in the model's type, `smaller` the share of those that the format needs."""
        rate = device.dram_bytes_per_second * efficiency_of(device).of_bandwidth["matmul"]
        reading = plain * smaller / (rate * of.bandwidth)
        others = counts.copy()
        others[..., _READ] = np.maximum(0.0, counts[..., _READ] - plain)
        native = of.computes_in in device.flops
        computing = operators.seconds(device, others, geometry, dtype=of.computes_in if native else None) / of.flops
        seconds = np.maximum(computing, reading + efficiency_of(device).launch_seconds)
        if of.fused_rows:
            # Written in the model's type, and read again by an ordinary product.
            written = reading + plain / rate + operators.seconds(device, counts, geometry)
            seconds = np.where(geometry[..., 1] > of.fused_rows, written, seconds)
        return seconds

    def _smaller(self, operators: TracedOperators) -> Column:
        """The bytes of the weights of each operator in the format over those in the model's type, 1 where it has none or leaves them as they are."""
        of = self.weight_format
        assert of is not None
        found = np.ones(len(operators.modules))
        for at in np.flatnonzero(self._is_of_weights(operators)).tolist():
            row = self._row(operators, at)
            found[at] = row_bytes(row, of) / row.num_bytes
        return found

    def _row(self, operators: TracedOperators, at: int) -> WeightRow:
        """The weight that an operator multiplies by: of the several of a module (experts have two) the one with its inputs and outputs."""
        rows = self.rows[operators.modules[at]]
        sides = {int(side) for side in operators.geometry[-1, at, [_COLUMNS, _DEPTH]]}
        return next((row for row in rows if set(row.shape[-2:]) == sides), rows[0])

    def _is_of_weights(self, operators: TracedOperators) -> Column:
        """Which operators are products by a weight of the model."""
        return np.array(
            [
                shaped and module in self.rows and operator_class(name) == "matmul"
                for shaped, module, name in zip(
                    operators.has_geometry.tolist(), operators.modules, operators.names, strict=True
                )
            ],
            dtype=bool,
        )


def _share_of_experts(operators: TracedOperators, counts: Column, geometry: Column) -> Column:
    """The share of the groups of each product of groups that rows are expected in, 1 for all others."""
    grouped = np.array(["grouped_mm" in name for name in operators.names])
    if not grouped.any():
        return np.ones(counts.shape[:2])
    experts = np.maximum(1.0, geometry[..., _BATCH])
    rows = counts[..., 0] / np.maximum(1.0, 2 * geometry[..., _COLUMNS] * geometry[..., _DEPTH])
    return np.where(grouped, 1 - (1 - 1 / experts) ** rows, 1.0)
