"""What frameworks do around a training loop: searches for rates, callbacks that cancel, wrapped optimizers, processes beside, exports with gradients on."""

import bisect
import copy
import multiprocessing
import random
from collections.abc import Iterator
from typing import Any

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
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
)
def whole_step_compiled(t: Trial) -> None:
    # What runs before have compiled decides when torch gives up compiling.
    torch.compiler.reset()
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


@attack(
    "gradients",
    "the optimizer's step alone is compiled (backend='eager'), after two plain ones",
)
def optimizer_step_compiled(t: Trial) -> None:
    # What runs before have compiled decides when torch gives up compiling.
    torch.compiler.reset()
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
