"""Modules, models and optimizers whose classes override what torch's loops and techniques ask them: parameters, modules, modes, state dicts."""

from collections.abc import Iterator
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


class _Some(Block):
    """Gives away the parameters of its norm alone, as adapters' classes do."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        yield from self.norm.parameters()


class _SomeNamed(Block):
    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Any:
        yield from self.norm.named_parameters(prefix=prefix)


def _all_of(model: nn.Module) -> list[nn.Parameter]:
    return [p for module in nn.Module.modules(model) for p in module._parameters.values() if p is not None]


@attack("parts", "blocks whose parameters() gives away those of their norm alone; the optimizer has them all")
def some_parameters_given(t: Trial) -> None:
    model = Net([_Some(), _Some()])
    train(t, model, torch.optim.SGD(_all_of(model), lr=0.1, momentum=0.9), num_steps=4)


@attack("parts", "blocks whose named_parameters() gives away those of their norm alone; the optimizer has them all")
def some_named_parameters_given(t: Trial) -> None:
    model = Net([_SomeNamed(), _SomeNamed()])
    train(t, model, torch.optim.SGD(_all_of(model), lr=0.1, momentum=0.9), num_steps=4)


@attack(
    "parts",
    "a model whose parameters() gives away the head's alone (a linear probe's class), its body trains by another optimizer",
)
def parameters_of_the_head(t: Trial) -> None:
    class Probe(Net):
        def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
            return self.head.parameters()

    model = Probe()
    head, body = (
        torch.optim.Adam(model.parameters(), 1e-2),
        torch.optim.SGD([*model.stem.parameters(), *model.blocks.parameters()], 0.1),
    )
    t.apply(model, head, body)
    for step in range(4):
        loss = model(*tokens(step))
        for optimizer in (head, body):
            optimizer.zero_grad()
        loss.backward()
        for optimizer in (head, body):
            optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "a block hides its layers from modules() and children(), as a wrapper that keeps a frozen net to itself does",
)
def hidden_modules(t: Trial) -> None:
    class Hiding(Block):
        def modules(self) -> Iterator[nn.Module]:
            yield self

        def named_modules(self, memo: Any = None, prefix: str = "", remove_duplicate: bool = True) -> Any:
            yield prefix, self

        def children(self) -> Iterator[nn.Module]:
            return iter(())

    model = Net([Hiding(), Hiding()])
    train(t, model, torch.optim.SGD(_all_of(model), lr=0.1, momentum=0.9), num_steps=4)


@attack(
    "parts",
    "weights as a list of the model's own, given by parameters(), with a functional forward (MAML's learner)",
    only=EXACT,
)
def functional_learner(t: Trial) -> None:
    class Learner(nn.Module):
        returns_loss = True

        def __init__(self) -> None:
            super().__init__()
            sizes = [(WIDTH, WIDTH), (WIDTH,), (7, WIDTH), (7,)]
            self.vars = nn.ParameterList(nn.Parameter(torch.randn(size) * 0.3) for size in sizes)
            self.blocks = nn.Sequential(Block())

        def parameters(self, recurse: bool = True) -> Any:
            return self.vars

        def forward(self, x: torch.Tensor, y: torch.Tensor, weights: Any = None) -> torch.Tensor:
            weights = self.vars if weights is None else weights
            x = self.blocks(torch.relu(nn.functional.linear(x, weights[0], weights[1])))
            return nn.functional.cross_entropy(
                nn.functional.linear(x, weights[2], weights[3]).flatten(0, 1), y.flatten()
            )

        def zero_grad(self, weights: Any = None) -> None:  # type: ignore[override]
            for p in self.vars if weights is None else weights:
                if p.grad is not None:
                    p.grad.zero_()

    model = Learner()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    t.apply(model, optimizer)
    for step in range(3):
        total = torch.zeros(())
        for task in range(2):
            x, y = tokens(2 * step + task)
            loss = model(x[:2], y[:2])
            grad = torch.autograd.grad(loss, model.parameters())
            fast = [p - 0.1 * g for g, p in zip(grad, model.parameters(), strict=True)]
            total = total + model(x[2:], y[2:], fast)
        optimizer.zero_grad()
        (total / 2).backward()
        optimizer.step()
        for p in model.blocks.parameters():
            p.grad = None
        t.note("total", total)
        t.end_step()


@attack(
    "recomputation",
    "train() keeps norms and dropout of the blocks in evaluation, and counts its calls (frozen backbones)",
)
def train_that_keeps(t: Trial) -> None:
    class Kept(Block):
        def __init__(self) -> None:
            super().__init__()
            self.batch, self.drop, self.calls = nn.BatchNorm1d(WIDTH), nn.Dropout(0.2), 0

        def train(self, mode: bool = True) -> Any:
            super().train(mode)
            self.calls += 1
            self.batch.eval()
            if self.calls % 2:
                self.drop.eval()
            return self

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.drop(self.inner(self.batch(x.transpose(1, 2)).transpose(1, 2)))

    model = Net([Kept(), Kept()])
    train(
        t,
        model,
        adamw(model),
        num_steps=5,
        before=lambda step: model.train() if step else None,
        after=lambda _: model.eval(),
    )


@attack(
    "gradients",
    "state_dict of the model leaves out what is frozen, load_state_dict fills it in, a checkpoint is loaded in the middle",
)
def partial_state_dict(t: Trial) -> None:
    class Partial(Net):
        def state_dict(self, *args: Any, **kwargs: Any) -> Any:
            whole = super().state_dict(*args, **kwargs)
            return {k: v for k, v in whole.items() if "stem" not in k}

        def load_state_dict(self, state: Any, strict: bool = True, assign: bool = False) -> Any:  # type: ignore[override]
            whole = super().state_dict()
            return super().load_state_dict({**whole, **state}, strict=strict, assign=assign)

    model = Partial()
    model.stem.requires_grad_(False)
    optimizer = adamw(model)
    t.apply(model, optimizer)
    kept: Any = None
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1:
            kept = {k: v.clone() for k, v in model.state_dict().items()}
        if step == 3:
            model.load_state_dict(kept)
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts", "a convolution's class overrides _conv_forward, one pads by itself, and one scales its weight at each read"
)
def overridden_convolutions(t: Trial) -> None:
    class Centred(nn.Conv2d):
        def _conv_forward(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
            return super()._conv_forward(x - x.mean((2, 3), keepdim=True), weight, bias)

    class Padded(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.pad(x, (1, 1, 1, 1), mode="replicate"))

    model = Images([Centred(3, 4, 3, padding=1), nn.Tanh(), Padded(4, 4, 3), nn.Tanh()])
    train(t, model, sgd(model), num_steps=4, batch=images)


@attack(
    "parts",
    "a norm's class overrides extra parts of its work: a layer norm over tokens too, a linear layer whose weight is a property",
)
def overridden_layers(t: Trial) -> None:
    class Both(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) - 0.1 * x.mean(1, keepdim=True)

    class Halved(nn.Linear):
        @property
        def halved(self) -> torch.Tensor:
            return self.weight * 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.halved, self.bias)

    class Odd(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.wide = Both(WIDTH), Halved(WIDTH, 2 * WIDTH)

    model = Net([Odd(), Odd()])
    train(t, model, sgd(model), num_steps=4)


@attack("parts", "the head is a linear layer of a class that scales its inputs, or its call", only=EXACT)
def overridden_head(t: Trial) -> None:
    class Scaled(nn.Linear):
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * super().__call__(x)

    model = Net()
    model.head = Scaled(WIDTH, 7)
    train(t, model, sgd(model), num_steps=4)


@attack(
    "gradients",
    "an optimizer's groups are a property that makes views of a list of its own, its add_param_group keeps names",
    only=EXACT,
)
def groups_with_names(t: Trial) -> None:
    class Named(torch.optim.SGD):
        def add_param_group(self, param_group: dict[str, Any]) -> None:
            super().add_param_group({"name": f"group {len(self.param_groups)}", **param_group})

        def __getattr__(self, name: str) -> Any:
            if name == "rates":
                return [group["lr"] for group in self.param_groups]
            raise AttributeError(name)

    model = Net()
    optimizer = Named(model.blocks.parameters(), lr=0.1, momentum=0.9)
    t.apply(model, optimizer)
    optimizer.add_param_group({"params": model.head.parameters(), "lr": 0.2})
    for step in range(4):
        loss = model(*tokens(step))
        model.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("rates", optimizer.rates)
        t.end_step()


@attack(
    "gradients",
    "parameters' own class keeps a count of how often its data is taken, and its gradient is a property that doubles",
)
def doubled_gradient_property(t: Trial) -> None:
    class Doubled(nn.Parameter):
        @property
        def grad(self) -> Any:  # type: ignore[override]
            found = torch.Tensor.grad.__get__(self)  # type: ignore[attr-defined]
            return None if found is None else 2 * found

        @grad.setter
        def grad(self, value: Any) -> None:
            torch.Tensor.grad.__set__(self, value)  # type: ignore[attr-defined]

        @grad.deleter
        def grad(self) -> None:
            torch.Tensor.grad.__delete__(self)  # type: ignore[attr-defined]

    model = Net()
    model.head.weight = Doubled(model.head.weight.data)
    train(t, model, sgd(model), num_steps=4)


@attack("gradients", "zero_grad is put on the optimizer's object before the plan, counts, and asks for zeros (a timer)")
def zeroing_put_on_object(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    plain, calls = optimizer.zero_grad, [0]

    def counted(set_to_none: bool = False) -> None:
        calls[0] += 1
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / calls[0]
        plain(set_to_none=set_to_none)

    optimizer.zero_grad = counted  # type: ignore[method-assign]
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        t.note("calls", calls[0])
        t.end_step()


@attack(
    "gradients",
    "zero_grad of torch's own classes is patched before the plan, or in the middle, by one that lowers the rate",
)
def zeroing_patched_in_class(t: Trial) -> None:
    plain = torch.optim.Optimizer.zero_grad

    def lowers(self: torch.optim.Optimizer, set_to_none: bool = True) -> None:
        for group in self.param_groups:
            group["lr"] *= 0.8
        plain(self, set_to_none)

    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    try:
        for step in range(5):
            if step == 2:
                torch.optim.Optimizer.zero_grad = lowers  # type: ignore[method-assign]
            loss = model(*tokens(step))
            optimizer.zero_grad(set_to_none=False)
            loss.backward()
            optimizer.step()
            t.note("rate", optimizer.param_groups[0]["lr"])
            t.end_step()
    finally:
        torch.optim.Optimizer.zero_grad = plain  # type: ignore[method-assign]


@attack(
    "gradients", "zero_grad of torch's module class is patched before anything else, and clears a log of the script's"
)
def zeroing_of_modules_patched(t: Trial) -> None:
    plain, log = nn.Module.zero_grad, [0.0]

    def clears(self: nn.Module, set_to_none: bool = True) -> None:
        log.clear()
        plain(self, set_to_none)

    nn.Module.zero_grad = clears  # type: ignore[method-assign]
    try:
        model = Net()
        optimizer = sgd(model)
        t.apply(model, optimizer)
        for step in range(4):
            model.zero_grad(set_to_none=False)
            loss = model(*tokens(step)) * (1 + 0.1 * len(log))
            loss.backward()
            log.append(float(loss.detach()))
            optimizer.step()
            t.note("log", len(log))
            t.end_step()
    finally:
        nn.Module.zero_grad = plain  # type: ignore[method-assign]


@attack(
    "gradients",
    "state_dict and load_state_dict of an optimizer without a step of its own are written by hand, loaded in the middle",
    only=EXACT,
)
def states_by_hand(t: Trial) -> None:
    class ByHand(torch.optim.Adam):
        def state_dict(self) -> dict[str, Any]:
            params = [p for group in self.param_groups for p in group["params"]]
            return {"moments": [{k: v.clone() for k, v in self.state[p].items()} for p in params]}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            params = [p for group in self.param_groups for p in group["params"]]
            for p, moments in zip(params, state_dict["moments"], strict=True):
                for name, value in moments.items():
                    self.state[p][name].copy_(value)

    model = Net()
    optimizer = ByHand(model.parameters(), lr=1e-2)
    t.apply(model, optimizer)
    kept: Any = None
    for step in range(6):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step == 1:
            kept = optimizer.state_dict()
        if step == 3:
            optimizer.load_state_dict(kept)
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "parts of a subclass without a step: states begin at ones by an _init_group of its own", only=EXACT
)
def states_begin_otherwise(t: Trial) -> None:
    class Warm(torch.optim.SGD):
        def _init_group(self, group: dict[str, Any], *args: Any) -> Any:
            for p in group["params"]:
                if p.grad is not None and "momentum_buffer" not in self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.full_like(p, 0.01)
            return super()._init_group(group, *args)

    model = Net()
    optimizer = Warm(model.parameters(), lr=0.1, momentum=0.9)
    train(t, model, optimizer, num_steps=4)


@attack(
    "recomputation",
    "the forward of torch's Sequential is patched, before the plan and once more in the middle, by one that scales by a count",
)
def sequential_patched(t: Trial) -> None:
    plain, calls = nn.Sequential.forward, [0]

    def counting(self: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return plain(self, x) * (1 + 0.05 * calls[0])

    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    try:
        for step in range(5):
            nn.Sequential.forward = counting if step >= 2 else plain  # type: ignore[method-assign]
            loss = model(*tokens(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()
    finally:
        nn.Sequential.forward = plain  # type: ignore[method-assign]


@attack(
    "recomputation",
    "children of torch's Sequential come in reverse in every second step, by a patched __iter__ of the class",
)
def sequential_order_patched(t: Trial) -> None:
    plain, turned = nn.Sequential.__iter__, [False]

    def turning(self: nn.Sequential) -> Any:
        found = list(plain(self))
        return iter(found[::-1] if turned[0] else found)

    nn.Sequential.__iter__ = turning  # type: ignore[method-assign]
    try:
        model = Net()
        train(t, model, sgd(model), num_steps=4, before=lambda step: turned.__setitem__(0, step % 2 == 1))
    finally:
        nn.Sequential.__iter__ = plain  # type: ignore[method-assign]


@attack(
    "parts",
    "the forward of torch's convolutions is patched before the plan by one that centres its input (weight standardisation's way)",
)
def convolutions_patched(t: Trial) -> None:
    plain = nn.Conv2d.forward

    def centred(self: nn.Conv2d, x: torch.Tensor) -> torch.Tensor:
        return plain(self, x - x.mean((2, 3), keepdim=True))

    nn.Conv2d.forward = centred  # type: ignore[method-assign]
    try:
        model = Images()
        train(t, model, sgd(model), num_steps=4, batch=images)
    finally:
        nn.Conv2d.forward = plain  # type: ignore[method-assign]


@attack(
    "parts",
    "torch's convolutions are patched in the middle by ones that pad by reflection and count, and its activations scale by that",
)
def convolutions_patched_later(t: Trial) -> None:
    plain, tanh, calls = nn.Conv2d._conv_forward, nn.Tanh.forward, [0]

    def padded(self: nn.Conv2d, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self.padding != (1, 1):
            return plain(self, x, weight, bias)
        return nn.functional.conv2d(nn.functional.pad(x, (1, 1, 1, 1), mode="reflect"), weight, bias)

    def scaled(self: nn.Tanh, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        return torch.tanh(x) * (1 + 0.05 * calls[0])

    model = Images()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    try:
        for step in range(5):
            if step == 3:
                nn.Conv2d._conv_forward, nn.Tanh.forward = padded, scaled  # type: ignore[method-assign]
            loss = model(*images(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()
    finally:
        nn.Conv2d._conv_forward, nn.Tanh.forward = plain, tanh  # type: ignore[method-assign]


@attack(
    "parts", "torch's function for convolutions is patched in the middle by one that pads by reflection, for all layers"
)
def convolution_function_patched_later(t: Trial) -> None:
    plain = nn.functional.conv2d

    def padded(
        x: torch.Tensor, weight: torch.Tensor, bias: Any = None, stride: Any = 1, padding: Any = 0, *rest: Any
    ) -> torch.Tensor:
        if padding not in (1, (1, 1)):
            return plain(x, weight, bias, stride, padding, *rest)
        return plain(nn.functional.pad(x, (1, 1, 1, 1), mode="reflect"), weight, bias, stride, 0, *rest)

    model = Images()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    try:
        for step in range(5):
            if step == 3:
                nn.functional.conv2d = padded
            loss = model(*images(step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()
    finally:
        nn.functional.conv2d = plain
