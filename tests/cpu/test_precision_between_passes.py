"""Products whose precision the program sets otherwise for the forward than for the backward pass: each is rounded as in the plain run, or refused."""

import functools
from collections.abc import Iterator

import pytest
import torch
from tests.attacks.places import choice
from torch import nn
from torch.nn import functional

from tightfit.errors import ApplyError
from tightfit.runtime.apply import apply_choices

WIDTH, CLASSES, ROWS = 64, 96, 128
# What products in bfloat16 are off by here is a hundred times as much.
CLOSE = 2e-5


@functools.cache
def rounds_to_bfloat16() -> bool:
    """Whether this processor has products of float32 that are rounded to bfloat16."""
    one = torch.randn(ROWS, WIDTH)
    exact = one @ one.t()
    torch.set_float32_matmul_precision("medium")
    try:
        return not torch.equal(one @ one.t(), exact)
    finally:
        torch.set_float32_matmul_precision("highest")


@pytest.fixture(autouse=True)
def exact_products() -> Iterator[None]:
    """Tests leave the precision as it was."""
    yield
    torch.set_float32_matmul_precision("highest")


class Classifier(nn.Module):
    """A stem and a head; it returns its loss where it is given classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        logits = self.head(torch.tanh(self.stem(x)))
        return logits if y is None else functional.cross_entropy(logits, y)


def _gradients(
    *choices: tuple[str, str, dict[str, object]], order: tuple[str, str, str], whole: bool
) -> list[torch.Tensor]:
    """The gradients, with the precisions of the forward, of the backward pass, and of what comes after it."""
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    x, y = torch.randn(ROWS, WIDTH), torch.randint(0, CLASSES, (ROWS,))
    session = apply_choices([choice(n, w, **s) for n, w, s in choices], model, [optimizer]) if choices else None
    try:
        torch.set_float32_matmul_precision(order[0])
        if whole:
            loss = model(x, y)
            torch.set_float32_matmul_precision(order[1])
        else:
            logits = model(x)
            torch.set_float32_matmul_precision(order[1])
            loss = functional.cross_entropy(logits, y)
        loss.backward()
        torch.set_float32_matmul_precision(order[2])
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    finally:
        if session is not None:
            session.undo()


def _are_close(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.allclose(a, b, rtol=0, atol=CLOSE * float(a.abs().max())) for a, b in zip(one, other, strict=True))


IN_FORWARD, IN_BACKWARD = ({"num_chunks": 2, "gradients_in": where} for where in ("forward", "backward"))
UPDATES = ("update_in_backward", "optimizer", {"kernel": "same", "clips": False})


@pytest.mark.parametrize("whole", [True, False], ids=["loss in the forward", "loss beside the backward pass"])
@pytest.mark.parametrize(
    "order", [("medium", "highest", "highest"), ("highest", "medium", "highest")], ids=lambda each: each[0]
)
@pytest.mark.parametrize("settings", [IN_FORWARD, IN_BACKWARD], ids=["forward", "backward"])
def test_a_loss_in_chunks_rounds_each_product_as_the_plain_one(
    settings: dict[str, object], order: tuple[str, str, str], whole: bool
) -> None:
    if not rounds_to_bfloat16():
        pytest.skip("this processor has no products in bfloat16")
    plain = _gradients(order=order, whole=whole)
    assert not _are_close(plain, _gradients(order=("highest", "highest", "highest"), whole=whole))
    found = _gradients(("chunked_loss", "Classifier.head", settings), order=order, whole=whole)
    assert _are_close(plain, found)


def test_gradients_that_are_made_a_second_time_are_rounded_as_the_first() -> None:
    if not rounds_to_bfloat16():
        pytest.skip("this processor has no products in bfloat16")
    order = ("highest", "medium", "highest")
    assert _are_close(_gradients(order=order, whole=True), _gradients(UPDATES, order=order, whole=True))


def test_micro_batches_refuse_a_backward_pass_of_another_precision() -> None:
    parts = ("micro_batches", "batch", {"num_parts": 2, "draws_anew": False})
    with pytest.raises(ApplyError, match="precision was changed between forward and backward"):
        _gradients(parts, order=("medium", "highest", "highest"), whole=True)
