"""What a graph has saved is read in memory as torch itself says it from 2.10 on."""

import ctypes
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tightfit.errors import UnsupportedTorch
from tightfit.torch_hooks import saved_variables
from tightfit.torch_hooks.manifest import SAVED_DATA, WRAP_TENSOR
from tightfit.torch_hooks.saved_variables import SavedReader, saved_reader, saved_variables_of


class _Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(value)
        return value * value

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2 * ctx.saved_tensors[0]


@pytest.fixture
def in_memory(monkeypatch: pytest.MonkeyPatch) -> SavedReader:
    """The reader for torch up to 2.9, in whichever version."""
    library = ctypes.PyDLL(str(saved_variables.Path(torch.__file__).parent / "lib" / "libtorch_python.so"))
    if not hasattr(library, WRAP_TENSOR.name):
        pytest.skip(f"no symbol {WRAP_TENSOR.name}")
    layout = saved_variables._Layout.find()
    return SavedReader(layout.data_of, layout.hook_of)


def _saved(result: torch.Tensor) -> Iterator[Any]:
    node: Any = result.grad_fn
    for name in saved_variables_of(node):
        saved = getattr(node, name)
        yield from saved if isinstance(saved, tuple) else (saved,)


def _both(reader: SavedReader, result: torch.Tensor) -> list[tuple[Any, Any]]:
    return [(reader.data_of(each), reader.hook_of(each)) for each in _saved(result)]


def test_tensors_are_the_programs_own_without_hooks_and_what_was_packed_with_them(in_memory: SavedReader) -> None:
    weight, data = torch.ones(3, requires_grad=True), torch.ones(3)
    assert [(found is data, hook) for found, hook in _both(in_memory, weight * data) if found is not None] == [
        (True, None)
    ]
    ((found, hook),) = [(found, hook) for found, hook in _both(in_memory, weight.exp())]
    assert hook is None
    assert torch.equal(found, weight.detach().exp())
    assert [found is weight for found, _ in _both(in_memory, _Square.apply(weight))] == [True]
    assert [found is None for found, _ in _both(in_memory, torch.cat([weight, weight]))] == []

    def unpack(packed: tuple[torch.Tensor]) -> torch.Tensor:
        raise AssertionError("no hook is run")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), unpack):
        results = (weight * data, weight.exp(), _Square.apply(weight))
    for result in results:
        hooked = [(found, hook) for found, hook in _both(in_memory, result) if hook is not None]
        assert [(type(found), hook) for found, hook in hooked] == [(tuple, unpack)]


def test_what_a_backward_pass_has_freed_is_none(in_memory: SavedReader) -> None:
    result = torch.ones(3, requires_grad=True).exp()
    (saved,) = _saved(result)
    result.sum().backward()
    assert (in_memory.data_of(saved), in_memory.hook_of(saved)) == (None, None)


@pytest.mark.skipif(not SAVED_DATA.is_expected(), reason="torch says nothing to compare with before 2.10")
def test_both_readers_say_the_same(in_memory: SavedReader) -> None:
    weight = torch.ones(3, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (tensor,), lambda packed: packed[0]):
        hooked = weight.exp()
    for result in (hooked, weight.exp(), weight * 2, weight * weight, _Square.apply(weight)):
        for (data, hook), (told, told_hook) in zip(
            _both(in_memory, result), _both(saved_reader(), result), strict=True
        ):
            assert data is told
            assert hook is told_hook


def test_another_layout_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_variables, "_OFFSETS_OF_HOOKS", (8,))
    with pytest.raises(UnsupportedTorch, match=r"has what a graph saves in memory in another way than expected"):
        saved_variables._Layout.find()
