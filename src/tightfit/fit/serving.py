"""`serve`: the wiring from a Hugging Face config to the estimate of a server that runs it."""

import dataclasses
from collections.abc import Sequence

from tightfit.capture.huggingface.target import is_huggingface_source
from tightfit.capture.targets import GeneratorFunction
from tightfit.capture.trace import Preparation, Traced, trace
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.errors.faults import answering
from tightfit.fit.planning_progress import OnProgress, ProgressLog
from tightfit.serving.checkpoint_format import checkpoint_format
from tightfit.serving.engine_rules import rules_of
from tightfit.serving.model_facts import ModelFacts
from tightfit.serving.profiled_batch import step_memory
from tightfit.serving.serve_settings import ResolvedSettings, ServeSettings
from tightfit.serving.serving_estimate import ServingEstimate, estimate_serving
from tightfit.serving.weight_formats import format_named

_RUN = "tightfit.capture.inference.inference_run"
# The parts of a trace, as `inference_run.PARTS` has them.
_PROFILE = 1
_PROMPT_TOKENS = 1024


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
    lengths: Sequence[int] = (),
    on_progress: OnProgress | None = None,
) -> ServingEstimate:
    """What `model` (a Hugging Face config, its folder, a preset or a model type) needs on `device` to be served.

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
        model,
        device,
        asked=asked,
        engine=engine,
        engine_version=engine_version,
        dtype=dtype,
        prompt_tokens=_PROMPT_TOKENS,
        on_progress=on_progress,
    )
    longest, limit = max(lengths, default=0), traced.settings.max_model_len
    if longest > limit:
        raise UsageError(f"--lengths: a request of {longest:,} tokens is longer than --max-model-len, {limit:,}")
    return estimate_serving(
        traced.facts,
        step_memory(traced.traced.tape, _PROFILE),
        model=model,
        device=card,
        rules=rules,
        settings=traced.settings,
        weight_format=weight_format if asked.quantization else checkpoint_format(traced.facts.quantization),
        lengths=lengths,
    )


def traced_model(
    model: str,
    device: str,
    *,
    asked: ServeSettings,
    engine: str,
    engine_version: str | None,
    dtype: str | None,
    prompt_tokens: int,
    on_progress: OnProgress | None = None,
) -> TracedModel:
    """`model`, traced with the largest batch that the engine would measure."""
    if not is_huggingface_source(model):
        raise UsageError(
            f"{model} is no Hugging Face config: give a config.json, its folder, a preset (llama-3-8b) or a model type"
        )
    card, rules = find(device), rules_of(engine, engine_version)
    log = ProgressLog(on_progress=on_progress)
    log.begin("tracing", num_steps=4)
    target = GeneratorFunction(
        location=_RUN,
        function="inference",
        parameters={
            "source": model,
            "dtype": dtype,
            "batched_tokens": asked.max_num_batched_tokens,
            "tokens_chunked": rules.chunk_tokens(card),
            "tokens_whole": rules.tokens_whole,
            "chunked_above": rules.chunked_above(asked.chunked_prefill),
            "max_model_len": asked.max_model_len,
            "sampled_rows": asked.max_num_seqs or rules.max_sequences(card),
            "sorts": True,
            "prompt": prompt_tokens,
            "batch": 1,
            "context": prompt_tokens,
            "ranks": asked.num_gpus,
        },
    )
    traced = trace(
        target,
        label=model,
        device=device,
        num_steps=4,
        on_progress=log.on_trace,
        preparation=Preparation(function=f"{_RUN}:prepare", argument=None),
    )
    facts = ModelFacts.from_report(traced.report)
    return TracedModel(
        facts=facts, traced=traced, settings=ResolvedSettings.of(asked, rules, card, facts.max_positions)
    )
