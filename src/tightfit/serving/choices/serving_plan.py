"""The answer to which server to run: the chosen one with the reasons, the next ones, and why the others do not serve."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.serving.choices.candidate_servers import Kind
from tightfit.serving.choices.choosing import Objective, Offer
from tightfit.serving.model.weight_formats import WeightFormat


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServerChoice:
    """One choice: what of, which, whether answers stay the same up to the order of sums, and what is published of the loss."""

    choice: str
    value: str
    exact: bool = True
    loss: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingPlan:
    """`offers` are the chosen server, first, and the next ones; `refused` are kinds of servers with what keeps them from serving. `launch` has the command of each engine."""

    objective: Objective
    model: str
    offers: tuple[Offer, ...]
    refused: tuple[tuple[str, str], ...]
    launch: Mapping[str, Sequence[str]]
    assumptions: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether there is a server that does."""
        return bool(self.offers)

    def choices(self) -> list[ServerChoice]:
        """What was chosen."""
        return choices_of(self.offers[0]) if self.offers else []

    def to_json(self) -> dict[str, Any]:
        """Plain data, with a schema version: that of the chosen server's estimate, and the plan's own."""
        own = {
            "objective": self.objective,
            "choices": [dataclasses.asdict(choice) for choice in self.choices()],
            "alternatives": [_row(offer) for offer in self.offers[1:]],
            "refused": [{"server": name, "why": why} for name, why in self.refused],
            "launch": {engine: list(arguments) for engine, arguments in self.launch.items()},
        }
        if not self.offers:
            return {"schema": 1, "fits": False, "model": self.model, **own, "assumptions": list(self.assumptions)}
        best = self.offers[0]
        found = dataclasses.replace(best.estimate, speed=best.speed, load=best.load)
        plain = {**found.to_json(best.kind.card.price_per_hour), **own}
        plain["assumptions"] = [*plain["assumptions"], *self.assumptions]
        return {**plain, "tokens_per_second_of_all": best.tokens_per_second, "num_servers": best.kind.replicas}


def choices_of(offer: Offer) -> list[ServerChoice]:
    """What a server is, choice by choice."""
    kind, settings = offer.kind, offer.server.settings
    return [
        ServerChoice(choice="device", value=kind.card.device.name),
        ServerChoice(choice="tensor_parallel_size", value=str(kind.degree)),
        ServerChoice(choice="num_servers", value=str(kind.replicas)),
        _weights(kind.weight_format),
        ServerChoice(
            choice="kv_dtype",
            value=settings.kv_dtype,
            exact=settings.kv_dtype == "auto",
            loss="" if settings.kv_dtype == "auto" else "8-bit floats for keys and values: no published perplexity",
        ),
        ServerChoice(choice="max_model_len", value=str(settings.max_model_len)),
        ServerChoice(choice="max_num_seqs", value=str(settings.max_num_seqs)),
        ServerChoice(choice="max_num_batched_tokens", value=str(settings.max_num_batched_tokens)),
        ServerChoice(choice="gpu_memory_utilization", value=f"{settings.gpu_memory_utilization:g}"),
        ServerChoice(choice="cuda_graphs", value="off" if settings.enforce_eager else "on"),
    ]


def _weights(weight_format: WeightFormat | None) -> ServerChoice:
    if weight_format is None:
        return ServerChoice(choice="weight_format", value="as they are")
    return ServerChoice(choice="weight_format", value=weight_format.name, exact=False, loss=weight_format.loss)


def _row(offer: Offer) -> dict[str, Any]:
    settings = offer.server.settings
    return {
        "server": offer.kind.name,
        "num_servers": offer.kind.replicas,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "gpu_memory_utilization": settings.gpu_memory_utilization,
        "time_to_first_token_seconds": offer.speed.first_token.middle,
        "time_per_output_token_seconds": offer.speed.each_token.middle,
        "seconds_of_a_request_alone": offer.seconds_alone,
        "tokens_per_second_of_all": offer.tokens_per_second,
        "cost_of_a_million_tokens": offer.cost_of_a_million,
    }


def refusals(found: Sequence[tuple[Kind, str]]) -> tuple[tuple[str, str], ...]:
    """Kinds of servers with the reasons that they do not serve."""
    return tuple((kind.name, why) for kind, why in found)
