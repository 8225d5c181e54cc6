"""The same workload, run for real on the CPU and traced on the virtual GPU, asks for the same storages in the same order.

What differs on a card is then only what is listed as a rule of CUDA (docs/how-it-works/cuda-rules.md).
"""

import json
from pathlib import Path

import pytest
from tests.forked_python import forked_python

FOLDER = Path(__file__).parent / "consistency"


@pytest.fixture(scope="module")
def events():
    def run(how: str) -> dict[str, list[int]]:
        done = forked_python("worker.py", how, cwd=FOLDER, check=True)
        return json.loads(done.stdout)

    return run("real"), run("virtual")


@pytest.mark.parametrize(
    "model",
    [
        "perceptron",
        "convolutional",
        "attention",
        "checkpointed",
        "embedding_tied",
        "residual_groups",
        "accumulated_and_clipped",
        "custom_function",
        "experts",
        "indexing_and_sorting",
    ],
)
def test_births_and_deaths_are_the_same_byte_for_byte(events, model):
    real, virtual = events
    assert len(real[model]) > 20
    assert virtual[model] == real[model]


def test_every_model_is_compared(events):
    assert events[0].keys() == events[1].keys()
    assert len(events[0]) == 10
