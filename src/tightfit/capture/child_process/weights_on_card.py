"""The weights of the models that a program holds: which storages they are, of which modules, and whether they are trained."""

from collections.abc import Iterator

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.tape import Weights


class WeightsOnCard:
    """The weights on `gpu`."""

    def __init__(self, gpu: VirtualGpu) -> None:
        self._gpu = gpu
        self._noted: dict[tuple[int, int], bool] = {}

    def note(self, *, is_of_step: bool) -> None:
        """Notes those that are held now. A model that a function made is gone when the program ends: those of a step that has just ended are what counts;
        before there is one, those that the program predicts with are added to one another."""
        if is_of_step:
            self._noted.clear()
        self._noted.update((row[:2], row[2]) for row in self._held())

    def rows(self) -> Weights:
        """The weights that were noted, and those that are held now."""
        found = self._noted | {row[:2]: row[2] for row in self._held()}
        rows = sorted((*key, is_trained) for key, is_trained in found.items())
        columns = zip(*rows, strict=True) if rows else ((), (), ())
        return Weights.from_columns(dict(zip(("storage", "module", "is_trained"), columns, strict=True)))

    def _held(self) -> Iterator[tuple[int, int, bool]]:
        for weight, path in self._gpu.attribution.weights():
            storage = self._gpu.storages.index_of(weight)
            if storage is not None:
                yield storage, path, weight.requires_grad
