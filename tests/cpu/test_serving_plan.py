"""`serve --plan`: the chosen server is the best of its kind by what is wanted, and starts; what changes answers is asked for first."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli.main import run
from tightfit.devices.catalogue import find
from tightfit.errors import UsageError
from tightfit.fit import serving, serving_planning
from tightfit.serving.batches.batch_rules import BatchRules
from tightfit.serving.choices.candidate_servers import Kind, PricedCard, kinds, servers
from tightfit.serving.choices.choosing import Offer, Wanted, best_of_kind, ranked
from tightfit.serving.choices.serving_plan import ServingPlan
from tightfit.serving.engine_rules import rules_of
from tightfit.serving.launch.launch_arguments import launch_arguments, launch_of
from tightfit.serving.load.arrivals import drawn_arrivals
from tightfit.serving.load.load_summary import ServiceLevel
from tightfit.serving.model.weight_formats import format_named
from tightfit.serving.serve_settings import ServeSettings
from tightfit.serving.traced_server import AskedLoad, TracedModel

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

pytest.importorskip("transformers", minversion="5")

CONFIG = {
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "vocab_size": 8192,
    "max_position_embeddings": 4096,
}
RULES = rules_of("vllm")
L4, H100 = (PricedCard(device=find(name), most=4, price_per_hour=price) for name, price in (("L4", 0.8), ("H100", 3.0)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> TracedModel:
    """Traced once, for degrees 1, 2, 4 and one that does not divide its heads."""
    path = tmp_path_factory.mktemp("plan") / "config.json"
    path.write_text(json.dumps(CONFIG))
    return serving.traced_model(
        str(path),
        "L4",
        rules=RULES,
        asked=ServeSettings(),
        dtype=None,
        batched_tokens=[512, 2048, 8192],
        sampled_rows=[64, 256, 1024],
        degrees=[1, 2, 4, 3],
    )


def wanted(objective: Any = "throughput", **changes: Any) -> Wanted:
    fields = {"lengths": [(500, 100)], "at_once": 1, "level": ServiceLevel(), "load": None}
    return Wanted(objective=objective, **{**fields, **changes})


def offers(model: TracedModel, want: Wanted, cards: Any = (L4, H100), formats: Any = (None,)) -> list[Offer]:
    found = [
        best_of_kind(kind, servers(model, kind, RULES, ServeSettings(), [None, 600]), want)
        for kind in kinds(model, cards, formats, ["auto"])
    ]
    return [offer for offer in found if isinstance(offer, Offer)]


def test_a_degree_that_does_not_divide_the_model_is_left_out_and_said(model: TracedModel) -> None:
    assert set(model.refused) == {3}
    assert "which 3 does not divide" in model.refused[3]
    three = PricedCard(device=L4.device, most=3)
    assert {kind.degree for kind in kinds(model, [three], [None], ["auto"])} == {1, 2}


def test_each_objective_has_the_server_that_is_best_by_it(model: TracedModel) -> None:
    every = offers(model, wanted())
    assert len(every) == 6
    by = {name: ranked(offers(model, wanted(name)), wanted(name))[0][0] for name in ("throughput", "latency", "cost")}
    assert by["throughput"].tokens_per_second == max(offer.tokens_per_second for offer in every)
    assert by["throughput"].kind.card is H100
    assert by["latency"].seconds_alone <= min(offer.seconds_alone for offer in every)
    assert by["latency"].kind.degree > 1
    costs = [offer.cost_of_a_million for offer in offers(model, wanted("cost"))]
    assert by["cost"].cost_of_a_million == min(cost for cost in costs if cost is not None)


def test_the_smallest_share_starts_and_a_thousandth_less_does_not(model: TracedModel) -> None:
    want = wanted("memory", at_once=3)
    best = ranked(offers(model, want, [L4]), want)[0][0]
    assert best.kind.degree == 1
    assert best.estimate.fits
    assert best.estimate.concurrency_at_lengths is not None
    assert best.estimate.concurrency_at_lengths >= 3
    settings = best.server.settings
    assert settings.max_model_len == 600
    less = dataclasses.replace(settings, gpu_memory_utilization=settings.gpu_memory_utilization - 0.001)
    found = dataclasses.replace(best.server, settings=less).start_up([(500, 100)])
    assert not found.fits or (found.concurrency_at_lengths or 0) < 3


def test_smaller_weights_answer_sooner_and_hold_more(model: TracedModel) -> None:
    plain, fp8, awq = (
        offers(model, wanted("latency"), [dataclasses.replace(L4, most=1)], [format_named(name)])[0]
        for name in (None, "fp8", "awq")
    )
    assert plain.seconds_alone > fp8.seconds_alone > awq.seconds_alone
    assert plain.estimate.kv_bytes < fp8.estimate.kv_bytes < awq.estimate.kv_bytes
    # A prompt is bound by arithmetic, of which float8 has twice as much.
    assert fp8.alone.first_token.low < plain.alone.first_token.low


def test_a_limit_makes_batches_smaller_or_refuses(model: TracedModel) -> None:
    one = dataclasses.replace(L4, most=1)
    free = offers(model, wanted(), [one])[0]
    bound = offers(model, wanted(level=ServiceLevel(each_token=0.02)), [one])[0]
    assert bound.speed.each_token.middle <= 0.02 < free.speed.each_token.middle
    assert bound.speed.num_requests < free.speed.num_requests
    kind = Kind(card=one, degree=1, weight_format=None, kv_dtype="auto")
    why = best_of_kind(
        kind,
        servers(model, kind, RULES, ServeSettings(), [None]),
        wanted(level=ServiceLevel(each_token=1e-4)),
    )
    assert isinstance(why, str)
    assert "each further token takes" in why


def test_a_load_that_is_too_much_for_some_is_left_to_the_others(model: TracedModel) -> None:
    load = AskedLoad(arrivals=drawn_arrivals([(500, 100)], 40.0, 300), level=ServiceLevel(first_token=0.5))
    want = wanted("cost", load=load)
    one = [dataclasses.replace(card, most=1) for card in (L4, H100)]
    kept, refused = ranked(offers(model, want, one), want)
    assert [offer.kind.card.device.name for offer in kept] == [H100.device.name]
    assert "of the requests are within the limits" in refused[0][1]
    assert kept[0].load is not None
    assert kept[0].load.share_within is not None


def test_a_server_that_refuses_the_requests_is_not_planned(model: TracedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving_planning, "traced_model", lambda *_, **__: model)
    asked = ServeSettings(max_num_batched_tokens=2048, max_num_seqs=64)
    card = [dataclasses.replace(L4, most=1)]
    with pytest.raises(UsageError, match="a request of 4,300 tokens is longer than the model's positions, 4,096"):
        serving_planning.plan_serving("m", card, wanted(lengths=[(100, 10), (4000, 300)]), asked=asked)
    shorter = dataclasses.replace(asked, max_model_len=512)
    with pytest.raises(UsageError, match="a request of 600 tokens is longer than --max-model-len, 512"):
        serving_planning.plan_serving("m", card, wanted(), asked=shorter)

    def planned(lengths: list[tuple[int, int]]) -> ServingPlan:
        load = AskedLoad(arrivals=drawn_arrivals(lengths, 1.0, 60), level=ServiceLevel())
        return serving_planning.plan_serving("m", card, wanted(lengths=[], load=load), asked=asked)

    assert planned([(100, 10)]).fits
    half = planned([(100, 10), (5000, 10)])
    assert not half.fits
    assert "requests are refused as too long" in half.refused[0][1]
    with pytest.raises(UsageError, match="--arrivals: every prompt is as long as the model's positions, 4,096"):
        planned([(5000, 10)])


def test_the_line_for_sglang_gives_the_cache_that_was_planned(model: TracedModel) -> None:
    server = serving.server_of(model, "L4", RULES, ServeSettings())
    found = server.start_up()
    arguments = launch_arguments("sglang", launch_of(server, found, "m"))
    share = float(arguments[arguments.index("--mem-fraction-static") + 1])
    settings = dataclasses.replace(server.settings, gpu_memory_utilization=share)
    started = dataclasses.replace(server, rules=rules_of("sglang"), settings=settings).start_up()
    assert started.fits
    # The share is rounded up in its fourth digit.
    assert found.kv_bytes <= started.kv_bytes <= found.kv_bytes + 2e-4 * L4.device.capacity_bytes


def test_advice_is_one_that_can_be_followed(model: TracedModel) -> None:
    whole = serving.server_of(model, "L4", RULES, ServeSettings())
    found = whole.start_up()
    share = (found.charged_bytes + 1000) / found.capacity_bytes
    settings = dataclasses.replace(whole.settings, gpu_memory_utilization=share)
    why = dataclasses.replace(whole, settings=settings).start_up().why
    assert "are left for the cache, which not even a request of one token has room in; raise --gpu-mem" in why


def test_a_version_that_is_newer_than_the_rules_is_said(model: TracedModel) -> None:
    def said(version: str | None) -> bool:
        server = serving.server_of(model, "L4", rules_of("vllm", version), ServeSettings())
        return any("the newest that are known, are used" in each for each in server.start_up().assumptions)

    assert said("99.1")
    assert not any(map(said, (None, RULES.version, f"{RULES.version}.post1", "0.11.0")))
    assert BatchRules.of("transformers", "99.1").newest
    assert not BatchRules.of("llama.cpp", None).newest


def test_the_load_of_an_engine_that_schedules_in_another_way_is_refused(model: TracedModel) -> None:
    old = rules_of("vllm", "0.6.1")
    server = serving.server_of(model, "L4", old, ServeSettings(max_model_len=2048, max_num_batched_tokens=2048))
    load = AskedLoad(arrivals=drawn_arrivals([(500, 100)], 1.0, 5), level=ServiceLevel())
    assert server.start_up().fits
    with pytest.raises(UsageError, match=r"and 0\.6\.1 does not"):
        server.estimate([], load)


def test_the_command_says_what_to_start_and_changes_answers_only_where_allowed(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "small"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    given = ["serve", str(folder), "--device", "L4", "--lengths", "500:100", "--for", "memory", "--max-num-seqs", "8"]
    assert run([*given, "--allow", "awq", "--max-num-batched-tokens", "512", "--json"]) == 0
    answer = json.loads(capfd.readouterr().out)
    chosen = {choice["choice"]: choice for choice in answer["choices"]}
    assert chosen["weight_format"]["value"] == "awq"
    assert not chosen["weight_format"]["exact"]
    assert "5.47 to 5.60" in chosen["weight_format"]["loss"]
    assert [row["server"] for row in answer["alternatives"]] == ["1 x NVIDIA L4, weights as they are"]
    command = answer["launch"]["vllm"]
    assert command[:3] == ["vllm", "serve", str(folder)]
    share = float(command[command.index("--gpu-memory-utilization") + 1])
    assert share == answer["settings"]["gpu_memory_utilization"] < 0.2
    for wrong, message in (
        (["--for", "beauty"], "--for beauty: one of throughput, latency, cost, memory"),
        (["--for", "cost"], "--for cost: give what each GPU costs"),
        (["--plan", "--allow", "q3"], "--allow q3: no such format"),
        (["--plan", "--price-per-hour", "T4=1"], "is none of the --device"),
        (["--plan", "--price-per-hour", "free"], "--price-per-hour free: write what a GPU costs"),
        (["--plan", "--at-once", "0"], "--at-once 0: at least 1"),
        (["--plan", "--at-once", "4"], "--at-once needs --for memory or --beside"),
        (["--at-once", "4"], "--at-once needs --for memory or --beside"),
        (["--device", "H100"], "several --device: give --plan too"),
    ):
        assert run(["serve", str(folder), "--device", "L4", *wrong]) == 2
        assert message in capfd.readouterr().err


def test_prices_are_needed_for_cost() -> None:
    with pytest.raises(UsageError, match="give what each GPU costs"):
        serving_planning.plan_serving(
            "llama", [PricedCard(device=L4.device, most=1)], wanted("cost"), asked=ServeSettings(), allow=()
        )
