"""Attention as serving engines run it: one fused kernel, without a mask in memory.

Registered under a name that transformers has no mask function for, so that no model makes a mask of tokens x tokens: paged kernels take the
lengths of sequences and the width of a window as numbers.
"""

from typing import Any

import torch
from torch.nn import functional

NAME = "fused_without_mask"
_FLASH = (8, 0)


def register() -> None:
    """Makes the name known to transformers; once per process."""
    from transformers import AttentionInterface

    AttentionInterface.register(NAME, attend)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **settings: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of `query` (batch, heads, queries, width) over `key` and `value` (batch, key-value heads, keys, width); returns (batch, queries, heads, width)."""
    is_grouped = query.shape[1] != key.shape[1]
    if is_grouped and torch.cuda.get_device_capability() < _FLASH:
        # The fused kernel of older GPUs takes no groups of heads, and torch would make the whole matrix of scores instead.
        groups = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        is_grouped = False
    # One new token sees all keys; a prompt sees those before each of its tokens.
    is_causal = query.shape[2] > 1 and getattr(module, "is_causal", True)
    out = functional.scaled_dot_product_attention(
        query, key, value, is_causal=is_causal, scale=settings.get("scaling"), enable_gqa=is_grouped
    )
    return out.transpose(1, 2).contiguous(), None
