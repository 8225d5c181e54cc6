"""Seconds of serving at given lengths: to the first token, per token, and tokens per second of GPUs that are kept full."""

import dataclasses
from typing import Any

from tightfit.cost.collectives import Group, collective_seconds
from tightfit.devices.device import Device
from tightfit.devices.nodes import node_of
from tightfit.serving.costs.seconds_range import SecondsRange
from tightfit.serving.costs.step_costs import StepCosts
from tightfit.serving.model.model_facts import ModelFacts

_SECONDS_PER_HOUR = 3600


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


def speed_at(
    costs: StepCosts, prompt: int, answer: int, num_requests: int, *, chunk: int | None = None
) -> ServingSpeed:
    """The speed of `num_requests` with prompts and answers of so many tokens; prompts are cut into chunks of at most `chunk` tokens (None: never)."""
    size = chunk or prompt
    first = SecondsRange(low=0.0, high=0.0)
    for context in range(0, prompt, size):
        first = first + costs.of_prompt(min(size, prompt - context), context)
    return ServingSpeed(
        prompt_tokens=prompt,
        answer_tokens=answer,
        num_requests=num_requests,
        first_token=first,
        # In the middle of their answers.
        each_token=costs.of_decoding([prompt + answer // 2] * num_requests),
    )


def reductions_seconds(facts: ModelFacts, device: Device, degree: int, num_tokens: int) -> float:
    """Seconds of the all-reduces of a step over `num_tokens` with tensor parallelism: one behind each weight that is cut along its inputs."""
    if degree == 1:
        return 0.0
    node = node_of(device)
    group = Group(size=degree, per_node=degree)
    cut = (row for row in facts.weights if row.cut.startswith("rowwise") or row.cut == "packed_rowwise")
    sizes = [row.shape[-2] * row.item_bytes for row in cut if len(row.shape) > 1]
    each = {size: collective_seconds("all_reduce", num_tokens * size, group, node) for size in set(sizes)}
    return sum(each[size] for size in sizes)
