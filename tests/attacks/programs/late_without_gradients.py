"""What begins to depend on other rows only after the steps that are checked, in parts of the code that leave no trace in the graph."""

from collections.abc import Callable

import numpy as np
import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

LATE, STEPS = 4, 7


class Clock:
    """The number of the step."""

    step = 0


def _tick(step: int) -> None:
    Clock.step = step


def _blocks(t: Trial, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Trains with blocks that take off a constant, or from step 4 on what `change` makes of their input."""

    class Shifted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.full((WIDTH,), 0.1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            shift = self.shift
            if Clock.step >= LATE:
                shift = change(x.detach())
            return super().forward(x - shift)

    train(t, Net([Shifted(), Shifted()]), num_steps=STEPS, before=_tick)


def _losses(t: Trial, weight_of: Callable[[torch.Tensor, torch.Tensor], torch.Tensor | float]) -> None:
    """Trains with a loss that is divided by 12, or from step 4 on by what `weight_of` makes of logits and classes."""

    class Divided(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            divisor = torch.tensor(1.5, dtype=each.dtype)
            if Clock.step >= LATE:
                divisor = weight_of(logits.detach(), y)
            return (each / divisor).mean()

    train(t, Divided(), num_steps=STEPS, before=_tick)


@attack("parts", "from step 4 on a block takes off the detached mean of all tokens instead of a constant", only=EXACT)
def late_mean_for_constant(t: Trial) -> None:
    _blocks(t, lambda x: x.mean((0, 1)))


@attack("parts", "from step 4 on a block takes off the first token of all, detached", only=EXACT)
def late_first_token(t: Trial) -> None:
    _blocks(t, lambda x: x[0, 0] * 0.5)


@attack("parts", "from step 4 on a block takes off a mean that numpy makes of its input", only=EXACT)
def late_mean_of_numpy(t: Trial) -> None:
    _blocks(t, lambda x: torch.from_numpy(np.asarray(x.tolist()).mean((0, 1))).to(x.dtype))


@attack("parts", "from step 4 on a block takes off a list of Python's numbers", only=EXACT)
def late_numbers_of_python(t: Trial) -> None:
    _blocks(t, lambda x: torch.tensor([float(each) for each in x.amax((0, 1))], dtype=x.dtype))


@attack("parts", "from step 4 on a block takes off its number of tokens, in tenths", only=EXACT)
def late_number_of_tokens(t: Trial) -> None:
    _blocks(t, lambda x: torch.full((WIDTH,), 0.1 * x.shape[0] * x.shape[1], dtype=x.dtype))


@attack("parts", "from step 4 on a loss is divided by its detached mean instead of a constant", only=EXACT)
def late_mean_of_loss(t: Trial) -> None:
    _losses(t, lambda logits, _: logits.abs().mean())


@attack("parts", "from step 4 on a loss is divided by the share of classes that are there", only=EXACT)
def late_share_of_classes(t: Trial) -> None:
    _losses(t, lambda logits, y: (y > 2).to(logits.dtype).mean())


@attack("parts", "from step 4 on a loss is divided by a count that Python reads", only=EXACT)
def late_count_in_python(t: Trial) -> None:
    _losses(t, lambda logits, y: torch.tensor(float(int((y > 2).sum())), dtype=logits.dtype))


@attack(
    "parts",
    "a sum over tokens is divided by how many there are, and from step 4 on by how many are no padding",
    only=EXACT,
)
def late_count_of_tokens(t: Trial) -> None:
    class Summed(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            count = y.numel() if Clock.step < LATE else int((y > 0).sum())
            return (each * (y.flatten() >= 0)).sum() / count

    train(t, Summed(), num_steps=STEPS, before=_tick)


@attack(
    "parts",
    "the count of tokens comes with the batch as a number, and from step 4 on it leaves padding out",
    only=EXACT,
)
def late_count_with_batch(t: Trial) -> None:
    class Counted(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, count: int) -> torch.Tensor:
            logits = self.head(self.features(x))
            return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="sum") / count

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y = tokens(step)
        return x, y, y.numel() if step < LATE else int((y > 0).sum())

    train(t, Counted(), num_steps=STEPS, batch=batch)


@attack("parts", "attention over a mask that is given; from step 4 on it lets tokens see others", only=EXACT)
def late_mask_opens(t: Trial) -> None:
    class Masked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mask = torch.eye(6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                shift = torch.einsum("ts,bsw->btw", self.mask.to(x.dtype), x)
            return super().forward(x - 0.5 * shift)

    model = Net([Masked(), Masked()])

    def opens(step: int) -> None:
        if step == LATE:
            for block in model.blocks:
                block.mask = torch.ones(6, 6) / 6

    train(t, model, num_steps=STEPS, before=opens)


@attack("parts", "an index of rows that is the identity at first; from step 4 on rows are exchanged", only=EXACT)
def late_exchange_of_rows(t: Trial) -> None:
    class Taken(Block):
        order: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if Taken.order is None:
                return y + 0.1 * x.detach()
            return y + 0.1 * x.detach()[Taken.order[: len(x)] % len(x)]

    def exchange(step: int) -> None:
        Taken.order = torch.arange(4) if step < LATE else torch.tensor([1, 0, 3, 2])

    Taken.order = None
    train(t, Net([Taken(), Taken()]), num_steps=STEPS, before=lambda s: exchange(s) if s >= LATE else None)


@attack("parts", "noise is added from step 4 on, of a generator that is seeded by the data", only=EXACT)
def late_noise_of_data(t: Trial) -> None:
    def noise(x: torch.Tensor) -> torch.Tensor:
        chance = torch.Generator().manual_seed(int(x.abs().sum() * 1000) % 1000)
        return torch.randn(WIDTH, generator=chance, dtype=x.dtype) * 0.1

    _blocks(t, noise)


@attack(
    "parts", "images: a chain subtracts a constant colour, and from step 4 on the mean colour, detached", only=EXACT
)
def late_mean_colour(t: Trial) -> None:
    from tests.attacks.models import Images, images

    class Colour(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            colour = torch.full((x.shape[1], 1, 1), 0.1, dtype=x.dtype)
            if Clock.step >= LATE:
                colour = x.detach().mean((0, 2, 3)).view(-1, 1, 1)
            return x - colour

    layers = [nn.Conv2d(3, 4, 3, padding=1), Colour(), nn.Conv2d(4, 4, 3, padding=1)]
    train(t, Images(layers), num_steps=STEPS, before=_tick, batch=images)


@attack("parts", "the head's bias is a constant, and from step 4 on log-frequencies of the batch's classes", only=EXACT)
def late_frequencies(t: Trial) -> None:
    class Prior(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            prior = torch.zeros(NUM_CLASSES, dtype=x.dtype)
            if Clock.step >= LATE:
                prior = functional.one_hot(y, NUM_CLASSES).to(x.dtype).mean((0, 1)).add(0.1).log()
            logits = self.head(self.features(x)) + prior
            return functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    train(t, Prior(), num_steps=STEPS, before=_tick)


@attack("parts", "classes are smoothed by a table, which from step 4 on is made of the batch", only=EXACT)
def late_smoothing_table(t: Trial) -> None:
    class Smoothed(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            table = torch.full((NUM_CLASSES, NUM_CLASSES), 0.02, dtype=logits.dtype)
            if Clock.step >= LATE:
                hot = functional.one_hot(y.flatten(), NUM_CLASSES).to(logits.dtype)
                table = (hot.t() @ logits.detach().flatten(0, 1).softmax(-1)) / len(hot)
            aim = 0.8 * functional.one_hot(y, NUM_CLASSES).to(logits.dtype) + 0.2 * table[y]
            return -(aim * logits.log_softmax(-1)).sum(-1).mean()

    train(t, Smoothed(), num_steps=STEPS, before=_tick)


@attack(
    "parts", "a gate per example reads its own mean, and from step 4 on that of its neighbour, detached", only=EXACT
)
def late_neighbour(t: Trial) -> None:
    class Gated(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            own = x.detach()
            if Clock.step >= LATE:
                own = torch.cat([own[1:], own[:1]])
            return super().forward(x) * own.sigmoid()

    train(t, Net([Gated(), Gated()]), num_steps=STEPS, before=_tick)


@attack(
    "parts", "clean blocks; from step 4 on a method that somebody put on the class mixes tokens, detached", only=EXACT
)
def late_method_of_class(t: Trial) -> None:
    class Plain(Block):
        def gate(self, x: torch.Tensor) -> torch.Tensor:
            return x.detach().tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + self.gate(x))

    def mixing(_: Plain, x: torch.Tensor) -> torch.Tensor:
        return x.detach().cumsum(1).tanh()

    def replace(step: int) -> None:
        if step == LATE:
            Plain.gate = mixing

    train(t, Net([Plain(), Plain()]), num_steps=STEPS, before=replace)


@attack("gradients", "the last window of accumulation is shorter, and its gradients are scaled by hand")
def partial_last_window(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    count = 0
    for step in range(8):
        loss = model(*tokens(step)) / 3
        loss.backward()
        count += 1
        t.note("loss", loss)
        if count == 3 or step == 7:
            if count < 3:
                for p in model.parameters():
                    p.grad.mul_(3 / count)
            optimizer.step()
            optimizer.zero_grad()
            count = 0
            t.end_step()
