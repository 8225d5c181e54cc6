"""What a program does besides computing is on the tape of its plain run, with the user's line: what modules write, and who touches gradients."""

from pathlib import Path

import pytest

from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.tape import Effect, EffectKind, Tape
from tightfit.tape.verify import verify_tape

PROGRAM = """\
import random
import torch
from torch import nn

MOST = 0


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(16, 16)


class Clean(Block):
    cache = None

    def forward(self, x):
        if self.cache is None:
            self.cache = torch.ones(16, device="cuda")  # the first call alone
        return self.norm(torch.relu(self.inner(x)) * self.cache)

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(16)


class Counts(Block):
    calls = 0

    def forward(self, x):
        self.calls += 1  # line of Counts
        return self.inner(x)


class Draws(Block):
    def forward(self, x):
        return self.inner(x) * (2 if random.random() < 0.5 else 1)  # line of Draws


class Global(Block):
    def forward(self, x):
        global MOST
        MOST = MOST + x.shape[0]  # line of Global
        return self.inner(x)


class WritesWeight(Block):
    def forward(self, x):
        with torch.no_grad():
            self.inner.weight.clamp_(-1, 1)  # line of WritesWeight
        return self.inner(x)


class WritesInput(Block):
    def forward(self, x):
        x += 1  # line of WritesInput
        return self.inner(x)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        kinds = (Clean, Counts, Draws, Global, WritesWeight, Clean, WritesInput, Clean)
        self.parts = nn.ModuleList(kind() for kind in kinds)

    def forward(self, x):
        for part in self.parts:
            x = part(x)
            if isinstance(part, WritesInput):
                x.mul_(2)  # line of Net
        return x


def impure():
    model = Net().cuda()
    model.parts[3].register_forward_hook(lambda module, args, out: None)  # line of the hook
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(8, 16, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


def gradients():
    model, other = Counts().cuda(), Counts().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.register_step_post_hook(lambda *_: None)  # line of the step hook
    while True:
        x = torch.randn(8, 16, device="cuda", requires_grad=True)
        loss = model(x).sum()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)  # line of the penalty
        (loss + slope.norm()).backward()
        other(x).sum().backward()  # line of the other backward
        for p in model.parameters():
            if p.grad is not None:  # line of the reader
                pass
        optimizer.step()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.zero_()
        yield


def clipped():
    model = Clean().cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.randn(8, 16, device="cuda")).sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


def replaced():
    model = nn.Sequential(Block().inner, Counts()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        loss = model(torch.randn(8, 16, device="cuda")).sum()
        model[1].inner.weight.data = model[1].inner.weight.data.clone()
        loss.backward()  # line of the other weights
        optimizer.step()
        optimizer.zero_grad()
        yield


def binary():
    model = nn.Sequential(nn.BatchNorm1d(16), Block().inner, Counts()).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    weight = model[2].inner.weight
    while True:
        kept = weight.data.clone()
        weight.data.copy_(weight.data.sign())
        loss = model(torch.randn(8, 16, device="cuda")).sum()
        weight.data.copy_(kept)  # line of the weights that are put back
        loss.backward()
        optimizer.step()
        weight.data.clamp_(-1, 1)
        optimizer.zero_grad()
        yield
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("effects") / "program.py"
    path.write_text(PROGRAM)
    return path


def tape_of(file: Path, function: str) -> Tape:
    target = GeneratorFunction(location=str(file), function=function, parameters={})
    tape = trace(target, label=function, device="RTX 4090", with_effects=True).tape
    assert verify_tape(tape) == []
    return tape


def place(text: str) -> str:
    """The line of `PROGRAM` that has this at its end."""
    return str(next(n for n, line in enumerate(PROGRAM.splitlines(), 1) if line.endswith(f"# line of {text}")))


def seen(tape: Tape, module: str) -> set[tuple[EffectKind, str]]:
    """The kinds of effects of a module, with their lines' numbers."""
    return {(effect.kind, effect.line.rpartition(":")[2]) for effect in tape.effects if effect.module == module}


def test_modules_that_write_draw_or_call_hooks_are_known_with_the_line(file: Path, tmp_path: Path) -> None:
    tape = tape_of(file, "impure")
    # A cache of the first call and the statistics of a batch norm are no effects.
    assert seen(tape, "Net.parts.0") == set()
    assert seen(tape, "Net.parts.1") == {(EffectKind.WRITE, place("Counts"))}
    assert seen(tape, "Net.parts.2") == {(EffectKind.DRAW, place("Draws"))}
    assert seen(tape, "Net.parts.3") == {(EffectKind.WRITE, place("Global")), (EffectKind.HOOK, place("the hook"))}
    assert seen(tape, "Net.parts.4") == {(EffectKind.IN_PLACE, place("WritesWeight"))}
    assert (EffectKind.INPUT, place("WritesInput")) in seen(tape, "Net.parts.6")
    assert (EffectKind.OUTPUT, place("Net")) in seen(tape, "Net.parts.6")
    assert (EffectKind.OUTPUT, place("WritesInput")) in seen(tape, "Net.parts.5")
    tape.save(tmp_path / "tape.npz")
    assert Tape.load(tmp_path / "tape.npz").effects == tape.effects


def test_who_touches_gradients_besides_clipping_and_the_optimizer_is_known_with_the_line(file: Path) -> None:
    tape = tape_of(file, "gradients")
    assert seen(tape, "") == {
        (EffectKind.STEP_HOOK, place("the step hook")),
        (EffectKind.BACKWARD, place("the penalty")),
        (EffectKind.BACKWARD, place("the other backward")),
        (EffectKind.GRADIENT, place("the reader")),
    }
    assert (EffectKind.CREATE_GRAPH, place("the penalty")) in seen(tape, "Counts")
    assert (EffectKind.CREATE_GRAPH, place("the penalty")) in seen(tape, "Counts.inner")


def test_clipping_by_torch_is_no_reader_that_a_plan_does_not_know(file: Path) -> None:
    assert tape_of(file, "clipped").effects == ()


def test_weights_that_are_others_in_the_backward_pass_are_known(file: Path) -> None:
    tape = tape_of(file, "replaced")
    assert (EffectKind.REPLACED, place("the other weights")) in seen(tape, "Sequential.1")
    assert EffectKind.REPLACED not in {kind for kind, _ in seen(tape, "Sequential.0")}


def test_weights_that_are_written_past_their_versions_before_the_backward_pass_are_known(file: Path) -> None:
    tape = tape_of(file, "binary")
    assert (EffectKind.REPLACED, place("the weights that are put back")) in seen(tape, "Sequential.2")
    assert (EffectKind.REPLACED, place("the weights that are put back")) in seen(tape, "Sequential.2.inner")
    for module in ("Sequential.0", "Sequential.1"):
        assert EffectKind.REPLACED not in {kind for kind, _ in seen(tape, module)}


def test_an_effect_says_what_it_is() -> None:
    effect = Effect(module="Net.h.0", kind=EffectKind.WRITE, what="changes Net.calls", line="net.py:3")
    assert effect.reason == "changes Net.calls (net.py:3)"
