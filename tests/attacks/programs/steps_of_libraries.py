"""What libraries do around gradients and the step: sharded checkpoints, deferred weight gradients, compressed and flattened gradients."""

import contextlib
import copy
import io
from collections.abc import Iterator
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT, VARIANTS
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "gradients",
    "the state for a checkpoint is asked for before the first step, for which torch makes one with zero gradients and a rate of zero (DCP)",
)
def state_made_for_a_checkpoint(t: Trial) -> None:
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    weights, states = get_state_dict(model, optimizer)
    t.note("names", sorted(states["state"]))
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        if step == 2:
            weights, states = copy.deepcopy(get_state_dict(model, optimizer))
        t.end_step()
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)
    t.end_step()
    loss = model(*tokens(9))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    t.end_step()


@attack("gradients", "the same after a backward pass whose gradients wait for their step", only=EXACT)
def state_made_between(t: Trial) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        states = get_optimizer_state_dict(model, optimizer)
        t.note("names", sorted(states["state"]))
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "torch's own optimizers in the backward pass train the blocks, the loop's optimizer the rest",
    only=EXACT,
)
def torchs_own_in_backward(t: Trial) -> None:
    from torch.distributed.optim import _apply_optimizer_in_backward

    model = Net()
    _apply_optimizer_in_backward(torch.optim.SGD, model.blocks.parameters(), {"lr": 0.1, "momentum": 0.9})
    optimizer = torch.optim.AdamW([*model.stem.parameters(), *model.head.parameters()], lr=1e-2)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


_WAITING: list[tuple[nn.Linear, torch.Tensor, torch.Tensor]] = []


class _Deferred(torch.autograd.Function):
    """A linear layer whose weight gradient is put off (zero-bubble pipelines)."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer = layer
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        _WAITING.append((ctx.layer, x, grad))
        return grad @ weight, None, grad.flatten(0, -2).sum(0), None


class _DeferredLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Deferred.apply(x, self.weight, self.bias, self)


@attack(
    "gradients",
    "gradients of weights are put off, kept with their inputs on a list, and made after the backward pass (zero bubble)",
    only=EXACT,
)
def weight_gradients_put_off(t: Trial) -> None:
    _WAITING.clear()
    model = Net()
    for block in model.blocks:
        block.wide, block.narrow = _DeferredLinear(WIDTH, 2 * WIDTH), _DeferredLinear(2 * WIDTH, WIDTH)
    optimizer = adamw(model)

    def make(_: int) -> None:
        while _WAITING:
            layer, x, grad = _WAITING.pop(0)
            new = grad.flatten(0, -2).t() @ x.flatten(0, -2)
            layer.weight.grad = new if layer.weight.grad is None else layer.weight.grad + new

    train(t, model, optimizer, between=make, num_steps=5)


@attack("gradients", "rows of one weight's gradient are zeroed through a fill of its data's rows (custom diffusion)")
def rows_zeroed_through_data(t: Trial) -> None:
    def keep(_: int) -> None:
        grads = model.head.weight.grad
        index = torch.arange(NUM_CLASSES) != 2
        grads.data[index, :] = grads.data[index, :].fill_(0)

    model = Net()
    train(t, model, between=keep, num_steps=5)


@attack("gradients", "all rows of a weight but one are put back after the step (textual inversion)", only=EXACT)
def rows_put_back(t: Trial) -> None:
    def back(_: int) -> None:
        with torch.no_grad():
            model.stem.weight[index] = before[index]

    model = Net()
    before, index = model.stem.weight.detach().clone(), torch.arange(WIDTH) != 1
    optimizer = torch.optim.AdamW(model.stem.parameters(), lr=1e-2, weight_decay=0.1)
    train(t, model, optimizer, after=back, num_steps=5)


@attack(
    "gradients",
    "each gradient is divided by its own norm in place, and a pool keeps what the model made (cellular automata)",
)
def normalised_one_by_one(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    pool = [tokens(n)[0] for n in range(3)]
    for step in range(6):
        x, (_, y) = pool[step % 3], tokens(step)
        for _ in range(1 + step % 3):
            x = model.blocks(x)
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        for parameter in model.parameters():
            parameter.grad /= parameter.grad.norm() + 1e-8
        optimizer.step()
        pool[step % 3] = x.detach()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the optimizer's __init__ is called again on the same object in the middle")
def made_again_in_place(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(6):
        if step == 3:
            optimizer.__init__(model.parameters(), lr=5e-3, weight_decay=0.1)  # type: ignore[misc]
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _Halved(torch.optim.AdamW):
    """Decays its own rate."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["lr"] *= 0.5
        return super().step(closure)


@attack("changes", "the optimizer's class is exchanged for a subclass of it in the middle (optimizer.__class__ = ...)")
def optimizers_class_exchanged(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def change(step: int) -> None:
        if step == 3:
            optimizer.__class__ = _Halved

    train(t, model, optimizer, num_steps=6, before=change)


@attack("changes", "momentum is zero at first and is raised later, nesterov is switched on after that")
def momentum_begins_later(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def change(step: int) -> None:
        for group in optimizer.param_groups:
            group["momentum"] = 0.0 if step < 2 else 0.9
            group["nesterov"] = step > 3

    train(t, model, optimizer, num_steps=6, before=change)


@attack(
    "changes", "the optimizer's list of groups is replaced by a list of copies of them, and cleared and filled again"
)
def groups_replaced_by_copies(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def change(step: int) -> None:
        if step == 2:
            optimizer.param_groups = [dict(group) for group in optimizer.param_groups]
        if step == 4:
            kept = list(optimizer.param_groups)
            optimizer.param_groups.clear()
            optimizer.param_groups.extend(kept)

    train(t, model, optimizer, num_steps=6, before=change)


@attack(
    "gradients",
    "gradients are freed by the size of their storage after the step, before they are set to None",
    # Gradients of weights at the host lie in memory that is shared with the card, whose size torch does not change: an error of torch's.
    only=tuple(name for name in VARIANTS if name != "trained weight streaming"),
)
def storages_of_gradients_freed(t: Trial) -> None:
    def free(_: int) -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.untyped_storage().resize_(0)
                parameter.grad = None

    model = Net()
    train(t, model, adamw(model), after=free, num_steps=5)


@attack(
    "gradients",
    "gradients are compressed to half precision and put back (p.grad = p.grad.half().to(...)), before the step",
    only=EXACT,
)
def compressed_and_back(t: Trial) -> None:
    def compress(_: int) -> None:
        for parameter in model.parameters():
            parameter.grad = parameter.grad.half().to(parameter.dtype)

    model = Net()
    train(t, model, between=compress, num_steps=5)


@attack(
    "gradients",
    "gradients of each half are added to running buffers by _foreach_add_ and zeroed, the sums given back at the end",
)
def summed_by_foreach(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    params = list(model.parameters())
    sums = [torch.zeros_like(p) for p in params]
    for step in range(4):
        torch._foreach_zero_(sums)
        for part in range(2):
            loss = model(*tokens(2 * step + part)) / 2
            loss.backward()
            torch._foreach_add_(sums, [p.grad for p in params])
            optimizer.zero_grad(set_to_none=False)
            t.note("loss", loss)
        for parameter, total in zip(params, sums, strict=True):
            parameter.grad.copy_(total)
        optimizer.step()
        optimizer.zero_grad()
        t.end_step()


@attack(
    "gradients", "an average of the weights is stored, exchanged for an evaluation and restored (diffusers' EMAModel)"
)
def average_stored_and_restored(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    shadow = [p.clone().detach() for p in model.parameters()]
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        decay = min(0.99, (1 + step) / (10 + step))
        with torch.no_grad():
            for average, parameter in zip(shadow, model.parameters(), strict=True):
                average.sub_((1 - decay) * (average - parameter))
        if step % 2:
            kept = [p.detach().cpu().clone() for p in model.parameters()]
            for average, parameter in zip(shadow, model.parameters(), strict=True):
                parameter.data.copy_(average.data)
            with torch.no_grad():
                t.note("evaluated", model(*tokens(50)))
            for before, parameter in zip(kept, model.parameters(), strict=True):
                parameter.data.copy_(before.data)
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "the targets' mean and spread move, and the head's weight and bias are rescaled so that its answers stay (PopArt)",
)
def rescaled_head(t: Trial) -> None:
    class Values(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(NUM_CLASSES))
            self.register_buffer("spread", torch.ones(NUM_CLASSES))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            wanted = functional.one_hot(y, NUM_CLASSES).to(x) * 5
            mean = 0.9 * self.mean + 0.1 * wanted.mean((0, 1))
            spread = 0.9 * self.spread + 0.1 * wanted.std((0, 1))
            with torch.no_grad():
                self.head.weight.mul_((self.spread / spread).unsqueeze(1))
                self.head.bias.mul_(self.spread).add_(self.mean - mean).div_(spread)
            self.mean.copy_(mean)
            self.spread.copy_(spread)
            return functional.mse_loss(self.head(self.features(x)), (wanted - mean) / spread)

    t.writes_within_step("head.weight", "head.bias")
    train(t, Values(), num_steps=5)


@attack(
    "gradients",
    "gradients may have another type than their weights (grad_dtype), which the program sets on some",
    only=EXACT,
)
def gradients_of_another_type(t: Trial) -> None:
    model = Net()
    for parameter in model.head.parameters():
        parameter.grad_dtype = torch.float32
    train(t, model, num_steps=4)


@attack(
    "gradients",
    "a second forked process trains some steps with the plan that it has inherited, and its weights are taken over",
)
def trained_in_a_fork(t: Trial) -> None:
    import os

    model = Net()
    optimizer = sgd(model)
    train(t, model, optimizer, num_steps=2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        with contextlib.suppress(Exception):
            for step in range(2, 4):
                loss = model(*tokens(step))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            os.close(read)
            os.write(write, file.getvalue())
            status = 0
        os._exit(status)
    os.close(write)
    content = b""
    while piece := os.read(read, 1 << 16):
        content += piece
    os.close(read)
    os.waitpid(child, 0)
    if content:
        model.load_state_dict(torch.load(io.BytesIO(content)))
    t.note("came", bool(content))
    t.end_step()
    train(t, model, optimizer, num_steps=2, applied=True)


@attack(
    "recomputation",
    "random states by name are entered and left by blocks (Megatron's tracker), which a global object holds",
)
def random_states_by_name(t: Trial) -> None:
    class Tracker:
        def __init__(self) -> None:
            self.states: dict[str, torch.Tensor] = {}

        @contextlib.contextmanager
        def fork(self, name: str) -> Iterator[None]:
            before = torch.get_rng_state()
            torch.set_rng_state(self.states[name])
            try:
                yield
            finally:
                self.states[name] = torch.get_rng_state()
                torch.set_rng_state(before)

    tracker = Tracker()
    for name, seed in (("data", 1), ("model", 2)):
        tracker.states[name] = torch.Generator().manual_seed(seed).get_state()

    class Dropping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with tracker.fork("model"):
                x = functional.dropout(x, 0.1)
            return functional.dropout(x + self.inner(x), 0.1)

    train(t, Net([Dropping(), Dropping()]), num_steps=9)


@attack(
    "recomputation",
    "blocks borrow rooms of a global buffer by name and write products into it (Megatron's memory buffer)",
)
def global_memory_buffer(t: Trial) -> None:
    rooms: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def room(shape: torch.Size, dtype: torch.dtype, name: str) -> torch.Tensor:
        if rooms.get((name, dtype)) is None or rooms[name, dtype].numel() < shape.numel():
            rooms[name, dtype] = torch.empty(shape.numel(), dtype=dtype, requires_grad=False)
        return rooms[name, dtype][: shape.numel()].view(shape)

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight)
            whole = room(x.shape, x.dtype, "mpu")
            whole.copy_(x)
            return whole @ weight.t()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            x, weight = ctx.saved_tensors
            whole = room(x.shape, x.dtype, "mpu")
            whole.copy_(x)
            return grad @ weight, grad.flatten(0, -2).t() @ whole.flatten(0, -2)

    class Borrowing(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(functional.gelu(Product.apply(self.norm(x), self.wide.weight)))

    train(t, Net([Borrowing(), Borrowing()]), num_steps=6)
