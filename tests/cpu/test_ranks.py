"""A script of one card on several ranks trains what it trains on one, or is refused: real processes, with gloo.

Weights and losses are compared within 2e-6 (sums over a batch are made in another order), those of the ranks with each other bit for bit.
"""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.cpu.ranks import (  # noqa: F401 - enter their programs
    accumulated,
    by_hand,
    handed_over,
    left_behind,
    other_arguments,
    other_weights,
    recomputed,
    refused,
    returned,
    sharded,
    streamed,
)
from tests.cpu.ranks.programs import PROGRAMS
from tests.forked_python import forked_python

from tightfit.cli.main import run

# What the programs that are not trained say.
REFUSED = {
    "dropout": "draws random numbers at programs.py",
    "batch_norm": "a batch norm in training takes its statistics from the whole batch",
    "batch_statistics_by_hand": "aten.mean.dim works along the rows at refused.py",
    "contrastive_inside": "it compares them with each other",
    "running_mean": "writes to a tensor from outside",
    "gradient_penalty": "create_graph=True",
    "measures_in_an_argument": "the model has put it into an argument",
    "outputs_written_past_autograd": "was modified without autograd seeing it",
    "scales_by_examples_later": "makes a tensor of other numbers",
    "decides_by_text": "takes different branches for different parts",
    "refusal_that_is_swallowed": "draws random numbers",
    "examples_in_the_second_dimension": "parts of the batch may not give the same result as the whole",
    "overwritten_batch": "writes to a tensor from outside",
    "one_example": "a batch of 1 cannot be divided over 2 ranks",
    "gradient_of_an_output_beside_the_loss": "the gradient of a model output other than the loss",
    "hook_on_an_output_beside_the_loss": "the gradient of a model output other than the loss",
    "steps_in_a_fork": "a process that the script has forked does what all ranks are to do together",
    "states_of_all_at_once": "LBFGS is not known to update each parameter independently",
    "exchanged_tensors": "exchanges tensors as a whole (torch.utils.swap_tensors)",
    "data_by_the_process": "the batch must be the same on all ranks, and rank 1",
    "weights_by_the_process": "the weights must be the same on all ranks",
    "rate_by_the_process": "the weights must be the same on all ranks",
    "rate_by_the_process_that_has_the_states": "the optimizer's settings (a learning rate) must be the same on all ranks, and rank 1",
    "targets_by_the_process": "what the loss makes of the model's outputs",
    "fewer_steps_on_one": "rank 0 is at a forward pass, rank 1 at the end of the script",
    "skips_a_step_on_one": "rank 0 is at a backward pass, rank 1 at a forward pass",
    "recomputed_with_a_buffer_that_changes": "Buffered.blocks.0 cannot be recomputed: since its forward "
    "Scaled.scale was written to",
    "recomputed_elsewhere": "the layout recomputes Blocks.blocks.7, which this Blocks does not have",
    "streamed_with_a_hook_on_a_weight": "those of streamed weights are summed at the host after the backward pass",
    "streamed_with_a_hook_after_a_gradient": "those of streamed weights are summed at the host after the backward pass",
    "streamed_with_gradients_by_name": "the program asks for the gradients of some tensors by name",
    "streamed_elsewhere": "the layout streams Blocks.blocks.7, which this Blocks does not have",
    "accumulated_with_its_loss_outside": "for which the model has to return its loss: the model returns no scalars (Tensor)",
    "accumulated_means_of_other_numbers": "their shares differ between parts of the batch",
    "accumulated_with_weights_that_change": "a weight was changed between forward and backward",
    "accumulated_within_a_checkpoint": "a checkpoint of the program's is around it",
    "view_of_an_argument_that_is_written": "the memory of another of its results or arguments",
    "view_of_a_result_that_is_written": "the memory of another of its results or arguments",
    "accumulated_view_that_is_written": "a view of another output or of an argument was modified in place",
    "hook_on_the_first_gradient": "a hook is called with the first gradient of several weights",
    "list_of_numbers_of_the_examples": "argument 1 has as many values as there are examples",
    "argument_by_the_process": "what the model is called with besides tensors must be the same on all ranks",
    "numbers_drawn_for_each_example": "Python's random was advanced, as often as there are rows",
    "mixes_by_a_drawn_number": "aten.roll.default works along the rows",
    "element_by_the_number_of_examples": "passes other numbers to aten.kthvalue.default",
    "last_position_of_the_examples": "aten.select.int depends on the number of rows",
    "scratch_of_the_batch": "have it write to no tensor of before",
    "mean_over_tokens_that_is_added_to": "add that to the loss outside of the model",
    "mean_over_no_tokens_of_one_part": "divide by sum.clamp(min=1)",
    "number_of_tokens_is_written_to": "divided by a number that was written to",
    "statistic_that_is_kept_and_read": "the program uses what ranks cannot put together: _Keeping.kept",
    "buffer_that_has_the_largest_of_the_batch": "aten.copy_.default writes to a tensor from outside at left_behind.py",
    "weight_that_was_made_before_the_forward": "a tensor computed before it (a weight made of other weights): compute that tensor within its forward",
    "number_of_examples_that_is_kept": "_Keeping.kept was made of the rows",
    "gradient_of_rows_that_are_kept": "the gradient of one of several results of the model",
    "gradient_that_the_model_asks_for": "ask for it outside of the model",
    "gradient_of_one_of_two_results": "the gradient of one of several results of the model",
    "attribute_of_a_result": "puts an attribute on a tensor that it returns",
    "error_on_one": "RankLost: another rank has ended",
}

_TRAINED = "test_it_is_trained_right_or_refused"

LAYOUT = {
    **{"dp": 2, "tp": 1, "pp": 1, "cp": 1, "ep": 1, "zero_stage": 0, "sharded_over": 2, "num_recomputed": 0},
    **{"accumulation": 1, "micro_batch": 8},
}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, str]:
    """Of the programs whose turn it is."""
    out = tmp_path_factory.mktemp("ranks") / "verdicts.json"
    tests = [item for item in request.session.items if isinstance(item, pytest.Function)]
    names = [each.callspec.params["name"] for each in tests if each.originalname == _TRAINED]
    if "loaded_on_two" in names:
        # Whose file it loads.
        names.append("saved_on_four")
    # The ranks of a program wait for each other, which takes a multiple on a machine that is busy.
    forked_python(
        *("-W", "ignore", "-m", "tests.cpu.ranks.driver", str(out), *names),
        env={"OMP_NUM_THREADS": "1"},
        check=True,
        timeout=600,
    )
    return json.loads(out.read_text())


@pytest.mark.by_turns(4)
@pytest.mark.parametrize("name", PROGRAMS)
def test_it_is_trained_right_or_refused(name: str, verdicts: dict[str, str]) -> None:
    if name in REFUSED:
        assert REFUSED[name] in verdicts[name]
    else:
        assert verdicts[name] == "same"


def test_five_architectures_and_more_are_trained() -> None:
    """A table that refuses everything would be right as well."""
    assert len(PROGRAMS) - len(REFUSED) >= 25
    assert set(REFUSED) <= set(PROGRAMS)


def test_ranks_end_with_one_that_is_killed(tmp_path: Path) -> None:
    """Files are those of the first rank, and of a run that sees what it writes; no seed is given, and numbers and sets are the same on both."""
    script = Path(__file__).parent / "ranks" / "checkpointing.py"
    plan = tmp_path.with_suffix(".json")
    told = {"layout": {**LAYOUT, "recompute": "full", "num_recomputed": 1}, "recomputed": ["Sequential.0"]}
    plan.write_text(json.dumps(told))
    words = ["run", "--gpus", "2", "--on", "cpu", "--plan", str(plan), str(script), "--", "out", "none.pt", "forever"]
    with subprocess.Popen(
        [sys.executable, "-m", "tightfit", *words],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as started:
        assert started.stdout is not None
        lines = [started.stdout.readline().strip() for _ in range(6)]
        assert lines == [*(f"step {n}" for n in range(5)), "saved"]
        saved = torch.load(tmp_path / "out" / "last.pt", weights_only=True)
        assert len(saved["optimizer"]["state"]) == 4
        names = ["best.pt", "last.pt", "log.txt", "newest", "out", "runs.db"]
        assert sorted(path.name for path in tmp_path.rglob("*")) == names
        assert len((tmp_path / "out" / "log.txt").read_text().splitlines()) == 5
        children = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
        assert len(children) == 2
        os.kill(int(children[1]), signal.SIGKILL)
        # A machine that stands still for a while is no fault: the launcher has ended both, or waits for ever.
        _, errors = started.communicate(timeout=600)
    assert started.returncode == 128 + signal.SIGKILL
    assert errors.splitlines()[-1] == "tightfit: rank 1 was killed (SIGKILL); the other ranks were ended with it"
    assert not any(Path(f"/proc/{child}").exists() for child in children)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"tp": 2}, "it is for dp2 x tp2"),
        ({"dp": 4}, "it is for dp4"),
        ({"zero_stage": 3}, "it shards weights and gradients"),
        ({"num_recomputed": 3, "recompute": "selective"}, "it recomputes parts of blocks"),
        ({"num_recomputed": 3, "recompute": "full"}, "does not say which 3 blocks"),
        ({"dp": "two"}, "has no layout"),
        ({"zero_stage": 1, "streams_weights": True}, "does not say which weights are streamed"),
        ({"zero_stage": 1, "streams_weights": True, "accumulation": 2}, "streams weights and accumulates"),
    ],
)
def test_layouts_that_are_not_run_name_the_export(
    changes: dict[str, int], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan, script = tmp_path / "layout.json", tmp_path / "train.py"
    plan.write_text(json.dumps({"layout": {**LAYOUT, **changes}, "device": "H100"}))
    script.write_text("")
    assert run(["run", str(script), "--gpus", "2", "--on", "cpu", "--plan", str(plan)]) == 2
    errors = capsys.readouterr().err
    assert said in errors
    assert "--export" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpus", "1"], "give 2 or more"),
        (["--on", "cpu"], "--on cpu goes with --gpus"),
        (["--gpus", "2", "--on", "cpu", "--guard"], "takes no --guard"),
        (["--gpus", "2", "--on", "cpu", "--budget", "3GiB"], "takes no --budget"),
        (["--gpus", "2", "--on", "cpu", "--allow", "pure_bf16"], "only --allow micro_batches"),
        (["--gpus", "2", "--on", "cpu", "--plan", "train.py"], "is no JSON file"),
    ],
)
def test_options_that_do_not_go_together(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text("import torch\n")
    monkeypatch.chdir(tmp_path)
    assert run(["run", "train.py", *words]) == 2
    assert said in capsys.readouterr().err
