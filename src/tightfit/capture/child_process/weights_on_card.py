"""The weights of the models that a program holds: which storages they are, of which modules, and whether they are trained."""

from collections.abc import Iterator

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.tape import Weights


class WeightsOnCard:
    """The weights on `gpu`."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._noted: dict[tuple[int, int], bool] = {}

    def note(self) -> None:
        """Notes those that are held now: models that a script predicts with, and trains nothing, are often gone when it ends."""
        self._noted.update((row[:2], row[2]) for row in self._held())

    def rows(self, *, with_noted: bool) -> Weights:
        """The weights that are held now, and those noted before if they are wanted."""
        noted = self._noted if with_noted else {}
        found = noted | {row[:2]: row[2] for row in self._held()}
        rows = sorted((*key, is_trained) for key, is_trained in found.items())
        columns = zip(*rows, strict=True) if rows else ((), (), ())
        return Weights.from_columns(dict(zip(("storage", "module", "is_trained"), columns, strict=True)))

    def _held(self) -> Iterator[tuple[int, int, bool]]:
        for weight, path in self._gpu.attribution.weights():
            storage = self._gpu.storages.index_of(weight)
            if storage is not None:
                yield storage, path, weight.requires_grad
