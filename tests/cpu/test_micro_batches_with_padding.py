"""Batches with padding in micro-batches: code that asks whether anything is padded goes by the whole batch, whatever its parts would answer."""

from collections.abc import Callable, Iterator

import pytest
import torch
from tests.cpu.module_training import Trained, assert_same, choice, train
from torch import nn
from torch.nn import functional

from tightfit.errors import ApplyError

WIDTH, LENGTH, BATCH = 4, 6, 5
Decide = Callable[["Masked", torch.Tensor, torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def in_double_precision() -> Iterator[None]:
    """So that another way through the code is told from rounding."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


class Masked(nn.Module):
    """A mean over what `decide` makes of hidden values and their mask."""

    def __init__(self, decide: Decide) -> None:
        super().__init__()
        self.first, self.last, self.decide = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), decide
        self.calls = 0

    def forward(self, values: torch.Tensor, mask: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return functional.mse_loss(self.last(self.decide(self, torch.tanh(self.first(values)), mask)), target)


def _masked(_: Masked, hidden: torch.Tensor, mask: torch.Tensor, scale: float = 0.5) -> torch.Tensor:
    # The ways differ by more than rounding, as those of other kernels would not.
    return hidden * mask[..., None] * scale


def _counted(model: Masked, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    model.calls += 1
    return hidden if mask.all() else hidden * (0.5 + model.calls)


def _two(model: Masked, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if not mask.all():
        hidden = _masked(model, hidden, mask)
    return hidden if mask[:, 2:].any() else hidden * 0.25


def _nested(model: Masked, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    if mask.all():
        return hidden
    return hidden * 0.1 if mask[:, 2:].all() else _masked(model, hidden, mask)


def _with_gradients(model: Masked, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    # A look at the whole without gradients would answer the second question where parts ask the first.
    if torch.is_grad_enabled() and hidden.isnan().any():
        return hidden * 0
    return _masked(model, hidden, mask) if (~mask).any() else hidden


def _norm_where_padded(model: Masked, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return hidden if mask.all() else hidden * (2 if hidden.detach().norm() > 2.8 else 1)


RIGHT: dict[str, Decide] = {
    "all": lambda m, h, mask: h if mask.all() else _masked(m, h, mask),
    "not all, as a function": lambda m, h, mask: _masked(m, h, mask) if not torch.all(mask).item() else h,
    "any that is padded": lambda m, h, mask: _masked(m, h, mask) if (~mask).any() else h,
    "the count is that of all": lambda m, h, mask: h if mask.sum() == mask.numel() else _masked(m, h, mask),
    "the count is less": lambda m, h, mask: _masked(m, h, mask) if mask.sum() < mask.numel() else h,
    "the count of a part": lambda m, h, mask: h if mask[:, 3:].sum() == mask[:, 3:].numel() else _masked(m, h, mask),
    "a count that is zero": lambda m, h, mask: h if (~mask).sum() == 0 else _masked(m, h, mask),
    "a count that is more than zero": lambda m, h, mask: _masked(m, h, mask) if (~mask).sum() > 0 else h,
    "two questions": _two,
    "a question within another": _nested,
    "a question that is asked with gradients alone": _with_gradients,
}
REFUSED: dict[str, tuple[Decide, str]] = {
    "a number of all": (lambda m, h, mask: h if mask.sum() == 2 * LENGTH else _masked(m, h, mask), "depends on the rows"),
    "a count of numbers": (lambda m, h, mask: h if mask.long().sum() == mask.numel() else _masked(m, h, mask), "other numbers"),
    "more than half": (lambda m, h, mask: h if mask.sum() > mask.numel() // 2 else _masked(m, h, mask), "other numbers|depends on"),
    "a count in the result": (lambda m, h, mask: h * (mask.sum() == mask.numel()), "along the rows"),
    "values are compared with the number of rows": (lambda m, h, mask: h * (h > len(h)), "other numbers"),
    "a count of calls": (_counted, "branches on values of the batch"),
}  # fmt: skip


def _batch(step: int, lengths: Callable[[int], list[int]]) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(step)
    mask = torch.arange(LENGTH)[None] < torch.tensor(lengths(step))[:, None]
    return torch.randn(BATCH, LENGTH, WIDTH), mask, torch.randn(BATCH, LENGTH, WIDTH)


def _mixed(step: int) -> list[int]:
    """The first examples have no padding; in the last step none has."""
    return [[6, 6, 6, 4, 2], [6, 2, 6, 6, 6], [2, 2, 1, 2, 2], [6] * 5, [6, 6, 6, 6, 3]][step]


def _trained(decide: Decide, num_parts: int, lengths: Callable[[int], list[int]] = _mixed) -> Trained:
    chosen = [choice("micro_batches", "batch", num_parts=num_parts, draws_anew=False)] if num_parts > 1 else ()
    return train(lambda: Masked(decide), lambda model, step: model(*_batch(step, lengths)), chosen, num_steps=5)


@pytest.mark.parametrize("num_parts", [2, 5])
@pytest.mark.parametrize("name", RIGHT)
def test_parts_are_led_by_what_the_whole_batch_decides(name: str, num_parts: int) -> None:
    assert_same(_trained(RIGHT[name], 1), _trained(RIGHT[name], num_parts), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_question_about_all_is_refused(name: str) -> None:
    decide, reason = REFUSED[name]
    with pytest.raises(ApplyError, match=reason):
        _trained(decide, 2)


@pytest.mark.parametrize("first", [[6, 6, 6, 4, 2], [2, 2, 2, 2, 2]])
def test_a_proof_of_parts_that_were_led_is_none_for_others(first: list[int]) -> None:
    # In the first step parts may be led in what they read of the rows too; in the next they would read it themselves.
    def lengths(step: int) -> list[int]:
        return first if step == 0 else [5] * BATCH

    plain = _trained(_norm_where_padded, 1, lengths)
    try:
        found = _trained(_norm_where_padded, 2, lengths)
    except ApplyError:
        return
    assert_same(plain, found, rtol=1e-9, atol=1e-12)
