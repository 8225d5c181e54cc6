"""Where the program asks by identity whether a tensor's class is torch's own; what our own code asks is no answer."""

from pathlib import Path

import torch

import tightfit
from tightfit.effects.bytecode.class_questions import ClassQuestion
from tightfit.effects.users_code import FILES_OF_OURS
from tightfit.techniques.lazy_tensors import deferred_gradients


class Asks(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if type(x) is torch.Tensor else x + 1


class Plain(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        deferred_gradients.settle(x)
        return x


def test_the_line_is_found_once() -> None:
    model = Asks()
    question = ClassQuestion(model)
    assert question.line().startswith(f"{Path(__file__).name}:")
    assert not question.line()


def test_our_own_code_is_not_looked_at() -> None:
    # Wherever the file that asks lies within the package.
    assert Path(tightfit.__file__).parent == Path(FILES_OF_OURS)
    model = Plain()
    assert not ClassQuestion(model).line()
