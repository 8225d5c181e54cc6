"""State that the loop reads and puts back between the forward and the backward pass, or keeps by reference across steps."""

import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack("recomputation", "a counter of calls that scales, logged and set back to zero before the backward pass")
def counter_set_back(t: Trial) -> None:
    class Counting(Block):
        calls = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return super().forward(x) * (1 + 0.1 * self.calls)

    model = Net([Counting(), Counting()])

    def log(_: int) -> None:
        t.note("calls", [block.calls for block in model.blocks])
        for block in model.blocks:
            block.calls = 0

    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        log(step)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        # Whether anything was counted after the reset.
        log(step)
        t.end_step()


@attack("recomputation", "outputs collected in a list of the model's, popped by the loop before the backward pass")
def collected_and_popped(t: Trial) -> None:
    class Collecting(Block):
        def __init__(self, into: list) -> None:
            super().__init__()
            self.into = into

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.into.append(out.detach().mean())
            return out * (1 + 0.1 * len(self.into))

    into: list = []
    model = Net([Collecting(into), Collecting(into)])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        while into:
            t.note("popped", into.pop())
        optimizer.zero_grad()
        loss.backward()
        t.note("left", len(into))
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "a dict of figures that a hook on an inner module fills, taken and cleared before the backward pass",
)
def figures_cleared(t: Trial) -> None:
    model = Net()
    figures: dict[str, float] = {}
    for number, block in enumerate(model.blocks):
        block.wide.register_forward_hook(
            lambda _, __, out, n=number: figures.update({f"{n}/{len(figures)}": float(out.detach().mean())})
        )
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        t.note("figures", dict(figures))
        figures.clear()
        optimizer.zero_grad()
        loss.backward()
        t.note("left", dict(figures))
        figures.clear()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "a hidden state is set to none before the backward pass, as it was before the forward")
def state_set_to_none(t: Trial) -> None:
    class Stateful(Block):
        state: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x if self.state is None else x + self.state)
            self.state = out.detach() * 0.5
            return out

    model = Net([Stateful(), Stateful()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step)) + model(*tokens(step + 50))
        for block in model.blocks:
            block.state = None
        optimizer.zero_grad()
        loss.backward()
        t.note("state", [block.state is None for block in model.blocks])
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "Python's and numpy's random states are seeded anew before the backward pass, as before the forward",
)
def seeded_as_before_the_forward(t: Trial) -> None:
    import random

    import numpy as np

    class Noisy(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * (1 + 0.1 * random.random()) + 0.01 * float(np.random.rand())

    model = Net([Noisy(), Noisy()])
    optimizer = sgd(model)

    def seed(step: int) -> None:
        random.seed(step)
        np.random.seed(step)
        torch.manual_seed(step)

    t.apply(model, optimizer)
    for step in range(4):
        seed(step)
        loss = model(*tokens(step))
        seed(step)
        optimizer.zero_grad()
        loss.backward()
        t.note("drawn", [random.random(), float(np.random.rand()), torch.rand(1)])
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "the best weights are kept by state_dict without a copy, and loaded again")
def best_weights_by_reference(t: Trial) -> None:
    model = Net()
    kept: dict[str, torch.Tensor] = {}

    def keep(step: int) -> None:
        if step == 1:
            kept.update(model.state_dict())
        t.note("kept", list(kept.values()))
        if step == 3:
            model.load_state_dict(kept)

    train(t, model, adamw(model), num_steps=6, after=keep)


@attack("gradients", "gradients of the last step are kept by reference, and compared after the next backward pass")
def gradients_by_reference(t: Trial) -> None:
    model = Net()
    kept: dict[str, torch.Tensor] = {}

    def compare(_: int) -> None:
        for name, p in model.named_parameters():
            if name in kept:
                t.note("cosine", functional.cosine_similarity(kept[name].flatten(), p.grad.flatten(), dim=0))
            if p.grad is not None:
                kept[name] = p.grad

    train(t, model, between=compare)
    t.note("kept", list(kept.values()))


@attack("gradients", "moments are read by a reference taken once, also after states were replaced by loading")
def moments_by_reference(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    held: list[torch.Tensor] = []

    def watch(step: int) -> None:
        if step == 0:
            held.append(optimizer.state[model.head.weight]["exp_avg"])
        t.note("held", held)

    train(t, model, optimizer, after=watch, num_steps=4)


@attack("gradients", "the optimizer's groups are taken by reference, and rates set there by a loop of the script's own")
def groups_by_reference(t: Trial) -> None:
    model = Net()
    optimizer = torch.optim.SGD(
        [{"params": list(model.blocks.parameters()), "lr": 0.1}, {"params": list(model.head.parameters()), "lr": 0.05}],
        momentum=0.9,
    )
    groups = optimizer.param_groups

    def set_rates(step: int) -> None:
        for number, group in enumerate(groups):
            group["lr"] = 0.1 / (step + number + 1)
        groups[1]["weight_decay"] = 0.1 * step
        if step == 2:
            groups[0]["params"].extend(model.stem.parameters())

    train(t, model, optimizer, before=set_rates)


@attack("parts", "class weights and thresholds of the loss are kept from the last batches, in a list of the model's")
def weights_from_last_batches(t: Trial) -> None:
    class Balanced(Net):
        def __init__(self) -> None:
            super().__init__()
            self.seen: list[torch.Tensor] = []

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            self.seen.append(functional.one_hot(y.flatten(), NUM_CLASSES).sum(0))
            del self.seen[:-3]
            weight = 1.0 / (1.0 + torch.stack(self.seen).sum(0).to(logits.dtype))
            return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=weight)

    train(t, Balanced(), num_steps=5)


@attack("parts", "a convolution chain whose padding mode and a later flip depend on the mean brightness", only=EXACT)
def flipped_when_bright(t: Trial) -> None:
    class Flipping(Images):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            return super().forward(x.flip(-1) if float(x.mean()) > 0 else x * 0.9, y)

    train(t, Flipping(), batch=images, num_steps=5)


@attack(
    "recomputation",
    "a block keeps its last input and output with their graph, for a loss of consistency in the same step",
)
def consistency_of_kept_outputs(t: Trial) -> None:
    class Keeping(Block):
        kept: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out = super().forward(x)
            self.kept = out - x
            return out

    model = Net([Keeping(), Keeping()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        first = [block.kept for block in model.blocks]
        loss = loss + model(tokens(step)[0] + 0.01, tokens(step)[1])
        loss = loss + sum((a - block.kept).square().mean() for a, block in zip(first, model.blocks, strict=True))
        for block in model.blocks:
            block.kept = None
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "modules draw their slopes once per step, by a method that the loop calls before the forward and again after it",
)
def drawn_by_method(t: Trial) -> None:
    class Drawn(Block):
        def __init__(self) -> None:
            super().__init__()
            self.slope = torch.ones(WIDTH)

        def draw(self) -> None:
            self.slope = torch.rand(WIDTH) + 0.5

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * self.slope)

    model = Net([Drawn(), Drawn()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        for block in model.blocks:
            block.draw()
        loss = model(*tokens(step))
        for block in model.blocks:
            block.draw()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "two losses run backward into separate copies of gradients by autograd.grad and one is projected (cosine of tasks)",
)
def tasks_projected(t: Trial) -> None:
    model = Net()
    model.other = nn.Linear(WIDTH, 3)
    optimizer = sgd(model)
    shared = [*model.stem.parameters(), *model.blocks.parameters()]
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        features = model.features(x)
        first = functional.cross_entropy(model.head(features).flatten(0, 1), y.flatten())
        second = functional.cross_entropy(model.other(features).flatten(0, 1), y.flatten() % 3)
        one = torch.autograd.grad(first, shared, retain_graph=True)
        two = torch.autograd.grad(second, shared, retain_graph=True)
        weigh = float(
            functional.cosine_similarity(*(torch.cat([g.flatten() for g in each]) for each in (one, two)), dim=0)
        )
        optimizer.zero_grad()
        (first + max(weigh, 0.0) * second).backward()
        optimizer.step()
        t.note("weigh", weigh)
        t.end_step()
