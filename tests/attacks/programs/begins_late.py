"""What begins only after the steps that are checked: state written through other names of its memory, schedules, and what is put in another's place."""

import contextlib
import copy
import functools
from collections.abc import Iterator

import numpy as np
import torch
from tests.attacks.models import NUM_CLASSES, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional

LATE = 4
STEPS = 7


class Clock:
    """The number of the step, as a training script has it at hand."""

    step = 0


def _tick(step: int) -> None:
    Clock.step = step


class Scaled(Block):
    """Multiplied by a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What a block does, and what it writes."""
        self.write()
        return super().forward(x) * self.scale

    def write(self) -> None:
        """Nothing yet."""


@attack("recomputation", "from step 4 on a block writes to its buffer through numpy's view of it", only=EXACT)
def late_numpy_view(t: Trial) -> None:
    class Viewed(Scaled):
        def write(self) -> None:
            if Clock.step >= LATE and self.training:
                self.scale.numpy()[:] *= 0.9

    train(t, Net([Viewed(), Viewed()]), num_steps=STEPS, before=_tick)


@attack("recomputation", "from step 4 on a block writes to its buffer through a tensor that came by DLPack", only=EXACT)
def late_dlpack_alias(t: Trial) -> None:
    class Shared(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.other_name = [torch.from_dlpack(self.scale)]

        def write(self) -> None:
            if Clock.step >= LATE:
                self.other_name[0].add_(0.1)

    train(t, Net([Shared(), Shared()]), num_steps=STEPS, before=_tick)


@attack("recomputation", "from step 4 on a block sets its buffer to another storage", only=EXACT)
def late_set(t: Trial) -> None:
    class Set(Scaled):
        def write(self) -> None:
            if Clock.step >= LATE:
                self.scale.set_((self.scale * 0.9).contiguous())

    train(t, Net([Set(), Set()]), num_steps=STEPS, before=_tick)


@attack(
    "recomputation",
    "from step 4 on two buffers change their places with torch.utils.swap_tensors in the forward",
    only=EXACT,
)
def late_swapped_buffers(t: Trial) -> None:
    class Swapped(Scaled):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("idle", torch.full((WIDTH,), 0.5))

        def write(self) -> None:
            if Clock.step >= LATE:
                torch.utils.swap_tensors(self.scale, self.idle)

    train(t, Net([Swapped(), Swapped()]), num_steps=STEPS, before=_tick)


@attack(
    "recomputation",
    "from step 4 on a running mean is kept under inference_mode, in a tensor that was made there",
    only=EXACT,
)
def late_inference_mean(t: Trial) -> None:
    class Centred(Block):
        def __init__(self) -> None:
            super().__init__()
            self.mean = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if Clock.step >= LATE:
                with torch.inference_mode():
                    now = x.detach().mean((0, 1))
                    if self.mean is None:
                        self.mean = now.clone()
                    else:
                        self.mean.lerp_(now, 0.1)
                with torch.no_grad():
                    mean = self.mean.clone()
                x = x - mean
            return super().forward(x)

    train(t, Net([Centred(), Centred()]), num_steps=STEPS, before=_tick)


@attack(
    "changes",
    "weights and their average change places with swap_tensors around an evaluation, between the passes and the step",
)
def average_swapped_in(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}

    @contextlib.contextmanager
    def averaged() -> Iterator[None]:
        for name, p in model.named_parameters():
            kept = p.data
            p.data = averages[name]
            averages[name] = kept
        yield
        for name, p in model.named_parameters():
            kept = p.data
            p.data = averages[name]
            averages[name] = kept

    for step in range(STEPS):
        loss = model(*tokens(step))
        if step >= LATE:
            with averaged(), torch.no_grad():
                t.note("evaluated", model(*tokens(40)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for name, p in model.named_parameters():
            averages[name].lerp_(p.detach(), 0.3)
        t.note("loss", loss)
        t.end_step()


@attack("changes", "dropout begins at step 4, by its rate alone", only=EXACT)
def late_dropout_rate(t: Trial) -> None:
    class Dropped(Block):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.0)

        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return self.drop(super().inner(x))

    model = Net([Dropped(), Dropped()])

    def schedule(step: int) -> None:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.1 * max(0, step - LATE + 1)

    train(t, model, num_steps=STEPS, before=schedule)


@attack("recomputation", "a temperature that numpy holds is annealed in the block itself, from step 4 on", only=EXACT)
def late_annealing_in_numpy(t: Trial) -> None:
    class Annealed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = np.ones(1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if Clock.step >= LATE:
                np.multiply(self.temperature, 0.9, out=self.temperature)
            return x + self.inner(x / float(self.temperature[0]))

    train(t, Net([Annealed(), Annealed()]), num_steps=STEPS, before=_tick)


@attack("parts", "padding comes with the last batches only, and the loss is the mean over what is none")
def late_padding(t: Trial) -> None:
    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = tokens(step)
        if step >= LATE:
            y[:3, 2:] = -100
        return x, y

    train(t, Net(), num_steps=STEPS, batch=batch)


@attack("parts", "examples get weights only from step 4 on, and the loss is their weighted mean", only=EXACT)
def late_example_weights(t: Trial) -> None:
    class Weighted(Net):
        weights = torch.ones(4)

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)
            weights = self.weights[: len(each)].to(each.dtype)
            return (each * weights).sum() / weights.sum()

    def schedule(step: int) -> None:
        Weighted.weights = torch.ones(4) if step < LATE else torch.tensor([3.0, 1.0, 0.5, 0.1])

    train(t, Weighted(), num_steps=STEPS, before=schedule)


@attack("changes", "a spike of the loss rolls model and optimizer back to a state that was kept in memory")
def rolled_back_on_a_spike(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    kept, best = None, float("inf")
    for step in range(STEPS):
        x, y = tokens(step)
        loss = model(x * (50 if step == 5 else 1), y)
        optimizer.zero_grad()
        loss.backward()
        if loss.item() > 3 * best and kept is not None:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(copy.deepcopy(kept[1]))
            optimizer.zero_grad()
        else:
            optimizer.step()
        best = min(best, loss.item())
        if step in (1, 3):
            kept = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
        t.note("loss", loss)
        t.end_step()


@attack("changes", "a learning-rate finder trains the model itself, restores it from a copy, and training begins")
def learning_rate_finder(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model, lr=1e-3)
    t.apply(model, optimizer)
    saved = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    found = []
    for trial in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 1e-3 * 3**trial
        loss = model(*tokens(trial))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
        t.end_step()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    t.note("found", found)
    for group in optimizer.param_groups:
        group["lr"] = 0.05
    train(t, model, optimizer, applied=True)


@attack(
    "changes",
    "three folds: each has a model and an optimizer of its own, made from a deep copy of one that is never trained",
)
def folds(t: Trial) -> None:
    template = Net()
    for fold in range(3):
        model = copy.deepcopy(template)
        optimizer = adamw(model)
        t.apply(model, optimizer)
        for step in range(3):
            loss = model(*tokens(10 * fold + step))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            t.note("loss", loss)
            t.end_step()


@attack("changes", "a head for new classes is added with its own group in the middle of the run")
def head_added(t: Trial) -> None:
    class Growing(Net):
        returns_loss = False

        def __init__(self) -> None:
            super().__init__()
            self.extra = None

        def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
            h = self.features(x)
            logits = self.head(h)
            if self.extra is not None:
                logits = torch.cat([logits, self.extra(h)], -1)
            return logits if y is None else functional.cross_entropy(logits.flatten(0, 1), y.flatten())

    model = Growing()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(STEPS):
        if step == LATE:
            model.extra = nn.Linear(WIDTH, 2)
            optimizer.add_param_group({"params": list(model.extra.parameters()), "lr": 0.05})
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("changes", "momentum and betas of the optimizer follow a cycle, from step 4 on weight decay too")
def cycled_momentum(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)

    def schedule(step: int) -> None:
        for group in optimizer.param_groups:
            group["betas"] = (0.95 - 0.02 * step, 0.99)
            group["lr"] = 0.01 * (1 + step % 3)
            if step >= LATE:
                group["weight_decay"] = 0.2

    train(t, model, optimizer, num_steps=STEPS, before=schedule, applied=True)


@attack("recomputation", "a table that lru_cache keeps for a length is written to in place from step 4 on", only=EXACT)
def late_cached_table(t: Trial) -> None:
    @functools.lru_cache(maxsize=8)
    def table(length: int) -> torch.Tensor:
        return torch.linspace(0, 1, length).unsqueeze(-1)

    class Placed(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            places = table(x.shape[1])
            if Clock.step >= LATE:
                places.mul_(0.8)
            return super().forward(x + places)

    train(t, Net([Placed(), Placed()]), num_steps=STEPS, before=_tick)


@attack(
    "recomputation",
    "a cached property holds the normalised weight of a step, and is dropped after it; from step 4 on seldom",
    only=EXACT,
)
def cached_property_seldom_dropped(t: Trial) -> None:
    class Cached(Block):
        def __init__(self) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.eye(WIDTH) + 0.1)

        @functools.cached_property
        def gate_now(self) -> torch.Tensor:
            return self.gate.detach() / self.gate.detach().norm()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) @ (self.gate_now + 0 * self.gate)

    model = Net([Cached(), Cached()])

    def drop(step: int) -> None:
        if step < LATE or step % 2:
            for block in model.blocks:
                block.__dict__.pop("gate_now", None)

    train(t, model, num_steps=STEPS, after=drop)


@attack(
    "changes",
    "stochastic depth whose rate grows with the step: the block is skipped by Python's own random numbers of a seeded Random",
    only=EXACT,
)
def stochastic_depth_with_own_random(t: Trial) -> None:
    import random

    class Skipped(Block):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.chance = random.Random(number)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            rate = max(0, Clock.step - 2) * 0.2
            if rate and self.training and self.chance.random() < rate:
                return x
            return super().forward(x)

    train(t, Net([Skipped(3), Skipped(4)]), num_steps=STEPS + 2, before=_tick)


@attack("changes", "a progressive net: a block is appended to the sequence at step 4, and its parameters to the group")
def progressive_growth(t: Trial) -> None:
    model = Net([Block()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(STEPS):
        if step == LATE:
            block = Block()
            model.blocks.append(block)
            optimizer.param_groups[0]["params"].extend(block.parameters())
        loss = model(*tokens(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "recomputation",
    "an activation that a block kept is written to through .data between the passes, from step 4 on",
    only=EXACT,
)
def late_kept_activation(t: Trial) -> None:
    class Keeping(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = functional.gelu(self.wide(self.norm(x)))
            self.kept = hidden
            return x + self.narrow(hidden)

    model = Net([Keeping(), Keeping()])
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(STEPS):
        loss = model(*tokens(step))
        if step >= LATE:
            for block in model.blocks:
                block.kept.data.mul_(0.5)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack("parts", "from step 4 on targets are mixed over the batch (mixup) within the loss", only=EXACT)
def late_mixup(t: Trial) -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            share = 0.3 if Clock.step >= LATE else 0.0
            x = (1 - share) * x + share * x.flip(0)
            logits = self.head(self.features(x)).flatten(0, 1)
            own, other = (functional.cross_entropy(logits, each.flatten()) for each in (y, y.flip(0)))
            return (1 - share) * own + share * other

    train(t, Mixed(), num_steps=STEPS, before=_tick)


@attack("parts", "from step 4 on a weight of the loss is the mean confidence over the batch, detached", only=EXACT)
def late_batch_confidence(t: Trial) -> None:
    class Confident(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            weight = 1.0
            if Clock.step >= LATE:
                weight = float(logits.detach().softmax(-1).amax(-1).mean())
            return each.mean() * weight

    train(t, Confident(), num_steps=STEPS, before=_tick)


@attack(
    "parts",
    "each token's weight in the loss is its own, but from step 4 on they are divided by their largest in numpy",
    only=EXACT,
)
def late_weights_in_numpy(t: Trial) -> None:
    class Focal(Net):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
            weights = (1 - (-each.detach()).exp()).numpy()
            if Clock.step >= LATE:
                weights = weights / weights.max()
            return (each * torch.from_numpy(weights)).mean()

    train(t, Focal(), num_steps=STEPS, before=_tick)


@attack(
    "changes",
    "modes flip per block: from step 4 on the first block is in eval mode, with batch norm inside",
    only=EXACT,
)
def late_eval_of_one_block(t: Trial) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.batch_norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(self.batch_norm(x.transpose(1, 2)).transpose(1, 2))

    model = Net([Normed(), Normed()])

    def schedule(step: int) -> None:
        model.blocks[0].train(step < LATE or step % 2 == 0)

    train(t, model, num_steps=STEPS, before=schedule)


@attack("parts", "a curriculum of lengths, and from step 4 on the last token attends to nothing but itself", only=EXACT)
def late_mask_of_one_token(t: Trial) -> None:
    class Attended(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            length = x.shape[1]
            mask = (
                torch.ones(length, length, dtype=torch.bool).tril() if Clock.step < LATE else torch.eye(length).bool()
            )
            y = functional.scaled_dot_product_attention(x, x, x, attn_mask=mask)
            return super().forward(x + y)

    train(
        t,
        Net([Attended(), Attended()]),
        num_steps=STEPS,
        before=_tick,
        batch=lambda step: tokens(step, length=4 + step // 2),
    )


@attack("gradients", "gradients that are not finite are set to zero by a hook that is put on each parameter at step 4")
def late_cleaning_hooks(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def hooks(step: int) -> None:
        if step == LATE:
            for p in model.parameters():
                p.register_hook(lambda g: torch.nan_to_num(g, nan=0.0).clamp(-0.01, 0.01))

    train(t, model, optimizer, num_steps=STEPS, before=hooks)


@attack("gradients", "hooks after accumulation log norms, and from step 4 on scale the gradients in place")
def late_post_accumulation(t: Trial) -> None:
    model = Net()
    norms = []

    def log(p: torch.Tensor) -> None:
        norms.append(float(p.grad.norm()))
        if Clock.step >= LATE:
            p.grad.mul_(0.5)

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(log)
    train(t, model, num_steps=STEPS, before=_tick, after=lambda _: (t.note("norms", sorted(norms)), norms.clear()))


@attack(
    "parts",
    "logits are biased by class counts that the loss itself updates over all examples, from step 4 on",
    only=EXACT,
)
def late_logit_adjustment(t: Trial) -> None:
    class Adjusted(Net):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("counts", torch.ones(NUM_CLASSES))

        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            if Clock.step >= LATE:
                self.counts += torch.bincount(y.flatten(), minlength=NUM_CLASSES).to(self.counts.dtype)
            return functional.cross_entropy((logits + self.counts.log()).flatten(0, 1), y.flatten())

    train(t, Adjusted(), num_steps=STEPS, before=_tick)
