"""The training scripts of tests/scripts are estimated as they are: unmodified, without arguments, on a machine without a card."""

import contextlib
import dataclasses
import functools
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tightfit.cli.main import run

# Many traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

SCRIPTS = Path(__file__).parents[1] / "scripts"

LSTM = 2048 * (256 + 512 + 2) + 2048 * (512 + 512 + 2)
GAN_GENERATOR = 16 * (100 * 512 + 512 * 256 + 256 * 128 + 128 * 64 + 64 * 3) + 2 * (512 + 256 + 128 + 64)
GAN_DISCRIMINATOR = 16 * (3 * 64 + 64 * 128 + 128 * 256 + 256 * 512 + 512) + 2 * (128 + 256 + 512)
NUM_CHARACTERS = 23  # in the text that sampling_rnn.py makes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What can be said of a script without running it; the parameters are counted by hand, of four bytes each."""

    num_parameters: int | None = None
    asides: tuple[str, ...] = ()
    said: tuple[str, ...] = ()
    has_state: bool = True


EXPECTED = {
    "accelerate_glue": Expected(),
    "accumulation_ema": Expected(),
    "clip_two_tower": Expected(),
    "detection": Expected(),
    "diffusion_unet": Expected(said=("gradients are assumed to be finite",)),
    "gan": Expected(num_parameters=GAN_GENERATOR + GAN_DISCRIMINATOR),
    "lightning_mnist": Expected(asides=("without gradients at",)),
    "manual_sgd": Expected(
        num_parameters=64 * 2048 + 2 * 2048 * 2048 + 2048 + 3 * 2048 + 1,
        said=("each backward pass is assumed to end a step",),
        has_state=False,
    ),
    "nanogpt_train": Expected(
        num_parameters=(50304 + 256 + 1) * 384 + 6 * (12 * 384 * 384 + 2 * 384),
        asides=("without gradients at",),
        said=("calls of GPT without gradients repeat themselves here",),
    ),
    "peft_lora": Expected(),
    "reinforce": Expected(),
    "run_clm": Expected(num_parameters=124_439_808),
    "sampling_rnn": Expected(num_parameters=NUM_CHARACTERS * 256 + LSTM + NUM_CHARACTERS * 513),
    "segmentation_unet": Expected(),
    "seq2seq_t5": Expected(num_parameters=60_506_624, has_state=False),
    "vit_amp": Expected(),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Done:
    """How a command ended."""

    returncode: int
    stdout: str
    stderr: str


# Of these, others are always tried: their libraries in the examples too.
SLOW = ("accelerate_glue", "accumulation_ema", "clip_two_tower", "detection", "run_clm", "segmentation_unet")
NAMES = [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in EXPECTED]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Done, Path]]:
    @functools.cache
    def estimated(name: str) -> tuple[Done, Path]:
        directory = tmp_path_factory.mktemp(name)
        stdout, stderr = io.StringIO(), io.StringIO()
        with contextlib.chdir(directory), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
            code = run(["estimate", str(SCRIPTS / f"{name}.py"), "--device", "RTX 4090", "--json"])
        return Done(returncode=code, stdout=stdout.getvalue(), stderr=stderr.getvalue()), directory

    return estimated


def answer(runs: Any, name: str) -> dict[str, Any]:
    done, _ = runs(name)
    assert done.returncode in (0, 1), done.stderr
    return json.loads(done.stdout)


def test_every_script_is_here() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == EXPECTED.keys()


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", NAMES)
def test_three_steps_are_estimated(runs: Any, name: str) -> None:
    said = answer(runs, name)
    assert len(said["steps"]) == 3
    first, second, third = (step["peak_allocated_bytes"] for step in said["steps"])
    assert first > 0
    assert second > 0.5 * first
    assert third > 0.5 * second
    assert said["fits"] == (runs(name)[0].returncode == 0)
    assert said["seconds_per_step"] > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_categories_are_sane(runs: Any, name: str) -> None:
    said = answer(runs, name)
    held, peak = said["at_peak"], said["peak"]
    assert all(num_bytes >= 0 for num_bytes in held.values())
    in_tensors = sum(num_bytes for category, num_bytes in held.items() if category not in ("cache", "context"))
    assert in_tensors + held["cache"] == peak["reserved_bytes"]
    assert held["parameters"] > 0
    expected = EXPECTED[name]
    if expected.num_parameters is not None:
        assert held["parameters"] == pytest.approx(4 * expected.num_parameters, rel=0.01)
    assert (held["optimizer_state"] > 0) == expected.has_state


@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_written(runs: Any, name: str) -> None:
    answer(runs, name)
    _, directory = runs(name)
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("name", [name for name, expected in EXPECTED.items() if expected.asides or expected.said])
def test_what_was_taken_for_granted_and_what_ran_aside_is_said(runs: Any, name: str) -> None:
    said = answer(runs, name)
    asides = [span["name"] for span in said["spans"] if span["kind"] == "aside"]
    for start in EXPECTED[name].asides:
        assert any(aside.startswith(start) and f"{name}.py:" in aside for aside in asides), asides
    for what in EXPECTED[name].said:
        assert any(what in assumption["what"] for assumption in said["assumptions"]), said["assumptions"]
