"""Published tables in which each row adds a technique to the one before, with the techniques of ours that are taken for it.

GiB are as published; where a source says GB of torch's counters it is 1e9 bytes. Where only a share or a difference is published, so it is here.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tightfit.planner.option import Option

_GB = 1e9 / (1 << 30)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A row: its GiB and items (tokens, images) per second, and the technique that it adds, with the options of it that are taken, in place of what they do not go with."""

    name: str
    gib: float
    items_per_second: float
    technique: str = ""
    takes: Callable[[Option], bool] = lambda option: True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """`workload` is a function of `published_workloads`. `base` names techniques that the first row has, `is_compiled` that its source compiled and we do not."""

    name: str
    source: str
    card: str
    workload: str
    parameters: Mapping[str, Any]
    items_per_step: int
    rungs: tuple[Rung, ...]
    base: tuple[tuple[str, Callable[[Option], bool]], ...] = ()
    is_compiled: bool = False
    is_allocated: bool = False
    """Whether its GiB are what tensors held, and not what torch had reserved."""


def _is_whole_block(option: Option) -> bool:
    return option.where.rpartition(".")[2].isdigit() and "keep" not in option.settings


def _has_bits(bits: int) -> Callable[[Option], bool]:
    return lambda option: (
        option.settings.get("bits") == bits
        and "in_backward" not in option.settings
        and "library" not in option.settings
    )


_CHECKPOINTED = ("checkpointing", _is_whole_block)


def _chunked(num_chunks: int) -> tuple[str, Callable[[Option], bool]]:
    return "chunked_loss", lambda option: option.settings["num_chunks"] == num_chunks


def _offloads(
    name: str, model: str, num_tokens: int, rank: int, before: tuple[float, float], after: tuple[float, float]
) -> Ladder:
    """prime-rl's rows of one H100: blocks recomputed, and their inputs at the host as well; the loss in chunks."""
    return Ladder(
        name=name,
        source="prime-rl's baselines for one H100 (January 2026)",
        card="H100 SXM",
        workload="decoder",
        parameters={"name": model, "batch_size": 1, "num_tokens": num_tokens, "lora_rank": rank},
        items_per_step=num_tokens,
        # Its chunks are not described: as many as torchtune's.
        base=(_chunked(8), _CHECKPOINTED),
        rungs=(
            Rung(name="recomputation", gib=before[0], items_per_second=before[1]),
            Rung(
                name="+ offload", gib=after[0], items_per_second=after[1], technique="offloaded_checkpointing",
                takes=_is_whole_block,
            ),
        ),
    )  # fmt: skip


LADDERS = (
    Ladder(
        name="torchtune",
        source="torchtune's README, Llama-3.2-3B, 2 x 4,096 tokens packed, bfloat16",
        card="A100 80GB",
        workload="decoder",
        parameters={"name": "llama-3.2-3b", "batch_size": 2, "num_tokens": 4096},
        items_per_step=2 * 4096,
        # Its row before, in eager mode, has 60.0 GiB and 7,075 tokens per second.
        is_compiled=True,
        rungs=(
            Rung(name="compiled", gib=51.0, items_per_second=8998),
            Rung(name="+ chunked cross entropy", gib=42.9, items_per_second=9174, technique="chunked_loss", takes=_chunked(8)[1]),
            Rung(
                name="+ checkpointing", gib=24.9, items_per_second=7210, technique="checkpointing", takes=_is_whole_block
            ),
            Rung(
                name="+ optimizer in backward", gib=23.1, items_per_second=7309, technique="update_in_backward",
                takes=lambda option: option.settings.get("kernel") == "same",
            ),
            Rung(
                name="+ activation offload", gib=21.8, items_per_second=7301, technique="offloaded_checkpointing",
                takes=_is_whole_block,
            ),
            Rung(
                name="+ 8-bit AdamW", gib=17.6, items_per_second=6960, technique="low_bit_states",
                takes=lambda option: option.settings.get("bits") == 8,
            ),
        ),
    ),
    Ladder(
        name="torchao, ViT-H",
        is_allocated=True,
        source="torchao's optim/README at 36027d8, batch 8",
        card="RTX 4070 Ti SUPER",
        workload="vit_huge",
        parameters={"batch_size": 8},
        items_per_step=8,
        is_compiled=True,
        rungs=(
            Rung(name="AdamW, fused", gib=12.23 * _GB, items_per_second=41.9),
            Rung(name="8 bits", gib=8.33 * _GB, items_per_second=42.5, technique="low_bit_states", takes=_has_bits(8)),
            Rung(name="4 bits", gib=7.72 * _GB, items_per_second=42.4, technique="low_bit_states", takes=_has_bits(4)),
        ),
    ),
    Ladder(
        name="torchao, Llama-2-7B",
        # Alpaca's examples are not packed; 2 x 256 tokens are assumed.
        is_allocated=True,
        source="torchao's optim/README at 36027d8, torchtune's default on Alpaca",
        card="A100 80GB",
        workload="decoder",
        parameters={"name": "llama-2-7b", "batch_size": 2, "num_tokens": 256},
        items_per_step=512,
        base=(_CHECKPOINTED,),
        rungs=(
            Rung(name="AdamW, fused", gib=51.6, items_per_second=3200),
            Rung(name="8 bits", gib=39.1, items_per_second=2900, technique="low_bit_states", takes=_has_bits(8)),
            Rung(name="4 bits", gib=33.2, items_per_second=2900, technique="low_bit_states", takes=_has_bits(4)),
        ),
    ),
    Ladder(
        name="torchao, ViT-g",
        is_allocated=True,
        source="torchao's optim/README at 36027d8, batch 32, blocks checkpointed",
        card="RTX 4070 Ti SUPER",
        workload="vit_giant",
        parameters={"batch_size": 32},
        items_per_step=32,
        base=(_CHECKPOINTED,),
        rungs=(
            Rung(name="Adam", gib=9.82 * _GB, items_per_second=32 / 1.27),
            Rung(name="states at the host", gib=5.24 * _GB, items_per_second=32 / 1.52, technique="optimizer_offload", takes=lambda option: option.settings.get("executor") == "host"),
        ),
    ),
    _offloads("prime-rl, 0.6B, 65,536 tokens", "qwen3-0.6b", 65536, 0, (19.56, 10147), (16.08, 9977)),
    _offloads("prime-rl, 0.6B LoRA, 65,536", "qwen3-0.6b", 65536, 16, (11.45, 9967), (7.92, 9782)),
    _offloads("prime-rl, 4B LoRA, 16,384", "qwen3-4b", 16384, 16, (23.30, 6229), (20.57, 5952)),
    _offloads("prime-rl, 4B LoRA, 65,536", "qwen3-4b", 65536, 16, (41.99, 4164), (31.06, 4043)),
)  # fmt: skip
