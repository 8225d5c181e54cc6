"""Refuses to set the data of an ordinary tensor to that of a stand-in, which has no memory to share."""

from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.seen_as_tensor import SeenAsTensor
from tightfit.torch_hooks.replaced import Leave
from tightfit.torch_hooks.tensor_data import on_data


def refuse_data_of_stand_ins() -> Leave:
    """Refuses it until the returned function is called."""
    owner = _Data()
    leave = on_data(owner)

    def end(_: object = owner) -> None:  # which keeps it
        leave()

    return end


class _Data:
    def before_data(self, tensor: torch.Tensor, value: Any) -> None:
        """As `tightfit.torch_hooks.tensor_data.DataOwner`; a stand-in that is written to knows what to do by itself."""
        if type(type(value)) is SeenAsTensor and type(type(tensor)) is not SeenAsTensor:
            raise ApplyError(
                f"the .data of a tensor of shape {tuple(tensor.shape)} is set to a tensor that is not materialised, "
                "so the two cannot share memory; assign a copy (p.grad.clone(), logits.clone()), or leave the "
                "technique out of the plan"
            )
