"""Which weights of a block can be streamed: those that are not trained, and that nothing but the block itself holds."""

import bisect
import gc
from collections.abc import Iterable

import torch

from tightfit.engine.weights.weights_in_files import file_range_of
from tightfit.torch_hooks.manifest import STORAGE_USES

_PLAIN = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
_USES = 2
"""The parameter, and the name of its storage that is looked at."""


def streamable(
    model: torch.nn.Module, block: torch.nn.Module, smallest_bytes: int, *, with_trained: bool = False
) -> list[torch.Tensor]:
    """The parameters of `block` that can be streamed, of `smallest_bytes` or more each; with those that could be trained where the program does not."""
    inside = set(block.modules())
    outside = {id(p) for module in model.modules() if module not in inside for p in module._parameters.values()}
    return [
        parameter
        for parameter in block.parameters()
        if id(parameter) not in outside
        and (with_trained or not parameter.requires_grad)
        and (with_trained or parameter.grad is None)
        and _is_plain(parameter)
        and _is_alone(parameter, max(1, smallest_bytes))
    ]


def _is_alone(parameter: torch.Tensor, smallest_bytes: int) -> bool:
    """Whether its storage is large enough, and of no other tensor: a view that the program holds would not see what is written at the host."""
    storage = parameter.untyped_storage()
    num_bytes = storage.nbytes()
    if num_bytes < smallest_bytes or num_bytes % parameter.element_size():
        return False
    # Memory of numpy or of another process is not ours to move; that of a file is, if what is written to it stays in this process.
    is_shared = parameter.device.type == "cpu" and storage.is_shared()
    is_ours = storage.resizable() or file_range_of(parameter) is not None
    return is_ours and not is_shared and STORAGE_USES.call(storage._cdata) == _USES


def seen_by_others(parameters: Iterable[torch.Tensor]) -> torch.Tensor | None:
    """The first of these parameters, some of which lie in mapped files, whose memory another tensor sees too: a file that is read twice by one handle is in
    memory once, and each tensor of it has a storage of its own."""
    mapped = sorted(
        ((p.untyped_storage().data_ptr(), p.untyped_storage().nbytes(), p) for p in parameters if file_range_of(p)),
        key=lambda found: found[0],
    )
    if not mapped:
        return None
    own = {id(parameter) for _, _, parameter in mapped}
    begins = [begin for begin, _, _ in mapped]
    for other in gc.get_objects():
        if type(other) not in _PLAIN or id(other) in own or other.device.type != "cpu" or other.layout != torch.strided:
            continue
        begin = other.untyped_storage().data_ptr()
        at = bisect.bisect_right(begins, begin + other.untyped_storage().nbytes() - 1) - 1
        if at >= 0 and begin < begins[at] + mapped[at][1]:
            return mapped[at][2]
    return None


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one storage, seen through a shape, and nothing else."""
    return (
        # What a transform of torch.func puts in the place of a parameter has no storage that one may ask for.
        not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        and tensor.layout == torch.strided
        and not torch.nn.parameter.is_lazy(tensor)
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    )
