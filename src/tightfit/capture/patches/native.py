"""Makes torch's C++ core run `cuda` tensors without data, forward and backward, on a machine without a card.

Two things are needed. A device guard must be registered for CUDA (autograd switches devices around every node), and CUDA must count as an
available accelerator (autograd asks for its streams, and whether it has a context). torch has a no-op guard for this, which a CUDA build
without a card installs on request, and which a CPU build installs once it is shown a guard with zero devices. The virtual functions
`isBuilt`, `isAvailable` and `hasPrimaryContext` of the CUDA hooks are replaced by ones that return true. Two pointers are set; no machine code
is patched and nothing is compiled. This is the only file that knows about it; `tests/cpu/test_native.py` names what it relies on.

Sources: c10/core/impl/DeviceGuardImplInterface.{h,cpp}, aten/src/ATen/detail/AcceleratorHooksInterface.h and CUDAHooksInterface.cpp,
aten/src/ATen/DeviceAccelerator.cpp.
"""

import ctypes
import sys
from pathlib import Path

import torch
from torch._subclasses import fake_tensor

from tightfit.capture.replace import replace
from tightfit.errors import CaptureError

_CUDA = 1  # c10/core/DeviceType.h
# The registry has one slot for each device type of c10/core/DeviceType.h; only that of CUDA is touched.
_NUM_DEVICE_TYPES = 22
# Itanium C++ ABI: two words precede the address point of a vtable, and a virtual destructor takes two slots.
_NUM_WORDS_BEFORE_VTABLE = 2
_NUM_HOOK_SLOTS = 96
# The order of declaration in AcceleratorHooksInterface.h, after the destructor's two slots.
_ANSWERED_SLOTS = (2, 3, 4)  # isBuilt, isAvailable, hasPrimaryContext

# torch reads the table and calls through it for the rest of the process: were they collected, it would call
# freed memory.
_kept_alive: list[object] = []


def pretend_cuda_is_built() -> None:
    """Lets torch's C++ core run on `cuda` tensors that have no data. Safe to call more than once.

    Raises:
        CaptureError: this build of torch keeps these two pointers where they cannot be set.
    """
    if not _kept_alive:
        if torch.version.cuda is None:
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


def _install_guard() -> None:
    registry = (ctypes.c_void_p * _NUM_DEVICE_TYPES).in_dll(
        _library("c10"), "_ZN3c104impl26device_guard_impl_registryE"
    )
    zero = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(lambda _this: 0)
    address = ctypes.cast(zero, ctypes.c_void_p).value
    # Every slot returns 0: whichever of them `deviceCount` is, it says that there are no devices. torch calls
    # nothing else of this guard, and then replaces it.
    vtable = (ctypes.c_void_p * 64)(*[address] * 64)
    guard_without_devices = ctypes.c_void_p(ctypes.addressof(vtable))
    registry[_CUDA] = ctypes.addressof(guard_without_devices)
    torch._C._ensureCUDADeviceGuardSet()
    if registry[_CUDA] == ctypes.addressof(guard_without_devices):
        registry[_CUDA] = None
        raise CaptureError(
            f"torch {torch.__version__} does not install its no-op CUDA guard; this version is not supported yet"
        )


def _install_hooks() -> None:
    get_hooks = _library("torch_cpu")._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = ctypes.c_void_p
    vtable_of_hooks = ctypes.c_void_p.from_address(get_hooks())
    assert vtable_of_hooks.value is not None
    start = vtable_of_hooks.value - _NUM_WORDS_BEFORE_VTABLE * ctypes.sizeof(ctypes.c_void_p)
    num_words = _NUM_WORDS_BEFORE_VTABLE + _NUM_HOOK_SLOTS
    # The whole table is copied, with the words before it (offset to top, type information), so that everything
    # else behaves as before; only this one object's pointer is set to the copy.
    vtable = (ctypes.c_void_p * num_words)(*(ctypes.c_void_p * num_words).from_address(start))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool, ctypes.c_void_p)(lambda _this: True)
    for slot in _ANSWERED_SLOTS:
        vtable[_NUM_WORDS_BEFORE_VTABLE + slot] = ctypes.cast(yes, ctypes.c_void_p).value
    _kept_alive.extend((vtable, yes))
    vtable_of_hooks.value = ctypes.addressof(vtable) + _NUM_WORDS_BEFORE_VTABLE * ctypes.sizeof(ctypes.c_void_p)
