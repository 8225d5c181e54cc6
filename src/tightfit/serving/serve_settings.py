"""What a user asks of a server: the arguments that decide its memory, and the lengths of the requests."""

import dataclasses
from typing import Self

from tightfit.devices.device import Device
from tightfit.errors import UsageError
from tightfit.serving.engine_rules import EngineRules
from tightfit.serving.model.adapters import AdapterSlots
from tightfit.units import parse

KV_DTYPES = {
    "auto": 0,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "q8_0": 34 / 32,
    "q4_0": 18 / 32,
}
"""Bytes of an element of the cache; 0: of the model's own type. The last two are llama.cpp's alone: blocks of 32 with a scale."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """Arguments of an engine as the user gives them; None: its default.

    `num_gpus` is the degree of tensor parallelism.
    """

    num_gpus: int = 1
    quantization: str | None = None
    kv_dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    gpu_memory_utilization: float | None = None
    enforce_eager: bool = False
    chunked_prefill: bool | None = None
    cache: str | None = None
    lora: str | None = None
    draft: str | None = None
    kv_offload: str | None = None

    def __post_init__(self) -> None:
        for name in ("num_gpus", "max_model_len", "max_num_seqs", "max_num_batched_tokens"):
            number = getattr(self, name)
            if number is not None and number < 1:
                raise UsageError(f"--{name.replace('_', '-')} is {number}; it must be at least 1")
        if self.gpu_memory_utilization is not None and not 0 < self.gpu_memory_utilization <= 1:
            raise UsageError(
                f"--gpu-memory-utilization is {self.gpu_memory_utilization:g}; it must be above 0, at most 1"
            )
        if self.kv_dtype not in KV_DTYPES:
            raise UsageError(f"--kv-dtype {self.kv_dtype}: one of {', '.join(KV_DTYPES)}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedSettings:
    """The arguments that an engine starts with, its defaults filled in."""

    num_gpus: int
    kv_dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    enforce_eager: bool
    is_chunked: bool
    adapters: AdapterSlots | None = None
    kv_offload_bytes: int = 0

    @classmethod
    def of(cls, asked: ServeSettings, rules: EngineRules, device: Device, max_positions: int | None) -> Self:
        """What the engine makes of `asked` on `device` for a model of `max_positions`.

        Raises:
            UsageError: the model has no limit of positions and none is given, or the engine refuses the numbers.
        """
        if asked.max_model_len is None and max_positions is None:
            raise UsageError("the model's config names no number of positions: give --max-model-len")
        max_model_len = asked.max_model_len or max_positions or 0
        is_chunked = rules.is_chunked(max_model_len, asked.chunked_prefill)
        tokens = asked.max_num_batched_tokens or rules.batched_tokens(device, max_model_len, is_chunked=is_chunked)
        if asked.max_num_batched_tokens is not None and not is_chunked and tokens < max_model_len:
            raise UsageError(
                f"max_num_batched_tokens {tokens} is below max_model_len {max_model_len}: without chunked prefill the engine refuses that"
            )
        return cls(
            num_gpus=asked.num_gpus,
            kv_dtype=asked.kv_dtype,
            max_model_len=max_model_len,
            max_num_seqs=min(asked.max_num_seqs or rules.max_sequences(device), tokens),
            max_num_batched_tokens=tokens,
            gpu_memory_utilization=asked.gpu_memory_utilization or rules.share_of(device, asked.num_gpus, tokens),
            enforce_eager=asked.enforce_eager,
            is_chunked=is_chunked,
            adapters=None if asked.lora is None else AdapterSlots.parsed(asked.lora),
            kv_offload_bytes=0 if asked.kv_offload is None else parse(asked.kv_offload),
        )
