"""What a first call leaves: starts that depend on the first batch and then are gone, by deleted names, new classes, emptied iterators."""

import threading
from collections.abc import Iterator
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, sgd, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


class _Shifted(Block):
    """A block whose output is shifted by what its first call saw."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("shift", torch.zeros(WIDTH))

    def begin(self, x: torch.Tensor) -> None:
        """Takes the shift from a batch."""
        with torch.no_grad():
            self.shift.copy_(-x.mean((0, 1)))


@attack("parts", "a shift is taken from the first batch where the block has a name, which is then deleted")
def started_by_a_deleted_name(t: Trial) -> None:
    class Named(_Shifted):
        def __init__(self) -> None:
            super().__init__()
            self.is_new = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            if hasattr(self, "is_new"):
                self.begin(out)
                del self.is_new
            return x + out + self.shift

    train(t, Net([Named(), Named()]))


class _After(_Shifted):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x) + self.shift


class _Before(_After):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Becomes another class when it has seen a batch, as lazy modules do."""
        self.begin(self.inner(x))
        self.__class__ = _After
        return self.forward(x)


@attack("parts", "a block changes its own class in its first call, in which it takes a shift from the batch")
def started_by_another_class(t: Trial) -> None:
    train(t, Net([_Before(), _Before()]))


@attack("parts", "a block puts another forward on itself in its first call, in which it takes a shift from the batch")
def started_by_another_forward(t: Trial) -> None:
    class Switching(_Shifted):
        def __init__(self) -> None:
            super().__init__()
            self.work = self.first

        def first(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            self.begin(out)
            self.work = self.later
            return x + out + self.shift

        def later(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) + self.shift

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.work(x)

    train(t, Net([Switching(), Switching()]))


@attack("parts", "an iterator with one item starts the block from its first batch, and is empty then")
def started_by_an_iterator(t: Trial) -> None:
    class Once(_Shifted):
        def __init__(self) -> None:
            super().__init__()
            self.starts: Iterator[bool] = iter([True])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            if next(self.starts, False):
                self.begin(out)
            return x + out + self.shift

    train(t, Net([Once(), Once()]))


def _is_first(seen: Any = None) -> bool:
    """Once true; an attribute of this function remembers."""
    first = getattr(_is_first, "is_first", True)
    _is_first.is_first = False
    return first


@attack("parts", "an attribute of a function says whether a batch has been seen, whose mean shifts the head's inputs")
def started_by_an_attribute_of_a_function(t: Trial) -> None:
    _is_first.is_first = True

    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("shift", torch.zeros(WIDTH))

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = super().features(x)
            if _is_first():
                self.shift.copy_(-x.detach().mean((0, 1)))
            return x + self.shift

    train(t, Model())


@attack(
    "parts", "an event of a thread's says whether a block has been started from a batch (a guard against two starts)"
)
def started_by_an_event(t: Trial) -> None:
    class Guarded(_Shifted):
        def __init__(self) -> None:
            super().__init__()
            self.ready, self.lock = threading.Event(), threading.Lock()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            if not self.ready.is_set():
                with self.lock:
                    self.begin(out)
                    self.ready.set()
            return x + out + self.shift

    train(t, Net([Guarded(), Guarded()]))


@attack("parts", "a pre-hook on the whole model that removes itself shifts the stem's bias by the first batch")
def started_by_a_hook_of_the_model(t: Trial) -> None:
    model = Net()
    handles: list[Any] = []

    def start(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        handles.pop().remove()
        with torch.no_grad():
            module.stem.bias.sub_(module.stem(given[0]).mean((0, 1)))

    handles.append(model.register_forward_pre_hook(start))
    t.writes_within_step("stem.bias")
    train(t, model)


@attack(
    "parts",
    "an inner layer's pre-hook that removes itself keeps the batch's mean, which the layer's inputs are shifted by",
)
def started_by_a_pre_hook(t: Trial) -> None:
    model = Net()
    handles: dict[nn.Module, Any] = {}
    means: dict[nn.Module, torch.Tensor] = {}

    def start(module: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
        handles.pop(module).remove()
        means[module] = given[0].detach().mean((0, 1))

    def shift(module: nn.Module, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return (given[0] + means[module] * given[0].abs(),)

    for block in model.blocks:
        handles[block.norm] = block.norm.register_forward_pre_hook(start)
        block.norm.register_forward_pre_hook(shift)
    train(t, model)


@attack("parts", "a tensor hook in the first step alone keeps the norm of gradients, by which later steps are scaled")
def scaled_by_the_first_gradient(t: Trial) -> None:
    class Scaled(Block):
        def __init__(self) -> None:
            super().__init__()
            self.first: float | None = None

        def keep(self, gradient: torch.Tensor) -> None:
            self.first = float(gradient.norm())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = self.inner(x)
            if self.first is None:
                out.register_hook(self.keep)
                return x + out
            return x + out * (1 + self.first)

    train(t, Net([Scaled(), Scaled()]))


@attack(
    "gradients",
    "a hook on a parameter that removes itself in its first call sets the rate from the first gradient's norm",
)
def rate_from_the_first_gradient(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    handles: list[Any] = []

    def keep(gradient: torch.Tensor) -> None:
        handles.pop().remove()
        optimizer.param_groups[0]["lr"] = 0.05 / (1e-3 + float(gradient.norm()))

    handles.append(model.head.weight.register_hook(keep))
    train(t, model, optimizer)


@attack(
    "gradients",
    "the same after accumulation, by a hook on the accumulated gradient (register_post_accumulate_grad_hook)",
)
def rate_from_the_first_accumulation(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    handles: list[Any] = []

    def keep(p: torch.Tensor) -> None:
        handles.pop().remove()
        optimizer.param_groups[0]["lr"] = 0.05 / (1e-3 + float(p.grad.norm()))

    handles.append(model.stem.weight.register_post_accumulate_grad_hook(keep))
    train(t, model, optimizer)


@attack(
    "recomputation", "the model counts its steps in a buffer of floating-point numbers that is at a thousand already"
)
def counter_in_floats(t: Trial) -> None:
    class Model(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("steps", torch.tensor(1001.0))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            loss = super().forward(x, y)
            if self.training:
                self.steps += 1
            return loss

    model = Model()
    train(t, model, num_steps=8)
    t.note("steps", int(model.steps))


@attack("gradients", "a slow average of the student is a child of the model, and gives targets")
def slow_average_inside(t: Trial) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.teacher = Net(), Net()
            self.teacher.load_state_dict(self.student.state_dict())
            self.teacher.requires_grad_(False)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                for p, q in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                    q.mul_(0.99).add_(p, alpha=0.01)
                goal = self.teacher(x)
            out = self.student(x)
            near = functional.mse_loss(out, goal)
            return functional.cross_entropy(out.view(-1, NUM_CLASSES), y.view(-1)) + 0.1 * near

    model = Model()
    begin = model.teacher.head.weight.detach().clone()
    train(t, model, sgd(model.student), num_steps=12)
    t.note("moved", 100 * float((model.teacher.head.weight.double() - begin.double()).norm()))


@attack("parts", "a count stays at two (a warm-up), and the block scales by it")
def count_that_stays(t: Trial) -> None:
    class Warmed(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls = min(self.calls + 1, 2)
            return super().forward(x) * (1 + 0.01 * self.calls)

    train(t, Net([Warmed(), Warmed()]), num_steps=3)


@attack("parts", "the first call of all gives more than each one after it, by a flag that it takes away")
def first_call_gives_more(t: Trial) -> None:
    class More(Block):
        is_first = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if self.is_first:
                self.is_first = False
                return y * 1.5
            return y

    train(t, Net([More(), More()]), num_steps=3)


@attack("parts", "a list beside the model grows for six calls, and the block scales by its length")
def list_that_stays(t: Trial) -> None:
    calls: list[int] = []

    class Warmed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(calls) < 6:
                calls.append(0)
            return super().forward(x) * (1.0 if len(calls) < 5 else 0.5)

    train(t, Net([Warmed(), Warmed()]), num_steps=3)
