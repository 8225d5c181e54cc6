"""`serve`: the wiring from a Hugging Face config to the estimate of a server that runs it."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tightfit.capture.targets.huggingface.known_names import presets, refuse_unknown
from tightfit.capture.targets.huggingface.target import dtype_name, is_huggingface_source
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.errors.faults import answering
from tightfit.fit.planning_progress import OnProgress, ProgressLog
from tightfit.serving.engine_rules import EngineRules, rules_of
from tightfit.serving.launch.launch_arguments import all_launches, launch_of
from tightfit.serving.model.checkpoint_format import checkpoint_format
from tightfit.serving.model.weight_formats import format_named
from tightfit.serving.serve_settings import ResolvedSettings, ServeSettings
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.serving.traced_server import AskedLoad, Server, TracedModel

_RUN = "tightfit.capture.inference.inference_run"
# More than it has.
_NUM_STEPS = 256
_ADAPTER = "adapter_config.json"
_DTYPES = (None, "bfloat16", "float16", "float32")


def _no_config(model: str) -> str:
    """What was given in place of a config, and what to give."""
    path, instead = Path(model), "give a config.json, its folder, a preset (llama-3-8b) or a model type"
    if not model.strip():
        return f"the name of the model is empty: {instead}"
    if model.startswith(("http:", "https:")):
        return f"{model} is an address, and nothing is downloaded: {instead}"
    adapter = path / _ADAPTER if path.is_dir() else path
    if adapter.name == _ADAPTER and adapter.is_file():
        return f"{model} is an adapter: give the model that it belongs to ({_base_of(adapter)}); what the adapter adds is not counted"
    if path.suffix == ".gguf" or (path.is_dir() and any(path.glob("*.gguf"))):
        return (
            f"{model} has weights in GGUF: give the config.json of the model that they were made from, and their format, "
            "such as --quantization q4_0"
        )
    return (
        f"the folder {model} has no config.json: {instead}"
        if path.is_dir()
        else f"{model!r} is no Hugging Face config: {instead}"
    )


def _base_of(adapter: Path) -> str:
    try:
        return str(json.loads(adapter.read_bytes())["base_model_name_or_path"])
    except (ValueError, TypeError, KeyError):
        return "its base model"


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
    load: AskedLoad | None = None,
    on_progress: OnProgress | None = None,
) -> ServingEstimate:
    """What `model` (a Hugging Face config, its folder, a preset or a model type) needs on `device` to be served, and how fast it is for requests with
    `lengths` (tokens of prompt and answer of each; by default those of `load`), and under `load`.

    Raises:
        UsageError: no such model, device, engine or setting, or one whose size is not known.
        CaptureError: the model could not be run.
    """
    asked = asked or ServeSettings()
    # Names that are not known are told before anything is traced.
    rules, card, _ = rules_of(engine, engine_version), find(device), format_named(asked.quantization)
    tokens = asked.max_num_batched_tokens
    traced = traced_model(
        model,
        device,
        rules=rules,
        asked=asked,
        dtype=dtype,
        batched_tokens=[tokens] if tokens else [],
        sampled_rows=[asked.max_num_seqs or rules.max_sequences(card)],
        degrees=[asked.num_gpus],
        on_progress=on_progress,
    )
    server = server_of(traced, device, rules, asked)
    limit = server.settings.max_model_len
    if load is not None and not lengths:
        lengths = load.arrivals.lengths_within(limit)
    longest = max((prompt + answer for prompt, answer in lengths), default=0)
    if longest > limit:
        of = "the model's positions" if asked.max_model_len is None else "--max-model-len"
        raise UsageError(f"--lengths: a request of {longest:,} tokens is longer than {of}, {limit:,}")
    found = server.estimate(lengths, load)
    if not found.fits:
        return found
    return dataclasses.replace(found, launch=all_launches(launch_of(server, found, served_name(model))))


def served_name(model: str) -> str:
    """The model as an engine would find it: the published one of a preset, the folder of a config.json."""
    preset = presets().get(model.lower())
    if preset is not None:
        return str(preset["hub"])
    return model.removesuffix("/config.json") if model.endswith("/config.json") else model


def server_of(traced: TracedModel, device: str, rules: EngineRules, asked: ServeSettings) -> Server:
    """The server with those settings on `device`; without a `quantization` its weights are in the format of the checkpoint.

    Raises:
        UsageError: a setting cannot be, or a format's size is not known.
    """
    card, facts = find(device), traced.facts
    named = format_named(asked.quantization) if asked.quantization else checkpoint_format(facts.quantization)
    settings = ResolvedSettings.of(asked, rules, card, facts.max_positions)
    return Server(model=traced, device=card, rules=rules, settings=settings, weight_format=named)


def traced_model(
    model: str,
    device: str,
    *,
    rules: EngineRules,
    asked: ServeSettings,
    dtype: str | None,
    batched_tokens: Sequence[int],
    sampled_rows: Sequence[int],
    degrees: Sequence[int],
    on_progress: OnProgress | None = None,
) -> TracedModel:
    """`model`, traced with the largest batches that the engine would measure (of each of `batched_tokens`, none: the engine's default; `sampled_rows` of which get a next token), prompts
    and decoding steps, as one rank of each of `degrees`.

    Raises:
        UsageError: no such model or device, or a setting that cannot be.
        CaptureError: the model could not be run.
    """
    if not is_huggingface_source(model) or Path(model).name == _ADAPTER:
        raise UsageError(_no_config(model))
    refuse_unknown(model)
    dtype = None if dtype is None else dtype_name(dtype)
    if dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype}: one of bfloat16, float16, float32")
    parameters: dict[str, Any] = {
        "source": model,
        "dtype": dtype,
        "batched_tokens": list(batched_tokens),
        "tokens_chunked": rules.chunk_tokens(find(device)),
        "tokens_whole": rules.tokens_whole,
        "chunked_above": rules.chunked_above(asked.chunked_prefill),
        "max_model_len": asked.max_model_len,
        "sampled_rows": list(sampled_rows),
        "sorts": True,
        "ranks": list(degrees),
    }
    log = ProgressLog(on_progress=on_progress)
    log.begin("tracing")
    traced = trace(
        GeneratorFunction(location=_RUN, function="start_up", parameters=parameters),
        label=model,
        device=device,
        num_steps=_NUM_STEPS,
        on_progress=log.on_trace,
        preparation=Preparation(function=f"{_RUN}:prepare", argument=None),
    )
    return TracedModel.of_trace(model, traced.tape, traced.report)
