"""What weights hold beyond their elements: ends of blocks that the allocator does not split off, and an engine's table of rotary positions."""

import dataclasses

import pytest

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.settings import AllocatorSettings
from tightfit.serving.engine_rules import rules_of
from tightfit.serving.model.held_weights import held_weights_bytes, rotary_bytes, unused_end
from tightfit.serving.model.model_facts import CacheTensor, ModelFacts, WeightRow
from tightfit.serving.model.weight_formats import format_named, weights_bytes
from tightfit.units import MIB


def row(name: str, shape: tuple[int, ...], cut: str = "", role: str = "linear") -> WeightRow:
    return WeightRow(name=name, shape=shape, item_bytes=2, role=role, cut=cut, kind="parameter")


def facts(*weights: WeightRow) -> ModelFacts:
    tensor = CacheTensor(
        path="0.keys",
        fixed_bytes=0,
        token_bytes=64,
        max_tokens=None,
        encoder_token_bytes=0,
        heads=2,
        item_bytes=2,
    )
    return ModelFacts(
        model_type="x",
        dtype="bfloat16",
        weights=weights,
        cache=(tensor,),
        max_positions=131072,
        is_encoder_decoder=False,
        has_parallel_plan=True,
        rotary_widths=(128,),
    )


def qwen2_5_14b() -> ModelFacts:
    rows = [row("model.embed_tokens.weight", (152064, 5120), role="embedding")]
    for layer in range(48):
        path = f"model.layers.{layer}"
        for name, outputs in (("q_proj", 5120), ("k_proj", 1024), ("v_proj", 1024)):
            rows.append(row(f"{path}.self_attn.{name}.weight", (outputs, 5120), "colwise"))
        rows.append(row(f"{path}.self_attn.o_proj.weight", (5120, 5120), "rowwise"))
        rows += [row(f"{path}.mlp.{name}.weight", (13824, 5120), "colwise") for name in ("gate_proj", "up_proj")]
        rows.append(row(f"{path}.mlp.down_proj.weight", (5120, 13824), "rowwise"))
    return facts(*rows, row("lm_head.weight", (152064, 5120), role="head"))


@pytest.mark.parametrize(
    "num_bytes", [9 * MIB, 10 * MIB, 10 * MIB + 512, 11 * MIB, 12 * MIB + 512, 135 * MIB, 68 * MIB - 512]
)
def test_the_end_of_a_block_is_that_of_the_replayed_allocator(num_bytes: int) -> None:
    block = CachingAllocator(AllocatorSettings()).malloc(num_bytes)
    # Smaller ones share segments, and blocks are in whole 512 bytes.
    assert block.size - num_bytes == unused_end(num_bytes) or num_bytes < 10 * MIB


def test_vllms_weights_of_qwen2_5_14b_on_two_cards() -> None:
    of, fused = qwen2_5_14b(), rules_of("vllm").fused
    ends = held_weights_bytes(of, None, 2, fused) - weights_bytes(of, None, 2)
    # Queries, keys and values as one 1 MiB, outputs 1, gates and ups as one 1, downs 0.5.
    assert ends == 48 * 3.5 * MIB
    # Published: 13.9476 GiB (vllm-project/vllm#13061).
    assert (held_weights_bytes(of, None, 2, fused) + rotary_bytes(of)) / 2**30 == pytest.approx(13.9476, rel=3e-4)
    # As transformers has them, each by itself on one card; embedding and head have an end too.
    assert held_weights_bytes(of, None) - weights_bytes(of, None) == (48 * 3 + 2) * MIB


def test_scales_are_tensors_of_their_own_and_experts_are_one() -> None:
    of, named = facts(row("a.weight", (22016, 2048))), format_named("gptq")
    # 21.5 MiB of numbers, with a megabyte of scales.
    assert held_weights_bytes(of, named) - weights_bytes(of, named) == 0.5 * MIB
    experts = facts(*(row(f"layers.0.mlp.experts.{n}.up.weight", (1000, 6144)) for n in range(64)))
    assert held_weights_bytes(experts, None) - weights_bytes(experts, None) == unused_end(64 * 1000 * 6144 * 2)


def test_rotary_positions() -> None:
    of = facts(row("e", (10, 10), role="embedding"))
    assert rotary_bytes(of) == 131072 * 128 * 2
    assert rotary_bytes(dataclasses.replace(of, max_positions=None)) == 0
    assert rotary_bytes(dataclasses.replace(of, rotary_widths=())) == 0
