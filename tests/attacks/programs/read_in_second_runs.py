"""Code that a plain backward pass runs reads what the loop has changed since the forward: the program's own checkpoints, and its functions."""

from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, sgd, tokens
from tests.attacks.programs.changed_between_passes import changed_between
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch.utils.checkpoint import checkpoint


@attack(
    "parts",
    "an attribute that blocks read is set between the passes, in blocks that the program checkpoints itself: plain, the second run reads it",
)
def attribute_set_before_own_second_run(t: Trial) -> None:
    class Scaled(Block):
        scale = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.scale)

    class Recomputing(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Recomputing([Scaled(), Scaled()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        Scaled.scale = 1.0
        loss = model(*tokens(step))
        Scaled.scale = 1.1
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "a shift in a buffer is written between the passes, in blocks that the program checkpoints itself: plain, the second run reads it",
)
def buffer_written_before_own_second_run(t: Trial) -> None:
    class Shifted(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.shift)

    class Recomputing(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    model = Recomputing([Shifted(), Shifted()])

    def change(step: int) -> None:
        for block in model.blocks:
            block.shift[step] += 0.5

    changed_between(t, model, change)


@attack(
    "parts",
    "blocks draw from a generator of their own in the program's checkpoints, and the loop seeds it anew between the passes",
)
def own_second_run_draws_from_seeded(t: Trial) -> None:
    generator = torch.Generator(torch.get_default_device())

    class Noisy(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + 0.1 * torch.randn(WIDTH, generator=generator))

    class Recomputing(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks[1](checkpoint(self.blocks[0], self.stem(x), use_reentrant=False))

    def change(step: int) -> None:
        generator.manual_seed(step)

    generator.manual_seed(99)
    changed_between(t, Recomputing([Noisy(), Noisy()]), change)


@attack("parts", "a function's backward pass reads an attribute of its module, which the loop sets between the passes")
def attribute_read_by_function_set_between(t: Trial) -> None:
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, holder: Any) -> torch.Tensor:
            ctx.holder = holder
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return grad * ctx.holder.strength, None

    class Reversing(Net):
        strength = 1.0

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.blocks(Reversed.apply(self.stem(x), self))

    model = Reversing()

    def change(step: int) -> None:
        model.strength = -0.5 * step

    changed_between(t, model, change)
