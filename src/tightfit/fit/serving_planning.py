"""The plan of a server: the model is traced once for all degrees of tensor parallelism, and the candidates are worked out from that."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from tightfit.errors import UsageError
from tightfit.errors.faults import answering
from tightfit.fit.planning_progress import OnProgress
from tightfit.fit.traced_models import served_name, traced_model
from tightfit.serving.batches.batch_rules import BATCH_ENGINES
from tightfit.serving.choices.candidate_servers import (
    BATCHED_TOKENS,
    CACHE_TYPES,
    SAMPLED_ROWS,
    Kind,
    PricedCard,
    degrees,
    kinds,
    servers,
)
from tightfit.serving.choices.choosing import Offer, Wanted, best_of_kind, ranked
from tightfit.serving.choices.serving_plan import ServingPlan, refusals
from tightfit.serving.choices.shared_card import SharedCard, SharedServer, shared_card
from tightfit.serving.engine_rules import EngineRules, rules_of
from tightfit.serving.launch.launch_arguments import all_launches, launch_of
from tightfit.serving.load.arrivals import limit_words, served_lengths
from tightfit.serving.model.checkpoint_format import checkpoint_format
from tightfit.serving.model.model_facts import ModelFacts
from tightfit.serving.model.weight_formats import WeightFormat, all_formats, format_named, is_of_files
from tightfit.serving.serve_settings import ServeSettings
from tightfit.serving.traced_server import TracedModel

# Formats that vLLM serves; those of llama.cpp are files of their own.
_NOT_IN_VLLM = ("nf4",)
_MOST_LENGTHS = 400
_GROUPED_KERNELS = (8, 0)


@answering("the plan of serving")
def plan_serving(
    model: str,
    cards: Sequence[PricedCard],
    wanted: Wanted,
    *,
    asked: ServeSettings,
    allow: Sequence[str] = (),
    engine: str = "vllm",
    engine_version: str | None = None,
    dtype: str | None = None,
    on_progress: OnProgress | None = None,
) -> ServingPlan:
    """The server of `model` on some of `cards` that is best for what is `wanted`. What `asked` sets is kept; formats of weights and cache that change answers are taken only where
    `allow` names them, or "lossy" for all.

    Raises:
        UsageError: no such model, engine or format, a setting that cannot be, or cost is wanted without prices.
        CaptureError: the model could not be run.
    """
    if engine in (*BATCH_ENGINES, "sglang"):
        raise UsageError(f"--engine {engine}: servers are chosen for vllm; leave out --plan, --for and --allow")
    if asked.draft is not None or asked.cache is not None:
        raise UsageError("--draft and --cache: servers are chosen without; leave out --plan, --for and --allow")
    rules = rules_of(engine, engine_version)
    names = _allowed(allow)
    if wanted.objective == "cost" and any(card.price_per_hour is None for card in cards):
        raise UsageError("--for cost: give what each GPU costs, --price-per-hour 0.8 or --price-per-hour L4=0.8")
    offers: list[Offer] = []
    refused: list[tuple[Kind, str]] = []
    assumptions: set[str] = set()
    # Cards without kernels for groups of heads run other operators.
    for group in _grouped(cards):
        traced = _traced(model, group, rules, asked, dtype, on_progress)
        wanted = dataclasses.replace(wanted, lengths=_thinned(_lengths(wanted, asked, traced.facts)))
        assumptions |= {f"{why}" for why in traced.refused.values()}
        for kind in kinds(traced, group, _formats(asked, traced.facts, names), _cache_types(asked, names)):
            tried = servers(traced, kind, rules, asked, _longest(asked, traced.facts, wanted))
            found = best_of_kind(kind, tried, wanted)
            if isinstance(found, Offer):
                offers.append(found)
            else:
                refused.append((kind, found))
    best, late = ranked(offers, wanted)
    return ServingPlan(
        objective=wanted.objective,
        model=model,
        offers=tuple(best),
        refused=refusals([*refused, *late]),
        launch=all_launches(launch_of(best[0].server, best[0].estimate, served_name(model))) if best else {},
        assumptions=tuple(sorted(assumptions)),
    )


@answering("the estimate of servers that share a card")
def share_card(
    models: Sequence[str],
    card: PricedCard,
    wanted: Wanted,
    *,
    asked: ServeSettings,
    on_progress: OnProgress | None = None,
    **names: Any,
) -> SharedCard:
    """`models` as servers on one card, each with the least share that starts and holds what is `wanted`.

    Raises:
        UsageError: no such model or engine, or a setting that cannot be.
        CaptureError: a model could not be run.
    """
    found = []
    for model in models:
        least = dataclasses.replace(wanted, objective="memory")
        chosen = plan_serving(model, [card], least, asked=asked, on_progress=on_progress, **names)
        why = "" if chosen.offers else next((why for _, why in chosen.refused), "no server does")
        estimate = chosen.offers[0].estimate if chosen.offers else None
        found.append(SharedServer(model=model, estimate=estimate, why=why))
    return shared_card(card.device.name, card.device.capacity_bytes, found)


def _traced(
    model: str,
    cards: Sequence[PricedCard],
    rules: EngineRules,
    asked: ServeSettings,
    dtype: str | None,
    on_progress: OnProgress | None,
) -> TracedModel:
    own = asked.max_num_batched_tokens
    tokens = [own] if own else sorted({*BATCHED_TOKENS, *(rules.chunk_tokens(card.device) for card in cards)})
    rows = sorted({*SAMPLED_ROWS, *([asked.max_num_seqs] if asked.max_num_seqs else [])})
    return traced_model(
        model,
        cards[0].device.name,
        rules=rules,
        asked=asked,
        dtype=dtype,
        batched_tokens=tokens,
        sampled_rows=rows,
        degrees=degrees(max(card.most for card in cards)),
        on_progress=on_progress,
    )


def _grouped(cards: Sequence[PricedCard]) -> list[list[PricedCard]]:
    groups: dict[bool, list[PricedCard]] = {}
    for card in cards:
        groups.setdefault(card.device.compute_capability >= _GROUPED_KERNELS, []).append(card)
    return list(groups.values())


def _allowed(allow: Sequence[str]) -> frozenset[str]:
    known = {*all_formats(), "fp8-cache", "lossy"}
    unknown = sorted(set(allow) - known)
    if unknown:
        raise UsageError(
            f"--allow {', '.join(unknown)}: no such format; allow lossy (all), fp8-cache, or one of {', '.join(all_formats())}"
        )
    return frozenset(allow)


def _formats(asked: ServeSettings, facts: ModelFacts, allow: frozenset[str]) -> list[WeightFormat | None]:
    """The formats that are tried: the one that the user names, or that of the checkpoint and those that are allowed."""
    if asked.quantization:
        return [format_named(asked.quantization)]
    own = checkpoint_format(facts.quantization)
    if own is not None:
        # Its weights are quantised already.
        return [own]
    others = [
        each
        for name, each in all_formats().items()
        if name in allow
        or ("lossy" in allow and name not in _NOT_IN_VLLM and not is_of_files(name) and name != "fp8-block")
    ]
    return [None, *others]


def _cache_types(asked: ServeSettings, allow: frozenset[str]) -> list[str]:
    if asked.kv_dtype != "auto":
        return [asked.kv_dtype]
    return list(CACHE_TYPES) if allow & {"fp8-cache", "lossy"} else ["auto"]


def _longest(asked: ServeSettings, facts: ModelFacts, wanted: Wanted) -> list[int | None]:
    """The lengths of the longest request that are tried: all positions of the model first, then no more than is asked for."""
    if asked.max_model_len is not None:
        return [asked.max_model_len]
    needed = max((prompt + answer for prompt, answer in wanted.lengths), default=0)
    if not needed:
        return [None]
    if wanted.objective == "memory" or facts.max_positions is None:
        return [needed]
    return [None, needed] if needed < facts.max_positions else [None]


def _lengths(wanted: Wanted, asked: ServeSettings, facts: ModelFacts) -> Sequence[tuple[int, int]]:
    """Those of the requests that a server takes with all positions of the model, or as many as the user allows."""
    arrivals = None if wanted.load is None else wanted.load.arrivals
    limit = facts.max_positions if asked.max_model_len is None else asked.max_model_len
    return served_lengths(wanted.lengths, arrivals, limit, limit_words(asked.max_model_len))


def _thinned(lengths: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
    """At most so many of the lengths, evenly by size, the longest among them."""
    if len(lengths) <= _MOST_LENGTHS:
        return lengths
    ordered = sorted(lengths, key=sum)
    step = len(ordered) / _MOST_LENGTHS
    return [ordered[min(len(ordered) - 1, int((at + 1) * step) - 1)] for at in range(_MOST_LENGTHS)]
