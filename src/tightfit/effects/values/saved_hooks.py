"""The innermost hooks for saved tensors that are in effect (`torch.autograd.graph.saved_tensors_hooks`).

torch says them from 2.8 on. Up to 2.7 they are read where C++ has them: ATen/SavedTensorHooks.h, a `std::stack` of pairs of Python objects, which
libstdc++ keeps as a `std::deque` (bits/stl_deque.h: a map of nodes of 512 bytes, then the iterators of its begin and end). That they are there is
looked at with hooks that are known.
"""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import torch

from tightfit.errors import UnsupportedTorch
from tightfit.errors.private_names import version_of

Hooks = tuple[Callable[[Any], Any], Callable[[Any], Any]]

# `at::SavedTensorDefaultHooks::get_tls_state`, a row of `tightfit.capture.patches.manifest`.
STATE_OF_THREAD = "_ZN2at23SavedTensorDefaultHooks13get_tls_stateEv"
_WORD = ctypes.sizeof(ctypes.c_void_p)
_NODE_BYTES = 512
# Of a deque in words: the map and its size, then `_M_start` and `_M_finish`, each with `_M_cur`, `_M_first`, `_M_last`, `_M_node`.
_BEGIN, _END, _FIRST_OF_END, _NODE_OF_END = 2, 6, 7, 9
# Two SafePyObject, each an object with its interpreter (c10/core/SafePyObject.h).
_PAIR_BYTES = 4 * _WORD


def top_saved_hooks() -> Hooks | None:
    """How tensors are packed and unpacked that are saved here; None where no hooks are in effect.

    Raises:
        UnsupportedTorch: torch is older than 2.8, and keeps them in another way than expected.
    """
    return _reader()()


@cache
def _reader() -> Callable[[], Hooks | None]:
    if version_of("torch") >= (2, 8):
        says = torch._C._autograd._top_saved_tensors_default_hooks
        return lambda: says(False)
    read = _in_memory()
    hooks = (lambda tensor: tensor, lambda tensor: tensor)
    before = read()
    with torch.autograd.graph.saved_tensors_hooks(*hooks):
        found = read()
    if found is None or (found[0], found[1]) != hooks or read() != before:
        raise _unsupported("keeps hooks for saved tensors in another way than expected")
    return read


def _in_memory() -> Callable[[], Hooks | None]:
    library = ctypes.PyDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))
    try:
        state_of_thread = library[STATE_OF_THREAD]
    except AttributeError as error:
        raise _unsupported(f"has no symbol {STATE_OF_THREAD}") from error
    state_of_thread.restype, state_of_thread.argtypes = ctypes.c_size_t, ()

    def read() -> Hooks | None:
        deque = state_of_thread()
        end = _word(deque, _END)
        if end == _word(deque, _BEGIN):
            return None
        if end == _word(deque, _FIRST_OF_END):
            # The last pair is at the end of the node before.
            end = _word(_word(deque, _NODE_OF_END) - _WORD, 0) + _NODE_BYTES
        pair = end - _PAIR_BYTES
        return _object(_word(pair, 0)), _object(_word(pair, 2))

    return read


def _word(address: int, number: int) -> int:
    return ctypes.c_size_t.from_address(address + number * _WORD).value


def _object(address: int) -> Any:
    return ctypes.cast(address, ctypes.py_object).value


def _unsupported(what: str) -> UnsupportedTorch:
    return UnsupportedTorch(
        f"torch {torch.__version__} {what}, which tightfit needs to leave alone what is saved where the program has hooks of its own; install torch 2.8 or later"
    )
