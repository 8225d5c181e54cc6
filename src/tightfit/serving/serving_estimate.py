"""The answer to what a model needs on a card: the parts of its memory, the cache that is left, and whether the engine starts."""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.cost.collectives import Group
from tightfit.cost.communicators import communicator_bytes
from tightfit.devices.device import Device
from tightfit.devices.nodes import node_of
from tightfit.serving.costs.profiled_batch import StepMemory
from tightfit.serving.costs.serving_speed import ServingSpeed
from tightfit.serving.engine_rules import EngineRules, newest_words
from tightfit.serving.host_memory import HostCache, Sleep, asleep, host_cache
from tightfit.serving.load.load_summary import LoadSummary
from tightfit.serving.model.cache_size import CacheSize, mean_request_bytes, num_tokens
from tightfit.serving.model.held_weights import held_weights_bytes, rotary_bytes
from tightfit.serving.model.model_facts import ModelFacts
from tightfit.serving.model.weight_formats import WeightFormat, whole_rows
from tightfit.serving.serve_settings import KV_DTYPES, ResolvedSettings
from tightfit.serving.serving_points import ServingCurves
from tightfit.units import KIB, format_bytes

# Of each position of each request in SGLang's table of pages.
_POSITION_BYTES = 4
# More than 16 times as many cards share no model.
_MAX_DOUBLINGS = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServingEstimate:
    """One start of an engine, in bytes of one card; `kv_tokens` and `max_concurrency` are of the whole engine.

    `graph_bytes` are of CUDA graphs, which new versions count against the share. `why` is empty if it starts. `request_bytes` is the cache of a request of the asked lengths, else of the longest that is allowed.

    `change` is the smallest one with which it would fit, or fit whole, in words.

    Engines of whole batches have their kind of `cache`, bytes at the host, and (llama.cpp) how many of the layers are on the card.
    """

    model: str
    device: str
    capacity_bytes: int
    settings: ResolvedSettings
    engine: str
    engine_version: str
    weights_bytes: int
    activation_bytes: int
    non_torch_bytes: int
    context_bytes: int
    graph_bytes: int
    counts_graphs: bool
    kv_bytes: int
    kv_bytes_per_token: int
    request_bytes: int
    kv_tokens: int
    max_concurrency: float
    concurrency_at_lengths: float | None
    why: str
    assumptions: tuple[str, ...]
    speed: ServingSpeed | None = None
    load: LoadSummary | None = None
    launch: Mapping[str, Sequence[str]] = dataclasses.field(default_factory=dict)
    host_bytes: int = 0
    cache: str = ""
    curves: ServingCurves | None = None
    adapter_bytes: int = 0
    draft_bytes: int = 0
    host_cache: HostCache | None = None
    sleep: Sleep | None = None
    layers_on_card: int | None = None
    num_layers: int | None = None
    change: str = ""

    @property
    def charged_bytes(self) -> int:
        """Bytes of one card that the engine counts before it gives the rest of its share to the cache."""
        graphs = self.graph_bytes if self.counts_graphs else 0
        return self.weights_bytes + self.adapter_bytes + self.activation_bytes + self.non_torch_bytes + graphs

    @property
    def takes_a_share(self) -> bool:
        """Whether the engine takes a share of the card for requests that come and go, and not what one batch needs."""
        return self.layers_on_card is None and not self.cache

    @property
    def fits(self) -> bool:
        """Whether the engine starts."""
        return not self.why

    def cost_of_a_million(self, price_per_hour: float) -> tuple[float, float] | None:
        """What a million tokens of answers cost where one GPU costs so much per hour, the lower and the upper end; None where the speed is not known."""
        return None if self.speed is None else self.speed.cost_of_a_million(price_per_hour * self.settings.num_gpus)

    def to_json(self, price_per_hour: float | None = None) -> dict[str, Any]:
        """Plain data, with a schema version."""
        plain = dataclasses.asdict(self)
        settings = plain.pop("settings")
        plain["speed"] = self.speed.to_json() if self.speed is not None else None
        plain["load"] = self.load.to_json() if self.load is not None else None
        plain["launch"] = {engine: list(arguments) for engine, arguments in self.launch.items()}
        plain |= self._speed_keys()
        plain["choices"] = [{"choice": name, "value": str(value)} for name, value in settings.items()]
        plain["cost_of_a_million_tokens"] = None if price_per_hour is None else self.cost_of_a_million(price_per_hour)
        return {"schema": 1, "fits": self.fits, **plain, "settings": settings}

    def _speed_keys(self) -> dict[str, float | None]:
        """The middle of each range of the speed."""
        speed = self.speed
        if speed is None:
            names = ("time_to_first_token_seconds", "time_per_output_token_seconds", "tokens_per_second")
            return dict.fromkeys(names)
        return {
            "time_to_first_token_seconds": speed.first_token.middle,
            "time_per_output_token_seconds": speed.each_token.middle,
            "tokens_per_second": sum(speed.tokens_per_second) / 2,
        }


def estimate_serving(
    facts: ModelFacts,
    profiled: StepMemory,
    *,
    model: str,
    device: Device,
    rules: EngineRules,
    settings: ResolvedSettings,
    weight_format: WeightFormat | None,
    lengths: Sequence[tuple[int, int]] = (),
) -> ServingEstimate:
    """What `facts` need on `device`, of which the engine's largest batch was traced as `profiled`. `lengths` are tokens of prompt and answer of each request."""
    degree = settings.num_gpus
    weights = held_weights_bytes(facts, weight_format, degree, rules.fused)
    weights += rotary_bytes(facts, rules.rotary_item_bytes)
    adapters = 0 if settings.adapters is None else settings.adapters.num_bytes(facts, degree)
    activation = profiled.reserved_bytes if rules.activation_peak == "reserved" else profiled.allocated_bytes
    communicators = _communicator_bytes(device, degree)
    context = device.context_bytes
    graphs = graph_bytes(facts, rules, settings, device)
    charged = weights + adapters + activation + communicators
    charged += (context if rules.charges_context else 0) + (graphs if rules.charges_graphs else 0)
    share = int(device.capacity_bytes * settings.gpu_memory_utilization)
    free = device.capacity_bytes - context - device.system_bytes - communicators
    if rules.has_static_share:
        # Of what is free before the weights, and of weights and cache alone.
        share, charged = int(free * settings.gpu_memory_utilization), weights + adapters
    kv_bytes = share - charged
    size = CacheSize(
        tensors=facts.cache,
        element_bytes=KV_DTYPES[settings.kv_dtype],
        degree=degree,
        block_tokens=rules.block_tokens,
    )
    longest = size.request_bytes(*held_tokens(facts, settings.max_model_len, 0))
    asked = mean_request_bytes(size, [held_tokens(facts, *pair) for pair in lengths]) if lengths else float(longest)
    room = max(0, kv_bytes)
    less = () if kv_bytes >= longest else _less(facts, weight_format, rules, size, settings, device, kv_bytes + weights)
    why = _refusal(kv_bytes, longest, share, settings, device, _longest_within(facts, size, room, settings), less)
    if rules.has_static_share and not why:
        why = _no_room_beside(free, share, profiled.reserved_bytes + 2 * graphs, settings)
    return ServingEstimate(
        model=model,
        device=device.name,
        capacity_bytes=device.capacity_bytes,
        settings=settings,
        engine=rules.engine,
        engine_version=rules.version,
        weights_bytes=weights,
        activation_bytes=activation,
        non_torch_bytes=communicators + (context if rules.charges_context else 0),
        context_bytes=context,
        graph_bytes=graphs,
        counts_graphs=rules.charges_graphs,
        kv_bytes=max(0, kv_bytes),
        kv_bytes_per_token=size.token_bytes or size.window_token_bytes,
        request_bytes=round(asked),
        kv_tokens=num_tokens(size, kv_bytes),
        max_concurrency=room / longest if longest else 0.0,
        concurrency_at_lengths=(room / asked if asked else 0.0) if lengths else None,
        why=why,
        assumptions=_assumptions(facts, settings, rules),
        adapter_bytes=adapters,
        host_cache=host_cache(
            settings.kv_offload_bytes,
            num_layers=len({tensor.layer for tensor in facts.cache}),
            degree=degree,
            token_bytes=size.token_bytes or size.window_token_bytes,
            block_tokens=size.block_tokens,
        )
        if settings.kv_offload_bytes
        else None,
        # At the host they would be in the same memory.
        sleep=None
        if device.shares_host_memory or rules.has_static_share
        else asleep(
            device, weights_bytes=weights + adapters, graph_bytes=graphs, outside_bytes=communicators + context
        ),
    )


def _communicator_bytes(device: Device, degree: int) -> int:
    node = node_of(device)
    # Small all-reduces are the engine's own kernels, the large ones of a prefill NCCL's rings.
    return communicator_bytes(node, Group.of(degree, stride=1, num_linked=node.num_linked), ("all_gather",))


def _no_room_beside(free: int, share: int, needed: int, settings: ResolvedSettings) -> str:
    """Why the largest batch, the graphs (known within a factor of two) and the table of requests do not fit beside weights and cache; empty if they do."""
    needed += settings.max_num_seqs * settings.max_model_len * _POSITION_BYTES
    if needed <= free - share:
        return ""
    most = max(0, int(1000 * (free - needed) / free)) / 1000
    return (
        f"activations, CUDA graphs and the table of requests need {format_bytes(needed)} beside weights and cache, and a share of {settings.gpu_memory_utilization:g}"
        f" leaves {format_bytes(free - share)}: lower --gpu-memory-utilization to {most:g}, or --max-num-batched-tokens"
    )


def graph_bytes(facts: ModelFacts, rules: EngineRules, settings: ResolvedSettings, device: Device) -> int:
    """Bytes of the CUDA graphs on one card, 0 without."""
    if settings.enforce_eager:
        return 0
    num_layers = len({tensor.layer for tensor in facts.cache})
    return rules.num_graphs(settings.max_num_seqs, device, settings.num_gpus) * num_layers * rules.graph_layer_kib * KIB


def held_tokens(facts: ModelFacts, prompt: int, answer: int) -> tuple[int, int]:
    """Tokens that a request holds in the cache in the end, and those of the encoder, which has read the prompt where there is one."""
    return (answer + 1, prompt) if facts.is_encoder_decoder else (prompt + answer, 0)


def _longest_within(facts: ModelFacts, size: CacheSize, room: int, settings: ResolvedSettings) -> int:
    """Tokens of the longest request whose cache has room, 0 where not one has."""
    low, high = 0, settings.max_model_len + 1
    while high - low > 1:
        middle = (low + high) // 2
        fits = size.request_bytes(*held_tokens(facts, middle, 0)) <= room
        low, high = (middle, high) if fits else (low, middle)
    return low


def _less(
    facts: ModelFacts,
    weight_format: WeightFormat | None,
    rules: EngineRules,
    size: CacheSize,
    settings: ResolvedSettings,
    device: Device,
    room: int,
) -> tuple[str, ...]:
    """What makes a model need less of a card that has `room` for its weights and the longest request: a format of weights, or so many cards as share them."""
    quantised = () if weight_format is not None else ("quantise (--quantization)",)
    if device.shares_host_memory:
        return quantised
    asked = held_tokens(facts, settings.max_model_len, 0)
    degrees = [size.degree << more for more in range(1, _MAX_DOUBLINGS)]
    needed = (
        held_weights_bytes(facts, weight_format, degree, rules.fused)
        + dataclasses.replace(size, degree=degree).request_bytes(*asked)
        for degree in degrees
    )
    fits = (degree for degree, num_bytes in zip(degrees, needed, strict=True) if num_bytes <= room)
    return *quantised, *(f"use more cards (--gpus {degree})" for degree in itertools.islice(fits, 1))


def _refusal(
    kv_bytes: int,
    longest: int,
    share: int,
    settings: ResolvedSettings,
    device: Device,
    fitting: int,
    less: Sequence[str],
) -> str:
    free = device.capacity_bytes - device.context_bytes - device.system_bytes
    if share > free:
        others = " and the machine's own programs" if device.shares_host_memory else ""
        most = int(100 * free / device.capacity_bytes) / 100
        return (
            f"{settings.gpu_memory_utilization:g} of the card is {format_bytes(share)}, and {format_bytes(free)}"
            f" are free beside the CUDA context{others}: lower --gpu-memory-utilization to {most:g}"
        )
    # The engine refuses a share of more than is free beside its context.
    raised = ["raise --gpu-memory-utilization"] if free - share > max(0, -kv_bytes) else []
    *others, last = [*raised, *less] or ["take a larger GPU"]
    helps = f"{', '.join(others)}, or {last}" if others else last
    if kv_bytes <= 0:
        return f"no memory is left for the cache: {format_bytes(-kv_bytes)} are missing; {helps}"
    if kv_bytes < longest and not fitting:
        return f"{format_bytes(kv_bytes)} are left for the cache, which not even a request of one token has room in; {helps}"
    if kv_bytes < longest:
        return (
            f"one request of {settings.max_model_len:,} tokens needs {format_bytes(longest)} of cache, and {format_bytes(kv_bytes)} are left:"
            f" lower --max-model-len to {fitting:,}"
        )
    return ""


def _assumptions(facts: ModelFacts, settings: ResolvedSettings, rules: EngineRules) -> tuple[str, ...]:
    found = [*facts.left_open, f"{rules.engine} {rules.version}: {rules.source}"]
    found += newest_words(rules.engine, rules.newest)
    if not settings.enforce_eager:
        when = "before it sizes the cache" if rules.charges_graphs else "beside its share of the GPU"
        found.append(
            f"CUDA graphs, which this version captures {when}, hold {rules.graph_layer_kib} KiB for each layer and graph; published ones half to twice of that"
        )
    if settings.num_gpus > 1:
        whole = sum(row.num_bytes for row in whole_rows(facts))
        if whole:
            found.append(
                f"the model's tensor-parallel plan leaves {format_bytes(whole)} of matrices whole on every card; the engine may cut them"
            )
    return tuple(found)


def settings_words(settings: ResolvedSettings) -> Mapping[str, str]:
    """The settings as an engine's arguments would say them."""
    return {
        "--max-model-len": str(settings.max_model_len),
        "--max-num-seqs": str(settings.max_num_seqs),
        "--max-num-batched-tokens": str(settings.max_num_batched_tokens),
        "--gpu-memory-utilization": f"{settings.gpu_memory_utilization:g}",
        "--kv-cache-dtype": settings.kv_dtype,
        "--tensor-parallel-size": str(settings.num_gpus),
    }
