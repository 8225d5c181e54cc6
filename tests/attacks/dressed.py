"""Any program's model dressed as fine-tuning scripts dress theirs: matrices of blocks frozen, kept in 8 or 4 bits beside adapters, the forward under autocast.

Plain and planned runs are dressed alike, before a technique is put on.
"""

from collections.abc import Sequence
from typing import Any, final

import torch
from tests.attacks.places import freeze, held
from torch import nn
from torch.nn import functional

DRESSES = ("autocast", "autocast", "frozen", "adapters", "adapters 8-bit", "adapters 4-bit")
"""What is drawn from; a program wears one or two of these."""
_RANK = 2
_LARGEST_CODE = {8: 127.0, 4: 7.0}


def dress(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], dresses: Sequence[str]) -> None:
    """Puts them on, those that are not on yet."""
    for name in dresses:
        if name == "frozen":
            freeze(model)
        elif name == "autocast":
            _run_under_autocast(model)
        else:
            _adapt(model, optimizers, {"adapters 8-bit": 8, "adapters 4-bit": 4}.get(name, 0))


def _run_under_autocast(model: nn.Module) -> None:
    """Its forward alone: backward passes run outside, as torch's documentation has it."""
    cls = type(model)
    if hasattr(cls, "runs_under_autocast"):
        return
    own = cls.forward

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return own(self, *args, **kwargs)

    # Of the same name, by which plans know it.
    model.__class__ = type(cls.__name__, (cls,), {"forward": forward, "runs_under_autocast": True})


def _adapt(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer], bits: int) -> None:
    made: list[nn.Parameter] = []
    for _, blocks in held(model, "blocks"):
        for holder in [*blocks.modules()]:
            for name, child in [*holder.named_children()]:
                if type(child) is nn.Linear and name != "head":
                    adapted = Adapted(child, bits)
                    setattr(holder, name, adapted)
                    made += [adapted.down, adapted.up]
    if made and optimizers:
        optimizers[0].add_param_group({"params": made})


@final
class Adapted(nn.Module):
    """A linear layer whose frozen weight, kept in `bits` bits where they are not 0, has two trained factors beside it."""

    def __init__(self, linear: nn.Linear, bits: int) -> None:
        super().__init__()
        chance = torch.Generator().manual_seed(linear.in_features)
        self.bits = bits
        weight = linear.weight.detach()
        self.bias = None if linear.bias is None else nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
        if bits:
            scale = weight.abs().amax(1, keepdim=True).clamp_min(1e-6) / _LARGEST_CODE[bits]
            codes = (weight / scale).round().to(torch.int8)
            self.register_buffer("codes", codes if bits == 8 else _packed(codes))
            self.register_buffer("scale", scale)
        else:
            self.weight = nn.Parameter(weight.clone(), requires_grad=False)
        made = torch.randn(_RANK, linear.in_features, generator=chance, dtype=torch.float64)
        self.down = nn.Parameter(made.to(weight.dtype) * 0.3)
        self.up = nn.Parameter(torch.full((linear.out_features, _RANK), 0.01, dtype=weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The frozen product and the adapters'."""
        if self.bits == 0:
            whole = functional.linear(x, self.weight, self.bias)
        else:
            whole = _ProductInFewBits.apply(x, self.codes, self.scale, self.bits)
            whole = whole if self.bias is None else whole + self.bias
        return whole + functional.linear(functional.linear(x, self.down), self.up)


def _packed(codes: torch.Tensor) -> torch.Tensor:
    flat = (codes + 8).to(torch.uint8).flatten()
    flat = functional.pad(flat, (0, len(flat) % 2))
    return flat[::2] * 16 + flat[1::2]


def _decoded(codes: torch.Tensor, scale: torch.Tensor, bits: int, width: int) -> torch.Tensor:
    if bits == 8:
        return codes.to(scale.dtype) * scale
    flat = torch.stack([codes // 16, codes % 16], 1).flatten()[: len(scale) * width]
    return (flat.view(len(scale), width).to(scale.dtype) - 8) * scale


class _ProductInFewBits(torch.autograd.Function):
    """Saves codes in place of the weight, and decodes it once more for the gradient, as libraries of quantised layers do."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, codes: torch.Tensor, scale: torch.Tensor, bits: int) -> torch.Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.bits, ctx.width = bits, x.shape[-1]
        return x @ _decoded(codes, scale, bits, x.shape[-1]).to(x.dtype).t()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        codes, scale = ctx.saved_tensors
        (gradient,) = gradients
        return gradient @ _decoded(codes, scale, ctx.bits, ctx.width).to(gradient.dtype), None, None, None
