"""The estimate of a batch on a card: whether it fits, how many requests do, and how fast they are."""

import dataclasses
from collections.abc import Callable, Sequence

from tightfit.cost.attention_plans import calls_planned_attention, seconds_of_a_plan
from tightfit.cost.copies import copy_seconds
from tightfit.cost.roofline import is_kernel
from tightfit.cost.steps import step_operators
from tightfit.devices.device import Device
from tightfit.serving.batches.batch_memory import BatchMemory, TracedPeaks, batch_memory_of
from tightfit.serving.batches.batch_rules import BatchRules
from tightfit.serving.batches.split_layers import SplitModel, split_model
from tightfit.serving.batches.split_seconds import SplitClock
from tightfit.serving.costs.profiled_batch import TracedStep
from tightfit.serving.costs.seconds_range import SecondsRange
from tightfit.serving.costs.serving_speed import ServingSpeed, speed_at
from tightfit.serving.costs.step_costs import StepCosts, step_costs
from tightfit.serving.costs.traced_operators import TracedLayers, layer_times
from tightfit.serving.costs.weight_products import WeightProducts
from tightfit.serving.engine_rules import newest_words
from tightfit.serving.model.cache_size import CacheSize
from tightfit.serving.model.smallest_change import FILE_FORMATS, LOADED_FORMATS, smallest_change
from tightfit.serving.model.weight_formats import WeightFormat, all_formats, format_named, row_bytes
from tightfit.serving.serve_settings import KV_DTYPES, ResolvedSettings
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.serving.traced_server import TracedModel
from tightfit.units import format_bytes

# More requests at once than anybody calls `generate` with.
_MOST_REQUESTS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BatchServer:
    """A model on a card with an engine of whole batches; `cache` is a kind of transformers' cache, `requests` how many at once (None: as many as fit)."""

    model: TracedModel
    device: Device
    rules: BatchRules
    weight_format: WeightFormat | None
    kv_dtype: str
    cache: str
    requests: int | None
    prompt: int
    answer: int

    @property
    def size(self) -> CacheSize:
        """The cache of a request, in single tokens."""
        return CacheSize(
            tensors=self.model.facts.cache, element_bytes=KV_DTYPES[self.kv_dtype], degree=1, block_tokens=1
        )

    @property
    def peaks(self) -> TracedPeaks:
        """What the trace allocated."""
        return TracedPeaks.of_tape(self.model.tape, TracedStep.of_report(self.model.report, 1))

    @property
    def free_bytes(self) -> int:
        """Bytes of the card beside the context, and beside what the machine's programs hold of a memory that is shared."""
        return self.device.capacity_bytes - self.device.context_bytes - self.device.system_bytes

    def costs(self) -> StepCosts:
        """What a step costs where the host holds nothing up."""
        model = self.model
        return step_costs(
            model.tape,
            TracedStep.of_report(model.report, 1),
            TracedLayers.of_report(model.report),
            device=self.device,
            cache=self.size,
            products=WeightProducts.of(model.facts, model.report["base"], self.weight_format),
            reductions=lambda _: 0.0,
        )

    def host_seconds(self) -> SecondsRange:
        """Seconds in which the host gives out the kernels of one decoding step, one by one, with its Python."""
        model, report = self.model, self.model.report
        step = next(step for step in TracedStep.of_report(report, 1) if step.kind == "decode")
        begin, end = step_operators(model.tape)[step.at]
        names = model.tape.operators.module[begin:end].tolist()
        paths = [model.tape.strings[name].partition(".")[2] for name in names]
        times = layer_times(paths, TracedLayers.of_report(report))
        kernels = float((is_kernel(model.tape)[begin:end] * times).sum())
        low, high = (kernels * each * 1e-6 for each in self.rules.host_microseconds)
        more = self._quantised_seconds()
        # A dynamic cache is longer with each token, so that cuDNN plans attention anew.
        if self.cache != "static" and calls_planned_attention(model.tape, begin, end):
            more += seconds_of_a_plan(self.device).forward
        return SecondsRange(low=low + more, high=high + more)

    def _quantised_seconds(self) -> float:
        """What the Python of a format adds in a step, over all its products."""
        of = self.weight_format
        if of is None or not of.host_microseconds:
            return 0.0
        rows = self.model.facts.weights
        number = sum(row_bytes(row, of) < row.num_bytes for row in rows if row.role in ("linear", "head"))
        return number * of.host_microseconds * 1e-6

    def generation_memory(self, requests: int, peaks: TracedPeaks) -> BatchMemory:
        """Of `generate` of transformers."""
        return batch_memory_of(
            self.model.facts,
            peaks,
            self.size,
            self.rules,
            self.weight_format,
            cache=self.cache,
            requests=requests,
            prompt=self.prompt,
            answer=self.answer,
        )

    def room_at(self, num_tokens: int) -> float:
        """Requests at once with so many tokens each, in the shares of prompt and answer that were asked for."""
        prompt = max(1, round(num_tokens * self.prompt / (self.prompt + self.answer)))
        other = dataclasses.replace(self, prompt=prompt, answer=max(1, num_tokens - prompt))
        peaks, free = self.peaks, self.free_bytes
        return float(_most(lambda n: other.generation_memory(n, peaks).reserved <= free))

    def estimate(self) -> ServingEstimate:
        """The estimate."""
        return _of_generation(self) if self.rules.engine == "transformers" else _of_layers(self)


def _of_generation(server: BatchServer) -> ServingEstimate:
    peaks, free = server.peaks, server.free_bytes
    room = _most(lambda n: server.generation_memory(n, peaks).reserved <= free)
    requests = server.requests or max(1, room)
    held = server.generation_memory(requests, peaks)
    why = ""
    if held.reserved > free:
        missing = held.reserved - free
        number = "one request" if requests == 1 else f"{requests:,} requests"
        why = (
            f"{number} of {server.prompt + server.answer:,} tokens need {format_bytes(held.reserved)} and the CUDA context, of"
            f" {format_bytes(server.device.capacity_bytes)}: {format_bytes(missing)} are missing; "
            + (f"lower --max-num-seqs to {room}" if room else "quantise, or give --cache offloaded")
        )
    speed = None if why else _speed(server, requests, held.host)
    found = _answer(
        server,
        requests,
        weights=held.weights,
        activations=held.activations + held.unused,
        cache=held.cache,
        host=held.host,
        room=float(room),
        why=why,
        speed=speed,
        words=[
            f"the context and the host's Python are those of eager generation; caches of other programs on the card are not counted ({server.cache} cache)"
        ],
    )
    return dataclasses.replace(found, change=_change(server) if why else "")


def _of_layers(server: BatchServer) -> ServingEstimate:
    requests = server.requests or 1
    split = _split(server)
    on_card = split.largest_within(server.free_bytes)
    is_whole = _is_whole(server, split)
    if server.device.shares_host_memory and not is_whole:
        needed = sum(split.on_card(split.most)) + split.at_host(split.most) + split.compute
        why = f"all of it needs {format_bytes(needed)}, and {format_bytes(server.free_bytes)} are free of a memory that is the host's too, where layers take the same bytes"
        on_card = 0
    elif on_card is None:
        why = f"the buffer of a micro-batch alone needs {format_bytes(split.compute)}: lower --max-num-batched-tokens"
        on_card = 0
    else:
        why = ""
    weights, cache = split.on_card(on_card)
    found = _answer(
        server,
        requests,
        weights=weights,
        activations=split.compute,
        cache=cache,
        host=split.at_host(on_card),
        room=float(requests),
        why=why,
        speed=None if why else _split_speed(server, split, on_card, requests),
        words=[
            "the processor is taken to read weights at the speed of two channels of memory, and to reach 0.6 TFLOP/s; for 32 tokens or more the GPU computes all layers, whose weights at the host are copied for each micro-batch"
        ]
        if on_card < split.most
        else [],
    )
    change = "" if is_whole else _change(server)
    return dataclasses.replace(found, layers_on_card=on_card, num_layers=split.most, change=change)


def _split(server: BatchServer) -> SplitModel:
    return split_model(
        server.model.facts,
        server.peaks,
        server.size,
        server.rules,
        server.weight_format,
        slots=server.requests or 1,
        context=server.prompt + server.answer,
    )


def _is_whole(server: BatchServer, split: SplitModel) -> bool:
    """Whether all layers are on the card; of a memory that the host shares, beside what is left at the host."""
    at_host = split.at_host(split.most) if server.device.shares_host_memory else 0
    return sum(split.on_card(split.most)) + split.compute + at_host <= server.free_bytes


def _change(server: BatchServer) -> str:
    """The smallest one with which a batch fits, or all layers are on the card."""
    is_split = server.rules.engine == "llama.cpp"
    requests = server.requests or 1
    # The peaks are those of the trace, whatever the lengths are.
    peaks, free = server.peaks, server.free_bytes

    def fits(other: BatchServer) -> bool:
        if is_split:
            return _is_whole(other, _split(other))
        return other.generation_memory(requests, peaks).reserved <= free

    def fits_at(num_tokens: int) -> bool:
        prompt = max(1, round(num_tokens * server.prompt / (server.prompt + server.answer)))
        return fits(dataclasses.replace(server, prompt=prompt, answer=max(0, num_tokens - prompt)))

    def fits_in(name: str) -> bool:
        return fits(dataclasses.replace(server, weight_format=format_named(name)))

    if is_split:
        held = server.weight_format.bits if server.weight_format is not None else 16.0
        formats = [name for name in FILE_FORMATS if all_formats()[name].bits < held]
    else:
        formats = list(LOADED_FORMATS) if server.weight_format is None else []
    whole = "all layers are on the GPU" if is_split else "it fits"
    return smallest_change(server.prompt + server.answer, fits_at, formats, fits_in, whole)


def _most(fits: Callable[[int], bool]) -> int:
    """The largest number that fits, 0 where one does not."""
    low, high = 0, 1
    while high <= _MOST_REQUESTS and fits(high):
        low, high = high, high * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _speed(server: BatchServer, requests: int, host_bytes: int) -> ServingSpeed:
    found = speed_at(server.costs(), server.prompt, server.answer, requests)
    host = server.host_seconds()
    link = copy_seconds(host_bytes, server.device, to_card=True) if host_bytes else 0.0
    least = SecondsRange(low=max(host.low, link), high=max(host.high, link))
    return dataclasses.replace(
        found, each_token=_later(found.each_token, least), first_token=_later(found.first_token, host)
    )


def _later(first: SecondsRange, second: SecondsRange) -> SecondsRange:
    return SecondsRange(low=max(first.low, second.low), high=max(first.high, second.high))


def _split_speed(server: BatchServer, split: SplitModel, on_card: int, requests: int) -> ServingSpeed:
    rows = server.model.facts.weights
    clock = SplitClock(
        costs=server.costs(),
        device=server.device,
        split=split,
        on_card=on_card,
        parameters=sum(row.num_elements for row in rows if row.role not in ("embedding", "head")),
        slots=requests,
        micro_batch=server.rules.micro_batch,
    )
    return clock.speed(server.prompt, server.answer)


def _answer(
    server: BatchServer,
    requests: int,
    *,
    weights: int,
    activations: int,
    cache: int,
    host: int,
    room: float,
    why: str,
    speed: ServingSpeed | None,
    words: Sequence[str],
) -> ServingEstimate:
    size, tokens = server.size, server.prompt + server.answer
    each = size.token_bytes or size.window_token_bytes
    context = server.device.context_bytes
    return ServingEstimate(
        model=server.model.source,
        device=server.device.name,
        capacity_bytes=server.device.capacity_bytes,
        settings=ResolvedSettings(
            num_gpus=1,
            kv_dtype=server.kv_dtype,
            max_model_len=tokens,
            max_num_seqs=requests,
            max_num_batched_tokens=server.rules.micro_batch or requests * server.prompt,
            gpu_memory_utilization=1.0,
            enforce_eager=True,
            is_chunked=bool(server.rules.micro_batch),
        ),
        engine=server.rules.engine,
        engine_version=server.rules.version,
        weights_bytes=weights,
        activation_bytes=activations,
        non_torch_bytes=context,
        context_bytes=context,
        graph_bytes=0,
        counts_graphs=False,
        kv_bytes=cache,
        kv_bytes_per_token=each,
        request_bytes=size.request_bytes(*_held(server)),
        kv_tokens=requests * tokens,
        max_concurrency=room,
        concurrency_at_lengths=room,
        why=why,
        assumptions=(
            *server.model.facts.left_open,
            f"{server.rules.engine} {server.rules.version}: {server.rules.source}",
            *newest_words(server.rules.engine, server.rules.newest),
            *words,
        ),
        speed=speed,
        host_bytes=host,
        cache=server.cache,
    )


def _held(server: BatchServer) -> tuple[int, int]:
    pair = (server.prompt, server.answer)
    return (pair[1] + 1, pair[0]) if server.model.facts.is_encoder_decoder else (sum(pair), 0)
