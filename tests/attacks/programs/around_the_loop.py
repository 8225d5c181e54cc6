"""What frameworks do around a training loop: searches for rates, callbacks that cancel, wrapped optimizers, processes beside, exports with gradients on."""

import bisect
import collections
import copy
import multiprocessing
import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _dropping() -> Net:
    return Net(nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(2))


@attack(
    "changes",
    "a search for the rate: steps with a growing rate, then weights and states are put back, and training begins (LR finder)",
)
def search_for_the_rate(t: Trial) -> None:
    model = _dropping()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    losses = []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 1e-4 * 10**step
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        t.end_step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    optimizer.param_groups[0]["lr"] = 1e-3 * (1 + losses.index(min(losses)))
    for step in range(3):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _CancelStep(Exception):
    pass


@attack(
    "exceptions",
    "callbacks cancel by exceptions: a batch after its forward, a backward pass, a step, and the rest of an epoch (fastai)",
)
def cancelled_by_callbacks(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def callback(name: str, step: int) -> None:
        if (name, step) in (("after_pred", 1), ("after_backward", 2), ("before_step", 4)):
            raise _CancelStep(name)

    for step in range(6):
        try:
            x, y = tokens(step)
            loss = model(x, y)
            callback("after_pred", step)
            loss.backward()
            callback("after_backward", step)
            callback("before_step", step)
            optimizer.step()
            optimizer.zero_grad()
        except _CancelStep as cancelled:
            t.note("cancelled", str(cancelled))
            if str(cancelled) != "after_backward":
                optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "the optimizer's class is a subclass made on the fly, whose step clips before that of its base (Detectron2)",
)
def class_that_clips(t: Trial) -> None:
    def clipping(kind: type) -> type:
        def step(self: Any, closure: Any = None) -> None:
            torch.nn.utils.clip_grad_norm_([p for g in self.param_groups for p in g["params"]], 0.3)
            super(type(self), self).step(closure)

        return type(kind.__name__ + "WithGradientClip", (kind,), {"step": step})

    model = Net()
    train(t, model, clipping(torch.optim.SGD)(model.parameters(), lr=0.1, momentum=0.9))


class _Prepared:
    """An optimizer's wrapper that is none itself: it delegates, skips steps while gradients are summed, and counts."""

    def __init__(self, optimizer: torch.optim.Optimizer, every: int) -> None:
        self.optimizer, self.every, self.calls = optimizer, every, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.optimizer, name)

    def step(self) -> None:
        self.calls += 1
        if self.calls % self.every == 0:
            self.optimizer.step()

    def zero_grad(self) -> None:
        if self.calls % self.every == 0:
            self.optimizer.zero_grad()


@attack(
    "gradients",
    "an optimizer is wrapped by an object that delegates, and steps only at the end of two batches (accelerate)",
)
def prepared_optimizer(t: Trial) -> None:
    model = _dropping()
    inner = adamw(model)
    optimizer = _Prepared(inner, 2)
    t.apply(model, inner)
    for step in range(6):
        loss = model(*tokens(step)) / 2
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "a graph for a log is traced with gradients on and in training mode (add_graph), every second step")
def graph_for_a_log(t: Trial) -> None:
    model = Net()

    def add_graph(step: int) -> None:
        if step % 2:
            traced = torch.jit.trace(model, tokens(9, 1)[0], strict=False, check_trace=False)
            t.note("inputs", len(list(traced.graph.inputs())))

    train(t, model, after=add_graph)


@attack(
    "changes",
    "a block is scripted for the server in the middle, from its own class, and its answers are noted",
    only=EXACT,
)
def block_scripted_in_the_middle(t: Trial) -> None:
    model = Net([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU())])

    def script(step: int) -> None:
        if step == 1:
            served = torch.jit.script(model.blocks[0])
            with torch.no_grad():
                t.note("served", served(tokens(9)[0]))

    train(t, model, num_steps=3, after=script)


def _evaluate(model: nn.Module, queue: Any) -> None:
    torch.set_num_threads(1)
    model.eval()
    with torch.no_grad():
        queue.put(float(model(*tokens(11))))


@attack(
    "changes",
    "a forked process evaluates the model between two steps, while the parent waits, with what it has inherited",
    only=EXACT,
)
def evaluated_in_a_fork(t: Trial) -> None:
    model = _dropping()
    context = multiprocessing.get_context("fork")

    def evaluate(step: int) -> None:
        if step == 1:
            queue = context.SimpleQueue()
            process = context.Process(target=_evaluate, args=(model, queue))
            process.start()
            process.join(20)
            t.note("exit", process.exitcode)
            t.note("evaluated", queue.get())

    train(t, model, num_steps=3, after=evaluate)


@attack(
    "gradients",
    "a functional trainer: parameters are a dict of leaves that the optimizer holds, the model is a template without any of its own",
)
def functional_trainer(t: Trial) -> None:
    model = Net()
    leaves = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    model.requires_grad_(False)
    optimizer = torch.optim.SGD(list(leaves.values()), lr=0.1, momentum=0.9)
    t.apply(model, optimizer)
    for step in range(4):
        loss = torch.func.functional_call(model, leaves, tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.note("leaves", leaves)
        t.end_step()


@attack(
    "second order",
    "the weight of one loss is the ratio of two gradients at the last layer, taken first with the graph kept (VQGAN)",
)
def weight_from_last_layer(t: Trial) -> None:
    model = _dropping()
    critic = nn.Linear(NUM_CLASSES, 1)
    t.track(critic)
    optimizer, of_critic = sgd(model, momentum=0.0), torch.optim.SGD(critic.parameters(), lr=0.05)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        logits = model(x)
        nll, judged = model.loss(logits, y), -critic(functional.softmax(logits, -1)).mean()
        last = model.head.weight
        a = torch.autograd.grad(nll, last, retain_graph=True)[0]
        b = torch.autograd.grad(judged, last, retain_graph=True)[0]
        weight = torch.clamp(a.norm() / (b.norm() + 1e-4), 0.0, 1e4).detach() * 0.8
        loss = nll + (0.0 if step == 0 else weight) * judged
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        of_critic.zero_grad()
        hinge = functional.relu(1 + critic(functional.softmax(logits.detach(), -1))).mean()
        hinge.backward()
        of_critic.step()
        t.note("losses", [loss, hinge, weight])
        t.end_step()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.register_buffer("h", torch.zeros(4, WIDTH), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All hidden states."""
        h, found = self.h, []
        for each in x.unbind(1):
            h = self.cell(each, h)
            found.append(h)
        self.h = h.detach()
        return x + torch.stack(found, 1)


@attack(
    "recomputation",
    "a recurrent net is warmed up on the first tokens without gradients, and goes on from there with them (R2D2's burn-in)",
)
def burn_in(t: Trial) -> None:
    model = Net(_Recurrent() for _ in range(2))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        for block in model.blocks:
            block.h = torch.zeros_like(block.h)
        with torch.no_grad():
            model(x[:, :3])
        loss = model(x[:, 3:], y[:, 3:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _Decoder(nn.Module):
    """Words one after another, each from the true one before it or from the model's own, as Python's random says."""

    returns_loss = True

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(NUM_CLASSES, WIDTH)
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(WIDTH, NUM_CLASSES)
        self.ratio = 1.0

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        h, word, loss = self.stem(x).mean(1), torch.zeros(len(x), dtype=torch.long), x.new_zeros(())
        for i in range(y.shape[1]):
            h = self.cell(self.words(word), h)
            out = h
            for block in self.blocks:
                out = block(out)
            logits = self.head(out)
            loss = loss + functional.cross_entropy(logits, y[:, i])
            word = y[:, i] if random.random() < self.ratio else logits.argmax(-1)
        return loss / y.shape[1]


@attack(
    "recomputation",
    "a decoder is given the true word or its own by Python's random, less often the true one from step to step (teacher forcing)",
)
def teacher_forcing(t: Trial) -> None:
    model = _Decoder()

    def ratio(step: int) -> None:
        model.ratio = 1.0 - 0.25 * step

    train(t, model, before=ratio)


@attack(
    "recomputation",
    "trees of any shape: a block is called by recursion over Python tuples, leaves first, and counts nodes (Tree-LSTM)",
)
def trees_by_recursion(t: Trial) -> None:
    class Joining(Block):
        num_nodes = 0

        def forward(self, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
            self.num_nodes += 1
            return super().forward(left + 0.5 * right.roll(1, -1))

    class Trees(Net):
        def encode(self, tree: Any, x: torch.Tensor, depth: int = 0) -> torch.Tensor:
            if isinstance(tree, int):
                return x[:, tree]
            left, right = (self.encode(each, x, depth + 1) for each in tree)
            return self.blocks[depth % 2](left, right)

        def forward(self, x: torch.Tensor, y: torch.Tensor, tree: Any) -> torch.Tensor:
            logits = self.head(self.encode(tree, self.stem(x)))
            return functional.cross_entropy(logits, y[:, 0])

    trees = [((0, 1), (2, (3, 4))), (0, (1, (2, 3))), (((0, 1), 2), 3), (4, 5)]
    model = Trees(Joining() for _ in range(2))
    train(
        t,
        model,
        batch=lambda s: (*tokens(s), trees[s]),
        after=lambda _: t.note("nodes", [b.num_nodes for b in model.blocks]),
    )


@attack("parts", "the marginal likelihood of a Gaussian process over features of the batch, by Cholesky (deep kernel)")
def deep_kernel(t: Trial) -> None:
    class Kernel(Net):
        def __init__(self) -> None:
            super().__init__()
            self.log_scale, self.log_noise = nn.Parameter(torch.zeros(())), nn.Parameter(torch.tensor(-1.0))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            f = self.head(self.features(x)).mean(1)
            k = torch.exp(-torch.cdist(f, f).square() * self.log_scale.exp()) + self.log_noise.exp() * torch.eye(len(f))
            chol = torch.linalg.cholesky(k)
            target = y[:, :1].to(f.dtype) - 3
            a = torch.cholesky_solve(target, chol)
            return 0.5 * (target * a).sum() + chol.diagonal().log().sum()

    train(t, Kernel())


@attack(
    "recomputation",
    "augmentation inside of the model, whose strength follows the signs of the answers, kept in a buffer (ADA)",
)
def adaptive_augmentation(t: Trial) -> None:
    class Augmented(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("p", torch.tensor(0.3))
            self.signs: collections.deque = collections.deque(maxlen=4)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            flips = (torch.rand(len(x), 1, 1) < self.p).to(x.dtype)
            logits = self.head(self.features(x * (1 - 2 * flips)))
            self.signs.append(float(logits.detach()[..., 0].sign().mean()))
            if len(self.signs) == 4:
                rising = sum(self.signs) / 4 > 0.1
                self.p.copy_((self.p + (0.1 if rising else -0.1)).clamp(0, 1))
            return self.loss(logits, y)

    train(t, Augmented(), num_steps=6)


class _Codebook(nn.Module):
    """Codes by nearest neighbour, initialised by k-means on the first batch, kept as averages, restarted when unused."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(5, WIDTH))
        self.register_buffer("count", torch.ones(5))
        self.register_buffer("is_ready", torch.tensor(False))
        self.commitment = torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Codes with the gradient of the input."""
        flat = x.detach().flatten(0, 1)
        if self.training and not self.is_ready:
            self.codes.copy_(flat[torch.randperm(len(flat))[:5]])
            for _ in range(2):
                near = torch.cdist(flat, self.codes).argmin(1)
                self.codes.copy_(
                    torch.stack([flat[near == i].mean(0) if (near == i).any() else self.codes[i] for i in range(5)])
                )
            self.is_ready.fill_(True)
        near = torch.cdist(flat, self.codes).argmin(1)
        if self.training:
            used = functional.one_hot(near, 5).to(flat.dtype)
            self.count.lerp_(used.sum(0), 0.2)
            self.codes.lerp_((used.T @ flat) / used.sum(0).clamp(min=1)[:, None], 0.2)
            dead = self.count < 0.9
            if dead.any():
                self.codes[dead] = flat[torch.randint(len(flat), (int(dead.sum()),))]
                self.count[dead] = 1.0
        q = self.codes[near].view_as(x)
        self.commitment = (x - q).square().mean()
        return x + (q - x).detach()


@attack(
    "recomputation",
    "codes by k-means on the first batch, averages of what they stand for, dead ones restarted, their losses on the modules",
)
def residual_codes(t: Trial) -> None:
    class Quantised(nn.Sequential):
        pass

    model = Net([Quantised(Block(), _Codebook()), Quantised(Block(), _Codebook())])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step)) + 0.25 * sum(b[1].commitment for b in model.blocks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "prioritised replay: examples by bisection in sums of priorities, which are set from their losses after each step",
)
def prioritised_replay(t: Trial) -> None:
    class Each(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            each = functional.cross_entropy(self.head(self.features(x)).flatten(0, 1), y.flatten(), reduction="none")
            each = each.view_as(y).mean(1)
            return (each * weights).mean(), each.detach()

    model = Each()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    x, y = tokens(0, 12)
    priorities, chance = [1.0] * 12, random.Random(5)
    for _ in range(4):
        sums: list[float] = []
        for p in priorities:
            sums.append((sums[-1] if sums else 0.0) + p)
        chosen = [bisect.bisect_left(sums, chance.random() * sums[-1]) for _ in range(4)]
        weights = torch.tensor([(12 * priorities[i] / sums[-1]) ** -0.5 for i in chosen])
        loss, each = model(x[chosen], y[chosen], weights / weights.max())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for i, value in zip(chosen, each.tolist(), strict=True):
            priorities[i] = value + 1e-2
        t.note("loss", loss)
        t.note("chosen", chosen)
        t.end_step()


@attack(
    "changes",
    "the whole step, with backward pass and optimizer, is a function that is compiled (backend='eager')",
    only=EXACT,
)
def whole_step_compiled(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    @torch.compile(backend="eager")
    def step_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x, y)
        loss.backward()
        optimizer.step()
        return loss

    for step in range(3):
        t.note("loss", step_of(*tokens(step)))
        t.end_step()


@attack("gradients", "the optimizer's step alone is compiled (backend='eager'), after two plain ones", only=EXACT)
def optimizer_step_compiled(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    stepped = torch.compile(optimizer.step, backend="eager")
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        if step < 2:
            optimizer.step()
        else:
            stepped()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a training loop as a generator of losses that the caller may stop, whose finally block evaluates and clears gradients",
)
def loop_as_generator(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)

    def losses() -> Iterator[torch.Tensor]:
        step = 0
        try:
            while True:
                optimizer.zero_grad()
                loss = model(*tokens(step))
                loss.backward()
                yield loss
                optimizer.step()
                t.end_step()
                step += 1
        finally:
            optimizer.zero_grad()
            t.note("cleared", [p.grad is None for p in model.parameters()])

    running = losses()
    for number, loss in enumerate(running):
        t.note("loss", loss)
        if number == 3:
            running.close()
    t.end_step()


@attack(
    "recomputation",
    "a memory is searched by keys and written by the forward, oldest entries first; answers are mixed in by a gate (kNN memory)",
)
def searched_memory(t: Trial) -> None:
    class Remembering(Block):
        def __init__(self) -> None:
            super().__init__()
            self.keys: list[torch.Tensor] = []
            self.values: list[torch.Tensor] = []
            self.gate = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = super().forward(x)
            if self.keys:
                k, v = torch.cat(self.keys), torch.cat(self.values)
                near = torch.cdist(h.detach().mean(1), k).topk(2, largest=False).indices
                h = h + torch.sigmoid(self.gate) * v[near].mean(1)[:, None]
            if self.training:
                self.keys.append(h.detach().mean(1))
                self.values.append(x.detach().mean(1))
                del self.keys[:-2], self.values[:-2]
            return h

    train(t, Net(Remembering() for _ in range(2)), num_steps=5)


@attack(
    "second order",
    "a continuous flow: divergence by Hutchinson's estimate with autograd.grad inside of the block, noise drawn once per call (FFJORD)",
)
def continuous_flow(t: Trial) -> None:
    class Flow(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
            self.logdet = torch.zeros(())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            e, logdet = torch.randn_like(x), x.new_zeros(())
            for _ in range(2):
                with torch.enable_grad():
                    x = x if x.requires_grad else x.detach().requires_grad_()
                    dx = self.net(x)
                    (back,) = torch.autograd.grad(dx, x, e, create_graph=True)
                logdet = logdet + 0.5 * (back * e).sum(-1).mean()
                x = x + 0.5 * dx
            self.logdet = logdet
            return x

    model = Net(Flow() for _ in range(2))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        h = model.features(tokens(step)[0])
        loss = 0.5 * h.square().sum(-1).mean() - sum(b.logdet for b in model.blocks)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes",
    "callbacks are told by name with the whole local scope (locals()), and one changes the batch and the rate through it",
)
def callbacks_with_locals(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    told: list[str] = []

    def tell(name: str, scope: dict[str, Any]) -> None:
        told.append(f"{name} {len(scope)}")
        if name == "batch":
            scope["batch"]["x"].mul_(0.9)
        if name == "backward":
            scope["optimizer"].param_groups[0]["lr"] *= 0.9
            told.append(str(sum(p.grad is not None for p in scope["model"].parameters())))

    for step in range(4):
        batch = dict(zip(("x", "y"), tokens(step), strict=True))
        tell("batch", locals())
        loss = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        tell("backward", locals())
        optimizer.step()
        t.note("told", told)
        t.end_step()


@attack(
    "parts",
    "images are cut to patches by unfold and put together by fold within a chain, at two scales whose results are added",
    only=EXACT,
)
def patches_and_back(t: Trial) -> None:
    class Patches(nn.Module):
        def __init__(self, size: int) -> None:
            super().__init__()
            self.size, self.mix = size, nn.Linear(4 * size * size, 4 * size * size)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            cut = functional.unfold(x, self.size, stride=self.size).transpose(1, 2)
            return x + functional.fold(
                (torch.tanh(self.mix(cut))).transpose(1, 2), x.shape[2:], self.size, stride=self.size
            )

    from tests.attacks.models import Images

    train(t, Images([nn.Conv2d(3, 4, 3, padding=1), Patches(2), Patches(4), nn.Conv2d(4, 4, 1)]), batch=images)


@attack(
    "recomputation",
    "the forward of each block is decorated by a timer and a retrying decorator, which hold counts in closures",
)
def decorated_forwards(t: Trial) -> None:
    import functools

    def counted(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        calls = 0

        @functools.wraps(f)
        def call(*args: Any, **kwargs: Any) -> torch.Tensor:
            nonlocal calls
            calls += 1
            call.calls = calls
            return f(*args, **kwargs) * (1 + 0.05 * calls)

        call.calls = 0
        return call

    def retried(f: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        @functools.wraps(f)
        def call(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
            for _ in range(3):
                try:
                    return f(self, *args, **kwargs)
                except ValueError:
                    self.failures += 1
            raise RuntimeError("three times")

        return call

    class Decorated(Block):
        failures = 0
        tries = 0

        @retried
        @counted
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.tries += 1
            if self.tries % 3 == 0:
                raise ValueError("flaky")
            return super().forward(x)

    model = Net(Decorated() for _ in range(2))
    train(t, model, after=lambda _: t.note("failures", [b.failures for b in model.blocks]))
