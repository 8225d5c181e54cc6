"""Compares the chunked loss of a sample of tokens and its gradient with those of plain code, in the first steps of a real run."""

import dataclasses

import torch
from torch.autograd import grad  # torch's own, whatever the program puts in its place later
from torch.nn import functional

from tightfit.effects.ambient import saved_apart
from tightfit.effects.values.fingerprints import paused
from tightfit.effects.values.value_checks import bound_for, difference
from tightfit.techniques.loss_head.chunked_cross_entropy import ChunkedCrossEntropy, Loss, changed_logits

_MAX_TOKENS = 32
# As it was when this was imported: the program may put its own there.
_CROSS_ENTROPY = functional.cross_entropy


def sample_differs(
    hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, loss: Loss
) -> str:
    """What differs between the two losses of some tokens of `hidden`, `(N, H)`, in words, or nothing. The large gradient of the weight is left out."""
    places = torch.linspace(0, len(hidden) - 1, min(len(hidden), _MAX_TOKENS), device=hidden.device).long()
    rows, classes = hidden.detach()[places], target[places]
    fixed = None if bias is None else bias.detach(), weight.detach()
    device = hidden.device.type
    with torch.enable_grad(), torch.autocast(device, enabled=False), paused(), saved_apart():
        one, other = (rows.clone().requires_grad_() for _ in range(2))
        own_bias = None if bias is None else bias.detach().to(loss.head_type)
        scores = functional.linear(one.to(loss.head_type), weight.detach().to(loss.head_type), own_bias)
        logits = changed_logits(scores, loss.pointwise)
        plain = _CROSS_ENTROPY(
            logits.to(loss.result_type),
            classes,
            ignore_index=loss.ignore_index,
            reduction="sum",
            label_smoothing=loss.label_smoothing,
        )
        sample = dataclasses.replace(loss, reduction="sum", num_chunks=2, gradients_in="forward")
        chunked = ChunkedCrossEntropy.apply(other, *fixed, classes, sample)
        assert isinstance(chunked, torch.Tensor)
        bound = max(bound_for(plain), bound_for(rows), bound_for(torch.empty((), dtype=loss.head_type, device="cpu")))
        if difference(plain, chunked, bound) is not None:
            return "the loss of a sample of tokens"
        (expected,), (found,) = grad(plain, one), grad(chunked, other)
    return "" if difference(expected, found, bound) is None else "the gradient of a sample of tokens"
