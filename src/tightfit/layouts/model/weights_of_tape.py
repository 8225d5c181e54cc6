"""The weights of a tape by module: their bytes, and which operators read or write them."""

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.cost.classes import TENSOR_CORE_CLASSES
from tightfit.tape import Category, Column, Phase


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightBytes:
    """Bytes of the weights of some modules: all, and those that are trained."""

    total: int
    trained: int


class WeightsOfTape:
    """The weights of a tape, in bytes as they are stored."""

    def __init__(self, profile: Profile) -> None:
        self.tape = profile.tape
        self._block_bytes = profile.lifetimes.block_bytes
        weights = self.tape.weights
        self.by_module: dict[str, dict[int, bool]] = {}
        for storage, module, is_trained in zip(
            weights.storage.tolist(), weights.module.tolist(), weights.is_trained.tolist(), strict=True
        ):
            self.by_module.setdefault(self.tape.strings[module], {})[storage] = bool(is_trained)
        self._largest = {
            path: max((int(self.tape.storages.num_bytes[s]) for s in storages), default=0)
            for path, storages in self.by_module.items()
        }
        self._makes_gradient = np.zeros(len(self.tape.operators), dtype=bool)
        gradients = self.tape.storages.operator[self.tape.storages.category == Category.GRADIENTS]
        self._makes_gradient[gradients[gradients >= 0]] = True
        self._half = self._converted_modules()

    @property
    def trained_bytes(self) -> int:
        """The bytes of all trained weights, each storage once."""
        trained = {s for storages in self.by_module.values() for s, is_trained in storages.items() if is_trained}
        return int(sum(int(self._block_bytes[s]) for s in trained))

    @property
    def gathered_per_parameter(self) -> float:
        """Bytes of a weight where it is computed with, per byte where it is stored: 0.5 where autocast converts most of them to half precision."""
        total = sum(self._largest.values())
        return 0.5 if total and sum(self._largest[m] for m in self._half) > 0.25 * total else 1.0

    def inside(self, path: str) -> WeightBytes:
        """The weights of the module at `path` and inside it."""
        return self.of_modules(m for m in self.by_module if m == path or m.startswith(path + "."))

    def of_modules(self, paths: Iterable[str]) -> WeightBytes:
        """The weights of exactly these modules."""
        storages: dict[int, bool] = {}
        for path in paths:
            storages |= self.by_module.get(path, {})
        return WeightBytes(
            total=int(sum(int(self._block_bytes[s]) for s in storages)),
            trained=int(sum(int(self._block_bytes[s]) for s, is_trained in storages.items() if is_trained)),
        )

    def shared(self, some: Iterable[str], others: Iterable[str]) -> int:
        """The bytes of the weights that modules of both kinds have."""
        of_both = [{s for path in paths for s in self.by_module.get(path, {})} for paths in (some, others)]
        return int(sum(int(self._block_bytes[s]) for s in of_both[0] & of_both[1]))

    def largest(self, module: str) -> int:
        """The bytes of the largest weight of `module`, 0 without."""
        return self._largest.get(module, 0)

    def fixed_bytes(self, chosen: Column, kinds: Sequence[str]) -> tuple[Column, Column, Column]:
        """Of each of these operators: how many bytes that it reads and writes are weights, and whether all it does is to convert a weight or its gradient."""
        operators, strings = self.tape.operators, self.tape.strings
        read, written = np.zeros(len(chosen)), np.zeros(len(chosen))
        is_cast = np.zeros(len(chosen), dtype=bool)
        seen: set[tuple[str, int]] = set()
        for at, (operator, kind) in enumerate(zip(chosen.tolist(), kinds, strict=True)):
            module = strings[operators.module[operator]]
            weight = self.largest(module)
            if not weight:
                continue
            reads, writes = int(operators.bytes_read[operator]), int(operators.bytes_written[operator])
            computed = weight // 2 if module in self._half else weight
            if kind in TENSOR_CORE_CLASSES:
                # The gradient of a weight is written, in every other product the weight is read.
                is_gradient = operators.phase[operator] == Phase.BACKWARD and writes == computed
                written[at] = computed if is_gradient else 0
                read[at] = 0 if is_gradient else min(computed, reads)
            elif kind == "embedding":
                # A table is looked up, or its gradient written as a whole.
                read[at], written[at] = (weight, 0) if writes < weight else (0, weight)
            elif _is_conversion(strings[operators.name[operator]]):
                # An activation can be as large as the weight: a weight is converted first, and once.
                key = (module, int(operators.phase[operator]))
                is_weight = (reads, writes) == (weight, weight // 2) and module in self._half
                if (is_weight and key not in seen) or self._makes_gradient[operator]:
                    seen.add(key)
                    read[at], written[at], is_cast[at] = reads, writes, True
        return (
            np.minimum(read, operators.bytes_read[chosen]),
            np.minimum(written, operators.bytes_written[chosen]),
            is_cast,
        )

    def _converted_modules(self) -> frozenset[str]:
        """The modules whose largest weight is converted to half precision in the forward pass."""
        operators, strings = self.tape.operators, self.tape.strings
        conversion = np.array([_is_conversion(s) for s in strings])[operators.name]
        found = set()
        for operator in np.flatnonzero(conversion & (operators.phase == Phase.FORWARD)).tolist():
            module = strings[operators.module[operator]]
            weight = self.largest(module)
            if (
                weight
                and int(operators.bytes_read[operator]) == weight
                and int(operators.bytes_written[operator]) * 2 == weight
            ):
                found.add(module)
        return frozenset(found)


def _is_conversion(name: str) -> bool:
    return name.startswith("aten._to_copy")
