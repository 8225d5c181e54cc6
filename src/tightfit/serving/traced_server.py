"""A model that was traced, and a server of it: on a card, with an engine's rules and settings, and weights in a format. One trace answers for many servers."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.serving.costs.profiled_batch import StepMemory, TracedStep, batch_memory
from tightfit.serving.costs.serving_speed import ServingSpeed, reductions_seconds, speed_at
from tightfit.serving.costs.step_costs import StepCosts, step_costs
from tightfit.serving.costs.traced_operators import TracedLayers
from tightfit.serving.costs.weight_products import WeightProducts
from tightfit.serving.engine_rules import EngineRules
from tightfit.serving.load.arrivals import Arrivals
from tightfit.serving.load.lengths import default_lengths
from tightfit.serving.load.load_costs import CachePages, LoadCosts
from tightfit.serving.load.load_summary import ServiceLevel
from tightfit.serving.load.scheduler import SchedulerLimits
from tightfit.serving.load.simulation import LoadedEngine
from tightfit.serving.model.cache_size import CacheSize
from tightfit.serving.model.model_facts import ModelFacts
from tightfit.serving.model.smallest_change import ENGINE_FORMATS, smallest_change
from tightfit.serving.model.weight_formats import WeightFormat, format_named
from tightfit.serving.serve_settings import KV_DTYPES, ResolvedSettings
from tightfit.serving.serving_estimate import ServingEstimate, estimate_serving
from tightfit.tape import Tape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AskedLoad:
    """Requests that arrive, and the service level that they should have."""

    arrivals: Arrivals
    level: ServiceLevel


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TracedModel:
    """A model, traced as one rank of engines with several degrees of tensor parallelism: the tape and the report of `tightfit.capture.inference.inference_run`."""

    source: str
    tape: Tape
    report: Mapping[str, Any]
    facts: ModelFacts

    @classmethod
    def of_trace(cls, source: str, tape: Tape, report: Mapping[str, Any]) -> Self:
        """From a trace.

        Raises:
            CaptureError: the model has no cache, or one that grows in a way that is not known.
        """
        return cls(source=source, tape=tape, report=report, facts=ModelFacts.from_report(report))

    @property
    def refused(self) -> Mapping[int, str]:
        """The degrees that the model cannot be cut for, and why."""
        return {int(degree): why for degree, why in self.report["refused"].items()}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """An engine that serves a model on a card, or on as many of them as its settings say."""

    model: TracedModel
    device: Device
    rules: EngineRules
    settings: ResolvedSettings
    weight_format: WeightFormat | None

    @property
    def steps(self) -> list[TracedStep]:
        """The steps of the trace with this degree of tensor parallelism."""
        return TracedStep.of_report(self.model.report, self.settings.num_gpus)

    @property
    def cache(self) -> CacheSize:
        """The cache of one rank."""
        return CacheSize(
            tensors=self.model.facts.cache,
            element_bytes=KV_DTYPES[self.settings.kv_dtype],
            degree=self.settings.num_gpus,
            block_tokens=self.rules.block_tokens,
        )

    def memory(self) -> StepMemory:
        """The peaks of the largest batch."""
        settings = self.settings
        rows = self.rules.profiled_rows(self.device, settings.num_gpus, settings.max_num_seqs)
        return _peaks(self.model, settings.num_gpus, settings.max_num_batched_tokens, rows)

    def costs(self) -> StepCosts:
        """What a step costs."""
        facts, degree = self.model.facts, self.settings.num_gpus
        return step_costs(
            self.model.tape,
            self.steps,
            TracedLayers.of_report(self.model.report),
            device=self.device,
            cache=self.cache,
            products=WeightProducts.of(facts, self.model.report["base"], self.weight_format),
            reductions=lambda tokens: reductions_seconds(facts, self.device, degree, tokens),
        )

    def start_up(self, lengths: Sequence[tuple[int, int]] = ()) -> ServingEstimate:
        """Whether it starts, and the room that it has for requests with prompts and answers of those lengths; without the speed."""
        return estimate_serving(
            self.model.facts,
            self.memory(),
            model=self.model.source,
            device=self.device,
            rules=self.rules,
            settings=self.settings,
            weight_format=self.weight_format,
            lengths=lengths,
        )

    def estimate(self, lengths: Sequence[tuple[int, int]], load: AskedLoad | None = None) -> ServingEstimate:
        """All of that, with the speed, and what becomes of `load`.

        Raises:
            UsageError: there is a load, and it is not simulated for such a model or engine.
        """
        found = self.start_up(lengths)
        if not found.fits:
            return dataclasses.replace(found, change=self._smallest_change(lengths))
        costs = self.costs()
        room = found.max_concurrency if found.concurrency_at_lengths is None else found.concurrency_at_lengths
        found = dataclasses.replace(found, speed=self.speed(costs, lengths, room))
        if load is None:
            return found
        engine = self.loaded_engine(costs, found.kv_bytes)
        return dataclasses.replace(found, load=engine.simulate(load.arrivals, load.level))

    def _smallest_change(self, lengths: Sequence[tuple[int, int]]) -> str:
        """With which it would start as it is asked for otherwise."""

        def starts_at(num_tokens: int) -> bool:
            # What was measured is of the batch that was asked for, which shorter requests do not need.
            settings = dataclasses.replace(self.settings, max_model_len=num_tokens)
            return dataclasses.replace(self, settings=settings).start_up().fits

        def starts_in(name: str) -> bool:
            return dataclasses.replace(self, weight_format=format_named(name)).start_up(lengths).fits

        formats = ENGINE_FORMATS if self.weight_format is None else ()
        return smallest_change(self.settings.max_model_len, starts_at, formats, starts_in, "it starts")

    def speed(self, costs: StepCosts, lengths: Sequence[tuple[int, int]], room: float) -> ServingSpeed:
        """The speed for requests of the mean of `lengths`, of which there is room for so many."""
        prompt, answer = _mean(lengths) if lengths else default_lengths(self.settings.max_model_len)
        together = max(1, min(int(room), self.settings.max_num_seqs))
        chunk = self.settings.max_num_batched_tokens if self.settings.is_chunked else None
        return speed_at(costs, prompt, answer, together, chunk=chunk)

    def loaded_engine(self, costs: StepCosts, kv_bytes: int) -> LoadedEngine:
        """The engine for a simulation of load, with a cache of so many bytes.

        Raises:
            UsageError: the model is an encoder-decoder, or the engine computes prompts whole.
        """
        if self.model.facts.is_encoder_decoder:
            raise UsageError("the load of an encoder-decoder is not simulated; leave out --rate and --arrivals")
        settings = self.settings
        if self.rules.engine != "vllm":
            raise UsageError(f"the load of {self.rules.engine} is not simulated; leave out --rate and --arrivals")
        if self.rules.chunked_prefill != "on" or not settings.is_chunked:
            raise UsageError(
                f"load is simulated as {self.rules.engine} schedules since it cuts all prompts into chunks, and {self.rules.version} does not; leave out --rate and --arrivals, or give a newer --engine-version"
            )
        return LoadedEngine(
            costs=LoadCosts.of(costs, max_tokens=settings.max_num_batched_tokens, max_requests=settings.max_num_seqs),
            pages=CachePages.of(self.cache, kv_bytes),
            limits=SchedulerLimits(
                max_requests=settings.max_num_seqs,
                max_tokens=settings.max_num_batched_tokens,
                admits_whole=self.rules.admits_whole,
            ),
            max_model_len=settings.max_model_len,
        )


@functools.lru_cache(maxsize=512)
def _peaks(model: TracedModel, degree: int, num_tokens: int, sampled_rows: int) -> StepMemory:
    # A plan asks for the same batch with many formats and cards.
    return batch_memory(model.tape, TracedStep.of_report(model.report, degree), num_tokens, sampled_rows)


def _mean(lengths: Sequence[tuple[int, int]]) -> tuple[int, int]:
    prompt, answer = (max(1, round(sum(pair[part] for pair in lengths) / len(lengths))) for part in (0, 1))
    return prompt, answer
