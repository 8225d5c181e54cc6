"""The hooks for saved tensors that are in effect, as torch says them and as they are read in memory up to torch 2.7."""

import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch

from tightfit.capture.patches.manifest import STACK_OF_HOOKS
from tightfit.effects.values import saved_hooks
from tightfit.effects.values.saved_hooks import Hooks, top_saved_hooks
from tightfit.errors import UnsupportedTorch


@pytest.fixture(params=["as installed", "in memory"])
def top(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Hooks | None]]:
    if request.param == "in memory":
        monkeypatch.setattr(saved_hooks, "version_of", lambda _library: (2, 7))
    saved_hooks._reader.cache_clear()
    yield top_saved_hooks
    saved_hooks._reader.cache_clear()


def test_the_innermost_are_found_at_any_depth_and_in_each_thread(top: Callable[[], Hooks | None]) -> None:
    assert top() is None
    pairs: list[Hooks] = [(lambda tensor, n=n: tensor, lambda packed, n=n: packed) for n in range(40)]
    with contextlib.ExitStack() as entered:
        for pair in pairs:
            entered.enter_context(torch.autograd.graph.saved_tensors_hooks(*pair))
            assert top() == pair
        elsewhere: list[Hooks | None] = []
        thread = threading.Thread(target=lambda: elsewhere.append(top()))
        thread.start()
        thread.join()
        assert elsewhere == [None]
        for pair in reversed(pairs):
            assert top() == pair
            torch._C._autograd._pop_saved_tensors_default_hooks()
        assert top() is None
        entered.pop_all()


def test_another_layout_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_hooks, "version_of", lambda _library: (2, 7))
    monkeypatch.setattr(saved_hooks, "_in_memory", lambda: lambda: None)
    saved_hooks._reader.cache_clear()
    with pytest.raises(UnsupportedTorch, match="keeps hooks for saved tensors in another way than expected"):
        top_saved_hooks()
    saved_hooks._reader.cache_clear()


def test_the_symbol_is_the_one_of_the_manifest() -> None:
    assert STACK_OF_HOOKS.name == saved_hooks.STATE_OF_THREAD
