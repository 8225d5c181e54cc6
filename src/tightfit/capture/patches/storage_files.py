"""Addresses for the storages of virtual tensors, and files of safetensors whose numbers are holes.

Libraries that save models compare addresses to find tensors that share memory.
"""

import json
import os
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.replace import replace

# Addresses are multiples of what torch's allocator aligns to on a card.
_ALIGNMENT = 512
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
    torch.complex64: "C64",
}


def install_addresses() -> None:
    """Gives each virtual storage an address of its own, and its tensors addresses in it."""
    of_storage = torch.UntypedStorage.data_ptr
    flatten_parameters = torch.nn.RNNBase.flatten_parameters

    def storage_address(storage: torch.UntypedStorage) -> int:
        if storage.device.type != "meta":
            return of_storage(storage)
        return storage._cdata * _ALIGNMENT if storage.nbytes() else 0

    def tensor_address(tensor: torch.Tensor) -> int:
        start = storage_address(tensor.untyped_storage())
        return start + int(tensor.storage_offset()) * tensor.element_size() if start else 0

    def flatten_parameters_(module: torch.nn.RNNBase) -> None:
        # It leaves weights alone that share an address, as all virtual ones did; kernels of recurrent layers count on that.
        if not any(isinstance(weight, FakeTensor) for weight in module.parameters()):
            flatten_parameters(module)

    replace(torch.UntypedStorage, data_ptr=storage_address)
    replace(FakeTensor, data_ptr=tensor_address)
    replace(torch.nn.RNNBase, flatten_parameters=flatten_parameters_)


def write_with_holes(tensors: dict[str, torch.Tensor], filename: Any, metadata: dict[str, str] | None) -> None:
    """A file of safetensors: the numbers of real tensors, and zeros, which take no place on disk, for virtual ones.

    Raises:
        KeyError: safetensors has no such dtype.
    """
    head: dict[str, Any] = {} if metadata is None else {"__metadata__": metadata}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.numel() * tensor.element_size()
        head[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    encoded = json.dumps(head).encode()
    encoded += b" " * (-len(encoded) % 8)
    with Path(os.fspath(filename)).open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        start = file.tell()
        for name, tensor in tensors.items():
            if not isinstance(tensor, FakeTensor) and tensor.numel():
                file.seek(start + head[name]["data_offsets"][0])
                file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        file.truncate(start + end)
