"""Contents of tensors at the host show writes that change no version."""

from collections.abc import Callable

import pytest
import torch

from tightfit.effects.contents import SMALL_BYTES, content_of, contents_of, is_any_written

LARGE = SMALL_BYTES // 4 + 1


def _by_data(tensor: torch.Tensor) -> None:
    tensor.data[-1] = 1


def _by_numpy(tensor: torch.Tensor) -> None:
    tensor.detach().numpy()[-1] = 1


@pytest.mark.parametrize("write", [_by_data, _by_numpy])
@pytest.mark.parametrize("size", [3, LARGE])
def test_a_write_past_torch_is_seen(size: int, write: Callable[[torch.Tensor], None]) -> None:
    weight = torch.nn.Parameter(torch.zeros(size))
    before, version = contents_of([weight]), weight._version
    assert not is_any_written(before, [weight])
    write(weight)
    assert weight._version == version
    assert is_any_written(before, [weight])


def test_the_last_bytes_of_an_odd_size_are_read() -> None:
    flags = torch.zeros(SMALL_BYTES + 3, dtype=torch.bool)
    before = content_of(flags)
    flags[-1] = True
    assert content_of(flags) != before


def test_what_cannot_be_read_at_once_has_no_content_and_counts_as_the_same() -> None:
    gone = torch.nn.Parameter(torch.zeros(LARGE))
    before = contents_of([gone])
    gone.untyped_storage().resize_(0)
    unread = [gone, torch.zeros(4, 4).t()[1:], torch.eye(2).to_sparse(), torch.zeros(2, device="meta")]
    assert contents_of(unread) == [None] * 4
    assert not is_any_written(before, [gone])


def test_an_empty_tensor_has_an_empty_content() -> None:
    assert content_of(torch.zeros(0)) == b""
