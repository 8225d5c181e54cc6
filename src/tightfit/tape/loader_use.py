"""What a run took from its data loaders, and how long that took on the machine that traced it."""

import dataclasses
import statistics
from typing import Any, Self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoaderUse:
    """A data loader that a run took batches from, in a loop at `line`.

    `prefetch_factor` is None without workers, and `batch_size` and `num_examples` are where they are not known. `batches` has, for each batch that was taken in the main
    process, the operator that came next, `examples` how many examples it has (0: that is not known); `load_seconds` what reading and collating took for each batch that was loaded, in a worker or in the main process.
    """

    line: str
    num_workers: int
    pins_memory: bool
    prefetch_factor: int | None
    is_persistent: bool
    batch_size: int | None
    num_examples: int | None
    batches: tuple[int, ...] = ()
    load_seconds: tuple[float, ...] = ()
    examples: tuple[int, ...] = ()

    @property
    def seconds_per_batch(self) -> float:
        """Of one batch, in one process: the median, without the first, which opens files and fills caches."""
        if not self.load_seconds:
            return 0.0
        return statistics.median(self.load_seconds[1:] or self.load_seconds)

    def to_json(self) -> dict[str, Any]:
        """As `from_json` reads it."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, given: dict[str, Any]) -> Self:
        """What `to_json` gave."""
        lists = {name: tuple(given.get(name, ())) for name in ("batches", "load_seconds", "examples")}
        values: dict[str, Any] = {**given, **lists}
        return cls(**values)
