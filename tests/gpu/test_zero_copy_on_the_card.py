"""Page-locked memory of the host is a tensor of the card for all that a program does with it. Skips where there is no card."""

import copy
import io

import pytest
import torch

from tightfit.engine.host_slab import HostSlab
from tightfit.engine.zero_copy import at_host, seen_from

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no card that torch can use on this machine"),
]


def shown(num_elements: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A float32 tensor of the card, and the same bytes at the host."""
    device = torch.device("cuda")
    part = HostSlab(1 << 20, device).take(4 * num_elements)
    there = part.with_storage()
    there.view(torch.float32).copy_(torch.arange(num_elements))
    return seen_from(device, there).view(torch.float32), there.view(torch.float32)


def test_it_is_of_the_card_and_takes_none_of_its_memory() -> None:
    before = torch.cuda.memory_allocated()
    seen, _ = shown(1000)
    assert seen.is_cuda
    assert torch.cuda.memory_allocated() == before
    assert torch.equal(seen, torch.arange(1000, device="cuda", dtype=torch.float32))


def test_kernels_and_copies_read_and_write_it() -> None:
    seen, there = shown(1000)
    expected = torch.arange(1000, dtype=torch.float32, device="cuda")
    assert torch.equal(seen.clone(), expected)
    assert torch.equal(copy.deepcopy(seen), expected)
    seen.mul_(2).add_(1)
    torch.cuda.synchronize()
    assert torch.equal(there, 2 * torch.arange(1000) + 1.0)
    seen.copy_(torch.ones(1000, device="cuda"))
    seen[:10].copy_(torch.zeros(10))
    torch.cuda.synchronize()
    assert there.sum() == 990
    there.fill_(3)
    assert float(seen.sum()) == 3000
    assert torch.equal(seen.cpu(), there)
    seen.zero_()
    torch.cuda.synchronize()
    assert not there.any()


def test_it_is_saved_and_loaded() -> None:
    seen, _ = shown(100)
    file = io.BytesIO()
    torch.save({"weight": seen}, file)
    file.seek(0)
    assert torch.equal(torch.load(file)["weight"], seen)


def test_random_numbers_for_it_come_from_the_generator_of_the_card() -> None:
    seen, _ = shown(100)
    torch.manual_seed(3)
    drawn = torch.randn_like(seen)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.randn(100, device="cuda"))


def test_a_parameter_keeps_its_gradient_accumulator() -> None:
    weight = torch.nn.Parameter(torch.zeros(100, device="cuda"))
    accumulator = weight.view_as(weight).grad_fn.next_functions[0][0]
    seen, _ = shown(100)
    weight.data = seen
    assert weight.view_as(weight).grad_fn.next_functions[0][0] is accumulator
    loss = (weight * weight).sum()
    loss.backward()
    assert torch.equal(weight.grad, 2 * seen)


def test_the_bytes_are_found_again() -> None:
    seen, there = shown(100)
    again = at_host(seen[50:])
    assert again.data_ptr() == there.data_ptr() + 200
    assert again.device.type == "cpu"
