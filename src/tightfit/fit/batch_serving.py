"""From a Hugging Face config to the estimate of a batch with `generate` of transformers, or with llama.cpp's server."""

import dataclasses
from collections.abc import Sequence

from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.fit.planning_progress import OnProgress
from tightfit.fit.traced_models import positions_in_config, served_name, traced_model
from tightfit.serving.batches.batch_rules import CACHES, BatchRules
from tightfit.serving.batches.batch_server import BatchServer
from tightfit.serving.engine_rules import rules_of
from tightfit.serving.launch.launch_arguments import llama_cpp_launch
from tightfit.serving.load.lengths import DEFAULT_LENGTHS, default_lengths
from tightfit.serving.model.checkpoint_format import checkpoint_format
from tightfit.serving.model.weight_formats import format_named, is_of_files
from tightfit.serving.serve_settings import ServeSettings
from tightfit.serving.serving_curves import room_by_length
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.serving.serving_points import ServingCurves

_NO_QUEUE = "generate takes one batch after the other, and has no queue"
# Rows of next tokens between which the peak of choosing them is affine.
_ROWS = (1, 64)


def serve_batch(
    model: str,
    device: str,
    *,
    asked: ServeSettings,
    engine: str,
    engine_version: str | None,
    dtype: str | None,
    lengths: Sequence[tuple[int, int]],
    draws: bool = False,
    on_progress: OnProgress | None,
) -> ServingEstimate:
    """What `model` needs on `device` for a batch of requests; see `tightfit.fit.serving.serve`.

    Raises:
        UsageError: a setting that this engine does not have, or lengths beyond the model's positions.
        CaptureError: the model could not be run.
    """
    rules = BatchRules.of(engine, engine_version)
    is_llama_cpp = engine == "llama.cpp"
    if is_llama_cpp and asked.max_num_batched_tokens:
        rules = dataclasses.replace(rules, micro_batch=asked.max_num_batched_tokens)
    cache = _checked(asked, rules)
    card, named = find(device), format_named(asked.quantization)
    prompt, answer = _longest(lengths, asked.max_model_len)
    if cache == "offloaded" and card.shares_host_memory:
        raise UsageError(
            f"--cache offloaded: {card.name} has the host's memory, where a cache takes the same bytes; leave it out"
        )
    is_asked = bool(lengths) or asked.max_model_len is not None
    if is_asked:
        # Before it is traced, where the config says it.
        _refuse_longer(prompt + answer, positions_in_config(model))
    sizes = [rules.micro_batch] if is_llama_cpp else [prompt, 4 * prompt]
    traced = traced_model(
        model,
        device,
        # Its rules say how large batches are by default, and these have their sizes.
        rules=rules_of("vllm"),
        asked=dataclasses.replace(asked, max_model_len=None),
        dtype=dtype,
        batched_tokens=sizes,
        sampled_rows=list(_ROWS),
        degrees=[1],
        on_progress=on_progress,
    )
    if is_llama_cpp and traced.facts.is_encoder_decoder:
        raise UsageError(f"--engine llama.cpp: its server takes no encoder-decoder, as a {traced.facts.model_type} is")
    positions = traced.facts.max_positions
    if positions is not None and not is_asked:
        prompt, answer = default_lengths(positions)
    _refuse_longer(prompt + answer, positions)
    of_checkpoint = named or (None if is_llama_cpp else checkpoint_format(traced.facts.quantization))
    server = BatchServer(
        model=traced,
        device=card,
        rules=rules,
        weight_format=(named or format_named("f16")) if is_llama_cpp else of_checkpoint,
        kv_dtype="float16" if is_llama_cpp and asked.kv_dtype == "auto" else asked.kv_dtype,
        cache=cache,
        requests=asked.max_num_seqs,
        prompt=prompt,
        answer=answer,
    )
    found = server.estimate()
    if draws and found.fits and not is_llama_cpp:
        longest = positions or 2 * (prompt + answer)
        curves = ServingCurves(room=room_by_length(server.room_at, longest), loads=(), no_loads=_NO_QUEUE)
        found = dataclasses.replace(found, curves=curves)
    if not is_llama_cpp or not found.fits:
        return found
    return dataclasses.replace(found, launch={engine: llama_cpp_launch(found, served_name(model))})


def _refuse_longer(num_tokens: int, positions: int | None) -> None:
    if positions is not None and num_tokens > positions:
        raise UsageError(f"a request of {num_tokens:,} tokens is longer than the model's positions, {positions:,}")


def _checked(asked: ServeSettings, rules: BatchRules) -> str:
    """The kind of cache; what this engine does not have is refused."""
    if asked.num_gpus > 1:
        raise UsageError(f"--gpus {asked.num_gpus}: {rules.engine} is estimated on one GPU")
    if asked.gpu_memory_utilization is not None:
        raise UsageError(f"--gpu-memory-utilization: {rules.engine} takes what it needs; leave it out")
    if rules.engine == "llama.cpp":
        if asked.cache is not None:
            raise UsageError("--cache is of --engine transformers")
        if asked.enforce_eager:
            raise UsageError("--enforce-eager is of vllm and sglang; llama.cpp has no such option")
        if asked.kv_dtype.startswith("fp8"):
            raise UsageError(f"--kv-dtype {asked.kv_dtype}: llama.cpp has auto, float16, bfloat16, q8_0, q4_0")
        if asked.quantization is not None and not is_of_files(asked.quantization):
            raise UsageError(f"--quantization {asked.quantization}: llama.cpp reads GGUF: q4_k_m, q8_0, ...")
        return ""
    cache = asked.cache or "dynamic"
    if cache not in rules.caches:
        known = ", ".join(rules.caches if cache in CACHES else CACHES)
        raise UsageError(f"--cache {cache}: transformers {rules.version} has {known}")
    if asked.kv_dtype != "auto" or asked.max_num_batched_tokens or asked.enforce_eager:
        raise UsageError(
            "--kv-dtype, --max-num-batched-tokens and --enforce-eager are of other engines; transformers has --cache"
        )
    if asked.quantization is not None and is_of_files(asked.quantization):
        raise UsageError(f"--quantization {asked.quantization}: transformers writes GGUF weights out in its own type")
    return cache


def _longest(lengths: Sequence[tuple[int, int]], max_model_len: int | None) -> tuple[int, int]:
    """Prompt and answer of the requests of a batch, which is padded to the longest."""
    if lengths:
        prompt, answer = max(prompt for prompt, _ in lengths), max(answer for _, answer in lengths)
        if max_model_len is not None and prompt + answer > max_model_len:
            raise UsageError(f"--lengths: requests of {prompt + answer:,} tokens, and --max-model-len {max_model_len}")
        return max(1, prompt), max(1, answer)
    if max_model_len is not None:
        return max(1, max_model_len - max_model_len // 8), max(1, max_model_len // 8)
    return DEFAULT_LENGTHS
