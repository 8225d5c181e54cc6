"""Offloaders of other libraries on the virtual GPU: what they put into pinned host memory, and their copies, are seen as those of our own."""

from collections.abc import Iterator

import pytest
import torch

from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import trace
from tightfit.tape import CopyDirection

SIZE = 1 << 22


def hooks() -> Iterator[torch.Tensor]:
    """Saved tensors in pinned memory, made as torchtune and TRL make it."""
    rows = torch.randn(1024, SIZE // 4096, device="cuda", requires_grad=True)

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        there = torch.empty_like(tensor, device="cpu", pin_memory=True)
        assert there.is_pinned() and there.stride() == tensor.stride()
        return there.copy_(tensor, non_blocking=True)

    while True:
        doubled = rows * 2
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda there: there.to("cuda", non_blocking=True)):
            loss = doubled.square().sum()
        loss.backward()
        rows.grad = None
        yield loss


def optimizer() -> Iterator[torch.Tensor]:
    """Gradients to pinned memory and weights back, as torchao does it, with the update on the host."""
    weight = torch.randn(1024, SIZE // 4096, device="cuda", requires_grad=True)
    there = torch.empty_like(weight, device="cpu", pin_memory=True)
    there.grad = torch.zeros_like(there, pin_memory=True)
    there.copy_(weight.detach(), non_blocking=True)
    stepper = torch.optim.AdamW([there], fused=True)
    while True:
        loss = weight.square().sum()
        loss.backward()
        assert weight.grad is not None
        there.grad.copy_(weight.grad, non_blocking=True)
        torch.cuda.synchronize()
        stepper.step()
        with torch.no_grad():
            weight.copy_(there, non_blocking=True)
        weight.grad = None
        yield loss


@pytest.mark.parametrize(("function", "pinned", "to_host", "to_card"), [("hooks", 1, 1, 1), ("optimizer", 2, 1, 1)])
def test_host_memory_and_copies_are_counted(function: str, pinned: int, to_host: int, to_card: int) -> None:
    target = GeneratorFunction(location=__file__, function=function, parameters={})
    tape = trace(target, label=function, device="RTX 4090", num_steps=2).tape
    begin, end = tape.operators_of_steps[-1]
    copies = tape.copies
    inside = (copies.operator >= begin) & (copies.operator < end) & (copies.num_bytes == SIZE)
    assert [int((copies.direction[inside] == way).sum()) for way in (CopyDirection.TO_HOST, CopyDirection.TO_CARD)] == [
        to_host,
        to_card,
    ]
    assert copies.is_pinned[inside].all() and not copies.is_blocking[inside].any()
    assert tape.pinned_tensor_bytes == pinned * SIZE
