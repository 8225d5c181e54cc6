"""Weights that are at the host in programs that only predict: planned from a script without a step, and what such programs do meanwhile."""

import copy
import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conformance.large_models import Decoder
from tests.forked_python import forked_python
from torch import nn

import tightfit
from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.runtime.attach import Attachment
from tightfit.techniques.registry import techniques
from tightfit.techniques.session import Session

NUM_BLOCKS = 4
MIB = 1 << 20
# Makes tokens with a model whose weights could all be trained; the model is gone when the script ends.
GENERATES = """
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden):
        return hidden + self.down(torch.relu(self.up(hidden)))


class Model(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.embedding = nn.Embedding(100, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 100)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = Model(512, 16).eval().to(device)
    tokens = torch.zeros(1, 4, dtype=torch.long, device=device)
    with torch.no_grad():
        for _ in range(3):
            logits = model(tokens)
            tokens = torch.cat([tokens, logits[:, -1:].argmax(-1)], 1)
    print(tokens.tolist(), float(logits.double().sum()))


main()
"""


def small() -> Decoder:
    torch.manual_seed(0)
    return Decoder(50, 16, NUM_BLOCKS, 2)


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 50, (2, 20), generator=torch.Generator().manual_seed(seed))


def streamed(model: nn.Module) -> Session:
    choices = [
        Choice(
            technique="weight_streaming",
            where=f"Decoder.blocks.{number}",
            settings={
                "preceding": "-1" if number else "",
                "following": "+1" if number + 1 < NUM_BLOCKS else "",
                "smallest_bytes": 1,
                "host_bytes": 1 << 15,
                "without_gradients": True,
            },
            saves_bytes=0,
            adds_seconds=0.0,
            exact=True,
        )
        for number in range(NUM_BLOCKS)
    ]
    return apply_choices(choices, model, [])


def predicted(model: nn.Module, seed: int = 0) -> torch.Tensor:
    with torch.no_grad():
        found = model(tokens(seed))
    assert isinstance(found, torch.Tensor)
    return found


def same(ones: Any, others: Any) -> bool:
    return len(ones) == len(others) and all(torch.equal(a, b) for a, b in zip(ones, others, strict=True))


def is_away(parameter: torch.Tensor) -> bool:
    """On the host there is one device: what is away lies in memory of the slab, which has a size of its own."""
    return not parameter.untyped_storage().resizable()


@pytest.fixture(scope="module")
def generating(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The script, and its plan for a card that has less than half of its weights."""
    folder = tmp_path_factory.mktemp("generating")
    script, saved = folder / "generate.py", folder / "plan.json"
    script.write_text(GENERATES)
    others = [name for name in techniques() if name != "weight_streaming"]
    plain = tightfit.estimate(str(script), "RTX 4090")
    num_weight_bytes = 16 * 2 * 4 * 512 * 512 * 4
    assert plain.peak.allocated_bytes > num_weight_bytes
    budget = plain.peak.device_high_bytes - num_weight_bytes * 6 // 10
    planned = tightfit.plan(str(script), "RTX 4090", budget=budget, without=others, host="1GiB", prove=False)
    assert planned.fits and planned.exact
    assert {choice.technique for choice in planned.choices} == {"weight_streaming"}
    assert planned.run.peak.allocated_bytes < num_weight_bytes // 2
    saved.write_text(json.dumps(planned.to_json()))
    return script, saved


def test_a_model_larger_than_the_card_generates_what_it_does_without_a_plan(generating: tuple[Path, Path]) -> None:
    script, saved = generating
    planned = forked_python("-m", "tightfit", "run", "--plan", str(saved), str(script))
    assert planned.returncode == 0, planned.stderr
    assert "on Model: weight_streaming of Model.blocks." in planned.stderr
    plain = forked_python(str(script), check=True)
    assert planned.stdout == plain.stdout != ""


def test_a_script_that_only_predicts_is_one_step(generating: tuple[Path, Path]) -> None:
    found = tightfit.estimate(str(generating[0]), "RTX 4090")
    assert len(found.to_json()["steps"]) == 1
    assert any("nothing is trained here" in assumption.what for assumption in found.assumptions)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_predictions_are_the_plain_ones_and_the_weights_are_away_between_them(mode: Callable[[], Any]) -> None:
    plain, model = small(), small()
    session = streamed(model)
    assert all(is_away(block.qkv.weight) for block in model.blocks)
    for seed in range(3):
        with mode():
            assert torch.equal(plain(tokens(seed)), model(tokens(seed)))
        assert all(is_away(block.qkv.weight) for block in model.blocks)
    assert session.statistics.get("weight bytes to the host", 0) == 0
    session.undo()
    assert same(list(plain.parameters()), list(model.parameters()))
    assert all(p.requires_grad for p in model.parameters())


def _loads(model: Decoder) -> None:
    model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})


def _decays(model: Decoder) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.9)
            parameter.data.add_(0.01)


def _halves_and_back(model: Decoder) -> None:
    model.double().float()


def _replaces(model: Decoder) -> None:
    model.blocks[1].qkv.weight = nn.Parameter(model.blocks[1].qkv.weight.detach() * 2)


def _trains(model: Decoder) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for seed in range(3):
        optimizer.zero_grad()
        model(tokens(seed)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()


def _trains_one_block(model: Decoder) -> None:
    model.requires_grad_(False)
    model.blocks[2].requires_grad_(True)
    _trains(model)


def _fails(model: Decoder) -> None:
    with torch.no_grad(), pytest.raises(RuntimeError, match="shape"):
        model.blocks[2](torch.zeros(1, 2, 3))


def _goes_through_blocks_again(model: Decoder) -> None:
    with torch.no_grad():
        hidden = model.embedding(tokens())
        for number in (3, 0, 0, 2, 3):
            hidden = model.blocks[number](hidden)
        model.blocks[0].qkv.weight.mul_(1.0 + float(hidden.mean()))


@pytest.mark.parametrize(
    "does",
    [_loads, _decays, _halves_and_back, _replaces, _trains, _trains_one_block, _fails, _goes_through_blocks_again],
)
def test_what_a_program_does_between_predictions_is_seen_by_the_next_ones(does: Callable[[Decoder], None]) -> None:
    plain, model = small(), small()
    session = streamed(model)
    for each in (plain, model):
        predicted(each)
        does(each)
    assert torch.equal(predicted(plain, 1), predicted(model, 1))
    assert same(list(plain.state_dict().values()), list(model.state_dict().values()))
    session.undo()
    assert same(list(plain.state_dict().values()), list(model.state_dict().values()))


def test_what_a_program_trains_after_all_stays_on_the_card() -> None:
    model = small()
    session = streamed(model)
    predicted(model)
    model(tokens()).backward()
    assert not any(is_away(block.qkv.weight) for block in model.blocks)
    assert all(p.grad is not None for p in model.parameters())
    session.undo()


def test_threads_that_predict_with_one_model_get_the_plain_results() -> None:
    plain, model = small(), small()
    session = streamed(model)
    expected, found = [predicted(plain, seed) for seed in range(8)], {}

    def predict(seeds: range) -> None:
        found.update({seed: predicted(model, seed) for seed in seeds})

    threads = [threading.Thread(target=predict, args=(range(begin, 8, 2),)) for begin in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert same(expected, [found[seed] for seed in range(8)])
    session.undo()


def test_a_copy_of_the_model_predicts_by_itself() -> None:
    plain, model = small(), small()
    session = streamed(model)
    other = copy.deepcopy(model)
    session.undo()
    del model
    assert torch.equal(predicted(plain), predicted(other))


def test_weights_that_were_made_in_inference_mode_are_refused() -> None:
    with torch.inference_mode():
        model = small()
    with pytest.raises(ApplyError, match=r"blocks\.0 has no weights that can be streamed"):
        streamed(model)


def test_choices_for_training_are_not_put_on_a_model_that_predicts() -> None:
    choice = Choice(
        technique="checkpointing", where="Decoder.blocks.0", settings={}, saves_bytes=0, adds_seconds=0.0, exact=True
    )
    model, attachment = small(), Attachment([choice])
    end = attachment.install()
    try:
        predicted(model)
    finally:
        end()
    assert not attachment.roots and "forward" not in vars(model.blocks[0])
