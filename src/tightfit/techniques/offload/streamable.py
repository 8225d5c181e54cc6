"""Which weights of a block can be streamed: those that are not trained, and that nothing but the block itself holds."""

import torch

from tightfit.torch_hooks.manifest import STORAGE_USES

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
    # Memory of numpy, of a file or of another process is not ours to move.
    is_shared = parameter.device.type == "cpu" and storage.is_shared()
    return storage.resizable() and not is_shared and STORAGE_USES.value()(storage._cdata) == _USES


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether the tensor is one storage, seen through a shape, and nothing else."""
    return (
        tensor.layout == torch.strided
        and not torch.nn.parameter.is_lazy(tensor)
        and not tensor.is_nested
        and not tensor.is_quantized
        and not tensor.is_inference()
        and not tensor.is_conj()
        and not tensor.is_neg()
        and not torch.utils._python_dispatch.is_traceable_wrapper_subclass(tensor)
    )
