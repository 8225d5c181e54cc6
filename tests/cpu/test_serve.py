"""`serve`: the cache of a request and the weights are those of the real model on the host, and what an engine makes of them."""

import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli.main import run
from tightfit.errors import UsageError
from tightfit.fit import serving
from tightfit.serving.cache_size import CacheSize
from tightfit.serving.model_facts import ModelFacts
from tightfit.serving.serve_settings import ServeSettings
from tightfit.serving.serving_estimate import ServingEstimate

transformers = pytest.importorskip("transformers", minversion="5")
torch = pytest.importorskip("torch")

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "vocab_size": 99,
}
MODELS: dict[str, dict[str, Any]] = {
    "llama": {**COMMON, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 6, "n_head": 4, "vocab_size": 99},
    "gemma3_text": {
        **COMMON,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "sliding_window": 32,
        "sliding_window_pattern": 3,
    },
}


def config_file(folder: Path, model_type: str, **changes: Any) -> str:
    path = folder / f"{model_type}.json"
    path.write_text(json.dumps({"model_type": model_type, "dtype": "bfloat16", **MODELS[model_type], **changes}))
    return str(path)


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, ModelFacts]:
    """Each model, traced once."""
    asked, folder = ServeSettings(max_model_len=128), tmp_path_factory.mktemp("configs")
    settings: dict[str, Any] = {"engine": "vllm", "engine_version": None, "dtype": None}
    return {
        name: serving.traced_model(config_file(folder, name), "L4", asked=asked, **settings).facts for name in MODELS
    }


@pytest.mark.parametrize("model_type", MODELS)
def test_weights_and_cache_are_those_of_the_real_model(
    tmp_path: Path, model_type: str, facts: dict[str, ModelFacts]
) -> None:
    source, found = config_file(tmp_path, model_type), facts[model_type]
    config = transformers.AutoConfig.for_model(**json.loads(Path(source).read_text()))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    kept = {id(b): b for b in model.state_dict(keep_vars=True).values()}
    assert sum(row.num_bytes for row in found.weights) == sum(t.numel() * t.element_size() for t in kept.values())
    for length in (5, 60):
        with torch.inference_mode():
            cache = model(input_ids=torch.zeros(1, length, dtype=torch.int64), use_cache=True).past_key_values
        real = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        assert sum(tensor.num_bytes(length) for tensor in found.cache) == real


def test_a_window_bounds_what_its_layers_keep(facts: dict[str, ModelFacts]) -> None:
    size = CacheSize(tensors=facts["gemma3_text"].cache, element_bytes=0, degree=1, block_tokens=16)
    # Two layers of six are without a window: a key and a value of 16 numbers of two bytes.
    assert size.has_windows
    assert size.token_bytes == 2 * 2 * 16 * 2
    assert size.window_token_bytes == 6 * 2 * 16 * 2
    assert size.request_bytes(100_000) - size.request_bytes(10_000) == 90_000 * size.token_bytes


def estimated(source: str, **changes: Any) -> ServingEstimate:
    lengths = changes.pop("lengths", ())
    return serving.serve(source, "L4", asked=ServeSettings(**changes), lengths=lengths)


def test_the_parts_add_up_to_the_share_of_the_card(tmp_path: Path) -> None:
    source = config_file(tmp_path, "llama")
    found = estimated(source, max_model_len=128, lengths=[(90, 10), (50, 10)])
    share = int(found.capacity_bytes * 0.9)
    assert found.fits
    assert found.weights_bytes + found.activation_bytes + found.non_torch_bytes + found.kv_bytes == share
    # Six layers, a key and a value of two heads of 16 numbers of two bytes.
    assert found.kv_bytes_per_token == 6 * 2 * 2 * 16 * 2
    assert found.kv_tokens == found.kv_bytes // (16 * found.kv_bytes_per_token) * 16
    assert found.max_concurrency == found.kv_bytes / (128 * found.kv_bytes_per_token)
    # Pages of 16 tokens: 112 and 64.
    assert found.concurrency_at_lengths == found.kv_bytes / (88 * found.kv_bytes_per_token)
    speed = found.speed
    assert speed is not None
    assert (speed.prompt_tokens, speed.answer_tokens, speed.num_requests) == (70, 10, found.settings.max_num_seqs)
    assert 0 < speed.each_token.low < speed.each_token.high < 0.1
    # At least all weights but the embedding, and the cache of all requests, are read for each token.
    num_bytes = found.weights_bytes - 99 * 64 * 2 + speed.num_requests * 75 * found.kv_bytes_per_token
    assert speed.each_token.low > num_bytes / 300e9
    halved = estimated(source, max_model_len=128, kv_dtype="fp8", max_num_batched_tokens=8192)
    assert halved.activation_bytes > 2 * found.activation_bytes
    assert halved.kv_bytes_per_token == found.kv_bytes_per_token // 2


def test_a_request_that_does_not_fit_beside_the_weights_is_refused_as_the_engine_does(tmp_path: Path) -> None:
    source = config_file(tmp_path, "llama", max_position_embeddings=1 << 26)
    found = estimated(source)
    assert not found.fits
    assert "one request of 67,108,864 tokens needs 48.00 GiB of cache" in found.why
    assert "lower --max-model-len" in found.why


def test_a_model_without_a_cache_or_a_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a bert model generates no tokens"):
        estimated("bert")
    with pytest.raises(UsageError, match="a request of 200 tokens is longer than --max-model-len, 128"):
        estimated(config_file(tmp_path, "llama"), max_model_len=128, lengths=[(150, 50)])


def test_ranks_that_do_not_divide_the_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--gpus 3: model.layers.0.self_attn.q_proj.weight has 64 rows"):
        estimated(config_file(tmp_path, "llama"), max_model_len=128, num_gpus=3)


def test_a_card_without_a_fused_kernel_for_grouped_heads_keeps_no_matrix_of_scores(tmp_path: Path) -> None:
    source = config_file(tmp_path, "llama", max_position_embeddings=8192)
    asked = ServeSettings(chunked_prefill=False, max_num_seqs=8)
    found = serving.serve(source, "Tesla V100-SXM2-16GB", asked=asked, engine_version="0.6.4")
    assert found.settings.max_num_batched_tokens == 8192
    # Four heads of 8,192 x 8,192 scores in bfloat16 would be 512 MiB.
    assert found.activation_bytes < 64 << 20
    with pytest.raises(UsageError, match="this GPU has no bfloat16; give --dtype float16"):
        serving.serve(source, "Tesla V100-SXM2-16GB", asked=asked, engine_version="0.6.4", dtype="bfloat16")


def test_the_command_prints_json_and_its_exit_code_says_whether_it_starts(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    source = config_file(tmp_path, "llama")
    given = ["--lengths", "100:20", "--max-model-len", "128", "--price-per-hour", "0.8", "--json"]
    assert run(["serve", source, "--device", "L4", *given]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["fits"]
    fast = answer["speed"]["tokens_per_second_high"]
    assert answer["cost_of_a_million_tokens"][0] == pytest.approx(0.8 / 3600 / fast * 1e6)
    assert answer["settings"]["max_model_len"] == 128
    assert run(["serve", source, "--device", "L4", "--max-model-len", "99999999"]) == 1
    said = capfd.readouterr().out
    assert said.startswith("does not start: one request of 99,999,999 tokens")
    assert run(["serve", source, "--device", "L4", "--price-per-hour", "0.8"]) == 2
    assert "--price-per-hour: give what a GPU costs per hour, and --lengths" in capfd.readouterr().err
    assert run(["serve", source, "--device", "L4", "--engine", "tgi"]) == 2
    assert "--engine tgi: its start-up is not known; one of vllm" in capfd.readouterr().err
