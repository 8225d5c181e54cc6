"""What programs do with the object that `p.grad` is: set its data, share it between parameters, put attributes on it, give it to transforms and copies."""

import copy
import io
import pickle
from collections.abc import Callable

import torch
from tests.attacks.models import Net, sgd, tokens
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


def _between(t: Trial, does: Callable[[nn.Module, int], object], *, odd_only: bool = True) -> None:
    """The plain loop; `does` is called with the model and the step between backward pass and step, in every second one."""
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        if step % 2 or not odd_only:
            does(model, step)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


def _head(model: nn.Module) -> torch.Tensor:
    gradient = model.head.weight.grad
    assert gradient is not None
    return gradient


@attack("gradients", "p.grad.data is set to a tensor that the program has computed without looking at p.grad")
def gradient_data_set(t: Trial) -> None:
    def does(model: nn.Module, step: int) -> None:
        _head(model).data = torch.full(model.head.weight.shape, 0.01 * step)

    _between(t, does)


@attack("gradients", "p.grad.data is set to a slice of a flat buffer, which is scaled afterwards (buckets)")
def gradient_data_in_buckets(t: Trial) -> None:
    def does(model: nn.Module, _: int) -> None:
        weights = list(model.parameters())
        flat = torch.zeros(sum(p.numel() for p in weights))
        begin = 0
        for p in weights:
            assert p.grad is not None
            part = flat[begin : begin + p.numel()].view_as(p)
            part.copy_(p.grad)
            p.grad.data = part
            begin += p.numel()
        flat.mul_(0.5)

    _between(t, does)


@attack("gradients", "a gradient that is held by name gets the data of another one, which is read before")
def gradient_data_of_another(t: Trial) -> None:
    def does(model: nn.Module, _: int) -> None:
        norm = model.blocks[0].norm
        one, other = norm.weight.grad, norm.bias.grad
        assert one is not None
        assert other is not None
        detached = one.detach()
        t.note("sum", other.data.sum())
        one.data = other.data
        t.note("detached", detached)

    _between(t, does)


@attack("gradients", "one parameter's gradient is set on another parameter as well (p.grad = q.grad)")
def gradient_on_two_parameters(t: Trial) -> None:
    def does(model: nn.Module, step: int) -> None:
        norm = model.blocks[0].norm
        norm.weight.grad = norm.bias.grad if step == 1 else norm.bias.grad.detach()

    _between(t, does)


@attack("gradients", "the gradients of two parameters are exchanged")
def gradients_exchanged(t: Trial) -> None:
    def does(model: nn.Module, _: int) -> None:
        norm = model.blocks[0].norm
        norm.weight.grad, norm.bias.grad = norm.bias.grad, norm.weight.grad

    _between(t, does)


@attack("gradients", "attributes are put on p.grad, and read after another gradient has been read")
def gradient_with_attributes(t: Trial) -> None:
    def does(model: nn.Module, step: int) -> None:
        _head(model).scale = 0.1 * step
        t.note("norm", model.stem.weight.grad.abs().sum())
        scale = getattr(_head(model), "scale", 1.0)
        t.note("scale", scale)
        model.head.weight.grad.mul_(scale)

    _between(t, does)


@attack("gradients", "p.grad is printed, copied, pickled and saved for a report", only=EXACT)
def gradient_reported(t: Trial) -> None:
    def does(model: nn.Module, _: int) -> None:
        gradient = _head(model)
        buffer = io.BytesIO()
        torch.save(gradient, buffer)
        buffer.seek(0)
        t.note("printed", repr(gradient)[:24])
        t.note("copies", [copy.deepcopy(gradient), pickle.loads(pickle.dumps(gradient)), torch.load(buffer)])

    _between(t, does)


@attack("gradients", "a Python function is applied to each element of p.grad (apply_, map_)")
def gradient_applied(t: Trial) -> None:
    def does(model: nn.Module, step: int) -> None:
        gradient = _head(model)
        if step == 1:
            gradient.apply_(lambda value: 0.5 * value)
        else:
            gradient.map_(gradient.clone(), lambda one, other: one + 0.5 * other)

    _between(t, does)


@attack("gradients", "p.grad goes through vmap (the largest of each row)")
def gradient_in_vmap(t: Trial) -> None:
    _between(t, lambda model, _: t.note("rows", torch.vmap(lambda row: row.abs().max())(_head(model))))


@attack("gradients", "p.grad is given to torch.tensor, as a copy")
def gradient_in_constructor(t: Trial) -> None:
    _between(t, lambda model, _: t.note("sum", torch.tensor(_head(model)).sum()))
