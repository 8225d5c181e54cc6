"""More training programs, as in `optimizer_programs`: hooks, several models and optimizers, copies, and who else reads gradients and weights."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.optimizer_programs import (
    NUM_STEPS,
    PROGRAMS,
    Program,
    Put,
    Seen,
    adam,
    loss_of,
    made,
    model_of,
    program,
)
from torch import nn


@program
def gradient_hooks(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []
    model[2].weight.register_hook(lambda g: seen.append(g.norm().item()))
    model[4].weight.register_hook(lambda g: g * 0.5)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def gradient_hook_added_later(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []
    for step in range(NUM_STEPS):
        if step == 3:
            model[2].weight.register_hook(lambda g: seen.append(1))
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def post_accumulate_hooks(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []
    model[2].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.sum().item()))
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def module_backward_hooks(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []
    model[2].register_full_backward_hook(lambda _m, _i, out: seen.append(out[0].norm().item()))
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def hooks_on_activations(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []
    for _ in range(NUM_STEPS):
        hidden = model[:2](torch.randn(5, 8))
        hidden.register_hook(lambda g: seen.append(g.norm().item()))
        model[2:](hidden).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


@program
def keeps_gradients_of_activations(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []
    for _ in range(NUM_STEPS):
        hidden = model[:2](torch.randn(5, 8))
        hidden.retain_grad()
        model[2:](hidden).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(hidden.grad.norm().item())
    return model, seen


@program
def gradients_of_the_input(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []
    x = torch.randn(5, 8, requires_grad=True)
    for _ in range(NUM_STEPS):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append(x.grad.norm().item())
    return model, seen


@program
def closures(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        return loss

    for _ in range(NUM_STEPS):
        seen.append(optimizer.step(closure).item())
    return model, seen


@program
def gan(put: Put) -> tuple[nn.Module, Seen]:
    generator, critic = model_of(), nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 64), nn.Linear(64, 1))
    of_generator, of_critic = adam(generator.parameters()), adam(critic.parameters())
    put(generator, of_generator)
    put(critic, of_critic)
    for _ in range(NUM_STEPS):
        of_critic.zero_grad()
        fake = generator(torch.randn(5, 8))
        (critic(fake.detach()).mean() - critic(torch.randn(5, 4)).mean()).backward()
        of_critic.step()
        of_generator.zero_grad()
        (-critic(fake).mean()).backward()
        of_generator.step()
    return nn.ModuleList([generator, critic]), []


@program
def two_optimizers_on_one_model(put: Put) -> tuple[nn.Module, Seen]:
    model = model_of()
    first, second = adam(model[:3].parameters()), torch.optim.SGD(model[3:].parameters(), lr=0.1, momentum=0.9)
    put(model, first, second)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        first.step()
        second.step()
        first.zero_grad()
        second.zero_grad()
    return model, []


@program
def interleaved_backwards(put: Put) -> tuple[nn.Module, Seen]:
    models = [model_of(), model_of()]
    optimizers = [adam(m.parameters()) for m in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        put(model, optimizer)
    for _ in range(NUM_STEPS):
        losses = [loss_of(m) for m in models]
        losses[1].backward()
        losses[0].backward()
        for optimizer in optimizers:
            optimizer.step()
        for optimizer in optimizers:
            optimizer.zero_grad()
    return nn.ModuleList(models), []


@program
def an_unrelated_backward_before_the_step(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    other = nn.Linear(3, 3)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        other(torch.randn(2, 3)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return nn.ModuleList([model, other]), [other.weight.grad.sum().item()]


@program
def second_derivatives(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        x = torch.randn(5, 8, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        (gradient.norm() - 1).square().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def backward_with_create_graph(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward(create_graph=True)
        penalty = sum(p.grad.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        penalty.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def sharpness_aware(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        x = torch.randn(5, 8)
        model(x).square().mean().backward()
        moved = [p.grad * 0.05 for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moved, strict=True):
                p.add_(move)
        optimizer.zero_grad()
        model(x).square().mean().backward()
        with torch.no_grad():
            for p, move in zip(model.parameters(), moved, strict=True):
                p.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
    return model, []


def _decays(through_data: bool) -> Program:
    def decays(put: Put) -> tuple[nn.Module, Seen]:
        model, optimizer = made(put)
        for _ in range(NUM_STEPS):
            loss_of(model).backward()
            for p in model.parameters():
                if through_data:
                    p.data.mul_(0.9)
                else:
                    with torch.no_grad():
                        p.mul_(0.9)
            optimizer.step()
            optimizer.zero_grad()
        return model, []

    return decays


PROGRAMS["weight_decay_by_hand_before_the_step"] = _decays(through_data=False)
PROGRAMS["weight_decay_through_data_before_the_step"] = _decays(through_data=True)


@program
def changes_rate_before_the_step(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step)
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def one_cycle(put: Put) -> tuple[nn.Module, Seen]:
    model = model_of()
    optimizer = adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=NUM_STEPS + 1)
    put(model, optimizer)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, [optimizer.param_groups[0]["betas"], optimizer.param_groups[0]["lr"]]


@program
def scheduler_made_later(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    return model, [optimizer.param_groups[0]["lr"]]


@program
def averaged_weights(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    averaged = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        averaged.update_parameters(model)
        averaged(torch.zeros(2, 8))
        optimizer.zero_grad()
    return nn.ModuleList([model, averaged]), []


@program
def averages_before_the_step(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    average = [p.detach().clone() for p in model.parameters()]
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        for a, p in zip(average, model.parameters(), strict=True):
            a.lerp_(p.detach().float(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model, [sum(a.sum().item() for a in average)]


@program
def evaluates_before_the_step(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        with torch.no_grad():
            seen.append(model(torch.ones(2, 8)).sum().item())
        optimizer.step()
        optimizer.zero_grad()
    return model, seen


def _copied(way: Callable[[Any], Any]) -> Program:
    def copied(put: Put) -> tuple[nn.Module, Seen]:
        model, optimizer = made(put)
        for step in range(NUM_STEPS):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
            if step == 2:
                model, optimizer = way((model, optimizer))
        return model, []

    return copied


def _saved(given: Any) -> Any:
    file = io.BytesIO()
    torch.save(given, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


PROGRAMS["goes_on_with_a_deepcopy"] = _copied(copy.deepcopy)
PROGRAMS["goes_on_with_a_pickle"] = _copied(lambda given: pickle.loads(pickle.dumps(given)))
PROGRAMS["goes_on_with_what_it_saved"] = _copied(_saved)


@program
def copies_between_backward_and_step(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        copy.deepcopy((model, optimizer))
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def resumes_from_state_dicts(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for step in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 2:
            saved = _saved((model.state_dict(), optimizer.state_dict()))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
    return model, []


@program
def reads_states(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    shapes = []

    def look(o: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        average = o.state[model[2].weight]["exp_avg"]
        shapes.append((tuple(average.shape), bool(average.abs().sum() > 0)))

    optimizer.register_step_post_hook(look)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, shapes


@program
def reads_gradients_after_the_step(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    seen: Seen = []
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        seen.append([p.grad.norm().item() for p in model.parameters()])
        optimizer.zero_grad()
    return model, seen


@program
def grad_scaler(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    for step in range(NUM_STEPS):
        scaler.scale(loss_of(model) * (float("inf") if step == 2 else 1.0)).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    return model, [scaler.get_scale()]


@program
def batch_norm_in_a_recomputation(put: Put) -> tuple[nn.Module, Seen]:
    model = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.Linear(64, 64), nn.Linear(64, 4))
    optimizer = adam(model.parameters())
    put(model, optimizer)
    for _ in range(NUM_STEPS):
        hidden = torch.utils.checkpoint.checkpoint(model[:2], torch.randn(5, 8), use_reentrant=False)
        model[2:](hidden).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return model, [model[1].num_batches_tracked.item()]


@program
def reentrant_recomputation(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        hidden = torch.utils.checkpoint.checkpoint(model[:3], torch.randn(5, 8, requires_grad=True), use_reentrant=True)
        model[3:](hidden).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


class _Counts(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        _Counts.calls += 1
        return gradient * (1.0 + 0.5 * (_Counts.calls % 2))


@program
def a_function_with_a_memory(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    _Counts.calls = 0
    for _ in range(NUM_STEPS):
        model[2:](_Counts.apply(model[:2](torch.randn(5, 8)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def two_losses_on_one_graph(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        out = model(torch.randn(5, 8))
        out.mean().backward(retain_graph=True)
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def steps_twice(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def gradients_for_some(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(NUM_STEPS):
        loss_of(model).backward(inputs=list(model[4].parameters()))
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def tied_weights(put: Put) -> tuple[nn.Module, Seen]:
    model = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    model[4].weight = model[2].weight
    optimizer = adam(model.parameters())
    put(model, optimizer)
    for _ in range(NUM_STEPS):
        loss_of(model).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, []


@program
def trains_a_second_time(put: Put) -> tuple[nn.Module, Seen]:
    model, optimizer = made(put)
    for _ in range(2):
        for _ in range(3):
            loss_of(model).backward()
            optimizer.step()
            optimizer.zero_grad()
        optimizer = adam(model.parameters())
        put(model, optimizer)
    loss_of(model).backward()
    optimizer.step()
    return model, []


@program
def undoes_in_the_middle(put: Put) -> tuple[nn.Module, Seen]:
    model = model_of()
    optimizer = adam(model.parameters())
    session = put(model, optimizer)
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model).backward()
        if step == 3:
            session.undo()
        optimizer.step()
    return model, []
