"""Flex attention as its compiled kernel runs it.

Scripts call `torch.compile(flex_attention)`; the eager fallback, which forms all scores, is not what their card executes. The compiled kernel
saves its inputs, its output and one float32 log-sum-exp per query, and its backward pass needs one float32 per query besides the gradients
(torch/_inductor/kernel/flex: `flex_attention`, `flex_attention_backward`). The score and mask functions run inside the kernel and take no memory.
"""

from typing import Any

import torch


class _FlexAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = (*query.shape[:-1], value.shape[-1])
        out = torch.empty_like(query) if shape == query.shape else query.new_empty(shape)
        logsumexp = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.mark_non_differentiable(logsumexp)
        return out, logsumexp

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        query, key, value, _, logsumexp = ctx.saved_tensors
        assert grads[0] is not None
        # Row sums of dO * O, needed before the gradients and freed with them.
        delta = torch.empty_like(logsumexp)
        gradients = (torch.empty_like(query), torch.empty_like(key), torch.empty_like(value))
        del delta
        return gradients


def flex_attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Replaces `torch.nn.attention.flex_attention.flex_attention`: outputs and saved tensors by shape.

    Shapes are (batch, heads, length, width). With `return_lse=True` the log-sum-exp is returned too, scaled into a new tensor as torch does; with
    `return_aux=AuxRequest(...)`, which replaces it from torch 2.9 on, what is requested, as an `AuxOutput`.
    """
    out, logsumexp = _FlexAttention.apply(query, key, value)
    if (request := kwargs.get("return_aux")) is not None:
        from torch.nn.attention.flex_attention import AuxOutput

        lse = logsumexp * 0.6931471805599453 if request.lse else None
        # The largest score of each query: one float32 each, as the log-sum-exp.
        return out, AuxOutput(lse=lse, max_scores=torch.empty_like(logsumexp) if request.max_scores else None)
    # After query, key and value: score_mod, block_mask, scale, enable_gqa, return_lse.
    if kwargs.get("return_lse") or args[4:5] == (True,):
        # The kernel works with powers of two; torch multiplies by ln 2 (torch/nn/attention/flex_attention.py).
        return out, logsumexp * 0.6931471805599453
    return out
