"""Seconds of a step under a layout: computation of each stage, collectives beside it or between, and the bubbles of a pipeline.

FSDP          weights of the next block are gathered while one computes, and gradients of the one before are reduced: what takes longer decides, and the
              first gather and the last reduction of a pass are waited for; copies out of and into the buffers of both are kernels like any other. While NCCL runs, its channels occupy multiprocessors and memory bandwidth.
tensor        an all-gather and a reduce-scatter of the activations around each half of a block, forward and backward: waited for
context       keys and values are gathered before attention, their gradients reduced after it: waited for
streamed      weights come from the host and gradients leave beside the blocks (`streamed_seconds.py`)
experts       two all-to-alls of the tokens, forward and backward: waited for
pipeline      micro-batches times the slowest stage, the other stages once, over the stages of a rank, and the sends between stages (Narayanan et al. 2021); gradients of
              an embedding that is the head's weight too are added up between the first stage and the last (megatron/core/distributed/finalize_model_grads.py)
"""

import dataclasses

from tightfit.cost.collectives import Collective, Group, collective_seconds
from tightfit.devices.node import Node
from tightfit.layouts.layout import Layout
from tightfit.layouts.model.model_parts import ModelPart, ModelParts
from tightfit.layouts.seconds.part_seconds import PartSeconds, PricedParts
from tightfit.layouts.seconds.streamed_seconds import StreamedSeconds
from tightfit.layouts.stages import Stage, stages_of
from tightfit.simulate.contention import CONTENTION

_BLOCK_HALVES = 2
_HALVES_OF_ALL_REDUCE: tuple[Collective, ...] = ("all_gather", "reduce_scatter")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step and what they are for. `compute` includes recomputation; `exposed` collectives are those that nothing runs beside; `bubble` is idle,
    and so is `host`: kernels that are shorter than the host needs to issue them, and values that it reads."""

    total: float
    compute: float
    recomputed: float
    exposed: float
    bubble: float
    optimizer: float
    host: float = 0.0

    def parts(self) -> dict[str, float]:
        """The parts by name, without the total."""
        return {
            "compute": self.compute - self.recomputed,
            "recomputation": self.recomputed,
            "exposed collectives": self.exposed,
            "pipeline bubble": self.bubble,
            "optimizer": self.optimizer,
            "waits for the host": self.host,
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Pass:
    """One micro-batch on one stage."""

    compute: float = 0.0
    recomputed: float = 0.0
    exposed: float = 0.0
    kernels: int = 0

    @property
    def total(self) -> float:
        return self.compute + self.exposed


class StepClock:
    """Prices layouts of one model on one kind of node."""

    def __init__(self, model: ModelParts, priced: PricedParts, node: Node) -> None:
        self.model = model
        self.priced = priced
        self.node = node
        self._streamed = StreamedSeconds(model, priced.device, node)
        self._model_bytes = max(1, model.parameter_bytes)
        # A search asks for the same few collectives tens of thousands of times.
        self._known: dict[tuple[Collective, float, int, int], float] = {}

    def step(self, layout: Layout) -> StepSeconds:
        """Seconds of a step of the whole run under `layout`."""
        model = self.model
        share = layout.micro_batch / (model.batch.num_examples or 1) / layout.cp
        seconds = self.priced.seconds(share, layout.tp)
        stages = stages_of(model, layout)
        distinct = {(stage.counts, stage.has_before, stage.has_after): stage for stage in stages}
        of_stage = {key: self._stage(layout, stage, seconds, share) for key, stage in distinct.items()}
        passes = [of_stage[stage.counts, stage.has_before, stage.has_after] for stage in stages]
        slowest = max(passes, key=lambda p: p.total)
        # The first micro-batch passes every stage before the slowest one is all that counts.
        bubble = (sum(p.total for p in passes) - slowest.total) / layout.stages_per_rank
        sends = self._sends(layout, share)
        ends = max(self._ends(layout, stage, seconds) for stage in distinct.values())
        optimizer = max(self._optimizer(layout, stage) for stage in distinct.values())
        exposed = slowest.exposed * layout.accumulation + sends + ends
        compute = slowest.compute * layout.accumulation
        issued = (slowest.kernels * layout.accumulation + model.optimizer_kernels) * self.priced.issue_seconds
        host = max(0.0, issued - compute - optimizer - exposed - bubble) + model.outside_seconds
        return StepSeconds(
            total=compute + exposed + bubble + optimizer + host,
            host=host,
            compute=compute,
            recomputed=slowest.recomputed * layout.accumulation,
            exposed=exposed,
            bubble=bubble,
            optimizer=optimizer,
        )

    def _stage(self, layout: Layout, stage: Stage, seconds: tuple[PartSeconds, ...], share: float) -> _Pass:
        compute = recomputed = exposed = 0.0
        kernels = 0
        left = layout.num_recomputed
        for i, part, count in stage.parts(self.model):
            of = seconds[i]
            is_block = 0 < i <= len(self.model.blocks)
            again = min(count, left) if is_block else 0
            left -= again
            if not layout.is_gathered and self.model.gathered_per_parameter < 1.0:
                # Weights that do not arrive converted are converted in each pass.
                of = dataclasses.replace(
                    of, forward=of.forward + of.converting, backward=of.backward + of.converting_back
                )
            redone = {"none": 0.0, "selective": of.elementwise, "alternate": of.alternate, "full": of.forward}[
                layout.recompute
            ]
            kernels += count * (of.kernels + of.kernels_back) + (again * of.kernels if redone else 0)
            gather, reduce = self._fsdp(layout, part)
            unpacked, packed = self._fsdp_copies(layout, part)
            gathers_again = layout.zero_stage == 3
            # Weights that stay gathered are gathered for the first micro-batch alone.
            copied = unpacked * (2 if gathers_again else 1 / layout.accumulation) + packed
            inside, inside_again = self._inside(layout, part, share) if is_block else (self._at_end(layout, share), 0.0)
            by_link, by_link_back = self._streamed.of_passes(layout, part, is_block=is_block)
            forward = max(_beside(of.forward, gather), by_link)
            network = reduce + (gather if gathers_again else 0.0)
            backward = max(_beside(of.backward, network), by_link_back)
            backward_again = max(_beside(of.backward + redone, network), by_link_back)
            if layout.zero_stage == 2:
                forward = (forward + (layout.accumulation - 1) * of.forward) / layout.accumulation
            compute += count * (of.forward + of.backward + copied) + again * redone
            recomputed += again * redone
            plain = count - again
            exposed += count * (forward - of.forward) + plain * (backward - of.backward)
            exposed += again * (backward_again - of.backward - redone)
            exposed += count * inside + again * inside_again
        return _Pass(compute=compute, recomputed=recomputed, exposed=exposed, kernels=kernels)

    def _fsdp(self, layout: Layout, part: ModelPart) -> tuple[float, float]:
        """Seconds to gather the weights of a part, and to reduce its gradients, in one micro-batch."""
        model, over = self.model, layout.sharded_over
        if not layout.is_gathered:
            return 0.0, 0.0
        whole = part.parameter_bytes / layout.tp * model.stored_per_parameter * model.gathered_per_parameter
        # Experts are gathered by the ranks that have the same ones.
        dense = whole * (1 - part.expert_bytes / max(1, part.parameter_bytes))
        experts = (whole - dense) / layout.ep
        trained = part.trained_bytes / max(1, part.parameter_bytes) * model.reduced_per_gathered
        gather = self._collective("all_gather", dense, over, layout.tp)
        reduce = self._collective("reduce_scatter", dense * trained, over, layout.tp)
        if experts:
            few = max(1, over // layout.ep), layout.tp * layout.ep
            gather += self._collective("all_gather", experts, *few)
            reduce += self._collective("reduce_scatter", experts * trained, *few)
        if layout.num_replicas > 1:
            reduced = (dense + experts) * trained / over
            reduce += self._collective("all_reduce", reduced, layout.num_replicas, layout.tp * over)
        return gather, reduce

    def _fsdp_copies(self, layout: Layout, part: ModelPart) -> tuple[float, float]:
        """Seconds of the copies of FSDP2 beside its collectives, on the stream that computes: gathered weights are put in their places, gradients into the buffer that is reduced."""
        model = self.model
        if not layout.is_gathered:
            return 0.0, 0.0
        whole = part.parameter_bytes / layout.tp * model.stored_per_parameter * model.gathered_per_parameter
        whole *= 1 - part.expert_bytes / max(1, part.parameter_bytes) * (1 - 1 / layout.ep)
        trained = part.trained_bytes / max(1, part.parameter_bytes)
        rate = self.priced.copy_bytes_per_second
        return 2 * whole / rate, whole * trained * (1 + model.reduced_per_gathered) / rate

    def _collective(self, kind: Collective, num_bytes: float, size: int, stride: int) -> float:
        """Seconds of a collective of `size` ranks that are `stride` apart."""
        key = (kind, num_bytes, size, stride)
        if key not in self._known:
            group = Group.of(size, stride=stride, num_linked=self.node.num_linked)
            self._known[key] = collective_seconds(kind, num_bytes, group, self.node)
        return self._known[key]

    def _inside(self, layout: Layout, part: ModelPart, share: float) -> tuple[float, float]:
        """Collectives inside of a block for one micro-batch that it waits for: forward and backward together, and again in recomputation."""
        found, again = 0.0, 0.0
        tokens = part.input_bytes * share
        is_full = layout.recompute == "full"
        if layout.tp > 1:
            halves = _BLOCK_HALVES if part.forward.is_attention.any() else 1
            gather, scatter = (self._collective(kind, tokens, layout.tp, 1) for kind in _HALVES_OF_ALL_REDUCE)
            found += 2 * halves * (gather + scatter)
            # What products give is kept, what they are given is gathered again.
            again += halves * (gather + scatter if is_full else gather)
        if layout.cp > 1:
            whole = part.key_value_bytes * share * layout.cp / layout.tp
            gather = self._collective("all_gather", whole, layout.cp, layout.tp)
            found += 2 * gather + self._collective("reduce_scatter", whole, layout.cp, layout.tp)
            again += gather if is_full else 0.0
        if layout.ep > 1 and part.expert_bytes:
            sent = tokens / layout.tp * part.experts_per_token
            once = 2 * self._collective("all_to_all", sent, layout.ep, layout.tp * layout.cp)
            found += 2 * once
            again += once if is_full else 0.0
        return found, again

    def _at_end(self, layout: Layout, share: float) -> float:
        """Collectives of tensor parallelism before or after the blocks: tokens are scattered behind the embedding and gathered for the head, and their gradients the other way."""
        if layout.tp == 1 or not self.model.blocks:
            return 0.0
        tokens = self.model.blocks[0].input_bytes * share
        return sum(self._collective(kind, tokens, layout.tp, 1) for kind in _HALVES_OF_ALL_REDUCE)

    def _sends(self, layout: Layout, share: float) -> float:
        """Seconds of what stages send each other and nothing hides: each micro-batch's first crossing, forward and backward, and once a step the gradients of weights that the first and
        the last both have."""
        if layout.pp == 1:
            return 0.0
        model, per_stage = self.model, layout.num_gpus // layout.pp
        boundary = max((part.input_bytes for part in model.blocks), default=0) * share / layout.tp
        once = self._collective("send", boundary, 2, per_stage)
        crossings = 2 * once * (layout.accumulation * layout.stages_per_rank + layout.pp - 1)
        tied = min(model.tied_bytes, model.before.trained_bytes, model.after.trained_bytes)
        if not tied:
            return crossings
        num_bytes = tied / layout.tp * model.stored_per_parameter * model.gradients_per_parameter
        return crossings + self._collective("all_reduce", num_bytes, 2, per_stage * (layout.pp - 1))

    def _ends(self, layout: Layout, stage: Stage, seconds: tuple[PartSeconds, ...]) -> float:
        """What is waited for once a step: the first gather, the last reduction, and the part of a data-parallel all-reduce that the last backward pass does not hide."""
        model = self.model
        parts = stage.parts(model)
        if layout.dp * layout.cp == 1:
            return 0.0
        if layout.zero_stage >= 2 and layout.sharded_over > 1:
            gathers = [self._fsdp(layout, part) for _, part, _ in parts]
            return (gathers[0][0] if gathers else 0.0) + (gathers[-1][1] if gathers else 0.0)
        ranks = layout.dp * layout.cp
        trained = sum(n * part.trained_bytes for _, part, n in parts) / layout.tp * model.stored_per_parameter
        reduce = self._collective("all_reduce", trained * model.gradients_per_parameter, ranks, layout.tp)
        backward = sum(n * seconds[i].backward for i, _, n in parts)
        if layout.streams_weights:
            # When the backward pass is over.
            backward = 0.0
        found = _beside(backward, reduce) - backward + self._streamed.of_ends(layout)
        if layout.zero_stage == 1:
            found += self._collective("all_gather", trained, ranks, layout.tp)
        return found

    def _optimizer(self, layout: Layout, stage: Stage) -> float:
        model = self.model
        own = sum(n * part.parameter_bytes for _, part, n in stage.parts(model)) - stage.tied_bytes(model)
        mine = own / self._model_bytes
        over = layout.sharded_over if layout.zero_stage >= 1 else 1
        on_cards = model.optimizer_seconds * mine / layout.tp / over * self._streamed.share_on_cards(layout)
        return on_cards + self._streamed.of_updates(layout)


def _beside(compute: float, network: float) -> float:
    """Seconds of computation with collectives beside it: whichever takes longer, with the computation slowed down while they run."""
    return max(compute + CONTENTION * min(network, compute), network)
