"""A Hugging Face config, traced as engines run it."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tightfit.capture.inference.named_positions import named_positions, refuse_beyond
from tightfit.capture.targets.huggingface.known_names import name_of, presets, read_config, refuse_unknown
from tightfit.capture.targets.huggingface.target import dtype_name, is_huggingface_source
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.fit.planning_progress import OnProgress, ProgressLog
from tightfit.serving.engine_rules import EngineRules
from tightfit.serving.serve_settings import ServeSettings
from tightfit.serving.traced_server import TracedModel

_RUN = "tightfit.capture.inference.inference_run"
# More than it has.
_NUM_STEPS = 256
_ADAPTER = "adapter_config.json"
# What configs call the heads of attention.
_HEADS = ("num_attention_heads", "n_head", "num_heads")
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


def served_name(model: str) -> str:
    """The model as an engine would find it: the published one of a preset, the folder of a config.json."""
    preset = presets().get(model.lower())
    if preset is not None:
        return str(preset["hub"])
    return model.removesuffix("/config.json") if model.endswith("/config.json") else model


def refuse_uneven_heads(model: str, num_gpus: int) -> None:
    """Refuses what an engine refuses, before anything is traced: cards that do not divide the heads that the config names.

    Raises:
        UsageError: they do not.
    """
    fields = _config_fields(model)
    text = fields.get("text_config") or fields
    heads = next((text[name] for name in _HEADS if isinstance(text.get(name), int)), None)
    if heads is not None and heads % num_gpus:
        raise UsageError(f"--gpus {num_gpus}: the model has {heads} attention heads, which {num_gpus} does not divide")


def positions_in_config(model: str) -> int | None:
    """The positions that the config of `model` names, before anything is traced; None where that is not plain."""
    return named_positions(_config_fields(model)) if _names_config(model) else None


def _names_config(model: str) -> bool:
    """Whether it is what the config of a model is given by: a file of an adapter has one of its own."""
    return is_huggingface_source(model) and Path(model).name != _ADAPTER


def _config_fields(model: str) -> Mapping[str, Any]:
    path = Path(model) / "config.json" if Path(model).is_dir() else Path(model)
    found: Mapping[str, Any] = (
        read_config(path) if path.is_file() else presets().get(name_of(model), {}).get("config", {})
    )
    return found


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
    if not _names_config(model):
        raise UsageError(_no_config(model))
    refuse_unknown(model)
    dtype = None if dtype is None else dtype_name(dtype)
    if dtype not in _DTYPES:
        raise UsageError(f"--dtype {dtype}: one of bfloat16, float16, float32")
    refuse_beyond(asked.max_model_len, positions_in_config(model))
    if len(degrees) == 1:
        refuse_uneven_heads(model, degrees[0])
    parameters: dict[str, Any] = {
        "source": model,
        "dtype": dtype,
        "batched_tokens": list(batched_tokens),
        "tokens_chunked": rules.chunk_tokens(find(device)),
        "tokens_whole": rules.tokens_whole,
        "chunked_above": rules.chunked_above(asked.chunked_prefill),
        "max_model_len": asked.max_model_len,
        "sampled_rows": list(sampled_rows),
        "sorts": rules.sorts_on != "none",
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
