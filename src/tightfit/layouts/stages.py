"""How the blocks of a model are cut into the stages of a pipeline, and how many micro-batches a stage holds."""

import dataclasses
import functools

from tightfit.layouts.layout import Layout
from tightfit.layouts.model.model_parts import ModelPart, ModelParts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What one rank of a pipeline runs: how many blocks of each class, and whether it has the parts before and after them.

    `in_flight` is how many micro-batches' activations it holds at its peak (not whole where stages are interleaved).
    """

    rank: int
    counts: tuple[int, ...]
    has_before: bool
    has_after: bool
    in_flight: float

    @property
    def num_blocks(self) -> int:
        """The blocks of the rank."""
        return sum(self.counts)

    def parts(self, model: ModelParts) -> list[tuple[int, ModelPart, int]]:
        """The parts of the stage: place in `model.parts`, part, and how often it occurs."""
        found = [(0, model.before, 1)] if self.has_before else []
        found += [(1 + i, model.blocks[i], n) for i, n in enumerate(self.counts) if n]
        return [*found, (len(model.blocks) + 1, model.after, 1)] if self.has_after else found

    def tied_bytes(self, model: ModelParts) -> int:
        """What its parts have in common, which it has once."""
        return model.tied_bytes if self.has_before and self.has_after else 0


def stages_of(model: ModelParts, layout: Layout) -> tuple[Stage, ...]:
    """The stages of `layout`, one for each rank of a pipeline."""
    counts = _counts(model.order, len(model.blocks), layout.pp, layout.stages_per_rank)
    return tuple(
        Stage(
            rank=rank,
            counts=counts[rank],
            has_before=rank == 0,
            has_after=rank == layout.pp - 1,
            in_flight=_in_flight(layout, rank),
        )
        for rank in range(layout.pp)
    )


def recomputed_paths(model: ModelParts, layout: Layout) -> tuple[str, ...]:
    """The blocks that a rank recomputes, in the order of the model; nothing with a pipeline, whose ranks have other blocks. Those of the first classes, as the bytes of a rank are counted,
    and the first of a class: they wait longest for their backward pass."""
    if layout.pp > 1 or layout.recompute == "none":
        return ()
    by_class = sorted(range(len(model.order)), key=lambda at: model.order[at])
    return tuple(model.paths[at] for at in sorted(by_class[: layout.num_recomputed]))


def stage_sizes(num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """The blocks of each stage, in the order of the model. Stages differ by one block at most; the first and the last, which have more to do besides, are the shorter ones."""
    each, left = divmod(num_blocks, num_stages)
    sizes = [each] * num_stages
    # The larger stages lie in the middle: the first has the embedding and the last the loss.
    middle = sorted(range(num_stages), key=lambda s: (s == num_stages - 1, s == 0, s))
    for stage in middle[:left]:
        sizes[stage] += 1
    return tuple(sizes)


@functools.lru_cache(maxsize=4096)
def _counts(order: tuple[int, ...], num_classes: int, pp: int, per_rank: int) -> tuple[tuple[int, ...], ...]:
    """The blocks of each rank by class."""
    sizes = stage_sizes(len(order), pp * per_rank)
    found = [[0] * num_classes for _ in range(pp)]
    at = 0
    for stage, size in enumerate(sizes):
        for block in order[at : at + size]:
            found[stage % pp][block] += 1
        at += size
    return tuple(tuple(counts) for counts in found)


def _in_flight(layout: Layout, rank: int) -> float:
    """Micro-batches that a rank holds at once: all with GPipe; as many as there are ranks from it on with 1F1B (Narayanan et al. 2021), and with interleaved
    stages the warm-up of Megatron-LM, in parts of a rank's blocks."""
    if layout.pp == 1:
        return 1.0
    if layout.schedule == "gpipe":
        return float(layout.accumulation)
    if layout.schedule == "interleaved":
        warm_up = (layout.pp - rank - 1) * 2 + (layout.stages_per_rank - 1) * layout.pp + 1
        return min(layout.accumulation * layout.stages_per_rank, warm_up) / layout.stages_per_rank
    return float(min(layout.accumulation, layout.pp - rank))
