"""What a plan says a person could do: a model with fewer blocks and a shorter sequence hold what the advice says of them."""

import dataclasses
import re
from pathlib import Path

import pytest
from tests.cpu.run_arguments import run_arguments

from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.devices.catalogue import find
from tightfit.diagnosis.suggestions import from_profile as advice
from tightfit.diagnosis.suggestions.from_sizes import suggestions_on_sizes
from tightfit.fit.traced_runs import TracedRun, TracedRuns
from tightfit.units import parse

WORKLOAD = """
import torch
from torch import nn


class Decoder(nn.Module):
    def __init__(self, num_blocks, width, num_words):
        super().__init__()
        self.table, self.head = nn.Embedding(num_words, width), nn.Linear(width, num_words)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(num_blocks)
        )

    def forward(self, tokens):
        values = self.table(tokens)
        for block in self.blocks:
            values = values + block(values)
        return self.head(values)


def workload(num_blocks=8, num_tokens=256, width=512, num_words=512, dtype="float32"):
    model = Decoder(num_blocks, width, num_words).to("cuda", getattr(torch, dtype))
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        tokens = torch.randint(0, 512, (16, num_tokens), device="cuda")
        loss = model(tokens).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("advice") / "workload.py"
    path.write_text(WORKLOAD)
    return path


def trial(file: Path, **parameters: int | str) -> TracedRun:
    target = GeneratorFunction(location=str(file), function="workload", parameters=parameters)
    return TracedRuns(**run_arguments(target, "decoder")).run_with(())


def planned(run: TracedRun) -> advice.PlannedWorkload:
    return advice.PlannedWorkload(
        profile=run.profile,
        estimate=run.estimate,
        roots=run.roots,
        needed_bytes=run.needed_bytes,
        planned_bytes=run.needed_bytes,
        fits=False,
        techniques=frozenset(),
        forbidden=(),
    )


def size_in(text: str) -> int:
    found = re.search(r"about ([\d.]+ [KMG]iB)", text)
    assert found, text
    return parse(found[1].replace(" ", ""))


def test_a_lighter_model_holds_about_what_is_said_of_it(file: Path) -> None:
    (said,) = [one.sentence for one in advice._blocks(planned(trial(file)))]
    assert said.startswith("a smaller model, with 6 instead of 8 blocks in Decoder.blocks, ")
    assert size_in(said) == pytest.approx(trial(file, num_blocks=6).estimate.peak.allocated_bytes, rel=0.03)


def test_a_shorter_sequence_holds_no_more_than_is_said_of_it(file: Path) -> None:
    (said,) = [one.sentence for one in advice._sequence(planned(trial(file)))]
    assert said.startswith("half the sequence length (128 of 256 tokens) ")
    found = trial(file, num_tokens=128).estimate.peak.device_bytes
    assert found <= size_in(said) * 1.01
    assert size_in(said) < 1.5 * found


def test_what_saves_for_nothing_comes_first_and_another_gpu_last(file: Path) -> None:
    said = advice.suggestions_for(planned(trial(file)), find("A100 40GB"), is_whole_card=True)
    starts = ["half the batch size", "a smaller model", "without any technique it fits"]
    at = [next(i for i, one in enumerate(said) if one.startswith(start)) for start in starts]
    assert at == sorted(at) and said[-1].startswith("on two of these GPUs")


@pytest.mark.parametrize(
    ("shapes", "has_halves"),
    [
        ([(512, 64), (512, 512)], False),
        ([(512, 512), (512, 512)], False),
        ([(1, 64)], False),
        ([(512, 64), (64, 64)], True),
        ([(64, 64)], True),
        ([(1, 64), (1, 1)], False),
        ([(8, 64), ()], True),
    ],
)
def test_the_nodes_of_one_graph_and_one_example_have_no_halves(
    shapes: list[tuple[int, ...]], *, has_halves: bool
) -> None:
    assert advice._has_halves([{"inputs": {str(i): shape for i, shape in enumerate(shapes)}}]) == has_halves


def test_a_vocabulary_that_is_no_multiple_of_eight_costs_what_is_said_of_it(file: Path) -> None:
    odd, even = (trial(file, num_blocks=1, num_words=words, dtype="bfloat16") for words in (20_001, 20_008))
    (found,) = suggestions_on_sizes(odd.profile)
    assert "20,008 in place of 20,001" in found.what
    assert found.where == "Decoder.head"
    # The loss of this one is no cross-entropy, so its classes may be anything.
    assert not found.note
    assert found.adds_seconds == pytest.approx(even.estimate.seconds_per_step - odd.estimate.seconds_per_step, rel=0.02)
    assert not list(suggestions_on_sizes(even.profile))
    # Cores multiply number by number anyway.
    in_float32 = trial(file, num_blocks=1, num_words=20_001)
    assert not list(suggestions_on_sizes(in_float32.profile))


def test_a_batch_of_one_example_has_no_half(file: Path) -> None:
    whole = planned(trial(file))
    roots = [{"inputs": {"tokens": [1, 256]}, "varying": []}]
    said = advice.suggestions_for(dataclasses.replace(whole, roots=roots), find("A100 40GB"), is_whole_card=True)
    assert not [one for one in said if "half the batch" in one]
    assert [one for one in said if one.startswith("half the sequence length (128 of 256")]


def test_suggestions_of_unknown_cost_are_ordered_by_what_they_change() -> None:
    prices = ["GPU", "model", "results", "batch", "nothing"]
    rows = [advice.Suggestion(what=price, changes=price, saves_bytes=n) for n, price in enumerate(prices)]
    rows.append(advice.Suggestion(what="costs time", saves_bytes=1, adds_seconds=0.5))
    rows.append(advice.Suggestion(what="free", saves_bytes=1, adds_seconds=0.0))
    rows.append(advice.Suggestion(what="one line", saves_bytes=1, adds_seconds=0.0, is_one_line=True))
    assert [one.what for one in advice.in_order(rows)] == ["one line", "free", "costs time", *prices[::-1]]


def test_a_model_without_tokens_or_blocks_is_told_nothing_of_either(tmp_path: Path) -> None:
    path = tmp_path / "plain.py"
    path.write_text(
        WORKLOAD.replace("self.table(tokens)", "tokens.unsqueeze(-1) * torch.ones(1, 1, 512, device='cuda')")
    )
    plain = trial(path, num_blocks=1)
    assert list(advice._sequence(planned(plain))) == []
    assert list(advice._blocks(planned(plain))) == []
