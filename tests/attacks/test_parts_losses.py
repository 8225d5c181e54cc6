"""Losses of many forms in parts of the batch: what is linear in means or sums over the examples is trained as the plain run trains it, all else refused."""

from collections.abc import Callable

import pytest
import torch
from tests.attacks.places import choice
from tests.sampled import every_second
from torch import nn
from torch.nn import functional

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices

pytestmark = pytest.mark.usefixtures("in_double_precision")
WIDTH, LENGTH, BATCH, CLASSES, STEPS = 4, 3, 6, 5, 3
Loss = Callable[["Net", torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    """Returns `function(self, scores, classes)`, where scores are `(B, T, C)` and classes `(B, T)`."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.scale = nn.Parameter(torch.tensor(0.3))
        self.register_buffer("weights", torch.linspace(0.5, 1.5, CLASSES))
        self.function = function
        self.at = 0

    def forward(self, values: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return self.function(self, self.head(torch.tanh(self.stem(values))), classes)


def entropy(scores: torch.Tensor, classes: torch.Tensor, **settings: object) -> torch.Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), classes.flatten(), **settings)


def each(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return entropy(scores, classes, reduction="none").view(classes.shape)


def likelihoods(scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return scores.log_softmax(-1).gather(-1, classes.unsqueeze(-1)).squeeze(-1)


def _added_in_place(net: Net, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    total = torch.zeros(())
    for weight in (1.0, 0.5):
        total += weight * entropy(scores, classes)
    return total


def _written(net: Net, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    losses = torch.zeros(3)
    losses[0] = entropy(scores, classes)
    losses[1] = scores.square().mean()
    return losses.sum()


RIGHT: dict[str, Loss] = {
    "a mean": lambda net, s, y: entropy(s, y),
    "negated": lambda net, s, y: -entropy(s, y),
    "one minus": lambda net, s, y: 1 - entropy(s, y),
    "times a constant and more": lambda net, s, y: 2.5 * entropy(s, y) / 3 + 0.25,
    "two means": lambda net, s, y: entropy(s, y) + 0.1 * functional.mse_loss(s, torch.ones_like(s)),
    "a mean and one by hand": lambda net, s, y: entropy(s, y) - 0.1 * s.square().mean(),
    "built-in sum of a list": lambda net, s, y: sum([entropy(s, y), entropy(2 * s, y), s.abs().mean()]),
    "stacked": lambda net, s, y: torch.stack([entropy(s, y), s.abs().mean()]).mean(),
    "stacked and weighted": lambda net, s, y: (torch.stack([entropy(s, y), s.abs().mean()]) * net.weights[:2]).sum(),
    "added in place": _added_in_place,
    "written into zeros": _written,
    "a learned weight": lambda net, s, y: entropy(s, y) * torch.exp(-net.scale) + net.scale,
    "a penalty on weights": lambda net, s, y: entropy(s, y) + 0.01 * net.head.weight.square().sum(),
    "a mean over tokens first": lambda net, s, y: each(s, y).mean(1).mean(),
    "a mean over examples first": lambda net, s, y: each(s, y).mean(0).sum(),
    "a mean for each class": lambda net, s, y: (s.square().mean((0, 1)) * net.weights).sum(),
    "gathered": lambda net, s, y: -likelihoods(s, y).mean(),
    "a sum": lambda net, s, y: entropy(s, y, reduction="sum"),
    "a sum, by a constant": lambda net, s, y: entropy(s, y, reduction="sum") / 100,
    "two sums": lambda net, s, y: -likelihoods(s, y).sum() + 0.1 * s.square().sum(),
    "a sum, by the number of examples": lambda net, s, y: each(s, y).sum() / len(y),
    "a sum, by the number as a real one": lambda net, s, y: each(s, y).sum() / float(y.shape[0]),
    "a sum, by the number of tokens": lambda net, s, y: -likelihoods(s, y).sum() / y.numel(),
    "batchmean": lambda net, s, y: functional.kl_div(
        s.log_softmax(-1), torch.full_like(s, 1 / CLASSES), reduction="batchmean"
    ),
    "class weights": lambda net, s, y: entropy(s, y, weight=net.weights),
    "targets that are ignored": lambda net, s, y: entropy(s, y, ignore_index=0),
    "a clone that is cast": lambda net, s, y: entropy(s, y).clone().to(torch.float32),
    "a mean that is kept for the log": lambda net, s, y: (setattr(net, "seen", None), entropy(s, y))[1],
}
REFUSED: dict[str, Loss] = {
    "squared": lambda net, s, y: entropy(s, y) ** 2,
    "times itself": lambda net, s, y: entropy(s, y) * entropy(s, y).detach(),
    "times another mean": lambda net, s, y: entropy(s, y) * s.abs().mean(),
    "by another mean": lambda net, s, y: entropy(s, y) / s.abs().mean(),
    "its exponential": lambda net, s, y: entropy(s, y).exp(),
    "its root": lambda net, s, y: s.square().mean().sqrt(),
    "its absolute value": lambda net, s, y: (entropy(s, y) - 1).abs(),
    "the larger of two": lambda net, s, y: torch.maximum(entropy(s, y), s.abs().mean()),
    "one over it": lambda net, s, y: 1 / entropy(s, y),
    "clamped": lambda net, s, y: entropy(s, y).clamp(max=1.2),
    "rounded": lambda net, s, y: entropy(s, y) + s.mean().to(torch.int32),
    "a sum and a constant": lambda net, s, y: each(s, y).sum() + 1.0,
    "a sum and a penalty": lambda net, s, y: each(s, y).sum() + net.head.weight.square().sum(),
    "a sum and a mean": lambda net, s, y: each(s, y).sum() + s.abs().mean(),
    "a sum in a list with zeros": lambda net, s, y: torch.stack([each(s, y).sum(), net.scale]).sum(),
    "a sum that is added to a constant in place": lambda net, s, y: torch.ones(()).add_(each(s, y).sum()),
    "a mean by the number of examples": lambda net, s, y: entropy(s, y) / len(y),
    "a mean times the number of examples": lambda net, s, y: entropy(s, y) * len(y),
    "rows by the number of examples": lambda net, s, y: entropy(s / len(y), y),
    "a sum, twice by the number": lambda net, s, y: each(s, y).sum() / len(y) / len(y),
    "a mean for each example": lambda net, s, y: entropy(s, y).expand(len(y)).sum(),
    "a mean with as many weights": lambda net, s, y: (entropy(s, y) * torch.ones(len(y))).sum(),
    "means under other weights": lambda net, s, y: (
        entropy(s, y, ignore_index=0) + entropy(s, y, weight=net.weights) + s.abs().mean()
    ),
    "a norm": lambda net, s, y: s.norm(),
    "a variance": lambda net, s, y: s.var(),
    "a median": lambda net, s, y: each(s, y).median(),
    "the maximum": lambda net, s, y: each(s, y).max(),
    "the logarithm of a mean": lambda net, s, y: -likelihoods(s, y).exp().mean().log(),
    "a mean of those above the mean": lambda net, s, y: functional.relu(each(s, y) - each(s, y).mean()).mean(),
    "a quotient of sums": lambda net, s, y: each(s, y).sum() / (y > 0).sum(),
}


def _train(function: Loss, choices: list[Choice], num_examples: Callable[[int], int]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Net(function)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen = []
    with apply_choices(choices, model, [optimizer]):
        for step in range(STEPS):
            chance = torch.Generator().manual_seed(step)
            size = num_examples(step)
            values = torch.randn(size, LENGTH, WIDTH, generator=chance)
            classes = torch.randint(0, CLASSES, (size, LENGTH), generator=chance)
            optimizer.zero_grad()
            loss = model(values, classes)
            loss.backward()
            optimizer.step()
            seen.append(loss.detach())
        return [*seen, *(p.detach().clone() for p in model.parameters())]


def _parts(num_parts: int) -> list[Choice]:
    return [choice("micro_batches", "batch", num_parts=num_parts, draws_anew=False)]


@pytest.mark.by_turns(2)
@pytest.mark.parametrize("name", every_second(RIGHT))
def test_what_is_linear_in_means_or_sums_is_right_for_parts_of_any_size(name: str) -> None:
    sizes = [BATCH, BATCH - 1, BATCH]
    for plain, other in zip(
        _train(RIGHT[name], [], sizes.__getitem__), _train(RIGHT[name], _parts(4), sizes.__getitem__), strict=True
    ):
        torch.testing.assert_close(other, plain, rtol=1e-6 if plain.dtype == torch.float32 else 1e-9, atol=1e-7)


@pytest.mark.parametrize("name", every_second(REFUSED))
def test_what_is_not_is_refused_before_anything_is_trained(name: str) -> None:
    with pytest.raises(ApplyError) as told:
        _train(REFUSED[name], _parts(2), lambda step: BATCH)
    assert "\n" not in str(told.value)


LATER: dict[str, Loss] = {
    "squared": lambda net, s, y: entropy(s, y) if net.at < 2 else entropy(s, y) ** 2,
    "another number": lambda net, s, y: entropy(s, y) if net.at < 2 else s.var(),
    "labels that are ignored": lambda net, s, y: entropy(s, y, ignore_index=-100 if net.at < 2 else 0) + s.mean(),
}


def _check_whole(model: nn.Module, values: torch.Tensor, classes: torch.Tensor) -> None:
    """A batch runs whole, as one does where no gradients are asked for."""
    with torch.no_grad():
        expected = model(values, classes)
    model.zero_grad()
    loss = model(values, classes)
    assert loss.grad_fn is not None and "_Joined" not in loss.grad_fn.name()
    torch.testing.assert_close(loss.detach(), expected)
    loss.backward()


@pytest.mark.parametrize("name", LATER)
def test_a_loss_that_is_no_mean_only_later_is_refused_then_or_runs_whole(name: str) -> None:
    torch.manual_seed(0)
    model = Net(LATER[name])
    values, classes = torch.randn(BATCH, LENGTH, WIDTH), torch.randint(1, CLASSES, (BATCH, LENGTH))
    classes[0] = 0
    with apply_choices(_parts(2), model, [torch.optim.SGD(model.parameters(), lr=0.1)]):
        for model.at in range(2):
            model(values, classes).backward()
        model.at = 2
        if name != "labels that are ignored":
            _check_whole(model, values, classes)
            return
        # Its shares are known when parts have been trained on.
        with pytest.raises(ApplyError):
            model(values, classes)


def test_means_over_labels_are_added_up_where_every_part_has_its_share_and_refused_where_not() -> None:
    def loss(net: Net, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        return entropy(scores, classes, ignore_index=0) + scores.square().mean()

    torch.manual_seed(0)
    model = Net(loss)
    values = torch.randn(4, LENGTH, WIDTH)
    even = torch.tensor([[1, 2, 0], [3, 1, 1], [1, 0, 1], [4, 2, 2]])
    model(values, even).backward()
    expected = [p.grad for p in model.parameters()]
    with apply_choices(_parts(2), model, [torch.optim.SGD(model.parameters(), lr=0.1)]):
        model.zero_grad()
        model(values, even).backward()
        for found, wanted in zip(model.parameters(), expected, strict=True):
            torch.testing.assert_close(found.grad, wanted)
        uneven = even.clone()
        uneven[0] = 0
        with pytest.raises(ApplyError, match="their shares differ between parts"):
            model(values, uneven)


def test_a_branch_that_a_later_batch_takes_is_proved_as_well_and_runs_whole() -> None:
    def loss(net: Net, scores: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
        if (classes == 0).any():
            scores = scores - scores.mean(0, keepdim=True)
        return entropy(scores, classes)

    model = Net(loss)
    values = torch.randn(4, LENGTH, WIDTH)
    with apply_choices(_parts(2), model, [torch.optim.SGD(model.parameters(), lr=0.1)]):
        model(values, torch.ones(4, LENGTH, dtype=torch.long)).backward()
        _check_whole(model, values, torch.zeros(4, LENGTH, dtype=torch.long))
