"""Finds the tensors that a graph has saved and that something outside of it may write to.

A write through `.data`, numpy or dlpack changes no version, so a second run of the graph would compute with other numbers and not notice. What
only the graph refers to cannot be written to, and is not looked at.
"""

import itertools
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch

from tightfit.engine.saved.saved_storage import Saved
from tightfit.torch_hooks.manifest import STORAGE_USES
from tightfit.torch_hooks.saved_variables import saved_reader, saved_variables_of


def saved_and_shared(nodes: Iterable[Any], known: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors saved by `nodes` whose memory is not torch's own (numpy's, dlpack's), or is referred to by more than what the nodes have saved.

    Those that share memory with `known` are left out. Tensors behind hooks (`torch.autograd.graph.saved_tensors_hooks`, checkpoints) are left out
    too, but for those of our own offload: to unpack them could run code of the program.
    """
    left_out = {id_ for tensor in known if (id_ := _storage_id(tensor)) is not None}
    by_storage: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
    for tensor in _saved(nodes):
        storage = _storage_id(tensor)
        if storage is not None and storage not in left_out:
            by_storage[storage][tensor._cdata] = tensor
    shared = (tensors.values() for storage, tensors in by_storage.items() if _is_shared(storage, tensors.values()))
    return list(itertools.chain.from_iterable(shared))


def _is_shared(storage: int, tensors: Collection[torch.Tensor]) -> bool:
    # Memory of numpy's or dlpack's, which torch only borrows, cannot be resized.
    is_borrowed = not next(iter(tensors)).untyped_storage().resizable()
    return is_borrowed or STORAGE_USES.call(storage) > len(tensors)


def _saved(nodes: Iterable[Any]) -> Iterator[torch.Tensor]:
    ask = saved_reader()
    hook_of, data_of = ask.hook_of, ask.data_of
    for node in nodes:
        for name in saved_variables_of(node):
            saved = getattr(node, name)
            for each in saved if isinstance(saved, tuple) else (saved,):
                data = data_of(each)
                if isinstance(data, Saved):
                    # What is at the host was referred to by nothing else when it left.
                    data = data.tensor
                elif hook_of(each) is not None:
                    data = None
                if data is not None:
                    yield data


def unpack_hooks(node: Any) -> Iterator[Any]:
    """The hooks by which a node has its saved tensors back."""
    hook_of = saved_reader().hook_of
    for name in saved_variables_of(node):
        saved = getattr(node, name)
        for each in saved if isinstance(saved, tuple) else (saved,):
            if (hook := hook_of(each)) is not None:
                yield hook


def _storage_id(tensor: torch.Tensor) -> int | None:
    # Virtual tensors have no numbers, and wrappers no storage of their own.
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer):
        return None
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else None
