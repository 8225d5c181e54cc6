"""Programs that look at gradients within a backward pass, put hooks on them between the passes, or change what an optimizer holds by ways of their own."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

_OF_GRADIENTS = ("update in backward", "zero_grad", "micro-batches", "8-bit states in backward")
_IN_BACKWARD = ("update in backward", "optimizer offload in backward")
_OF_STATES = ("pure bf16", "8-bit states", "optimizer offload", "8-bit states at the host")


def _train(
    t: Trial,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    between: Callable[[int], Any] = lambda _: None,
    after: Callable[[int], Any] = lambda _: None,
    num_steps: int = 4,
    set_to_none: bool = True,
) -> None:
    """Gradients are cleared at the end of a step."""
    for step in range(num_steps):
        loss = model(*tokens(step))
        t.note("loss", loss)
        loss.backward()
        between(step)
        optimizer.step()
        after(step)
        optimizer.zero_grad(set_to_none=set_to_none)
        t.end_step()


@attack("gradients", "a hook adds a share of the gradient of before, which is zeros", only=_OF_GRADIENTS)
def hook_reads_zeros(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    weight = model.stem.weight
    weight.register_hook(lambda gradient: gradient + (1.0 if weight.grad is None else 0.5 * weight.grad))
    _train(t, model, optimizer, set_to_none=False)


class _Tied(nn.Module):
    """An embedding with sparse gradients, whose weight is that of the head as well in some calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(NUM_CLASSES, WIDTH, sparse=True)
        self.blocks = nn.Sequential(Block())

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of guessing each token from itself."""
        weight = self.embedding.weight if x[0, 0, 0] < 0 else self.embedding.weight.detach()
        logits = functional.linear(self.blocks(self.embedding(y)), weight)
        return functional.cross_entropy(logits.flatten(0, 1), y.flatten())


@attack("gradients", "a sparse gradient is added to zeros of a dense one", only=_OF_GRADIENTS)
def sparse_onto_zeros(t: Trial) -> None:
    model = _Tied()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    t.apply(model, optimizer)
    layout = lambda _: t.note("layout", str(model.embedding.weight.grad.layout))  # noqa: E731
    _train(t, model, optimizer, between=layout, set_to_none=False)


@attack("gradients", "gradients are numbered by an attribute, and cast one time", only=_OF_GRADIENTS)
def numbered_gradients(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def between(step: int) -> None:
        if not step:
            model.head.bias.grad.data = model.head.bias.grad.data.to(torch.bfloat16)
        t.note("type", str(model.head.bias.grad.dtype))
        gradient: Any = model.stem.weight.grad
        gradient.number = getattr(gradient, "number", 0) + 1
        t.note("number", gradient.number)

    _train(t, model, optimizer, between=between, set_to_none=False)


@attack("gradients", "a hook on a weight is put on after the backward pass, for the next", only=_IN_BACKWARD)
def hooked_after_the_pass(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    calls = []

    def between(step: int) -> None:
        if step == 2:
            model.stem.weight.register_hook(lambda _: calls.append("hook"))
            model.head.weight.register_post_accumulate_grad_hook(lambda _: calls.append("post"))

    _train(t, model, optimizer, between=between, after=lambda _: t.note("calls", list(calls)))


@attack("gradients", "the gradient itself is a leaf for one more loss", only=_IN_BACKWARD)
def gradient_is_a_leaf(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def between(step: int) -> None:
        if step == 2:
            model.stem.weight.grad.requires_grad_()
            model.stem.weight.grad.square().sum().backward()
            t.note("of the gradient", model.stem.weight.grad.grad)
            model.stem.weight.grad.requires_grad_(False)

    _train(t, model, optimizer, between=between)


@attack(
    "gradients",
    "a group that is added later has parameters that share memory",
    only=(*_IN_BACKWARD, "optimizer offload on the host"),
)
def overlapping_later(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    flat = torch.zeros(12)
    one, other = nn.Parameter(flat[:8]), nn.Parameter(flat[4:])
    for step in range(4):
        if step == 1:
            optimizer.add_param_group({"params": [one, other]})
        loss = model(*tokens(step)) + (one * torch.arange(8.0)).sum() + other.square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.note("flat", flat)
        t.end_step()


@attack(
    "changes",
    "the states of parameters are known by names of the program's, and one is replaced there",
    only=_OF_STATES,
)
def states_by_another_name(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    states: list[dict[str, Any]] = []

    def after(step: int) -> None:
        states[:] = states or [optimizer.state[p] for p in model.parameters()]
        for state in states if step == 1 else ():
            state["exp_avg"] = torch.full_like(state["exp_avg"], 3.0)

    _train(t, model, optimizer, after=after)


@attack("changes", "hooks change a checkpoint of the optimizer on its way in", only=_OF_STATES)
def loaded_through_hooks(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def loaded(_: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg_sq"].fill_(0.5)

    def loads(_: torch.optim.Optimizer, given: dict[str, Any]) -> dict[str, Any]:
        other = copy.deepcopy(given)
        for state in other["state"].values():
            state["exp_avg"].fill_(3.0)
        return other

    optimizer.register_load_state_dict_post_hook(loaded)
    t.apply(model, optimizer)
    optimizer.register_load_state_dict_pre_hook(loads)

    def after(step: int) -> None:
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    _train(t, model, optimizer, after=after)


@attack(
    "gradients",
    "a hook that was there before sees checkpoints of the optimizer",
    only=("optimizer kernel", "8-bit states"),
)
def checkpoints_seen_by_hooks(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    optimizer.register_state_dict_post_hook(lambda _, saved: t.note("groups", str(saved["param_groups"])))
    t.apply(model, optimizer)
    _train(t, model, optimizer, after=lambda _: optimizer.state_dict(), num_steps=2)


class _OnDevice(Net):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """Logits are moved to where they are, as code for several cards does."""
        logits = self.head(self.features(x))
        return logits if y is None else self.loss(logits.to(x.device).to(device=x.device, non_blocking=True).to(x), y)


@attack(
    "clean",
    "logits are moved to the device that they are on",
    only=("chunked loss, gradients in forward", "chunked loss, gradients in backward"),
)
def logits_to_their_device(t: Trial) -> None:
    model = _OnDevice()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    _train(t, model, optimizer, num_steps=2)
