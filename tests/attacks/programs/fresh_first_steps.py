"""Programs whose first steps are special: states made of the first batch, warm-up from a rate of zero, and what begins only later."""

from typing import Any

import torch
from tests.attacks.models import TOKENS, WIDTH, Block, Net, adamw, sgd, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn


class _Initialised(Block):
    """Has parameters that are made of the first batch (Glow)."""

    def __init__(self) -> None:
        super().__init__()
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.ones(WIDTH))
        self.is_ready = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens of the same shape."""
        if not self.is_ready:
            with torch.no_grad():
                self.shift.copy_(-x.mean((0, 1)))
                self.scale.copy_(1 / x.std((0, 1)))
            self.is_ready = True
        return x + self.inner((x + self.shift) * self.scale)


@attack("parts", "activation normalisation: shift and scale are parameters that the first batch sets", only=EXACT)
def set_by_first_batch(t: Trial) -> None:
    t.writes_within_step("shift", "scale")
    train(t, Net([_Initialised(), _Initialised()]))


@attack("parts", "a mean of the first batch, kept on the block as a plain tensor")
def mean_of_first_batch(t: Trial) -> None:
    class Centred(Block):
        mean: Any = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.mean is None:
                self.mean = x.detach().mean((0, 1))
            return x + self.inner(x - self.mean)

    train(t, Net([Centred(), Centred()]))


@attack("parts", "a mean of the first batch, kept by the model in a buffer with a flag that is a buffer too")
def statistics_of_first_batch(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", torch.zeros(WIDTH))
            self.register_buffer("is_set", torch.tensor(0))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            if self.is_set == 0:
                self.mean.copy_(x.mean((0, 1)))
                self.is_set.add_(1)
            return super().features(x - self.mean)

    train(t, Model())


@attack("parts", "the largest loss so far is kept on the model, and every loss is divided by it")
def largest_loss(t: Trial) -> None:
    class Model(Net):
        largest: Any = 0.0

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = super().loss(logits, y)
            self.largest = torch.maximum(torch.as_tensor(self.largest).to(loss), loss.detach())
            return loss / self.largest

    train(t, Model())


class _Borrowing(Net):
    """Its first layer multiplies with the data of the head's weight, as strongly as `strength` says."""

    strength: Any = 1.0

    def features(self, x: torch.Tensor) -> torch.Tensor:
        """What the head is given."""
        x = self.stem(x)
        return self.blocks(x + self.strength * torch.tanh(x @ self.head.weight.data.T) @ self.head.weight.data)


def _warm_up(t: Trial, model: Net, optimizer: torch.optim.Optimizer) -> None:
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 4))
    train(t, model, optimizer, num_steps=8, after=lambda _: scheduler.step())


@attack("gradients", "an early layer uses head.weight.data, and the rate is zero in the first step (warm-up)")
def data_of_head_and_warm_up(t: Trial) -> None:
    model = _Borrowing()
    _warm_up(t, model, sgd(model, momentum=0.0))


@attack("gradients", "the same with AdamW and a batch of the step before")
def data_of_head_and_warm_up_of_adam(t: Trial) -> None:
    model = _Borrowing()
    _warm_up(t, model, adamw(model))


@attack("gradients", "an early layer uses head.weight.data through a gate that starts at zero (ReZero)")
def data_of_head_behind_zero_gate(t: Trial) -> None:
    class Model(_Borrowing):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.zeros(()))

        @property
        def strength(self) -> torch.Tensor:
            return self.gate

    model = Model()
    train(t, model, sgd(model), num_steps=6)


@attack("gradients", "an early layer begins to use head.weight.data in the fourth step")
def data_of_head_later(t: Trial) -> None:
    model = _Borrowing()

    def before(step: int) -> None:
        model.strength = 0.0 if step < 3 else 1.0

    train(t, model, num_steps=7, before=before)


@attack("gradients", "two blocks' parameters share their storage, and the rate is zero in the first step")
def shared_storage_and_warm_up(t: Trial) -> None:
    model = Net()
    model.blocks[1].wide.weight = nn.Parameter(model.blocks[0].wide.weight.data)
    _warm_up(t, model, sgd(model, momentum=0.0))


@attack("parts", "attention by hand whose batches have padding only from the fourth on, at the front, by -1e9")
def padded_later(t: Trial) -> None:
    class Attending(Block):
        is_attention = True

        def __init__(self) -> None:
            super().__init__()
            self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
            self.hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scores = (self.query(x) @ self.key(x).transpose(-2, -1)).masked_fill(self.hidden, -1e9)
            return x + self.inner(scores.softmax(-1) @ self.value(x))

    model = Net([Attending(), Attending()])

    def before(step: int) -> None:
        if step == 3:
            for block in model.blocks:
                block.hidden = block.hidden | (torch.arange(TOKENS) < 2)

    train(t, model, num_steps=6, before=before)


@attack("second order", "a node's hook that divides by the count of its calls is put on from the fourth step")
def node_hook_later(t: Trial) -> None:
    calls = [0]

    def scaled(outputs: Any) -> Any:
        calls[0] += 1
        return tuple(g / calls[0] for g in outputs)

    class Hooked(Block):
        hooks = False

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            made = super().inner(x)
            if self.hooks and made.grad_fn is not None:
                made.grad_fn.register_prehook(scaled)
            return made

    model = Net([Hooked(), Hooked()])

    def before(step: int) -> None:
        for block in model.blocks:
            block.hooks = step >= 3

    train(t, model, num_steps=6, before=before)
