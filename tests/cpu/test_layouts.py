"""Layouts over many cards, from one trace of a program for one card."""

import dataclasses
import json
from pathlib import Path

import pytest

from tightfit.analysis.profile import Profile
from tightfit.capture.trace_settings import TraceSettings
from tightfit.cost.collectives import Group, collective_seconds
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of
from tightfit.errors import UsageError
from tightfit.fit import capture
from tightfit.fit.layout_planning import plan_layouts
from tightfit.layouts.answers.layout_plan import LayoutPlan
from tightfit.layouts.layout import Layout
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model.model_parts import ModelParts, model_parts
from tightfit.layouts.rank_bytes import rank_bytes
from tightfit.layouts.stages import stages_of
from tightfit.reports.text.layout_curves import write_curve
from tightfit.tape import Tape

WIDTH, LAYERS, VOCABULARY, BATCH, LENGTH = 512, 4, 4096, 4, 512
DEVICE = find("h100")
NODE = node_of(DEVICE)
PROGRAM = f"""
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm({WIDTH})
        self.qkv, self.out = nn.Linear({WIDTH}, 3 * {WIDTH}), nn.Linear({WIDTH}, {WIDTH})
        self.up, self.down = nn.Linear({WIDTH}, 4 * {WIDTH}), nn.Linear(4 * {WIDTH}, {WIDTH})

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm(x)).view(b, t, 3, 8, d // 8).permute(2, 0, 3, 1, 4)
        x = x + self.out(scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(nn.functional.gelu(self.up(x)))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding({VOCABULARY}, {WIDTH})
        self.blocks = nn.ModuleList(Block() for _ in range({LAYERS}))
        self.head = nn.Linear({WIDTH}, {VOCABULARY})

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def train():
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    while True:
        tokens = torch.randint(0, {VOCABULARY}, ({BATCH}, {LENGTH}), device="cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""
NUM_BLOCK_WEIGHTS = 12 * WIDTH**2 + (3 + 1 + 4 + 1 + 2) * WIDTH
NUM_WEIGHTS = LAYERS * NUM_BLOCK_WEIGHTS + 2 * VOCABULARY * WIDTH + VOCABULARY


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("program") / "train.py"
    path.write_text(PROGRAM)
    return path


@pytest.fixture(scope="module")
def tape(program: Path) -> Tape:
    return capture(f"{program}:train", device="H100", tracing=TraceSettings(steps=2))


@pytest.fixture(scope="module")
def model(tape: Tape) -> ModelParts:
    return model_parts(Profile(tape.of_steps(), DEVICE))


def search(model: ModelParts, budget_bytes: int = DEVICE.capacity_bytes) -> LayoutSearch:
    return LayoutSearch(model, DEVICE, NODE, budget_bytes=budget_bytes)


def test_the_parts_of_a_step_are_read_from_its_tape(model: ModelParts) -> None:
    assert model.order == (0,) * LAYERS
    assert (model.batch.num_tokens, model.batch.sequence_length, model.batch.num_examples) == (
        BATCH * LENGTH,
        LENGTH,
        BATCH,
    )
    assert model.parameter_bytes == 4 * NUM_WEIGHTS
    assert model.blocks[0].parameter_bytes == pytest.approx(4 * NUM_BLOCK_WEIGHTS, abs=512)
    # Autocast converts the weights; AdamW has two states of each, and a gradient stays until it is zeroed.
    assert model.gathered_per_parameter == 0.5
    assert model.states_per_parameter == pytest.approx(2, rel=0.01)
    assert model.gradients_per_parameter == pytest.approx(1, rel=0.01)


def test_states_are_divided_by_the_ranks_that_share_them(model: ModelParts) -> None:
    def states(**degrees: int) -> dict[str, int]:
        # With several micro-batches in a step the gradients of the first are there when a second one is at its peak.
        layout = Layout(accumulation=2, **degrees)  # type: ignore[arg-type]
        found = search(model).priced_layout(layout).worst.by_class
        return {name: found[name] for name in ("parameters", "gradients", "optimizer_state")}

    whole = states(dp=8, zero_stage=0)
    assert whole["parameters"] == pytest.approx(4 * NUM_WEIGHTS, rel=1e-3)
    assert states(dp=8, zero_stage=3, sharded_over=8) == pytest.approx({k: v / 8 for k, v in whole.items()}, rel=1e-3)
    assert states(tp=4, zero_stage=0) == pytest.approx({k: v / 4 for k, v in whole.items()}, rel=1e-3)
    first = states(dp=8, zero_stage=1, sharded_over=8)
    assert first["parameters"] == whole["parameters"]
    assert first["optimizer_state"] == pytest.approx(whole["optimizer_state"] / 8, rel=1e-3)


def test_every_block_is_in_one_stage_and_early_stages_hold_more_micro_batches(model: ModelParts) -> None:
    layout = Layout(pp=4, zero_stage=0, accumulation=8, schedule="1f1b")
    stages = stages_of(model, layout)
    assert sum(stage.num_blocks for stage in stages) == LAYERS
    assert [stage.in_flight for stage in stages] == [4, 3, 2, 1]
    assert [stage.has_before for stage in stages] == [True, False, False, False]


def test_more_memory_and_more_cards_never_make_the_plan_slower(model: ModelParts) -> None:
    tight = search(model).run(8, 64).best
    assert tight is not None
    budgets = [tight.worst.total_bytes * share // 100 for share in (60, 80, 100, 200)]
    plans = [search(model, budget).run(8, 64).best for budget in budgets]
    seconds = [float("inf") if plan is None else plan.seconds.total for plan in plans]
    assert seconds == sorted(seconds, reverse=True)
    more = [search(model).run(n, 64).best for n in (2, 7, 8, 12, 16)]
    seconds = [plan.seconds.total for plan in more if plan is not None]
    assert len(seconds) == 5 and seconds == sorted(seconds, reverse=True)


def test_the_plan_keeps_the_batch_and_is_never_slower_than_fsdp_with_full_recomputation(model: ModelParts) -> None:
    finder = search(model)
    best = finder.run(8, 64).best
    assert best is not None
    assert best.layout.dp * best.layout.micro_batch * best.layout.accumulation == 64
    for micro_batch in (1, 2, 4, 8):
        layout = Layout(
            dp=8,
            sharded_over=8,
            micro_batch=micro_batch,
            accumulation=8 // micro_batch,
            recompute="full",
            num_recomputed=LAYERS,
        )
        assert best.seconds.total <= finder.priced_layout(layout).seconds.total


def test_recomputation_is_taken_only_as_far_as_memory_asks_for(model: ModelParts) -> None:
    layout = Layout(dp=8, zero_stage=3, sharded_over=8, micro_batch=64)
    plain = search(model).priced_layout(layout).worst.total_bytes
    full = (
        search(model)
        .priced_layout(dataclasses.replace(layout, recompute="full", num_recomputed=LAYERS))
        .worst.total_bytes
    )
    assert full < plain
    found = search(model, (plain + full) // 2)._with_least_recomputation(layout)
    assert found.fits and 0 < found.layout.num_recomputed <= LAYERS


def test_wrong_numbers_of_cards_are_refused(tape: Tape) -> None:
    for numbers, message in (
        ({"gpus": (10,), "nodes": 4}, "10 cannot be spread evenly over so many"),
        ({"gpus": (64,), "nodes": 4}, "are 16 a node, and DGX H100 has 8"),
        ({"gpus": (0,)}, "--gpus 0: give the number"),
        ({"gpus": (8,), "nodes": 0}, "--nodes 0"),
        ({"gpus": (8,), "global_batch": 0}, "--global-batch"),
    ):
        with pytest.raises(UsageError, match=message):
            plan_layouts(tape, "H100", **numbers)  # type: ignore[arg-type]


def test_a_plan_is_an_object_of_json(tape: Tape) -> None:
    found = plan_layouts(tape, "H100", gpus=(8,), nodes=1, global_batch=64).points[0].to_json()
    assert found["fits"] and found["layout"]["dp"] >= 1 and found["tokens_per_second"] > 0
    assert {"rank", "role", "total_bytes", "bytes"} == found["ranks"][0].keys()
    assert found["ranks"][0]["total_bytes"] == sum(found["ranks"][0]["bytes"].values())


def test_more_cards_are_a_curve_from_one_trace(tape: Tape, capsys: pytest.CaptureFixture[str]) -> None:
    numbers, total = (2, 8, 32), 3e11
    curve = plan_layouts(tape, "H100", gpus=numbers, global_batch=64, price="2.5", total=total, deadline_seconds=1e9)
    alone = [plan_layouts(tape, "H100", gpus=(number,), global_batch=64).points[0] for number in numbers]
    assert [point.best for point in curve.points] == [plan.best for plan in alone]
    rates = [point.rate(point.best) for point in curve.points if point.best]
    assert rates == sorted(rates) and len(rates) == 3
    costs = [point.cost for point in curve.points]
    assert [cost.price_per_hour for cost in costs if cost] == [5.0, 20.0, 80.0]
    assert [cost.total_seconds for cost in costs if cost] == [total / rate for rate in rates]
    answer = curve.to_json()
    assert (answer["fewest_gpus"], answer["fewest_gpus_in_time"], len(answer["points"])) == (2, 2, 3)
    cheapest = max(curve.points, key=lambda point: point.rate(point.best) / point.num_gpus if point.best else 0.0)
    assert curve.cheapest is not None and curve.cheapest.num_gpus <= cheapest.num_gpus
    write_curve(curve, elapsed_seconds=1.0)
    said = capsys.readouterr().out
    assert "fits from 2 GPUs on; done before the deadline from 2 on" in said
    assert "(late)" not in said


def test_the_fewest_cards_in_time_are_named_or_that_none_are(tape: Tape, capsys: pytest.CaptureFixture[str]) -> None:
    one = plan_layouts(tape, "H100", gpus=(2, 16), global_batch=64, total=1e11).points
    assert one[0].cost and one[0].cost.total_seconds and one[1].cost and one[1].cost.total_seconds
    between = (one[0].cost.total_seconds + one[1].cost.total_seconds) / 2
    curve = plan_layouts(tape, "H100", gpus=(2, 16), global_batch=64, total=1e11, deadline_seconds=between)
    assert curve.fewest_in_time is curve.points[1] and curve.is_met
    write_curve(curve, elapsed_seconds=1.0)
    assert "(late)" in capsys.readouterr().out
    none = plan_layouts(tape, "H100", gpus=(2, 16), global_batch=64, total=1e11, deadline_seconds=1.0)
    assert none.fewest_in_time is None and none.fewest is none.points[0] and not none.is_met
    small = plan_layouts(tape, "H100", gpus=(1, 2), global_batch=64, budget="100MiB", price="1")
    assert small.fewest is None and not small.is_met and small.cheapest is None
    write_curve(small, elapsed_seconds=1.0)
    assert "no layout fits up to 2 x" in capsys.readouterr().out


def test_cards_that_the_first_layout_leaves_idle_are_not_linear(tape: Tape, capsys: pytest.CaptureFixture[str]) -> None:
    curve = plan_layouts(tape, "H100", gpus=(3, 4), global_batch=2)
    (first, _) = curve.points
    assert first.best is not None and first.best.layout.num_gpus == 2
    write_curve(curve, elapsed_seconds=1.0)
    assert "67%" in next(line for line in capsys.readouterr().out.splitlines() if "(on 2)" in line)


def test_a_deadline_needs_the_work_that_is_to_be_done(tape: Tape) -> None:
    with pytest.raises(UsageError, match="--deadline goes with --total"):
        plan_layouts(tape, "H100", gpus=(8,), deadline_seconds=1.0)


def test_the_images_of_a_step_are_its_examples(tmp_path: Path) -> None:
    (tmp_path / "images.py").write_text(
        """
import torch
from torch import nn
from torch.nn.functional import cross_entropy

def train():
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).cuda()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    while True:
        cross_entropy(net(torch.randn(24, 3, 8, 8, device="cuda")), torch.randint(10, (24,), device="cuda")).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
"""
    )
    found = plan_layouts(f"{tmp_path / 'images.py'}:train", "H100", gpus=(8,), nodes=1).points[0]
    assert found.examples == 24
    assert any("24 examples, the images that its loss is of" in text for text in found.assumptions)


def test_a_model_that_is_gone_when_its_program_ends_has_its_weights(
    program: Path, model: ModelParts, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        f"{program.read_text()}\n\ndef main():\n    for _ in zip(range(9), train()):\n        pass\n\nmain()\n"
    )
    found = model_parts(Profile(capture(str(script), device="H100").of_steps(), DEVICE))
    assert found.batch == model.batch
    assert [part.parameter_bytes for part in (found.before, *found.blocks, found.after)] == [
        part.parameter_bytes for part in (model.before, *model.blocks, model.after)
    ]


def test_weights_that_both_ends_use_are_once_on_a_rank_that_has_both(program: Path, tmp_path: Path) -> None:
    tied = tmp_path / "tied.py"
    tied.write_text(
        program.read_text().replace(
            "\n    def forward(self, tokens)",
            "        self.head.weight = self.embedding.weight\n\n    def forward(self, tokens)",
        )
    )
    tape = capture(f"{tied}:train", device="H100", tracing=TraceSettings(steps=2))
    model = model_parts(Profile(tape.of_steps(), DEVICE))
    table = 4 * VOCABULARY * WIDTH
    assert model.tied_bytes == table
    assert model.parameter_bytes == 4 * NUM_WEIGHTS - table
    one = Layout(zero_stage=0, micro_batch=BATCH)
    (alone,) = stages_of(model, one)
    held = rank_bytes(model, one, alone, DEVICE, NODE).by_class
    assert held["parameters"] == model.parameter_bytes
    assert held["optimizer_state"] == pytest.approx(2 * model.parameter_bytes, rel=0.01)
    # Each end of a pipeline has a copy of its own.
    two = Layout(pp=2, zero_stage=0, schedule="1f1b", micro_batch=BATCH, accumulation=2)
    ends = [rank_bytes(model, two, stage, DEVICE, NODE).by_class["parameters"] for stage in stages_of(model, two)]
    assert sum(ends) == model.parameter_bytes + table
    # Both add up its gradient once a step, which one rank alone need not.
    untied = dataclasses.replace(model, tied_bytes=0)
    first, other = (search(each).clock.step(two).exposed for each in (model, untied))
    assert first - other == pytest.approx(
        collective_seconds(
            "all_reduce", table * model.gradients_per_parameter, Group.of(2, stride=1, num_linked=8), NODE
        )
    )
    assert search(model).clock.step(one).exposed == search(untied).clock.step(one).exposed


def test_a_batch_of_a_hundred_million_examples_is_searched_at_once(model: ModelParts) -> None:
    # A prime: each of its two divisors was looked for among all numbers, for every combination of degrees.
    assert {layout.dp for _, layout in search(model).candidates.of(8, 100_000_007)} == {1}
    assert {layout.dp for _, layout in search(model).candidates.of(8, 720_720)} == set(range(1, 9))


def test_states_that_are_updated_together_are_not_sharded(tape: Tape) -> None:
    assert tape.optimizers == ("AdamW",)
    for optimizer, stages in (("AdamW", {0, 1}), ("Muon", {0}), ("mine.Lion", {0})):
        other = dataclasses.replace(tape, optimizers=(optimizer,))
        found = plan_layouts(other, "H100", gpus=[2], budget="1MiB", export="tightfit").points[0]
        assert {each.layout.zero_stage for each in found.refused} == stages
        assert any(f"{optimizer} is not known" in each for each in found.assumptions) == (optimizer != "AdamW")


def test_weights_are_streamed_where_nothing_faster_fits(tape: Tape) -> None:
    def plan(budget: str) -> LayoutPlan:
        return plan_layouts(tape, "H100", gpus=[2], budget=budget, export="tightfit").points[0]

    fastest, nothing = plan("10GiB"), plan("1MiB")
    assert fastest.best is not None
    assert not fastest.best.layout.streams_weights
    # Each with full recomputation.
    sizes = [(each.layout.streams_weights, each.worst.total_bytes) for each in nothing.refused]
    assert sizes == sorted(sizes, key=lambda pair: pair[1])
    least = {streams: min(size for own, size in sizes if own is streams) for streams in (True, False)}
    assert least[True] < least[False]
    smaller = plan(f"{(least[True] + least[False]) // 2}B")
    assert smaller.best is not None
    assert smaller.best.layout.streams_weights
    assert smaller.best.seconds.total > fastest.best.seconds.total
    told = json.loads(smaller.exports[0].text)
    assert told["streamed"]["blocks"] == [f"blocks.{n}" for n in range(LAYERS)]
    assert "in host memory" in " ".join(smaller.exports[0].notes)
