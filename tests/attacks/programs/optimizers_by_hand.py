"""Optimizers as repositories write them by hand, and wrappers around them, which keep what they need in states, gradients and groups."""

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn

Update = Callable[[Any, torch.Tensor, dict[str, Any]], None]


def orthogonalised(matrix: torch.Tensor) -> torch.Tensor:
    """Newton and Schulz's iteration towards the nearest orthogonal matrix."""
    x = matrix / (matrix.norm() + 1e-7)
    x = x.mT if matrix.shape[0] > matrix.shape[1] else x
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.mT if matrix.shape[0] > matrix.shape[1] else x


class ByParameter(torch.optim.Optimizer):
    """A subclass says what one parameter's update is."""

    def __init__(self, parameters: Any, **defaults: Any) -> None:
        super().__init__(parameters, {"lr": 0.02, **defaults})

    def update(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        """Writes to `p`."""
        raise NotImplementedError

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of each parameter with a gradient."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group, self.state[p])
        return loss


@attack("gradients", "one class with a flag by group: Newton-Schulz momentum for matrices, Adam for the rest (Muon)")
def muon_by_groups(t: Trial) -> None:
    class Muon(ByParameter):
        def update(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            if group["use_muon"]:
                momentum = state.setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 0.05)
                nesterov = p.grad.lerp_(momentum, 0.95)
                p.add_(orthogonalised(nesterov), alpha=-0.02 * max(1, p.shape[0] / p.shape[1]) ** 0.5)
                return
            state["step"] = state.get("step", 0) + 1
            m, v = state.setdefault("m", torch.zeros_like(p)), state.setdefault("v", torch.zeros_like(p))
            m.lerp_(p.grad, 0.1)
            v.lerp_(p.grad.square(), 0.05)
            p.addcdiv_(m / (1 - 0.9 ** state["step"]), v.div(1 - 0.95 ** state["step"]).sqrt_().add_(1e-8), value=-0.01)

    model = Net()
    inner = [p for p in model.blocks.parameters() if p.dim() == 2]
    known = set(inner)
    rest = [p for p in model.parameters() if p not in known]
    train(t, model, Muon([{"params": inner, "use_muon": True}, {"params": rest, "use_muon": False}]))


@attack("gradients", "torch's own Muon for the matrices of the blocks and AdamW for the rest, each stepped")
def muon_of_torch(t: Trial) -> None:
    model = Net()
    inner = [p for p in model.blocks.parameters() if p.dim() == 2]
    known = set(inner)
    muon = torch.optim.Muon(inner, lr=0.02)
    rest = torch.optim.AdamW([p for p in model.parameters() if p not in known], lr=1e-2)
    t.apply(model, muon, rest)
    for step in range(4):
        loss = model(*tokens(step))
        loss.backward()
        for each in (muon, rest):
            each.step()
        model.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "preconditioners of rows and columns, whose roots are taken anew every second step (Shampoo)")
def shampoo(t: Trial) -> None:
    class Shampoo(ByParameter):
        def update(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            grad = p.grad.reshape(p.shape[0], -1).double()
            state["count"] = state.get("count", -1) + 1
            for side, gram in (("left", grad @ grad.T), ("right", grad.T @ grad)):
                kept = state.setdefault(side, torch.eye(len(gram), dtype=torch.float64) * 1e-2)
                kept.add_(gram)
                if state["count"] % 2 == 0:
                    values, vectors = torch.linalg.eigh(kept)
                    state[f"{side} root"] = vectors @ torch.diag(values.clamp(min=1e-6).pow(-0.25)) @ vectors.T
            p.sub_((state["left root"] @ grad @ state["right root"]).view_as(p).to(p.dtype), alpha=group["lr"])

    model = Net()
    train(t, model, Shampoo(model.parameters()))


@attack(
    "gradients",
    "averages are kept apart from the weights, which are moved between the two in train() and eval() (schedule-free)",
)
def schedule_free_class(t: Trial) -> None:
    class ScheduleFree(ByParameter):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, train_mode=True, k=0)

        def turn(self, training: bool) -> None:
            with torch.no_grad():
                for group in self.param_groups:
                    if group["train_mode"] == training:
                        continue
                    for p in group["params"]:
                        if "z" in self.state[p]:
                            p.lerp_(self.state[p]["z"], 0.1 if training else 1 - 1 / 0.9)
                    group["train_mode"] = training

        def update(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            if not group["train_mode"]:
                raise ValueError("Optimizer was not in train mode when step is called")
            z = state.setdefault("z", p.clone())
            state["k"] = state.get("k", 0) + 1
            share = 1 / state["k"]
            p.lerp_(z, share)
            p.add_(p.grad, alpha=group["lr"] * (0.9 * (1 - share) - 1))
            z.sub_(p.grad, alpha=group["lr"])

    model = Net()
    optimizer = ScheduleFree(model.parameters())
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.turn(True)
        model.train()
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.turn(False)
        model.eval()
        with torch.no_grad():
            t.note("eval", model(*tokens(90)))
        t.end_step()


@attack("gradients", "signs of an interpolation, written over the gradient in place (Lion)")
def lion(t: Trial) -> None:
    class Lion(ByParameter):
        def update(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            average = state.setdefault("exp_avg", torch.zeros_like(p))
            p.mul_(1 - group["lr"] * 0.1)
            update = average.clone().mul_(0.9).add_(p.grad, alpha=0.1).sign_()
            average.mul_(0.99).add_(p.grad, alpha=0.01)
            p.grad.copy_(update)
            p.add_(p.grad, alpha=-group["lr"])

    model = Net()
    train(t, model, Lion(model.parameters()))


@attack("gradients", "gradients projected to a low rank found by an SVD every second step, with Adam there (GaLore)")
def galore(t: Trial) -> None:
    class Galore(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            full = {}
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is None or p.dim() < 2:
                        continue
                    state = self.state[p]
                    number = int(state.get("step", 0))
                    if number % 2 == 0:
                        self.bases[p] = torch.linalg.svd(p.grad.double(), full_matrices=False)[0][:, :2].to(p.dtype)
                    full[p] = p.data
                    before = p.clone()
                    p.grad = self.bases[p] @ (self.bases[p].T @ p.grad)
                    full[p] = before
            loss = super().step(closure)
            for p, before in full.items():
                p.copy_(before + 0.25 * (p - before))
            return loss

    model = Net()
    optimizer = Galore(model.parameters(), lr=0.02)
    optimizer.bases = {}
    train(t, model, optimizer)


@attack(
    "gradients",
    "an update whose sign is not the gradient's is masked, in a subclass of AdamW that compares weights (cautious)",
)
def cautious(t: Trial) -> None:
    class Cautious(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            before = [p.clone() for g in self.param_groups for p in g["params"]]
            loss = super().step(closure)
            for p, old in zip((p for g in self.param_groups for p in g["params"]), before, strict=True):
                moved = p - old
                p.copy_(old + moved * (moved * p.grad < 0))
            return loss

    model = Net()
    train(t, model, Cautious(model.parameters(), lr=1e-2))


@attack(
    "gradients",
    "a wrapper takes weight decay out of the groups for the time of the step and adds it to gradients (LARC)",
)
def larc(t: Trial) -> None:
    class Larc:
        def __init__(self, optimizer: torch.optim.Optimizer) -> None:
            self.optim = optimizer

        def __getattr__(self, name: str) -> Any:
            return getattr(self.optim, name)

        def step(self) -> None:
            decays = []
            with torch.no_grad():
                for group in self.optim.param_groups:
                    decays.append(group["weight_decay"])
                    group["weight_decay"] = 0
                    for p in group["params"]:
                        if p.grad is None:
                            continue
                        ratio = 0.5 * p.norm() / (p.grad.norm() + p.norm() * decays[-1] + 1e-8)
                        p.grad.add_(p, alpha=decays[-1])
                        p.grad.mul_(min(float(ratio) / group["lr"], 1))
            self.optim.step()
            for group, decay in zip(self.optim.param_groups, decays, strict=True):
                group["weight_decay"] = decay

    model = Net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    outer = Larc(inner)
    t.apply(model, inner)
    for step in range(4):
        loss = model(*tokens(step))
        outer.zero_grad()
        loss.backward()
        outer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "Lookahead is an optimizer of its own that shares groups and states with the one inside", only=EXACT
)
def lookahead_class(t: Trial) -> None:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.optimizer, self.count = base, 0
            self.param_groups, self.defaults = base.param_groups, base.defaults
            self.state = base.state
            self.slow = [[p.clone().detach() for p in g["params"]] for g in self.param_groups]
            self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = {}, {}

        def zero_grad(self, set_to_none: bool = True) -> None:
            self.optimizer.zero_grad(set_to_none)

        def step(self, closure: Any = None) -> Any:
            loss = self.optimizer.step(closure)
            self.count += 1
            if self.count % 2 == 0:
                with torch.no_grad():
                    for group, slow in zip(self.param_groups, self.slow, strict=True):
                        for p, q in zip(group["params"], slow, strict=True):
                            q.lerp_(p, 0.5)
                            p.copy_(q)
            return loss

    model = Net()
    base = adamw(model)
    outer = Lookahead(base)
    t.apply(model, base)
    for step in range(5):
        loss = model(*tokens(step))
        outer.zero_grad()
        loss.backward()
        outer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "SAM as an optimizer around another: its closure runs forward and backward once more at moved weights"
)
def sam_class(t: Trial) -> None:
    class Sam(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"rho": 0.05, "lr": 0.1})
            self.base = torch.optim.SGD(self.param_groups, lr=0.1, momentum=0.9)
            self.param_groups = self.base.param_groups

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            grads = [p.grad.norm() for g in self.param_groups for p in g["params"] if p.grad is not None]
            scale = 0.05 / (torch.stack(grads).norm() + 1e-12)
            for group in self.param_groups:
                for p in group["params"]:
                    self.state[p]["old"] = p.data.clone()
                    p.add_(p.grad * scale)
            self.zero_grad()
            with torch.enable_grad():
                closure()
            for group in self.param_groups:
                for p in group["params"]:
                    p.data = self.state[p]["old"]
            self.base.step()

    model = Net()
    optimizer = Sam(model.parameters())
    t.apply(model, optimizer.base)
    for step in range(4):
        batch = tokens(step)

        def again(batch: Any = batch) -> torch.Tensor:
            loss = model(*batch)
            loss.backward()
            return loss

        t.note("loss", again())
        optimizer.step(again)
        optimizer.zero_grad()
        t.end_step()


@attack(
    "gradients",
    "the optimizer's whole state is thrown away by a new dict (optimizer.state = defaultdict(dict)), and by __setstate__",
)
def state_thrown_away(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def throw(step: int) -> None:
        if step == 1:
            optimizer.state = defaultdict(dict)
        elif step == 3:
            optimizer.__setstate__({"state": defaultdict(dict)})

    train(t, model, optimizer, num_steps=6, after=throw)


@attack(
    "gradients", "the same, where the outer optimizer holds the model's own parameters, and gradients are set by hand"
)
def outer_steps_on_own_weights(t: Trial) -> None:
    model = Net()
    inner, outer = adamw(model), torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    t.apply(model, inner)
    anchor = [p.detach().clone() for p in model.parameters()]
    for step in range(6):
        loss = model(*tokens(step))
        inner.zero_grad()
        loss.backward()
        inner.step()
        if step % 2:
            for p, old in zip(model.parameters(), anchor, strict=True):
                p.grad = old - p.data
                p.data = old.clone()
            outer.step()
            anchor = [p.detach().clone() for p in model.parameters()]
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "error feedback: signs of gradients go to the optimizer, and what was lost is kept on the parameter for the next step",
)
def sign_with_error_feedback(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, lr=0.02)

    def compress(_: int) -> None:
        for p in model.parameters():
            whole = p.grad + getattr(p, "error", 0)
            p.grad = whole.sign() * whole.abs().mean()
            p.error = whole - p.grad

    train(t, model, optimizer, between=compress)


@attack("gradients", "gradients are compressed to rank one by a warm-started power iteration (PowerSGD)", only=EXACT)
def power_sgd(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    right = {p: torch.randn(p.shape[1], 1) for p in model.parameters() if p.dim() == 2}

    def compress(_: int) -> None:
        for p, q in right.items():
            left = p.grad @ q
            left /= left.norm() + 1e-9
            right[p] = p.grad.T @ left
            p.grad.copy_(left @ right[p].T)

    train(t, model, optimizer, between=compress)


@attack(
    "gradients",
    "a container is an optimizer by class, whose groups are those of two others in one list (a chained optimizer)",
)
def chained_optimizer(t: Trial) -> None:
    class Chained(torch.optim.Optimizer):
        def __init__(self, *parts: torch.optim.Optimizer) -> None:
            self.parts = parts
            super().__init__([p for o in parts for g in o.param_groups for p in g["params"]], {})
            self.param_groups = [g for o in parts for g in o.param_groups]

        def step(self, closure: Any = None) -> None:
            for each in self.parts:
                each.step()

        def zero_grad(self, set_to_none: bool = True) -> None:
            for each in self.parts:
                each.zero_grad(set_to_none)

    model = Net()
    first, second = adamw(model.blocks), torch.optim.SGD([*model.stem.parameters(), *model.head.parameters()], lr=0.1)
    whole = Chained(first, second)
    schedule = torch.optim.lr_scheduler.LambdaLR(whole, lambda e: 0.9**e)
    t.apply(model, first, second)
    for step in range(4):
        loss = model(*tokens(step))
        whole.zero_grad()
        loss.backward()
        whole.step()
        schedule.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "an optimizer whose states are attributes of the parameters themselves (p.exp_avg), and none of its own",
)
def states_on_parameters(t: Trial) -> None:
    class Attributes(ByParameter):
        def update(self, p: torch.Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
            if not hasattr(p, "exp_avg"):
                p.exp_avg = torch.zeros_like(p)
            p.exp_avg.mul_(0.9).add_(p.grad)
            p.sub_(p.exp_avg, alpha=group["lr"])

    model = Net()
    train(t, model, Attributes(model.parameters()))


@attack(
    "gradients", "parameters of a whole group are stacked, updated at once and unstacked again (a vectorised optimizer)"
)
def stacked_update(t: Trial) -> None:
    class Stacked(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.05})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for p in (p for g in self.param_groups for p in g["params"]):
                by_shape.setdefault(p.shape, []).append(p)
            for shape, same in by_shape.items():
                momentum = self.state[same[0]].setdefault("momentum", torch.zeros(len(same), *shape))
                momentum.mul_(0.9).add_(torch.stack([p.grad for p in same]))
                for p, m in zip(same, momentum.unbind(), strict=True):
                    p.sub_(m, alpha=0.05)

    model = Net()
    train(t, model, Stacked(model.parameters()))


@attack(
    "gradients",
    "weights are projected back onto a norm sphere by forward pre-hooks that rewrite them under no_grad (nGPT)",
)
def normalised_before_forward(t: Trial) -> None:
    model = Net()

    def project(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.weight.div_(module.weight.norm(dim=1, keepdim=True))

    for block in model.blocks:
        block.wide.register_forward_pre_hook(project)
    t.writes_within_step("wide.weight")
    train(t, model)
