"""What the loop changes between forward and backward pass, of all that a forward or a loss reads: nothing saved for the backward pass sees it."""

import dataclasses
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, sgd, tokens
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

SETTINGS = types.SimpleNamespace(smoothing=0.1, bias=torch.zeros(NUM_CLASSES), table=np.zeros(NUM_CLASSES))


def changed_between(
    t: Trial, model: nn.Module, change: Callable[[int], Any], batch: Callable[[int], Any] = tokens
) -> None:
    """The plain loop with a change between forward and backward pass."""
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*batch(step))
        optimizer.zero_grad()
        change(step)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "label smoothing is an attribute of the model that the loop sets between forward and backward pass")
def smoothing_set_between(t: Trial) -> None:
    class Smooth(Net):
        smoothing = 0.0

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=self.smoothing)

    model = Smooth()

    def change(step: int) -> None:
        model.smoothing = 0.1 + 0.1 * step

    changed_between(t, model, change)


@attack("parts", "a criterion that the model holds gets another weight tensor between forward and backward pass")
def criterion_weight_exchanged_between(t: Trial) -> None:
    class Held(Net):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.CrossEntropyLoss(weight=torch.ones(NUM_CLASSES))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.criterion(logits.flatten(0, 1), y.flatten())

    model = Held()

    def change(step: int) -> None:
        model.criterion.weight = torch.arange(1.0, 1.0 + NUM_CLASSES) / (1 + step)

    changed_between(t, model, change)


@attack(
    "parts",
    "class weights in a plain tensor of the module's file are written in place between forward and backward pass",
    only=EXACT,
)
def global_tensor_written_between(t: Trial) -> None:
    SETTINGS.bias = torch.zeros(NUM_CLASSES)

    class Biased(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits + SETTINGS.bias, y)

    changed_between(t, Biased(), lambda step: SETTINGS.bias.add_(torch.arange(NUM_CLASSES) * 0.1))


@attack("parts", "a numpy table of the module's file is written between forward and backward pass", only=EXACT)
def numpy_table_written_between(t: Trial) -> None:
    SETTINGS.table[:] = 0

    class Biased(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits + torch.from_numpy(SETTINGS.table).to(logits.dtype), y)

    def change(step: int) -> None:
        SETTINGS.table[step] += 0.7

    changed_between(t, Biased(), change)


@attack("parts", "a tensor in a list in a dict of the block is written in place between forward and backward pass")
def nested_tensor_written_between(t: Trial) -> None:
    class Shifted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.kept = {"shifts": [torch.zeros(WIDTH)]}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.kept["shifts"][0])

    model = Net([Shifted(), Shifted()])

    def change(step: int) -> None:
        for block in model.blocks:
            block.kept["shifts"][0] += 0.1 * (step + 1)

    changed_between(t, model, change)


@attack("parts", "a tensor that only a closure holds is written in place between forward and backward pass")
def closure_tensor_written_between(t: Trial) -> None:
    shift = torch.zeros(WIDTH)

    class Shifted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + shift)

    def change(step: int) -> None:
        shift[step] = 0.5

    changed_between(t, Net([Shifted(), Shifted()]), change)


@attack("parts", "a mask in a buffer that is only compared is written in place between forward and backward pass")
def compared_buffer_written_between(t: Trial) -> None:
    class Masked(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(torch.where(self.mask > 0.5, x, 0.5 * x))

    model = Net([Masked(), Masked()])

    def change(step: int) -> None:
        for block in model.blocks:
            block.mask[step] -= 1

    changed_between(t, model, change)


@attack("parts", "the same buffer is written through .data in the head's loss, and in the blocks")
def added_buffer_written_by_data_between(t: Trial) -> None:
    class Shifted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(NUM_CLASSES))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits + self.shift, y)

    model = Shifted()

    def change(step: int) -> None:
        model.shift.data[step] += 1

    changed_between(t, model, change)


@attack(
    "parts",
    "a temperature in a buffer is written through .data between forward and backward pass, which reads it by its graph",
    only=EXACT,
)
def temperature_written_by_data_between(t: Trial) -> None:
    class Tempered(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("temperature", torch.ones(()))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits / self.temperature, y)

    model = Tempered()
    changed_between(t, model, lambda _: model.temperature.data.mul_(0.8))


@attack("parts", "a batch object of the program's class gets another tensor between forward and backward pass")
def batch_object_changed_between(t: Trial) -> None:
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor
        y: torch.Tensor

    class Whole(Net):
        def forward(self, batch: Any, y: Any = None) -> torch.Tensor:
            return super().forward(batch.x, batch.y)

    model = Whole()
    last: list[Batch] = []

    def batch(step: int) -> tuple[Batch]:
        last[:] = [Batch(*tokens(step))]
        return (last[0],)

    def change(step: int) -> None:
        last[0].x, last[0].y = tokens(step + 60)

    changed_between(t, model, change, batch)


@attack(
    "parts",
    "a list that is the batch has its tensors exchanged between forward and backward pass (a prefetcher that refills a list)",
)
def batch_list_refilled_between(t: Trial) -> None:
    class Listed(Net):
        def forward(self, batch: list[torch.Tensor], y: Any = None) -> torch.Tensor:
            return super().forward(batch[0], batch[1])

    kept: list[torch.Tensor] = []

    def batch(step: int) -> tuple[list[torch.Tensor]]:
        kept[:] = tokens(step)
        return (kept,)

    def change(step: int) -> None:
        kept[:] = tokens(step + 60)

    changed_between(t, Listed(), change, batch)


@attack("parts", "a dict that is the batch is emptied and filled with the next one between forward and backward pass")
def batch_dict_refilled_between(t: Trial) -> None:
    class Named(Net):
        def forward(self, batch: dict[str, torch.Tensor], y: Any = None) -> torch.Tensor:
            return super().forward(batch["x"], batch["y"])

    kept: dict[str, torch.Tensor] = {}

    def batch(step: int) -> tuple[dict[str, torch.Tensor]]:
        kept.update(zip("xy", tokens(step), strict=True))
        return (kept,)

    def change(step: int) -> None:
        kept.clear()
        kept.update(zip("xy", tokens(step + 60), strict=True))

    changed_between(t, Named(), change, batch)


@attack("parts", "targets are written in place after a loss that does not save them (mean squares of one-hot vectors)")
def unsaved_targets_written_between(t: Trial) -> None:
    class Squared(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (logits - functional.one_hot(y, NUM_CLASSES)).square().mean()

    last: list[torch.Tensor] = []

    def batch(step: int) -> Any:
        last[:] = tokens(step)
        return tuple(last)

    def change(step: int) -> None:
        last[1].fill_(step)

    changed_between(t, Squared(), change, batch)


@attack("parts", "a flag by which the loss adds a term is turned between forward and backward pass")
def flag_turned_between(t: Trial) -> None:
    class Flagged(Net):
        penalise = False

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = super().loss(logits, y)
            return loss + logits.square().mean() if self.penalise else loss

    model = Flagged()

    def change(step: int) -> None:
        model.penalise = step % 2 == 0

    changed_between(t, model, change)


@attack("parts", "the head is exchanged for another module between forward and backward pass, and back after the step")
def head_exchanged_between(t: Trial) -> None:
    model = Net()
    other = nn.Linear(WIDTH, NUM_CLASSES)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        own = model.head
        loss = model(*tokens(step))
        model.head = other
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.head = own
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "weights are zeroed by .data after the forward and put back in a hook on the loss, before any gradient is made",
)
def weights_away_between(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        kept = [p.detach().clone() for p in model.parameters()]
        for p in model.parameters():
            p.data.zero_()

        def back(_: torch.Tensor, kept: Any = kept) -> None:
            for p, old in zip(model.parameters(), kept, strict=True):
                p.data.copy_(old)

        loss.register_hook(back)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "the function that the model holds as its activation is exchanged between forward and backward pass")
def activation_exchanged_between(t: Trial) -> None:
    class Acting(Net):
        act = staticmethod(functional.gelu)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(super().features(x))

    model = Acting()

    def change(step: int) -> None:
        model.act = functional.relu if step % 2 else functional.gelu

    changed_between(t, model, change)


@attack(
    "parts",
    "the global default that a loss reads (torch's float32 matmul precision, its default dtype) is another one in the backward pass",
)
def defaults_changed_between(t: Trial) -> None:
    class Reads(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scale = 1.0 if torch.get_float32_matmul_precision() == "highest" else 2.0
            return super().loss(logits, y) * scale

    model = Reads()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        torch.set_float32_matmul_precision("high")
        optimizer.zero_grad()
        loss.backward()
        torch.set_float32_matmul_precision("highest")
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "two forwards of one model, a setting changed in between, and one backward pass of the sum")
def setting_changed_between_forwards(t: Trial) -> None:
    class Scaled(Net):
        scale = 1.0

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits * self.scale, y)

    model = Scaled()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        model.scale = 1.0
        loss = model(*tokens(step))
        model.scale = 0.5
        loss = loss + model(*tokens(step + 60))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "the loss of the step before is kept with its graph and run backwards after the next forward (delayed by one)",
)
def backward_delayed_by_one(t: Trial) -> None:
    class Scaled(Net):
        scale = 1.0

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().loss(logits * self.scale, y)

    model = Scaled()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    before = None
    for step in range(5):
        model.scale = 1 + 0.1 * step
        loss = model(*tokens(step))
        if before is not None:
            optimizer.zero_grad()
            before.backward()
            with torch.no_grad():
                t.note("loss", before)
        before = loss
        if step % 2 == 0 and step:
            before = None
            optimizer.step()
        t.end_step()


@attack(
    "parts", "a scale in a buffer of each block is written through .data between forward and backward pass", only=EXACT
)
def scale_of_blocks_written_by_data_between(t: Trial) -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    model = Net([Scaled(), Scaled()])

    def change(step: int) -> None:
        for block in model.blocks:
            block.scale.data[step] += 0.5

    changed_between(t, model, change)


@attack(
    "parts",
    "frozen weights of blocks are written through .data between forward and backward pass (a merge too early)",
    only=EXACT,
)
def frozen_weights_written_by_data_between(t: Trial) -> None:
    model = Net()
    for block in model.blocks:
        block.wide.requires_grad_(False)

    def change(step: int) -> None:
        for block in model.blocks:
            block.wide.weight.data.add_(0.1 * (step + 1))

    t.writes_within_step("wide.weight")
    changed_between(t, model, change)


@attack(
    "parts", "a table of numpy's that multiplies in the blocks is written between forward and backward pass", only=EXACT
)
def numpy_scale_written_between(t: Trial) -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.table = np.ones(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.from_numpy(self.table))

    model = Net([Scaled(), Scaled()])

    def change(step: int) -> None:
        for block in model.blocks:
            block.table[step] += 0.5

    changed_between(t, model, change)


@attack(
    "parts",
    "what a block keeps of its inner layer is written through .data between forward and backward pass",
    only=EXACT,
)
def kept_activation_written_by_data_between(t: Trial) -> None:
    class Keeping(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            self.hidden = self.wide(self.norm(x))
            return self.narrow(functional.gelu(self.hidden))

    model = Net([Keeping(), Keeping()])

    def change(step: int) -> None:
        for block in model.blocks:
            block.hidden.data.mul_(0.5)

    changed_between(t, model, change)


@attack(
    "parts",
    "positions added to the stem's output are scaled through .data between the passes, and multiply in the head",
    only=EXACT,
)
def shared_constant_written_by_data_between(t: Trial) -> None:
    positions = torch.linspace(0.5, 1.5, WIDTH)

    class Positioned(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super().features(x) * positions

    changed_between(t, Positioned(), lambda _: positions.data.mul_(1.2))
