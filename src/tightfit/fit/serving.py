"""`serve`: the wiring from a Hugging Face config to the estimate of a server that runs it."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from tightfit.capture.huggingface.target import is_huggingface_source
from tightfit.capture.targets import GeneratorFunction
from tightfit.capture.trace import Preparation, Traced, trace
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.errors.faults import answering
from tightfit.fit.planning_progress import OnProgress, ProgressLog
from tightfit.serving.checkpoint_format import checkpoint_format
from tightfit.serving.engine_rules import rules_of
from tightfit.serving.model_facts import ModelFacts
from tightfit.serving.profiled_batch import step_memory
from tightfit.serving.serve_settings import ResolvedSettings, ServeSettings
from tightfit.serving.serving_estimate import ServingEstimate, estimate_serving
from tightfit.serving.serving_speed import ServingSpeed, TracedLayers, reductions_seconds, seconds_of_step
from tightfit.serving.weight_formats import format_named

_RUN = "tightfit.capture.inference.inference_run"
# The steps of `inference_run.start_up` and `inference_run.speed`.
_PROFILE = 1
_PREFILL, _DECODE = 1, 3
_NO_SPEED = "the speed of weights in {} is not estimated"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedModel:
    """A model that was traced, and the settings of the engine that it was traced with."""

    facts: ModelFacts
    traced: Traced
    settings: ResolvedSettings


@answering("the estimate of serving")
def serve(
    model: str,
    device: str,
    *,
    asked: ServeSettings | None = None,
    engine: str = "vllm",
    engine_version: str | None = None,
    dtype: str | None = None,
    lengths: Sequence[tuple[int, int]] = (),
    on_progress: OnProgress | None = None,
) -> ServingEstimate:
    """What `model` (a Hugging Face config, its folder, a preset or a model type) needs on `device` to be served, and with `lengths` (tokens of prompt and answer of
    each request) how fast it is.

    Raises:
        UsageError: no such model, device, engine or setting, or one whose size is not known.
        CaptureError: the model could not be run.
    """
    asked = asked or ServeSettings()
    rules = rules_of(engine, engine_version)
    card = find(device)
    weight_format = format_named(asked.quantization)
    if dtype not in (None, "bfloat16", "float16", "float32"):
        raise UsageError(f"--dtype {dtype}: one of bfloat16, float16, float32")
    traced = traced_model(
        model, device, asked=asked, engine=engine, engine_version=engine_version, dtype=dtype, on_progress=on_progress
    )
    whole = [prompt + answer for prompt, answer in lengths]
    longest, limit = max(whole, default=0), traced.settings.max_model_len
    if longest > limit:
        raise UsageError(f"--lengths: a request of {longest:,} tokens is longer than --max-model-len, {limit:,}")
    weight_format = weight_format if asked.quantization else checkpoint_format(traced.facts.quantization)
    found = estimate_serving(
        traced.facts,
        step_memory(traced.traced.tape, _PROFILE),
        model=model,
        device=card,
        rules=rules,
        settings=traced.settings,
        weight_format=weight_format,
        lengths=whole,
    )
    if not (found.fits and lengths):
        return found
    if weight_format is not None:
        return dataclasses.replace(found, assumptions=(*found.assumptions, _NO_SPEED.format(weight_format.name)))
    return dataclasses.replace(
        found, speed=_speed(found, traced.facts, card, lengths, dtype=dtype, on_progress=on_progress)
    )


def _speed(
    found: ServingEstimate,
    facts: ModelFacts,
    card: Device,
    lengths: Sequence[tuple[int, int]],
    *,
    dtype: str | None,
    on_progress: OnProgress | None,
) -> ServingSpeed:
    prompt, answer = (max(1, round(sum(pair[part] for pair in lengths) / len(lengths))) for part in (0, 1))
    together = min(int(found.concurrency_at_lengths or 1), found.settings.max_num_seqs)
    degree, num_requests = found.settings.num_gpus, max(1, together)
    parameters = {
        "source": found.model,
        "dtype": dtype,
        "prompt": prompt,
        "batch": num_requests,
        # In the middle of its answer.
        "context": prompt + answer // 2,
        "ranks": degree,
    }
    traced = _traced("speed", found.model, card.name, parameters, num_steps=4, on_progress=on_progress)
    layers = TracedLayers.of_report(traced.report)
    return ServingSpeed(
        prompt_tokens=prompt,
        answer_tokens=answer,
        num_requests=num_requests,
        first_token=seconds_of_step(traced.tape, _PREFILL, card, layers)
        + reductions_seconds(facts, card, degree, prompt),
        each_token=seconds_of_step(traced.tape, _DECODE, card, layers, is_decoding=True)
        + reductions_seconds(facts, card, degree, num_requests),
    )


def traced_model(
    model: str,
    device: str,
    *,
    asked: ServeSettings,
    engine: str,
    engine_version: str | None,
    dtype: str | None,
    on_progress: OnProgress | None = None,
) -> TracedModel:
    """`model`, traced with the largest batch that the engine would measure."""
    if not is_huggingface_source(model):
        raise UsageError(
            f"{model} is no Hugging Face config: give a config.json, its folder, a preset (llama-3-8b) or a model type"
        )
    card, rules = find(device), rules_of(engine, engine_version)
    parameters = {
        "source": model,
        "dtype": dtype,
        "batched_tokens": asked.max_num_batched_tokens,
        "tokens_chunked": rules.chunk_tokens(card),
        "tokens_whole": rules.tokens_whole,
        "chunked_above": rules.chunked_above(asked.chunked_prefill),
        "max_model_len": asked.max_model_len,
        "sampled_rows": asked.max_num_seqs or rules.max_sequences(card),
        "sorts": True,
        "ranks": asked.num_gpus,
    }
    traced = _traced("start_up", model, device, parameters, num_steps=2, on_progress=on_progress)
    facts = ModelFacts.from_report(traced.report)
    return TracedModel(
        facts=facts, traced=traced, settings=ResolvedSettings.of(asked, rules, card, facts.max_positions)
    )


def _traced(
    function: str,
    model: str,
    device: str,
    parameters: Mapping[str, Any],
    *,
    num_steps: int,
    on_progress: OnProgress | None,
) -> Traced:
    log = ProgressLog(on_progress=on_progress)
    log.begin("tracing", num_steps=num_steps)
    return trace(
        GeneratorFunction(location=_RUN, function=function, parameters=dict(parameters)),
        label=model,
        device=device,
        num_steps=num_steps,
        on_progress=log.on_trace,
        preparation=Preparation(function=f"{_RUN}:prepare", argument=None),
    )
