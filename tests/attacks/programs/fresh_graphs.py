"""Training code around autograd: hooks for saved tensors, the user's own checkpointing, equilibrium models, reversible blocks, modes and contexts."""

import contextlib
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@attack("recomputation", "torch.utils.checkpoint of the user's own inside each block, with dropout")
def own_checkpoint_inside(t: Trial) -> None:
    class Checkpointed(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(super().inner(x), 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + checkpoint(self.inner, x, use_reentrant=False)

    train(t, Net([Checkpointed(), Checkpointed()]))


@attack("recomputation", "a re-entrant checkpoint of the user's own around every block")
def own_reentrant_around(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return x

    train(t, Model([Block(), Block()], sequential=False))


@attack("recomputation", "a checkpoint of the user's own around the whole model")
def own_checkpoint_around(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = checkpoint(model, *tokens(step), use_reentrant=False)
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("recomputation", "saved_tensors_hooks of the user's own that count what is packed and unpacked")
def own_saved_tensor_hooks(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: x.clone(), lambda x: x):
            loss = model(*tokens(step))
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("parts", "a block's own hooks for saved tensors count what they unpack, and the next forward is scaled by that")
def unpacking_scales_the_next(t: Trial) -> None:
    class Counted(Block):
        unpacked = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def unpack(held: torch.Tensor) -> torch.Tensor:
                self.unpacked += 1
                return held

            with torch.autograd.graph.saved_tensors_hooks(lambda held: held, unpack):
                made = self.inner(x)
            return x + made * (1 + 0.01 * self.unpacked)

    train(t, Net([Counted(), Counted()]))


@attack("recomputation", "saved tensors kept at half precision by hooks (a lossy user's own)", only=EXACT)
def own_lossy_saved_tensors(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(lambda x: (x.dtype, x.half()), lambda p: p[1].to(p[0])):
            loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "save_on_cpu around the model")
def save_on_cpu_around(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "disable_saved_tensors_hooks around the model")
def hooks_disabled_around(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "a deep equilibrium block: fixed point without gradients, one step with, and a hook that solves backwards",
)
def equilibrium(t: Trial) -> None:
    class Equilibrium(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(6):
                    z = torch.tanh(x + 0.3 * self.inner(z))
            z = torch.tanh(x + 0.3 * self.inner(z))
            if z.requires_grad:
                z0 = z.detach().requires_grad_()
                f0 = torch.tanh(x.detach() + 0.3 * self.inner(z0))

                def solve(grad: torch.Tensor) -> torch.Tensor:
                    g = grad
                    for _ in range(6):
                        (g,) = torch.autograd.grad(f0, z0, g, retain_graph=True)
                        g = g + grad
                    return g

                z.register_hook(solve)
            return z

    train(t, Net([Equilibrium(), Equilibrium()]))


class _Reversible(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, f: nn.Module, *weights: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        with torch.no_grad():
            out = torch.cat((a + f(b), b), -1)
        ctx.f, ctx.weights = f, weights
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (out,) = ctx.saved_tensors
        b = out.chunk(2, -1)[1].detach().requires_grad_()
        ga, gb = grad.chunk(2, -1)
        with torch.enable_grad():
            y = ctx.f(b)
        db, *dw = torch.autograd.grad(y, (b, *ctx.weights), ga)
        return (torch.cat((ga, gb + db), -1), None, *dw)


@attack("recomputation", "reversible blocks by a custom autograd function that runs its layers again in backward")
def reversible(t: Trial) -> None:
    class Reversible(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH // 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return _Reversible.apply(x, self.f, *self.f.parameters()).flip(-1)

    train(t, Net([Reversible(), Reversible()]))


class _Rounded(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        _Rounded.calls += 1
        return grad * (1 + 0.1 * _Rounded.calls)


@attack("recomputation", "a straight-through estimator whose backward counts its calls")
def counting_backward(t: Trial) -> None:
    _Rounded.calls = 0

    class Quantised(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(_Rounded.apply(x))

    train(t, Net([Quantised(), Quantised()]))
    t.note("calls", _Rounded.calls)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, lam: list[float]) -> torch.Tensor:
        ctx.lam = lam
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.lam[0] * grad, None


@attack(
    "recomputation", "gradient reversal whose strength is read in the backward pass, from a list that the loop writes"
)
def reversal_read_late(t: Trial) -> None:
    lam = [0.0]

    class Adversarial(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 0.2 * self.inner(_Reverse.apply(x, lam))

    def warm(step: int) -> None:
        lam[0] = 0.1 * (step + 1)

    train(t, Net([Adversarial(), Adversarial()]), before=warm)


@attack("recomputation", "a hook on the block's output (x.register_hook) appends norms of gradients to a list")
def activation_hook_logs(t: Trial) -> None:
    norms: list[float] = []

    class Logged(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.inner(x)
            if y.requires_grad:
                y.register_hook(lambda g: norms.append(float(g.norm())))
            return y

    train(t, Net([Logged(), Logged()]))
    t.note("norms", norms)


@attack("recomputation", "a hook on an inner activation rescales by a running norm of gradients kept on the block")
def activation_hook_running(t: Trial) -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.running = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            if h.requires_grad:
                h.register_hook(self.scale)
            return x + h

        def scale(self, grad: torch.Tensor) -> torch.Tensor:
            self.running = 0.9 * self.running + 0.1 * float(grad.norm())
            return grad / self.running

    train(t, Net([Scaled(), Scaled()]))


@attack("recomputation", "retain_grad on an inner activation, which the loop reads after the backward pass (Grad-CAM)")
def retained_activation(t: Trial) -> None:
    class Kept(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.inner(x)
            if h.requires_grad:
                h.retain_grad()
            self.kept = [h]
            return x + h

    model = Net([Kept(), Kept()])
    train(t, model, between=lambda _: t.note("cam", model.blocks[0].kept[0].grad))


@attack("recomputation", "inference_mode inside the block computes a scale")
def inference_mode_inside(t: Trial) -> None:
    class Inferring(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.inference_mode():
                scale = float(self.wide(self.norm(x)).abs().mean())
            return x + self.inner(x) * scale

    train(t, Net([Inferring(), Inferring()]))


@attack("recomputation", "model.eval() and train() inside a block's forward, around dropout (a consistency target)")
def toggles_mode_inside(t: Trial) -> None:
    class Consistent(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.drop.eval()
            with torch.no_grad():
                target = self.drop(self.inner(x))
            self.drop.train()
            return x + self.drop(self.inner(x)) - 0.1 * target

    train(t, Net([Consistent(), Consistent()]))


@attack("recomputation", "train(not self.training) at the end of each forward: dropout every other call")
def toggles_mode_in_turns(t: Trial) -> None:
    class Alternating(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + functional.dropout(self.inner(x), 0.3, self.training)
            self.training = not self.training
            return y

    train(t, Net([Alternating(), Alternating()]))


@attack("recomputation", "try and except inside the forward: the fast way raises for odd calls (a counter of failures)")
def exceptions_as_control_flow(t: Trial) -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lin, self.tries = nn.Linear(WIDTH, WIDTH), 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.tries += 1
            if self.tries % 3 == 0:
                raise FloatingPointError("fast way")
            return self.lin(x)

    class Guarded(Block):
        def __init__(self) -> None:
            super().__init__()
            self.fast = Fragile()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return x + self.fast(x)
            except FloatingPointError:
                return x + self.inner(x)

    train(t, Net([Guarded(), Guarded()]))


@attack(
    "recomputation", "StopIteration-like control flow: a block raises to leave the list early, and the model catches it"
)
def early_exit(t: Trial) -> None:
    class ExitEarly(Exception):
        pass

    class Exiting(Block):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.limit = limit

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + self.inner(x)
            if float(y.detach().mean()) > self.limit:
                raise ExitEarly(y)
            return y

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            try:
                for block in self.blocks:
                    x = block(x)
            except ExitEarly as found:
                return found.args[0]
            return x

    train(t, Model([Exiting(0.02), Exiting(9.0)], sequential=False))


@attack("recomputation", "blocks that return a closure, which the model calls")
def returns_closure(t: Trial) -> None:
    class Closing(Block):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.inner(x)
            return lambda scale: x + scale * h

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for number, block in enumerate(self.blocks):
                x = block(x)(1.0 + number)
            return x

    train(t, Model([Closing(), Closing()], sequential=False))


@attack("recomputation", "blocks that yield (a generator as forward), which the model runs through")
def yields(t: Trial) -> None:
    class Yielding(Block):
        def forward(self, x: torch.Tensor) -> Any:
            x = x + self.inner(x)
            yield x
            yield torch.tanh(x + self.inner(x))

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = sum(block(x))
            return x

    train(t, Model([Yielding(), Yielding()], sequential=False))


@attack("recomputation", "blocks that are given a list of tensors and append to it (dense connections, a KV cache)")
def list_appended(t: Trial) -> None:
    class Dense(Block):
        def forward(self, states: list[torch.Tensor]) -> None:
            x = sum(states) / len(states)
            states.append(x + self.inner(x))

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            states = [self.stem(x)]
            for block in self.blocks:
                block(states)
            return states[-1]

    train(t, Model([Dense(), Dense()], sequential=False))


@attack("recomputation", "blocks that are given a list and replace its first tensor, which is returned by the model")
def list_replaced(t: Trial) -> None:
    class Replacing(Block):
        def forward(self, box: list[torch.Tensor]) -> list[torch.Tensor]:
            box[0] = box[0] + self.inner(box[0])
            return box

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            box = [self.stem(x)]
            for block in self.blocks:
                block(box)
            return box[0]

    train(t, Model([Replacing(), Replacing()], sequential=False))


@attack("recomputation", "out= into a scratch buffer that the blocks share, under no_grad")
def scratch_shared(t: Trial) -> None:
    scratch = torch.zeros(4, 6, WIDTH)

    class Scratching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = scratch.clone()
            with torch.no_grad():
                torch.mul(x, 0.5, out=scratch)
            return x + self.inner(x) + 0.1 * before

    train(t, Net([Scratching(), Scratching()]))


@attack("recomputation", "a view of the input (x[..., :4]) is written in place, and the input returned")
def view_written(t: Trial) -> None:
    class Writing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            half = x[..., : WIDTH // 2]
            half.add_(half.detach().abs().mean())
            return x + self.inner(x)

    train(t, Net([Writing(), Writing()]))


@attack("recomputation", "complex numbers: a Fourier filter with complex weights", only=EXACT)
def complex_weights(t: Trial) -> None:
    class Filter(Block):
        def __init__(self) -> None:
            super().__init__()
            dtype = torch.complex128 if torch.get_default_dtype() == torch.float64 else torch.complex64
            self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1, dtype=dtype) * (0.5 + 0.5j))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(torch.fft.irfft(torch.fft.rfft(x) * self.filter, n=WIDTH))

    train(t, Net([Filter(), Filter()]))


@attack("recomputation", "float64 inside a block, half precision in another, float32 between (a mix of dtypes)")
def mixed_dtypes(t: Trial) -> None:
    class Precise(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.softmax(self.inner(x).double(), -1).to(x.dtype)

    class Coarse(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x).to(torch.bfloat16).to(x.dtype)

    train(t, Net([Precise(), Coarse()]))


@attack("recomputation", "autocast entered by some blocks alone, its cache shared over the forward")
def autocast_by_block(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for number, block in enumerate(self.blocks):
                manager = torch.autocast("cpu", torch.bfloat16) if number % 2 else contextlib.nullcontext()
                with manager:
                    x = block(x)
            return x.to(self.head.weight.dtype)

    train(t, Model([Block(), Block()], sequential=False))


@attack("recomputation", "set_detect_anomaly around the step")
def anomaly_detection(t: Trial) -> None:
    with torch.autograd.set_detect_anomaly(True):
        train(t, Net(), num_steps=2)


@attack("parts", "vmap over an ensemble of stateless copies (functional_call with stacked weights)")
def ensemble_by_vmap(t: Trial) -> None:
    class Ensemble(Block):
        def __init__(self) -> None:
            super().__init__()
            self.stacked = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            each = torch.func.vmap(lambda w: torch.tanh(x @ w))(self.stacked)
            return x + self.inner(x) + each.mean(0)

    train(t, Net([Ensemble(), Ensemble()]))


@attack("recomputation", "the whole model called through functional_call with its own parameters perturbed")
def stateless_perturbed(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        weights = {name: p + 0.01 * torch.sin(p) for name, p in model.named_parameters()}
        loss = torch.func.functional_call(model, weights, tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes", "the model was compiled (backend='eager') before the plan, and is trained through the compiled wrapper"
)
def compiled_before(t: Trial) -> None:
    model = Net()
    wrapper = torch.compile(model, backend="eager")
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = wrapper(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "second order", "a neural ODE block whose steps are differentiated again by a kinetic penalty on the loop's side"
)
def kinetic_penalty(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, lr=0.02)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        x.requires_grad_()
        loss = model(x, y)
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        optimizer.zero_grad()
        (loss + 10 * slope.pow(2).sum()).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
