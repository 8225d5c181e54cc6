"""Copies of models and optimizers that are made in the middle of a step, and trained on beside the first ones."""

import copy
import io
from typing import Any

import torch
from tests.attacks.models import Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial


def trained_on(t: Trial, model: Any, optimizer: Any, steps: range) -> None:
    """Notes what a copy becomes."""
    for step in steps:
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss of the copy", loss)
    t.note("copy", [p.detach().clone() for p in model.parameters()])


@attack(
    "changes", "model and optimizer are copied between forward and backward pass, and the copy is trained", only=EXACT
)
def copied_before_backward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        if step == 2:
            copied = copy.deepcopy((model, optimizer))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
    trained_on(t, *copied, range(2, 4))


@attack("changes", "the copy is made by a hook within the backward pass, when the head's gradient is there", only=EXACT)
def copied_within_backward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    copied: list[Any] = []

    def copies(_: torch.Tensor) -> None:
        copied[:] = copy.deepcopy((model, optimizer))

    for step in range(4):
        x, y = tokens(step)
        x.requires_grad_(step == 2)
        if step == 2:
            x.register_hook(copies)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
    trained_on(t, *copied, range(2, 4))


@attack(
    "changes",
    "the copy is made by a pre-hook of the optimizer's step, gradients and all, and stepped itself",
    only=EXACT,
)
def copied_by_step_hook(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    copied: list[Any] = []
    calls: list[int] = []

    def copies(*_: Any) -> None:
        calls.append(1)
        if len(calls) == 3:
            copied[:] = copy.deepcopy((model, optimizer))

    optimizer.register_step_pre_hook(copies)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
    copied[1].step()
    trained_on(t, *copied, range(3, 5))


@attack(
    "changes",
    "weights are saved and loaded into a new model by a forward hook of the first block, in the middle of the forward",
    only=EXACT,
)
def saved_within_forward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    other = Net()

    def saves(*_: Any) -> None:
        stored = io.BytesIO()
        torch.save(model.state_dict(), stored)
        stored.seek(0)
        other.load_state_dict(torch.load(stored))

    handle = model.stem.register_forward_hook(saves)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        with torch.no_grad():
            t.note("other", other(*tokens(90)))
        t.end_step()
    handle.remove()


@attack(
    "changes",
    "a closure copies the model before each of its calls, and the best copy's weights come back after the step",
    only=EXACT,
)
def best_of_closures(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.2, max_iter=3)
    t.apply(model, optimizer)
    for step in range(3):
        seen: list[tuple[float, Any]] = []

        def closure(step: int = step, seen: Any = seen) -> torch.Tensor:
            optimizer.zero_grad()
            kept = copy.deepcopy(model)
            loss = model(*tokens(step))
            loss.backward()
            seen.append((float(loss), kept))
            return loss

        optimizer.step(closure)
        model.load_state_dict(min(seen, key=lambda each: each[0])[1].state_dict())
        t.note("losses", [loss for loss, _ in seen])
        t.end_step()


@attack(
    "changes",
    "one block is copied in the middle of the forward, called instead of the block, and its gradients are added to the block's",
    only=EXACT,
)
def block_copied_within_forward(t: Trial) -> None:
    class Copying(Net):
        twin: Any = None

        def features(self, x: torch.Tensor) -> torch.Tensor:
            self.twin = [copy.deepcopy(self.blocks[1])]
            self.twin[0].zero_grad()
            return self.twin[0](self.blocks[0](self.stem(x)))

    model = Copying()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        for p, q in zip(model.blocks[1].parameters(), model.twin[0].parameters(), strict=True):
            p.grad = q.grad
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "moments are scaled through what state_dict() returns, which nobody keeps, after step 4", only=EXACT
)
def moments_through_dropped_dict(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def after(step: int) -> None:
        if step == 3:
            for state in optimizer.state_dict()["state"].values():
                state["exp_avg"].mul_(0.1)

    train(t, model, optimizer, num_steps=6, after=after)


@attack(
    "changes",
    "averaged weights are exchanged for the present ones between the passes (.data) and evaluated, while views of these are held",
)
def exchanged_between_passes(t: Trial) -> None:
    model = Net()
    average = copy.deepcopy(model)
    views = []

    def exchange() -> None:
        for p, q in zip(model.parameters(), average.parameters(), strict=True):
            p.data, q.data = q.data, p.data

    optimizer = sgd(model)
    t.apply(model, optimizer)
    if model.stem.weight.dtype != average.stem.weight.dtype:
        average.to(model.stem.weight.dtype)
    for step in range(3):
        loss = model(*tokens(step))
        if step == 1:
            views = [p.detach() for p in model.parameters()]
            exchange()
            with torch.no_grad():
                t.note("averaged", model(*tokens(50)))
            exchange()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.note("views", views)
        t.end_step()
