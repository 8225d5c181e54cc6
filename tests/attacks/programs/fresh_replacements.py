"""Code that is replaced while a program runs, behind one more name than usual: by functions that count what they are called with."""

import types
from collections.abc import Callable
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, adamw, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

_HELPERS = types.ModuleType("helpers_of_attacks")
_HELPERS.squash = torch.tanh


def _counting(inner: Callable[..., torch.Tensor], counts: list[int]) -> Callable[..., torch.Tensor]:
    def counted(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        counts[0] += 1
        return inner(x, *args, **kwargs) * (1 + 0.05 * counts[0])

    return counted


def _inner(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def _outer(x: torch.Tensor) -> torch.Tensor:
    return _inner(x) + 0.1 * x


class _Helper:
    """A class of the script's that is no module."""

    def squash(self, x: torch.Tensor) -> torch.Tensor:
        """Numbers between -1 and 1."""
        return torch.tanh(x)


def _exchanged(
    t: Trial, model: nn.Module, owner: Any, name: str, counts: list[int], *, steps: tuple[int, ...] = (2, 3)
) -> None:
    before = owner[name] if isinstance(owner, dict) else vars(owner)[name]

    def put(value: Any) -> None:
        owner.update({name: value}) if isinstance(owner, dict) else setattr(owner, name, value)

    try:
        train(
            t,
            model,
            num_steps=5,
            before=lambda step: put(_counting(before, counts) if step in steps else before),
        )
    finally:
        put(before)
    t.note("counts", counts)


@attack("changes", "a function of a helper module of the script's is replaced by one that counts")
def helper_module_function_replaced(t: Trial) -> None:
    class Squashed(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return _HELPERS.squash(super().inner(x))

    _exchanged(t, Net([Squashed(), Squashed()]), _HELPERS, "squash", [0])


@attack("changes", "a function that a function of the script's calls is replaced by one that counts")
def nested_function_replaced(t: Trial) -> None:
    class Squashed(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return _outer(super().inner(x))

    _exchanged(t, Net([Squashed(), Squashed()]), globals(), "_inner", [0])


@attack("changes", "a method of a helper's class is replaced by one that counts")
def helper_method_replaced(t: Trial) -> None:
    counts = [0]

    class Squashed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.helper = _Helper()

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.helper.squash(super().inner(x))

    before = _Helper.squash

    def counted(self: _Helper, x: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return before(self, x) * (1 + 0.05 * counts[0])

    def put(step: int) -> None:
        _Helper.squash = counted if step in (2, 3) else before

    try:
        train(t, Net([Squashed(), Squashed()]), before=put, num_steps=5)
    finally:
        _Helper.squash = before
    t.note("counts", counts)


@attack("changes", "the forward of torch's own linear layers is patched on their class by one that counts")
def torchs_class_patched(t: Trial) -> None:
    counts, before = [0], nn.Linear.forward

    def counted(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return before(self, x) * (1 + 0.01 * counts[0])

    def put(step: int) -> None:
        nn.Linear.forward = counted if step in (2, 3) else before

    try:
        train(t, Net(), before=put, num_steps=5)
    finally:
        nn.Linear.forward = before
    t.note("counts", counts)


@attack("changes", "the call of all modules is wrapped on torch's class by a profiler of the script's that counts")
def all_calls_counted(t: Trial) -> None:
    counts: dict[str, int] = {}
    before = nn.Module.__call__

    def counted(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        counts[type(self).__name__] = counts.get(type(self).__name__, 0) + 1
        return before(self, *args, **kwargs)

    nn.Module.__call__ = counted
    try:
        train(t, Net(), after=lambda _: t.note("counts", {k: v for k, v in counts.items() if k in ("Block", "GELU")}))
    finally:
        nn.Module.__call__ = before


@attack(
    "changes", "before anything else, the script puts a gelu of its own into torch's functions that counts and scales"
)
def gelu_patched_before(t: Trial) -> None:
    _exchanged(t, Net(), functional.__dict__, "gelu", [0], steps=(0, 1, 2, 3, 4))


@attack("changes", "the code of a function that blocks call is exchanged for another function's, which counts")
def code_exchanged(t: Trial) -> None:
    counts = [0]

    def plain(x: torch.Tensor, counts: list[int] = counts) -> torch.Tensor:
        return torch.tanh(x)

    def counting(x: torch.Tensor, counts: list[int] = counts) -> torch.Tensor:
        counts[0] += 1
        return torch.tanh(x) * (1 + 0.05 * counts[0])

    class Squashed(Block):
        squash = staticmethod(plain)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.squash(super().inner(x))

    def put(step: int) -> None:
        if step == 2:
            plain.__code__ = counting.__code__

    train(t, Net([Squashed(), Squashed()]), before=put, num_steps=5)
    t.note("counts", counts)


class _Attention(Block):
    is_attention = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = x @ self.norm(x).transpose(1, 2) / WIDTH**0.5
        return x + self.inner(functional.softmax(scores, dim=-1) @ x)


@attack(
    "changes",
    "the script puts a softmax of its own into torch's functions that counts and sharpens (attention by hand)",
)
def softmax_patched(t: Trial) -> None:
    _exchanged(t, Net([_Attention(), _Attention()]), functional.__dict__, "softmax", [0], steps=(1, 2))


@attack(
    "changes", "the script puts an attention of its own in the place of torch's, which counts its calls (a flash patch)"
)
def fused_attention_patched(t: Trial) -> None:
    class Fused(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)[:, None]
            return x + self.inner(functional.scaled_dot_product_attention(y, y, y, is_causal=True)[:, 0])

    counts, torchs = [0], functional.scaled_dot_product_attention

    def own(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        counts[0] += 1
        return torchs(q, k, v, **kwargs) * (1 + 0.05 * counts[0])

    def put(step: int) -> None:
        functional.scaled_dot_product_attention = own if step in (1, 2) else torchs

    try:
        train(t, Net([Fused(), Fused()]), before=put, num_steps=4)
    finally:
        functional.scaled_dot_product_attention = torchs
    t.note("counts", counts)


@attack("changes", "a mean squared error of the script's own is put into torch's functions for a regression model")
def squared_error_patched(t: Trial) -> None:
    class Regression(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.mse_loss(logits[..., 0], y.to(logits.dtype))

    torchs = functional.mse_loss

    def own(found: torch.Tensor, goal: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return torchs(found, goal, **kwargs) + 0.1 * found.mean() ** 2

    def put(step: int) -> None:
        functional.mse_loss = own if step >= 2 else torchs

    try:
        train(t, Regression(), before=put, num_steps=5)
    finally:
        functional.mse_loss = torchs


@attack(
    "recomputation",
    "a generator of the model's own, and numpy's, are set back before the backward pass to where they were",
)
def generators_set_back(t: Trial) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator(torch.get_default_device()).manual_seed(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 0.1 * torch.randn(x.shape, generator=self.generator, dtype=x.dtype))

    model = Net([Noisy(), Noisy()])
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        states = [block.generator.get_state() for block in model.blocks]
        loss = model(*tokens(step))
        for block, state in zip(model.blocks, states, strict=True):
            block.generator.set_state(state)
        optimizer.zero_grad()
        loss.backward()
        t.note("drawn", [torch.rand(1, generator=block.generator) for block in model.blocks])
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the optimizer's state_dict is taken once, and its moments are read there after later steps")
def state_dict_read_later(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    kept: dict[str, Any] = {}

    def read(step: int) -> None:
        if step == 0:
            kept.update(optimizer.state_dict())
        t.note("moments", [kept["state"][0]["exp_avg"], kept["state"][0]["step"]])

    train(t, model, optimizer, after=read)


@attack(
    "changes",
    "the script puts a linear function of its own into torch's, for all linear layers, which counts and scales",
)
def linear_patched(t: Trial) -> None:
    _exchanged(t, Net(), functional.__dict__, "linear", [0])


@attack("changes", "the script puts a layer norm of its own into torch's functions (a fused one), which counts")
def layer_norm_patched(t: Trial) -> None:
    _exchanged(t, Net(), functional.__dict__, "layer_norm", [0])


@attack("gradients", "the step of torch's own optimizer class is patched by one that counts and weighs the rate")
def optimizer_class_patched(t: Trial) -> None:
    counts, before = [0], torch.optim.SGD.step

    def counted(self: torch.optim.SGD, *args: Any, **kwargs: Any) -> Any:
        counts[0] += 1
        self.param_groups[0]["lr"] = 0.1 / (1 + counts[0])
        return before(self, *args, **kwargs)

    def put(step: int) -> None:
        torch.optim.SGD.step = counted if step in (2, 3) else before

    try:
        train(t, Net(), before=put, num_steps=5)
    finally:
        torch.optim.SGD.step = before
    t.note("counts", counts)


@attack(
    "gradients", "the script puts a clipping of its own in the place of torch's, by the median of norms, for some steps"
)
def clipping_patched(t: Trial) -> None:
    torchs, model = nn.utils.clip_grad_norm_, Net()

    def own(parameters: Any, most: float) -> torch.Tensor:
        each = [p for p in parameters if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in each]).median()
        for p in each:
            p.grad.mul_((most / (norm + 1e-6)).clamp(max=1.0))
        return norm

    def put(step: int) -> None:
        nn.utils.clip_grad_norm_ = own if step in (2, 3) else torchs

    def clip(_: int) -> None:
        t.note("norm", nn.utils.clip_grad_norm_(model.parameters(), 0.1))

    try:
        train(t, model, before=put, between=clip, num_steps=5)
    finally:
        nn.utils.clip_grad_norm_ = torchs


@attack("changes", "the call of a helper's object and a property of a block's class are replaced by ones that count")
def call_and_property_replaced(t: Trial) -> None:
    counts = [0]

    class Gate:
        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x)

    class Gated(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gate = Gate()

        @property
        def strength(self) -> float:
            return 1.0

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.gate(super().inner(x)) * self.strength

    def strong(_: Gated) -> float:
        counts[0] += 1
        return 1 + 0.05 * counts[0]

    def called(_: Gate, x: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return torch.tanh(x)

    def put(step: int) -> None:
        if step == 2:
            Gated.strength = property(strong)
        if step == 3:
            Gate.__call__ = called

    train(t, Net([Gated(), Gated()]), before=put, num_steps=5)
    t.note("counts", counts)


@attack(
    "changes",
    "the cross-entropy that the script has put in counts its calls before it calls torch's, from the beginning",
)
def counting_cross_entropy(t: Trial) -> None:
    counts, torchs = [0], functional.cross_entropy

    def own(logits: torch.Tensor, y: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        counts[0] += 1
        return torchs(logits, y, **kwargs) * (1 + 0.05 * counts[0])

    functional.cross_entropy = own
    try:
        train(t, Net(), num_steps=4)
    finally:
        functional.cross_entropy = torchs
    t.note("counts", counts)


@attack(
    "gradients",
    "backward passes and autograd.grad are wrapped in torch.autograd by ones that count (a tracer of the script's)",
)
def autograd_patched(t: Trial) -> None:
    counts, before, grad = [0], torch.autograd.backward, torch.autograd.grad

    def counted(*args: Any, **kwargs: Any) -> None:
        counts[0] += 1
        before(*args, **kwargs)

    def asked(*args: Any, **kwargs: Any) -> Any:
        counts[0] += 100
        return grad(*args, **kwargs)

    def put(step: int) -> None:
        torch.autograd.backward = counted if step in (1, 2) else before
        torch.autograd.grad = asked if step in (1, 2) else grad

    try:
        train(t, Net(), before=put, num_steps=4)
    finally:
        torch.autograd.backward, torch.autograd.grad = before, grad
    t.note("counts", counts)
