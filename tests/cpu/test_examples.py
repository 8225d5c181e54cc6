"""The examples are estimated as they are, run, and say what their own first lines promise."""

import contextlib
import io
import json
import re
from pathlib import Path

import pytest
from tests.forked_python import forked_python

from tightfit.cli.main import run

# Many processes and traces, of which each commit tries a half.
pytestmark = pytest.mark.by_turns(2)

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "train_gpt2": "--batch-size 1 --sequence-length 64 --steps 3",
    "train_resnet": "",
    "trainer_llama": "--hidden-size 128 --num-layers 2 --batch-size 2 --sequence-length 64 --steps 3",
    "lightning_vit": "--image-size 32 --width 64 --depth 2 --batch-size 4 --steps 3",
    "accelerate_t5": "--width 64 --num-layers 2 --batch-size 2 --sequence-length 32 --steps 3",
    "diffusion_unet": "--resolution 16 --channels 32 --batch-size 2 --steps 3",
}


def test_every_example_is_tried_here() -> None:
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SMALL, "out_of_memory"}


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", [name for name in SMALL if name != "train_resnet"])
def test_an_example_is_estimated_without_a_card(name: str, tmp_path: Path) -> None:
    stdout, stderr = io.StringIO(), io.StringIO()
    command = ["estimate", str(EXAMPLES / f"{name}.py"), "--device", "RTX 4090", "--json", "--", *SMALL[name].split()]
    with contextlib.chdir(tmp_path), contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
        code = run(command)
    assert code == 0, stderr.getvalue()
    answer = json.loads(stdout.getvalue())
    assert answer["fits"] is True
    assert answer["at_peak"]["parameters"] > 0 and answer["at_peak"]["optimizer_state"] > 0
    assert len(answer["steps"]) == 3
    assert not list(tmp_path.iterdir())


def test_a_post_mortem_names_the_line_that_keeps_the_graphs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = tmp_path / "x.pickle"
    done = forked_python(str(EXAMPLES / "out_of_memory.py"), "--output", str(recording))
    assert done.returncode == 0, done.stderr
    assert run(["doctor", str(recording)]) == 0
    said = capsys.readouterr().out
    # The line of the forward pass, whose activations every step leaves behind.
    assert re.search(r"out_of_memory\.py:3\d", said), said
    assert "grow" in said
