"""Contents of tensors at the host show writes that change no version."""

from collections.abc import Callable

import pytest
import torch

from tightfit.effects.values.contents import SMALL_BYTES, StoredAt, checksum_of, content_of, contents_of, is_any_written

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
    unread = [gone, torch.eye(2).to_sparse(), torch.zeros(2, device="meta")]
    assert contents_of(unread) == [None] * 3
    assert not is_any_written(before, [gone])


def test_an_empty_tensor_has_an_empty_content() -> None:
    assert content_of(torch.zeros(0)) == b""


# Contiguous, in another order, with gaps, and of one number in all places.
LAYOUTS = (
    lambda values: values,
    lambda values: values.t(),
    lambda values: values[:, ::2],
    lambda values: values[:, 3:-2].unsqueeze(1).expand(-1, 3, -1),
)


@pytest.mark.parametrize("size", [10, 300])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_checksum_is_that_of_the_elements_and_of_their_places(
    size: int, layout: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    whole = torch.randn(size, size, generator=torch.Generator().manual_seed(0))
    before = checksum_of(layout(whole))
    assert checksum_of(layout(whole.clone())) == before
    exchanged = whole[[1, 0, *range(2, size)]]
    changed = whole.clone()
    layout(changed)[(-1,) * layout(changed).dim()] += 1e-6
    assert before not in (checksum_of(layout(exchanged)), checksum_of(layout(changed)), checksum_of(layout(-whole)))


def test_what_lies_between_the_elements_does_not_count() -> None:
    whole = torch.zeros(300, 300)
    part = whole[:, ::2]
    before = checksum_of(part)
    whole[:, 1::2] = torch.nan
    assert checksum_of(part) == before


@pytest.mark.parametrize(
    "kind", [torch.bool, torch.uint8, torch.bfloat16, torch.float64, torch.complex64, torch.complex128]
)
def test_a_checksum_may_be_asked_of_every_dtype(kind: torch.dtype) -> None:
    values = torch.ones(60, 61, dtype=kind)
    assert checksum_of(values) == checksum_of(values.clone()) != checksum_of(torch.zeros(60, 61, dtype=kind))
    assert checksum_of(values[:, ::2]) == checksum_of(values.clone()[:, ::2])


def test_a_place_in_a_storage_is_read_as_long_as_somebody_has_the_storage() -> None:
    whole = torch.zeros(8, 8)
    place, before = StoredAt(whole[2:]), checksum_of(whole[2:])
    alias = whole.data
    del whole
    assert place.checksum() == before
    alias[3, 0] = 1
    assert place.checksum() not in (None, before)
    del alias
    assert place.checksum() is None
