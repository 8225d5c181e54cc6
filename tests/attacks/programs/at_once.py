"""Programs that do several things at once or keep their randomness in odd places: tasks, pools, generators given along, quasi-random numbers."""

import asyncio
import concurrent.futures
import contextlib
import logging
import signal
from typing import Any

import numpy as np
import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "gradients",
    "two models are trained by two asyncio tasks that hand over between forward, backward pass and step, both clipped",
)
def tasks_take_turns(t: Trial) -> None:
    pairs = []
    for _ in range(2):
        model = Net()
        optimizer = sgd(model)
        t.apply(model, optimizer)
        pairs.append((model, optimizer))

    async def trained(number: int) -> None:
        model, optimizer = pairs[number]
        for step in range(3):
            loss = model(*tokens(step + 10 * number))
            await asyncio.sleep(0)
            optimizer.zero_grad()
            loss.backward()
            await asyncio.sleep(0)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
            await asyncio.sleep(0)
            optimizer.step()
            t.note(f"loss {number}", loss)
            t.end_step()

    async def both() -> None:
        await asyncio.gather(trained(0), trained(1))

    asyncio.run(both())


@attack("gradients", "two models are trained by two threads at once, each with an optimizer of its own")
def threads_train_beside_each_other(t: Trial) -> None:
    pairs = []
    for _ in range(2):
        model = Net()
        optimizer = sgd(model)
        t.apply(model, optimizer)
        pairs.append((model, optimizer))

    def trained(number: int) -> list[torch.Tensor]:
        model, optimizer = pairs[number]
        losses = []
        for step in range(3):
            loss = model(*tokens(step + 10 * number))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        t.note("losses", list(pool.map(trained, range(2))))
    t.end_step()


@attack(
    "gradients",
    "the training step is a generator that the loop advances: forward, backward pass and step lie in other calls",
)
def advanced_by_generator(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def steps() -> Any:
        for step in range(4):
            with torch.enable_grad():
                loss = model(*tokens(step))
            yield loss
            optimizer.zero_grad()
            loss.backward()
            yield loss
            optimizer.step()
            yield loss

    running = steps()
    with torch.no_grad():
        for number, loss in enumerate(running):
            if number % 3 == 1:
                t.note("evaluation", model(*tokens(20)))
            if number % 3 == 2:
                t.note("loss", loss)
                t.end_step()


@attack("recomputation", "blocks run in the thread of a pool, beside each other, with dropout in one of them")
def pool_of_threads(t: Trial) -> None:
    class Dropping(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return functional.dropout(super().inner(x), 0.3)

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            with concurrent.futures.ThreadPoolExecutor(1) as pool:
                return sum(pool.map(lambda block: block(x), self.blocks))

    train(t, Model([Dropping(), Block(), Block()], sequential=False))


@attack("recomputation", "a torch.Generator is handed to each block with its input")
def generator_given(t: Trial) -> None:
    class Noisy(Block):
        def forward(self, x: torch.Tensor, chance: torch.Generator) -> torch.Tensor:
            return x + self.inner(x) * torch.rand(x.shape, generator=chance)

    class Model(Net):
        chance = torch.Generator(torch.get_default_device())

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, chance=self.chance)
            return x

    model = Model([Noisy(), Noisy()], sequential=False)
    model.chance = torch.Generator(torch.get_default_device()).manual_seed(5)
    train(t, model, after=lambda _: t.note("state", model.chance))


@attack("recomputation", "a numpy generator is handed to each block in a dict of settings")
def numpy_generator_given(t: Trial) -> None:
    class Noisy(Block):
        def forward(self, x: torch.Tensor, settings: dict[str, Any]) -> torch.Tensor:
            return x + self.inner(x) * float(settings["chance"].random())

    class Model(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, {"chance": chance})
            return x

    chance = np.random.default_rng(3)
    train(t, Model([Noisy(), Noisy()], sequential=False), after=lambda _: t.note("next", float(chance.random())))


@attack("recomputation", "quasi-random numbers (SobolEngine) that the block holds scale its output")
def quasi_random(t: Trial) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.engine = torch.quasirandom.SobolEngine(WIDTH, scramble=True, seed=1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.inner(x) * self.engine.draw(1).to(x)

    train(t, Net([Noisy(), Noisy()]))


@attack(
    "recomputation", "random numbers by a recurrence of the block's own in a numpy integer (a hand-written generator)"
)
def own_recurrence(t: Trial) -> None:
    class Noisy(Block):
        def __init__(self) -> None:
            super().__init__()
            self.state = np.uint64(12345)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.state = (self.state * np.uint64(48271)) % np.uint64(2147483647)
            return x + self.inner(x) * float(self.state % np.uint64(7))

    model = Net([Noisy(), Noisy()])
    train(t, model, after=lambda _: t.note("state", int(model.blocks[0].state)))


@attack(
    "recomputation",
    "the block writes to a log of Python's logging, which a handler of the program's collects (lines come again)",
)
def logs_by_logging(t: Trial) -> None:
    log, lines = logging.getLogger("attack"), []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    handler = Handler()

    class Logging(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            log.warning("tokens %d", x.shape[1])
            return super().forward(x)

    log.addHandler(handler)
    log.propagate = False
    try:
        train(t, Net([Logging(), Logging()]), after=lambda _: t.note("lines", sorted(set(lines))))
    finally:
        log.removeHandler(handler)


@attack("recomputation", "observers registered on the model are called by every block with what it computed")
def observers_called(t: Trial) -> None:
    class Told(Block):
        def __init__(self, told: list[Any]) -> None:
            super().__init__()
            self.told = told

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            for function in self.told:
                function(x)
            return x

    seen: list[float] = []
    told = [lambda x: seen.append(x.detach().abs().mean().item())]
    train(t, Net([Told(told), Told(told)]), after=lambda _: t.note("seen", list(seen)))


@attack(
    "exceptions",
    "a signal arrives inside of a block, whose handler saves model, optimizer and random state (preemption)",
)
def preempted(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    saved: list[Any] = []

    class Interrupted(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if len(saved) < 1 and now[0] == 2:
                signal.raise_signal(signal.SIGUSR1)
            return super().forward(x)

    def save(*_: Any) -> None:
        state = {k: v.clone() for k, v in model.state_dict().items()}
        saved.append([state, optimizer.state_dict()["param_groups"], torch.get_rng_state()])

    now = [0]
    model.blocks[1] = Interrupted()
    optimizer = sgd(model)
    before = signal.signal(signal.SIGUSR1, save)
    try:
        train(t, model, optimizer, before=lambda step: now.__setitem__(0, step))
    finally:
        signal.signal(signal.SIGUSR1, before)
    t.note("saved", saved)


@attack("exceptions", "a timeout given by a context manager raises in the forward, and the batch is tried once more")
def timed_out(t: Trial) -> None:
    class Slow(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            type(self).calls += 1
            if type(self).calls == 4:
                raise TimeoutError("the loader was late")
            return super().forward(x)

    Slow.calls = 0
    model = Net([Block(), Slow()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        for _ in range(2):
            with contextlib.suppress(TimeoutError):
                optimizer.zero_grad()
                loss = model(*tokens(step))
                loss.backward()
                t.note("loss", loss)
                break
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "each block has a loss, an optimizer and a backward pass of its own, its input detached (local learning)",
)
def local_learning(t: Trial) -> None:
    model = Net(sequential=False)
    readers = nn.ModuleList(nn.Linear(WIDTH, NUM_CLASSES) for _ in model.blocks)
    optimizers = [
        torch.optim.SGD([*b.parameters(), *r.parameters()], lr=0.1, momentum=0.9)
        for b, r in zip(model.blocks, readers, strict=True)
    ]
    t.apply(model, *optimizers)
    t.track(readers)
    for step in range(4):
        x, y = tokens(step)
        h = model.stem(x)
        for block, reader, optimizer in zip(model.blocks, readers, optimizers, strict=True):
            h = block(h.detach())
            loss = functional.cross_entropy(reader(h).flatten(0, 1), y.flatten())
            t.note("loss", loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        t.end_step()


@attack(
    "gradients", "goodness of real and made-up tokens trains each block by itself, normalised between (forward-forward)"
)
def forward_forward(t: Trial) -> None:
    model = Net(sequential=False)
    optimizers = [torch.optim.Adam(block.parameters(), lr=1e-2) for block in model.blocks]
    t.apply(model, *optimizers)
    for step in range(4):
        x, _ = tokens(step)
        real, made = x, x.roll(1, 0).flip(-1)
        for block, optimizer in zip(model.blocks, optimizers, strict=True):
            a, b = block(real), block(made)
            loss = (
                functional.softplus(1 - a.square().mean(-1)).mean()
                + functional.softplus(b.square().mean(-1) - 1).mean()
            )
            t.note("loss", loss)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            real, made = (functional.normalize(h.detach(), dim=-1) for h in (a, b))
        t.end_step()


class _Aligned(torch.autograd.Function):
    @staticmethod
    def forward(x: torch.Tensor, weight: torch.Tensor, fixed: torch.Tensor) -> torch.Tensor:
        return x @ weight.T

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: torch.Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, _, fixed = ctx.saved_tensors
        return grad @ fixed, grad.flatten(0, -2).T @ x.flatten(0, -2), None


@attack("recomputation", "gradients go back through fixed random matrices (feedback alignment), with setup_context")
def feedback_alignment(t: Trial) -> None:
    class Aligned(Block):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("fixed", torch.randn(WIDTH, WIDTH) / 3)
            self.square = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return _Aligned.apply(super().inner(x), self.square, self.fixed)

    train(t, Net([Aligned(), Aligned()]))


@attack("parts", "an operator of torch.library's with a backward of its own, which centres over the first dimension")
def library_operator(t: Trial) -> None:
    name = f"attack::centred_{len(_MADE)}"
    _MADE.append(name)

    @torch.library.custom_op(name, mutates_args=())
    def centred(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    centred.register_fake(torch.empty_like)
    centred.register_autograd(lambda ctx, g: (g - g.mean(0)) * 2)

    class Centred(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return centred(super().inner(x))

    train(t, Net([Centred(), Centred()]))


_MADE: list[str] = []


@attack("recomputation", "a task forked by torch.jit and waited for computes a branch of the block")
def forked_branch(t: Trial) -> None:
    class Forking(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            branch = torch.jit.fork(self.inner, x)
            return x + torch.jit.wait(branch)

    train(t, Net([Forking(), Forking()]))


@attack(
    "gradients",
    "DataLoader-like prefetch: the next batch is made by a thread that draws from torch's random numbers before the backward pass",
    only=EXACT,
)
def prefetched(t: Trial) -> None:
    model = Net()
    for block in model.blocks:
        block.inner = _with_dropout(block.inner)
    optimizer = adamw(model)
    t.apply(model, optimizer)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:

        def made(step: int) -> Any:
            x, y = tokens(step)
            return x + 0.1 * torch.randn_like(x), y

        batch = pool.submit(made, 0).result()
        for step in range(4):
            loss = model(*batch)
            batch = pool.submit(made, step + 1).result()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()


def _with_dropout(function: Any) -> Any:
    return lambda x: functional.dropout(function(x), 0.2)
