"""Parts of torch that training scripts use beside their loop: functions with every option, operators of one's own, tracing, fake tensors, hooks on everything."""

import copy
import io
import warnings
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _ScaledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: float) -> torch.Tensor:
        ctx.mark_dirty(x)
        ctx.scale = scale
        return x.mul_(scale)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, None]:
        return g * ctx.scale, None


@attack(
    "recomputation", "a function that writes over its input (mark_dirty), once differentiable, with a scale that grows"
)
def dirty_function(t: Trial) -> None:
    class Dirty(Block):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.scale += 0.1
            return x + _ScaledInPlace.apply(self.inner(x), self.scale)

    train(t, Net(Dirty() for _ in range(2)))


class _TopTwo(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, k: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.topk(x, k)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: tuple) -> None:
        x, _ = inputs
        values, places = output
        ctx.mark_non_differentiable(places)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(places, values)
        ctx.like, ctx.needs = x.shape, ctx.needs_input_grad

    @staticmethod
    def backward(ctx: Any, of_values: torch.Tensor | None, _: None) -> tuple[torch.Tensor | None, None]:
        places, values = ctx.saved_tensors
        if of_values is None:
            return None, None
        return torch.zeros(ctx.like, dtype=of_values.dtype).scatter(-1, places, of_values * (values > 0)), None


@attack(
    "recomputation",
    "a function with two results, one without gradients, none made up (set_materialize_grads), its results saved",
)
def function_with_options(t: Trial) -> None:
    class Sparse(Block):
        def __init__(self) -> None:
            super().__init__()
            self.used = torch.zeros(2 * WIDTH)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            h = self.wide(self.norm(x))
            values, places = _TopTwo.apply(h, 3)
            self.used += torch.bincount(places.flatten(), minlength=2 * WIDTH)
            return self.narrow(torch.zeros_like(h).scatter(-1, places, values))

    train(t, Net(Sparse() for _ in range(2)))


_LIBRARY = torch.library.Library("tools_of_torch", "DEF")
_LIBRARY.define("count_(Tensor(a!) counter, Tensor x) -> Tensor")


def _count(counter: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    counter.add_(1)
    return x * (1 + 0.1 * counter)


_LIBRARY.impl("count_", _count, "CompositeImplicitAutograd")


@attack(
    "recomputation",
    "an operator of the program's own (torch.library) counts in a buffer that it is given, and scales by it",
)
def operator_that_counts(t: Trial) -> None:
    class Counting(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counter", torch.zeros(()), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.tools_of_torch.count_(self.counter, super().forward(x))

    train(t, Net(Counting() for _ in range(2)))


@attack(
    "changes",
    "the program counts operators on a copy of the model on the meta device, and traces it, in the middle of training",
)
def looked_at_on_meta(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
        if step == 1:
            other = copy.deepcopy(model).to("meta")
            t.note("shape", list(other(torch.empty(2, 3, WIDTH, device="meta")).shape))


@attack("changes", "parameters on the meta device are put through the trained model by functional_call, to see shapes")
def shapes_by_functional_call(t: Trial) -> None:
    model = Net()

    def shapes(_: int) -> None:
        weights = {n: torch.empty_like(p, device="meta") for n, p in model.named_parameters()}
        out = torch.func.functional_call(model, weights, (torch.empty(2, 3, WIDTH, device="meta"),))
        t.note("shape", list(out.shape))

    train(t, model, after=shapes)


@attack("changes", "the forward is traced by make_fx in the middle, and the graph's answer compared with the model's")
def traced_by_make_fx(t: Trial) -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    model = Net()

    def traced(step: int) -> None:
        if step == 1:
            x, _ = tokens(9)
            with torch.no_grad():
                t.note("same", bool((make_fx(model)(x)(x) - model(x)).abs().max() < 1e-5))

    train(t, model, num_steps=3, after=traced)


@attack("changes", "the model is exported by torch.jit.trace in the middle of training, for the server, and trained on")
def exported_by_jit(t: Trial) -> None:
    model = Net()

    def export(step: int) -> None:
        if step % 2:
            model.eval()
            file = io.BytesIO()
            with torch.no_grad():
                torch.jit.save(torch.jit.trace(model, tokens(9)[0], check_trace=False), file)
            file.seek(0)
            t.note("served", torch.jit.load(file)(tokens(9)[0]))
            model.train()

    train(t, model, after=export)


@attack("second order", "a block is checked by gradcheck in the middle of training", only=EXACT)
def checked_by_gradcheck(t: Trial) -> None:
    model = Net()

    def check(step: int) -> None:
        if step == 1:
            x = tokens(3, 1, 2)[0].requires_grad_()
            t.note("ok", torch.autograd.gradcheck(model.blocks[0], (x,), raise_exception=False))

    train(t, model, num_steps=3, after=check)


@attack(
    "gradients",
    "a step hook on all optimizers of torch counts steps, and one for all optimizers scales the first group's gradients",
)
def hooks_on_all_optimizers(t: Trial) -> None:
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    seen: list[float] = []

    def scale(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for p in optimizer.param_groups[0]["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)

    handles = [
        register_optimizer_step_pre_hook(scale),
        register_optimizer_step_post_hook(lambda o, *_: seen.append(o.param_groups[0]["lr"])),
    ]
    try:
        train(t, Net())
    finally:
        for handle in handles:
            handle.remove()
    t.note("seen", seen)


@attack("changes", "hooks on the registration of modules, buffers and parameters name what is made while training")
def hooks_on_registration(t: Trial) -> None:
    from torch.nn.modules import module as of_modules

    seen: list[str] = []
    handles = [
        of_modules.register_module_parameter_registration_hook(lambda m, n, p: seen.append(n)),
        of_modules.register_module_buffer_registration_hook(lambda m, n, b: seen.append(n)),
        of_modules.register_module_module_registration_hook(lambda m, n, c: seen.append(n)),
    ]

    class Growing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.training and not hasattr(self, "scale"):
                self.register_buffer("scale", x.detach().std())
            return super().forward(x) / self.scale

    try:
        train(t, Net(Growing() for _ in range(2)))
    finally:
        for handle in handles:
            handle.remove()
    t.note("seen", seen)


class _Translator(nn.Module):
    """torch's own Transformer layers, an encoder and a decoder, in two lists of blocks of different signatures."""

    returns_loss = True

    def __init__(self) -> None:
        super().__init__()
        kinds = {"dropout": 0.1, "batch_first": True, "norm_first": True}
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.encoder = nn.ModuleDict(
            {"blocks": nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 16, **kinds) for _ in range(2))}
        )
        self.decoder = nn.ModuleDict(
            {"blocks": nn.ModuleList(nn.TransformerDecoderLayer(WIDTH, 2, 16, **kinds) for _ in range(2))}
        )
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss of the next classes."""
        memory = self.stem(x)
        pad = torch.zeros(x.shape[:2], dtype=torch.bool)
        pad[:, -1] = True
        for block in self.encoder["blocks"]:
            memory = block(memory, src_key_padding_mask=pad)
        h, mask = self.stem(x.flip(1)), nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        for block in self.decoder["blocks"]:
            h = block(h, memory, tgt_mask=mask, tgt_is_causal=True, memory_key_padding_mask=pad)
        return functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


@attack(
    "recomputation",
    "torch's encoder and decoder layers with dropout, causal and padding masks, memory for all decoder blocks",
)
def translator(t: Trial) -> None:
    train(t, _Translator(), num_steps=3)


class _Waves(nn.Module):
    returns_loss = True

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv1d(WIDTH, WIDTH, 1)
        self.chain = nn.Sequential(
            nn.Conv1d(WIDTH, WIDTH, 3, padding=1),
            nn.PReLU(WIDTH),
            nn.Conv1d(WIDTH, WIDTH, 3, padding=2, dilation=2),
            nn.BatchNorm1d(WIDTH),
            nn.Tanh(),
        )
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Linear(WIDTH, NUM_CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        x = self.chain(self.stem(x.transpose(1, 2))).transpose(1, 2)
        return functional.cross_entropy(self.head(self.blocks(x)).flatten(0, 1), y.flatten())


@attack("parts", "a chain of convolutions over time with batch norm and PReLU, before blocks (wave models)")
def chain_over_time(t: Trial) -> None:
    train(t, _Waves())


class _Volumes(nn.Module):
    returns_loss = True

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv3d(1, 2, 1)
        self.chain = nn.Sequential(
            nn.Conv3d(2, 2, 3, padding=1), nn.ELU(), nn.Conv3d(2, 3, (1, 3, 3), padding=(0, 1, 1))
        )
        self.head = nn.Linear(3, NUM_CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        return functional.cross_entropy(self.head(self.chain(self.stem(x)).mean((2, 3, 4))), y)


@attack("parts", "a chain of three-dimensional convolutions, channels last, with a kernel that is flat in time (video)")
def chain_of_volumes(t: Trial) -> None:
    def volumes(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = images(step)
        return x[:, :, None].reshape(4, 1, 3, 8, 8).contiguous(memory_format=torch.channels_last_3d), y

    train(t, _Volumes().to(memory_format=torch.channels_last_3d), batch=volumes)


@attack(
    "recomputation",
    "blocks mark what they do for the profiler (record_function), a profile runs in the middle of training",
)
def marked_for_profiler(t: Trial) -> None:
    class Marked(Block):
        num = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).num += 1
            with torch.profiler.record_function(f"block {self.num}"):
                return super().forward(x) * (1 + 0.1 * Marked.num)

    train(t, Net(Marked() for _ in range(2)), after=lambda _: t.note("num", Marked.num))
    Marked.num = 0


@attack("second order", "linearize, jvp and vjp of the whole model around the batch, beside its loss")
def linearized(t: Trial) -> None:
    model = Net()

    def look(step: int) -> None:
        x, _ = tokens(step + 20)
        _, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
        _, back = torch.func.vjp(model, x)
        t.note("tangent", tangent)
        t.note("cotangent", back(torch.ones_like(tangent))[0])

    train(t, model, num_steps=3, between=look)


@attack(
    "gradients",
    "an ensemble by stack_module_state is trained by vmap and grad, its first member also by the loop",
    only=EXACT,
)
def ensemble_of_states(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    members = [copy.deepcopy(model) for _ in range(2)]
    for i, each in enumerate(members):
        with torch.no_grad():
            each.head.weight.add_(0.1 * i)
    t.apply(model, optimizer)
    params, buffers = torch.func.stack_module_state(members)
    base = copy.deepcopy(members[0])

    def of_member(p: dict, b: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(torch.func.functional_call(base, (p, b), (x,)).flatten(0, 1), y.flatten())

    for step in range(3):
        x, y = tokens(step)
        slopes, losses = torch.vmap(torch.func.grad_and_value(of_member), in_dims=(0, 0, None, None))(
            params, buffers, x, y
        )
        params = {n: (p - 0.1 * slopes[n]).detach() for n, p in params.items()}
        teacher = torch.vmap(lambda p, b, x=x: torch.func.functional_call(base, (p, b), (x,)))(params, buffers).mean(0)
        logits = model(x)
        loss = model.loss(logits, y) + (logits - teacher).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("losses", [losses, loss])
        t.end_step()


@attack(
    "changes",
    "the same gradients several times: torch.autograd.functional's hessian and vhp of the head's weights",
    only=EXACT,
)
def hessian_of_head(t: Trial) -> None:
    model = Net()

    def look(step: int) -> None:
        x, y = tokens(step)
        h = model.features(x).detach()
        found = torch.autograd.functional.vhp(
            lambda w: functional.cross_entropy(functional.linear(h, w).flatten(0, 1), y.flatten()),
            model.head.weight.detach(),
            torch.ones_like(model.head.weight),
        )
        t.note("vhp", found)

    train(t, model, num_steps=3, between=look)


@attack(
    "changes",
    "made on the meta device, materialised (to_empty) and filled by a hand-written initialiser after the optimizer was made",
)
def materialised_late(t: Trial) -> None:
    with torch.device("meta"):
        model = Net()
    model.to_empty(device=torch.get_default_device())
    optimizer = adamw(model)
    chance = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=chance).to(p) * 0.2)
    train(t, model, optimizer)


@attack(
    "recomputation", "warnings are collected within the block (catch_warnings), and those seen once are no longer shown"
)
def warnings_within_block(t: Trial) -> None:
    class Warning_(Block):
        num_warned = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("once")
                warnings.warn("a large value", stacklevel=1)
                self.num_warned += len(seen)
            return super().forward(x) * (1 + 0.1 * self.num_warned)

    model = Net(Warning_() for _ in range(2))
    train(t, model, after=lambda _: t.note("warned", [b.num_warned for b in model.blocks]))


@attack(
    "gradients", "several roots at once: torch.autograd.backward of a list with gradients of its own, some of them none"
)
def several_roots(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        features = model.features(x)
        logits = model.head(features)
        loss = model.loss(logits, y)
        optimizer.zero_grad()
        torch.autograd.backward(
            [loss, features, logits.square().mean()],
            [None, 0.01 * torch.ones_like(features), torch.tensor(0.1, dtype=x.dtype)],
        )
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "a data loader with a worker process of its own feeds the loop; the worker's dataset calls a frozen copy of the stem",
)
def loader_with_worker(t: Trial) -> None:
    class Made(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 12

        def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
            x, y = tokens(i, 1)
            return x[0], y[0]

    model = Net(nn.Sequential(Block(), nn.Dropout(0.1)) for _ in range(2))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    loader = torch.utils.data.DataLoader(
        Made(), batch_size=4, shuffle=True, num_workers=1, multiprocessing_context="fork"
    )
    for x, y in loader:
        loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "Images through a chain where each convolution is swapped for one with standardised weights by subclass and __torch_function__ mode",
)
def mode_for_convolutions(t: Trial) -> None:
    from torch.overrides import TorchFunctionMode

    class Standardised(TorchFunctionMode):
        num = 0

        def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
            if func is functional.conv2d or func is torch.conv2d:
                Standardised.num += 1
                args = (args[0], args[1] - args[1].mean((1, 2, 3), keepdim=True), *args[2:])
            return func(*args, **(kwargs or {}))

    model = Images()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        with Standardised():
            loss = model(*images(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
