"""Rows of scores that are masked whole: what the numbers in them say is what the program gets, in the loss and in every gradient."""

import math
from collections.abc import Callable

import pytest
import torch
from tests.cpu.applied import choice
from torch import nn

from tightfit.runtime.apply import apply_choices

BATCH, TOKENS, WIDTH = 2, 6, 8
INFINITY = float("inf")
Masked = Callable[[torch.Tensor], torch.Tensor]


class Attending(nn.Module):
    def __init__(self, masked: Masked) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.masked = masked

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Tokens that have looked at each other."""
        scores = self.query(x) @ self.key(x).transpose(-2, -1) / math.sqrt(WIDTH)
        return x + self.masked(scores) @ self.value(x)


def trained(masked: Masked, *techniques: str) -> list[torch.Tensor]:
    """The loss and the gradients of three passes."""
    torch.manual_seed(0)
    model = nn.Sequential(Attending(masked), Attending(masked)).double()
    choices = [choice("attention", "attention", modules=["Sequential.0", "Sequential.1"])] if techniques else []
    for each in techniques[1:]:
        settings = {"keep": [0, 3]} if each == "selective_checkpointing" else {}
        choices += [choice(each, f"Sequential.{n}", **settings) for n in range(2)]
    session = apply_choices(choices, model, []) if choices else None
    seen = []
    for _ in range(3):
        loss = model(torch.randn(BATCH, TOKENS, WIDTH, dtype=torch.double)).square().mean()
        seen += [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))]
    if session is not None:
        session.undo()
    return seen


def hidden(*rows: int) -> torch.Tensor:
    mask = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    mask[list(rows)] = True
    return mask


PADDED = (torch.arange(TOKENS) < 2).expand(BATCH, 1, TOKENS)
LOWEST = torch.finfo(torch.float32).min

FORMS: dict[str, Masked] = {
    "a large number": lambda s: s.masked_fill(hidden(0, 3), -1e9).softmax(-1),
    "the lowest number": lambda s: s.masked_fill(hidden(0), torch.finfo(s.dtype).min).softmax(-1),
    "by where": lambda s: torch.where(~hidden(2), s, -1e9).softmax(-1),
    "in place": lambda s: s.masked_fill_(hidden(2), -1e9).softmax(-1),
    "causal, then padding at the front": lambda s: s.masked_fill(hidden(), -1e9).masked_fill(PADDED, -1e9).softmax(-1),
    "two numbers": lambda s: s.masked_fill(hidden(), -1e9).masked_fill(PADDED, -2e9).softmax(-1),
    "the larger number last": lambda s: s.masked_fill(hidden(4), -2e9).masked_fill(PADDED, -1e9).softmax(-1),
    "infinity, then a number": lambda s: s.masked_fill(hidden(), -INFINITY).masked_fill(PADDED, -1e9).softmax(-1),
    "an added number": lambda s: (s + hidden(1).double() * -1e9).softmax(-1),
    "an added lowest number": lambda s: (s + hidden(1).double() * LOWEST).softmax(-1),
    "an added number that swallows little": lambda s: (s + hidden(1).double() * -1e6).softmax(-1),
    "added twice": lambda s: (s + hidden(1).double() * LOWEST + PADDED.double() * LOWEST).softmax(-1),
    "added and taken back": lambda s: (s + hidden(1).double() * -1e9 + hidden(1).double() * 1e9).softmax(-1),
    "filled and taken back": lambda s: (s.masked_fill(hidden(1), -1e9) + hidden(1).double() * 1e9).softmax(-1),
    "filled, then some added": lambda s: (s.masked_fill(hidden(1), -1e9) + torch.arange(6.0).double()).softmax(-1),
    "a large number for a whole row": lambda s: (s + torch.arange(6.0).double()[:, None] * 1e9).softmax(-1),
    "a mask of rows": lambda s: s.masked_fill(torch.arange(TOKENS)[:, None] < 2, -1e9).softmax(-1),
    "a mask of columns": lambda s: s.masked_fill(torch.arange(TOKENS) < 2, -1e9).softmax(-1),
    "all of it": lambda s: s.masked_fill(torch.tensor(True), -1e9).softmax(-1),
    "infinity": lambda s: s.masked_fill(hidden(2), -INFINITY).softmax(-1),
    "added infinity": lambda s: (s + torch.zeros(TOKENS, TOKENS).masked_fill(hidden(2), -INFINITY)).softmax(-1),
    "no number": lambda s: (s + torch.full((TOKENS, TOKENS), -INFINITY).masked_fill(~hidden(2), math.nan)).softmax(-1),
    "half of its range": lambda s: s.masked_fill(hidden(2), -1e300).softmax(-1, dtype=torch.float32).double(),
}


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_are_masked_whole_weigh_as_their_numbers_say(form: str) -> None:
    for found, plain in zip(trained(FORMS[form], "attention"), trained(FORMS[form]), strict=True):
        torch.testing.assert_close(found, plain, equal_nan=True, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("technique", ["checkpointing", "selective_checkpointing"])
@pytest.mark.parametrize("form", ["a large number", "infinity", "added twice", "causal, then padding at the front"])
def test_a_block_that_is_run_again_looks_at_its_rows_again(technique: str, form: str) -> None:
    for found, plain in zip(trained(FORMS[form], "attention", technique), trained(FORMS[form]), strict=True):
        torch.testing.assert_close(found, plain, equal_nan=True, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("value", [-1e9, -INFINITY])
def test_rows_that_see_something_still_go_to_the_kernel(value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    called = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        called.append(1)
        return kernel(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    trained(lambda s: s.masked_fill(hidden(), value).softmax(-1), "attention")
    assert len(called) == 6


def test_rows_filled_with_one_number_go_to_the_kernel_even_where_they_are_masked_whole(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    called = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def counted(*args: object, **kwargs: object) -> torch.Tensor:
        called.append(1)
        return kernel(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", counted)
    trained(FORMS["causal, then padding at the front"], "attention")
    assert len(called) == 6


def test_what_kernels_read_is_forgotten_with_graphs_that_the_program_always_retains() -> None:
    model = nn.Sequential(Attending(FORMS["a large number"]))
    session = apply_choices([choice("attention", "attention", modules=["Sequential.0"])], model, [])
    kernels = vars(model[0])["forward"].around._kernels
    for _ in range(9):
        model(torch.randn(BATCH, TOKENS, WIDTH)).square().mean().backward(retain_graph=True)
        model(torch.randn(BATCH, TOKENS, WIDTH))
    assert len(kernels._calls) < 4
    session.undo()
