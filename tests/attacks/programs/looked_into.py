"""Programs that look into their model while it trains: summaries, memory reports, drawings of graphs, exports, checks of types and signatures."""

import collections
import copy
import gc
import inspect
import pickle
import types
import typing
import weakref
from typing import Any

import torch
from tests.attacks.models import (
    BATCH,
    NUM_CLASSES,
    TOKENS,
    WIDTH,
    Block,
    Images,
    Net,
    adamw,
    images,
    sgd,
    tokens,
    train,
)
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _dropping() -> Net:
    return Net(nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(2))


@attack(
    "changes", "a summary by hooks on all modules and one batch of zeros (torchinfo), before training and in the middle"
)
def summary_by_hooks(t: Trial) -> None:
    model = _dropping()

    def summary(step: int) -> None:
        rows: dict[str, Any] = {}
        handles = [
            m.register_forward_hook(
                lambda m, i, o, n=n: rows.update(
                    {n: (list(o.shape), sum(p.numel() for p in m.parameters(recurse=False)))}
                )
            )
            for n, m in model.named_modules()
        ]
        was = model.training
        model.eval()
        with torch.no_grad():
            model(torch.zeros(1, 2, WIDTH))
        model.train(was)
        for handle in handles:
            handle.remove()
        t.note("rows", rows)

    train(t, model, before=lambda step: summary(step) if step in (0, 2) else None)


@attack(
    "gradients",
    "all tensors of the process are counted by gc.get_objects between backward pass and step (a memory report)",
)
def report_of_memory(t: Trial) -> None:
    model = _dropping()
    ours = [id(p) for p in model.parameters()]

    def report(_: int) -> None:
        found = 0
        for each in gc.get_objects():
            try:
                if torch.is_tensor(each) or (hasattr(each, "data") and torch.is_tensor(each.data)):
                    found += id(each) in ours and each.size().numel()
            except Exception:  # noqa: BLE001 - as such reports have it
                continue
        t.note("numbers", found)
        t.note("norms", [p.grad.norm() for p in model.parameters()])

    train(t, model, num_steps=2, between=report)


@attack(
    "recomputation",
    "the graph of the loss is walked from its node to leaves and drawn (torchviz), before each backward pass",
    only=EXACT,
)
def graph_drawn(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        loss = model(*tokens(step))
        seen: set[Any] = set()
        todo = [loss.grad_fn]
        leaves = 0
        while todo:
            node = todo.pop()
            if node in seen:
                continue
            seen.add(node)
            leaves += hasattr(node, "variable")
            for name in dir(node):
                if name.startswith("_saved_"):
                    getattr(node, name)
            todo += [n for n, _ in node.next_functions if n is not None]
        t.note("is deep", len(seen) > 0)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "the batch's columns are chosen by the signature of model.forward, hints of types are read (a Trainer)",
)
def columns_by_signature(t: Trial) -> None:
    class Hinted(Block):
        def forward(self, x: torch.Tensor, scale: typing.Optional[float] = None) -> torch.Tensor:  # noqa: UP045
            assert isinstance(self.forward, types.MethodType) or callable(self.forward)
            return super().forward(x) * (scale or 1.0)

    class Named(Net):
        def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None, scale: float = 1.1) -> torch.Tensor:
            h = self.stem(x)
            for block in self.blocks:
                h = block(h, scale) if "scale" in inspect.signature(block.forward).parameters else block(h)
            return self.loss(self.head(h), labels)

    model = Named((Hinted() for _ in range(2)), sequential=False)
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        names = inspect.signature(model.forward).parameters
        t.note("names", list(names))
        batch = {n: v for n, v in {"x": x, "labels": y, "idx": step, "scale": 1.0 + 0.1 * step}.items() if n in names}
        loss = model(**batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "calls by the class: Block.forward(block, x), super() of an instance and nn.Module.__call__, by turns",
)
def called_by_class(t: Trial) -> None:
    class Deep(Block):
        num = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num += 1
            return super().forward(x) * (1 + 0.1 * self.num)

    class Calling(Net):
        turn = 0

        def features(self, x: torch.Tensor) -> torch.Tensor:
            self.turn += 1
            x = self.stem(x)
            for i, block in enumerate(self.blocks):
                way = (self.turn + i) % 4
                if way == 0:
                    x = Deep.forward(block, x)
                elif way == 1:
                    x = super(Deep, block).forward(x)
                elif way == 2:
                    x = nn.Module.__call__(block, x)
                else:
                    x = block(x)
            return x

    train(t, Calling((Deep() for _ in range(2)), sequential=False), num_steps=5)


@attack(
    "changes",
    "a symbolic trace by torch.fx in the middle is called beside the model, shares its weights, and prints its code",
    only=EXACT,
)
def symbolic_in_the_middle(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    graph = None
    for step in range(4):
        x, y = tokens(step)
        if step == 2:
            graph = torch.fx.symbolic_trace(model, concrete_args={"y": None})
        loss = model(x, y)
        if graph is not None:
            loss = loss + 0.1 * graph(x).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes",
    "fake tensors go through the model in the middle, to know what a larger batch would need (FakeTensorMode)",
)
def fake_batch(t: Trial) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = _dropping()

    def fake(step: int) -> None:
        if step == 1:
            with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.no_grad():
                t.note("shape", list(model(mode.from_tensor(tokens(0, 3)[0])).shape))

    train(t, model, num_steps=3, after=fake)


@attack("changes", "the same with gradients and a backward pass of the fake loss, from a copy of the model", only=EXACT)
def fake_step_of_copy(t: Trial) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    model = _dropping()

    def fake(step: int) -> None:
        if step == 1:
            copied = copy.deepcopy(model)
            with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                x, y = tokens(0, 3)
                loss = copied(mode.from_tensor(x), mode.from_tensor(y))
                t.note("shape", list(loss.shape))

    train(t, model, num_steps=3, after=fake)


@attack(
    "changes",
    "torch.export makes a program of the model in evaluation, in the middle, and its answers are noted",
    only=EXACT,
)
def exported_program(t: Trial) -> None:
    model = Net()

    def export(step: int) -> None:
        if step == 1:
            model.eval()
            with torch.no_grad():
                found = torch.export.export(model, (tokens(0)[0],))
                t.note("answers", found.module()(tokens(1)[0]))
            model.train()

    train(t, model, num_steps=3, after=export)


@attack(
    "changes",
    "a quantised copy for the server is made every second step (dynamic int8 of linear layers) and judged",
    only=EXACT,
)
def quantised_copy(t: Trial) -> None:
    class Rounded(nn.Module):
        def __init__(self, layer: nn.Linear) -> None:
            super().__init__()
            self.scale = layer.weight.detach().abs().amax(1, keepdim=True) / 127
            self.register_buffer("q", torch.round(layer.weight.detach() / self.scale).to(torch.int8))
            self.bias = layer.bias

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.linear(x, self.q.to(x.dtype) * self.scale, self.bias)

    model = Net()

    def judge(step: int) -> None:
        if step % 2:
            copied = copy.deepcopy(model).eval()
            for module in list(copied.modules()):
                for name, child in list(module.named_children()):
                    if type(child) is nn.Linear:
                        setattr(module, name, Rounded(child))
            with torch.no_grad():
                t.note("judged", copied(*tokens(7)))

    train(t, model, after=judge)


@attack(
    "changes",
    "batch norms are folded into the convolutions of a copy (fuse_conv_bn_eval) every second step, the chain trains on",
)
def folded_copy(t: Trial) -> None:
    model = Images([nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3, padding=1)])

    def judge(step: int) -> None:
        if step % 2:
            copied = copy.deepcopy(model).eval()
            copied.chain[0] = torch.nn.utils.fusion.fuse_conv_bn_eval(copied.chain[0], copied.chain[1])
            copied.chain[1] = nn.Identity()
            with torch.no_grad():
                t.note("judged", copied(*images(7)))

    train(t, model, batch=images, after=judge)


@attack(
    "changes",
    "batches, model and optimizer are pickled each step for a journal, of which the last one is opened",
    only=EXACT,
)
def journal_of_pickles(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    journal: list[bytes] = []
    t.apply(model, optimizer)
    for step in range(4):
        batch = tokens(step)
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        journal.append(pickle.dumps((batch, model.state_dict(), optimizer.state_dict(), torch.get_rng_state())))
        t.note("loss", loss)
        t.end_step()
    _, weights, states, _ = pickle.loads(journal[-1])
    t.note("weights", weights)
    t.note("states", states["state"])


@attack("recomputation", "weak references and counts of them tell whether activations of the last step have died")
def activations_have_died(t: Trial) -> None:
    alive: list[Any] = []

    class Referenced(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            alive.append(weakref.ref(x))
            return x * (1 + 0.01 * len(alive))

    def check(_: int) -> None:
        t.note("alive", len(alive))

    train(t, Net(Referenced() for _ in range(2)), after=check)


@attack(
    "recomputation",
    "a listing of activations by name is taken by hooks that are removed within themselves (feature extraction, once)",
)
def hooks_that_remove_themselves(t: Trial) -> None:
    model = _dropping()
    kept: dict[str, torch.Tensor] = {}

    def once(name: str, module: nn.Module) -> None:
        def hook(_: nn.Module, __: Any, output: torch.Tensor) -> None:
            kept[name] = output.detach().clone()
            handle.remove()

        handle = module.register_forward_hook(hook)

    def put(step: int) -> None:
        if step % 2 == 0:
            for name, module in model.named_modules():
                if isinstance(module, Block):
                    once(name, module)

    def seen(_: int) -> None:
        t.note("kept", dict(kept))
        kept.clear()

    train(t, model, before=put, after=seen)


@attack("parts", "a copy of the input's strides, layout, device and grad_fn names goes to a log of the block, by call")
def log_of_inputs(t: Trial) -> None:
    class Logging(Block):
        def __init__(self) -> None:
            super().__init__()
            self.seen: collections.deque = collections.deque(maxlen=3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen.append((x.stride(), str(x.layout), x.device.type, type(x.grad_fn).__name__, x.requires_grad))
            return super().forward(x)

    model = Net(Logging() for _ in range(2))
    train(t, model, after=lambda _: t.note("seen", [list(map(str, b.seen)) for b in model.blocks]))


class _Bfgs(torch.optim.Optimizer):
    """Keeps the last pairs of changes and multiplies by them (a limited-memory method without a closure)."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})
        self.pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.last: tuple[torch.Tensor, torch.Tensor] | None = None

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """One update along the direction."""
        params = [p for g in self.param_groups for p in g["params"] if p.grad is not None]
        w = torch.cat([p.flatten() for p in params])
        g = torch.cat([p.grad.flatten() for p in params])
        if self.last is not None:
            s, y = w - self.last[0], g - self.last[1]
            if torch.dot(s, y) > 1e-10:
                self.pairs = [*self.pairs[-2:], (s, y)]
        q, coefficients = g.clone(), []
        for s, y in reversed(self.pairs):
            a = torch.dot(s, q) / torch.dot(s, y)
            coefficients.append(a)
            q -= a * y
        for (s, y), a in zip(self.pairs, reversed(coefficients), strict=True):
            q += (a - torch.dot(y, q) / torch.dot(s, y)) * s
        self.last = (w.clone(), g.clone())
        begin = 0
        for p in params:
            p.sub_(q[begin : begin + p.numel()].view_as(p), alpha=self.param_groups[0]["lr"])
            begin += p.numel()


@attack(
    "gradients",
    "a hand-written quasi-Newton optimizer keeps flat weights and gradients of the last step, in attributes of its own",
)
def quasi_newton(t: Trial) -> None:
    model = Net()
    train(t, model, _Bfgs(model.parameters(), 0.05), num_steps=5)


@attack(
    "recomputation",
    "an LSTM inside of blocks whose recurrent weight is dropped out by name before each call (AWD-LSTM)",
)
def weight_dropped_lstm(t: Trial) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, WIDTH, batch_first=True)
            raw = self.rnn.weight_hh_l0
            self.raw = nn.Parameter(raw.data.clone())
            self.state: tuple[torch.Tensor, torch.Tensor] | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            # As fast.ai has it: the parameter's place in the module is taken by a tensor.
            weight = functional.dropout(self.raw, 0.3, self.training)
            self.rnn._parameters.pop("weight_hh_l0", None)
            self.rnn.weight_hh_l0 = weight
            self.rnn._flat_weights = [getattr(self.rnn, n) for n in self.rnn._flat_weights_names]
            out, state = self.rnn(x, self.state)
            self.state = tuple(e.detach() for e in state)
            return x + out

    model = Net(Dropped() for _ in range(2))
    for block in model.blocks:
        del block.rnn._parameters["weight_hh_l0"]
        block.rnn.weight_hh_l0 = block.raw.data
    train(t, model)


@attack(
    "parts",
    "a head over prefixes: losses at several lengths of the same sequence, by slices that overlap, in one forward",
)
def losses_of_prefixes(t: Trial) -> None:
    class Prefixes(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            h = self.features(x)
            return sum(self.loss(self.head(h[:, :n]), y[:, :n]) / n for n in (2, 4, TOKENS))

    train(t, Prefixes())


@attack(
    "parts",
    "targets are drawn inside of the model from its own answers of the step before, by example number (self-training)",
)
def targets_by_example_number(t: Trial) -> None:
    class Selftaught(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("answers", torch.full((16, NUM_CLASSES), 1 / NUM_CLASSES))

        def forward(self, x: torch.Tensor, y: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x))
            soft = self.answers[numbers]
            loss = -(soft[:, None] * functional.log_softmax(logits, -1)).sum(-1).mean()
            with torch.no_grad():
                self.answers[numbers] = 0.5 * soft + 0.5 * functional.softmax(logits, -1).mean(1)
            return self.loss(logits, y) + loss

    train(t, Selftaught(), batch=lambda s: (*tokens(s), torch.arange(BATCH) + 4 * (s % 3)), num_steps=5)


@attack(
    "recomputation",
    "names of arguments, hints, the function and its object are read off model.forward and each block's (old trainers)",
)
def forward_asked_for_its_code(t: Trial) -> None:
    class Named(Block):
        def forward(self, x: torch.Tensor, scale: float = 1.0, *, shift: float = 0.0) -> torch.Tensor:
            """Scaled and shifted."""
            return super().forward(x) * scale + shift

    class Asking(Net):
        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                code = block.forward.__code__
                names = code.co_varnames[1 : code.co_argcount + code.co_kwonlyargcount]
                x = block(x, **{n: 0.5 for n in names if n != "x"})
            return x

    model = Asking((Named() for _ in range(2)), sequential=False)

    def asked(_: int) -> None:
        forward = model.blocks[0].forward
        t.note("hints", sorted(typing.get_type_hints(forward)))
        t.note("spec", [list(inspect.signature(forward).parameters), forward.__name__, forward.__qualname__])
        t.note("defaults", [list(forward.__defaults__), forward.__kwdefaults__, forward.__self__ is model.blocks[0]])
        t.note("source", [len(inspect.getsource(forward)), inspect.ismethod(forward), inspect.getfile(forward)])
        t.note("function", [forward.__func__ is Named.forward, model.forward.__self__ is model])

    train(t, model, after=asked)
