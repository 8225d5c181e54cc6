"""Copies of a model's weights that the program holds in a dict or a list: averages (EMA), a snapshot to return to, a checkpoint that was loaded.

A copy was made before the first backward pass by an operator that copies, and is like the weights of a model by names and sizes, or by sizes in
their order. So momenta, which begin as zeros, and gradients, which are later, are none.
"""

import collections
import gc
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.tape import Category, Phase

_COPYING = ("aten.clone", "aten._to_copy", "aten.copy", "aten.set_")
_CONTAINERS = frozenset((list, dict, collections.OrderedDict))


def weight_copies(gpu: VirtualGpu, models: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """The tensors of all copies of the weights of `models`."""
    named = [_named(model) for model in models]
    rows = {row for tensors in named for row in _rows_of(tensors)}
    sizes = {name: tensor.size() for tensors in named for name, tensor in tensors.items()}
    phases = gpu.recorder.operators["phase"]
    first_backward = next((at for at, phase in enumerate(phases) if phase == Phase.BACKWARD), len(phases))
    for held in _held():
        if isinstance(held, list):
            is_copy = tuple(tensor.size() for tensor in held) in rows
            values: Sequence[torch.Tensor] = held
        else:
            is_copy = all(type(name) is str and sizes.get(name) == tensor.size() for name, tensor in held.items())
            values = list(held.values())
        if is_copy and all(_is_copied(gpu, tensor, first_backward) for tensor in values):
            yield from values


def _named(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    tensors = itertools.chain(model.named_parameters(), model.named_buffers())
    return {name: tensor for name, tensor in tensors if type(tensor) is FakeTensor}


def _rows_of(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[torch.Size, ...]]:
    """The sizes of what a list of a model's weights may hold: all, the parameters, and those that are trained."""
    parameters = [tensor for tensor in tensors.values() if isinstance(tensor, torch.nn.Parameter)]
    for row in (list(tensors.values()), parameters, [p for p in parameters if p.requires_grad]):
        # A single tensor is like a weight by chance.
        if len(row) > 1:
            yield tuple(tensor.size() for tensor in row)


def _held() -> Iterator[dict[Any, FakeTensor] | list[FakeTensor]]:
    """The dicts and lists of at least two tensors of the virtual GPU, and nothing else, that there are."""
    # The first value decides for nearly all, some of which are large; what is copied in one call no other thread changes meanwhile.
    for container in [each for each in gc.get_objects() if type(each) in _CONTAINERS and len(each) > 1]:
        is_list = type(container) is list
        if type(next(iter(container if is_list else dict.values(container)), None)) is not FakeTensor:
            continue
        copied = list(container) if is_list else dict(container)
        if _are_plain(copied if isinstance(copied, list) else copied.values()):
            yield copied


def _are_plain(values: Collection[Any]) -> bool:
    # By their types: `isinstance` asks objects for `__class__`, which runs code in proxies, and subclasses of tensors and parameters without sizes run
    # code of their own for most questions.
    return len(values) > 1 and all(type(value) is FakeTensor for value in values)


def _is_copied(gpu: VirtualGpu, tensor: torch.Tensor, first_backward: int) -> bool:
    """Whether the memory of `tensor` is a copy from before the first backward pass, for which no other use is known."""
    recorder = gpu.recorder
    index = gpu.storages.index_of(tensor)
    # One that was made on the host, and copied to the GPU, is taken for a batch at first.
    if index is None or recorder.storages["category"][index] not in (Category.TEMPORARIES, Category.INPUTS):
        return False
    operator = int(recorder.storages["operator"][index])
    name = recorder.strings.texts[int(recorder.operators["name"][operator])] if 0 <= operator < first_backward else ""
    return name.startswith(_COPYING)
