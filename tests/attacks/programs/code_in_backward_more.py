"""More code within backward passes: checkpoints made by hand that add to gradients, what their blocks keep in arguments, iterators, files and other models."""

import functools
import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


class _Adding(torch.autograd.Function):
    """A checkpoint made by hand whose backward pass adds to the gradients of what it runs (as those of frameworks with offload do)."""

    @staticmethod
    def forward(ctx: Any, block: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        ctx.block = block
        ctx.save_for_backward(x.detach().cpu())
        with torch.no_grad():
            return block(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.block(x)
        torch.autograd.backward(y, gradients[0])
        return None, x.grad


class _ByHand(Net):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = _Adding.apply(block, x)
        return x


class _Counting(Block):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


@attack("gradients", "checkpoints made by hand add to the gradients of their blocks within the backward pass")
def hand_made_adds_gradients(t: Trial) -> None:
    train(t, _ByHand([Block(), Block()], sequential=False))


@attack("gradients", "checkpoints made by hand add to gradients, of blocks that count and drop, with clipping")
def hand_made_adds_and_counts(t: Trial) -> None:
    class Dropping(_Counting):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(super().inner(x), 0.2)

    model = _ByHand([Dropping(), Dropping()], sequential=False)
    train(t, model, between=lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.5))


def _checkpointed(make: Callable[[], nn.Module], *given: Any) -> Net:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, *given, use_reentrant=False)
            return x

    return Model([make(), make()], sequential=False)


@attack("recomputation", "the program checkpoints blocks that scale by a buffer in which they count")
def own_checkpoint_scales_by_buffer(t: Trial) -> None:
    class Scaling(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().inner(x) * (1.0 + 0.1 * self.calls.clone())

    train(t, _checkpointed(Scaling))


@attack("recomputation", "the program checkpoints blocks that scale by a plain tensor, an average that moves in place")
def own_checkpoint_scales_by_average(t: Trial) -> None:
    class Scaling(Block):
        def __init__(self) -> None:
            super().__init__()
            self.average = torch.ones(WIDTH)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            self.average.lerp_(x.detach().abs().mean((0, 1)), 0.1)
            return super().inner(x / self.average.clone())

    train(t, _checkpointed(Scaling))


@attack("recomputation", "the program checkpoints blocks that draw their scale from an iterator")
def own_checkpoint_draws_from_iterator(t: Trial) -> None:
    class Cycling(Block):
        def __init__(self) -> None:
            super().__init__()
            self.scales: Iterator[float] = itertools.cycle([1.0, 0.9, 1.1])

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return super().inner(next(self.scales) * x)

    train(t, _checkpointed(Cycling))


@attack("recomputation", "the program checkpoints blocks with a list among their arguments, to which they append")
def own_checkpoint_appends_to_argument(t: Trial) -> None:
    seen: list[float] = []

    class Appending(Block):
        def forward(self, x: torch.Tensor, seen: list[float] | None = None) -> torch.Tensor:
            if seen is not None:
                seen.append(round(float(x.detach().mean()), 6))
            return super().forward(x)

    train(t, _checkpointed(Appending, seen))
    t.note("seen", list(seen))


@attack("recomputation", "the program checkpoints blocks that write lines to a file")
def own_checkpoint_writes_to_file(t: Trial) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"

        class Writing(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with open(path, "a") as file:
                    file.write("called\n")
                return super().forward(x)

        train(t, _checkpointed(Writing))
        t.note("lines", len(path.read_text().splitlines()))


def _keep_line(path: Path) -> None:
    number = os.open(path, os.O_APPEND | os.O_CREAT | os.O_WRONLY)
    try:
        os.write(number, b"called\n")
    finally:
        os.close(number)


# Code that is not found by reading the block's.
_WRITERS: dict[str, Any] = {"line": [_keep_line]}


@attack("recomputation", "the program checkpoints blocks that call a writer of lines, found by name in a table")
def own_checkpoint_calls_a_writer(t: Trial) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log"

        class Writing(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                for each in _WRITERS["line"]:
                    each(path)
                return super().forward(x)

        train(t, _checkpointed(Writing))
        t.note("lines", len(path.read_text().splitlines()))


@attack("recomputation", "the model checkpoints partial calls of its layers, with settings by name (Hugging Face)")
def own_checkpoint_of_partials(t: Trial) -> None:
    class Layer(_Counting):
        def forward(
            self, x: torch.Tensor, mask: torch.Tensor | None = None, cache: dict[str, int] | None = None
        ) -> torch.Tensor:
            if cache is not None:
                cache["tokens"] = cache.get("tokens", 0) + x.shape[1]
            x = super().forward(x)
            return x if mask is None else x * mask

    cache: dict[str, int] = {}

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x, mask = self.stem(x), torch.ones(x.shape[1], 1)
            for layer in self.blocks:
                x = checkpoint(functools.partial(layer.__call__, mask=mask, cache=cache), x, use_reentrant=False)
            return x

    train(t, Model([Layer(), Layer()], sequential=False))
    t.note("cache", dict(cache))


@attack("recomputation", "the program checkpoints a frozen second model in its loss, which counts (a perceptual loss)")
def own_checkpoint_of_other_model(t: Trial) -> None:
    other = nn.Sequential(_Counting(), nn.BatchNorm1d(6))
    for parameter in other.parameters():
        parameter.requires_grad_(False)
    t.track(other)
    model = Net([Block(), Block()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        x, y = tokens(step)
        logits = model(x)
        seen = functional.pad(logits, (0, 1))
        loss = model.loss(logits, y) + 0.1 * checkpoint(other, seen, use_reentrant=False).square().mean()
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "recomputation",
    "the program checkpoints blocks that count, of two models with an optimizer each, a step after the other",
)
def own_checkpoint_of_two_models(t: Trial) -> None:
    models = [_checkpointed(_Counting), _checkpointed(_Counting)]
    optimizers = [sgd(model) for model in models]
    t.track(models[1])
    for model, optimizer in zip(models, optimizers, strict=True):
        t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = model(x, y)
            t.note("loss", loss)
            loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        t.end_step()


@attack(
    "recomputation", "the program runs the graph of its own checkpoints backwards twice (retain_graph), and they count"
)
def own_checkpoint_twice(t: Trial) -> None:
    model = _checkpointed(_Counting)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        loss.backward(retain_graph=True)
        (0.5 * loss).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "the program changes between backward pass and step what its checkpointed blocks have written")
def own_checkpoint_reset_before_step(t: Trial) -> None:
    class Scaling(_Counting):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return super().inner(x) * (1.0 + 0.05 * self.calls)

    model = _checkpointed(Scaling)

    def reset(step: int) -> None:
        for block in model.blocks:
            t.note("calls", block.calls)
            block.calls = step % 2

    train(t, model, between=reset)


@attack("recomputation", "the program checkpoints blocks in training, and evaluates between backward pass and step")
def own_checkpoint_evaluated_before_step(t: Trial) -> None:
    class Normed(_Counting):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.bn(x.transpose(1, 2)).transpose(1, 2))

    model = _checkpointed(Normed)

    def evaluate(step: int) -> None:
        model.eval()
        with torch.no_grad():
            t.note("evaluation", model(*tokens(50 + step)))
        if step % 2:
            model.train()

    train(t, model, between=evaluate, before=lambda _: model.train())


class _Tally(nn.Module):
    """Counts its calls, and gives back what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x


_SHARED = _Tally()


class _Register:
    """Counts on its class."""

    count = 0

    @classmethod
    def note(cls) -> None:
        cls.count += 1


def _function(
    called: Callable[[torch.Tensor], Any], held: Callable[[], Any] = lambda: None
) -> type[torch.autograd.Function]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.held = held()
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            with torch.no_grad():
                called(x if ctx.held is None else ctx.held)
            return gradients[0]

    return Function


class _Calling(Block):
    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = [function]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.function[0].apply(x))


@attack("recomputation", "the backward pass of a function calls a module of the script's globals, which counts")
def function_calls_a_global_module(t: Trial) -> None:
    _SHARED.calls = 0
    function = _function(lambda x: _SHARED(x) if x.numel() else None)
    train(t, Net([_Calling(function), _Calling(function)]))
    t.note("calls", _SHARED.calls)


@attack("recomputation", "the backward pass of a function calls a class method that counts on its class")
def function_calls_a_class(t: Trial) -> None:
    _Register.count = 0
    function = _function(lambda _: _Register.note())
    train(t, Net([_Calling(function), _Calling(function)]))
    t.note("count", _Register.count)


@attack("recomputation", "the backward pass of a function calls what lies in a tuple of its context")
def function_calls_what_it_holds(t: Trial) -> None:
    counts = [0]

    def count() -> None:
        counts[0] += 1

    function = _function(lambda held: held[0](), lambda: (count, 1))
    train(t, Net([_Calling(function), _Calling(function)]))
    t.note("count", counts[0])


@attack("recomputation", "the backward pass of a function has a callback called at the end of the pass, which counts")
def function_queues_a_callback(t: Trial) -> None:
    counts = [0]

    def count() -> None:
        counts[0] += 1

    function = _function(lambda _: torch.autograd.Variable._execution_engine.queue_callback(count))
    train(t, Net([_Calling(function), _Calling(function)]))
    t.note("count", counts[0])


@attack(
    "recomputation", "the backward pass of a function draws a step from a schedule held by name in its module (getattr)"
)
def function_calls_by_name(t: Trial) -> None:
    name = "forward"
    function = _function(lambda x: [getattr(_SHARED, name)(x)])
    _SHARED.calls = 0
    train(t, Net([_Calling(function), _Calling(function)]))
    t.note("calls", _SHARED.calls)


@attack("recomputation", "the backward pass of a function applies another function, which counts in its forward")
def function_applies_another(t: Trial) -> None:
    counts = [0]

    class Inner(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            counts[0] += 1
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            return gradients[0]

    function = _function(Inner.apply)
    train(t, Net([_Calling(function), _Calling(function)]))
    t.note("count", counts[0])
