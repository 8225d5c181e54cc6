"""An optimizer that is handed a closure runs the user's forward and backward pass inside its step: they are what they are outside of it."""

from pathlib import Path

import numpy as np
import pytest

from tightfit.capture.targets.target_kinds import GeneratorFunction, Script
from tightfit.capture.trace import trace
from tightfit.cost.steps import step_operators
from tightfit.tape import Category, Phase, SpanKind, Tape

WORKLOAD = """
import torch


class Derived(torch.optim.SGD):
    def step(self, closure=None):
        return super().step(closure)


def closures(kind):
    torch.optim.SGD([torch.ones(1)]).step()  # a first stage; and now the step of the base class is watched, too
    model = torch.nn.Sequential(torch.nn.Linear(64, 4096), torch.nn.GELU(), torch.nn.Linear(4096, 64)).cuda()
    optimizer = {
        "adamw": lambda: torch.optim.AdamW(model.parameters(), fused=True),
        "lbfgs": lambda: torch.optim.LBFGS(model.parameters(), max_iter=3),
        "derived": lambda: Derived(model.parameters(), lr=0.1),
    }[kind]()
    data = torch.ones(32, 64, device="cuda")

    def closure():
        optimizer.zero_grad()
        loss = model(data).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return loss

    while True:
        optimizer.step(closure)
        yield


if __name__ == "__main__":
    import sys

    for _ in closures(sys.argv[1]):
        pass
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("closures") / "workload.py"
    path.write_text(WORKLOAD)
    return path


def tape_of(file: Path, kind: str) -> Tape:
    target = GeneratorFunction(location=str(file), function="closures", parameters={"kind": kind})
    return trace(target, label=kind, device="RTX 4090", num_steps=2).tape


def phases_of(tape: Tape, name: str) -> set[Phase]:
    chosen = tape.operators.name == tape.strings.index(name)
    return {Phase(phase) for phase in tape.operators.phase[chosen]}


@pytest.mark.parametrize("kind", ["adamw", "lbfgs"])
def test_each_pass_has_its_own_phase(file, kind):
    tape = tape_of(file, kind)
    assert phases_of(tape, "aten.gelu") == {Phase.FORWARD}
    assert phases_of(tape, "aten.addmm") == {Phase.FORWARD}
    assert phases_of(tape, "aten.gelu_backward") == {Phase.BACKWARD}
    update = "aten._fused_adamw_" if kind == "adamw" else "aten.cat"
    assert phases_of(tape, update) == {Phase.OPTIMIZER}
    assert phases_of(tape, "aten._foreach_norm.Scalar") == {Phase.OTHER}  # clipping, which is the user's own


def test_what_waits_for_the_backward_pass_is_an_activation(file):
    tape = tape_of(file, "adamw")
    operators = tape.storages.operator
    born_in_gelu = tape.operators.name[operators] == tape.strings.index("aten.gelu")
    assert born_in_gelu.any()
    assert set(tape.storages.category[born_in_gelu]) == {Category.ACTIVATIONS}
    kinds = tape.storages.category
    assert (kinds == Category.GRADIENTS).any()
    assert (kinds == Category.OPTIMIZER_STATE).any()


@pytest.mark.parametrize(("kind", "update"), [("adamw", "aten._fused_adamw_"), ("derived", "aten._foreach_add_.List")])
def test_a_script_whose_optimizer_takes_a_closure_ends_its_steps_with_the_update(file, kind, update):
    tape = trace(Script(path=str(file), arguments=(kind,)), label="script", device="RTX 4090", num_steps=3).tape
    assert np.count_nonzero(tape.spans.kind == SpanKind.STEP) == 3
    last = tape.operators.name == tape.strings.index(update)
    steps = [last[begin:end].sum() for begin, end in step_operators(tape)]
    # The first is that of the first stage, whose optimizer is gone after it: no later step waits for it.
    assert steps == [0, 1, 1]
