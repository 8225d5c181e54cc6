"""`tightfit serve`: what a language model needs on a GPU to be served, and how many requests that leaves room for.

Whatever computes is imported when the command runs, so that its `--help` is instant.
"""

import dataclasses
import json as jsonlib
import time

from cyclopts import Group, Parameter

from tightfit.cli.devices import own_card
from tightfit.cli.progress import ProgressLine


@Parameter(name="*", group=Group("What the engine is told", sort_key=1))
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineArguments:
    """Arguments of the engine; by default its own defaults.

    Parameters
    ----------
    quantization
        Format of the weights: fp8, int8, awq, gptq, bitsandbytes, nvfp4, mxfp4, q4_0 ...; by default that of the checkpoint.
    kv_dtype
        Type of the cache: auto (that of the model), bfloat16, float16, fp8.
    max_model_len
        Tokens of the longest request; by default all positions of the model.
    max_num_seqs
        Requests in one batch at most.
    max_num_batched_tokens
        Tokens in one batch at most.
    gpu_memory_utilization
        Share of the GPU that the engine takes.
    enforce_eager
        Without CUDA graphs.
    """

    quantization: str | None = None
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False


_DEFAULTS = EngineArguments()


def serve(
    model: str,
    /,
    *,
    device: str | None = None,
    gpus: int = 1,
    lengths: str | None = None,
    engine: str = "vllm",
    engine_version: str | None = None,
    dtype: str | None = None,
    price_per_hour: float | None = None,
    json: bool = False,
    arguments: EngineArguments = _DEFAULTS,
) -> int:
    """Estimate what a language model needs to be served, and for how many requests there is room.

    Weights, the cache of keys and values, and the largest batch that the engine measures when it starts.

    Parameters
    ----------
    model
        A Hugging Face config.json, its folder, a preset ("llama-3-8b") or a model type. No weights are needed.
    device
        A GPU by name ("l4", "4090") or its TOML file. Default: the GPU of this machine.
    gpus
        GPUs that share each layer (tensor parallelism).
    lengths
        Tokens of prompt and answer of a request, 2000:300, or a .csv of past requests with a column for each. By default the longest that is allowed.
    engine
        The serving engine; vllm is known.
    engine_version
        Its version ("0.8.5"); by default the newest that is known.
    dtype
        Type of the weights: bfloat16 or float16; by default that of the config.
    price_per_hour
        What one GPU costs per hour, for the cost of a million tokens; with --lengths.
    json
        Print JSON.
    """
    from tightfit.errors import UsageError
    from tightfit.fit import serving
    from tightfit.reports.text.serving import write_serving
    from tightfit.serving.lengths import lengths_of
    from tightfit.serving.serve_settings import ServeSettings

    started = time.monotonic()
    card = device or own_card()
    asked = ServeSettings(num_gpus=gpus, **dataclasses.asdict(arguments))
    requests = lengths_of(lengths) if lengths is not None else []
    if price_per_hour is not None and not (price_per_hour > 0 and requests):
        raise UsageError("--price-per-hour: give what a GPU costs per hour, and --lengths")
    with ProgressLine(f"serve {model}", timeout_seconds=None) as line:
        found = serving.serve(
            model,
            card,
            asked=asked,
            engine=engine,
            engine_version=engine_version,
            dtype=dtype,
            lengths=requests,
            on_progress=line.report,
        )
    if json:
        print(jsonlib.dumps(found.to_json(price_per_hour)))
    else:
        write_serving(found, price_per_hour=price_per_hour, elapsed_seconds=time.monotonic() - started)
    return 0 if found.fits else 1
