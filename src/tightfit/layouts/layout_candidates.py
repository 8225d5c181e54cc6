"""The layouts that a search considers: every combination of degrees that the batch and the model allow, each with a lower bound of its time."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

from tightfit.devices.node import Node
from tightfit.layouts.exports.tool import AbstractTool
from tightfit.layouts.layout import Layout
from tightfit.layouts.model.model_parts import ModelParts
from tightfit.layouts.seconds.part_seconds import PricedParts

_MOST_TENSOR = 8
# Context parallelism divides sequences that are this long at least, and not into shorter pieces.
_LEAST_PIECE = 4096
_STAGES_PER_RANK = (2, 4)


class LayoutCandidates:
    """The candidates for one model on nodes of one kind; with a `tool` those that it runs."""

    def __init__(self, model: ModelParts, node: Node, priced: PricedParts, tool: AbstractTool | None) -> None:
        self._model = model
        self._node = node
        self._priced = priced
        self._tool = tool

    def has(self, layout: Layout, examples: int) -> bool:
        """Whether `layout` is among the candidates for `examples` in a step on as many cards as it uses, whatever of it is recomputed."""
        plain = dataclasses.replace(layout, recompute="none", num_recomputed=0)
        return any(found == plain for _, found in self.of(layout.num_gpus, examples))

    def of(self, num_gpus: int, examples: int) -> Iterator[tuple[float, Layout]]:
        """Layouts without recomputation, each with a lower bound of its seconds."""
        num_blocks = len(self._model.order)
        # One product after another is what can be cut by columns and then by rows.
        is_paired = num_blocks and all(part.num_products > 1 for part in self._model.blocks)
        most = min(_MOST_TENSOR, self._node.num_linked) if is_paired else 1
        tensor = [n for n in _powers(most) if all(part.heads.are_divided_by(n) for part in self._model.blocks)]
        for tp in tensor:
            for pp in _powers(min(num_blocks, num_gpus // tp)) if num_blocks else [1]:
                for cp in self._context(num_gpus // (tp * pp)):
                    for dp in _divisors(examples):
                        if dp * tp * pp * cp <= num_gpus:
                            yield from self._batches(dp, tp, pp, cp, examples // dp)

    def _context(self, most: int) -> list[int]:
        length = self._model.batch.sequence_length
        return [n for n in _powers(most) if n == 1 or (length % n == 0 and length // n >= _LEAST_PIECE)]

    def _batches(self, dp: int, tp: int, pp: int, cp: int, per_rank: int) -> Iterator[tuple[float, Layout]]:
        for micro_batch in _divisors(per_rank):
            accumulation = per_rank // micro_batch
            share = micro_batch / (self._model.batch.num_examples or 1) / cp
            seconds = self._priced.seconds(share, tp)
            counts = [1, *(self._model.order.count(i) for i in range(len(self._model.blocks))), 1]
            work = sum(n * (s.forward + s.backward) for n, s in zip(counts, seconds, strict=True)) * accumulation / pp
            for schedule, stages in self._schedules(pp, accumulation):
                for (stage, over), ep in itertools.product(self._shardings(dp * cp, tp), self._experts(dp * cp, tp)):
                    layout = Layout(
                        dp=dp, tp=tp, pp=pp, cp=cp, ep=ep, zero_stage=stage, sharded_over=over, micro_batch=micro_batch,
                        accumulation=accumulation, schedule=schedule, stages_per_rank=stages,
                    )  # fmt: skip
                    if self._streams(layout):
                        yield work, dataclasses.replace(layout, streams_weights=True)
                    if self._tool is None or not self._tool.refusal(layout, self._model):
                        yield work, layout

    def _streams(self, layout: Layout) -> bool:
        """Whether the tool runs the layout with weights at the host too: with the states of each rank's share, which its host updates."""
        if self._tool is None or not self._tool.streams_weights or self._model.at_host is None:
            return False
        streamed = dataclasses.replace(layout, streams_weights=True)
        return layout.zero_stage == 1 and not self._tool.refusal(streamed, self._model)

    def _schedules(self, pp: int, accumulation: int) -> Iterator[tuple]:
        if pp == 1:
            yield "none", 1
            return
        yield "1f1b", 1
        for stages in _STAGES_PER_RANK:
            if accumulation % pp == 0 and pp * stages <= len(self._model.order):
                yield "interleaved", stages

    def _experts(self, ranks: int, tp: int) -> list[int]:
        """Degrees of expert parallelism: what tools do with it beside tensor parallelism differs."""
        numbers = [part.num_experts for part in self._model.blocks if part.num_experts]
        most = math.gcd(ranks, *numbers) if numbers and tp == 1 else 1
        return [n for n in _powers(most) if most % n == 0]

    def _shardings(self, ranks: int, tp: int) -> Iterator[tuple[int, int]]:
        if ranks == 1:
            yield 0, 1
            return
        yield 0, 1
        inside = max(1, self._node.num_linked // tp)
        for over in {ranks, inside} if 1 < inside < ranks and ranks % inside == 0 else {ranks}:
            yield 2, over
            yield 3, over
        yield 1, ranks


def _powers(most: int) -> list[int]:
    return [1 << i for i in range(max(1, most).bit_length())]


@functools.lru_cache(maxsize=4096)
def _divisors(number: int) -> list[int]:
    # A search asks for those of the same numbers again and again, of which the batch may be in the millions.
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return small + [number // n for n in reversed(small) if n * n != number]
