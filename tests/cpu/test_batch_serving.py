"""`serve` with engines of whole batches: the cache of `generate` is that of the real one on the host, and llama.cpp's layers add up."""

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.errors import UsageError
from tightfit.fit import serving
from tightfit.serving.batches.batch_memory import StepMemory, TracedPeaks, batch_memory_of
from tightfit.serving.batches.batch_rules import BatchRules
from tightfit.serving.batches.split_layers import SplitModel, split_model
from tightfit.serving.model.cache_size import CacheSize
from tightfit.serving.model.model_facts import CacheTensor, ModelFacts, WeightRow
from tightfit.serving.model.weight_formats import format_named
from tightfit.serving.serve_settings import ServeSettings
from tightfit.serving.serving_estimate import ServingEstimate

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

CONFIG = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1024,
    "max_position_embeddings": 512,
}
EACH_TOKEN = 8 * 2 * 2 * 64 * 2


def estimated(folder: Path, engine: str, version: str | None = None, **changes: Any) -> ServingEstimate:
    path = folder / "config.json"
    path.write_text(json.dumps(CONFIG))
    return serving.serve(
        str(path),
        "L4",
        engine=engine,
        engine_version=version,
        lengths=[(100, 29)],
        asked=ServeSettings(**{"max_num_seqs": 2, **changes}),
    )


def test_generate_holds_what_it_holds_on_the_host(tmp_path: Path) -> None:
    found = estimated(tmp_path, "transformers")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**CONFIG)).to(torch.bfloat16).eval()
    ids = torch.zeros(2, 100, dtype=torch.int64)
    out = model.generate(ids, max_new_tokens=29, min_new_tokens=29, do_sample=False, return_dict_in_generate=True)
    cache = sum(layer.keys.nbytes + layer.values.nbytes for layer in out.past_key_values.layers)
    # While it grows, keys or values of one layer are there twice.
    twice = out.past_key_values.layers[0].keys.nbytes
    assert found.kv_bytes == cache + twice
    assert found.weights_bytes == sum(p.nbytes for p in model.parameters())
    assert found.fits
    assert found.max_concurrency > 1000
    assert found.speed is not None


def test_a_cache_that_grows_has_its_attention_planned_with_each_token_on_hopper(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))

    def each_token(card: str, cache: str) -> float:
        asked = ServeSettings(max_num_seqs=2, cache=cache)
        found = serving.serve(str(path), card, engine="transformers", lengths=[(100, 29)], asked=asked)
        assert found.speed is not None
        return found.speed.each_token.low

    assert each_token("H100", "dynamic") > each_token("H100", "static") + 0.015
    assert each_token("L4", "dynamic") == pytest.approx(each_token("L4", "static"), rel=0.2)


@pytest.mark.parametrize("engine", ["transformers", "llama.cpp"])
def test_lengths_that_nobody_named_are_no_longer_than_the_model(tmp_path: Path, engine: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "num_hidden_layers": 1, "max_position_embeddings": 400}))
    found = serving.serve(str(path), "L4", engine=engine)
    assert found.fits and found.settings.max_model_len == 400
    assert found.speed is not None
    assert (found.speed.prompt_tokens, found.speed.answer_tokens) == (300, 100)


def test_exllama_keeps_a_buffer_for_its_largest_weight(tmp_path: Path) -> None:
    found = estimated(tmp_path, "transformers", quantization="gptq")
    # Of each group of 128 inputs a scale and a zero, 20 bits, of each input its group, 32.
    products = [(256, 256), (128, 256), (128, 256), (256, 256), (512, 256), (512, 256), (256, 512)]
    each = sum(rows * inputs // 2 + rows * -(-inputs // 128) * 20 // 8 + inputs * 4 for rows, inputs in products)
    plain = (2 * 1024 * 256 + (2 * 8 + 1) * 256) * 2
    assert found.weights_bytes == 8 * each + plain + 512 * 256 * 2


def test_layers_at_the_host_take_the_same_bytes_of_a_shared_memory(tmp_path: Path) -> None:
    """Cache and mask of 6.7 GiB are more than what is free of a module of 8 GB beside its own programs, and fit a card of that size."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "max_position_embeddings": 1_500_000}))
    whole, part = (
        serving.serve(
            str(path), device, engine="llama.cpp", lengths=[(1_400_000, 0)], asked=ServeSettings(quantization="q8_0")
        )
        for device in ("3070", "Orin Nano")
    )
    assert whole.fits and whole.layers_on_card == whole.num_layers and not whole.change
    assert not part.fits and part.layers_on_card == 0
    assert "a memory that is the host's too" in part.why
    # Its weights are small: a shorter request helps, other weights do not.
    assert part.change.startswith("all layers are on the GPU with requests of up to ")
    assert "weights" not in part.change
    assert part.sleep is None


@pytest.mark.parametrize(("engine", "changes", "words"), [
    ("transformers", {"cache": "paged"}, "--cache paged"),
    ("transformers", {"kv_dtype": "fp8"}, "--cache"),
    ("transformers", {"quantization": "q4_k_m"}, "GGUF"),
    ("transformers", {"num_gpus": 2}, "one GPU"),
    ("llama.cpp", {"quantization": "awq"}, "GGUF"),
    ("llama.cpp", {"enforce_eager": True}, "--enforce-eager is of vllm"),
    ("llama.cpp", {"kv_dtype": "fp8"}, "q8_0"),
    ("vllm", {"cache": "static"}, "--engine transformers"),
    ("vllm", {"kv_dtype": "q8_0"}, "llama.cpp"),
])  # fmt: skip
def test_what_an_engine_does_not_have_is_refused(
    tmp_path: Path, engine: str, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        estimated(tmp_path, engine, **changes)


def test_llama_cpp_puts_as_many_layers_on_the_card_as_fit(tmp_path: Path) -> None:
    found = estimated(tmp_path, "llama.cpp", quantization="q8_0")
    assert (found.layers_on_card, found.num_layers) == (9, 9)
    # Slots are rounded up to 256 tokens, two of them, in float16.
    assert found.kv_bytes == 2 * 256 * EACH_TOKEN
    # Of each of 512 tokens its state, of each slot the logits, in float32; and a mask.
    assert found.activation_bytes >= (512 * 256 + 2 * 1024) * 4 + 512 * 256 * 2
    arguments = found.launch["llama.cpp"]
    assert arguments[arguments.index("--n-gpu-layers") + 1] == "9"
    assert arguments[arguments.index("--ctx-size") + 1] == str(2 * 129)


def test_the_mixed_types_of_gguf_have_the_published_sizes() -> None:
    # Llama-3-8B: 4,920,734,272 bytes as published in Q4_K_M, of which 7.8 MB are of the vocabulary's words.
    found = sum(format_named("q4_k_m").num_bytes(row) for row in _llama_3_8b())  # type: ignore[union-attr]
    assert found == pytest.approx(4_920_734_272 - 7_800_000, rel=2e-3)


@pytest.mark.parametrize(("format_name", "name", "shape", "bits"), [
    # The first eighth of the layers, and every third between the first and the last.
    ("q4_k_m", "model.layers.3.mlp.down_proj.weight", (4096, 14336), 6.5625),
    ("q4_k_m", "model.layers.4.mlp.down_proj.weight", (4096, 14336), 4.5),
    ("q4_k_m", "model.layers.3.mlp.experts.down_proj", (8, 4096, 14336), 6.5625),
    ("q4_k_m", "model.layers.3.mlp.gate.weight", (8, 4096), 32),
    ("q4_k_m", "model.layers.3.input_layernorm.weight", (4096,), 32),
    ("q4_k_s", "model.layers.3.self_attn.v_proj.weight", (1024, 4096), 5.5),
    ("q4_k_s", "model.layers.4.self_attn.v_proj.weight", (1024, 4096), 4.5),
    ("q4_k_s", "model.layers.3.mlp.down_proj.weight", (4096, 14336), 5.5),
    ("q4_k_s", "model.layers.31.mlp.down_proj.weight", (4096, 14336), 4.5),
    ("iq4_xs", "model.layers.9.self_attn.v_proj.weight", (1024, 4096), 5.5),
    ("iq4_xs", "model.layers.9.self_attn.v_proj.weight", (4096, 4096), 4.25),
    ("iq4_xs", "model.layers.3.mlp.down_proj.weight", (4096, 14336), 5.5),
    # 896 is no multiple of 256.
    ("q4_k_m", "model.layers.9.self_attn.q_proj.weight", (896, 896), 5.5),
    ("q4_k_m", "model.layers.0.self_attn.v_proj.weight", (128, 896), 8.5),
    ("q6_k", "model.layers.0.self_attn.v_proj.weight", (128, 896), 8.5),
    ("q6_k", "model.layers.0.self_attn.v_proj.weight", (1024, 4096), 6.5625),
])  # fmt: skip
def test_types_of_gguf_by_tensor(format_name: str, name: str, shape: tuple[int, ...], bits: float) -> None:
    found = format_named(format_name)
    assert found is not None
    row = _row(name, shape, 32, "other" if len(shape) == 1 else "linear")
    assert found.num_bytes(row) == row.num_elements * bits / 8


def test_a_matrix_that_is_the_output_too_has_its_type() -> None:
    weights = (
        _row("model.embed_tokens.weight", (1024, 256), 0, "embedding"),
        _row("layers.0.q_proj.weight", (256, 256), 1),
    )
    split = _split(weights, "b9460")
    assert split.embedding == split.output == 1024 * 256 * 6.5625 / 8


def test_the_output_goes_to_the_card_first_since_its_build() -> None:
    old, new = (_split(_SMALL, version) for version in ("b6900", "b9460"))
    assert (old.on_card(1)[0], old.on_card(2)[0]) == (old.layers[-1], sum(old.layers) + old.output)
    assert (new.on_card(1)[0], new.on_card(2)[0]) == (new.output, sum(new.layers) + new.output)
    assert old.on_card(0) == new.on_card(0) == (0, 0)
    # Of each slot the logits, and no more than two bytes for each place of the mask.
    assert old.compute == 512 * (1024 + 256) * 4 + 512 * 256 * 6
    assert new.compute == (3 * 1024 + 512 * 256) * 4 + 512 * 256 * 2


def _split(weights: tuple[WeightRow, ...], version: str) -> SplitModel:
    small = StepMemory(allocated_bytes=0, reserved_bytes=0)
    traced = TracedPeaks(forward=((1, small), (2, small)), sampler=((1, small), (2, small)))
    tensors = _tensors(1, max_tokens=None)
    facts = ModelFacts(
        model_type="x", dtype="float16", weights=weights, cache=tensors, max_positions=None, is_encoder_decoder=False, has_parallel_plan=False,
    )  # fmt: skip
    size = CacheSize(tensors=tensors, element_bytes=0, degree=1, block_tokens=1)
    return split_model(
        facts, traced, size, BatchRules.of("llama.cpp", version), format_named("q4_k_m"), slots=3, context=200
    )


def _llama_3_8b() -> list[WeightRow]:
    shapes = {
        "self_attn.q_proj": (4096, 4096),
        "self_attn.k_proj": (1024, 4096),
        "self_attn.v_proj": (1024, 4096),
        "self_attn.o_proj": (4096, 4096),
        "mlp.gate_proj": (14336, 4096),
        "mlp.up_proj": (14336, 4096),
        "mlp.down_proj": (4096, 14336),
    }
    rows = [_row(f"model.layers.{at}.{name}.weight", shape, 32) for at in range(32) for name, shape in shapes.items()]
    ends = [_row("model.embed_tokens.weight", (128256, 4096), 0, "embedding"), _row("lm_head.weight", (128256, 4096), 0, "head")]  # fmt: skip
    return [*rows, *ends]


def _row(name: str, shape: tuple[int, ...], num_layers: int, role: str = "linear") -> WeightRow:
    return WeightRow(
        name=name, shape=shape, item_bytes=2, role=role, cut="", kind="parameter", num_layers=num_layers
    )  # fmt: skip


@pytest.mark.parametrize(("cache", "on_card", "host"), [
    # 4 layers of 2,000 bytes a token each: keys and values of one layer grow at a time.
    ("dynamic", 4 * 2000 * 199 + 1000 * 199, 0),
    ("static", 4 * 2000 * 199, 0),
    # A byte for each number, one half of a layer twice; keys of a layer as they were, values also in float32.
    ("fp8", 4 * 1000 * 199 + 500 * 199 + 2 * 2000 * 199, 0),
    ("offloaded", 2 * 2000 * 199 + 1000 * 199, 4 * 2000 * 199),
])  # fmt: skip
def test_caches_of_transformers(cache: str, on_card: int, host: int) -> None:
    tensors = tuple(
        CacheTensor(path=f"layers.{at}.{name}", fixed_bytes=0, token_bytes=1000, max_tokens=None, encoder_token_bytes=0, heads=1, item_bytes=2)
        for at in range(4)
        for name in ("keys", "values")
    )  # fmt: skip
    facts = ModelFacts(
        model_type="x", dtype="float16", weights=(_row("a.weight", (10, 10), 0),), cache=tensors,
        max_positions=None, is_encoder_decoder=False, has_parallel_plan=False,
    )  # fmt: skip
    small = StepMemory(allocated_bytes=0, reserved_bytes=0)
    traced = TracedPeaks(forward=((1, small), (2, small)), sampler=((1, small), (2, small)))
    size = CacheSize(tensors=tensors, element_bytes=0, degree=1, block_tokens=1)
    found = batch_memory_of(
        facts, traced, size, BatchRules.of("transformers", None), None, cache=cache, requests=3, prompt=100, answer=100
    )
    assert (found.cache, found.host) == (3 * on_card, 3 * host)


def test_caches_before_4_36_are_there_twice() -> None:
    assert BatchRules.of("transformers", "4.31.0").copies == "all"
    with pytest.raises(UsageError, match="known from b3000"):
        BatchRules.of("llama.cpp", "b100")


def test_layers_with_a_window_or_states_stay_on_the_card() -> None:
    window = _tensors(3, max_tokens=50)
    states = CacheTensor(path="layers.9.state", fixed_bytes=700, token_bytes=0, max_tokens=None, encoder_token_bytes=0, heads=1, item_bytes=2)  # fmt: skip
    tensors = (*window, *_tensors(5, max_tokens=None, first=3), states)
    small = StepMemory(allocated_bytes=0, reserved_bytes=0)
    traced = TracedPeaks(forward=((1, small), (2, small)), sampler=((1, small), (2, small)))
    facts = ModelFacts(
        model_type="x", dtype="float16", weights=(_row("a.weight", (10, 10), 0),), cache=tensors,
        max_positions=None, is_encoder_decoder=False, has_parallel_plan=False,
    )  # fmt: skip
    size = CacheSize(tensors=tensors, element_bytes=0, degree=1, block_tokens=1)
    found = batch_memory_of(
        facts, traced, size, BatchRules.of("transformers", None), None, cache="offloaded", requests=1, prompt=100, answer=100
    )  # fmt: skip
    kept = 3 * 2 * 1000 * (50 + 1) + 700
    assert found.cache == kept + 2 * 2 * 1000 * 199 + 1000 * 199
    assert found.host == 5 * 2 * 1000 * 199


def _tensors(number: int, *, max_tokens: int | None, first: int = 0) -> tuple[CacheTensor, ...]:
    return tuple(
        CacheTensor(path=f"layers.{first + at}.{name}", fixed_bytes=0, token_bytes=1000, max_tokens=max_tokens, encoder_token_bytes=0, heads=1, item_bytes=2)
        for at in range(number)
        for name in ("keys", "values")
    )  # fmt: skip


_SMALL = (
    _row("model.embed_tokens.weight", (1024, 256), 0, "embedding"),
    _row("layers.0.q_proj.weight", (256, 256), 1),
    _row("lm_head.weight", (1024, 256), 0, "head"),
)
