"""Loops of real repositories: pipelines, schedules, curricula, snapshots in threads, per-example clipping, whole steps as functions."""

import contextlib
import copy
import queue
import threading
from collections import deque
from typing import Any

import torch
from tests.attacks.models import BATCH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "gradients",
    "three forwards, then their three backward passes in the same order, then the step (a pipeline by GPipe)",
)
def all_forwards_first(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        losses = [model(*tokens(3 * step + i)) / 3 for i in range(3)]
        for loss in losses:
            loss.backward()
        optimizer.step()
        t.note("losses", losses)
        t.end_step()


@attack("gradients", "forwards and backward passes take turns with two batches under way (one forward, one backward)")
def one_forward_one_backward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        under_way: deque[torch.Tensor] = deque()
        for i in range(4):
            under_way.append(model(*tokens(4 * step + i)) / 4)
            if len(under_way) > 2:
                under_way.popleft().backward()
        while under_way:
            under_way.popleft().backward()
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "stages: the second half's input is detached, its gradient handed to the first half's backward pass, inputs before weights",
)
def split_backward(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        optimizer.zero_grad()
        first = model.blocks[0](model.stem(x))
        cut = first.detach().requires_grad_()
        loss = model.loss(model.head(model.blocks[1](cut)), y)
        (grad,) = torch.autograd.grad(loss, cut, retain_graph=True)
        first.backward(grad)
        later = [*model.blocks[1].parameters(), *model.head.parameters()]
        loss.backward(inputs=later)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a closure makes the whole step, compiled by torch.compile (backend='eager')",
)
def compiled_step(t: Trial) -> None:
    # What runs before have compiled decides when torch gives up compiling.
    torch.compiler.reset()
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    @torch.compile(backend="eager")
    def step_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    for step in range(3):
        t.note("loss", step_of(*tokens(step)))
        t.end_step()


@attack(
    "gradients",
    "the last group of an accumulation is smaller: its losses are divided by what is left, and the loop breaks off in it",
)
def uneven_accumulation(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    optimizer.zero_grad()
    for i in range(7):
        left = min(3, 7 - i // 3 * 3)
        loss = model(*tokens(i)) / left
        loss.backward()
        if (i + 1) % 3 == 0 or i == 6:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            t.end_step()
        t.note("loss", loss)


@attack(
    "gradients",
    "the update is torch's functional SGD, called on the parameters with momentum buffers of the loop's, no step at all",
)
def functional_sgd(t: Trial) -> None:
    from torch.optim.sgd import sgd as update

    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    buffers: list[torch.Tensor | None] = [None for _ in model.parameters()]
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        with torch.no_grad():
            params = list(model.parameters())
            grads = [p.grad for p in params]
            update(
                params,
                grads,
                buffers,
                weight_decay=0.01,
                momentum=0.9,
                lr=0.1,
                dampening=0.0,
                nesterov=False,
                maximize=False,
            )
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a checkpoint is taken by a thread while the next forward and backward pass run, and waited for before the step",
)
def snapshot_in_thread(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    taken: queue.Queue[Any] = queue.Queue()
    for step in range(4):
        thread = threading.Thread(
            target=lambda: taken.put(copy.deepcopy((model.state_dict(), optimizer.state_dict()["state"])))
        )
        thread.start()
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        thread.join()
        optimizer.step()
        weights, states = taken.get()
        t.note("sum", sum(float(w.sum()) for w in weights.values()))
        t.note("moments", sum(float(s["exp_avg"].abs().sum()) for s in states.values()))
        t.end_step()


@attack(
    "gradients",
    "gradients of each example by hooks on linear layers (Opacus), clipped, summed and made noisy",
    only=EXACT,
)
def gradients_by_hooks(t: Trial) -> None:
    model = Net()
    inputs: dict[nn.Module, torch.Tensor] = {}

    def keep(module: nn.Module, args: Any, _: Any) -> None:
        if module.training and torch.is_grad_enabled():
            inputs[module] = args[0].detach()

    def by_example(module: nn.Module, _: Any, grads: Any) -> None:
        a, g = inputs.pop(module), grads[0] * BATCH
        module.weight.grad_sample = torch.einsum("bto,bti->boi", g, a)
        module.bias.grad_sample = g.sum(1)

    for norm in (b.norm for b in model.blocks):
        norm.requires_grad_(False)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(keep)
            module.register_full_backward_hook(by_example)
    optimizer = sgd(model)

    def private(_: int) -> None:
        params = [p for p in model.parameters() if p.requires_grad]
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in params]).norm(dim=0)
        for p in params:
            p.grad = torch.einsum("b,b...->...", (0.1 / norms).clamp(max=1), p.grad_sample) / BATCH
            p.grad += 0.01 * torch.randn_like(p)
            del p.grad_sample

    train(t, model, optimizer, between=private)


@attack(
    "gradients",
    "norms of each example's gradient first, then a second backward pass of losses weighed by them (ghost clipping)",
)
def ghost_clipping(t: Trial) -> None:
    class Each(Net):
        returns_loss = False

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(logits.transpose(1, 2), y, reduction="none").mean(1)

    model = Each()
    seen: dict[str, torch.Tensor] = {}
    model.head.register_full_backward_hook(lambda m, i, o: seen.update(norm=o[0].flatten(1).norm(dim=1)))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        losses = model(*tokens(step))
        optimizer.zero_grad()
        losses.sum().backward(retain_graph=True)
        weights = (0.3 / seen["norm"]).clamp(max=1).detach()
        optimizer.zero_grad()
        (weights * losses).sum().backward()
        optimizer.step()
        t.note("losses", losses)
        t.end_step()


@attack(
    "gradients",
    "one GradScaler for two optimizers of which one alone is unscaled and clipped, a gradient penalty scaled by hand",
)
def scaler_of_two(t: Trial) -> None:
    model = Net()
    body, head = sgd(model.blocks), adamw(model.head)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    t.apply(model, body, head)
    for step in range(5):
        loss = model(*tokens(step))
        model.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(body)
        torch.nn.utils.clip_grad_norm_(model.blocks.parameters(), 0.3)
        scaler.step(body)
        scaler.step(head)
        scaler.update()
        t.note("scale", scaler.get_scale())
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "targets are overwritten through .data between forward and backward pass (static targets of a captured graph)",
    only=EXACT,
)
def targets_overwritten(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    x, y = tokens(0)
    for step in range(4):
        new = tokens(step)
        x.data.copy_(new[0])
        y.data.copy_(new[1])
        loss = model(x, y)
        optimizer.zero_grad()
        y.data.copy_((new[1] + 1) % 7)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "class weights of the loss are rewritten through .data between forward and backward pass", only=EXACT)
def class_weights_overwritten(t: Trial) -> None:
    class Weighted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weights", torch.ones(7))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=self.weights)

    model = Weighted()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        loss = model(x, y)
        optimizer.zero_grad()
        model.weights.data.copy_(1 / (1 + torch.bincount(y.flatten(), minlength=7)))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "forward hooks with keywords, always called, put before others, and removed by themselves while the model runs",
)
def unusual_hooks(t: Trial) -> None:
    model = Net(sequential=False)
    seen: list[str] = []

    def halved(module: nn.Module, args: Any, kwargs: Any) -> Any:
        seen.append("pre")
        return (args[0] * 0.5,), kwargs

    def once(module: nn.Module, args: Any, kwargs: Any, out: torch.Tensor) -> torch.Tensor:
        seen.append("once")
        handles[0].remove()
        return out + 1

    for block in model.blocks:
        block.register_forward_pre_hook(halved, with_kwargs=True, prepend=True)
        block.narrow.register_forward_hook(lambda m, a, o: seen.append("always"), always_call=True)
    handles = [model.blocks[1].register_forward_hook(once, with_kwargs=True)]
    train(t, model, after=lambda _: t.note("seen", list(seen)))


@attack(
    "exceptions",
    "a backward pass that is out of memory once is tried again from a new forward, gradients of the first try dropped",
)
def out_of_memory_in_backward(t: Trial) -> None:
    class Fails(torch.autograd.Function):
        failures = 0

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            Fails.failures += 1
            if Fails.failures in (2, 4):
                raise torch.OutOfMemoryError("CUDA out of memory")
            return grad

    class Failing(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](Fails.apply(self.blocks[0](self.stem(x))))

    model = Failing()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        for _ in range(3):
            with contextlib.suppress(torch.OutOfMemoryError):
                optimizer.zero_grad(set_to_none=True)
                loss = model(*tokens(step))
                loss.backward()
                break
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "membrane voltages stay on the blocks over the time steps of one example, with surrogate gradients, reset by the loop (spiking)",
)
def spiking(t: Trial) -> None:
    class Spike(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(v)
            return (v > 0).to(v.dtype)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad / (1 + 10 * ctx.saved_tensors[0].abs()) ** 2

    class Leaky(Block):
        def __init__(self) -> None:
            super().__init__()
            self.voltage: torch.Tensor | None = None
            self.decay = nn.Parameter(torch.tensor(0.9))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.voltage = self.inner(x) + (0 if self.voltage is None else self.decay * self.voltage)
            spikes = Spike.apply(self.voltage - 0.2)
            self.voltage = self.voltage - 0.2 * spikes.detach()
            return x + spikes

    model = Net([Leaky(), Leaky()])
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        for block in model.blocks:
            block.voltage = None
        loss = sum(model(x * (0.5 + 0.5 * i), y) for i in range(3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
