"""Tests that leave a session on their model leave what it set in torch as well, which the next test must not meet."""

from collections.abc import Iterator

import pytest
import torch
from torch.nn.utils import clip_grad

_SET_BY_SESSIONS = (
    (torch.autograd, "_engine_run_backward"),
    (clip_grad, "_get_total_norm"),
    (clip_grad, "_clip_grads_with_norm_"),
)


@pytest.fixture(autouse=True)
def torch_as_it_was() -> Iterator[None]:
    """What sessions set in torch is put back after each test."""
    before = [getattr(owner, name) for owner, name in _SET_BY_SESSIONS]
    yield
    for (owner, name), value in zip(_SET_BY_SESSIONS, before, strict=True):
        setattr(owner, name, value)
