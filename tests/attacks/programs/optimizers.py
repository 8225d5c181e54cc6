"""Several models, optimizers and backward passes that are in each other's way, and optimizers that are more than one update."""

import copy
from typing import Any

import torch
from tests.attacks.models import Block, Net, adamw, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn.utils import clip_grad_norm_


class Judge(nn.Module):
    """A discriminator: one number per token."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())
        self.last = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """One number per token."""
        return self.last(self.blocks(x))


class Maker(nn.Module):
    """A generator: tokens from noise."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(8, 8)
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens."""
        return self.blocks(self.stem(x))


def _adversaries(t: Trial, *, detaches: bool, clips: bool = False) -> None:
    maker, judge = Maker(), Judge()
    of_maker, of_judge = sgd(maker, lr=0.05), sgd(judge, lr=0.05)
    t.apply(maker, of_maker)
    t.apply(judge, of_judge)
    for step in range(3):
        x, _ = tokens(step)
        made = maker(x * 0.5)
        of_judge.zero_grad()
        (judge(made.detach() if detaches else made).mean() - judge(x).mean()).backward(retain_graph=not detaches)
        if clips:
            clip_grad_norm_(judge.parameters(), 0.1)
        of_judge.step()
        t.end_step()
        of_maker.zero_grad()
        loss = -judge(made).mean()
        loss.backward()
        if clips:
            clip_grad_norm_(maker.parameters(), 0.1)
        of_maker.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a GAN: the generator's backward pass leaves gradients on the discriminator")
def gan(t: Trial) -> None:
    _adversaries(t, detaches=True)


@attack("gradients", "a GAN without detach: the discriminator's backward pass reaches the generator")
def gan_without_detach(t: Trial) -> None:
    _adversaries(t, detaches=False)


@attack("gradients", "a GAN whose two models are both clipped")
def gan_clipped(t: Trial) -> None:
    _adversaries(t, detaches=True, clips=True)


@attack("gradients", "two models, backward passes of both before the steps of both")
def interleaved_backwards(t: Trial) -> None:
    _two_models(t, order="bbss", clips=False)


@attack("gradients", "two models, backward passes of both before the steps of both, both clipped")
def interleaved_and_clipped(t: Trial) -> None:
    _two_models(t, order="bbss", clips=True)


@attack("gradients", "two models, the session of the first undone first; the second is clipped")
def undone_first_in_first_out(t: Trial) -> None:
    _two_models(t, order="bsbs", clips=True, undo_first=True)


def _two_models(t: Trial, *, order: str, clips: bool, undo_first: bool = False) -> None:
    models = [Net(), Net()]
    optimizers = [sgd(model) for model in models]
    sessions = [t.apply(model, optimizer) for model, optimizer in zip(models, optimizers, strict=True)]
    for step in range(4):
        if step == 2 and undo_first and sessions[0] is not None:
            sessions[0].undo()
        losses = [10 * model(*tokens(step + 10 * i)) for i, model in enumerate(models)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        if order == "bbss":
            for loss in losses:
                loss.backward()
            for model, optimizer in zip(models, optimizers, strict=True):
                if clips:
                    clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            t.end_step()
        else:
            for loss, model, optimizer in zip(losses, models, optimizers, strict=True):
                loss.backward()
                if clips:
                    clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                t.end_step()
        t.note("losses", losses)


@attack("gradients", "an unrelated backward pass (a probe, a regulariser) between backward pass and step")
def unrelated_backward(t: Trial) -> None:
    probe = nn.Linear(8, 1)

    def unrelated(step: int) -> None:
        probe.zero_grad()
        probe(tokens(step)[0]).mean().backward()
        t.note("probe", probe.weight.grad)

    train(t, Net(), between=unrelated)


@attack("gradients", "an unrelated model without a plan trains beside, with clipping of its own")
def unrelated_model(t: Trial) -> None:
    other = Net()
    of_other = sgd(other)
    t.track(other)

    def beside(step: int) -> None:
        of_other.zero_grad()
        (10 * other(*tokens(step + 30))).backward()
        t.note("norm", clip_grad_norm_(other.parameters(), 0.1))
        of_other.step()

    train(t, Net(), between=beside)


@attack("gradients", "a graph of another model is freed by its backward pass, as torch does")
def graphs_are_freed(t: Trial) -> None:
    other = nn.Linear(8, 1)

    def twice(step: int) -> None:
        loss = other(tokens(step)[0]).square().mean()
        loss.backward()
        try:
            loss.backward()
        except RuntimeError:
            t.note("freed", True)

    train(t, Net(), after=twice)


@attack("gradients", "two optimizers on parts of one model, stepped one after the other")
def two_optimizers(t: Trial) -> None:
    model = Net()
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    second = torch.optim.AdamW([*model.stem.parameters(), *model.head.parameters()], lr=1e-2)
    t.apply(model, first, second)
    for step in range(4):
        first.zero_grad()
        second.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        first.step()
        second.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "two optimizers, of which the second is stepped every other step only")
def second_optimizer_seldom(t: Trial) -> None:
    model = Net()
    first = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    second = torch.optim.SGD([*model.stem.parameters(), *model.head.parameters()], lr=0.1)
    t.apply(model, first, second)
    for step in range(4):
        first.zero_grad()
        if step % 2 == 0:
            second.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        first.step()
        if step % 2:
            second.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "one parameter is held by two optimizers")
def shared_by_optimizers(t: Trial) -> None:
    model = Net()
    first = torch.optim.SGD(model.parameters(), lr=0.05)
    second = torch.optim.SGD(model.head.parameters(), lr=0.05)
    t.apply(model, first, second)
    for step in range(4):
        model.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        first.step()
        t.end_step()
        second.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a closure that zeroes, runs forward and backward (optimizer.step(closure))")
def stepped_with_closure(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            return loss

        t.note("loss", optimizer.step(closure))
        t.end_step()


@attack("gradients", "a closure that clips after its backward pass")
def closure_that_clips(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = 10 * model(*tokens(step))
            loss.backward()
            clip_grad_norm_(model.parameters(), 0.5)
            return loss

        t.note("loss", optimizer.step(closure))
        t.end_step()


@attack("gradients", "LBFGS, which calls its closure many times")
def lbfgs(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=3)
    t.apply(model, optimizer)
    for step in range(2):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(*tokens(step))
            loss.backward()
            return loss

        t.note("loss", optimizer.step(closure))
        t.end_step()


class Sam(torch.optim.Optimizer):
    """Sharpness-aware minimisation as it is commonly copied: two backward passes around a perturbation of the weights."""

    def __init__(self, parameters: Any, base: torch.optim.Optimizer, rho: float = 0.05) -> None:
        super().__init__(parameters, {"rho": rho})
        self.base = base
        self.param_groups = base.param_groups

    @torch.no_grad()
    def first_step(self) -> None:
        """Climbs."""
        gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.stack([g.norm() for g in gradients]).norm()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.state[parameter]["before"] = parameter.clone()
                    parameter.add_(parameter.grad * (0.05 / (norm + 1e-12)))

    @torch.no_grad()
    def second_step(self) -> None:
        """Goes back, and steps with the gradient from there."""
        for group in self.param_groups:
            for parameter in group["params"]:
                if "before" in self.state[parameter]:
                    parameter.copy_(self.state[parameter]["before"])
        self.base.step()


@attack("gradients", "SAM: two backward passes and a perturbation of the weights between them")
def sharpness_aware(t: Trial) -> None:
    model = Net()
    base = sgd(model)
    optimizer = Sam(model.parameters(), base)
    t.apply(model, base)
    for step in range(4):
        base.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.first_step()
        base.zero_grad()
        model(*tokens(step)).backward()
        optimizer.second_step()
        t.note("loss", loss)
        t.end_step()


class Lookahead:
    """Slow weights around an optimizer, as a plain wrapper with the same methods."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.count = 0
        self.slow = [p.detach().clone() for g in inner.param_groups for p in g["params"]]

    def step(self) -> None:
        """Steps, and every second time goes half the way back."""
        self.inner.step()
        self.count += 1
        if self.count % 2 == 0:
            with torch.no_grad():
                fast = [p for g in self.inner.param_groups for p in g["params"]]
                for slow, parameter in zip(self.slow, fast, strict=True):
                    slow.add_(0.5 * (parameter - slow))
                    parameter.copy_(slow)


@attack("gradients", "Lookahead around the optimizer")
def lookahead(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    wrapper = Lookahead(optimizer)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        wrapper.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "gradient surgery (PCGrad): gradients of two tasks are taken apart and projected")
def gradient_surgery(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        found: list[list[torch.Tensor | None]] = []
        for task in range(2):
            optimizer.zero_grad()
            loss = model(*tokens(step + 20 * task))
            loss.backward()
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        for parameter, first, second in zip(model.parameters(), *found, strict=True):
            if first is not None and second is not None:
                overlap = (first * second).sum()
                parameter.grad = first + second - overlap.clamp(max=0) * second / second.square().sum()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the optimizer is replaced by a new one in the middle")
def optimizer_replaced(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    session = t.apply(model, optimizer)
    for step in range(4):
        if step == 2:
            if session is not None:
                session.undo()
            optimizer = adamw(model)
            t.apply(model, optimizer)
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the optimizer is replaced by one that the session does not know")
def optimizer_replaced_unseen(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        if step == 2:
            optimizer = adamw(model)
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "weights are updated by hand, and the optimizer is never stepped")
def updated_by_hand(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        model.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(0.1 * parameter.grad)
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "states of the optimizer are read and reset (exp_avg of a layer)")
def states_reset(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def reset(step: int) -> None:
        if step == 1:
            state = optimizer.state[model.head.weight]
            t.note("norm", state["exp_avg"].norm())
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()

    train(t, model, optimizer, after=reset, num_steps=5)


@attack("gradients", "optimizer and model are saved and loaded in the middle")
def saved_and_loaded(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def reload(step: int) -> None:
        if step == 1:
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])

    train(t, model, optimizer, after=reload, num_steps=5)


@attack("gradients", "stochastic weight averaging, and batch norm statistics afterwards")
def swa(t: Trial) -> None:
    model = Net()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    train(t, model, after=lambda _: averaged.update_parameters(model))
    t.note("averaged", list(averaged.module.parameters()))


@attack("gradients", "an optimizer of the program's own, a subclass of SGD that reads all gradients in step")
def own_optimizer(t: Trial) -> None:
    class Normalised(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
            for gradient in gradients:
                gradient.div_(1.0 + norm)
            return super().step(closure)

    model = Net()
    train(t, model, Normalised(model.parameters(), lr=0.1, momentum=0.9))


@attack("gradients", "the optimizer's step is wrapped by the program (a gradient transform around step)")
def step_wrapped(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    step_of_optimizer = optimizer.step

    def halved(*args: Any, **kwargs: Any) -> Any:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)
        return step_of_optimizer(*args, **kwargs)

    optimizer.step = halved
    train(t, model, optimizer, applied=True)


@attack("gradients", "weight decay excluded for biases, groups rebuilt in the middle of training")
def groups_rebuilt(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=0.1)

    def rebuild(step: int) -> None:
        if step == 1:
            (group,) = optimizer.param_groups
            biases = [p for p in group["params"] if p.dim() == 1]
            group["params"] = [p for p in group["params"] if p.dim() > 1]
            optimizer.add_param_group({"params": biases, "weight_decay": 0.0})

    train(t, model, optimizer, after=rebuild, num_steps=5)


@attack("gradients", "weight decay by a tensor hook that reads the weight of the forward")
def hook_reads_weight(t: Trial) -> None:
    model = Net()
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient, p=parameter: gradient + 0.1 * p.detach())
    train(t, model)


@attack("gradients", "a weight is used in two places, one of them outside of the model (tied by the loop)")
def weight_used_by_loop(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = (
            model(*tokens(step))
            + 0.1 * model.head.weight.square().sum()
            + 0.1 * (model.stem.weight @ model.blocks[0].wide.weight.T).norm()
        )
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the backward pass runs twice, for two losses one after the other, before one step")
def two_backwards_one_step(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        first, second = model(*tokens(step)), model(*tokens(step + 30))
        first.backward()
        second.backward()
        optimizer.step()
        t.note("loss", first)
        t.end_step()


@attack("gradients", "two steps after one backward pass")
def two_steps_one_backward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.end_step()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a backward pass restricted to some inputs (loss.backward(inputs=...))")
def backward_with_inputs(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward(inputs=list(model.head.parameters()) if step % 2 else list(model.parameters()))
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
