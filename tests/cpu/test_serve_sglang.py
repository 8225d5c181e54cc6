"""`serve --engine sglang`: a share of what is free before the weights, for weights and cache alone; what does not fit beside them is refused."""

import json
from pathlib import Path

import pytest

from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.fit import serving
from tightfit.fit.serving_planning import plan_serving
from tightfit.serving.choices.candidate_servers import PricedCard
from tightfit.serving.choices.choosing import Wanted
from tightfit.serving.engine_rules import rules_of
from tightfit.serving.load.load_summary import ServiceLevel
from tightfit.serving.serve_settings import ServeSettings

pytest.importorskip("transformers", minversion="5")
CONFIG = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
}
CONFIG |= {"num_attention_heads": 4, "vocab_size": 99, "max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("card", "degree", "chunk", "graph", "kept_mib"),
    [
        ("L4", 1, 2048, 24, 512 + 3072 + 48 + 128),
        ("L4", 4, 2048, 80, 512 + 3072 + 160 + 512),
        ("4060", 1, 2048, 8, 512 + 3072 + 16 + 128),
        ("A100 40GB", 1, 4096, 32, 512 + 6144 + 64 + 128),
        # At least 10 GiB on cards of more than 60.
        ("A100 80GB", 1, 8192, 256, 512 + 12288 + 512 + 128),
        ("B200", 1, 16384, 512, 512 + 24576 + 1024 + 128),
    ],
)
def test_its_share_chunks_and_graphs_follow_from_the_card(
    card: str, degree: int, chunk: int, graph: int, kept_mib: int
) -> None:
    rules, device = rules_of("sglang"), find(card)
    assert (rules.chunk_tokens(device), rules.largest_graph(device, degree)) == (chunk, graph)
    whole = device.capacity_bytes / 2**20
    assert rules.share_of(device, degree, chunk) == round((whole - max(kept_mib, 10240 * (whole > 61440))) / whole, 3)
    assert rules.num_graphs(2048, device, degree) == sum(
        size <= graph for size in (1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), 512)
    )
    assert rules_of("vllm").share_of(device, degree, chunk) == 0.92


def test_weights_and_cache_have_the_share_and_the_rest_has_to_fit(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG))
    found = serving.serve(str(path), "L4", engine="sglang")
    card = find("L4")
    free = card.capacity_bytes - card.context_bytes
    assert found.fits and found.settings.gpu_memory_utilization == 0.833
    assert found.kv_bytes == int(free * 0.833) - found.weights_bytes
    # Pages are single tokens; sines and cosines are in float32.
    assert found.kv_tokens == found.kv_bytes // found.kv_bytes_per_token
    assert found.sleep is None and list(found.launch) == ["sglang"]
    assert found.launch["sglang"][-3:-1] != [] and "0.833" in found.launch["sglang"]
    full = serving.serve(str(path), "L4", engine="sglang", asked=ServeSettings(gpu_memory_utilization=0.9999))
    assert not full.fits and "beside weights and cache" in full.why
    for asked in (ServeSettings(lora="8"), ServeSettings(kv_offload="1GiB"), ServeSettings(draft="gpt2")):
        with pytest.raises(UsageError, match="are of --engine vllm, and not of sglang"):
            serving.serve(str(path), "L4", engine="sglang", asked=asked)


def test_no_server_is_chosen_for_it() -> None:
    card = PricedCard(device=find("L4"), most=1, price_per_hour=None)
    level = ServiceLevel(first_token=None, each_token=None)
    wanted = Wanted(objective="throughput", lengths=[(10, 10)], at_once=1, level=level, load=None)
    with pytest.raises(UsageError, match="--engine sglang: servers are chosen for vllm"):
        plan_serving("gpt2", [card], wanted, asked=ServeSettings(), engine="sglang")


def test_a_cache_of_several_pools_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**CONFIG, "model_type": "mistral", "num_key_value_heads": 4, "sliding_window": 32}))
    with pytest.raises(UsageError, match="a mistral model has a cache of windows, states or an encoder"):
        serving.serve(str(path), "L4", engine="sglang")
