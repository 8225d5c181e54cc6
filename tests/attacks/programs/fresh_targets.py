"""Losses with a memory, targets that are matched, caught failures, models that are averaged and grow: as scripts write them."""

import copy
from collections.abc import Callable

import torch
from tests.attacks.models import NUM_CLASSES, TOKENS, Block, Images, Net, adamw, images, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional


def _each(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none").view_as(y).mean(1)


def _halved(p: torch.Tensor) -> None:
    p.grad.mul_(0.5)


@attack(
    "recomputation",
    "a cache object is handed to each block, which appends its keys, and is truncated by the loop across steps",
)
def cache_across_steps(t: Trial) -> None:
    class Cache:
        def __init__(self) -> None:
            self.layers: dict[int, torch.Tensor] = {}

        def update(self, number: int, keys: torch.Tensor) -> torch.Tensor:
            both = torch.cat([self.layers[number], keys], 1) if number in self.layers else keys
            self.layers[number] = both
            return both

        def crop(self, length: int) -> None:
            self.layers = {n: k[:, -length:].detach() for n, k in self.layers.items()}

    class Cached(Block):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def forward(self, x: torch.Tensor, cache: Cache | None = None) -> torch.Tensor:
            keys = self.norm(x) if cache is None else cache.update(self.number, self.norm(x))
            return x + self.inner((x @ keys.transpose(1, 2)).softmax(-1) @ keys)

    class Segments(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, cache: Cache) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x, cache=cache)
            return self.loss(self.head(x), y)

    cache = Cache()
    model = Segments([Cached(0), Cached(1)], sequential=False)
    train(t, model, batch=lambda step: (*tokens(step), cache), after=lambda _: cache.crop(8))
    t.note("cache", list(cache.layers.values()))


@attack("gradients", "blocks whose gradient is too large are skipped by a full backward hook that counts on a buffer")
def large_gradients_stopped(t: Trial) -> None:
    model = Net()
    for block in model.blocks:
        block.register_buffer("stopped", torch.tensor(0))

        def limit(module: nn.Module, given: tuple, _: tuple) -> tuple | None:
            if float(given[0].norm()) > 0.16:
                module.stopped += 1
                return (given[0] * 0.5,)
            return None

        block.register_full_backward_hook(limit)
    train(t, model, num_steps=5)


@attack(
    "gradients", "dormant neurons, counted by hooks, are drawn anew with their moments set to zero (ReDo)", only=EXACT
)
def dormant_neurons(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    activity: dict[nn.Module, torch.Tensor] = {}

    def watch(module: nn.Module, _: tuple, out: torch.Tensor) -> None:
        if module.training:
            activity[module] = activity.get(module, 0) + out.detach().relu().mean((0, 1))

    for block in model.blocks:
        block.wide.register_forward_hook(watch)

    @torch.no_grad()
    def revive(step: int) -> None:
        if step % 2 == 0:
            return
        for block in model.blocks:
            score = activity.pop(block.wide)
            lazy = score <= score.sort().values[2]
            t.note("lazy", lazy)
            block.wide.weight[lazy] = torch.randn_like(block.wide.weight[lazy]) * 0.3
            block.narrow.weight[:, lazy] = 0.0
            for p, index in ((block.wide.weight, (lazy,)), (block.narrow.weight, (slice(None), lazy))):
                for key in ("exp_avg", "exp_avg_sq"):
                    optimizer.state[p][key][index] = 0.0

    train(t, model, optimizer, after=revive, num_steps=5)


@attack(
    "parts",
    "labelled and unlabelled images in one batch, guessed labels kept above a threshold that adapts (FixMatch)",
    only=EXACT,
)
def thresholded_guesses(t: Trial) -> None:
    class Semi(Images):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("threshold", torch.tensor(0.1))

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.chain(self.stem(x)).mean((2, 3)))
            labelled, weak, strong = logits.split([y.shape[0]] * 3)
            shares, guesses = weak.detach().softmax(-1).max(-1)
            self.threshold = 0.9 * self.threshold + 0.1 * shares.mean()
            sure = (shares >= self.threshold).to(x.dtype)
            unsupervised = (functional.cross_entropy(strong, guesses, reduction="none") * sure).mean()
            return functional.cross_entropy(labelled, y) + unsupervised

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        (x, y), (u, _) = images(step), images(step + 50)
        return torch.cat([x, u + 0.01, u.flip(-1)]), y

    train(t, Semi(), batch=batch)


@attack(
    "parts",
    "lists of boxes of any number, none too; matched greedily to queries after every block, summed by the number of boxes",
)
def matched_after_each_block(t: Trial) -> None:
    class Detector(Net):
        def match(self, logits: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            cost = -logits.detach().softmax(-1)[:, classes]
            goal = torch.full((logits.shape[0],), NUM_CLASSES - 1)
            for column in range(len(classes)):
                row = int(cost[:, column].argmin())
                goal[row] = classes[column]
                cost[row] = torch.inf
            return goal

        def forward(self, x: torch.Tensor, targets: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
            x = self.stem(x)
            count = max(1, sum(len(each["labels"]) for each in targets))
            losses = {}
            for number, block in enumerate(self.blocks):
                x = block(x)
                logits = self.head(x)
                goals = torch.stack(
                    [self.match(row, each["labels"]) for row, each in zip(logits, targets, strict=True)]
                )
                losses[f"loss_{number}"] = (
                    functional.cross_entropy(logits.flatten(0, 1), goals.flatten(), reduction="sum") / count
                )
            return losses

    model = Detector()
    model.returns_loss = False
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step)
        targets = [{"labels": row[: (step + n) % 4].clamp(max=NUM_CLASSES - 2)} for n, row in enumerate(y)]
        losses = model(x, targets if step != 2 else [{"labels": row[:0]} for row in y])
        loss = sum(losses.values())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        t.note("losses", losses)
        t.end_step()


@attack(
    "parts", "a target network is pulled and its queue filled at a pointer inside of the forward, keys shuffled (MoCo)"
)
def queue_with_pointer(t: Trial) -> None:
    class Contrast(Net):
        def __init__(self) -> None:
            super().__init__()
            self.keys = Net().requires_grad_(False)
            self.keys.load_state_dict(super().state_dict(), strict=False)
            self.register_buffer("queue", functional.normalize(torch.randn(8, NUM_CLASSES), dim=-1))
            self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

        def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            q = functional.normalize(self.head(self.features(x)).mean(1), dim=-1)
            with torch.no_grad():
                for mine, theirs in zip(self.keys.stem.parameters(), self.stem.parameters(), strict=True):
                    mine.data = mine.data * 0.9 + theirs.data * 0.1
                order = torch.randperm(x.shape[0])
                k = functional.normalize(self.keys(x[order] + 0.1).mean(1), dim=-1)[order.argsort()]
            logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().detach().t()], 1) / 0.2
            begin = int(self.pointer)
            self.queue[begin : begin + len(k)] = k
            self.pointer[0] = (begin + len(k)) % len(self.queue)
            return functional.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    train(t, Contrast())


@attack(
    "exceptions",
    "a batch that is too long raises in the middle of the blocks, and is cut and tried again in the same step",
)
def cut_and_tried_again(t: Trial) -> None:
    class Limited(Block):
        most = TOKENS

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] > self.most:
                raise ValueError("too long")
            return super().forward(x)

    model = Net([Block(), Limited()])
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(4):
        x, y = tokens(step, length=TOKENS + 2 * (step % 2))
        optimizer.zero_grad()
        try:
            loss = model(x, y)
            loss.backward()
        except ValueError as error:
            t.caught(error)
            for part in (slice(0, 4), slice(4, None)):
                loss = model(x[:, part], y[:, part]) / 2
                loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "exceptions",
    "a hook of a block raises in the backward pass of some batches, whose gradients are dropped or kept as they are",
)
def backward_given_up(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    step_now = [0]

    def check(_: nn.Module, __: tuple, given: tuple) -> None:
        if step_now[0] in (1, 3):
            raise FloatingPointError("not finite")

    model.blocks[0].register_full_backward_hook(check)
    t.apply(model, optimizer)
    for step in range(5):
        step_now[0] = step
        loss = model(*tokens(step))
        try:
            loss.backward()
        except FloatingPointError as error:
            t.caught(error)
            optimizer.zero_grad()
            t.end_step()
            continue
        optimizer.step()
        optimizer.zero_grad()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "the optimizer's parameters are moved to a new object and the old one is stepped once more by a scheduler's mistake",
    only=EXACT,
)
def two_optimizers_one_after_the_other(t: Trial) -> None:
    model = Net()
    first = sgd(model)
    t.apply(model, first)
    second = None
    for step in range(6):
        if step == 3:
            second = adamw(model)
            for p in model.parameters():
                second.state[p]["step"] = torch.tensor(5.0)
                second.state[p]["exp_avg"] = first.state[p]["momentum_buffer"].clone() * 0.1
                second.state[p]["exp_avg_sq"] = first.state[p]["momentum_buffer"].square()
        loss = model(*tokens(step))
        (second or first).zero_grad()
        loss.backward()
        (second or first).step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "gradients",
    "gradients of a penalty on attention of hidden states are taken inside a block's hook, once per step of four",
)
def penalty_by_retained_hidden(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    kept: list[torch.Tensor] = []
    model.blocks[1].register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    t.apply(model, optimizer)
    for step in range(4):
        kept.clear()
        loss = model(*tokens(step))
        if step % 2:
            (slope,) = torch.autograd.grad(loss, kept[0], create_graph=True)
            loss = loss + slope.square().sum() * 10
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.note("loss", loss)
        t.end_step()


@attack(
    "changes",
    "averaged models by torch with buffers, their batch norms updated by a pass over the data mid-run",
    only=EXACT,
)
def averaged_with_buffers(t: Trial) -> None:
    class Normed(Block):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(TOKENS)

    model = Net([Normed(), Normed()])
    optimizer = sgd(model)
    scheduler = torch.optim.swa_utils.SWALR(optimizer, swa_lr=0.01, anneal_epochs=2)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.8))
    t.track(average)
    t.apply(model, optimizer)

    def after(step: int) -> None:
        average.update_parameters(model)
        scheduler.step()
        if step == 2:
            torch.optim.swa_utils.update_bn([tokens(60)[0], tokens(61)[0]], average)

    train(t, model, optimizer, after=after, num_steps=5, applied=True)


@attack("gradients", "hooks on parameters scale their gradients by depth and are taken off when unfreezing is done")
def scaled_by_depth_then_not(t: Trial) -> None:
    model = Net([Block() for _ in range(3)])
    handles = [
        p.register_hook(lambda g, scale=0.5**depth: g * scale)
        for depth, block in enumerate(reversed(model.blocks))
        for p in block.parameters()
    ]
    later = [p.register_post_accumulate_grad_hook(_halved) for p in model.head.parameters()]

    def change(step: int) -> None:
        if step == 2:
            for handle in handles:
                handle.remove()
        if step == 3:
            for handle in later:
                handle.remove()

    train(t, model, adamw(model), before=change, num_steps=5)


@attack(
    "gradients", "layers see weights with noise for the forward, restored before the step (weight noise)", only=EXACT
)
def weights_noised_for_forward(t: Trial) -> None:
    model = Net()
    clean: dict[torch.Tensor, torch.Tensor] = {}

    @torch.no_grad()
    def noise(_: int) -> None:
        for p in model.parameters():
            clean[p] = p.clone()
            p.add_(torch.randn_like(p), alpha=0.02)

    @torch.no_grad()
    def restore(_: int) -> None:
        for p, value in clean.items():
            p.copy_(value)

    t.writes_within_step("")
    train(t, model, before=noise, between=restore)


@attack(
    "changes",
    "a model grows by identity blocks, its optimizer is given them as a group and old ones slow down (stacking)",
)
def stacked_twice(t: Trial) -> None:
    model = Net([Block()])
    optimizer = adamw(model)

    def grow(step: int) -> None:
        if step in (1, 3):
            new = copy.deepcopy(model.blocks[-1])
            nn.init.zeros_(new.narrow.weight)
            model.blocks.append(new)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            optimizer.add_param_group({"params": list(new.parameters()), "lr": 1e-2})

    train(t, model, optimizer, before=grow, num_steps=5)


def _sharpened(x: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x)


def _sharpened_by_counts(counts: list[int]) -> Callable[[torch.Tensor], torch.Tensor]:
    def sharpened(x: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return torch.tanh(x * (1 + 0.1 * counts[0]))

    return sharpened


@attack(
    "changes",
    "a function that blocks call is replaced in the script's globals by one that counts, and scales by its count",
)
def function_replaced_by_counting(t: Trial) -> None:
    class Sharp(Block):
        def inner(self, x: torch.Tensor) -> torch.Tensor:
            return _sharpened(super().inner(x))

    counts, before = [0], _sharpened

    def replace(step: int) -> None:
        globals()["_sharpened"] = _sharpened_by_counts(counts) if step >= 2 else before

    try:
        train(t, Net([Sharp(), Sharp()]), before=replace, num_steps=5)
    finally:
        globals()["_sharpened"] = before
    t.note("counts", counts)


@attack("changes", "the script puts its own gelu into torch.nn.functional, which counts its calls and scales by them")
def gelu_patched(t: Trial) -> None:
    counts, torchs = [0], functional.gelu

    def own(x: torch.Tensor) -> torch.Tensor:
        counts[0] += 1
        return torchs(x) * (1 + 0.1 * counts[0])

    def patch(step: int) -> None:
        functional.gelu = own if step in (1, 2) else torchs

    try:
        train(t, Net(), before=patch, num_steps=5)
    finally:
        functional.gelu = torchs
    t.note("counts", counts)


@attack(
    "gradients", "the optimizer's best state is kept by state_dict without a copy, and loaded when the loss has risen"
)
def best_state_kept_by_reference(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    kept = {}

    def keep(step: int) -> None:
        if step == 1:
            kept.update(model=model.state_dict(), optimizer=optimizer.state_dict())
        if step == 3:
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])

    train(t, model, optimizer, num_steps=6, after=keep)
    t.note("kept", list(kept["model"].values()))


@attack("gradients", "the optimizer's state is loaded from a deep copy, and once from itself in the same step")
def states_loaded_from_themselves(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)

    def keep(step: int) -> None:
        if step == 1:
            kept = copy.deepcopy(optimizer.state_dict())
            optimizer.load_state_dict(kept)
        if step == 2:
            optimizer.load_state_dict(optimizer.state_dict())

    train(t, model, optimizer, num_steps=5, after=keep)
