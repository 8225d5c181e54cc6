"""Training that takes another turn after the steps in which a plan is checked: padding, layers that join, losses that change, restarts."""

import copy
from collections.abc import Callable

import torch
from tests.attacks.models import BATCH, NUM_CLASSES, TOKENS, WIDTH, Block, Net, adamw, sgd, tokens, train
from tests.attacks.places import EXACT
from tests.attacks.registry import attack
from tests.attacks.trial import Trial
from torch import nn
from torch.nn import functional
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

LATE = 3
Padded = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class _Clocked(Net):
    """Knows the step, which `_clocked` sets."""

    now = 0


def _clocked(t: Trial, model: _Clocked, optimizer: torch.optim.Optimizer | None = None, **others: object) -> None:
    def before(step: int) -> None:
        model.now = step

    train(t, model, optimizer, num_steps=6, before=before, **others)  # type: ignore[arg-type]


class _Masked(Net):
    """Leaves the mask out where nothing is padded, as transformers' models do."""

    def __init__(self, is_full: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.is_full = is_full

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        scores = x @ x.transpose(1, 2)
        if not self.is_full(mask):
            scores = scores.masked_fill(~mask[:, None, :], -1e9)
        logits = self.head(self.blocks(scores.softmax(-1) @ x))
        return self.loss(logits, y.masked_fill(~mask, -100))


def _padded(step: int, lengths: list[int]) -> Padded:
    mask = torch.arange(TOKENS) < torch.tensor(lengths)[:, None]
    return *tokens(step), mask


@attack("parts", "padded batches, of which one half has no padding, and code that asks whether there is any")
def padded_by_halves(t: Trial) -> None:
    lengths = [[6, 6, 4, 2], [2, 6, 6, 6], [6, 6, 6, 6], [3, 2, 2, 1]]
    train(t, _Masked(torch.all), batch=lambda step: _padded(step, lengths[step]))


@attack("parts", "the same, asked by the count of what is no padding; batches are padded from step 4 on")
def padded_by_halves_late(t: Trial) -> None:
    def batch(step: int) -> Padded:
        return _padded(step, [6, 6, 6, 6] if step < LATE else [6, 6, 3, step])

    train(t, _Masked(lambda mask: mask.sum() == mask.numel()), num_steps=6, batch=batch)


@attack(
    "parts", "a loss whose mean over what is no padding is taken over the number of the whole batch, given as an int"
)
def divided_by_given_number(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, num_items: int) -> torch.Tensor:
            logits = self.head(self.features(x)).flatten(0, 1)
            return functional.cross_entropy(logits, y.flatten(), reduction="sum", ignore_index=-100) / num_items

    def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        x, y = tokens(step)
        y[0, : step if step >= LATE else 0] = -100
        return x, y, int((y != -100).sum())

    train(t, Model(), num_steps=6, batch=batch)


@attack(
    "parts", "a table of prototypes beside the batch, which from step 4 on has as many rows as the batch has examples"
)
def as_many_prototypes_as_examples(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, prototypes: torch.Tensor) -> torch.Tensor:
            hidden = self.features(x)
            return self.loss(self.head(hidden), y) + 0.1 * (hidden.reshape(-1, WIDTH) @ prototypes.T).square().mean()

    table = tokens(50)[0].flatten(0, 1)[: BATCH + 1]
    train(t, Model(), num_steps=6, batch=lambda step: (*tokens(step, batch=BATCH if step < LATE else BATCH + 1), table))


@attack("parts", "class weights come with the batch, which from step 4 on has as many examples as there are classes")
def as_many_examples_as_classes(t: Trial) -> None:
    class Model(Net):
        def forward(self, x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            logits = self.head(self.features(x)).flatten(0, 1)
            return functional.cross_entropy(logits, y.flatten(), weight=weight)

    weight = torch.linspace(0.5, 1.5, NUM_CLASSES)
    train(
        t, Model(), num_steps=6, batch=lambda step: (*tokens(step, batch=BATCH if step < LATE else NUM_CLASSES), weight)
    )


@attack("parts", "from step 4 on the loss is the mean over the hardest half of the tokens")
def hardest_tokens_late(t: Trial) -> None:
    class Model(_Clocked):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            each = functional.cross_entropy(logits.reshape(-1, NUM_CLASSES), y.reshape(-1), reduction="none")
            return each.mean() if self.now < LATE else each.topk(len(each) // 2).values.mean()

    _clocked(t, Model())


@attack("parts", "from step 4 on the size of all weights is added to a loss that is a sum over the batch")
def weights_in_a_sum_late(t: Trial) -> None:
    class Model(_Clocked):
        def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            total = functional.cross_entropy(logits.reshape(-1, NUM_CLASSES), y.reshape(-1), reduction="sum") / 20
            return total if self.now < LATE else total + 0.1 * sum(p.square().sum() for p in self.parameters())

    _clocked(t, Model())


class _Stacked(_Clocked):
    """More blocks with each second step."""

    def __init__(self) -> None:
        super().__init__([Block() for _ in range(4)], sequential=False)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in list(self.blocks)[: 1 + self.now // 2]:
            x = block(x)
        return x


@attack("recomputation", "blocks are stacked on while it trains, with momentum")
def stacked_progressively(t: Trial) -> None:
    _clocked(t, _Stacked())


@attack("recomputation", "the program's own checkpoints are switched on at step 4")
def own_checkpoints_late(t: Trial) -> None:
    class Model(_Clocked):
        def __init__(self) -> None:
            super().__init__(sequential=False)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = block(x) if self.now < LATE else checkpoint(block, x, use_reentrant=False)
            return x

    _clocked(t, Model())


@attack("recomputation", "two forwards within parametrize.cached() from step 4 on, with parametrizations that count")
def parametrizations_cached_late(t: Trial) -> None:
    class Squashed(nn.Module):
        calls = 0

        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return 1.1 * weight.tanh()

    model = Net()
    for block in model.blocks:
        parametrize.register_parametrization(block.wide, "weight", Squashed())
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        optimizer.zero_grad()
        if step < LATE:
            loss = model(*tokens(step))
            loss.backward()
        else:
            with parametrize.cached():
                loss = model(*tokens(step)) + model(*tokens(step + 50))
                loss.backward()
        t.note("loss", loss)
        optimizer.step()
        t.end_step()


class _LeavesOneOut(_Clocked):
    def __init__(self) -> None:
        super().__init__([Block() for _ in range(3)], sequential=False)

    def features(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for number, block in enumerate(self.blocks):
            if number != 1 or self.now < LATE:
                x = block(x)
        return x


@attack("gradients", "a block is left out from step 4 on, when gradients begin to be zeroed in place: it decays on")
def left_out_and_zeroed(t: Trial) -> None:
    model = _LeavesOneOut()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.5)
    t.apply(model, optimizer)
    for step in range(6):
        model.now = step
        loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad(set_to_none=step < LATE)
        loss.backward()
        optimizer.step()
        t.end_step()
    t.note("steps", [float(optimizer.state[p]["step"]) for p in model.parameters()])


@attack("gradients", "a block is left out from step 4 on, and nobody clears its last gradient: it goes on")
def left_out_and_not_zeroed(t: Trial) -> None:
    model = _LeavesOneOut()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(6):
        model.now = step
        for name, parameter in model.named_parameters():
            if step < LATE or "blocks.1" not in name:
                parameter.grad = None
        loss = model(*tokens(step))
        t.note("loss", loss)
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("gradients", "a step whose loss is three times the mean so far is left out (from step 4 on there are some)")
def vetoed_by_loss_late(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    seen: list[float] = []
    for step in range(7):
        x, y = tokens(step)
        loss = model(30 * x if step in (4, 6) else x, y)
        t.note("loss", loss)
        optimizer.zero_grad()
        if not seen or loss.item() <= 3 * sum(seen) / len(seen):
            seen.append(loss.item())
            loss.backward()
            optimizer.step()
        t.end_step()


@attack("gradients", "from step 4 on the loss is divided by what it is, and flooded")
def flooded_late(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    for step in range(6):
        plain = model(*tokens(step))
        loss = plain if step < LATE else plain / plain.detach() + (plain - 1.5).abs()
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack("second order", "from step 4 on the loss has a derivative in forward mode beside it")
def forward_mode_late(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    for step in range(5):
        x, y = tokens(step)
        loss = model(x, y)
        if step >= LATE:
            loss = loss + 0.1 * torch.func.jvp(model, (x,), (torch.ones_like(x),))[1].square().mean()
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        t.end_step()


@attack(
    "changes", "at step 5 the weights become their average and moments are dropped, and training goes on from there"
)
def restarted_from_average(t: Trial) -> None:
    model = Net()
    optimizer = adamw(model)
    t.apply(model, optimizer)
    average = torch.optim.swa_utils.AveragedModel(model)
    for step in range(7):
        loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average.update_parameters(model)
        if step == LATE + 1:
            model.load_state_dict(average.module.state_dict())
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        t.end_step()


@attack("changes", "a layer is made anew at step 4, and a copy from before it goes on being evaluated", only=EXACT)
def made_anew_beside_a_copy(t: Trial) -> None:
    model = Net()
    optimizer = sgd(model)
    t.apply(model, optimizer)
    before = None
    for step in range(6):
        if step == LATE:
            before = copy.deepcopy(model)
            model.blocks[1].wide.reset_parameters()
        loss = model(*tokens(step))
        t.note("loss", loss)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if before is not None:
            with torch.no_grad():
                t.note("before", before(*tokens(step)))
        t.end_step()
