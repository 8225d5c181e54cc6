"""Running a module twice: its buffers change once, and neither a copy of it nor what is around it keeps the other alive."""

import copy
import gc
import random
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from tightfit import fit
from tightfit import plan as find_plan
from tightfit.analysis.profile import Profile
from tightfit.devices.catalogue import find
from tightfit.effects.values.saved_hooks import top_saved_hooks
from tightfit.planner.option import merged
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.recomputation.checkpointing import Checkpointing
from tightfit.techniques.session import Session

torch.set_num_threads(1)


class Net(nn.Module):
    """Two blocks with a batch norm each."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2), nn.ReLU()) for _ in range(2)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            images = block(images)
        return images


def checkpointed(model: nn.Module) -> Session:
    choices = [
        Choice(
            technique="checkpointing",
            where=f"Net.blocks.{i}",
            settings={},
            saves_bytes=0,
            adds_seconds=0.0,
            exact=True,
        )
        for i in range(2)
    ]
    return apply_choices(choices, model, [])


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    model(torch.randn(2, 2, 4, 4, generator=torch.Generator().manual_seed(1))).square().sum().backward()
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_running_statistics_change_once_a_step() -> None:
    plain, model = Net(), Net()
    checkpointed(model)
    torch.testing.assert_close(step(model), step(plain), rtol=0, atol=0)


def test_a_copy_is_run_twice_by_itself_and_leaves_the_original_alone() -> None:
    model = Net()
    checkpointed(model)
    step(model)
    expected = Net()
    step(expected)
    other, before = copy.deepcopy(model), {name: value.clone() for name, value in model.state_dict().items()}
    torch.testing.assert_close(step(other), step(expected), rtol=0, atol=0)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


def test_a_model_that_is_dropped_is_gone_at_once() -> None:
    gc.disable()
    try:
        model = Net()
        checkpointed(model)
        gone = weakref.ref(model.blocks[0])
        del model
        assert gone() is None
    finally:
        gc.enable()


POLICY = """
import torch
from torch import nn


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(8, 1 << 18), nn.Linear(1 << 18, 2)

    def forward(self, state):
        return self.last(self.first(state).tanh().sigmoid())


def workload():
    policy = Policy().cuda()
    optimizer = torch.optim.SGD(policy.parameters(), lr=0.1)
    state = torch.randn(1, 8, device="cuda")
    while True:
        sum(policy(state).logsumexp(-1).sum() for _ in range(40)).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield
"""


def test_a_model_that_is_called_in_a_loop_may_be_run_twice_itself(tmp_path: Path) -> None:
    (tmp_path / "policy.py").write_text(POLICY)
    target = f"{tmp_path / 'policy.py'}:workload"
    tape = fit.capture(target, device="RTX 4090")
    (option,) = Checkpointing().options(Profile(tape, find("RTX 4090")))
    assert option.where == "Policy"
    # 40 calls leave a MiB twice each, one of which counts as an output; what they leave is back for one call at a time.
    assert max(-change.num_bytes for change in merged(option.changes)) > 38 << 20
    found = find_plan(target, device="RTX 4090", budget="1MiB")
    # Whole, or but for the few numbers that its last layer returns.
    recomputed = [choice.where for choice in found.choices if choice.technique.endswith("checkpointing")]
    assert recomputed == ["Policy"]
    assert found.run.peak.allocated_bytes < found.baseline.peak.allocated_bytes - (60 << 20)


class Late(nn.Module):
    """Writes in place to a tensor that is no buffer, and to statistics under other names than torch's, from its fifth call on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.calls = 0
        self.scale = torch.ones(1)
        self.register_buffer("mean", torch.zeros(2))
        self.register_buffer("variance", torch.ones(2))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 4:
            self.scale.mul_(1.1)
        rows = nn.functional.batch_norm(self.linear(rows), self.mean, self.variance, training=self.calls > 4)
        return rows.tanh() * self.scale.clone()


def test_what_a_forward_begins_to_write_after_the_first_steps_is_written_once() -> None:
    def trained(*, twice: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Late(), Late())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        places = [f"Sequential.{number}" for number in range(2)] if twice else []
        choices = [
            Choice(technique="checkpointing", where=where, settings={}, saves_bytes=0, adds_seconds=0.0, exact=True)
            for where in places
        ]
        with apply_choices(choices, model, [optimizer]):
            for step in range(8):
                model(torch.randn(4, 2, generator=torch.Generator().manual_seed(step))).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return [*model.state_dict().values(), *(part.scale for part in model), torch.tensor(model[0].calls)]

    torch.testing.assert_close(trained(twice=True), trained(twice=False), rtol=0, atol=0)


class Counting(nn.Linear):
    """Counts its calls, in an attribute and with Python's random state."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x) * (1 + self.calls * random.random())


def test_state_that_was_set_back_before_the_backward_pass_is_as_it_was_after_it() -> None:
    model = Net()
    model.blocks = nn.ModuleList(Counting(4, 4) for _ in range(2))
    random.seed(0)
    drawn = [random.random() for _ in range(3)]
    session = checkpointed(model)
    for _ in range(4):
        random.seed(0)
        loss = model(torch.ones(2, 4)).sum()
        random.seed(0)
        for block in model.blocks:
            block.calls = 0
        loss.backward()
        assert [block.calls for block in model.blocks] == [0, 0]
        assert random.random() == drawn[0]
    session.undo()


class Failing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.fails = nn.Linear(4, 4), False

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise ValueError("too large")
        return self.linear(rows).tanh()


def test_a_forward_that_raises_leaves_no_hooks() -> None:
    model = nn.Sequential(Failing(), Failing())
    choice = Choice(
        technique="checkpointing", where="Sequential.1", settings={}, saves_bytes=0, adds_seconds=0.0, exact=True
    )
    session = apply_choices([choice], model, [])
    model[1].fails = True
    with pytest.raises(ValueError, match="too large") as kept:
        model(torch.ones(2, 4))
    assert top_saved_hooks() is None
    model[1].fails = False
    model(torch.ones(2, 4)).sum().backward()
    assert kept.value.args == ("too large",)
    session.undo()
