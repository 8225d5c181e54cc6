"""Makes torch's C++ core run `cuda` tensors without data, forward and backward, on a machine without a card.

Two things are needed. A device guard must be registered for CUDA (autograd switches devices around every node), and CUDA must count as an
available accelerator (autograd asks for its streams, and whether it has a context). torch has a no-op guard for this from 2.10 on, which a CUDA build
without a card installs on request, and which a CPU build installs once it is shown a guard with zero devices; up to 2.9 one of our own that gives the
same answers is put there (`ones_and_zero`). The virtual functions `isBuilt`, `isAvailable` and `hasPrimaryContext` of the CUDA hooks are replaced by ones that return
true. Two pointers are set; no machine code is patched and nothing is compiled. This is the only file that knows about it. The symbols and vtable slots are rows of
`tightfit.capture.patches.manifest`, and are probed (`_probe`) before either pointer is set; `tests/cpu/test_native.py` names what else it relies on.

Sources: c10/core/impl/DeviceGuardImplInterface.{h,cpp}, c10/core/impl/FakeGuardImpl.h, aten/src/ATen/detail/AcceleratorHooksInterface.h and CUDAHooksInterface.cpp,
aten/src/ATen/DeviceAccelerator.cpp.
"""

import ctypes
import mmap
import os
import platform
import re
import sys
from functools import cache
from pathlib import Path

import torch
from torch._subclasses import fake_tensor

from tightfit.capture.patches.manifest import (
    CUDA_HOOKS,
    ENSURE_GUARD,
    GUARD_REGISTRY,
    HOOKS_HEADERS,
    OLDER_SLOTS,
    SLOTS,
    Slot,
    Symbol,
)
from tightfit.capture.replace import replace
from tightfit.errors import CaptureError, UnsupportedTorch
from tightfit.errors.private_names import version_of

_CPU, _CUDA = 0, 1  # c10/core/DeviceType.h
# The registry has one slot for each device type of c10/core/DeviceType.h; only that of CUDA is touched.
_NUM_DEVICE_TYPES = 22
# Itanium C++ ABI: two words precede the address point of a vtable (offset to top, typeinfo), and a virtual destructor takes two slots.
_NUM_WORDS_BEFORE_VTABLE = 2
_NUM_HOOK_SLOTS = 96
_NUM_GUARD_SLOTS = 64
_WORD = ctypes.sizeof(ctypes.c_void_p)

# The calling conventions of Linux return 16 bytes of whole numbers in rax and rdx (System V AMD64 ABI), or in x0 and x1 (AAPCS64).
_INSTRUCTIONS = {
    "x86_64": "b801000000 31d2 c3",  # mov eax, 1; xor edx, edx; ret
    "aarch64": "20008052 010080d2 c0035fd6",  # mov w0, 1; mov x1, 0; ret
}


# torch reads the table and calls through it for the rest of the process: were they collected, it would call
# freed memory.
_kept_alive: list[object] = []


def pretend_cuda_is_built() -> None:
    """Lets torch's C++ core run on `cuda` tensors that have no data. Safe to call more than once.

    Raises:
        CaptureError: this build of torch keeps these two pointers where they cannot be set.
        UnsupportedTorch: it lacks a symbol, or a virtual function is in another slot. Nothing has been set then.
    """
    if not _kept_alive:
        _probe()
        if not ENSURE_GUARD.is_expected():
            _install_own_guard()
        elif torch.version.cuda is None:
            _install_guard()
        else:
            torch._C._ensureCUDADeviceGuardSet()
        _install_hooks()
    # Fake tensors would make a context on a card as soon as they believe in one.
    replace(fake_tensor, init_gpu_context=lambda device: None)
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != "cuda":
        raise CaptureError(
            f"torch {torch.__version__} already has the accelerator '{accelerator}'; run this in an environment with a CPU or CUDA build of torch"
        )


def _library(name: str) -> ctypes.CDLL:
    suffix = {"linux": ".so", "darwin": ".dylib"}.get(sys.platform)
    if suffix is None:
        raise CaptureError(
            f"the CPU build of torch cannot host a virtual GPU on {sys.platform}; install a CUDA build of torch, or use Linux, WSL or macOS"
        )
    return ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / f"lib{name}{suffix}"))


def _address(symbol: Symbol) -> int:
    try:
        return ctypes.addressof(ctypes.c_char.in_dll(_library(symbol.library), symbol.name))
    except ValueError as error:
        raise _unsupported(f"has no symbol {symbol.name} in its lib{symbol.library}", symbol.purpose) from error


def _unsupported(what: str, purpose: str) -> UnsupportedTorch:
    known = f"torch {CUDA_HOOKS.first} to {CUDA_HOOKS.last} are known to work"
    return UnsupportedTorch(
        f"torch {torch.__version__} {what}, which the virtual GPU needs {purpose}; {known}: install one of them, or look for a newer tightfit"
    )


def _registry() -> "ctypes.Array[ctypes.c_void_p]":
    """The device guards by the number of their device type."""
    return (ctypes.c_void_p * _NUM_DEVICE_TYPES).from_address(_address(GUARD_REGISTRY))


def _vtable_pointer() -> ctypes.c_void_p:
    """The first word of the CUDA hooks, which points to their vtable."""
    hooks = ctypes.CFUNCTYPE(ctypes.c_void_p)(_address(CUDA_HOOKS))()
    return ctypes.c_void_p.from_address(hooks)


def _probe() -> None:
    """Looks at both pointers, and at what is behind them, without setting any.

    Raises:
        UnsupportedTorch: something is not where it is expected.
    """
    if not ENSURE_GUARD.is_expected():
        ones_and_zero()
    if torch.version.cuda is None and (_registry()[_CPU] is None or _registry()[_CUDA] is not None):
        raise _unsupported("keeps its device guards in another way", GUARD_REGISTRY.purpose)
    vtable = _vtable_pointer().value
    if vtable is None or ctypes.c_void_p.from_address(vtable - _NUM_WORDS_BEFORE_VTABLE * _WORD).value is not None:
        raise _unsupported("keeps the vtable of its CUDA hooks in another way", CUDA_HOOKS.purpose)
    # The wheel's own headers have the order of its virtual functions; of the functions themselves only the addresses are known.
    headers = [Path(torch.__file__).parent / "include" / name for name in HOOKS_HEADERS]
    if all(header.exists() for header in headers):
        # Those that override one of all accelerators are not declared as virtual again.
        declared = [
            name
            for header in headers
            for name in re.findall(r"^\s*virtual\s+[^(]*?([~\w]+)\(", header.read_text(), re.MULTILINE)
        ]
        slots = dict(enumerate(declared, 1))  # the destructor has the slots 0 and 1
        for slot in _slots():
            if slots.get(slot.index) != slot.function:
                raise _unsupported(f"has no {slot.function} in slot {slot.index} of its CUDA hooks", slot.purpose)


def _slots() -> tuple[Slot, ...]:
    return SLOTS if version_of("torch") >= (2, 7) else OLDER_SLOTS


def _install_guard() -> None:
    registry = _registry()
    zero = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _this: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    # Every slot returns 0: whichever of them `deviceCount` is, it says that there are no devices. torch calls
    # nothing else of this guard, and then replaces it.
    vtable = (ctypes.c_void_p * _NUM_GUARD_SLOTS)(*[address] * _NUM_GUARD_SLOTS)
    guard_without_devices = ctypes.c_void_p(ctypes.addressof(vtable))
    registry[_CUDA] = ctypes.addressof(guard_without_devices)
    torch._C._ensureCUDADeviceGuardSet()
    if registry[_CUDA] == ctypes.addressof(guard_without_devices):
        registry[_CUDA] = None
        raise CaptureError(
            f"torch {torch.__version__} does not install its no-op CUDA guard; this version is not supported yet"
        )


@cache
def ones_and_zero() -> int:
    """The address of a function in machine code that gives every answer of a device guard with one device, for torch up to 2.9.

    It returns 1, with 0 in the second register of a result: as a number of devices one, as a `DeviceType` CUDA, as a `Device` cuda:0, as a `Stream`
    the default one of cuda:0, as a truth yes. So each virtual function may be this one, whatever their order, and the guard answers as
    `FakeGuardImpl<CUDA>` does (c10/core/impl/FakeGuardImpl.h), which torch has from 2.10 on. ctypes has no functions that return two words, hence the
    instructions. They are in a file in memory, mapped without the right to write, for as long as the process lives.

    Raises:
        CaptureError: this machine has other instructions, or forbids it.
    """
    code = _INSTRUCTIONS.get(platform.machine())
    helps = f"which torch {torch.__version__} needs for a virtual GPU; torch 2.10 and later need none"
    if code is None or not hasattr(os, "memfd_create"):
        raise CaptureError(f"tightfit has no device guard for {platform.system()} on {platform.machine()}, {helps}")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    try:
        file = os.memfd_create("tightfit-guard", os.MFD_CLOEXEC)
    except OSError as error:
        raise CaptureError(f"no file in memory could be made ({error.strerror}) for a device guard, {helps}") from error
    try:
        os.write(file, bytes.fromhex(code))
        address = libc.mmap(None, mmap.PAGESIZE, mmap.PROT_READ | mmap.PROT_EXEC, mmap.MAP_PRIVATE, file, 0)
    finally:
        os.close(file)
    if address in (None, ctypes.c_void_p(-1).value):
        reason = os.strerror(ctypes.get_errno())
        raise CaptureError(f"no memory with instructions could be had ({reason}) for a device guard, {helps}")
    return int(address)


def _install_own_guard() -> None:
    """Puts a guard with one device into the registry, of which each virtual function is the one that `ones_and_zero` makes."""
    answer = ones_and_zero()
    vtable = (ctypes.c_void_p * _NUM_GUARD_SLOTS)(*[answer] * _NUM_GUARD_SLOTS)
    guard = ctypes.c_void_p(ctypes.addressof(vtable))
    for each in (vtable, guard):
        # torch's threads ask it until the process has ended.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    _registry()[_CUDA] = ctypes.addressof(guard)


def _install_hooks() -> None:
    vtable_of_hooks = _vtable_pointer()
    assert vtable_of_hooks.value is not None
    start = vtable_of_hooks.value - _NUM_WORDS_BEFORE_VTABLE * _WORD
    num_words = _NUM_WORDS_BEFORE_VTABLE + _NUM_HOOK_SLOTS
    # The whole table is copied, with the words before it (offset to top, type information), so that everything
    # else behaves as before; only this one object's pointer is set to the copy.
    vtable = (ctypes.c_void_p * num_words)(*(ctypes.c_void_p * num_words).from_address(start))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _this: True)
    for slot in _slots():
        vtable[_NUM_WORDS_BEFORE_VTABLE + slot.index] = ctypes.cast(yes, ctypes.c_void_p).value
    for each in (vtable, yes):
        # A module's objects are freed when the interpreter ends, and torch destroys its hooks, by a function of the table, only after that.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    _kept_alive.extend((vtable, yes))
    vtable_of_hooks.value = ctypes.addressof(vtable) + _NUM_WORDS_BEFORE_VTABLE * _WORD
