"""Advice on low-rank adapters: the memory that LoRA on the linear layers would need instead of training the weights themselves.

Hu et al., "LoRA: low-rank adaptation of large language models" (arXiv:2106.09685): a weight of K x N is frozen and two factors of K x r and r x N
are trained beside it. That adds parameters that the program's optimizer and its checkpoints do not know, so it is advice and not part of a plan.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Never, final

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.analysis.trained_parts import TrainedParts
from tightfit.errors import ApplyError
from tightfit.planner.option import Change, Option
from tightfit.planner.suggestion import Suggestion
from tightfit.tape import Phase
from tightfit.techniques.technique import AbstractTechnique, ChosenOption
from tightfit.units import format_bytes

if TYPE_CHECKING:
    from tightfit.techniques.session import Session

RANKS = (8, 64)

_PRODUCTS = ("aten.addmm", "aten.mm", "aten.linear")
_BYTES: dict[str, int] = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# peft keeps adapters in float32: a weight, a gradient, and as many states as the optimizer has for each weight.
_ADAPTER_BYTES = 4


@final
class Adapters(AbstractTechnique):
    """Trades training of full weights for training of two low-rank factors beside each."""

    name = "adapters"
    exact = False
    exactness = "lossy: another model is trained"

    def options(self, profile: Profile) -> Iterable[Option]:
        """No options: the adapters' parameters would be new to the program."""
        return ()

    def advice(self, profile: Profile) -> Iterable[Suggestion]:
        """The peak with adapters of each rank, and the code to write."""
        parts = profile.optimizer.trained_parts
        found = _linears_by_module(parts)
        linears = list(found.values())[:-1]
        if not parts.run.step_ranges or not linears:
            return []
        # peft leaves the head out by itself only where the model is one of transformers.
        head = list(found)[-1].partition(".")[2]
        excluded = f', exclude_modules=["{head}"]' if head else ""
        peak_bytes = parts.peak_with(())
        # Of narrow layers a large rank may hold more than they do: its inner results are saved too.
        tried = ((rank, peak_with_adapters(profile, rank)) for rank in RANKS)
        left_bytes = {rank: num_bytes for rank, num_bytes in tried if num_bytes < peak_bytes}
        if not left_bytes:
            return []
        held = [
            f"{format_bytes(num_bytes)} at rank {rank} ({sum(linear.numbers(rank) for linear in linears):,} trainable parameters)"
            for rank, num_bytes in left_bytes.items()
        ]
        return [
            Suggestion(
                what=f"LoRA on {len(linears)} linear layer{'s'[: len(linears) - 1]} (all but the last)",
                changes="model",
                saves_bytes=peak_bytes - min(left_bytes.values()),
                effect=f"would reduce allocated memory from {format_bytes(peak_bytes)} to {', '.join(held)}",
                note=f'trains another model: peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_modules="all-linear"{excluded})) before the '
                "optimizer is created",
            )
        ]

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> Never:
        """Nothing can be applied to a model."""
        raise ApplyError("adapters are parameters that the optimizer must hold: add them in the program, with peft")


def peak_with_adapters(profile: Profile, rank: int) -> int:
    """The allocated peak, in bytes, with adapters of `rank` on every linear layer but the head and all other weights frozen."""
    parts = profile.optimizer.trained_parts
    return parts.peak_with(_changes(parts, _linears(parts), rank))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Linear:
    """A linear layer of `num_inputs` x `num_outputs`, and the number of rows of its input."""

    num_inputs: int
    num_outputs: int
    num_rows: int

    def numbers(self, rank: int) -> int:
        """Elements of both factors."""
        return rank * (self.num_inputs + self.num_outputs)


def _linears(parts: TrainedParts) -> list[_Linear]:
    """The linear layers with trained weights, except the last product, which is the head: `all-linear` of peft leaves that of a language model out too."""
    return list(_linears_by_module(parts).values())[:-1]


def _linears_by_module(parts: TrainedParts) -> dict[str, _Linear]:
    """The linear layers with trained weights, by their modules, in the order of their products.

    For a product of M x K by K x N, the FLOPs are 2 M K N and the result has M N elements; the gradient of the weight has K N.
    """
    tape, operators = parts.tape, parts.tape.operators
    by_module: dict[str, list[int]] = {}
    gradients = parts.gradients
    for storage, module in zip(gradients.tolist(), parts.modules_of(gradients), strict=True):
        by_module.setdefault(module, []).append(storage)
    known = [i for i, text in enumerate(tape.strings) if text.startswith(_PRODUCTS)]
    products = np.flatnonzero(np.isin(operators.name, known) & (operators.phase == Phase.FORWARD))
    found: dict[str, _Linear] = {}
    for operator in products.tolist():
        module = tape.strings[operators.module[operator]]
        item_bytes = _BYTES.get(tape.strings[operators.dtype[operator]])
        if module not in by_module or module in found or item_bytes is None or not operators.bytes_written[operator]:
            continue
        results = int(operators.bytes_written[operator]) // item_bytes
        weight_bytes = max(int(parts.tape.storages.num_bytes[s]) for s in by_module[module])
        num_inputs = round(float(operators.flops[operator]) / 2 / results)
        if not num_inputs:
            continue
        num_outputs = round(weight_bytes / _item_bytes_of(weight_bytes, num_inputs, results) / num_inputs)
        if num_outputs:
            found[module] = _Linear(
                num_inputs=num_inputs, num_outputs=num_outputs, num_rows=max(1, results // num_outputs)
            )
    return found


def _item_bytes_of(weight_bytes: int, num_inputs: int, results: int) -> int:
    """The element size of a weight's gradient: 4, or 2 if only that gives a whole number of rows."""
    numbers = weight_bytes // 4
    outputs = numbers // num_inputs
    return 4 if outputs and numbers % num_inputs == 0 and results % outputs == 0 else 2


def _changes(parts: TrainedParts, linears: Sequence[_Linear], rank: int) -> tuple[Change, ...]:
    """Gradients and states of the weights are gone; the adapters with theirs are allocated through the whole run."""
    num_events = len(parts.tape.events)
    gradient_bytes = int(parts.run.block_bytes[parts.run.gradients(parts.run.step_ranges[-1])].sum())
    state_bytes = int(parts.run.block_bytes[parts.run.state(parts.run.step_ranges[-1])].sum())
    times = 2 + (state_bytes / gradient_bytes if gradient_bytes else 0.0)
    numbers = sum(linear.numbers(rank) for linear in linears)
    inner = sum(linear.num_rows * rank for linear in linears)
    held = Change(begin=0, end=num_events, num_bytes=round(_ADAPTER_BYTES * (times * numbers + inner)))
    return (*parts.untrained(np.ones(len(parts.gradients), dtype=bool)), held)
