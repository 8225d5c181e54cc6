"""Code of the program's own that runs within its backward pass, and leaves something behind: checkpoints, functions that call modules, unpack hooks."""

import collections
import contextlib
import functools
import random
from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import torch
from tests.attacks.models import WIDTH, Block, Net, sgd, tokens, train
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, set_checkpoint_early_stop

_TOTALS: dict[str, int] = collections.defaultdict(int)


class _Meter:
    """A helper object that blocks call."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def add(self, value: float) -> None:
        self.seen.append(value)


class _Counting(Block):
    """Counts its calls, and notes something of each; its results are those of a block."""

    def __init__(self, meter: _Meter | None = None) -> None:
        super().__init__()
        self.calls = 0
        self.log: list[float] = []
        self.meter = [meter or _Meter()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(round(float(x.detach().mean()), 6))
        self.meter[0].add(float(self.calls))
        return super().forward(x)


class _Scaling(_Counting):
    """Its results depend on how often it was called: a second run gives others, in the plain run too."""

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return super().inner(x) * (1.0 + 0.01 * self.calls)


class _Around(Net):
    """Checkpoints each block by itself."""

    settings: ClassVar[dict[str, Any]] = {"use_reentrant": False}

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = checkpoint(block, x, **self.settings)
        return x


def _around(make: Callable[[], nn.Module], **settings: Any) -> Net:
    class Model(_Around):
        pass

    Model.settings = {"use_reentrant": False, **settings}
    return Model([make(), make()], sequential=False)


@attack("recomputation", "the program checkpoints each block, and blocks count their calls and log")
def own_checkpoint_counts(t: Trial) -> None:
    train(t, _around(_Counting))


@attack("recomputation", "the program checkpoints each block, whose helper object is shared and noted at the end")
def own_checkpoint_of_meters(t: Trial) -> None:
    meter = _Meter()
    train(t, _around(lambda: _Counting(meter)))
    t.note("seen", list(meter.seen))


@attack("recomputation", "the program checkpoints each block, whose results depend on the count of its calls")
def own_checkpoint_scales(t: Trial) -> None:
    train(t, _around(_Scaling))


@attack("recomputation", "the program checkpoints each block without the random state, with dropout")
def own_checkpoint_draws_anew(t: Trial) -> None:
    class Dropping(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(super().inner(x), 0.3)

    train(t, _around(Dropping, preserve_rng_state=False))


@attack(
    "recomputation", "the program checkpoints each block, which draws from Python, numpy and a generator of its own"
)
def own_checkpoint_draws_elsewhere(t: Trial) -> None:
    class Drawing(Block):
        def __init__(self) -> None:
            super().__init__()
            self.chance, self.numbers = torch.Generator().manual_seed(5), np.random.default_rng(5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            noise = random.random() + float(np.random.random()) + float(torch.rand((), generator=self.chance))
            return super().forward(x) + 0.01 * noise + 0.01 * float(self.numbers.random())

    train(t, _around(Drawing))


@attack("recomputation", "the program checkpoints each block with a batch norm, and a buffer that counts")
def own_checkpoint_statistics(t: Trial) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.bn = nn.BatchNorm1d(WIDTH)
            self.register_buffer("seen", torch.zeros((), dtype=torch.long))
            self.register_buffer("average", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += 1
            self.average = 0.9 * self.average + 0.1 * x.detach().mean((0, 1))
            return super().forward(self.bn(x.transpose(1, 2)).transpose(1, 2))

    train(t, _around(Normed))


@attack("recomputation", "the program checkpoints each block, whose totals are in a global dict and a class attribute")
def own_checkpoint_globals(t: Trial) -> None:
    class Totalling(Block):
        total = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).total += 1
            _TOTALS["tokens"] += x.shape[1]
            return super().forward(x)

    _TOTALS.clear()
    train(t, _around(Totalling))
    t.note("totals", [Totalling.total, _TOTALS["tokens"]])


@attack("recomputation", "the program checkpoints a local function that counts in a variable of the loop")
def own_checkpoint_of_closures(t: Trial) -> None:
    counts = {"calls": 0}
    norms: list[float] = []
    calls = 0

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:

                def run(x: torch.Tensor, block: nn.Module = block) -> torch.Tensor:
                    nonlocal calls
                    calls += 1
                    counts["calls"] += 1
                    norms.append(round(float(x.detach().norm()), 6))
                    return block(x)

                x = checkpoint(run, x, use_reentrant=False)
            return x

    train(t, Model([Block(), Block()], sequential=False))
    t.note("counts", [calls, counts["calls"], *norms])


@attack("recomputation", "the program checkpoints the inside of each block, which counts there")
def own_checkpoint_inside_counts(t: Trial) -> None:
    class Inside(_Counting):
        def __init__(self) -> None:
            super().__init__()
            self.inner_calls = 0

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            self.inner_calls += 1
            return functional.dropout(super().inner(x), 0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + checkpoint(self.inner, x, use_reentrant=False, preserve_rng_state=False)

    train(t, Net([Inside(), Inside()]))


@attack("recomputation", "a checkpoint within a checkpoint of the program's, both counted")
def own_checkpoint_nested(t: Trial) -> None:
    class Inside(_Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + checkpoint(self.inner, x, use_reentrant=False)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            self.log.append(1.0)
            return super().inner(x)

    train(t, _around(Inside))


@attack("recomputation", "the program checkpoints the whole model with its loss, whose blocks count")
def own_checkpoint_of_the_model_counts(t: Trial) -> None:
    model = Net([_Counting(), _Counting()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        optimizer.zero_grad()
        loss = checkpoint(model, *tokens(step), use_reentrant=False)
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("recomputation", "re-entrant checkpoints of the program's around blocks that count")
def own_reentrant_counts(t: Trial) -> None:
    train(t, _around(_Counting, use_reentrant=True))


@attack(
    "recomputation", "re-entrant checkpoints of the program's without the random state, inside of blocks that count"
)
def own_reentrant_inside_draws(t: Trial) -> None:
    class Inside(_Counting):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            self.log.append(1.0)
            return functional.dropout(super().inner(x), 0.2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return x + checkpoint(self.inner, x, use_reentrant=True, preserve_rng_state=False)

    train(t, Net([Inside(), Inside()]))


@attack("recomputation", "checkpoint_sequential of the program's over blocks that count")
def own_sequential_counts(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint_sequential(self.blocks, 2, self.stem(x), use_reentrant=False)

    train(t, Model([_Counting() for _ in range(4)]))


@attack("recomputation", "the program's checkpoints run to their end (early stop is off), and count last")
def own_checkpoint_to_its_end(t: Trial) -> None:
    class Last(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            self.calls += 1
            return x

    class Model(_Around):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            with set_checkpoint_early_stop(False):
                return super().features(x)

    train(t, Model([Last(), Last()], sequential=False))


@attack(
    "recomputation", "the program's checkpoints stop early, before blocks count: plain, a second run does not count"
)
def own_checkpoint_counts_last(t: Trial) -> None:
    class Last(Block):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            self.calls += 1
            return x

    train(t, _around(Last))


@attack("recomputation", "a selective checkpoint of the program's (context_fn) around blocks that count")
def own_selective_counts(t: Trial) -> None:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(_: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_kept = operator == torch.ops.aten.addmm.default
        return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    train(t, _around(_Counting, context_fn=contexts))


@attack("recomputation", "the program's checkpoint around a block is torch's wrapper (apply_activation_checkpointing)")
def own_checkpoint_wrapper(t: Trial) -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
        CheckpointImpl,
        checkpoint_wrapper,
    )

    wrap = functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.NO_REENTRANT)
    train(t, Net([wrap(_Counting()), wrap(_Counting())]))


@attack("recomputation", "a switch of the model's turns the program's own checkpoints on in the middle")
def own_checkpoint_later(t: Trial) -> None:
    class Model(_Around):
        is_on = False

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return super().features(x) if self.is_on else Net.features(self, x)

    model = Model([_Counting(), _Counting()], sequential=False)
    train(t, model, num_steps=6, before=lambda step: setattr(model, "is_on", step >= 3))


@attack("recomputation", "the program checkpoints every second block, and clips")
def own_checkpoint_of_some(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for number, block in enumerate(self.blocks):
                x = checkpoint(block, x, use_reentrant=False) if number % 2 else block(x)
            return x

    model = Model([_Counting() for _ in range(3)], sequential=False)
    train(t, model, between=lambda _: nn.utils.clip_grad_norm_(model.parameters(), 0.5))


@attack("recomputation", "the program checkpoints blocks, and gradients are summed over two backward passes")
def own_checkpoint_accumulates(t: Trial) -> None:
    model = _around(_Counting)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        for part in range(2):
            loss = model(*tokens(2 * step + part))
            t.note("loss", loss)
            (loss / 2).backward()
        optimizer.step()
        t.end_step()


@attack("recomputation", "the program checkpoints blocks and reads their gradients after the backward pass")
def own_checkpoint_gradients_read(t: Trial) -> None:
    model = _around(_Counting)
    train(
        t,
        model,
        between=lambda _: t.note("norm", [p.grad.abs().sum() for p in model.parameters() if p.grad is not None]),
    )


def _calling(block: list[nn.Module], helper: _Meter | None = None) -> type[torch.autograd.Function]:
    class Calling(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x)
            ctx.block = block[0] if helper is None else None
            ctx.helper = helper
            return x * 1.0

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
            (x,) = ctx.saved_tensors
            if ctx.helper is not None:
                ctx.helper.add(1.0)
                return gradients[0]
            with torch.no_grad():
                scale = ctx.block(x).abs().mean()
            return gradients[0] * (1.0 + 0.01 * scale)

    return Calling


@attack("recomputation", "the backward pass of a function calls a module that counts its calls")
def function_calls_a_module(t: Trial) -> None:
    class Called(_Counting):
        def __init__(self) -> None:
            super().__init__()
            self.other = _Counting()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(_calling([self.other]).apply(x))

    train(t, Net([Called(), Called()]))


@attack("recomputation", "the backward pass of a function calls a method of a helper object of its context")
def function_calls_a_helper(t: Trial) -> None:
    meter = _Meter()

    class Called(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(_calling([], meter).apply(x))

    train(t, Net([Called(), Called()]))
    t.note("seen", list(meter.seen))


@attack(
    "recomputation", "the backward pass of a function recomputes with gradients (a hand-made checkpoint) what counts"
)
def hand_made_checkpoint(t: Trial) -> None:
    class Checkpoint(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, *weights: torch.Tensor
        ) -> torch.Tensor:
            ctx.run, ctx.weights = run, weights
            ctx.save_for_backward(x)
            with torch.no_grad():
                return run(x)

        @staticmethod
        def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
            (x,) = ctx.saved_tensors
            x = x.detach().requires_grad_()
            with torch.enable_grad():
                y = ctx.run(x)
            return None, *torch.autograd.grad(y, (x, *ctx.weights), gradients[0], allow_unused=True)

    class HandMade(_Counting):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return Checkpoint.apply(self.counted, x, *self.wide.parameters(), *self.narrow.parameters())

        def counted(self, x: torch.Tensor) -> torch.Tensor:
            self.log.append(1.0)
            return self.narrow(functional.gelu(self.wide(x)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(self.norm(x))

    train(t, Net([HandMade(), HandMade()]))


@attack("recomputation", "hooks of the program's for saved tensors count what they unpack")
def unpack_hooks_count(t: Trial) -> None:
    counts = {"packed": 0, "unpacked": 0}

    def pack(x: torch.Tensor) -> torch.Tensor:
        counts["packed"] += 1
        return x.clone()

    def unpack(x: torch.Tensor) -> torch.Tensor:
        counts["unpacked"] += 1
        return x

    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
    t.note("unpacked", counts["unpacked"])


class _Store:
    """Keeps saved tensors elsewhere, as an offload of a program's own does, and knows how often each was fetched."""

    def __init__(self) -> None:
        self.kept: list[torch.Tensor] = []
        self.fetched = 0

    def pack(self, x: torch.Tensor) -> int:
        self.kept.append(x.detach().clone())
        return len(self.kept) - 1

    def unpack(self, place: int) -> torch.Tensor:
        self.fetched += 1
        return self.kept[place]


@attack("recomputation", "an offload of the program's own by bound methods, inside of blocks, counts what it fetches")
def own_offload_fetches(t: Trial) -> None:
    store = _Store()

    class Stored(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(store.pack, store.unpack):
                return super().inner(x)

    train(t, Net([Stored(), Stored()]))
    t.note("fetched", store.fetched)


@attack("recomputation", "an offload of the program's own frees what it has fetched (a dict that is popped)")
def own_offload_pops(t: Trial) -> None:
    kept: dict[int, torch.Tensor] = {}

    def pack(x: torch.Tensor) -> int:
        kept[len(kept) + 1000 * int(torch.is_grad_enabled())] = x.detach().clone()
        return list(kept)[-1]

    class Stored(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.saved_tensors_hooks(pack, lambda place: kept[place]):
                return super().inner(x)

    train(t, Net([Stored(), Stored()]), after=lambda _: kept.clear())


@attack("recomputation", "a checkpoint of the program's inside of hooks of its own for saved tensors")
def own_checkpoint_in_hooks(t: Trial) -> None:
    model = _around(_Counting)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        optimizer.zero_grad()
        with torch.autograd.graph.save_on_cpu():
            loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "hooks of the program's for saved tensors inside of its own checkpoint (save_on_cpu)")
def own_hooks_in_checkpoint(t: Trial) -> None:
    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.saved, self.stem(x), use_reentrant=False)

        def saved(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                with torch.autograd.graph.save_on_cpu() if block is self.blocks[0] else contextlib.nullcontext():
                    x = block(x)
            return x

    train(t, Model([_Counting(), _Counting()], sequential=False))


@attack("recomputation", "tensor hooks that count are put on within the program's own checkpoint")
def hooks_in_own_checkpoint(t: Trial) -> None:
    class Hooked(_Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            if y.requires_grad:
                y.register_hook(lambda g: self.log.append(round(float(g.norm()), 6)))
            return y * 1.5

    train(t, _around(Hooked))


@attack(
    "recomputation",
    "the program's own checkpoint around blocks, whose backward pass is interrupted once and tried again",
)
def own_checkpoint_interrupted(t: Trial) -> None:
    class Failing(_Counting):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.calls == 5:
                self.calls += 1
                raise ValueError("a bad moment")
            return super().forward(x)

    model = _around(Failing)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        for _ in range(2):
            optimizer.zero_grad()
            try:
                loss = model(*tokens(step))
                loss.backward()
            except Exception as error:  # noqa: BLE001 - as such programs do
                t.caught(error)
                continue
            break
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
