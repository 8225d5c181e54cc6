"""Forwards that change a state for the time of the call and put it back at their end: what is run a second time, and only as far as it is needed, may not get there."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, adamw, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Merged(Block):
    """A block with a low-rank part beside its first layer."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, 2 * WIDTH, bias=False)

    def delta(self) -> torch.Tensor:
        """What is merged."""
        return (self.up.weight @ self.down.weight).detach()


@attack(
    "recomputation", "a low-rank part is merged into a frozen weight's data for the forward, and taken out at its end"
)
def merged_for_the_forward(t: Trial) -> None:
    class Merging(_Merged):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            plain = self.narrow.bias.data
            self.narrow.bias.data = plain * 1.5
            x = x + self.inner(x)
            self.narrow.bias.data = plain
            return x

    train(t, Net([Merging(), Merging()]), num_steps=9)


@attack("recomputation", "a frozen bias is scaled in place through .data for the forward, and scaled back at its end")
def scaled_for_the_forward(t: Trial) -> None:
    class Scaling(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.linspace(0, 1, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.shift.data.mul_(2)
            x = x + self.inner(x) + self.shift
            self.shift.data.mul_(0.5)
            return x

    train(t, Net([Scaling(), Scaling()]), num_steps=9)


@attack(
    "recomputation",
    "two buffers are swapped by each block of a range, so that every second forward begins as the first (swap_tensors)",
)
def swapped_by_each_block(t: Trial) -> None:
    one, other = torch.linspace(0, 1, WIDTH), torch.linspace(1, -1, WIDTH)

    class Swapping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x)
            torch.utils.swap_tensors(one, other)
            return x + one

    train(t, Net([Swapping(), Swapping()]), num_steps=9)


@attack("recomputation", "a mask is turned over in place by each block (logical_not_), and is as before after both")
def mask_turned_by_each_block(t: Trial) -> None:
    mask = torch.arange(WIDTH) % 2 == 0

    class Turning(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x) * mask.to(x)
            mask.logical_not_()
            return x

    train(t, Net([Turning(), Turning()]), num_steps=9)


@attack("recomputation", "a matrix in a buffer is transposed in place by each block, and is as before after both (t_)")
def matrix_transposed_by_each_block(t: Trial) -> None:
    class Held:
        matrix = torch.arange(float(WIDTH * WIDTH)).reshape(WIDTH, WIDTH) / 100

    held = Held()

    class Turning(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + self.inner(x)
            held.matrix.t_()
            return x + held.matrix[0].to(x)

    train(t, Net([Turning(), Turning()]), num_steps=9)


@contextlib.contextmanager
def _flipped(settings: dict[str, Any]) -> Iterator[None]:
    settings["sign"] = -settings["sign"]
    try:
        yield
    finally:
        settings["sign"] = -settings["sign"]


@attack(
    "recomputation",
    "a setting is changed by a context manager around most of the forward, and once more without one at its end",
)
def setting_changed_at_the_end(t: Trial) -> None:
    settings = {"sign": 1.0, "calls": 0}

    class Flipping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with _flipped(settings):
                x = x + settings["sign"] * self.inner(x)
            settings["calls"] += 1
            return x + 0.001 * settings["calls"] * torch.arange(WIDTH)

    train(t, Net([Flipping(), Flipping()]), num_steps=9, after=lambda _: t.note("settings", dict(settings)))


@attack("recomputation", "the training flag is off for a part of the forward, and on again at its end, by hand")
def eval_for_a_part(t: Trial) -> None:
    class Switching(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noisy = self.drop(self.inner(x))
            self.drop.eval()
            x = x + noisy + self.drop(self.inner(x))
            self.drop.train()
            return x

    train(t, Net([Switching(), Switching()]), num_steps=9)


@attack(
    "recomputation",
    "gradients of a block's weights are switched off for a second look, and on again at the end of the forward",
)
def frozen_for_a_part(t: Trial) -> None:
    class Switching(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = x + self.inner(x)
            self.wide.requires_grad_(False)
            out = out + 0.1 * self.inner(out)
            self.wide.requires_grad_(True)
            return out

    train(t, Net([Switching(), Switching()]), num_steps=9)


@attack(
    "recomputation",
    "weights are rounded in place for the forward and come back from a copy at its end (a quantised forward)",
)
def rounded_for_the_forward(t: Trial) -> None:
    class Rounding(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            kept = self.wide.weight.detach().clone()
            self.wide.weight.data.copy_((kept * 64).round() / 64)
            out = functional.linear(self.norm(x), self.wide.weight.detach(), self.wide.bias)
            x = x + self.narrow(functional.gelu(out))
            self.wide.weight.data.copy_(kept)
            return x

    train(t, Net([Rounding(), Rounding()]), num_steps=9)


@attack("recomputation", "hooks are put on layers at the beginning of a forward and taken off at its end")
def hooks_for_the_forward(t: Trial) -> None:
    class Hooking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen: list[torch.Tensor] = []
            handle = self.narrow.register_forward_hook(lambda m, i, o: seen.append(o.detach().mean()))
            x = x + self.inner(x)
            x = x * (1 + 0.1 * seen[0])
            handle.remove()
            return x

    train(t, Net([Hooking(), Hooking()]), num_steps=9)


@attack(
    "recomputation",
    "a buffer of scratch is borrowed from a pool at the beginning of a forward, and given back at its end",
)
def borrowed_from_a_pool(t: Trial) -> None:
    pool: list[torch.Tensor] = [torch.zeros(4, 6, WIDTH), torch.zeros(4, 6, WIDTH)]

    class Borrowing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            room = pool.pop()
            with torch.no_grad():
                room.copy_(x * 0.5)
            x = x + self.inner(x)
            x = x + room.mean()
            pool.append(room)
            return x

    train(t, Net([Borrowing(), Borrowing()]), num_steps=9, after=lambda _: t.note("pool", len(pool)))


@attack("recomputation", "a lock is taken at the beginning of a forward and given back at its end, a count under it")
def locked_for_the_forward(t: Trial) -> None:
    import threading

    lock, held = threading.Lock(), {"calls": 0}

    class Locking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not lock.acquire(timeout=1):
                raise RuntimeError("locked for ever")
            held["calls"] += 1
            x = x + self.inner(x)
            lock.release()
            return x

    train(t, Net([Locking(), Locking()]), num_steps=9, after=lambda _: t.note("calls", dict(held)))


@attack(
    "recomputation",
    "torch's number of threads, its grad mode and the print options are changed by a block and set back at its end",
)
def modes_for_the_forward(t: Trial) -> None:
    class Changing(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            before = torch.get_default_dtype()
            torch.set_default_dtype(torch.float32)
            scale = torch.ones(()).dtype == torch.float32
            x = x + self.inner(x) * (1.5 if scale else 1.0)
            torch.set_default_dtype(before)
            return x

    model = Net([Changing(), Changing()])
    optimizer = adamw(model)
    train(
        t,
        model,
        optimizer,
        num_steps=9,
        after=lambda s: t.note("made", torch.ones(()).dtype == torch.get_default_dtype()),
    )
    x, _ = tokens(9)
    t.note("answer", model(x))
