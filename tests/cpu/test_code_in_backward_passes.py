"""Programs that run code of their own within a backward pass, beside updates that are made in a second backward pass: statistics and random numbers are the plain run's."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tightfit.effects.bytecode.asked_of_saved import called
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import Session
from tightfit.torch_hooks.saved_tensor_hooks import given_to_checkpoint, packs_by_itself, programs_hooks


class Block(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.inner = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8) if kind == "norm" else nn.Identity()
        self.calls, self.log = 0, list[float]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        drawn = torch.rand(1) if self.kind == "draws" else torch.zeros(1)
        if self.kind == "counts":
            self.calls += 1
            self.log.append(float(x.detach().sum()))
            x = x * (1.0 + 0.01 * self.calls)
        if self.kind == "numpy":
            drawn = torch.tensor([np.random.random()], dtype=torch.float32)
        y = self.norm(self.inner(x))
        if self.kind == "drops":
            y = nn.functional.dropout(y, 0.5, training=True)
        return x + torch.relu(y) + 0.0 * drawn


class CallsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x)
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.no_grad():
            ctx.block(x)
        return None, gradients[0] * (1.0 + torch.rand(()))


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.last = nn.Linear(8, 2)
        # One element at five places, which torch does not write to.
        self.register_buffer("scale", torch.ones(()).expand(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            if self.kind == "function":
                x = block(CallsInBackward.apply(block, x))
            else:
                x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=self.kind == "norm")
        return self.last(x)


def chosen(technique: str, where: str, **settings: object) -> Choice:
    return Choice(technique=technique, where=where, saves_bytes=0, adds_seconds=0.0, exact=True, settings=settings)


def in_backward(*, clips: bool) -> Choice:
    return chosen("update_in_backward", "optimizer", kernel="same", clips=clips)


def trained(kind: str, *, clips: bool | None) -> list[torch.Tensor]:
    return trained_with(kind, *([] if clips is None else [in_backward(clips=clips)]))[0]


def trained_with(kind: str, *choices: Choice) -> tuple[list[torch.Tensor], Session | None]:
    torch.manual_seed(0)
    model = Net(kind)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    session = apply_choices(list(choices), model, [optimizer]) if choices else None
    for _ in range(5):
        optimizer.zero_grad()
        model(torch.randn(5, 4)).square().mean().backward()
        optimizer.step()
    if session is not None:
        session.undo()
    counted = torch.tensor([[block.calls, len(block.log), sum(block.log)] for block in model.blocks])
    state = (*model.parameters(), *model.buffers(), torch.get_rng_state(), torch.tensor(np.random.random()), counted)
    return [t.detach().clone() for t in state], session


@pytest.fixture(autouse=True)
def own_generator() -> Iterator[None]:
    """numpy's generator as it was, whatever kind a test has set."""
    before = np.random.get_bit_generator()
    yield
    np.random.set_bit_generator(before)


@pytest.mark.parametrize("generator", [np.random.MT19937, np.random.PCG64])
def test_what_numpy_draws_in_a_backward_pass_is_drawn_once(generator: type[np.random.BitGenerator]) -> None:
    def drawn(*, clips: bool | None) -> list[torch.Tensor]:
        np.random.set_bit_generator(generator(3))
        return trained("numpy", clips=clips)

    plain, planned = drawn(clips=None), drawn(clips=False)
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))


@pytest.mark.parametrize("kind", ["norm", "draws", "drops", "function", "counts"])
def test_a_second_backward_pass_leaves_no_trace(kind: str) -> None:
    np.random.seed(0)
    plain = trained(kind, clips=None)
    np.random.seed(0)
    planned = trained(kind, clips=False)
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))


def test_parameters_are_updated_in_the_second_pass_of_a_program_that_checkpoints_by_itself() -> None:
    _, session = trained_with("counts", in_backward(clips=False))
    assert session is not None
    assert session.statistics["parameters updated in backward"] == 5 * 8
    assert session.notes == []


def test_gradients_are_kept_where_the_context_of_a_function_has_a_module() -> None:
    _, session = trained_with("function", in_backward(clips=False))
    assert session is not None
    assert session.statistics["backward passes with all gradients kept"] == 5
    assert "can reach code" in session.notes[0]


@pytest.mark.parametrize("kind", ["norm", "draws", "drops", "counts"])
def test_a_block_that_the_program_checkpoints_is_left_as_it_is(kind: str) -> None:
    np.random.seed(0)
    plain, _ = trained_with(kind)
    np.random.seed(0)
    planned, _ = trained_with(kind, *(chosen("checkpointing", f"Net.blocks.{number}") for number in range(2)))
    assert all(torch.equal(one, other) for one, other in zip(plain, planned, strict=True))


def test_hooks_are_told_apart() -> None:
    assert programs_hooks() is None
    seen: list[bool] = []

    def note(x: torch.Tensor) -> torch.Tensor:
        seen.append(packs_by_itself())
        return x.sin()

    x = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.save_on_cpu():
        assert programs_hooks() is not None
        note(x)
    checkpoint(note, x, use_reentrant=False)
    assert seen == [False, False]
    with torch.autograd.graph.saved_tensors_hooks(lambda saved: saved, lambda saved: saved):
        note(x)
    assert seen[-1]


def test_the_function_of_a_checkpoint_is_found() -> None:
    x, log = torch.ones(3, requires_grad=True), list[int]()
    hooks = []

    def run(x: torch.Tensor, log: list[int], *, scale: float) -> torch.Tensor:
        hooks.append(programs_hooks())
        log.append(1)
        return (scale * x).sin()

    checkpoint(run, x, log, use_reentrant=False, scale=2.0)
    given = given_to_checkpoint(hooks[0][1])
    assert given is not None
    assert given["function"] is run
    assert given["args"][1] is log
    assert given["kwargs"] == {"scale": 2.0}
    assert given_to_checkpoint(lambda packed: packed) is None


def test_functions_that_are_written_alike_call_the_functions_of_their_own_files() -> None:
    """Their code is equal, whatever file it is of; the second helper was not looked into."""

    def made(answer: str) -> Any:
        space: dict[str, Any] = {}
        source = f"def check(x): return {answer}\ndef helper(x): return check(x)"
        exec(compile(source, f"/program/{len(answer)}/helpers.py", "exec"), space)
        return space["helper"]

    names = {"one": made("x"), "other": made("x is None")}
    exec(compile("def outer(x): return one(x), other(x)", "/program/main.py", "exec"), names)
    found = [function.__code__ for function, _ in called(names["outer"])]
    checks = [code.co_filename for code in found if code.co_name == "check"]
    assert sorted(checks) == ["/program/1/helpers.py", "/program/9/helpers.py"]
