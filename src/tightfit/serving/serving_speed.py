"""Seconds of serving, from a traced prompt and a traced decoding step: to the first token, per token, and tokens per second of GPUs that are kept full.

An engine captures its decoding step, so that the host does not hold it up, and fuses what lies between products. The seconds of the kernels that it cannot
do without - products, attention, and reading what they read - are the lower end; those of all kernels that transformers runs are the upper one.
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

import numpy as np

from tightfit.cost.classes import operator_class
from tightfit.cost.collectives import Group, collective_seconds
from tightfit.cost.efficiency import efficiency_of
from tightfit.cost.roofline import operator_seconds
from tightfit.cost.steps import step_operators
from tightfit.devices.calibration import OperatorClass
from tightfit.devices.device import Device
from tightfit.devices.nodes import node_of
from tightfit.serving.model_facts import ModelFacts
from tightfit.tape import Column, Tape

_NEEDED: tuple[OperatorClass, ...] = ("attention", "matmul")
_SECONDS_PER_HOUR = 3600


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SecondsRange:
    """The ends between which the seconds are expected."""

    low: float
    high: float

    def __add__(self, other: "SecondsRange") -> "SecondsRange":
        return SecondsRange(low=self.low + other.low, high=self.high + other.high)

    def times(self, factor: float) -> "SecondsRange":
        """Both ends times `factor`."""
        return SecondsRange(low=self.low * factor, high=self.high * factor)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingSpeed:
    """Seconds for requests of `prompt_tokens` that get `answer_tokens`, of which `num_requests` are served at once.

    `first_token` is that of a request that waits for no other, `each_token` a step of all requests.
    """

    prompt_tokens: int
    answer_tokens: int
    num_requests: int
    first_token: SecondsRange
    each_token: SecondsRange

    @property
    def tokens_per_second(self) -> tuple[float, float]:
        """Tokens of answers per second of all GPUs together, the lower and the upper end: prompts are computed in between, one by one."""
        spent = self.first_token.times(self.num_requests) + self.each_token.times(max(0, self.answer_tokens - 1))
        made = self.num_requests * self.answer_tokens
        return made / spent.high, made / spent.low

    def cost_of_a_million(self, price_per_hour: float) -> tuple[float, float]:
        """What a million tokens of answers cost at so much per hour, in the same currency: the lower and the upper end."""
        slow, fast = self.tokens_per_second
        price_per_second = price_per_hour / _SECONDS_PER_HOUR
        return price_per_second / fast * 1e6, price_per_second / slow * 1e6

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        slow, fast = self.tokens_per_second
        return {**dataclasses.asdict(self), "tokens_per_second_low": slow, "tokens_per_second_high": fast}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedLayers:
    """A list of layers of which the first were traced: `path` within the module that was called, the kind of each layer as a number."""

    path: str
    kinds: tuple[int, ...]
    num_kept: int

    @classmethod
    def of_report(cls, report: Mapping[str, Any]) -> list[Self]:
        """The lists of a report of `tightfit.capture.inference.inference_run`."""
        base = f"{report['base']}." if report["base"] else ""
        return [
            cls(path=row["path"].removeprefix(base), kinds=tuple(row["kinds"]), num_kept=row["num_kept"])
            for row in report["layers"]
        ]

    def times(self, place: int) -> int:
        """How many layers the traced one at `place` stands for: the last of its kind for those that were left out."""
        kind, kept = self.kinds[place], self.kinds[: self.num_kept]
        is_last = kind not in kept[place + 1 :]
        return 1 + (self.kinds[self.num_kept :].count(kind) if is_last else 0)


def seconds_of_step(
    tape: Tape, step: int, device: Device, layers: Sequence[TracedLayers], *, is_decoding: bool = False
) -> SecondsRange:
    """Seconds of the step with that number, each layer as often as the model has it; `is_decoding`: every request has one query.

    Engines have kernels for one query (FlashDecoding: the keys are shared out over the GPU, the queries of a group of heads are one tile), whose time is
    that of reading keys and values. torch's own compute whole tiles of queries.
    """
    begin, end = step_operators(tape)[step]
    operators = slice(begin, end)
    seconds = operator_seconds(tape, device)[operators]
    names = tape.operators.name[operators]
    kinds = {name: operator_class(tape.strings[name]) for name in np.unique(names).tolist()}
    is_attention, is_product = (np.isin(names, [n for n, of in kinds.items() if of == kind]) for kind in _NEEDED)
    if is_decoding:
        rate = device.dram_bytes_per_second * efficiency_of(device).of_bandwidth["attention"]
        num_bytes = (tape.operators.bytes_read + tape.operators.bytes_written)[operators]
        seconds = np.where(is_attention, num_bytes / rate, seconds)
    seconds = seconds * _times(tape, begin, end, layers)
    return SecondsRange(low=float(seconds[is_attention | is_product].sum()), high=float(seconds.sum()))


def _times(tape: Tape, begin: int, end: int, layers: Sequence[TracedLayers]) -> Column:
    modules = tape.operators.module[begin:end]
    times = np.ones(end - begin)
    for module in np.unique(modules).tolist():
        for each in layers:
            found = re.search(rf"\.{re.escape(each.path)}\.(\d+)(?:\.|$)", tape.strings[module])
            if found is not None:
                times[modules == module] = each.times(int(found.group(1)))
    return times


def reductions_seconds(facts: ModelFacts, device: Device, degree: int, num_tokens: int) -> SecondsRange:
    """Seconds of the all-reduces of a step over `num_tokens` with tensor parallelism: one behind each weight that is cut along its inputs."""
    if degree == 1:
        return SecondsRange(low=0.0, high=0.0)
    node = node_of(device)
    cut = [row for row in facts.weights if row.cut.startswith("rowwise") or row.cut == "packed_rowwise"]
    group = Group(size=degree, per_node=degree)
    total = sum(
        collective_seconds("all_reduce", num_tokens * row.shape[-2] * row.item_bytes, group, node)
        for row in cut
        if len(row.shape) > 1
    )
    return SecondsRange(low=total, high=total)
