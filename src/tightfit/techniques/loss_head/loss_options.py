"""The saving and cost of a chunked loss head, from the tape of the plain run.

Memory: everything of the size of the logits is gone; one chunk of it is allocated while the loss is computed, and some gradients are allocated
earlier than in the plain run. Time: the same products (one more if the gradients are computed in the backward pass), fewer passes over the
logits in total, but one over the gradient of the weight per chunk.
"""

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, TypeAlias

import numpy as np

from tightfit.analysis.loss_head import LossHead
from tightfit.analysis.modules import ModuleCalls
from tightfit.analysis.profile import Profile
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.host_python import HostWork
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.tape import Column, Phase, Tape

GradientsIn: TypeAlias = Literal["forward", "backward"]
NUM_WEIGHT_BLOCKS = 4
"""Of the weight whose gradient in half precision is added to the sum at once."""

SMALLEST_SHARE = 0.01
"""Of the bytes alive at the plain run's peak: what the logits must come to for a head to be offered."""

_MIN_TOKENS = 1024  # in a chunk: enough to fill a card with the product
_FEW_CHUNKS = (4, 16)  # where there are not that many tokens at all
_SUM_BYTES = 4
_KERNELS_PER_CHUNK: dict[GradientsIn, int] = {"forward": 20, "backward": 29}
_PRODUCTS_PER_CHUNK: dict[GradientsIn, int] = {"forward": 3, "backward": 4}


def loss_head_options(technique: str, profile: Profile) -> Iterator[Option]:
    """The options of all heads of a run."""
    module_calls = profile.modules
    runs: dict[str, list[LossHead]] = {}
    for head in profile.loss_heads:
        runs.setdefault(head.path, []).append(head)
    peak = _peak_bytes(module_calls, profile.lifetimes.allocated_at)
    for path, heads in runs.items():
        if max(module_calls.lifetimes.bytes_of(np.array(head.gone)) for head in heads) < SMALLEST_SHARE * peak:
            continue
        for num_chunks in _numbers_of_chunks(heads):
            for gradients_in in _PRODUCTS_PER_CHUNK:
                way = _Way(num_chunks=num_chunks, gradients_in=gradients_in, profile=profile)
                sides = sum(map(way.sides, heads), Sides()) * (1 / profile.num_steps)
                yield Option(
                    technique=technique,
                    where=path,
                    settings={"num_chunks": num_chunks, "gradients_in": gradients_in},
                    changes=tuple(change for head in heads for change in way.changes(head)),
                    seconds=profile.step.added(sides),
                    sides=sides,
                    exact=True,
                    slots=frozenset({f"loss head@{path}"}),
                )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """Memory and time of one way to compute the loss in chunks."""

    num_chunks: int
    gradients_in: GradientsIn
    profile: Profile

    def changes(self, head: LossHead) -> Iterator[Change]:
        """The storages that are gone, and the ones that replace them."""
        module_calls = self.profile.modules
        for storage in head.gone:
            size = int(module_calls.lifetimes.block_bytes[storage])
            yield Change(
                begin=int(self.profile.lifetimes.allocated_at[storage]),
                end=int(module_calls.lifetimes.freed_at[storage]),
                num_bytes=-size,
            )
        for begin, end, num_bytes in (*self._while_computing(head), *self._waiting(head), *self._afterwards(head)):
            if begin < end and num_bytes:
                yield Change(begin=begin, end=end, num_bytes=num_bytes)

    def _while_computing(self, head: LossHead) -> Iterator[tuple[int, int, int]]:
        event = self.profile.lifetimes.event_of
        numbers = -(-head.num_tokens // self.num_chunks) * head.num_classes * _bytes_at_once(head)
        weight = head.num_classes * head.width * head.head_item_bytes
        loop = int(event(head.product)), int(event(head.loss_end))
        is_forward = self.gradients_in == "forward"
        yield *loop, numbers + head.casts_weight * weight
        if is_forward and head.weight_gradient >= 0 and head.head_item_bytes < _SUM_BYTES:
            # The half-precision product that is added to the float32 sum, one block of rows at a time
            # (`_add_product`).
            yield *loop, weight // NUM_WEIGHT_BLOCKS
        if not is_forward:
            back = int(event(head.back_begin)), int(event(head.back_end))
            product = 0 if head.head_item_bytes == _SUM_BYTES else head.num_tokens * head.width * head.head_item_bytes
            yield *back, numbers + product + head.casts_weight * weight // self.num_chunks

    def _waiting(self, head: LossHead) -> Iterator[tuple[int, int, int]]:
        """Gradients that are allocated earlier than in the plain run."""
        event, allocations = self.profile.lifetimes.event_of, self.profile.lifetimes.allocated_at
        is_forward = self.gradients_in == "forward"
        begin = int(event(head.product if is_forward else head.back_begin))
        back_end = int(event(head.back_end))
        if head.weight_gradient >= 0:
            final = int(self.profile.lifetimes.block_bytes[head.weight_gradient])
            numbers = head.num_classes * head.width
            summed = numbers * max(_SUM_BYTES, head.head_item_bytes) if is_forward else final
            yield begin, int(allocations[head.weight_gradient]) if summed == final else back_end, summed
        if head.hidden_gradient >= 0:
            numbers = head.num_tokens * head.width
            item_bytes = head.head_item_bytes if is_forward else max(_SUM_BYTES, head.head_item_bytes)
            yield begin, int(allocations[head.hidden_gradient]), numbers * item_bytes
        if head.num_tokens != head.num_counted:
            yield int(event(head.product)), back_end, head.num_tokens * head.width * head.head_item_bytes

    def _afterwards(self, head: LossHead) -> Iterator[tuple[int, int, int]]:
        """If the plain run keeps its logits through the step, the hidden states and a copy of the weight are kept instead."""
        module_calls = self.profile.modules
        freed_at, back_end = (
            int(module_calls.lifetimes.freed_at[head.logits]),
            int(module_calls.lifetimes.event_of(head.back_end)),
        )
        if freed_at <= back_end:
            return
        item_bytes = max(head.head_item_bytes, head.loss_item_bytes)
        yield back_end, freed_at, head.num_tokens * head.width * item_bytes
        later = module_calls.tape.operators.phase[head.back_end :]
        steps, calls = np.flatnonzero(later == Phase.OPTIMIZER), np.flatnonzero(later == Phase.FORWARD)
        if head.weight_gradient >= 0 and len(steps):
            step = int(module_calls.lifetimes.event_of(head.back_end + int(steps[0])))
            again = int(calls[0]) + head.product - head.begin if len(calls) else 0
            # What runs forward last may end before it comes to the head, such as an embedding alone.
            at = min(head.back_end + again, len(module_calls.tape.operators))
            end = min(freed_at, int(module_calls.lifetimes.event_of(at))) if again else freed_at
            logits = int(module_calls.lifetimes.block_bytes[head.logits])
            yield step, end, min(logits, int(module_calls.lifetimes.block_bytes[head.weight_gradient]))

    def sides(self, head: LossHead) -> Sides:
        """The extra time of one run of the head."""
        seconds = self.profile.costs.seconds
        efficiency = efficiency_of(self.profile.device)
        second_per_byte = 1 / (self.profile.device.dram_bytes_per_second * efficiency.of_bandwidth["elementwise"])
        product = float(seconds[head.product])
        plain = _elementwise_seconds(self.profile.modules.tape, head, seconds)
        numbers = head.num_tokens * head.num_classes
        traffic = numbers * _traffic(head, self.gradients_in)
        if self.gradients_in == "forward" and head.weight_gradient >= 0:
            traffic += self.num_chunks * 2 * _SUM_BYTES * head.num_classes * head.width
        if self.gradients_in == "backward" and head.hidden_gradient >= 0:
            traffic += self.num_chunks * 2 * _SUM_BYTES * head.num_tokens * head.width
        num_products = _PRODUCTS_PER_CHUNK[self.gradients_in]
        num_kernels = self.num_chunks * _KERNELS_PER_CHUNK[self.gradients_in]
        fixed = num_kernels * efficiency.launch_seconds
        fixed += (self.num_chunks - 1) * num_products * efficiency.ramp_seconds
        again = product if self.gradients_in == "backward" else 0.0
        return Sides(
            on_card=traffic * second_per_byte + fixed + again - plain,
            on_host=num_kernels * efficiency.issue_seconds + HostWork.CHUNKED_LOSS.value,
        )


def _bytes_at_once(head: LossHead) -> int:
    """Peak bytes per logit of a chunk: the logits and their log-probabilities, both wide, and outputs of a tanh."""
    return 2 * max(_SUM_BYTES, head.loss_item_bytes) + head.has_tanh * head.loss_item_bytes


def _traffic(head: LossHead, gradients_in: GradientsIn) -> int:
    """Memory traffic per logit in bytes, without the products: casts, log-softmax, exponential and scale each read and write."""
    wide = max(_SUM_BYTES, head.loss_item_bytes)
    cast = head.head_item_bytes + wide if head.head_item_bytes != wide else 0
    loss, exponential = cast + 2 * wide, 2 * wide + cast
    again = cast + 4 * wide if gradients_in == "backward" else 0
    return loss + exponential + again


def _elementwise_seconds(tape: Tape, head: LossHead, seconds: Column) -> float:
    """The time of the plain run between the head's product and its gradients."""
    forward = float(seconds[head.product + 1 : head.loss_end].sum())
    own = tape.operators.module[head.back_begin : head.back_end] == tape.operators.module[head.product]
    return forward + float(seconds[head.back_begin : head.back_end][~own].sum())


def _numbers_of_chunks(heads: Sequence[LossHead]) -> Iterable[int]:
    num_tokens = max(head.num_tokens for head in heads)
    many = [2**k for k in range(1, 12) if num_tokens >= _MIN_TOKENS * 2**k]
    return many or [count for count in _FEW_CHUNKS if num_tokens >= 4 * count]


def _peak_bytes(module_calls: ModuleCalls, allocations: Column) -> int:
    changes = np.zeros(len(module_calls.tape.events) + 1, dtype=np.int64)
    np.add.at(changes, allocations, module_calls.lifetimes.block_bytes)
    np.subtract.at(changes, module_calls.lifetimes.freed_at, module_calls.lifetimes.block_bytes)
    return int(changes.cumsum().max(initial=0))
