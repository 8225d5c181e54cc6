"""Layers, losses and uses of autograd out of the wild: attention in odd forms, vision, physics, calibration, contexts of torch's within blocks."""

import contextlib
import math
from typing import Any

import torch
from tests.attacks.models import (
    NUM_CLASSES,
    WIDTH,
    Block,
    Net,
    adamw,
    sgd,
    tokens,
    train,
)
from tests.attacks.places import BITWISE, EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


class Attention(nn.Module):
    """Attention by hand in two heads; subclasses change the weights."""

    is_attention = True

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def weights(self, scores: torch.Tensor) -> torch.Tensor:
        return scores.softmax(-1)

    def heads(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(h.unflatten(-1, (2, -1)).transpose(1, 2) for h in self.qkv(x).chunk(3, -1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.heads(x)
        y = self.weights(q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])) @ v
        return x + self.out(y.transpose(1, 2).flatten(2))


@attack("gradients", "heads are mixed by learned matrices before and after the softmax (talking heads)")
def talking_heads(t: Trial) -> None:
    class Talking(Attention):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.after = nn.Parameter(torch.eye(2) + 0.1), nn.Parameter(torch.eye(2) + 0.1)

        def weights(self, scores: torch.Tensor) -> torch.Tensor:
            scores = torch.einsum("hg,bgij->bhij", self.before, scores)
            return torch.einsum("hg,bgij->bhij", self.after, scores.softmax(-1))

    train(t, Net([Talking(), Talking()]))


@attack("gradients", "scores are handed to the next block, which adds them to its own (residual attention)")
def residual_scores(t: Trial) -> None:
    class Residual(Attention):
        def forward(self, x: torch.Tensor, before: torch.Tensor | None = None) -> Any:
            q, k, v = self.heads(x)
            scores = q @ k.transpose(-1, -2) / 2
            scores = scores if before is None else scores + before
            return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2)), scores

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x, scores = self.stem(x), None
            for block in self.blocks:
                x, scores = block(x, scores)
            return x

    train(t, Model([Residual(), Residual()], sequential=False))


@attack(
    "gradients",
    "parts of the scores are written in place: a column for the first token, a bias by slices, the diagonal by fill_diagonal_",
)
def scores_written_by_parts(t: Trial) -> None:
    class Written(Attention):
        def weights(self, scores: torch.Tensor) -> torch.Tensor:
            scores[..., 0] += 1.0
            scores[:, 1, 2:] *= 0.5
            scores.diagonal(dim1=-2, dim2=-1).fill_(-1.0)
            return scores.softmax(-1)

    train(t, Net([Written(), Written()]))


@attack(
    "gradients", "weights of attention are written in place after the softmax: small ones are set to zero under no_grad"
)
def weights_cut_in_place(t: Trial) -> None:
    class Cut(Attention):
        def weights(self, scores: torch.Tensor) -> torch.Tensor:
            w = scores.softmax(-1) * 1.0
            with torch.no_grad():
                w[w < 0.12] = 0
            return w

    train(t, Net([Cut(), Cut()]))


class Mixed(torch.autograd.Function):
    """A product under custom_fwd and custom_bwd."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = ctx.saved_tensors
        return (grad @ w).to(x.dtype), (grad.flatten(0, -2).T.to(x.dtype) @ x.flatten(0, -2)).to(w.dtype)


@attack(
    "recomputation",
    "a function with custom_fwd and custom_bwd in blocks, autocast around the forward and off within the loss",
    only=BITWISE,
)
def custom_fwd_under_autocast(t: Trial) -> None:
    class Custom(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return super().inner(x) + Mixed.apply(x, self.wide.weight)[..., :WIDTH]

    class Loss(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                return super().loss(logits.float(), y)

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x, y)

    train(t, Loss([Custom(), Custom()]).float(), batch=lambda i: (tokens(i)[0].float(), tokens(i)[1]))


@attack(
    "second order",
    "a physics-informed net: second derivatives with respect to the inputs in the loss, trained by LBFGS",
)
def physics_informed(t: Trial) -> None:
    class Smooth(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(torch.tanh(self.wide(x)))

    model = Net([Smooth(), Smooth()])
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    t.apply(model, optimizer)
    for step in range(2):
        x = tokens(step)[0].requires_grad_()

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            u = model(x)[..., :1]
            (du,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (ddu,) = torch.autograd.grad(du[..., 0].sum(), x, create_graph=True)
            loss = (ddu[..., 0] + u[..., 0]).square().mean()
            loss.backward()
            return loss

        t.note("loss", optimizer.step(closure))
        t.end_step()


@attack(
    "second order",
    "implicit gradients: conjugate gradients on products with the Hessian, set as gradients by hand (iMAML)",
)
def implicit_gradients(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        params = list(model.parameters())
        inner = model(*tokens(step))
        grads = torch.autograd.grad(inner, params, create_graph=True)
        outer = torch.autograd.grad(model(*tokens(step + 50)), params)
        x = [torch.zeros_like(g) for g in outer]
        for _ in range(2):
            hx = torch.autograd.grad(grads, params, grad_outputs=x, retain_graph=True)
            x = [a + 0.1 * (g - h - a) for a, g, h in zip(x, outer, hx, strict=True)]
        optimizer.zero_grad()
        for p, g in zip(params, x, strict=True):
            p.grad = g
        optimizer.step()
        t.note("inner", inner)
        t.end_step()


@attack(
    "second order",
    "rates of the inner update are parameters by layer, trained through two inner steps (Meta-SGD), the weights by functional_call",
)
def learned_inner_rates(t: Trial) -> None:
    from torch.func import functional_call

    class Meta(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = Net()
            self.rates = nn.ParameterDict(
                {n.replace(".", "_"): torch.tensor(0.05) for n, _ in self.net.named_parameters()}
            )

        def forward(self, inner: Any, outer: Any) -> torch.Tensor:
            fast = dict(self.net.named_parameters())
            for _ in range(2):
                loss = functional_call(self.net, fast, inner)
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {
                    n: p - self.rates[n.replace(".", "_")] * g for (n, p), g in zip(fast.items(), grads, strict=True)
                }
            return functional_call(self.net, fast, outer)

    train(t, Meta(), batch=lambda i: (tokens(i), tokens(i + 50)), num_steps=3)


@attack(
    "parts",
    "crops of two sizes as a list are run in groups of one size, a teacher's centre is a buffer, the last layer frozen at first (DINO)",
    only=EXACT,
)
def crops_of_two_sizes(t: Trial) -> None:
    import copy

    class Crops(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("centre", torch.zeros(NUM_CLASSES))

        def forward(self, crops: Any, y: Any = None) -> torch.Tensor:
            return torch.cat([Net.forward(self, torch.cat(group)).mean(1) for group in crops])

    model = Crops()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = adamw(model)
    t.apply(model, optimizer)
    t.track(teacher)
    for step in range(4):
        x = tokens(step)[0]
        large, small = [x, x.flip(1)], [x[:, :3], x[:, 3:]]
        with torch.no_grad():
            goal = teacher([large])
            target = ((goal - teacher.centre) / 0.5).softmax(-1).repeat(2, 1)
            teacher.centre.lerp_(goal.mean(0), 0.1)
        loss = -(target * model([large, small]).log_softmax(-1)).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        if step < 2:
            for p in model.head.parameters():
                p.grad = None
        torch.nn.utils.clip_grad_norm_(model.parameters(), 3.0)
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(model.parameters(), teacher.parameters(), strict=True):
                q.lerp_(p, 0.1)
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "parameters are of a subclass that notes through __torch_function__ which functions it was given to"
)
def parameters_of_a_subclass(t: Trial) -> None:
    seen: list[str] = []

    class Noted(nn.Parameter):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = getattr(func, "__name__", str(func))
            if name in ("linear", "gelu"):
                seen.append(name)
            return super().__torch_function__(func, types, args, kwargs or {})

    model = Net()
    for block in model.blocks:
        block.wide.weight = Noted(block.wide.weight.detach())
    train(t, model, after=lambda _: t.note("seen", list(seen)))


@attack(
    "gradients",
    "trained weights are wrappers of two tensors, handled by __torch_dispatch__ (a low-rank weight as one tensor)",
    only=EXACT,
)
def wrapper_weights(t: Trial) -> None:
    class Product(torch.Tensor):
        @staticmethod
        def __new__(cls, a: torch.Tensor, b: torch.Tensor) -> "Product":
            shape = (a.shape[0], b.shape[1])
            return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=a.dtype, requires_grad=False)

        def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
            self.a, self.b = a, b

        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten.detach.default:
                return Product(args[0].a, args[0].b)
            plain = [x.a @ x.b if isinstance(x, Product) else x for x in args]
            return func(*plain, **(kwargs or {}))

    model = Net()
    for block in model.blocks:
        full = block.wide.weight.detach()
        block.wide.weight = nn.Parameter(
            Product(full[:, :2].clone(), torch.eye(2, WIDTH, dtype=full.dtype)), requires_grad=False
        )
    train(t, model)


@attack(
    "recomputation",
    "blocks ask torch for settings: is_autocast_enabled, get_default_dtype, is_inference, are deterministic algorithms on",
)
def asks_for_settings(t: Trial) -> None:
    class Asking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = 1.0 + 0.1 * torch.are_deterministic_algorithms_enabled() + 0.2 * torch.is_autocast_enabled("cpu")
            scale += 0.05 * torch.get_num_threads() + 0.3 * torch.is_anomaly_enabled()
            return super().forward(scale * x)

    model = Net([Asking(), Asking()])

    @contextlib.contextmanager
    def strict() -> Any:
        torch.use_deterministic_algorithms(True, warn_only=True)
        yield
        torch.use_deterministic_algorithms(False)

    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        with strict() if step % 2 else contextlib.nullcontext():
            loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "the stack of calls decides: a block looks at who called it (inspect), and how deep")
def asks_who_calls(t: Trial) -> None:
    import inspect

    class Asking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            names = [f.function for f in inspect.stack()]
            return super().forward(x * (1.5 if "from_loop" in names else 1.0))

    model = Net([Asking(), Asking()])
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def from_loop(step: int) -> torch.Tensor:
        return model(*tokens(step))

    for step in range(4):
        loss = from_loop(step) if step % 2 else model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "the block's backward pass is known to it: a flag that a hook on the loss sets and the loop takes back (torch._C._current_graph_task_id)",
)
def asks_whether_in_backward(t: Trial) -> None:
    class Asking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside = torch._C._current_graph_task_id() != -1
            return super().forward(x * (3.0 if inside else 1.0))

    train(t, Net([Asking(), Asking()]))
