"""Models and optimizers that are copied, pickled, saved or loaded while a plan is on them."""

import copy
import functools
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.programs.later import changed
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack("changes", "model and optimizer are deep-copied in the middle, and the copy is trained")
def copied_and_trained(t: Trial) -> None:
    _goes_on_with(t, lambda model, optimizer: copy.deepcopy((model, optimizer)))


@attack("changes", "model and optimizer are pickled in the middle, and what is read is trained")
def pickled_and_trained(t: Trial) -> None:
    _goes_on_with(t, lambda model, optimizer: pickle.loads(pickle.dumps((model, optimizer))))


@attack("changes", "model and optimizer are saved whole with torch.save, and what is loaded is trained")
def saved_whole_and_trained(t: Trial) -> None:
    def through_file(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
        file = io.BytesIO()
        torch.save({"model": model, "optimizer": optimizer}, file)
        file.seek(0)
        loaded = torch.load(file, weights_only=False)
        return loaded["model"], loaded["optimizer"]

    _goes_on_with(t, through_file)


def _halved(block: Block, x: torch.Tensor) -> torch.Tensor:
    return x + 0.5 * block.inner(x)


class _Louder:
    """Around a forward."""

    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        self.forward = forward

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.forward(x) * 1.2


@attack(
    "changes",
    "blocks whose forwards the program has set (a partial, an object around it) are copied, then pickled",
    only=EXACT,
)
def own_forwards_copied(t: Trial) -> None:
    model = Net()
    for block, wrap in zip(model.blocks, (functools.partial(_halved, model.blocks[0]), None), strict=True):
        block.forward = wrap or _Louder(block.forward)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        if step:
            model = pickle.loads(pickle.dumps(model)) if step == 2 else copy.deepcopy(model)
            optimizer = sgd(model)
            t.track(model)
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "a copy of the model gets an optimizer of its own and is trained beside the first")
def copy_with_own_optimizer(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    other = copy.deepcopy(model)
    t.track(other)
    of_other = sgd(other)
    for step in range(3):
        for each, stepped in ((model, optimizer), (other, of_other)):
            stepped.zero_grad()
            loss = each(*tokens(step + 10 * (each is other)))
            loss.backward()
            stepped.step()
            t.note("loss", loss)
        t.end_step()


@attack("changes", "the model is copied, the first one dropped, and the copy trained with a new optimizer")
def copied_and_first_dropped(t: Trial) -> None:
    _goes_on_with(t, lambda model, _: (other := copy.deepcopy(model), adamw(other)))


def _goes_on_with(t: Trial, through: Callable[[nn.Module, torch.optim.Optimizer], Any]) -> None:
    model: nn.Module = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        if step == 2:
            model, optimizer = through(model, optimizer)
            t.track(model)
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "load_state_dict(assign=True) puts other tensors in the place of the parameters")
def loaded_by_assignment(t: Trial) -> None:
    model = Net()

    def change() -> None:
        saved = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(saved, assign=True)

    changed(t, model, change)


@attack("changes", "load_state_dict of other weights in place (a population, a rollback)")
def rolled_back(t: Trial) -> None:
    model = Net()
    first = copy.deepcopy(model.state_dict())
    changed(t, model, lambda: model.load_state_dict({n: v.to(model.state_dict()[n].dtype) for n, v in first.items()}))


@attack("changes", "an average of the model (deepcopy, EMA) is evaluated after every step")
def average_evaluated(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    average = copy.deepcopy(model).eval().requires_grad_(False)

    def update(step: int) -> None:
        with torch.no_grad():
            for kept, parameter in zip(average.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter.to(kept.dtype), 0.2)
            t.note("average", average(*tokens(step + 50)))

    train(t, model, optimizer, after=update, applied=True)


@attack("changes", "a momentum encoder (deepcopy before the plan) gives targets in every step")
def momentum_encoder(t: Trial) -> None:
    model = Net()
    teacher = copy.deepcopy(model)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, _ = tokens(step)
        with torch.no_grad():
            target = teacher(x)
        optimizer.zero_grad()
        loss = functional.mse_loss(model(x + 0.1), target + 1)
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            for kept, parameter in zip(teacher.parameters(), model.parameters(), strict=True):
                kept.lerp_(parameter.to(kept.dtype), 0.1)
        t.note("loss", loss)
        t.end_step()
