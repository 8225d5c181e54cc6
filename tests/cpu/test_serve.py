"""`serve`: the cache of a request and the weights are those of the real model on the host, and what an engine makes of them."""

import json
import re
import types
from pathlib import Path
from typing import Any

import pytest

from tightfit.capture.inference.inference_model import input_width
from tightfit.capture.inference.named_positions import named_positions
from tightfit.cli.main import run
from tightfit.errors import UsageError
from tightfit.fit import serving, traced_models
from tightfit.serving.engine_rules import rules_of
from tightfit.serving.load.arrivals import drawn_arrivals
from tightfit.serving.load.load_summary import ServiceLevel
from tightfit.serving.model.cache_size import CacheSize
from tightfit.serving.model.model_facts import ModelFacts
from tightfit.serving.serve_settings import ServeSettings
from tightfit.serving.serving_estimate import ServingEstimate
from tightfit.serving.traced_server import AskedLoad, Server, TracedModel

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

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


def traced_once(source: str, asked: ServeSettings, *, tokens: int = 2048) -> TracedModel:
    rules = rules_of("vllm")
    return serving.traced_model(
        source, "L4", rules=rules, asked=asked, dtype=None, batched_tokens=[tokens], sampled_rows=[256], degrees=[1]
    )


def server(model: TracedModel, **changes: Any) -> Server:
    return serving.server_of(model, "L4", rules_of("vllm"), ServeSettings(**{"max_model_len": 128, **changes}))


@pytest.fixture(scope="module")
def traced(tmp_path_factory: pytest.TempPathFactory) -> dict[str, TracedModel]:
    """Each model, traced once."""
    asked, folder = ServeSettings(max_model_len=128), tmp_path_factory.mktemp("configs")
    return {name: traced_once(config_file(folder, name), asked) for name in MODELS}


@pytest.fixture(scope="module")
def facts(traced: dict[str, TracedModel]) -> dict[str, ModelFacts]:
    return {name: each.facts for name, each in traced.items()}


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
    assert any(tensor.max_tokens for tensor in size.tensors)
    assert size.token_bytes == 2 * 2 * 16 * 2
    assert size.window_token_bytes == 6 * 2 * 16 * 2
    assert size.request_bytes(100_000) - size.request_bytes(10_000) == 90_000 * size.token_bytes


def estimated(source: str, **changes: Any) -> ServingEstimate:
    lengths = changes.pop("lengths", ())
    return serving.serve(source, "L4", asked=ServeSettings(**changes), lengths=lengths)


def test_the_parts_add_up_to_the_share_of_the_card(traced: dict[str, TracedModel]) -> None:
    found = server(traced["llama"]).estimate([(90, 10), (50, 10)])
    share = int(found.capacity_bytes * 0.92)
    assert found.fits
    parts = (found.weights_bytes, found.activation_bytes, found.non_torch_bytes, found.graph_bytes, found.kv_bytes)
    assert sum(parts) == share
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
    halved = server(traced["llama"], kv_dtype="fp8").start_up()
    assert halved.activation_bytes == found.activation_bytes
    assert halved.kv_bytes_per_token == found.kv_bytes_per_token // 2
    eager = server(traced["llama"], enforce_eager=True).start_up()
    # 51 graphs of steps in pieces and 35 of whole ones, for six layers.
    assert (eager.graph_bytes, found.graph_bytes) == (0, (51 + 35) * 6 * 256 * 1024)
    assert eager.kv_bytes - halved.kv_bytes == found.graph_bytes


def test_a_model_without_a_cache_or_a_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a bert model generates no tokens"):
        estimated("bert")
    with pytest.raises(UsageError, match="a request of 200 tokens is longer than --max-model-len, 128"):
        estimated(config_file(tmp_path, "llama"), max_model_len=128, lengths=[(150, 50)])


def test_what_the_engine_refuses_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"--max-model-len 200: the model has 100 positions, and the engine refuses more"
    ):
        estimated(config_file(tmp_path, "llama", max_position_embeddings=100), max_model_len=200)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"asked": ServeSettings(max_model_len=131072)}, "--max-model-len 131072: the model has 8,192 positions"),
        ({"lengths": [(8000, 300)]}, "a request of 8,300 tokens is longer than the model's positions, 8,192"),
        (
            {"lengths": [(8000, 300)], "engine": "transformers"},
            "a request of 8,300 tokens is longer than the model's positions, 8,192",
        ),
    ],
)
def test_lengths_beyond_the_config_are_refused_before_a_trace(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(traced_models, "trace", None)
    with pytest.raises(UsageError, match=re.escape(message)):
        serving.serve("llama-3-70b", "H100 SXM 80GB", **options)


def test_positions_that_are_scaled_are_left_to_the_trace() -> None:
    scaled = {"max_position_embeddings": 100, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    assert (named_positions(scaled), named_positions({"text_config": {"n_positions": 7}})) == (None, 7)


@pytest.mark.parametrize(
    ("scaling", "positions"),
    [
        ({"rope_type": "default"}, 100),
        ({"rope_type": "linear", "factor": 2.0}, 200),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 50}, 200),
        ({"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 50}, 100),
    ],
)
def test_positions_are_counted_with_their_scaling(scaling: dict[str, Any], positions: int) -> None:
    text = types.SimpleNamespace(max_position_embeddings=100, rope_parameters=scaling)
    assert input_width(types.SimpleNamespace(get_text_config=lambda decoder: text)) == positions


PAIRS: dict[str, dict[str, Any]] = {
    "bart": {"d_model": 64, "encoder_layers": 4, "decoder_layers": 5, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "vocab_size": 99},
    "t5": {"d_model": 64, "d_ff": 96, "d_kv": 16, "num_layers": 4, "num_decoder_layers": 5, "num_heads": 4, "vocab_size": 99},
}  # fmt: skip


@pytest.mark.parametrize("model_type", PAIRS)
def test_an_encoder_decoder_is_served_whole_and_its_prompt_is_the_encoders(tmp_path: Path, model_type: str) -> None:
    fields = {"model_type": model_type, "dtype": "bfloat16", **PAIRS[model_type]}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    found = serving.serve(str(path), "L4", asked=ServeSettings(max_model_len=64), lengths=[(48, 15)])
    config = transformers.AutoConfig.for_model(**fields)
    model = transformers.AutoModelForSeq2SeqLM.from_config(config, dtype=torch.bfloat16)
    kept = {id(b): b for b in model.state_dict(keep_vars=True).values()}
    assert found.weights_bytes == sum(t.numel() * t.element_size() for t in kept.values())
    # Five layers, a key and a value of 64 numbers of two bytes: 16 tokens of the answer, and 48 of the encoder.
    assert found.request_bytes == 5 * 2 * 64 * 2 * (16 + 48)
    assert found.speed is not None
    load = AskedLoad(arrivals=drawn_arrivals([(48, 15)], 1.0, 5), level=ServiceLevel())
    with pytest.raises(UsageError, match="the load of an encoder-decoder is not simulated"):
        serving.serve(str(path), "L4", asked=ServeSettings(max_model_len=64), load=load)


def test_a_model_that_loops_over_tokens_is_traced_with_few_of_them(tmp_path: Path) -> None:
    fields = {"model_type": "mamba", "hidden_size": 32, "num_hidden_layers": 4, "state_size": 4, "vocab_size": 99, "dtype": "bfloat16"}  # fmt: skip
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields))
    model = traced_once(str(path), ServeSettings(max_model_len=4096), tokens=4096)
    found = server(model, max_model_len=4096, max_num_batched_tokens=4096).start_up()
    assert found.kv_bytes_per_token == 0
    assert found.request_bytes > 0
    fewer = server(model, max_model_len=4096, max_num_batched_tokens=1024).start_up()
    # What the loop's tensors take grows with the tokens: inner states of 64 x 4 numbers of four bytes at least.
    assert found.activation_bytes - fewer.activation_bytes >= 3072 * 64 * 4 * 4


def test_ranks_share_heads_of_keys_and_values_where_there_are_fewer(tmp_path: Path) -> None:
    source = config_file(tmp_path, "llama")
    found = estimated(source, max_model_len=128, num_gpus=4)
    # Two heads for four ranks: each keeps one of 16 numbers, a key and a value, in six layers.
    assert found.kv_bytes_per_token == 6 * 2 * 16 * 2
    shared, each = 2 * 32 * 64 // 2, (2 * 64 * 64 + 3 * 64 * 128) // 4
    norms, vocabulary = (2 * 6 + 1) * 64, 2 * 99 * 64
    # Each has the sines and cosines of all positions.
    rotary = 2048 * 16
    assert found.weights_bytes == pytest.approx(2 * (6 * (shared + each) + norms + vocabulary // 4 + rotary), abs=4)


def test_ranks_that_do_not_divide_the_layers_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"--gpus 3: the model has 4 attention heads"):
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
    given += ["--rate", "5", "--requests", "50", "--slo-ttft", "1s"]
    assert run(["serve", source, "--device", "L4", *given]) == 0
    answer = json.loads(capfd.readouterr().out)
    assert answer["fits"]
    fast = answer["speed"]["tokens_per_second_high"]
    assert answer["cost_of_a_million_tokens"][0] == pytest.approx(0.8 / 3600 / fast * 1e6)
    assert answer["settings"]["max_model_len"] == 128
    assert (
        answer["speed"]["first_token"]["low"]
        < answer["time_to_first_token_seconds"]
        < answer["speed"]["first_token"]["high"]
    )
    load = answer["load"]
    assert (load["num_requests"], load["num_refused"], load["num_preemptions"]) == (50, 0, 0)
    assert load["first_token"]["p50"] >= answer["speed"]["first_token"]["low"]
    assert load["share_within"] == 1.0
    assert load["largest_rate"] > 5
    (tmp_path / "long").mkdir()
    long = config_file(tmp_path / "long", "llama", max_position_embeddings=99_999_999)
    assert run(["serve", long, "--device", "L4"]) == 1
    said = capfd.readouterr().out
    assert said.startswith("does not start: one request of 99,999,999 tokens needs")
    assert "lower --max-model-len" in said
    for given, message in (
        (["--rate", "5"], "--rate: give --lengths too"),
        (["--slo-ttft", "1s"], "--slo-ttft and --slo-tpot: give --rate or --arrivals too"),
        (["--rate", "0", "--lengths", "5:5"], "--rate 0: give requests per second"),
        (["--rate", "1", "--arrivals", "a.csv", "--lengths", "5:5"], "--rate and --arrivals: give one of them"),
        (["--arrivals", "none.csv"], "--arrivals: there is no file none.csv"),
        (["--rate", "1", "--lengths", "5:5", "--slo-tpot", "5 parsecs"], "'5 parsecs' is no time"),
    ):
        assert run(["serve", source, "--device", "L4", *given]) == 2
        assert message in capfd.readouterr().err
    assert run(["serve", source, "--device", "L4", "--price-per-hour", "0.8"]) == 2
    assert "--price-per-hour: give what a GPU costs per hour, and --lengths" in capfd.readouterr().err
    assert run(["serve", source, "--device", "L4", "--engine", "tgi"]) == 2
    assert "--engine tgi: its start-up is not known; one of vllm" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("m.gguf", "GGUF", "m.gguf has weights in GGUF"),
        ("adapter_config.json", '{"base_model_name_or_path": "org/base"}', "is an adapter: give the model that it belongs to (org/base)"),
        ("notes.txt", "", "is no Hugging Face config"),
    ],
)  # fmt: skip
def test_what_is_given_in_place_of_a_config_is_named(name, text, says, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_text(text)
    assert run(["serve", name, "--device", "L4"]) == 2
    assert says in capsys.readouterr().err
    assert run(["serve", "https://huggingface.co/gpt2", "--device", "L4"]) == 2
    assert "is an address, and nothing is downloaded" in capsys.readouterr().err
    assert run(["serve", "", "--device", "L4"]) == 2
    assert "the name of the model is empty" in capsys.readouterr().err


def test_a_draft_and_adapters_are_charged_before_the_cache(tmp_path: Path, traced: dict[str, TracedModel]) -> None:
    plain = server(traced["llama"]).start_up()
    adapted = server(traced["llama"], lora="16:4").start_up()
    assert adapted.adapter_bytes > 0
    assert plain.kv_bytes - adapted.kv_bytes == adapted.adapter_bytes
    draft = config_file(tmp_path, "llama", num_hidden_layers=4)
    both = estimated(config_file(_folder(tmp_path), "llama"), max_model_len=128, draft=draft, quantization="fp8")
    rotary = 2048 * 16 * 2
    parameters = server(traced["llama"]).model.facts.num_parameters - 2 * _layer_parameters()
    assert both.draft_bytes == parameters * 2 + rotary
    assert both.kv_bytes_per_token == (6 + 4) * 2 * 2 * 16 * 2
    assert both.speed is None


def _layer_parameters() -> int:
    """Of one layer of the small Llama."""
    return 64 * (64 + 32 + 32 + 64) + 3 * 64 * 128 + 2 * 64


def _folder(path: Path) -> Path:
    folder = path / "other"
    folder.mkdir()
    return folder


def test_what_does_not_start_says_up_to_which_length_it_would(traced: dict[str, TracedModel]) -> None:
    longest = 1 << 18
    whole = server(traced["llama"], max_model_len=longest).start_up()
    # Room for about half of the longest request.
    share = (whole.charged_bytes + whole.request_bytes // 2) / whole.capacity_bytes
    found = server(traced["llama"], gpu_memory_utilization=share, max_model_len=longest).start_up()
    # With less than the weights take: what is quantised already is not to be quantised, and the cards are counted.
    for given, said in (("fp8", ""), (None, ", quantise (--quantization)")):
        held = server(traced["llama"], quantization=given, max_model_len=128).start_up()
        less = (held.charged_bytes - held.weights_bytes // 8) / held.capacity_bytes
        short = server(traced["llama"], gpu_memory_utilization=less, quantization=given, max_model_len=128).start_up()
        assert short.why.endswith(f"are missing; raise --gpu-memory-utilization{said}, or use more cards (--gpus 2)")
    fitting = int(found.why.rpartition(" ")[2].replace(",", ""))
    assert server(traced["llama"], gpu_memory_utilization=share, max_model_len=fitting).start_up().fits
    assert not server(traced["llama"], gpu_memory_utilization=share, max_model_len=fitting + 16).start_up().fits


def test_several_models_share_a_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = config_file(tmp_path, "llama", max_position_embeddings=256)
    assert run(["serve", source, "--beside", source, "--device", "L4"]) == 2
    assert "give --lengths" in capsys.readouterr().err
    assert run(["serve", source, "--beside", source, "--device", "L4", "--lengths", "90:10", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["fits_together"]
    assert found["together_bytes"] == sum(each["awake_bytes"] for each in found["servers"])
