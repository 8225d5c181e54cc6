"""Programs that catch what they should not, or are interrupted: nothing may be trained wrongly behind a swallowed error."""

from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Images, Net, images, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn.utils import clip_grad_norm_


def _swallowing(
    t: Trial,
    model: nn.Module,
    *,
    num_steps: int = 5,
    batch: Callable[[int], Any] = tokens,
    between: Callable[[int], Any] = lambda _: None,
    whole: bool = True,
) -> None:
    """The plain loop with `except Exception` around a step, or around its update alone."""
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(num_steps):
        try:
            optimizer.zero_grad()
            loss = model(*batch(step))
            loss.backward()
            between(step)
            if whole:
                optimizer.step()
            t.note("loss", loss)
        except Exception as error:  # noqa: BLE001 - what the attack is about
            t.caught(error)
        if not whole:
            try:
                optimizer.step()
            except Exception as error:  # noqa: BLE001
                t.caught(error)
        t.end_step()


class Counting(Block):
    """Scales by the number of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens."""
        self.calls += 1
        return x + self.inner(x) / self.calls


@attack("exceptions", "except Exception around the step of a program whose blocks count their calls")
def swallowed_counter(t: Trial) -> None:
    _swallowing(t, Net([Counting(), Counting()]))


@attack("exceptions", "the same, and optimizer.step() outside of the try")
def swallowed_forward_then_step(t: Trial) -> None:
    _swallowing(t, Net([Counting(), Counting()]), whole=False)


@attack("exceptions", "except Exception around a step with blocks that mix tokens")
def swallowed_mixing(t: Trial) -> None:
    class Mixing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x - x.mean((0, 1)))

    _swallowing(t, Net([Mixing(), Mixing()]))


@attack("exceptions", "except Exception around a step whose gradients are clipped")
def swallowed_clipping(t: Trial) -> None:
    model = Net()
    _swallowing(t, model, between=lambda _: clip_grad_norm_(model.parameters(), 0.05))


@attack("exceptions", "except Exception around a step with accumulation")
def swallowed_accumulation(t: Trial) -> None:
    model = Net()
    _swallowing(t, model, between=lambda step: model(*tokens(step + 50)).backward())


@attack("exceptions", "except Exception around a step with batch norm in a chain")
def swallowed_images(t: Trial) -> None:
    model = Images([nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding=1)])
    _swallowing(t, model, batch=images)


class Failing(Block):
    """Raises in one of its calls."""

    def __init__(self, at: int, error: type[BaseException]) -> None:
        super().__init__()
        self.step, self.at, self.error = 0, at, error

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens, or an exception."""
        if self.step == self.at and torch._C._current_graph_task_id() == -1:
            raise self.error("in the forward")
        return x + self.inner(x)


@attack("exceptions", "a block raises in the forward of the third step; the loop goes on")
def raises_in_forward(t: Trial) -> None:
    model = Net([Block(), Failing(2, ValueError)])
    _failing_loop(t, model, ValueError)


@attack("exceptions", "a KeyboardInterrupt in the forward is caught, and training goes on")
def interrupted_in_forward(t: Trial) -> None:
    model = Net([Block(), Failing(2, KeyboardInterrupt)])
    _failing_loop(t, model, KeyboardInterrupt)


def _failing_loop(t: Trial, model: Net, error: type[BaseException]) -> None:
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        for block in model.blocks:
            block.step = step
        try:
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
        except error as caught:
            t.note("caught", type(caught).__name__)
        t.end_step()


class _Raising(torch.autograd.Function):
    raises = False

    @staticmethod
    def forward(_: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_: Any, *gradients: torch.Tensor) -> torch.Tensor:
        if _Raising.raises:
            raise ValueError("in the backward pass")
        return gradients[0]


@attack("exceptions", "the backward pass raises in the third step, in the middle; the loop goes on")
def raises_in_backward(t: Trial) -> None:
    class Fragile(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Raising.apply(x + self.inner(x))

    model = Net([Fragile(), Block()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        _Raising.raises = step == 2
        try:
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
        except ValueError as caught:
            t.note("caught", str(caught).splitlines()[0])
        t.end_step()


@attack("exceptions", "a parameter's hook raises in the backward pass; the loop goes on")
def raises_in_parameter_hook(t: Trial) -> None:
    model = Net()
    raising = [False]

    def hook(gradient: torch.Tensor) -> torch.Tensor:
        if raising[0]:
            raise ValueError("in a hook")
        return gradient

    model.stem.weight.register_hook(hook)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        raising[0] = step == 2
        try:
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
        except ValueError as caught:
            t.note("caught", str(caught))
        t.end_step()


@attack("exceptions", "a pre-step hook raises KeyboardInterrupt once; the loop catches it and goes on")
def interrupted_in_step(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    step = 0

    def hook(*_: Any) -> None:
        if step == 2:
            raise KeyboardInterrupt

    optimizer.register_step_pre_hook(hook)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        try:
            optimizer.step()
        except KeyboardInterrupt:
            t.note("interrupted", step)
        t.note("loss", loss)
        t.note("groups", [len(group["params"]) for group in optimizer.param_groups])
        t.end_step()


@attack("exceptions", "a post-step hook raises once, after the update; the loop goes on")
def raises_in_post_step_hook(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    step = 0

    def hook(*_: Any) -> None:
        if step == 2:
            raise ValueError("after the update")

    optimizer.register_step_post_hook(hook)
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        try:
            optimizer.step()
        except ValueError as caught:
            t.note("caught", str(caught))
        t.note("loss", loss)
        t.note("groups", [len(group["params"]) for group in optimizer.param_groups])
        t.end_step()


@attack("exceptions", "an out-of-memory error in the forward, and the batch halved (a rescue by hand)")
def rescued_by_halving(t: Trial) -> None:
    class Limited(Block):
        has_room = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.has_room:
                self.has_room = True
                raise torch.OutOfMemoryError("CUDA out of memory")
            return x + self.inner(x)

    model = Net([Block(), Limited()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        model.blocks[1].has_room = step != 2
        optimizer.zero_grad()
        x, y = tokens(step, batch=8)
        try:
            model(x, y).backward()
        except torch.OutOfMemoryError:
            optimizer.zero_grad()
            model(x[:4], y[:4]).backward()
        optimizer.step()
        t.end_step()


@attack("exceptions", "an exception in an evaluation under no_grad, swallowed")
def raises_in_evaluation(t: Trial) -> None:
    model = Net([Block(), Failing(2, ValueError)])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        model.blocks[1].step = 2
        try:
            with torch.no_grad():
                model(*tokens(step))
        except ValueError as caught:
            t.note("caught", str(caught))
        model.blocks[1].step = 0
        t.note("loss", loss)
        t.end_step()


@attack("exceptions", "a forward that is abandoned: its loss is never run backwards (a rejected batch)")
def abandoned_forward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        if step % 2:
            t.note("rejected", model(*tokens(step + 50)))
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("exceptions", "assertions of the program on p.grad after the backward pass")
def asserts_gradients(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        missing = [name for name, p in model.named_parameters() if p.grad is None]
        if missing:
            t.note("missing", missing)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("exceptions", "a NaN in the loss stops training by an exception of the program's own")
def stops_at_nan(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    try:
        for step in range(5):
            optimizer.zero_grad()
            x, y = tokens(step)
            loss = model(x * (float("nan") if step == 3 else 1.0), y)
            t.note("loss", loss)
            if not torch.isfinite(loss):
                raise ArithmeticError("loss is nan")
            loss.backward()
            optimizer.step()
            t.end_step()
    except ArithmeticError as error:
        t.note("stopped", str(error))
    t.note("norm", sum(float(p.detach().double().norm()) for p in model.parameters()) / WIDTH)
