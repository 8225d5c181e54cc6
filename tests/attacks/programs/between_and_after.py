"""What happens between a backward pass and its step, or to what a forward has returned, seldom or only once training is under way."""

import contextlib
import copy
import gc
import math
from typing import Any

import numpy as np
import torch
from tests.attacks.models import (
    BATCH,
    NUM_CLASSES,
    TOKENS,
    WIDTH,
    Block,
    Images,
    Net,
    adamw,
    images,
    sgd,
    tokens,
    train,
)
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Answering(Net):
    """Returns loss and logits, as models of Hugging Face do."""

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> Any:
        """The loss and the logits."""
        assert y is not None
        logits = self.head(self.features(x))
        return self.loss(logits, y), logits


def _answered(t: Trial, ask: Any, read: Any = lambda *_: None) -> None:
    """Trains with `ask(loss, logits)` before the backward pass and `read(t, logits)` after it."""
    model = _Answering()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss, logits = model(*tokens(step))
        t.note("loss", loss)
        loss = ask(loss, logits)
        optimizer.zero_grad()
        loss.backward()
        read(t, logits)
        optimizer.step()
        t.end_step()


@attack("parts", "a model returns loss and logits, and the loop hooks the logits before the backward pass")
def returned_logits_hooked(t: Trial) -> None:
    def ask(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits.register_hook(lambda g: g * 0.5)
        return loss

    _answered(t, ask)


@attack("parts", "a model returns loss and logits, and the loop has the logits keep their gradient")
def returned_logits_retained(t: Trial) -> None:
    def ask(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        logits.retain_grad()
        return loss

    _answered(t, ask, lambda t, logits: t.note("gradient", logits.grad))


@attack("parts", "a model returns loss and logits, and the gradient of the one with respect to the other is logged")
def returned_logits_differentiated(t: Trial) -> None:
    def ask(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        t.note("gradient", torch.autograd.grad(loss, logits, retain_graph=True)[0])
        return loss

    _answered(t, ask)


@attack("parts", "a model returns loss and logits, and the logits' own penalty is added only in every second step")
def returned_logits_penalised(t: Trial) -> None:
    count = [0]

    def ask(loss: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return loss if count[0] % 2 else loss + 0.1 * logits.square().mean()

    _answered(t, ask)


@attack("parts", "a hook on the loss that a model returned doubles its gradient from the third step on")
def returned_loss_hooked_later(t: Trial) -> None:
    count = [0]

    def ask(loss: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        if count[0] > 2:
            loss.register_hook(lambda g: g * 2)
        return loss

    _answered(t, ask)


def _overwritten(t: Trial, write: Any) -> None:
    """One buffer for all batches, filled for the next step by `write(buffer, values)` between backward pass and step."""
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    x, y = tokens(0)
    x, y = x.clone(), y.clone()
    for step in range(5):
        loss = model(x, y)
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        for buffer, values in zip((x, y), tokens(step + 1), strict=True):
            write(buffer, values)
        optimizer.step()
        t.end_step()


@attack("gradients", "the next batch is copied into the same tensors between backward pass and step (static inputs)")
def static_inputs(t: Trial) -> None:
    _overwritten(t, lambda buffer, values: buffer.copy_(values))


@attack("gradients", "the same through .data")
def static_inputs_by_data(t: Trial) -> None:
    _overwritten(t, lambda buffer, values: buffer.data.copy_(values))


@attack("gradients", "the same through numpy's view of the memory (a loader with a ring of buffers)")
def static_inputs_by_numpy(t: Trial) -> None:
    def write(buffer: torch.Tensor, values: torch.Tensor) -> None:
        array: np.ndarray[Any, Any] = buffer.numpy()
        array[...] = values.numpy()

    _overwritten(t, write)


class _Reversed(torch.autograd.Function):
    strength = 1.0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * _Reversed.strength


@attack(
    "gradients",
    "the strength of a gradient reversal is set for the next step between backward pass and step, from the fourth on",
)
def strength_set_before_step(t: Trial) -> None:
    class Reversing(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return _Reversed.apply(super().inner(x))

    _Reversed.strength = 1.0

    def between(step: int) -> None:
        if step >= 3:
            _Reversed.strength = 1.0 - step

    train(t, Net([Reversing(), Reversing()]), num_steps=6, between=between)


@attack(
    "gradients",
    "a mask that the blocks saved is written through numpy between backward pass and step, from the fourth on",
)
def mask_written_before_step(t: Trial) -> None:
    mask = np.ones((BATCH, TOKENS, 1), dtype=np.float64)

    class Masked(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return super().inner(x) * torch.from_numpy(mask).to(x.dtype)

    def between(step: int) -> None:
        if step >= 3:
            mask[:, step - 3] = 0.0

    train(t, Net([Masked(), Masked()]), num_steps=6, between=between)


@attack(
    "gradients",
    "modes that a backward pass sees are other ones while the step runs: deterministic algorithms, threads, the default type",
)
def other_modes_in_step(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        before = torch.get_default_dtype()
        torch.set_default_dtype(torch.float16)
        model.eval()
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode(False):
            optimizer.step()
        model.train()
        torch.set_default_dtype(before)
        t.end_step()


@attack(
    "gradients", "the step runs under inference mode, or under no_grad entered around the whole loop but the forward"
)
def step_in_inference_mode(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        with torch.inference_mode() if step % 2 else torch.no_grad():
            optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "the loss and all that leads to it are deleted, and garbage is collected, between backward pass and step",
)
def everything_deleted(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        logits = model(x)
        loss = model.loss(logits, y)
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        del x, y, logits, loss
        gc.collect()
        optimizer.step()
        t.end_step()


@attack(
    "gradients", "an exception between backward pass and step is caught, gradients dropped, and the next batch taken"
)
def batch_given_up(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        with contextlib.suppress(ArithmeticError):
            loss.backward()
            if step == 2:
                raise ArithmeticError("the metric is not a number")
            optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "an ensemble: the same model is called with several views of the batch, and the spread of the answers is penalised",
)
def spread_of_views(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        logits = torch.stack([model(x), model(x.flip(-1)), model(x * 0.9)])
        loss = model.loss(logits.mean(0), y) + 0.1 * logits.var(0).mean()
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("parts", "examples are weighed by their own losses, detached, which the model keeps for a sampler")
def weighed_by_losses(t: Trial) -> None:
    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = functional.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)
            self.kept = each.detach()
            return (each * each.detach().softmax(0)).sum()

    model = Model()
    train(t, model, after=lambda _: t.note("kept", model.kept))


@attack("parts", "two inputs are mixed by a coefficient of the loop's (mixup), the loss being that of both targets")
def mixup_outside(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, other: torch.Tensor, share: float) -> torch.Tensor:
            logits = self.head(self.features(x))
            return share * self.loss(logits, y) + (1 - share) * self.loss(logits, other)

    def batch(step: int) -> Any:
        x, y = tokens(step)
        share, order = 0.3 + 0.1 * step, torch.randperm(len(x))
        return share * x + (1 - share) * x[order], y, y[order], share

    train(t, Model(), batch=batch)


@attack("parts", "style transfer: Gram matrices of each image's features against fixed ones, and total variation")
def gram_matrices(t: Trial) -> None:
    class Model(Images):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.chain(self.stem(x)).flatten(2)
            gram = h @ h.transpose(1, 2) / h.shape[-1]
            style = (gram - torch.eye(4).to(gram)).square().mean()
            return (
                style
                + functional.cross_entropy(self.head(h.mean(-1)), y)
                + 1e-2 * (h[..., 1:] - h[..., :-1]).abs().mean()
            )

    train(t, Model(), batch=images)


@attack(
    "parts",
    "a graph of equal sizes per batch, as dense adjacency with a softmax over neighbours, and a readout by maximum",
)
def dense_graphs(t: Trial) -> None:
    class Neighbours(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            near = (-torch.cdist(x, x)).softmax(-1)
            return x + self.inner(near @ x)

    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            assert y is not None
            return functional.cross_entropy(self.head(self.features(x).amax(1)), y[:, 0])

    train(t, Model([Neighbours(), Neighbours()]))


@attack(
    "second order",
    "a learned optimizer: an inner step written by hand with create_graph, through which a rate is trained",
)
def learned_rate(t: Trial) -> None:
    model = Net()
    rate = nn.Parameter(torch.tensor(0.05))
    optimizer = torch.optim.SGD([*model.parameters(), rate], lr=0.05)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        named = dict(model.named_parameters())
        grads = torch.autograd.grad(model(x, y), list(named.values()), create_graph=True)
        moved = {name: p - rate * g for (name, p), g in zip(named.items(), grads, strict=True)}
        loss = torch.func.functional_call(model, moved, tokens(step + 10))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("rate", rate)
        t.end_step()


@attack("parts", "a language model's logits are shifted views of one output, for the next token and the one after it")
def two_shifts(t: Trial) -> None:
    class Model(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            first = functional.cross_entropy(logits[:, :-1].reshape(-1, NUM_CLASSES), y[:, 1:].reshape(-1))
            second = functional.cross_entropy(
                logits[:, :-2].reshape(-1, NUM_CLASSES), y[:, 2:].reshape(-1), reduction="sum"
            )
            return first + 0.1 * second / (y.shape[0] * WIDTH)

    train(t, Model())


@attack(
    "changes",
    "the best weights are kept by reference and by copy, and the copied ones loaded at the end (early stopping)",
    only=EXACT,
)
def early_stopping(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    best: Any = (math.inf, None, None)
    for step in range(4):
        loss = model(*tokens(step % 2))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            value = model(*tokens(9)).item()
        if value < best[0]:
            best = (value, model.state_dict(), copy.deepcopy(model.state_dict()))
        t.end_step()
    t.note("by reference", best[1])
    model.load_state_dict(best[2])
    t.end_step()
