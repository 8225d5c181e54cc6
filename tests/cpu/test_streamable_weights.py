"""Which weights can be streamed: not what a transform of torch.func puts in the place of a parameter."""

import torch
from torch import nn

from tightfit.techniques.offload.streamable import streamable


def test_weights_within_a_transform_are_left_where_they_are() -> None:
    block = nn.Linear(8, 8, bias=False)
    model = nn.Sequential(block)
    assert streamable(model, block, 1, with_trained=True) == [block.weight]
    found: list[list[torch.Tensor]] = []

    def loss(weight: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        own = block._parameters["weight"]
        # As functional_call does for its time.
        block._parameters["weight"] = weight
        try:
            found.append(streamable(model, block, 1, with_trained=True))
            return block(rows).sum()
        finally:
            block._parameters["weight"] = own

    torch.func.vmap(torch.func.grad(loss), (None, 0))(block.weight.detach(), torch.randn(3, 2, 8))
    assert found == [[]]
