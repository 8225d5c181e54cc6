"""A function in machine code that gives every answer of a device guard with one device: for torch up to 2.9, which has no guard that does nothing.

It returns 1, with 0 in the second register of a result: as a number of devices one, as a `DeviceType` CUDA, as a `Device` cuda:0, as a `Stream` the
default one of cuda:0, as a truth yes. So each virtual function may be this one, whatever their order, and the guard answers as `FakeGuardImpl<CUDA>`
does (c10/core/impl/FakeGuardImpl.h), which torch has from 2.10 on. ctypes has no functions that return two words, hence these instructions.
"""

import ctypes
import mmap
import os
import platform
from functools import cache

import torch

from tightfit.errors import CaptureError

# The calling conventions of Linux return 16 bytes of whole numbers in rax and rdx (System V AMD64 ABI), or in x0 and x1 (AAPCS64).
_INSTRUCTIONS = {
    "x86_64": "b801000000 31d2 c3",  # mov eax, 1; xor edx, edx; ret
    "aarch64": "20008052 010080d2 c0035fd6",  # mov w0, 1; mov x1, 0; ret
}


@cache
def ones_and_zero() -> int:
    """The address of the function. It is in a file in memory, mapped without the right to write, for as long as the process lives.

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
