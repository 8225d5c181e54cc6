"""The arguments that start an engine with a server's settings: of vLLM, SGLang and TGI from the same estimate. The commands and their options are data: `commands.toml`.

vLLM's share of the card holds activations too; SGLang's is of weights and cache alone, and of what is free before the weights: it is worked out from those.
"""

import dataclasses
import functools
import math
import shlex
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tightfit.errors import UsageError
from tightfit.serving.engine_rules import rules_of
from tightfit.serving.serve_settings import ResolvedSettings
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.serving.traced_server import Server
from tightfit.units import GIB

ENGINES = ("vllm", "sglang", "tgi")
# A share is rounded up to this, so that what was planned has room.
_SHARE_STEPS = 10_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What a server is started with: the model as the engine is to find it, the settings, the name of the weights' format (None: as they are), and bytes and tokens that follow."""

    model: str
    dtype: str
    settings: ResolvedSettings
    quantization: str | None
    static_share: float
    kv_tokens: int


@functools.cache
def commands() -> Mapping[str, Mapping[str, Any]]:
    """The commands by engine, as `commands.toml` has them."""
    return tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


def launch_of(server: Server, found: ServingEstimate, model: str) -> Launch:
    """What `server` is started with; `model` is how the engine finds it. A checkpoint says itself which format it is in."""
    weights = server.weight_format
    is_own = weights is not None and bool(server.model.facts.quantization)
    return Launch(
        model=model,
        dtype=server.model.facts.dtype,
        settings=found.settings,
        quantization=None if weights is None or is_own else weights.name,
        static_share=_static_share(server, found),
        kv_tokens=found.kv_tokens,
    )


def _static_share(server: Server, found: ServingEstimate) -> float:
    """SGLang's share with which its cache has as many bytes: of what is free before the weights, for weights and cache as SGLang counts them."""
    if server.rules.has_static_share:
        return found.settings.gpu_memory_utilization
    all_of_it = dataclasses.replace(found.settings, gpu_memory_utilization=1.0)
    whole = dataclasses.replace(server, rules=rules_of("sglang"), settings=all_of_it).start_up()
    others = whole.weights_bytes + whole.adapter_bytes
    return min(1.0, (others + found.kv_bytes) / (others + whole.kv_bytes))


def launch_arguments(engine: str, launch: Launch) -> list[str]:
    """The command of `engine` with its arguments.

    Raises:
        UsageError: the engine does not serve weights or a cache of that kind; the message says so.
    """
    of = commands()[engine]
    arguments = [*of["command"], launch.model]
    for setting, option in of["options"].items():
        value = _value(setting, launch, engine, of)
        if value is True:
            arguments.append(option)
        elif value not in (None, False, ""):
            arguments += [option, f"{value:g}" if isinstance(value, float) else str(value)]
    return arguments


def all_launches(launch: Launch) -> dict[str, list[str]]:
    """The arguments of each engine that serves such weights and such a cache."""
    found = {}
    # The others have arguments of their own for these.
    only_vllm = launch.settings.adapters is not None or launch.settings.kv_offload_bytes
    for engine in ENGINES[:1] if only_vllm else ENGINES:
        try:
            found[engine] = launch_arguments(engine, launch)
        except UsageError:
            continue
    return found


def llama_cpp_launch(found: ServingEstimate, model: str) -> list[str]:
    """The command of llama.cpp's server: its context is that of all slots together."""
    of = commands()["llama.cpp"]
    settings = found.settings
    kind = of["cache"][settings.kv_dtype]
    values = {
        "context": settings.max_model_len * settings.max_num_seqs,
        "slots": settings.max_num_seqs,
        "gpu_layers": found.layers_on_card,
        "max_num_batched_tokens": max(2048, settings.max_num_batched_tokens),
        "micro_batch": settings.max_num_batched_tokens,
        "keys": kind,
        "values": kind,
        # A quantised cache of values needs it.
        "flash": "on" if kind.startswith("q") else "auto",
    }
    options = [(of["options"][name], str(value)) for name, value in values.items()]
    return [*of["command"], f"{model}.gguf", *(part for pair in options for part in pair)]


def shell_line(arguments: Sequence[str]) -> str:
    """The arguments as one line for a shell."""
    return shlex.join(arguments)


def _value(setting: str, launch: Launch, engine: str, of: Mapping[str, Any]) -> Any:
    """The value of the option for `setting`; None, False and "" leave it out."""
    settings = launch.settings
    if setting == "quantization":
        return None if launch.quantization is None else _named(of["weights"], launch.quantization, engine, "weights in")
    if setting == "kv_dtype":
        return _named(of["cache"], settings.kv_dtype, engine, "a cache in")
    derived = {
        # TGI takes no type of weights beside a format of them, and the engines cut no prompt that leaves no room for an answer.
        "dtype": None if engine == "tgi" and launch.quantization else launch.dtype,
        "static_share": math.ceil(round(launch.static_share * _SHARE_STEPS, 3)) / _SHARE_STEPS,
        "max_prompt": max(1, settings.max_model_len - 1),
        # TGI computes prompts whole.
        "prefill_tokens": max(settings.max_num_batched_tokens, settings.max_model_len),
        "kv_tokens": launch.kv_tokens,
        "no_graphs": "0" if settings.enforce_eager else None,
        "enable_lora": settings.adapters is not None,
        "max_loras": settings.adapters.number if settings.adapters else None,
        "max_lora_rank": settings.adapters.rank if settings.adapters else None,
        "kv_offload_gib": settings.kv_offload_bytes / GIB if settings.kv_offload_bytes else None,
    }
    return derived[setting] if setting in derived else getattr(settings, setting)


def _named(names: Mapping[str, str], ours: str, engine: str, what: str) -> str:
    if ours not in names:
        raise UsageError(f"{engine} serves no {what} {ours}; it serves {', '.join(names)}")
    return names[ours]
