"""Loops around the optimizer: schedulers that write its settings, states that are edited, groups that come and go, readers between backward pass and step."""

import copy
import io
from typing import Any

import torch
from tests.attacks.models import Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import lr_scheduler


def _loop(
    t: Trial, model: nn.Module, optimizer: Any, between: Any = lambda _: None, after: Any = lambda _: None
) -> None:
    """The plain loop over six batches, of which the technique is put on before."""
    train(t, model, optimizer, num_steps=6, between=between, after=after)


@attack("clean", "one-cycle schedule, which writes momentum and rate at every step")
def one_cycle(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.3, total_steps=8)
    _loop(t, model, optimizer, after=lambda _: scheduler.step())


@attack("gradients", "the rate is lowered where the loss has not fallen (ReduceLROnPlateau), before the step")
def plateau_before_step(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.1, patience=0)
    _loop(t, model, optimizer, between=lambda step: scheduler.step(2.0 + step))


@attack("gradients", "the scheduler is stepped between backward pass and step, of a chain of schedulers")
def chained_schedules(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    first, second = lr_scheduler.LinearLR(optimizer, total_iters=3), lr_scheduler.ExponentialLR(optimizer, 0.7)
    scheduler = lr_scheduler.SequentialLR(optimizer, [first, second], milestones=[3])
    _loop(t, model, optimizer, between=lambda _: scheduler.step())


@attack("gradients", "weight decay and betas are changed between backward pass and step")
def settings_between(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def between(step: int) -> None:
        optimizer.param_groups[0]["betas"] = (0.9 - 0.1 * step, 0.99)
        optimizer.param_groups[0]["weight_decay"] = 0.1 * step

    _loop(t, model, optimizer, between)


@attack("gradients", "the state of Adam is edited between backward pass and step (a momentum reset)")
def moments_reset_between(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def between(step: int) -> None:
        if step == 3:
            for state in optimizer.state.values():
                state["exp_avg"].zero_()
                state["step"].fill_(1.0)

    _loop(t, model, optimizer, between)


@attack("gradients", "the state of Adam is logged after each step (the norm of its moments)")
def moments_logged(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    names = {p: n for n, p in model.named_parameters()}

    def after(_: int) -> None:
        t.note("moments", {names[p]: s["exp_avg_sq"].norm() for p, s in optimizer.state.items()})

    _loop(t, model, optimizer, after=after)


@attack(
    "gradients", "gradients of one layer are set to None between backward pass and step (a layer frozen for the step)"
)
def gradient_dropped(t: Trial) -> None:
    model = Net()

    def between(step: int) -> None:
        if step % 2:
            for p in model.blocks[0].parameters():
                p.grad = None

    _loop(t, model, adamw(model), between)


@attack("gradients", "the gradients are zeroed between backward pass and step where the batch is bad")
def zeroed_before_step(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    _loop(t, model, optimizer, lambda step: optimizer.zero_grad() if step in (2, 3) else None)


@attack("gradients", "requires_grad of the stem is switched off between backward pass and step")
def frozen_between(t: Trial) -> None:
    model = Net()
    _loop(t, model, sgd(model), lambda step: model.stem.requires_grad_(step < 3))


@attack("gradients", "a parameter leaves its group between backward pass and step, and comes back")
def leaves_its_group(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    held: list[Any] = []

    def between(step: int) -> None:
        if step == 2:
            held.append(optimizer.param_groups[0]["params"].pop())
        if step == 4:
            optimizer.param_groups[0]["params"].append(held.pop())

    _loop(t, model, optimizer, between)


@attack("gradients", "the model is evaluated between backward pass and step, and copied, and saved")
def evaluated_between(t: Trial) -> None:
    model = Net()

    def between(step: int) -> None:
        with torch.no_grad():
            t.note("before", model(*tokens(step + 30)))
        t.note("copied", copy.deepcopy(model).head.weight)
        torch.save(model.state_dict(), io.BytesIO())

    _loop(t, model, sgd(model), between)


@attack("gradients", "the loss of the same batch is taken again after the step, and the step is undone where it grew")
def step_undone(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=3.0)
    t.apply(model, optimizer)
    for step in range(5):
        kept = copy.deepcopy(model.state_dict())
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        with torch.no_grad():
            again = model(*tokens(step))
        if again > loss:
            model.load_state_dict(kept)
            optimizer.param_groups[0]["lr"] *= 0.5
        t.note("losses", [loss, again])
        t.end_step()


@attack(
    "gradients", "clipping of groups: the head by value, the rest by the largest entry, foreach, and a bound on nan"
)
def clipped_in_groups(t: Trial) -> None:
    model = Net()
    rest = [p for n, p in model.named_parameters() if "head" not in n]

    def between(_: int) -> None:
        clip_grad_value_(model.head.parameters(), 0.01, foreach=True)
        t.note("norm", clip_grad_norm_(rest, 0.02, norm_type=float("inf"), error_if_nonfinite=True, foreach=True))

    _loop(t, model, sgd(model), between)


@attack("gradients", "total norm and scaling by torch's two halves of clipping (get_total_norm, clip_grads_with_norm_)")
def clipped_in_halves(t: Trial) -> None:
    model = Net()

    def between(_: int) -> None:
        total = nn.utils.get_total_norm([p.grad for p in model.parameters()])
        nn.utils.clip_grads_with_norm_(model.parameters(), 0.1, total)
        t.note("total", total)

    _loop(t, model, sgd(model), between)


@attack("gradients", "clipping with the norm of the last step, which the loop keeps")
def clipped_by_last_norm(t: Trial) -> None:
    model = Net()
    kept = [0.1]

    def between(_: int) -> None:
        total = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            p.grad.mul_(min(1.0, kept[0] / total.item()))
        kept[0] = total.item() * 0.5

    _loop(t, model, sgd(model), between)


@attack("gradients", "gradients by _foreach functions: scaled, decayed and clamped at once")
def foreach_on_gradients(t: Trial) -> None:
    model = Net()

    def between(_: int) -> None:
        grads = [p.grad for p in model.parameters()]
        torch._foreach_mul_(grads, 0.5)
        torch._foreach_add_(grads, list(model.parameters()), alpha=0.01)
        torch._foreach_clamp_max_(grads, 0.05)

    with torch.no_grad():
        model.head.bias.add_(0.1)
    t.apply(model, optimizer := sgd(model))
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            between(step)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "a group of new parameters is added in the middle, and its layer is used from then on")
def group_added_with_layer(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = super().features(x)
            return x + self.late(x) if hasattr(self, "late") else x

    model = Model()
    optimizer = sgd(model)

    def after(step: int) -> None:
        if step == 2:
            model.late = nn.Linear(8, 8)
            optimizer.add_param_group({"params": model.late.parameters(), "lr": 0.05})

    _loop(t, model, optimizer, after=after)


@attack("changes", "the optimizer is deep-copied with its model, and the copies train on")
def both_copied(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        if step == 2:
            model, optimizer = copy.deepcopy((model, optimizer))
            t.track(model)
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "Adam with differentiable=True, a rate that is a tensor, AMSGrad and maximize", only=EXACT)
def unusual_adams(t: Trial) -> None:
    model = Net()
    groups = [
        {"params": model.stem.parameters(), "amsgrad": True},
        {"params": model.blocks.parameters(), "lr": torch.tensor(0.01)},
        {"params": model.head.parameters(), "maximize": True, "lr": 1e-4},
    ]
    _loop(t, model, torch.optim.Adam(groups, lr=1e-2, foreach=False))


@attack("gradients", "a matrix optimizer (Muon) for the matrices and AdamW for the rest")
def muon_and_adamw(t: Trial) -> None:
    model = Net()
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "head" not in n]
    rest = [p for n, p in model.named_parameters() if p.ndim != 2 or "head" in n]
    first, second = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(rest, lr=0.01)
    t.apply(model, first, second)
    for step in range(4):
        loss = model(*tokens(step))
        first.zero_grad()
        second.zero_grad()
        loss.backward()
        first.step()
        second.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the gradient of a large batch is summed by autograd.grad into buffers of the loop's own")
def own_accumulators(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    parameters = list(model.parameters())
    for step in range(3):
        sums = [torch.zeros_like(p) for p in parameters]
        for part in range(2):
            for total, g in zip(sums, torch.autograd.grad(model(*tokens(2 * step + part)), parameters), strict=True):
                total.add_(g, alpha=0.5)
        for p, total in zip(parameters, sums, strict=True):
            p.grad = total
        optimizer.step()
        t.end_step()


@attack("gradients", "a count of steps stands beside the states of parameters, and is in the checkpoint that is loaded")
def count_among_states(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def count(stepped: Any, *_: Any) -> None:
        stepped.state["num_steps"] = stepped.state.get("num_steps", 0) + 1

    optimizer.register_step_post_hook(count)

    def after(step: int) -> None:
        t.note("count", optimizer.state["num_steps"])
        if step == 2:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    _loop(t, model, optimizer, after=after)
