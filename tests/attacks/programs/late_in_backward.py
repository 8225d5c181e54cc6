"""What the last part of a backward pass reads and sets, after the first part has made its gradients: rates, states, weights, gradients of later layers."""

from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import Block, Net, adamw, sgd, tokens
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch.utils.checkpoint import checkpoint


class Hooked(Net):
    """A hook on the stem's output runs when all later layers have their gradients."""

    hook: Callable[[torch.Tensor], Any] | None = None

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        if self.hook is not None:
            x.register_hook(self.hook)
        return self.blocks(x)


def with_late_hook(
    t: Trial, make: Callable[[Net, torch.optim.Optimizer], Callable[[torch.Tensor], Any]], optimizer_of: Any = adamw
) -> None:
    """The plain loop."""
    model = Hooked()
    optimizer = optimizer_of(model)
    model.hook = make(model, optimizer)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the rate is set late in the backward pass, by the size of the gradient that arrives at the stem")
def rate_set_late(t: Trial) -> None:
    def make(_: Net, optimizer: torch.optim.Optimizer) -> Any:
        def hook(grad: torch.Tensor) -> None:
            optimizer.param_groups[0]["lr"] = 0.01 / (1 + float(grad.norm()))

        return hook

    with_late_hook(t, make)


@attack("gradients", "decay and betas are set late in the backward pass, by a count of backward passes")
def decay_set_late(t: Trial) -> None:
    def make(_: Net, optimizer: torch.optim.Optimizer) -> Any:
        def hook(_: torch.Tensor) -> None:
            group = optimizer.param_groups[0]
            group["weight_decay"] = 0.5 * group["weight_decay"] + 0.05
            group["betas"] = (0.8 * group["betas"][0], 0.99)

        return hook

    with_late_hook(t, make)


@attack("gradients", "a scheduler is stepped late in the backward pass")
def scheduler_stepped_late(t: Trial) -> None:
    def make(_: Net, optimizer: torch.optim.Optimizer) -> Any:
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return lambda _: schedule.step()

    with_late_hook(t, make)


@attack("gradients", "the gradient of the head is halved in place late in the backward pass")
def gradient_halved_late(t: Trial) -> None:
    def make(model: Net, _: torch.optim.Optimizer) -> Any:
        def hook(_: torch.Tensor) -> None:
            model.head.weight.grad.mul_(0.5)

        return hook

    with_late_hook(t, make, sgd)


@attack("gradients", "the gradient of the head is taken away late in the backward pass (p.grad = None)")
def gradient_taken_late(t: Trial) -> None:
    def make(model: Net, _: torch.optim.Optimizer) -> Any:
        def hook(_: torch.Tensor) -> None:
            model.head.weight.grad = None

        return hook

    with_late_hook(t, make, sgd)


@attack("gradients", "the head is frozen late in the backward pass, in every second step, and thawed after it")
def frozen_late(t: Trial) -> None:
    def make(model: Net, _: torch.optim.Optimizer) -> Any:
        calls: list[int] = []

        def hook(_: torch.Tensor) -> None:
            calls.append(1)
            if len(calls) % 2:
                model.head.weight.grad = None
                model.head.bias.requires_grad_(False)
            else:
                model.head.bias.requires_grad_(True)

        return hook

    with_late_hook(t, make, sgd)


@attack("gradients", "weights of the head are clamped through .data late in the backward pass")
def weights_clamped_late(t: Trial) -> None:
    def make(model: Net, _: torch.optim.Optimizer) -> Any:
        def hook(_: torch.Tensor) -> None:
            model.head.weight.data.clamp_(-0.2, 0.2)

        return hook

    t.writes_within_step("head.weight")
    with_late_hook(t, make, sgd)


@attack("gradients", "moments of the optimizer scale the gradient that arrives at the stem")
def moments_read_late(t: Trial) -> None:
    def make(model: Net, optimizer: torch.optim.Optimizer) -> Any:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            state = optimizer.state.get(model.head.weight, {})
            return grad * (1 + float(state["exp_avg"].abs().sum()) if "exp_avg" in state else 1.0)

        return hook

    with_late_hook(t, make)


@attack("gradients", "the number of updates in the optimizer's state decides late in the backward pass")
def count_read_late(t: Trial) -> None:
    def make(model: Net, optimizer: torch.optim.Optimizer) -> Any:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            counts = [float(s["step"]) for s in optimizer.state.values() if "step" in s]
            return grad * (1 + 0.1 * max(counts, default=0.0))

        return hook

    with_late_hook(t, make)


@attack("gradients", "the optimizer's state_dict is copied late in the backward pass, and its moments are logged")
def states_saved_late(t: Trial) -> None:
    def make(_: Net, optimizer: torch.optim.Optimizer) -> Any:
        def hook(_: torch.Tensor) -> None:
            states = optimizer.state_dict()["state"].values()
            t.note("moments", sum(float(s["exp_avg"].abs().sum()) for s in states))

        return hook

    with_late_hook(t, make)


@attack("gradients", "the sum of all weights scales the gradient that arrives at the stem")
def weights_read_late(t: Trial) -> None:
    def make(model: Net, _: torch.optim.Optimizer) -> Any:
        def hook(grad: torch.Tensor) -> torch.Tensor:
            return grad * (1 + sum(float(p.detach().abs().sum()) for p in model.parameters()))

        return hook

    with_late_hook(t, make, sgd)


@attack("gradients", "the model is evaluated late in the backward pass, under no_grad, on other data")
def evaluated_late(t: Trial) -> None:
    def make(model: Net, _: torch.optim.Optimizer) -> Any:
        def hook(_: torch.Tensor) -> None:
            model.hook, kept = None, model.hook
            with torch.no_grad():
                t.note("eval", model(*tokens(90)))
            model.hook = kept

        return hook

    with_late_hook(t, make, sgd)


@attack("gradients", "an average of the weights is moved late in the backward pass, before the step", only=EXACT)
def averaged_late(t: Trial) -> None:
    def make(model: Net, _: torch.optim.Optimizer) -> Any:
        average = [p.detach().clone() for p in model.parameters()]

        def hook(_: torch.Tensor) -> None:
            for q, p in zip(average, model.parameters(), strict=True):
                q.lerp_(p.detach(), 0.5)
            t.note("average", average)

        return hook

    with_late_hook(t, make, sgd)


class Reading(Block):
    """A block that reads what belongs to the last layer, without gradients."""

    last: Any = None
    way = "detach"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        w = self.last[0].weight
        w = w.detach() if self.way == "detach" else w.data
        return super().forward(x + (x @ w.T @ w) * 0.1)


class Recomputing(Net):
    """Its blocks are checkpointed by the program."""

    use_reentrant = False

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.use_reentrant)
        return x


def _second_run_reads_head(t: Trial, *, way: str, use_reentrant: bool, rate: float = 0.1) -> None:
    model = Recomputing([Reading(), Reading()])
    model.use_reentrant = use_reentrant
    for block in model.blocks:
        block.last, block.way = [model.head], way
    optimizer = sgd(model, lr=rate)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "blocks in the program's own checkpoints read the head's weight, detached, when they are run again"
)
def own_second_run_reads_detached_head(t: Trial) -> None:
    _second_run_reads_head(t, way="detach", use_reentrant=False)


@attack("gradients", "the same through .data, in re-entrant checkpoints")
def own_reentrant_second_run_reads_head(t: Trial) -> None:
    _second_run_reads_head(t, way="data", use_reentrant=True)


@attack("gradients", "the same through .data, with a rate of zero in the first step")
def own_second_run_reads_head_after_warm_up(t: Trial) -> None:
    _second_run_reads_head(t, way="data", use_reentrant=False, rate=0.0)


@attack(
    "gradients", "blocks in the program's own checkpoints scale by the optimizer's rate and by its count of updates"
)
def own_second_run_reads_optimizer(t: Trial) -> None:
    class Scheduled(Block):
        optimizer: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states = self.optimizer[0].state.values()
            count = max((float(s["step"]) for s in states if "step" in s), default=0.0)
            return super().forward(x * (1 + 0.1 * count))

    model = Recomputing([Scheduled(), Scheduled()])
    optimizer = adamw(model)
    for block in model.blocks:
        block.optimizer = [optimizer]
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "a function's backward pass reads the optimizer's rate and a moment of a later layer")
def function_reads_optimizer(t: Trial) -> None:
    class Damped(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, optimizer: Any) -> torch.Tensor:
            ctx.optimizer = optimizer
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            states = list(ctx.optimizer.state.values())
            return grad * (1 + sum(float(s["exp_avg_sq"].sum()) for s in states if s)), None

    class Damping(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(Damped.apply(self.stem(x), self.optimizer[0]))

    model = Damping()
    optimizer = adamw(model)
    model.optimizer = [optimizer]
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "full backward hooks of early layers read gradients and weights of the head, and set its rate")
def early_module_hooks_read_head(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.SGD(
        [{"params": model.head.parameters()}, {"params": [*model.stem.parameters(), *model.blocks.parameters()]}],
        lr=0.1,
    )

    def hook(module: Any, _: Any, grads: Any) -> None:
        t.note("head", (model.head.weight.detach().sum(), model.head.weight.grad.sum()))
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + float(model.head.weight.grad.norm()))

    model.blocks[0].register_full_backward_hook(hook)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "the same in the program's blocks as they are: a plan that recomputes them reads the count once more"
)
def forward_reads_count_of_updates(t: Trial) -> None:
    class Scheduled(Block):
        optimizer: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            states = self.optimizer[0].state.values()
            count = max((float(s["step"]) for s in states if "step" in s), default=0.0)
            return super().forward(x * (1 + 0.1 * count))

    model = Net([Scheduled(), Scheduled()])
    optimizer = adamw(model)
    for block in model.blocks:
        block.optimizer = [optimizer]
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "blocks scale by the decay in the optimizer's groups, which the loop sets between the passes, in the program's own checkpoints",
)
def own_second_run_reads_groups(t: Trial) -> None:
    class Scheduled(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * (1 + held[0].param_groups[0]["scale"]))

    model = Recomputing([Scheduled(), Scheduled()])
    optimizer = torch.optim.SGD([{"params": list(model.parameters()), "scale": 0.1}], lr=0.1, momentum=0.9)
    held = [optimizer]
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        optimizer.param_groups[0]["scale"] = 0.1 * step
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
