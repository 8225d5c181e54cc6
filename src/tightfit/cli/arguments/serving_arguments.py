"""The arguments of `tightfit serve` in groups: what the engine is told, the load, and what a plan may choose."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from tightfit.cli.arguments.options import SEVERAL
from tightfit.errors import UsageError

if TYPE_CHECKING:
    from tightfit.serving.choices.candidate_servers import PricedCard
    from tightfit.serving.load.load_summary import ServiceLevel
    from tightfit.serving.traced_server import AskedLoad


@Parameter(name="*", group=Group("Engine settings", sort_key=1))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """Arguments of the engine; by default its own defaults.

    Parameters
    ----------
    quantization
        Format of the weights: fp8, int8, awq, gptq, bitsandbytes, nvfp4, mxfp4, q4_k_m ...; by default that of the checkpoint.
    kv_dtype
        Type of the cache: auto (that of the model), bfloat16, float16, fp8; q8_0 and q4_0 of llama.cpp.
    max_model_len
        Tokens of the longest request; by default all positions of the model.
    max_num_seqs
        Requests in one batch at most.
    max_num_batched_tokens
        Tokens in one batch at most.
    gpu_memory_utilization
        Share of the GPU's memory that the engine uses.
    enforce_eager
        Without CUDA graphs.
    cache
        The cache of transformers: dynamic (its default), static, offloaded, quantized (4 bits) or fp8.
    lora
        Adapters: the largest rank, and how many at once, 16:4.
    draft
        A second model that drafts tokens (speculative decoding), given like MODEL; its weights and cache count too.
    kv_offload
        Host memory for a cache beside that of the GPUs, of all of them together: 20GiB.
    """

    quantization: str | None = None
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    cache: str | None = None
    lora: str | None = None
    draft: str | None = None
    kv_offload: str | None = None


@Parameter(name="*", group=Group("Load", sort_key=2))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadArguments:
    """Requests that arrive while others are served, simulated step by step.

    Parameters
    ----------
    rate
        Requests per second that arrive at random (Poisson), with the lengths of --lengths.
    requests
        Number of requests to simulate.
    seed
        Seed of the random arrivals.
    arrivals
        Instead, a .csv of past requests with their times, in the format of Azure's traces: TIMESTAMP,ContextTokens,GeneratedTokens.
    slo_ttft
        The longest acceptable time to the first token, such as 500ms. With it the largest rate is found at which 99 % of the requests are within the limits.
    slo_tpot
        The longest acceptable time per token after the first, such as 30ms.
    """

    rate: float | None = None
    requests: int = 2000
    seed: int = 0
    arrivals: Path | None = None
    slo_ttft: str | None = None
    slo_tpot: str | None = None


@Parameter(name="*", group=Group("Plan", sort_key=3))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanArguments:
    """Which server is best; whatever the engine is told above is kept.

    Parameters
    ----------
    plan
        Choose the card, how many share the model, the formats of weights and cache, and the size of the batch. --gpus is then the upper limit.
    objective
        The objective: throughput, latency (of a single request), cost (of a million tokens; with --price-per-hour) or memory (the smallest share of the GPU that serves the lengths asked for).
    allow
        A format of weights that changes answers but may be used, fp8-cache, or lossy for all of them; repeatable.
    at_once
        With memory and --beside: how many requests there must be room for.
    beside
        Another model on the same GPU: which of them can be awake together, or in turns; repeatable, with --lengths.
    """

    plan: bool = False
    objective: Annotated[str | None, Parameter(name="--for")] = None
    allow: Annotated[tuple[str, ...], SEVERAL] = ()
    at_once: int = 1
    beside: Annotated[tuple[str, ...], SEVERAL] = ()

    @property
    def is_asked(self) -> bool:
        """Whether servers are to be chosen among."""
        return self.plan or self.objective is not None or bool(self.allow)


def level_of(load: LoadArguments) -> "ServiceLevel":
    """The limits of time that the arguments set.

    Raises:
        UsageError: one is no time.
    """
    from tightfit.serving.load.load_summary import ServiceLevel
    from tightfit.units import parse_seconds

    return ServiceLevel(
        first_token=None if load.slo_ttft is None else parse_seconds(load.slo_ttft),
        each_token=None if load.slo_tpot is None else parse_seconds(load.slo_tpot),
    )


def load_of(load: LoadArguments, lengths: Sequence[tuple[int, int]]) -> "AskedLoad | None":
    """The load that the arguments describe, None without one.

    Raises:
        UsageError: they do not fit together, or a file cannot be read.
    """
    from tightfit.serving.load.arrivals import drawn_arrivals, read_arrivals
    from tightfit.serving.traced_server import AskedLoad

    level = level_of(load)
    if load.arrivals is not None:
        if load.rate is not None:
            raise UsageError("--rate and --arrivals: give one of them")
        return AskedLoad(arrivals=read_arrivals(load.arrivals), level=level)
    if load.rate is None:
        return None
    if not lengths:
        raise UsageError("--rate: give --lengths too, such as 2000:300")
    return AskedLoad(arrivals=drawn_arrivals(lengths, load.rate, load.requests, seed=load.seed), level=level)


def cards_of(names: Sequence[str], most: int, prices: Sequence[str]) -> "list[PricedCard]":
    """The cards by name, at most so many of each, with what one costs per hour.

    Raises:
        UsageError: a card is not known, or a price is none or of another card.
    """
    from tightfit.devices.catalogue import find
    from tightfit.serving.choices.candidate_servers import PricedCard

    devices = [find(name) for name in names]
    of_each: dict[str, float] = {}
    for text in prices:
        name, _, number = text.rpartition("=")
        try:
            price = float(number)
        except ValueError:
            price = 0.0
        if not 0 < price < float("inf"):
            raise UsageError(f"--price-per-hour {text}: write what a GPU costs per hour, 0.8 or L4=0.8")
        card = find(name).name if name else ""
        if name and card not in {device.name for device in devices}:
            raise UsageError(f"--price-per-hour {text}: {card} is none of the --device")
        of_each[card] = price
    return [
        PricedCard(device=device, most=most, price_per_hour=of_each.get(device.name, of_each.get("")))
        for device in devices
    ]
