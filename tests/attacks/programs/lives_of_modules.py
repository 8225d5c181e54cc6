"""What happens to modules and parameters while they are trained: shallow copies, hooks of other libraries, surgery, aliases and criteria of their own."""

import copy
import functools
import types
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize


class _Strong(Block):
    def __init__(self, strength: float = 1.0) -> None:
        super().__init__()
        self.strength = strength

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.strength * self.inner(x)


@attack(
    "changes", "a shallow copy of a block, with another setting and the same weights, takes its place while training"
)
def shallow_copy_of_block(t: Trial) -> None:
    model = Net([_Strong(), _Strong()], sequential=False)

    def replace(step: int) -> None:
        if step == 2:
            other = copy.copy(model.blocks[1])
            other.strength = 3.0
            model.blocks[1] = other

    train(t, model, before=replace)


@attack("changes", "a shallow copy of a block is called beside it, with another setting and the same weights")
def shallow_copy_beside(t: Trial) -> None:
    class Model(Net):
        twins: Any = ()

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = super().features(x)
            for twin in self.twins:
                x = twin(x)
            return x

    model = Model([_Strong(), _Strong()])

    def copied(step: int) -> None:
        if step == 1:
            other = copy.copy(model.blocks[0])
            other.strength = -2.0
            model.twins = (other,)

    train(t, model, before=copied)


@attack("changes", "a shallow copy of the whole model, made while training, is trained on with other blocks' settings")
def shallow_copy_of_model(t: Trial) -> None:
    model = Net([_Strong(), _Strong()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        if step == 2:
            model = copy.copy(model)
            model.loss = lambda logits, y: functional.cross_entropy(
                logits.flatten(0, 1), y.flatten(), label_smoothing=0.5
            )
        loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "changes",
    "a block's copy with other weights is put after it while training (growing depth), its weights added to the optimizer",
)
def depth_doubled(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        if step == 2:
            model.blocks.append(copy.deepcopy(model.blocks[0]))
            optimizer.add_param_group({"params": list(model.blocks[2].parameters())})
        loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "changes", "a hook of accelerate's kind: _old_forward is kept on the module, forward replaced, and put back later"
)
def hooked_like_accelerate(t: Trial) -> None:
    model = Net()

    def doubled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return module._old_forward(x * 1.5)

    def between(step: int) -> None:
        for block in model.blocks:
            if step == 1:
                block._old_forward = block.forward
                block.forward = functools.update_wrapper(functools.partial(doubled, block), block._old_forward)
            if step == 3:
                block.forward = block._old_forward
                del block._old_forward

    train(t, model, before=between, num_steps=5)


@attack("changes", "the same, put on before the plan and taken off while training")
def hooked_like_accelerate_before(t: Trial) -> None:
    model = Net()
    for block in model.blocks:
        block._old_forward = block.forward
        block.forward = types.MethodType(lambda module, x: module._old_forward(x * 1.5), block)

    def between(step: int) -> None:
        if step == 2:
            for block in model.blocks:
                block.forward = block._old_forward

    train(t, model, before=between)


@attack("changes", "the forward of a block's instance is deleted where there is one (an unpatching utility)")
def forward_deleted(t: Trial) -> None:
    model = Net()

    def between(step: int) -> None:
        if step == 2:
            for block in model.blocks:
                vars(block).pop("forward", None)

    train(t, model, before=between)


@attack(
    "changes",
    "quantisation-aware training begins in the middle: linear layers are exchanged for ones that round their weights",
    only=EXACT,
)
def quantised_later(t: Trial) -> None:
    class Rounding(nn.Linear):
        @classmethod
        def of(cls, layer: nn.Linear) -> nn.Linear:
            made = cls(layer.in_features, layer.out_features)
            made.weight, made.bias = layer.weight, layer.bias
            return made

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = self.weight.detach().abs().max() / 7
            w = torch.fake_quantize_per_tensor_affine(self.weight, float(scale), 0, -8, 7)
            return functional.linear(x, w, self.bias)

    model = Net()

    def between(step: int) -> None:
        if step == 2:
            for module in list(model.modules()):
                for name, child in list(module.named_children()):
                    if type(child) is nn.Linear:
                        setattr(module, name, Rounding.of(child))

    train(t, model, before=between)


@attack("changes", "weights with a parametrisation are cached over the forward (parametrize.cached)")
def cached_parametrisation(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            with parametrize.cached():
                return super().forward(x, y)

    model = Model()
    for block in model.blocks:
        parametrizations.weight_norm(block.wide)
    train(t, model)


@attack("changes", "batch norms are folded into convolutions in the middle of training")
def batch_norm_folded(t: Trial) -> None:
    model = Images([nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Tanh()])

    def between(step: int) -> None:
        if step == 2:
            model.eval()
            fused = nn.utils.fusion.fuse_conv_bn_eval(model.chain[0], model.chain[1])
            with torch.no_grad():
                model.chain[0].weight.copy_(fused.weight)
                model.chain[0].bias.copy_(fused.bias)
            model.chain[1] = nn.Identity()
            model.train()

    train(t, model, torch.optim.SGD(model.parameters(), lr=0.1), batch=images, before=between)


@attack("changes", "the memory format of the chain changes to channels last while training")
def channels_last_later(t: Trial) -> None:
    model = Images()
    train(
        t, model, batch=images, before=lambda step: model.to(memory_format=torch.channels_last) if step == 2 else None
    )


@attack("changes", "the model is emptied of one block, which a function in its place skips, and gets it back")
def block_taken_out_and_put_back(t: Trial) -> None:
    model, held = Net(sequential=False), []

    def between(step: int) -> None:
        if step == 1:
            held.append(model.blocks[0])
            model.blocks[0] = nn.Identity()
        if step == 3:
            model.blocks[0] = held.pop()

    train(t, model, before=between, num_steps=5)


@attack("parts", "blocks are called by slices, in reverse every second step, by reduce, and past __call__")
def called_in_other_ways(t: Trial) -> None:
    class Model(Net):
        step = 0

        def features(self, x: torch.Tensor) -> torch.Tensor:
            self.step += 1
            x = self.stem(x)
            if self.step % 4 == 0:
                return self.blocks[1:](self.blocks[:1](x))
            if self.step % 4 == 1:
                return functools.reduce(lambda h, block: block(h), reversed(list(self.blocks)), x)
            if self.step % 4 == 2:
                return self.blocks[1].forward(self.blocks[0].forward(x))
            return type(self.blocks[1]).forward(self.blocks[1], self.blocks[0](x))

    train(t, Model(), num_steps=8)


@attack("gradients", "the criterion has parameters of its own, outside of the model and in the same optimizer")
def criterion_with_parameters(t: Trial) -> None:
    class Center(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.centers = nn.Parameter(torch.randn(NUM_CLASSES, NUM_CLASSES))
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.weight.exp() * functional.mse_loss(logits, self.centers[y]) - self.weight

    model, criterion = Net(), Center()
    optimizer = torch.optim.AdamW([*model.parameters(), *criterion.parameters()], lr=1e-2)
    t.apply(model, optimizer)
    t.track(criterion)
    for step in range(4):
        x, y = tokens(step)
        logits = model(x)
        loss = model.loss(logits, y) + criterion(logits, y)
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_([*model.parameters(), *criterion.parameters()], 0.7)
        optimizer.step()
        t.end_step()


@attack("gradients", "one optimizer for two models, of which one has a plan; only that one is clipped")
def optimizer_of_two_models(t: Trial) -> None:
    model, other = Net(), Net()
    optimizer = torch.optim.SGD([*other.parameters(), *model.parameters()], lr=0.1, momentum=0.9)
    t.apply(model, optimizer)
    t.track(other)
    for step in range(4):
        x, y = tokens(step)
        loss = model(x, y) + functional.mse_loss(other(x), model(x).detach())
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        t.end_step()


@attack(
    "gradients", "a wrapper of the program's own is given the plan: it holds the model as .module and scales its loss"
)
def wrapped_model(t: Trial) -> None:
    class Wrapper(nn.Module):
        returns_loss = True

        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

        def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            return self.module(*args, **kwargs) * 0.5

        def __getattr__(self, name: str) -> Any:
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("module"), name)

    train(t, Wrapper(Net()))


@attack(
    "gradients",
    "parameters that nothing uses, of no elements, of no dimensions and frozen ones stand in the optimizer, with names",
)
def odd_parameters(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.empty = nn.Parameter(torch.ones(3)), nn.Parameter(torch.zeros(0, 4))
            self.scalar, self.frozen = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.ones(2), requires_grad=False)
            self.listed = nn.ParameterList([torch.ones(WIDTH)])
            self.keyed = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(WIDTH))})

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super().features(x * self.scalar * self.listed[0] + self.keyed["shift"] + self.empty.sum())

    model = Model()
    train(t, model, torch.optim.AdamW(model.named_parameters(), lr=1e-2, weight_decay=0.1))


@attack(
    "gradients",
    "blocks are left out by turns, gradients set to zero and not to None, with AdamW: momentum moves what was left out",
)
def left_out_with_zeros(t: Trial) -> None:
    class Model(Net):
        step = 0

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for i, block in enumerate(self.blocks):
                if (self.step + i) % 3:
                    x = block(x)
            return x

    model = Model([Block(), Block(), Block()], sequential=False)
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(6):
        model.step = step
        optimizer.zero_grad(set_to_none=False)
        loss = model(*tokens(step))
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "gradients are added to main_grad in a wider type by hooks, and handed to the optimizer at the step (Megatron)",
)
def main_gradients(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    for p in model.parameters():
        p.main_grad = torch.zeros_like(p, dtype=torch.float64)

        def keep(p: torch.Tensor) -> None:
            p.main_grad.add_(p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(keep)
    t.apply(model, optimizer)
    for step in range(4):
        for part in range(2):
            (model(*tokens(2 * step + part)) / 2).backward()
        for p in model.parameters():
            p.grad = p.main_grad.to(p.dtype)
        optimizer.step()
        for p in model.parameters():
            p.grad = None
            p.main_grad.zero_()
        t.end_step()


@attack(
    "gradients",
    "a backward hook of the stem reads the weights and gradients of later layers while the backward pass runs",
)
def hook_reads_later_layers(t: Trial) -> None:
    model, seen = Net(), []

    def hook(*_: Any) -> None:
        grads = [0.0 if p.grad is None else p.grad.norm().item() for p in model.head.parameters()]
        seen.append([model.head.weight.norm().item(), *grads])

    model.stem.register_full_backward_hook(hook)
    train(t, model, after=lambda _: t.note("seen", list(seen)))


@attack(
    "gradients", "hooks draw noise for gradients, and gradients are clipped by hand after the backward pass", only=EXACT
)
def noisy_hooks_and_clipping_by_hand(t: Trial) -> None:
    model = Net()
    for p in model.parameters():
        p.register_hook(lambda g: g + 0.01 * torch.randn_like(g))

    def clip(_: int) -> None:
        total = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        for p in model.parameters():
            if p.grad is not None:
                p.grad.mul_((0.5 / (total + 1e-6)).clamp(max=1))

    train(t, model, between=clip)


@attack("gradients", "hooks count gradients, and only every third step is clipped by hand")
def counting_hooks_and_clipping_by_hand(t: Trial) -> None:
    model, count = Net(), [0]

    def counted(g: torch.Tensor) -> torch.Tensor:
        count[0] += 1
        return g * (1 + 0.01 * count[0])

    for p in model.parameters():
        p.register_hook(counted)

    def clip(step: int) -> None:
        if step % 3 == 2:
            for p in model.parameters():
                p.grad.clamp_(-0.01, 0.01)

    train(t, model, between=clip, after=lambda _: t.note("count", count[0]), num_steps=6)
