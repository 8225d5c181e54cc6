"""The parts of a traced step that a layout spreads over cards: blocks by class, and what runs before and after them.

A part has its operators of a forward and a backward pass, the bytes of its weights, and the bytes that it saves for backward. Blocks are the children of the
outermost numbered lists that run one after another; those with the same operators and bytes are one class, and count as often as they occur. Which
bytes of an operator are weights, whose number does not depend on the batch, is known from the weights of its module; all else is proportional to the tokens.
"""

import dataclasses
import hashlib
import re

import numpy as np

from tightfit.analysis.modules import ModuleCall
from tightfit.analysis.profile import Profile
from tightfit.cost.classes import operator_class
from tightfit.layouts.model.batches_of_tape import BatchOfTape, batch_of
from tightfit.layouts.model.blocks_at_host import BlocksAtHost
from tightfit.layouts.model.experts_of_tape import experts_of
from tightfit.layouts.model.heads_of_tape import Heads, heads_of
from tightfit.layouts.model.peaks_of_tape import PeaksOfTape
from tightfit.layouts.model.product_sizes import ProductSizes, product_sizes
from tightfit.layouts.model.weights_of_tape import WeightBytes, WeightsOfTape
from tightfit.tape import Category, Column, Operators, Phase, Tape

PRODUCTS = frozenset({"matmul", "convolution", "attention"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """Operators of one pass of a part. `fixed_read` and `fixed_written` are those of their bytes that are weights; `is_cast` marks conversions of weights,
    `is_second_product` every second matrix product, beginning with the second one."""

    operators: Operators
    sizes: ProductSizes
    fixed_read: Column
    fixed_written: Column
    is_cast: Column
    is_product: Column
    is_attention: Column
    is_second_product: Column

    def __len__(self) -> int:
        return len(self.operators)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelPart:
    """A block, or what runs before or after the blocks. `class_name` is that of a block's module, empty where it is not known. Bytes are those of the traced batch.

    `saved_bytes` are saved for backward, its output among them; of these `product_bytes` would be if only the results of products were saved,
    and `alternate_bytes` if every second matrix product was not either. `input_bytes` is what
    the part is given. `working_bytes` is the peak of temporaries in its backward pass, `fixed_working_bytes` of those that are as large as weights. `key_value_bytes` are the keys and values of its attention.
    `converted_bytes` are copies of its weights in the type that is computed with, saved for backward besides. `expert_bytes` are the weights (of `parameter_bytes`) of its `num_experts`, of which each token uses `experts_per_token`. `heads` are those of its attention.
    """

    name: str
    forward: Rows
    backward: Rows
    parameter_bytes: int
    trained_bytes: int
    saved_bytes: int
    product_bytes: int
    alternate_bytes: int
    input_bytes: int
    working_bytes: int
    key_value_bytes: int
    num_products: int
    expert_bytes: int = 0
    num_experts: int = 0
    experts_per_token: float = 1.0
    class_name: str = ""
    converted_bytes: int = 0
    fixed_working_bytes: int = 0
    heads: Heads = dataclasses.field(default_factory=Heads)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ModelParts:
    """A step of one card as parts. `order` has the place in `blocks` of each block, in the order of the forward pass, `paths` the modules. `tied_bytes` are weights that the parts
    before and after the blocks both use, an embedding that is the head's weight too: a rank that has both parts has them once.

    Bytes of gradients and optimizer states are per byte of trained parameters; `gathered_per_parameter` is what a gathered byte of weights takes: 0.5 where autocast converts them.
    `reduced_per_gathered` is what a gradient takes while it is reduced, per byte of the gathered weight. `stored_per_parameter` is above 1 where a layout stores
    weights in a wider type than the program. `stored_dtype` and `computed_dtype` are the types of weights and of most products. `optimizer_seconds` are those of the update of all parameters on one card, which takes `optimizer_kernels` kernels and `optimizer_bytes` of temporaries. `num_rounds` micro-batches of `batch` make one step of the program.
    `has_buckets`: data parallelism without FSDP is torch's DistributedDataParallel, which has the gradients in buckets besides. `early_gradients` is the share of the gradients that is there when the backward pass begins: none where they are set to None before. `outside_seconds` and `unused_bytes` are what the traced step takes
    beside what its parts explain (`traced_step.py`): waits of the host, and what the caching allocator holds without using it. Where it takes less, `compute_scale` is below 1. `unused_by_tokens`: the peak is where activations are,
    so that half the batch leaves half of it unused; else it goes with the weights. `workspace_bytes` are those of libraries. `at_host` are the blocks that a layout may stream.
    """

    tape: Tape
    before: ModelPart
    blocks: tuple[ModelPart, ...]
    after: ModelPart
    order: tuple[int, ...]
    batch: BatchOfTape
    num_rounds: int
    paths: tuple[str, ...]
    gathered_per_parameter: float
    gradients_per_parameter: float
    states_per_parameter: float
    optimizer_seconds: float
    input_bytes: int
    tied_bytes: int = 0
    stored_per_parameter: float = 1.0
    reduced_per_gathered: float = 2.0
    stored_dtype: str = "float32"
    computed_dtype: str = "bfloat16"
    has_buckets: bool = True
    optimizer_kernels: float = 0.0
    optimizer_bytes: int = 0
    early_gradients: float = 1.0
    compute_scale: float = 1.0
    outside_seconds: float = 0.0
    unused_bytes: float = 0.0
    unused_by_tokens: bool = True
    workspace_bytes: int = 0
    at_host: BlocksAtHost | None = None

    @property
    def parts(self) -> tuple[ModelPart, ...]:
        """Each distinct part once: before, the classes of blocks, after."""
        return (self.before, *self.blocks, self.after)

    @property
    def parameter_bytes(self) -> int:
        """The bytes of all parameters, each once."""
        rest = self.before.parameter_bytes + self.after.parameter_bytes - self.tied_bytes
        return rest + sum(self.blocks[i].parameter_bytes for i in self.order)


def model_parts(profile: Profile) -> ModelParts:
    """The parts of the last round of the last step of `profile`, which has to be of `Tape.of_steps()`."""
    return _Reader(profile).parts()


class _Reader:
    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.tape = profile.tape
        self.calls = profile.modules
        self.peaks = PeaksOfTape(profile)
        self.weights = WeightsOfTape(profile)
        self.classes = [operator_class(name) if "." in name else "other" for name in self.tape.strings]

    def parts(self) -> ModelParts:
        tape, weights = self.tape, self.weights
        units = self._units()
        phase = tape.operators.phase
        last_round = self._last_round(units)
        inside = np.zeros(len(tape.operators), dtype=bool)
        for call in units:
            inside[call.begin : call.end] = inside[call.back_begin : call.back_end] = True
        rest = last_round & ~inside
        first = units[0].begin if units else len(phase)
        last_back = units[0].back_end if units else len(phase)
        at = np.arange(len(phase))
        early = ((phase == Phase.FORWARD) & (at < first)) | ((phase == Phase.BACKWARD) & (at >= last_back))
        taken = frozenset(p for call in units for p in self.calls.modules_inside(call.path))
        before = self._rest("before the blocks", np.flatnonzero(rest & early), taken)
        after = self._rest("after the blocks", np.flatnonzero(rest & ~early), taken | frozenset(before[1]))
        blocks, order = self._classes(units)
        trained = max(1, weights.trained_bytes)
        of = tape.storages.num_bytes
        gradients = self.peaks.of_category(Category.GRADIENTS)
        states = int(of[tape.storages.category == Category.OPTIMIZER_STATE].sum())
        steps = self.profile.num_steps
        optimizer = phase == Phase.OPTIMIZER
        rounds = max(1, round(self.calls.num_rounds / steps))
        embedding = np.flatnonzero(last_round)
        computed = self._computed_dtype(embedding)
        is_converted = weights.gathered_per_parameter < 1
        return ModelParts(
            tape=tape,
            before=before[0],
            blocks=blocks,
            after=after[0],
            order=order,
            batch=batch_of(tape, embedding, weights),
            num_rounds=rounds,
            paths=tuple(call.path for call in units),
            gathered_per_parameter=weights.gathered_per_parameter,
            gradients_per_parameter=gradients / trained,
            states_per_parameter=states / trained,
            optimizer_seconds=float(self.profile.costs.seconds[optimizer].sum()) / steps,
            optimizer_bytes=self.peaks.update_bytes(),
            early_gradients=self.peaks.early_gradients(gradients),
            input_bytes=self.peaks.of_category(Category.INPUTS),
            tied_bytes=weights.shared(before[1], after[1]),
            # Gradients are reduced in the type that they are stored in.
            reduced_per_gathered=1 / weights.gathered_per_parameter,
            stored_dtype="float32" if is_converted else computed,
            computed_dtype=computed,
        )

    def _computed_dtype(self, chosen: Column) -> str:
        """The type in which most of the FLOPs of `chosen` operators are computed."""
        operators, strings = self.tape.operators, self.tape.strings
        flops: dict[str, float] = {}
        for dtype, count in zip(operators.dtype[chosen].tolist(), operators.flops[chosen].tolist(), strict=True):
            flops[strings[dtype]] = flops.get(strings[dtype], 0.0) + count
        return max(flops, key=lambda dtype: flops[dtype], default="float32")

    def _units(self) -> list[ModuleCall]:
        """The last call of each block: children of the outermost numbered lists that run one after another."""
        lists: dict[str, int] = {}
        for path in self.calls.paths:
            parent, _, last = path.rpartition(".")
            if parent and last.isdigit() and not any(part.isdigit() for part in parent.split(".")):
                lists[parent] = max(lists.get(parent, 0), int(last) + 1)
        found: list[ModuleCall] = []
        for parent, number in lists.items():
            calls = [c[-1] for i in range(number) if (c := self.calls.calls(f"{parent}.{i}"))]
            if len(calls) >= 2:
                found += calls
        found.sort(key=lambda call: call.begin)
        kept: list[ModuleCall] = []
        for call in found:
            if not kept or call.begin >= kept[-1].end:
                kept.append(call)
        return kept

    def _last_round(self, units: list[ModuleCall]) -> Column:
        phase = self.tape.operators.phase
        busy = (phase == Phase.FORWARD) | (phase == Phase.BACKWARD)
        kinds = phase == Phase.FORWARD
        backward = np.flatnonzero(phase == Phase.BACKWARD)
        mask = np.zeros(len(phase), dtype=bool)
        if not len(backward):
            return mask
        end = int(backward[-1]) + 1
        # The round begins with the first forward operator after the backward pass before it.
        forward = np.flatnonzero(kinds[: units[-1].begin + 1 if units else end])
        before = backward[backward < (int(forward[-1]) if len(forward) else end)]
        begin = int(before[-1]) + 1 if len(before) else 0
        mask[begin:end] = busy[begin:end]
        return mask

    def _classes(self, units: list[ModuleCall]) -> tuple[tuple[ModelPart, ...], tuple[int, ...]]:
        found: dict[str, int] = {}
        parts: list[ModelPart] = []
        order = []
        for call in units:
            key = self._likeness(call)
            if key not in found:
                found[key] = len(parts)
                parts.append(self._block(call))
            order.append(found[key])
        return tuple(parts), tuple(order)

    def _likeness(self, call: ModuleCall) -> str:
        # Only the forward pass: the gradient that arrives from outside may be added up in the first block or the last.
        rows = self.tape.operators.rows(slice(call.begin, call.end))
        content = (
            rows.name.tolist(),
            rows.flops.tolist(),
            rows.bytes_written.tolist(),
            self.weights.inside(call.path).total,
        )
        return re.sub(r"\d+", "*", call.path) + hashlib.sha1(repr(content).encode()).hexdigest()

    def _block(self, call: ModuleCall) -> ModelPart:
        forward = np.arange(call.begin, call.end)
        backward = np.arange(call.back_begin, call.back_end)
        name = re.sub(r"\.\d+", ".*", call.path)
        output = [call.output] if call.output >= 0 and self.calls.saved_for_backward[call.output] else []
        saved = np.r_[call.saved, np.array(output, dtype=np.int64)].astype(np.int64)
        input_bytes = self.calls.lifetimes.bytes_of(np.array([call.input])) if call.input >= 0 else 0
        if not input_bytes and call.output >= 0:
            input_bytes = self.calls.lifetimes.bytes_of(np.array([call.output]))
        class_name = self.tape.module_classes.get(call.path, "")
        part = self._part(name, forward, backward, saved, self.weights.inside(call.path), input_bytes)
        return dataclasses.replace(part, class_name=class_name)

    def _rest(self, name: str, rows: Column, taken: frozenset[str]) -> tuple[ModelPart, tuple[str, ...]]:
        phase = self.tape.operators.phase
        forward, backward = rows[phase[rows] == Phase.FORWARD], rows[phase[rows] == Phase.BACKWARD]
        saved = np.flatnonzero(np.isin(self.tape.storages.operator, forward) & self.calls.saved_for_backward)
        modules = dict.fromkeys(self.tape.strings[m] for m in self.tape.operators.module[rows].tolist())
        paths = tuple(p for p in modules if p and p not in taken)
        return self._part(name, forward, backward, saved, self.weights.of_modules(paths), 0), paths

    def _part(
        self, name: str, forward: Column, backward: Column, saved: Column, weights: WeightBytes, input_bytes: int
    ) -> ModelPart:
        rows, rows_back = self._rows(forward), self._rows(backward)
        storages = self.tape.storages
        made_by = storages.operator
        cast_operators = forward[rows.is_cast]
        is_converted = np.isin(made_by[saved], cast_operators)
        converted, saved = saved[is_converted], saved[~is_converted]
        products, seconds = forward[rows.is_product], forward[rows.is_second_product]
        # What a product made inside of the forward pass, saved by the plain run or not.
        kept = np.flatnonzero(
            np.isin(made_by, products) & np.isin(storages.category, (Category.ACTIVATIONS, Category.TEMPORARIES))
        )
        working, fixed = self.peaks.working(
            forward, backward, rows.fixed_written, rows_back.fixed_written, is_block=input_bytes > 0
        )
        experts = experts_of(self.tape, self.weights, forward, input_bytes)
        attention = np.flatnonzero(rows.is_attention)
        operators = rows.operators
        # Query, key and value are read, and the output has the size of the query.
        key_value = sum(max(0, int(operators.bytes_read[i] - operators.bytes_written[i])) for i in attention.tolist())
        return ModelPart(
            name=name,
            forward=rows,
            backward=rows_back,
            parameter_bytes=weights.total,
            trained_bytes=weights.trained,
            saved_bytes=self.calls.lifetimes.bytes_of(saved),
            converted_bytes=self.calls.lifetimes.bytes_of(converted),
            product_bytes=self.calls.lifetimes.bytes_of(kept),
            alternate_bytes=self.calls.lifetimes.bytes_of(kept[~np.isin(made_by[kept], seconds)]),
            input_bytes=input_bytes,
            working_bytes=working,
            fixed_working_bytes=fixed,
            key_value_bytes=key_value,
            num_products=int(rows.is_product.sum()),
            expert_bytes=experts.num_bytes,
            num_experts=experts.number,
            experts_per_token=experts.per_token,
            heads=heads_of(rows.sizes, rows.is_attention),
        )

    def _rows(self, chosen: Column) -> Rows:
        operators = self.tape.operators.rows(chosen)
        kinds = [self.classes[n] for n in operators.name.tolist()]
        fixed_read, fixed_written, is_cast = self.weights.fixed_bytes(chosen, kinds)
        is_attention = np.array([k == "attention" for k in kinds], dtype=bool)
        is_matmul = np.array([k == "matmul" for k in kinds], dtype=bool)
        sizes = product_sizes(
            self.tape, chosen, is_attention=is_attention, fixed_read=fixed_read, fixed_written=fixed_written
        )
        return Rows(
            operators=operators,
            sizes=sizes,
            fixed_read=fixed_read,
            fixed_written=fixed_written,
            is_cast=is_cast,
            is_product=np.array([k in PRODUCTS for k in kinds], dtype=bool),
            is_attention=is_attention,
            is_second_product=is_matmul & (np.cumsum(is_matmul) % 2 == 0),
        )
