"""Several passes in one step: frozen for one of them, with other statistics, put together by hooks, with teachers beside."""

import random

import torch
from tests.attacks.models import NUM_CLASSES, TOKENS, WIDTH, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


@attack(
    "recomputation",
    "a first guess without graph is given as input half of the time, by Python's random (self-conditioning)",
)
def self_conditioned(t: Trial) -> None:
    class Conditioned(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            guess = torch.zeros_like(x)
            if self.training and random.random() < 0.5:
                with torch.no_grad():
                    guess = self.features(x)
            logits = self.head(self.features(x + 0.5 * guess.detach()))
            return logits if y is None else self.loss(logits, y)

    train(t, Conditioned(), num_steps=6)


@attack(
    "recomputation",
    "a context freezes weights for the forward alone: they train again before the backward pass (Dreamer)",
)
def frozen_for_forward(t: Trial) -> None:
    class Frozen:
        def __init__(self, *modules: nn.Module) -> None:
            self.parameters = [p for m in modules for p in m.parameters()]

        def __enter__(self) -> None:
            self.wanted = [p.requires_grad for p in self.parameters]
            for p in self.parameters:
                p.requires_grad = False

        def __exit__(self, *_: object) -> None:
            for p, wanted in zip(self.parameters, self.wanted, strict=True):
                p.requires_grad = wanted

    model = Net([Block(), Block(), Block()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        if step % 2:
            with Frozen(model.blocks[1], model.head):
                loss = model(*tokens(step))
        else:
            loss = model(*tokens(step))
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        t.note(
            "with gradient", [name for name, p in model.named_parameters() if p.grad is not None and bool(p.grad.any())]
        )
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "blocks share one layer of theirs, and the norms are their own (half-shared)")
def layer_shared_by_blocks(t: Trial) -> None:
    model = Net([Block() for _ in range(3)])
    for block in model.blocks:
        block.wide = model.blocks[0].wide
    model.blocks[2].narrow.weight = model.blocks[1].narrow.weight
    train(t, model, adamw(model))


@attack("recomputation", "two towers share blocks with inputs of other lengths, one loss (dual encoder)")
def two_towers(t: Trial) -> None:
    class Towers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(WIDTH, WIDTH)
            self.blocks = nn.Sequential(Block(), Block())
            self.scale = nn.Parameter(torch.tensor(1.0))

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return functional.normalize(self.blocks(self.stem(x)).mean(1), dim=-1)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            scores = self.encode(x) @ self.encode(y).t() * self.scale.exp()
            goal = torch.arange(x.shape[0])
            return functional.cross_entropy(scores, goal) + functional.cross_entropy(scores.t(), goal)

    model = Towers()
    train(t, model, batch=lambda step: (tokens(step)[0], tokens(step + 50, length=3)[0]),
          after=lambda _: model.scale.data.clamp_(0, 2))  # fmt: skip


@attack(
    "recomputation",
    "a width reduced between blocks: the two most similar tokens are merged by weight (token merging)",
    only=EXACT,
)
def tokens_merged(t: Trial) -> None:
    class Merging(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            unit = functional.normalize(x.detach(), dim=-1)
            alike = (unit[:, ::2] @ unit[:, 1::2].transpose(1, 2)).amax(-1)
            lost = alike.argmax(1)
            kept = torch.ones(x.shape[:2], dtype=torch.bool)
            kept[torch.arange(len(x)), 2 * lost] = False
            mean = x[torch.arange(len(x)), 2 * lost]
            return x[kept].view(x.shape[0], -1, x.shape[2]) + mean[:, None] / x.shape[1]

    class Merged(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            logits = self.head(self.features(x).mean(1))
            return logits if y is None else functional.cross_entropy(logits, y[:, 0])

    train(t, Merged([Merging(), Merging()]))


@attack("changes", "a task chooses its parameters from a dict; the others' gradients stay zero, or none, by turns")
def parameters_by_task(t: Trial) -> None:
    class Tasked(Block):
        task = "a"

        def __init__(self) -> None:
            super().__init__()
            self.shifts = nn.ParameterDict({key: torch.randn(WIDTH) for key in "abc"})

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return super().inner(x * self.shifts[self.task])

    model = Net([Tasked(), Tasked()])
    model.heads = nn.ModuleDict({key: nn.Linear(WIDTH, NUM_CLASSES) for key in "abc"})
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(7):
        task = "abca"[step % 4]
        for block in model.blocks:
            block.task = task
        x, y = tokens(step)
        loss = functional.cross_entropy(model.heads[task](model.features(x)).flatten(0, 1), y.flatten())
        optimizer.zero_grad(set_to_none=step % 3 == 0)
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "outputs of blocks from another batch are put in by hooks (interchange interventions)")
def interchange_interventions(t: Trial) -> None:
    model = Net([Block() for _ in range(3)])
    optimizer = sgd(model)
    seen: dict[int, torch.Tensor] = {}
    puts_in = [False]

    def hook(number: int):
        def exchange(_: nn.Module, __: tuple, out: torch.Tensor) -> torch.Tensor | None:
            if not puts_in[0]:
                seen[number] = out
                return None
            return torch.cat([seen[number][..., :3], out[..., 3:]], -1)

        return exchange

    model.blocks[1].register_forward_hook(hook(1))
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        puts_in[0] = False
        model(tokens(step + 50)[0])
        puts_in[0] = True
        loss = model(x, y)
        puts_in[0] = False
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes", "a vector added by a hook is all that trains; the model is frozen, the vector is not in it (steering)"
)
def steering_vector(t: Trial) -> None:
    model = Net().requires_grad_(False)
    vector = nn.Parameter(torch.zeros(WIDTH))
    holder = nn.ParameterList([vector])
    optimizer = torch.optim.AdamW([vector], lr=1e-1)
    model.blocks[0].register_forward_hook(lambda _, __, out: out + vector)
    t.track(holder)
    t.apply(model, optimizer)
    for step in range(4):
        loss = model(*tokens(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack(
    "exceptions",
    "a hook collects activations and stops the forward by an exception; an autoencoder learns them (dictionary)",
)
def stopped_by_hook(t: Trial) -> None:
    class Stopped(Exception):
        pass

    model, coder = Net(), Net([Block()])
    coder.head = nn.Linear(WIDTH, WIDTH)
    of_model, of_coder = sgd(model), adamw(coder)
    kept = []

    def stop(_: nn.Module, __: tuple, out: torch.Tensor) -> None:
        kept.append(out.detach())
        raise Stopped

    t.track(model)
    t.track(coder)
    t.apply(model, of_model)
    t.apply(coder, of_coder)
    for step in range(3):
        loss = model(*tokens(step))
        of_model.zero_grad()
        loss.backward()
        of_model.step()
        t.note("loss", loss)
        t.end_step()
        kept.clear()
        for part in range(2):
            handle = model.blocks[0].register_forward_hook(stop)
            try:
                model(tokens(50 + 2 * step + part)[0])
            except Stopped:
                pass
            finally:
                handle.remove()
        seen = torch.cat(kept)
        found = coder(seen)
        loss = functional.mse_loss(found, seen) + 1e-2 * found.abs().mean()
        of_coder.zero_grad()
        loss.backward()
        of_coder.step()
        with torch.no_grad():
            coder.head.weight.div_(coder.head.weight.norm(dim=1, keepdim=True))
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "running statistics stand still in a second, perturbed pass: momentum set to 0 and back (SAM with batch norms)",
)
def statistics_stand_still(t: Trial) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(x.transpose(1, 2)).transpose(1, 2)
            return self.narrow(functional.gelu(self.wide(x)))

    model = Net([Normed(), Normed()])
    optimizer = sgd(model)

    def momentum(value: float) -> None:
        for block in model.blocks:
            block.norm.momentum = value

    t.apply(model, optimizer)
    for step in range(4):
        momentum(0.1)
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        moved = {p: 0.05 * p.grad / (p.grad.norm() + 1e-6) for p in model.parameters() if p.grad is not None}
        with torch.no_grad():
            for p, by in moved.items():
                p.add_(by)
        momentum(0.0)
        second = model(*tokens(step))
        optimizer.zero_grad()
        momentum(0.1)
        second.backward()
        with torch.no_grad():
            for p, by in moved.items():
                p.sub_(by)
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "second order",
    "power iteration on inputs with statistics switched off, then the smoothness is added (virtual adversarial)",
)
def virtual_adversarial(t: Trial) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(TOKENS)

    model = Net([Normed(), Normed()])
    optimizer = adamw(model)
    norms = [block.norm for block in model.blocks]
    t.apply(model, optimizer)
    for step in range(3):
        x, y = tokens(step)
        with torch.no_grad():
            goal = model(x).softmax(-1)
        for norm in norms:
            norm.track_running_stats = False
        d = torch.randn_like(x).requires_grad_()
        apart = functional.kl_div(model(x + 1e-1 * d).log_softmax(-1), goal, reduction="batchmean")
        (d,) = torch.autograd.grad(apart, d)
        apart = functional.kl_div(
            model(x + functional.normalize(d, dim=-1)).log_softmax(-1), goal, reduction="batchmean"
        )
        for norm in norms:
            norm.track_running_stats = True
        loss = model(x, y) + 0.1 * apart
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "a teacher beside is pulled after the student by a hook before each of its forwards, foreach, in training only",
    only=EXACT,
)
def teacher_pulled_by_hook(t: Trial) -> None:
    student, teacher = Net(), Net()
    teacher.load_state_dict(student.state_dict())
    teacher.requires_grad_(False)
    t.track(teacher)

    def pull(model: nn.Module, _: tuple) -> None:
        if model.training:
            torch._foreach_lerp_([p.data for p in teacher.parameters()], [p.data for p in student.parameters()], 0.2)

    student.register_forward_pre_hook(pull)
    optimizer = adamw(student)
    t.apply(student, optimizer)
    for step in range(4):
        x, y = tokens(step)
        logits = student(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), y.flatten())
        with torch.no_grad():
            goal = teacher(x + 0.1)
        loss = loss + functional.mse_loss(logits, goal)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation", "each block pulls its teacher's block after it in a hook of its own, and adds what they differ by"
)
def block_teachers(t: Trial) -> None:
    model = Net()
    teachers = [Block().requires_grad_(False) for _ in model.blocks]
    differences: list[torch.Tensor] = []
    for block, teacher in zip(model.blocks, teachers, strict=True):
        teacher.load_state_dict(block.state_dict())
        t.track(teacher)

        def follow(module: nn.Module, given: tuple, out: torch.Tensor, teacher: nn.Module = teacher) -> None:
            with torch.no_grad():
                for mine, theirs in zip(teacher.parameters(), module.parameters(), strict=True):
                    mine.mul_(0.8).add_(theirs, alpha=0.2)
                goal = teacher(given[0])
            differences.append((out - goal).square().mean())

        block.register_forward_hook(follow)
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(4):
        differences.clear()
        loss = model(*tokens(step)) + sum(differences)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "parts",
    "rays sampled where an occupancy grid says; the grid is refreshed from the model now and then (radiance fields)",
    only=EXACT,
)
def occupancy_grid(t: Trial) -> None:
    class Field(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("grid", torch.ones(8))
            self.refreshed = 0

        @torch.no_grad()
        def refresh(self) -> None:
            self.grid = torch.maximum(
                self.grid * 0.7, self(torch.linspace(-1, 1, 8)[:, None].expand(8, WIDTH)).sigmoid()[:, 0]
            )
            self.refreshed += 1

        def render(self, rays: torch.Tensor) -> torch.Tensor:
            cell = ((rays[..., 0].tanh() + 1) * 4).long().clamp(max=7)
            hit = self.grid[cell] > 0.5 * self.grid.mean()
            values = torch.zeros(*rays.shape[:2], NUM_CLASSES)
            values[hit] = self(rays[hit])
            seen = 1 - torch.exp(-values[..., :1].relu())
            through = torch.cumprod(torch.cat([torch.ones_like(seen[:, :1]), 1 - seen + 1e-8], 1), 1)[:, :-1]
            return (seen * through * values[..., 1:4].sigmoid()).sum(1)

    model = Field()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(5):
        if step % 2 == 0:
            model.refresh()
        x, _ = tokens(step)
        loss = functional.mse_loss(model.render(x), torch.full((4, 3), 0.3))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("recomputation", "convolutions in a chain switch their dilation and padding by the step (hybrid dilation)")
def dilation_by_step(t: Trial) -> None:
    model = Images()

    def dilate(step: int) -> None:
        for layer in (model.chain[0], model.chain[2]):
            layer.dilation = layer.padding = (1 + step % 2, 1 + step % 2)

    train(t, model, batch=images, before=dilate, between=lambda step: dilate(step + 1))
