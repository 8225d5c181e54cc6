"""Gradients whose backward pass is gone: an optimizer is told before it writes to a weight, with whatever it begins."""

import pytest
import torch

from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.deferred_gradients import Deferred, defer_gradient
from tightfit.techniques.lazy_tensors.waiting_gradients import WaitingGradients


@pytest.mark.parametrize("settings", [{"foreach": True}, {"foreach": False}, {"fused": True}])
@pytest.mark.parametrize("lose", [lambda waiting: waiting.give_up("its plan has ended"), WaitingGradients.fail])
def test_no_weight_is_decayed_before_a_lost_gradient_is_read(settings, lose) -> None:
    plain, lost = (torch.nn.Parameter(torch.ones(4)) for _ in range(2))
    optimizer = torch.optim.AdamW([plain, lost], lr=0.1, weight_decay=0.5, **settings)
    plain.grad, lost.grad = torch.ones(4), torch.ones(4)
    deferred = Deferred(lost)
    defer_gradient(lost, deferred)
    waiting = WaitingGradients()
    waiting.add(lost, deferred)
    lose(waiting)
    with pytest.raises(ApplyError, match="a gradient is read"):
        optimizer.step()
    assert torch.equal(plain, torch.ones(4))
    assert torch.equal(lost, torch.ones(4))
