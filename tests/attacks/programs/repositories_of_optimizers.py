"""Optimizers of the programs' own: preconditioners and factored moments by hand, steps without a closure, zero_grad that does more, subclasses of torch's."""

import math
from typing import Any

import torch
from tests.attacks.models import Net, sgd, tokens
from tests.attacks.places import BITWISE, EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial


class _Soap(torch.optim.Optimizer):
    """Adam in the eigenbasis of Shampoo's preconditioner; the first step only starts it."""

    def __init__(self, params: Any, lr: float = 3e-2) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.95), "frequency": 2})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state, grad = self.state[p], p.grad
                if "step" not in state:
                    state["step"], state["exp_avg"], state["exp_avg_sq"] = (
                        0,
                        torch.zeros_like(grad),
                        torch.zeros_like(grad),
                    )
                    state["gg"] = [torch.zeros(n, n, dtype=grad.dtype) for n in grad.shape] if grad.ndim == 2 else []
                    state["q"] = None
                if state["q"] is None:
                    self._gather(state, grad, 0.95)
                    state["q"] = [
                        torch.linalg.eigh(m + 1e-8 * torch.eye(len(m), dtype=m.dtype))[1].flip(1) for m in state["gg"]
                    ]
                    continue
                projected = self._turned(state, grad)
                state["step"] += 1
                state["exp_avg"].mul_(0.9).add_(grad, alpha=0.1)
                state["exp_avg_sq"].mul_(0.95).add_(projected.square(), alpha=0.05)
                size = group["lr"] * math.sqrt(1 - 0.95 ** state["step"]) / (1 - 0.9 ** state["step"])
                update = self._turned(state, state["exp_avg"]) / state["exp_avg_sq"].sqrt().add_(1e-8)
                p.add_(self._turned(state, update, back=True), alpha=-size)
                self._gather(state, grad, 0.95)
                if state["step"] % group["frequency"] == 0:
                    state["q"] = [torch.linalg.qr(m @ q)[0] for m, q in zip(state["gg"], state["q"], strict=True)]

    def _gather(self, state: dict[str, Any], grad: torch.Tensor, beta: float) -> None:
        for m, outer in zip(state["gg"], (grad @ grad.T, grad.T @ grad) if state["gg"] else (), strict=True):
            m.lerp_(outer, 1 - beta)

    def _turned(self, state: dict[str, Any], value: torch.Tensor, *, back: bool = False) -> torch.Tensor:
        if not state["q"]:
            return value
        left, right = state["q"]
        return left @ value @ right.T if back else left.T @ value @ right


@attack(
    "gradients",
    "Adam in a basis of eigenvectors that are taken up every second step, the first step only starts it (SOAP)",
    only=BITWISE,  # where a gradient's rank is low, rounding chooses the basis
)
def soap(t: Trial) -> None:
    model = Net()
    optimizer = _Soap(model.parameters())
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


class _Factored(torch.optim.Optimizer):
    """Second moments by rows and columns, a rate by the step and the weight's size."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": None, "clip_threshold": 1.0, "decay_rate": -0.8, "beta1": None})

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = closure() if closure is not None else None
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                grad = p.grad.data
                state = self.state[p]
                factored = grad.ndim >= 2
                if not state:
                    state["step"], state["RMS"] = 0, 0
                    if factored:
                        state["row"], state["col"] = (
                            torch.zeros(grad.shape[:-1]).to(grad),
                            torch.zeros(grad.shape[-1:]).to(grad),
                        )
                    else:
                        state["sq"] = torch.zeros_like(grad)
                state["step"] += 1
                state["RMS"] = p.data.norm(2) / p.data.numel() ** 0.5
                rate = min(1e-2, 1.0 / math.sqrt(state["step"])) * max(1e-3, float(state["RMS"]))
                beta = 1.0 - math.pow(state["step"], group["decay_rate"])
                update = grad**2 + 1e-30
                if factored:
                    state["row"].mul_(beta).add_(update.mean(dim=-1), alpha=1.0 - beta)
                    state["col"].mul_(beta).add_(update.mean(dim=-2), alpha=1.0 - beta)
                    row = (state["row"] / state["row"].mean(dim=-1, keepdim=True)).rsqrt_().unsqueeze(-1)
                    update = torch.mul(row, state["col"].unsqueeze(-2).rsqrt()).mul_(grad)
                else:
                    state["sq"].mul_(beta).add_(update, alpha=1.0 - beta)
                    update = state["sq"].rsqrt().mul_(grad)
                update.div_((update.norm(2) / update.numel() ** 0.5 / group["clip_threshold"]).clamp_(min=1.0))
                p.data.add_(-update.mul_(rate * 30))
        return loss


@attack(
    "gradients",
    "moments by rows and columns, rates by the weight's own size, written through .data (fairseq's Adafactor)",
)
def factored_moments(t: Trial) -> None:
    model = Net()
    optimizer = _Factored(model.parameters())
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("sizes", [float(optimizer.state[p]["RMS"]) for p in list(model.parameters())[:3]])
        t.end_step()


@attack(
    "second order",
    "the optimizer itself takes Hessian diagonals by autograd.grad of the gradients that a graph has made (AdaHessian)",
    only=EXACT,
)
def hessian_in_the_step(t: Trial) -> None:
    class Hessian(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 3e-2) -> None:
            super().__init__(params, {"lr": lr})

        def step(self) -> None:  # type: ignore[override]
            params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
            grads = [p.grad for p in params]
            signs = [torch.randint_like(p, high=2) * 2.0 - 1.0 for p in params]
            products = torch.autograd.grad(grads, params, grad_outputs=signs, only_inputs=True, retain_graph=False)
            for group in self.param_groups:
                for p, grad, h, z in zip(params, grads, products, signs, strict=True):
                    state = self.state[p]
                    if not state:
                        state["m"], state["v"], state["n"] = torch.zeros_like(p.data), torch.zeros_like(p.data), 0
                    state["n"] += 1
                    diagonal = (h * z).abs().detach()
                    if diagonal.ndim == 2:
                        diagonal = diagonal.mean(1, keepdim=True).expand_as(diagonal).clone()
                    state["m"].mul_(0.9).add_(grad.detach(), alpha=0.1)
                    state["v"].mul_(0.99).addcmul_(diagonal, diagonal, value=0.01)
                    bias = 1 - 0.9 ** state["n"], 1 - 0.99 ** state["n"]
                    p.data.add_(-group["lr"] / bias[0] * state["m"] / ((state["v"].sqrt() / math.sqrt(bias[1])) + 1e-2))

    model = Net()
    optimizer = Hessian(model.parameters())
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward(create_graph=True)
        optimizer.step()
        for p in model.parameters():
            p.grad = None
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "dual averages of gradients by cube roots, weights made from the start each time, momentum by hand (MADGRAD)",
)
def dual_averages(t: Trial) -> None:
    class Dual(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float = 1e-2) -> None:
            super().__init__(params, {"lr": lr, "k": 0})

        @torch.no_grad()
        def step(self) -> None:  # type: ignore[override]
            k = self.param_groups[0]["k"]
            for group in self.param_groups:
                lamb = group["lr"] * math.pow(k + 1, 0.5)
                for p in group["params"]:
                    if p.grad is None:
                        continue
                    state = self.state[p]
                    if not state:
                        state["sum_sq"], state["s"], state["x0"] = (
                            torch.zeros_like(p),
                            torch.zeros_like(p),
                            p.detach().clone(),
                        )
                    state["sum_sq"].addcmul_(p.grad, p.grad, value=lamb)
                    rms = state["sum_sq"].pow(1 / 3).add_(1e-6)
                    state["s"].add_(p.grad, alpha=lamb)
                    z = state["x0"].addcdiv(state["s"], rms, value=-1)
                    p.copy_(0.9 * p + 0.1 * z)
                group["k"] = k + 1

    model = Net()
    optimizer = Dual(model.parameters())
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "an optimizer's own zero_grad counts and lets an average go on, and the loop asks it for zeros",
    only=EXACT,
)
def zeroing_that_counts(t: Trial) -> None:
    class Averaging(torch.optim.SGD):
        count = 0

        def zero_grad(self, set_to_none: bool = False) -> None:
            self.count += 1
            with torch.no_grad():
                for group in self.param_groups:
                    for p in group["params"]:
                        slow = self.state[p].setdefault("slow", p.detach().clone())
                        slow.lerp_(p, 0.2)
            super().zero_grad(set_to_none=set_to_none)

    model = Net()
    optimizer = Averaging(model.parameters(), lr=0.1, momentum=0.9)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad(set_to_none=False)
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("slow", [optimizer.state[p]["slow"] for p in model.parameters()])
        t.note("count", optimizer.count)
        t.end_step()


@attack(
    "gradients",
    "a model's own zero_grad clears what its blocks have gathered, and the loop calls it for zeros, or by a keyword",
    only=EXACT,
)
def zeroing_of_the_model(t: Trial) -> None:
    class Gathering(Net):
        def __init__(self) -> None:
            super().__init__()
            self.gathered: list[float] = []

        def zero_grad(self, set_to_none: bool = False, keep: bool = False) -> None:
            if not keep:
                self.gathered.clear()
            super().zero_grad(set_to_none)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x, y)
            self.gathered.append(float(loss.detach()))
            return loss * (1 + 0.1 * len(self.gathered))

    model = Gathering()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        if step % 3 == 2:
            model.zero_grad(keep=True)
        else:
            model.zero_grad(set_to_none=False)
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "torch's own Adafactor with relative steps, weights by two groups, a rate by warm-up")
def torchs_adafactor(t: Trial) -> None:
    model = Net()
    groups = [
        {"params": list(model.blocks.parameters())},
        {"params": [*model.stem.parameters(), *model.head.parameters()], "lr": 2e-2},
    ]
    optimizer = torch.optim.Adafactor(groups, lr=5e-2, weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / 3))
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "an optimizer's class is a subclass without a step of its own, which counts groups and saves its count"
)
def subclass_without_a_step(t: Trial) -> None:
    class Counted(torch.optim.AdamW):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            self.num_groups = getattr(self, "num_groups", 0) + 1
            super().add_param_group(param_group)

        def state_dict(self) -> dict[str, Any]:
            return {**super().state_dict(), "num_groups": self.num_groups}

    model = Net()
    groups = [
        {"params": [p for p in model.parameters() if (p.ndim > 1) is wide], "weight_decay": 0.1 * wide}
        for wide in (True, False)
    ]
    optimizer = Counted(groups, lr=1e-2)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("groups", optimizer.state_dict()["num_groups"])
        t.end_step()
