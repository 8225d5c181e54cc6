"""Forward and backward passes in orders of their own: pipelines, master weights, split graphs, optimizers per parameter, flat parameters."""

import collections
import copy
import math
import random
from typing import Any

import torch
from tests.attacks.models import WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import BITWISE, EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _dropping() -> Net:
    return Net((nn.Sequential(Block(), nn.Dropout(0.2)) for _ in range(2)), sequential=False)


@attack(
    "gradients",
    "a pipeline by hand: forwards of all parts, then backwards of all parts in turn, over a cut between two stages (GPipe)",
)
def pipeline_of_stages(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        optimizer.zero_grad()
        held = []
        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            sent = model.blocks[0](model.stem(part))
            received = sent.detach().requires_grad_()
            held.append((sent, received, model.loss(model.head(model.blocks[1](received)), target) / 4))
        for sent, received, loss in held:
            loss.backward()
            sent.backward(received.grad)
        t.note("losses", [loss for *_, loss in held])
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "one forward, one backward: as soon as two parts are under way the older goes back (1F1B), weights kept by version",
)
def pipeline_one_by_one(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        optimizer.zero_grad()
        under_way: collections.deque = collections.deque()

        def back(under_way: collections.deque = under_way) -> None:
            sent, received, loss = under_way.popleft()
            (loss / 4).backward()
            sent.backward(received.grad)
            t.note("loss", loss)

        for part, target in zip(x.chunk(4), y.chunk(4), strict=True):
            sent = model.blocks[0](model.stem(part))
            received = sent.detach().requires_grad_()
            under_way.append((sent, received, model.loss(model.head(model.blocks[1](received)), target)))
            if len(under_way) == 2:
                back()
        back()
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "master weights: the optimizer holds copies in double precision, gradients are copied to them, and they are copied back",
)
def master_weights(t: Trial) -> None:
    model = Net()
    masters = [p.detach().clone().double().requires_grad_() for p in model.parameters()]
    optimizer = torch.optim.SGD(masters, lr=0.1, momentum=0.9)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        model.zero_grad()
        (loss * 16).backward()
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = p.grad.detach().double() / 16
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(master)
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "an optimizer for each parameter, stepped by its post-accumulate hook, its rate set by a schedule between (torchtune)",
)
def optimizer_for_each_parameter(t: Trial) -> None:
    model = Net()
    optimizers = {p: torch.optim.AdamW([p], lr=1e-2) for p in model.parameters()}
    t.apply(model, *optimizers.values())

    def step_now(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step_now)
    for step in range(4):
        for each in optimizers.values():
            each.param_groups[0]["lr"] = 1e-2 * (1 + step) / 4
        loss = model(*tokens(step))
        loss.backward()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients", "two optimizers hold the same parameters and take turns, the second after a plateau (Adam, then SGD)"
)
def optimizers_take_turns(t: Trial) -> None:
    model = Net()
    first, second = adamw(model), sgd(model)
    t.apply(model, first, second)
    for step in range(4):
        optimizer = first if step < 2 else second
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


class _Flat(nn.Module):
    """All weights of the model are views of one parameter, set as plain attributes before each forward (FSDP's first version)."""

    returns_loss = True

    def __init__(self) -> None:
        super().__init__()
        self.inner = Net()
        self.places = []
        flat, begin = [], 0
        for path, module in self.inner.named_modules():
            for name, p in list(module.named_parameters(recurse=False)):
                self.places.append((path, name, begin, tuple(p.shape)))
                flat.append(p.detach().reshape(-1))
                begin += p.numel()
                del module._parameters[name]
        self.flat = nn.Parameter(torch.cat(flat))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for path, name, begin, shape in self.places:
            setattr(self.inner.get_submodule(path), name, self.flat[begin : begin + math.prod(shape)].view(shape))
        return self.inner(x, y)


@attack(
    "gradients", "all weights are views of one flat parameter, set on the layers before each forward (flat parameter)"
)
def flat_parameter_as_views(t: Trial) -> None:
    train(t, _Flat())


@attack(
    "recomputation",
    "noise is paired: the random state before the first forward is put back for the second of the same step",
)
def paired_noise(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        state = torch.get_rng_state()
        first = model(x, y)
        torch.set_rng_state(state)
        second = model(x + 0.1, y)
        loss = first + (second - first).square()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "under one autocast region weights are cast by an evaluation without gradients, then used in training (its cache)",
    only=BITWISE,
)
def autocast_after_evaluation(t: Trial) -> None:
    torch.set_default_dtype(torch.float32)
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = (e.float() if e.is_floating_point() else e for e in tokens(step))
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                t.note("before", model(x, y))
            loss = model(x, y)
        optimizer.zero_grad()
        loss.backward()
        t.note("grads", [p.grad is None for p in model.parameters()])
        optimizer.step()
        t.end_step()


@attack(
    "gradients",
    "gradients come as a dict from torch.autograd.grad, with unused ones, and are put on by a loop with weight decay",
)
def gradients_as_dict(t: Trial) -> None:
    model = Net()
    model.register_parameter("unused", nn.Parameter(torch.ones(3)))
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        names, weights = zip(*model.named_parameters(), strict=True)
        loss = model(*tokens(step))
        found = dict(zip(names, torch.autograd.grad(loss, weights, allow_unused=True), strict=True))
        for name, p in model.named_parameters():
            p.grad = None if found[name] is None else found[name] + 0.01 * p.detach()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "the backward pass stops at the blocks' output first, then goes on from there for some steps only (warm-up of the head)",
)
def backward_in_two_pieces(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        features = model.features(x)
        loss = model.loss(model.head(features), y)
        optimizer.zero_grad()
        head = list(model.head.parameters())
        slope, *of_head = torch.autograd.grad(loss, [features, *head], retain_graph=True)
        for p, g in zip(head, of_head, strict=True):
            p.grad = g
        if step > 1:
            features.backward(slope * 0.5)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "exceptions",
    "a step whose loss is not finite is tried again with half the input, from a copy of the weights and the random state",
)
def rolled_back_and_tried_again(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        if step == 2:
            x = x * 1e200
        saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()), torch.get_rng_state()
        for _ in range(2):
            loss = model(x, y)
            optimizer.zero_grad()
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            if torch.isfinite(norm) and torch.isfinite(loss):
                optimizer.step()
                break
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            torch.set_rng_state(saved[2])
            x = x * 1e-200
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a loss scale is a parameter's own attribute, and the scaled gradients are unscaled by tensor hooks on the parameters",
)
def unscaled_by_hooks(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    for p in model.parameters():
        p.loss_scale = 128.0
        p.register_hook(lambda g, p=p: g / p.loss_scale)
    t.apply(model, optimizer)
    for step in range(4):
        if step == 2:
            for p in model.parameters():
                p.loss_scale = 256.0
        loss = model(*tokens(step))
        optimizer.zero_grad()
        (loss * (128.0 if step < 2 else 256.0)).backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "a multi-gradient hook on all parameters (mode any, then all) takes the time of the first and of the last gradient",
)
def hooks_on_many_gradients(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    seen: list[Any] = []
    leaves = [p for p in model.parameters() if p.requires_grad]
    handles = [
        torch.autograd.graph.register_multi_grad_hook(
            # Whether a layer's weight or its bias comes first is not in the program.
            leaves,
            lambda g: seen.append(("first", len(g))),
            mode="any",
        ),
        torch.autograd.graph.register_multi_grad_hook(
            leaves, lambda gs: seen.append(("all", sum(g is not None for g in gs)))
        ),
    ]
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
        t.note("seen", seen)
    for handle in handles:
        handle.remove()


@attack(
    "gradients",
    "gradients of a shared trunk are averaged from two heads by two graphs that are cut at different depths",
)
def heads_at_depths(t: Trial) -> None:
    model = Net((Block() for _ in range(3)), sequential=False)
    early = nn.Linear(WIDTH, 7)
    t.track(early)
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": early.parameters(), "lr": 0.05}], lr=0.1)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        h = model.blocks[0](model.stem(x))
        optimizer.zero_grad()
        first = functional.cross_entropy(early(h).flatten(0, 1), y.flatten())
        first.backward(retain_graph=True)
        # The second loss reaches the trunk only in every second step.
        h = h if step % 2 else h.detach()
        second = model.loss(model.head(model.blocks[2](model.blocks[1](h))), y)
        second.backward()
        optimizer.step()
        t.note("losses", [first, second])
        t.end_step()


@attack(
    "recomputation",
    "a beam of two hypotheses is carried through the blocks, the better one by its loss trains (best of many)",
)
def best_of_many(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        losses = [model(x, y) for _ in range(3)]
        best = min(losses, key=float)
        optimizer.zero_grad()
        best.backward()
        optimizer.step()
        t.note("losses", losses)
        t.end_step()


@attack(
    "recomputation",
    "old graphs are run backwards late: losses of the last two steps are kept, and one of them, by Python's random, trains",
)
def one_of_the_last(t: Trial) -> None:
    model = _dropping()
    optimizer = torch.optim.SGD(model.head.parameters(), lr=0.1)
    t.apply(model, optimizer)
    chance, kept = random.Random(3), []
    for step in range(5):
        kept = [*kept[-1:], model(*tokens(step))]
        if len(kept) == 2:
            optimizer.zero_grad()
            loss = kept.pop(chance.randrange(2))
            loss.backward()
            with torch.no_grad():
                for p in model.parameters():
                    p.grad = None if p.grad is None else p.grad * 0.1
            t.note("loss", loss)
            t.note("grad", model.stem.weight.grad)
        t.end_step()


@attack(
    "gradients",
    "weights are shared by address: a second optimizer's flat buffer is the storage of all parameters (views set by .data)",
)
def storage_is_flat(t: Trial) -> None:
    model = Net()
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    begin = 0
    for p in model.parameters():
        p.data = flat[begin : begin + p.numel()].view_as(p)
        begin += p.numel()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        flat.mul_(0.999)
        t.note("loss", loss)
        t.note("sum", flat.sum())
        t.end_step()


@attack(
    "gradients",
    "the step is the closure's: it runs forward and backward pass itself, with accumulation inside and clipping",
    only=EXACT,
)
def accumulation_in_closure(t: Trial) -> None:
    model = _dropping()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            total = torch.zeros(())
            for part in range(3):
                loss = model(*tokens(3 * step + part)) / 3
                loss.backward()
                total = total + loss.detach()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return total

        t.note("loss", optimizer.step(closure))
        t.end_step()


@attack(
    "gradients",
    "from the third step on the data of a buffer is set to a gradient, which the program reads after the step (no copy)",
)
def data_is_a_gradient(t: Trial) -> None:
    model = Net()
    last = torch.zeros(1)

    def keep(step: int) -> None:
        if step > 1:
            last.data = model.blocks[0].wide.weight.grad

    train(t, model, between=keep, after=lambda _: t.note("last", last.sum()))


@attack(
    "gradients",
    "the data of a parameter that is not in the optimizer is set to the gradient of another one, and multiplies then",
)
def data_of_parameter_is_a_gradient(t: Trial) -> None:
    model = Net()
    model.last = nn.Parameter(torch.zeros_like(model.stem.weight), requires_grad=False)

    def keep(step: int) -> None:
        if step > 1:
            model.last.data = model.stem.weight.grad

    train(t, model, between=keep, after=lambda _: t.note("last", (model.last @ model.last).sum()))


@attack(
    "gradients",
    "from the third step on the optimizer's step is called past torch's own wrapper (step.__wrapped__), which calls no hooks",
)
def step_past_its_wrapper(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        if step > 1:
            type(optimizer).step.__wrapped__(optimizer)
        else:
            optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("gradients", "the optimizer's step is called past torch's own wrapper throughout, with AdamW and clipping")
def steps_past_their_wrapper(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    bare = type(optimizer).step.__wrapped__
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        bare(optimizer)
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "a buffer for display is given the data of the head's logits by .data, and is read before the backward pass",
)
def data_is_of_logits(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, given, logits: seen.append(logits))
    shown = torch.zeros(1)
    for step in range(3):
        optimizer.zero_grad()
        loss = model(*tokens(step))
        shown.data = seen.pop()
        t.note("shown", shown.sum())
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()
