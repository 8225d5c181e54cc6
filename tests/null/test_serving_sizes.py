"""Sizes of weights and caches, lengths of requests and the rules of engines, in numbers."""

import dataclasses
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.serving.engine_rules import parsed_version, rules_of
from tightfit.serving.load.lengths import lengths_of
from tightfit.serving.model.cache_size import CacheSize, mean_request_bytes, num_tokens
from tightfit.serving.model.checkpoint_format import checkpoint_format
from tightfit.serving.model.model_facts import CacheTensor, WeightRow
from tightfit.serving.model.weight_formats import format_named, row_bytes
from tightfit.serving.serve_settings import ResolvedSettings, ServeSettings


def keys(*, max_tokens: int | None = None, heads: int = 8) -> CacheTensor:
    """The keys of a layer: heads of 128 numbers of two bytes."""
    return CacheTensor(
        path="layers.0.keys",
        fixed_bytes=0,
        token_bytes=heads * 256,
        max_tokens=max_tokens,
        encoder_token_bytes=0,
        heads=heads,
        item_bytes=2,
    )


def size(*tensors: CacheTensor, element_bytes: int = 0, degree: int = 1) -> CacheSize:
    return CacheSize(tensors=tensors, element_bytes=element_bytes, degree=degree, block_tokens=16)


def test_a_request_takes_whole_pages() -> None:
    cache = size(keys(), keys())
    assert cache.token_bytes == 2 * 8 * 256
    assert [cache.request_bytes(n) // cache.token_bytes for n in (1, 16, 17)] == [16, 16, 32]


def test_a_window_keeps_a_page_more_than_it_shows() -> None:
    cache = size(keys(max_tokens=30))
    assert [cache.request_bytes(n) // (8 * 256) for n in (16, 48, 1000)] == [16, 48, 48]


def test_heads_are_shared_out_and_kept_whole_where_there_are_fewer_than_ranks() -> None:
    assert [size(keys(), degree=n).token_bytes for n in (1, 2, 8, 16)] == [2048, 1024, 256, 256]
    assert size(keys(), element_bytes=1, degree=2).token_bytes == 512


@given(st.integers(0, 1 << 40), st.integers(1, 1 << 20))
def test_tokens_are_whole_pages_within_the_bytes(kv_bytes: int, length: int) -> None:
    cache = size(keys(), keys(max_tokens=64))
    tokens = num_tokens(cache, kv_bytes)
    assert tokens % 16 == 0
    assert tokens * cache.token_bytes <= kv_bytes < (tokens + 16) * cache.token_bytes
    assert mean_request_bytes(cache, [(length, 0)] * 2) == cache.request_bytes(length)


def linear(*, role: str = "linear", cut: str = "") -> WeightRow:
    return WeightRow(name="w", shape=(256, 512), item_bytes=2, role=role, cut=cut, kind="parameter")


@pytest.mark.parametrize(
    ("name", "bits"),
    # Of 256 rows of 512 weights.
    [("fp8", 8 + 32 / (256 * 512)), ("int8", 8 + 32 / 512), ("awq", 4 + 20 / 128), ("nf4", 4.5), ("q8_0", 8.5), ("q4_0", 4.5), ("nvfp4", 4.5 + 64 / (256 * 512))],
)  # fmt: skip
def test_a_format_has_its_bits_and_those_of_its_groups(name: str, bits: float) -> None:
    assert row_bytes(linear(), format_named(name)) == pytest.approx(256 * 512 * bits / 8, abs=1)


def test_what_a_format_keeps_is_in_the_models_type() -> None:
    assert row_bytes(linear(role="head"), format_named("awq")) == row_bytes(linear(role="head"), None) == 256 * 512 * 2
    assert row_bytes(linear(cut="colwise"), None, 4) == 256 * 512 * 2 // 4
    assert row_bytes(linear(), None, 4) == 256 * 512 * 2
    # Ranks share heads of keys and values where there are fewer of them.
    assert row_bytes(dataclasses.replace(linear(cut="colwise"), parts=2), None, 4) == 256 * 512 * 2 // 2
    with pytest.raises(UsageError, match="--quantization q3: this format's size is not known"):
        format_named("q3")


def test_lengths_are_a_pair_or_a_table(tmp_path: Path) -> None:
    assert lengths_of("2000:300") == [(2000, 300)]
    table = tmp_path / "azure.csv"
    table.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16,4808,10\n2023-11-16,110,27\n")
    assert lengths_of(str(table)) == [(4808, 10), (110, 27)]


@pytest.mark.parametrize(
    ("text", "content", "said"),
    [
        ("2000", None, "write tokens of prompt and answer as 2000:300"),
        ("a:b", None, "a, b are no numbers of tokens"),
        ("0:5", None, "a prompt has at least one token"),
        ("none.csv", None, "there is no file"),
        ("x.csv", "a,b\n1,2\n", "no header with a column for prompts"),
        ("x.csv", "prompt,answer\n", "rows below it"),
        ("x.csv", "prompt,answer\n5,6\n7\n", "line 3: 7,  are no numbers"),
    ],
)
def test_other_lengths_are_one_clear_line(
    text: str, content: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(text).write_text(content)
    with pytest.raises(UsageError, match=said):
        lengths_of(text)


def test_prompts_are_cut_where_the_version_does_so() -> None:
    card = find("RTX 3090")
    whole, long, new = (rules_of("vllm", version) for version in ("0.4.2", "0.6.1", "0.9.2"))
    assert [rules.is_chunked(29_000) for rules in (whole, long, new)] == [False, False, True]
    assert [rules.is_chunked(35_000) for rules in (whole, long, new)] == [False, True, True]
    # A longer limit can need less memory: the largest batch is then a chunk.
    assert long.batched_tokens(card, 29_000, is_chunked=False) == 29_000
    assert long.batched_tokens(card, 35_000, is_chunked=True) == 512
    assert new.batched_tokens(find("H100"), 8192, is_chunked=True) == 8192
    assert new.batched_tokens(find("A100 80GB"), 8192, is_chunked=True) == 2048


def test_versions_and_settings_that_cannot_be_are_one_clear_line() -> None:
    assert parsed_version("0.8.5.dev169") == (0, 8, 5)
    with pytest.raises(UsageError, match=r"write it as 0\.8\.5"):
        parsed_version("new")
    with pytest.raises(UsageError, match=r"vllm is known from 0\.2\.0 on"):
        rules_of("vllm", "0.1.0")
    with pytest.raises(UsageError, match="must be above 0, at most 1"):
        ServeSettings(gpu_memory_utilization=1.2)
    with pytest.raises(UsageError, match="give --max-model-len"):
        ResolvedSettings.of(ServeSettings(), rules_of("vllm"), find("L4"), None)
    with pytest.raises(UsageError, match="without chunked prefill the engine refuses that"):
        ResolvedSettings.of(ServeSettings(max_num_batched_tokens=512), rules_of("vllm", "0.4.0"), find("L4"), 8192)


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8-block"),
        ({"quant_method": "fbgemm_fp8"}, "fp8"),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "int8"),
        ({"load_in_8bit": True}, "int8"),
        ({"load_in_4bit": True}, "bitsandbytes"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"type": "float", "num_bits": 8}}},
            },
            "fp8",
        ),
    ],
)
def test_a_checkpoint_says_its_format(quantization: dict[str, object], name: str) -> None:
    found = checkpoint_format(quantization)
    assert found is not None
    assert found.name == name


def test_a_checkpoint_says_the_size_of_its_groups() -> None:
    groups = [{"quant_method": "gptq", "bits": 4, "group_size": size} for size in (128, 32, -1)]
    sizes = [row_bytes(linear(), checkpoint_format(group)) for group in groups]
    # 256 rows of 512 weights: scales and zero points of 20 bits for each group.
    assert sizes[1] - sizes[0] == 256 * (16 - 4) * 20 // 8
    assert sizes[0] - sizes[2] == 256 * (4 - 1) * 20 // 8


@pytest.mark.parametrize(
    ("left_out", "is_left_out"), [("proj", True), ("block.proj", True), ("re:.*proj$", True), ("pro", False)]
)
def test_layers_that_a_checkpoint_leaves_out_keep_their_type(left_out: str, is_left_out: bool) -> None:
    row = dataclasses.replace(linear(), name="model.block.proj.weight")
    found = checkpoint_format({"quant_method": "fp8", "ignore": [left_out]})
    assert (row_bytes(row, found) == row.num_bytes) is is_left_out


def test_a_checkpoint_of_another_format_is_refused() -> None:
    with pytest.raises(UsageError, match="gptq with 3 bits: its size is not known"):
        checkpoint_format({"quant_method": "gptq", "bits": 3})
    groups = {"group_0": {"weights": {"type": "int", "num_bits": 2}}}
    with pytest.raises(UsageError, match="weights of int of 2 bits"):
        checkpoint_format({"quant_method": "compressed-tensors", "config_groups": groups})
    for lacking, says in (
        ({"bits": 4}, "names no quant_method: give --quantization"),
        ({"quant_method": "gptq"}, "gptq without bits"),
        ({"quant_method": "compressed-tensors"}, "weights of no type"),
    ):
        with pytest.raises(UsageError, match=says):
            checkpoint_format(lacking)
    with pytest.raises(UsageError, match="vptq"):
        checkpoint_format({"quant_method": "vptq"})
