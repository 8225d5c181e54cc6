"""Where the steps of programs end whose optimizers hold others, which step in their place, or step in hooks of the backward pass."""

import itertools
from pathlib import Path

import pytest

import tightfit

HELD_BYTES = 1 << 20
PRELUDE = f"""
import torch
model = torch.nn.Linear(512, 512).cuda()
held = []
def backward():
    model.zero_grad()
    model(torch.randn(4, 512, device="cuda")).sum().backward()
    held.append(torch.empty({HELD_BYTES}, dtype=torch.int8, device="cuda"))
"""
PROGRAMS = {
    "one that holds another": """
class Averaged(torch.optim.Optimizer):
    def __init__(self, inner):
        super().__init__(inner.param_groups, {})
        self.inner = inner
    def second_step(self):
        self.inner.step()
optimizer = Averaged(torch.optim.SGD(model.parameters(), 0.1))
for turn in range(20):
    backward()
    optimizer.second_step()
""",
    "one that holds a list": """
class Both(torch.optim.Optimizer):
    def __init__(self, *inner):
        super().__init__(model.parameters(), {})
        self.inner = inner
optimizer = Both(torch.optim.SGD([model.weight], 0.1), torch.optim.SGD([model.bias], 0.1))
for turn in range(20):
    backward()
    for inner in optimizer.inner:
        inner.step()
""",
    "one that is made anew in each turn and never steps": """
optimizer = torch.optim.Adam(model.parameters(), 0.1)
for turn in range(5):
    inner = torch.optim.SGD(model.parameters(), 0.1)
    backward()
    optimizer.step()
""",
    "weights that are no leaves, and warnings that are errors": """
import warnings
warnings.simplefilter("error")
optimizer = torch.optim.SGD(list(model.parameters()), 0.1)
weights = dict(model.named_parameters())
for turn in range(5):
    model._parameters.update({name: weight * 2 for name, weight in weights.items()})
    model(torch.randn(4, 512, device="cuda")).sum().backward()
    held.append(torch.empty(1 << 20, dtype=torch.int8, device="cuda"))
    optimizer.step()
    optimizer.zero_grad()
""",
    # The last step ends in a thread of torch's, in which no handler of a signal can be set.
    "one for each weight, in hooks": """
optimizers = {weight: torch.optim.SGD([weight], 0.1) for weight in model.parameters()}
def update(weight):
    optimizers[weight].step()
    optimizers[weight].zero_grad()
for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(update)
for turn in range(20):
    backward()
""",
}


@pytest.mark.parametrize("kind", PROGRAMS)
def test_a_turn_is_a_step_with(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    path.write_text(PRELUDE + PROGRAMS[kind])
    found = tightfit.estimate(str(path), "RTX 4090")
    ends = [span.end_allocated_bytes for span in found.spans if span.kind == "step"]
    assert [after - before for before, after in itertools.pairwise(ends)] == [HELD_BYTES, HELD_BYTES]


def test_a_program_that_ends_while_it_waits_for_an_optimizer_is_one_step(tmp_path: Path) -> None:
    path = tmp_path / "train.py"
    turns = "".join(f"    {line}\n" for line in ["backward()", "optimizer.step()"] * 3)
    path.write_text(
        f"{PRELUDE}\ndef main():\n    optimizer, _never = (torch.optim.SGD(model.parameters(), 0.1) for _ in range(2))\n{turns}main()\n"
    )
    found = tightfit.estimate(str(path), "RTX 4090")
    assert [span.name for span in found.spans if span.kind == "step"] == ["step 1"]
    assert any("never steps" in assumption.what for assumption in found.assumptions)
