"""The attention kernel that a card runs, and the routing of `scaled_dot_product_attention` to it.

A CPU build of torch falls back to plain matrix products. `choose_backend` restates `select_sdp_backend` of torch 2.11 to 2.13
(aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, sdp_utils_cpp.h) with the user's own switches, and `scaled_dot_product_attention` does
what the C++ composite does around it (transformers/attention.cpp): so what is saved for the backward pass has the true shapes.
"""

import dataclasses
import math
import os
from collections.abc import Callable
from typing import Literal

import torch
from torch.nn.attention import SDPBackend

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.refusals import name_in_c, refuse_unless
from tightfit.errors.faults import for_torch

Backend = Literal["flash", "cudnn", "efficient", "math"]

aten = torch.ops.aten

# The priority order of a fresh process (aten/src/ATen/Context.h, `sdp_priority_order`): only that one is
# replaced by cuDNN's, an order that the user set is obeyed.
_DEFAULT_ORDER = [
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
    SDPBackend.CUDNN_ATTENTION,
]
_CUDNN_FIRST = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
_HALF = (torch.float16, torch.bfloat16)
_CUDNN_MINUS_INFINITY = -65504.0  # convert_boolean_attn_mask_cudnn
_MASK_ALIGNMENT = 8  # elements, preprocess_mask
_MAX_FLASH_WIDTH = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Call:
    """The arguments of one `scaled_dot_product_attention`."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mask: torch.Tensor | None
    dropout_p: float
    is_causal: bool
    scale: float | None
    enable_gqa: bool

    @property
    def tracks_gradients(self) -> bool:
        """Whether anything is saved for a backward pass (`input_requires_grad`, sdp_utils_cpp.h)."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in (self.query, self.key, self.value))

    @property
    def width(self) -> int:
        """The width of a query head."""
        return self.query.shape[-1]


def _deterministic() -> bool:
    return torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled()


def _priority(card: Card) -> list[SDPBackend]:
    """The order in which kernels are tried: the user's setting, else cuDNN first on Hopper and Blackwell (`check_prefer_cudnn_attention`)."""
    order = [SDPBackend(value) for value in torch._C._get_sdp_priority_order()]
    order = [backend for backend in order if backend != SDPBackend.OVERRIDEABLE]
    return _CUDNN_FIRST if order == _DEFAULT_ORDER and _prefers_cudnn(card) else order


def _prefers_cudnn(card: Card) -> bool:
    """`check_prefer_cudnn_attention` (sdp_utils.cpp): 2.9 asks for another variable and for no cuDNN after 9.15 (pytorch #169849); none before prefers it."""
    major, minor = card.compute_capability
    if card.torch < (2, 9):
        return False
    if card.torch == (2, 9):
        return os.environ.get("TORCH_CUDNN_SDPA_PREFERRED") != "0" and card.compute_capability in ((9, 0), (10, 0))
    return (
        os.environ.get("TORCH_CUDNN_SDPA_DEPRIORITIZED") != "1"
        and card.cudnn_version > 91500
        and major in (9, 10)
        and (card.cuda_version >= (13, 0) or minor in (0, 3))
    )


def _heads_agree(call: _Call, *, enable_gqa: bool, same_key_value: bool = True) -> bool:
    """`check_batch_size_and_num_heads_dense`."""
    query, key, value = call.query, call.key, call.value
    if not query.shape[0] == key.shape[0] == value.shape[0]:
        return False
    heads, key_heads, value_heads = query.shape[-3], key.shape[-3], value.shape[-3]
    if not enable_gqa:
        return heads == key_heads == value_heads
    if same_key_value and key_heads != value_heads:
        return False
    return heads % key_heads == 0 and heads % value_heads == 0


def _last_stride_is_one(call: _Call, *, ignore_single: bool) -> bool:
    """`check_last_dim_stride_equals_1_dense`."""
    dense = all(tensor.stride(-1) == 1 for tensor in (call.query, call.key, call.value)) or (
        ignore_single and call.width == 1
    )
    return dense and (call.mask is None or call.mask.stride(-1) == 1)


def _flash_runs(call: _Call, card: Card) -> bool:
    """`can_use_flash_attention`."""
    width = call.width
    if not torch.backends.cuda.flash_sdp_enabled() or call.mask is not None or not card.between((8, 0), (12, 1)):
        return False
    if (
        call.query.dtype not in _HALF
        or not width == call.key.shape[-1] == call.value.shape[-1]
        or width > _MAX_FLASH_WIDTH
    ):
        return False
    # `check_requires_grad_and_head_dim_gt192_constraints_on_sm86_89_or_120`: the backward kernels for wide
    # heads need more shared memory than these cards have.
    small_shared_memory = card.between((8, 6), (8, 9)) or card.between((12, 0), (12, 1))
    if call.tracks_gradients and small_shared_memory and width > 192 and (call.dropout_p > 0 or width <= 224):
        return False
    # `check_flash_causal_non_square_seqlens`: flash aligns the causal mask to the last key, torch's
    # documentation to the first.
    if call.is_causal and call.query.shape[-2] != call.key.shape[-2]:
        return False
    return _heads_agree(call, enable_gqa=call.enable_gqa) and _last_stride_is_one(call, ignore_single=True)


def _gemm_alignment(query: torch.Tensor, card: Card) -> int:
    """`minimum_gemm_alignment`, in elements."""
    major = card.compute_capability[0]
    half = query.dtype in _HALF
    alignment = 4 if major >= 8 else 1
    if major >= 8 or (major >= 7 and half):
        alignment = max(alignment, 128 // (16 if half else 32))
    return alignment


def _efficient_runs(call: _Call, card: Card) -> bool:
    """`can_use_mem_efficient_attention`; up to torch 2.13 it takes no grouped queries."""
    if not torch.backends.cuda.mem_efficient_sdp_enabled() or not card.between((5, 0), (12, 1)):
        return False
    allowed = (
        (torch.float16, torch.float32, torch.bfloat16)
        if card.compute_capability >= (8, 0)
        else (torch.float16, torch.float32)
    )
    alignment = _gemm_alignment(call.query, card)
    if call.query.dtype not in allowed or call.width != call.key.shape[-1] or call.width % alignment:
        return False
    if call.value.shape[-1] % alignment:
        return False
    return _heads_agree(call, enable_gqa=False) and _last_stride_is_one(call, ignore_single=False)


def _mask_fits(call: _Call) -> bool:
    """`check_attn_mask_shape`."""
    mask, query = call.mask, call.query
    if mask is None:
        return True
    # There is no gradient of the mask in cuDNN's backward pass.
    if mask.requires_grad or mask.shape[-2] not in (1, query.shape[2]) or mask.shape[-1] not in (1, call.key.shape[2]):
        return False
    if mask.dim() == 2:
        return True
    return mask.dim() == 4 and mask.shape[0] in (1, query.shape[0]) and mask.shape[1] in (1, query.shape[1])


def _cudnn_takes_widths(call: _Call, card: Card) -> bool:
    """`check_cudnn_tensor_shapes` and `check_cudnn_d256_bprop_head_dim`."""
    widths = (call.width, call.value.shape[-1])
    limit = 128
    if card.compute_capability[0] in (9, 10):
        if card.cudnn_version > 92200:
            limit = 256
        elif card.cudnn_version >= 91100 and widths == (192, 128):
            limit = 192
    if limit == 256 and call.tracks_gradients and max(widths) > 128 and widths not in ((192, 128), (256, 256)):
        return False
    return max(widths) <= limit and not any(width % 8 for width in widths) and call.key.shape[2] != 1


def _cudnn_runs(call: _Call, card: Card) -> bool:
    """`can_use_cudnn_attention`."""
    if (
        not torch.backends.cuda.cudnn_sdp_enabled()
        or not card.between((8, 0), (12, 1))
        or call.query.dtype not in _HALF
    ):
        return False
    if _deterministic() or card.cudnn_version < 90000:
        return False
    broken = 91100 < card.cudnn_version < 91400
    if call.dropout_p > 0 and (broken or call.dropout_p * 16 % 1 or call.query.shape[2] == 1):
        return False
    return (
        _cudnn_takes_widths(call, card)
        and _mask_fits(call)
        and _heads_agree(call, enable_gqa=call.enable_gqa, same_key_value=False)
        and _last_stride_is_one(call, ignore_single=True)
    )


def _choose(call: _Call, card: Card) -> Backend:
    query, key, value = call.query, call.key, call.value
    same_dtype = query.dtype == key.dtype == value.dtype
    fused = same_dtype and query.dim() == key.dim() == value.dim() == 4 and query.shape[-2] != 0 and key.shape[-2] != 0
    for backend in _priority(card):
        match backend:
            case SDPBackend.CUDNN_ATTENTION if fused and _cudnn_runs(call, card):
                return "cudnn"
            case SDPBackend.FLASH_ATTENTION if fused and _flash_runs(call, card):
                return "flash"
            case SDPBackend.EFFICIENT_ATTENTION if fused and _efficient_runs(call, card):
                return "efficient"
            case SDPBackend.MATH if torch.backends.cuda.math_sdp_enabled():
                return "math"
    raise for_torch(RuntimeError("No available kernel. Aborting execution."))


def choose_backend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    card: Card,
) -> Backend:
    """The kernel that `torch.nn.functional.scaled_dot_product_attention` runs on this card.

    Shapes are (batch, heads, length, width); anything but four dimensions runs as plain matrix products. The user's switches
    (`torch.backends.cuda.enable_*_sdp`, `torch.nn.attention.sdpa_kernel`) are read from torch.

    Raises:
        RuntimeError: when the user's switches leave no kernel, with the words of torch.
    """
    call = _Call(
        query=query,
        key=key,
        value=value,
        mask=attn_mask,
        dropout_p=dropout_p,
        is_causal=is_causal,
        scale=scale,
        enable_gqa=enable_gqa,
    )
    return _choose(call, card)


def _check_dtypes(call: _Call) -> None:
    """`validate_sdpa_input`: queries, keys and values of several dtypes are refused, and a mask of whole numbers, as tokenizers return it."""
    query, key, value = (name_in_c(tensor.dtype) for tensor in (call.query, call.key, call.value))
    refuse_unless(
        query == key == value,
        f"Expected query, key, and value to have the same dtype, but got query.dtype: {query} key.dtype: {key} and value.dtype: {value} instead.",
    )
    mask = call.mask
    if mask is not None:
        refuse_unless(
            mask.dtype in (torch.bool, torch.float32, call.query.dtype),
            f"Expected attn_mask dtype to be bool or float or to match query dtype, but got attn_mask.dtype: {name_in_c(mask.dtype)} and  query.dtype: {query} instead.",
        )


def _additive_mask(mask: torch.Tensor | None, dtype: torch.dtype, minus_infinity: float) -> torch.Tensor | None:
    """`convert_boolean_attn_mask_`: where(mask, 0, -inf) in the type of the queries."""
    if mask is None or mask.dtype is not torch.bool:
        return mask
    other = torch.scalar_tensor(minus_infinity, dtype=dtype, device=mask.device)
    return torch.where(mask, 0.0, other)


def _aligned_mask(mask: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """`preprocess_mask`: rows are padded to multiples of 8 elements where they are not, then broadcast."""
    aligned = all(stride % _MASK_ALIGNMENT == 0 for stride in mask.stride()[:-1]) and mask.stride(-1) == 1
    if not aligned:
        length = mask.shape[-1]
        mask = torch.nn.functional.pad(mask, (0, _MASK_ALIGNMENT - length % _MASK_ALIGNMENT))[..., :length]
    return mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _repeat_heads(query: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    repeats = query.shape[-3] // tensor.shape[-3]
    return tensor.repeat_interleave(repeats, -3) if repeats != 1 else tensor


def _plain_attention(call: _Call, mask: torch.Tensor | None) -> torch.Tensor:
    """`_scaled_dot_product_attention_math`. The composite itself adds the mask out of place for fake tensors, a card adds it in place."""
    query, key, value, scale = call.query, call.key, call.value, call.scale
    dtype = query.dtype
    if dtype in _HALF and not torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed():
        query, key, value = query.float(), key.float(), value.float()
    # Both operands are scaled by the square root, so that half-precision scores do not overflow before the
    # softmax (attention.cpp says so of its own code).
    factor = math.sqrt(1 / math.sqrt(query.shape[-1]) if scale is None else abs(scale))
    query = query * (-factor if scale is not None and scale < 0 else factor)
    if call.is_causal:
        triangle = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = _additive_mask(triangle, query.dtype, -math.inf)
    if call.enable_gqa:
        key, value = _repeat_heads(query, key), _repeat_heads(query, value)
    scores = torch.matmul(query, key.transpose(-2, -1) * factor)
    if mask is not None:
        scores.add_(mask)
    scores = aten._safe_softmax(scores, -1)
    if call.dropout_p > 0:
        scores = torch.dropout(scores, call.dropout_p, True)
    return torch.matmul(scores, value).to(dtype)


def _flash(call: _Call) -> torch.Tensor:
    """Head widths that are not multiples of 8 are padded outside the kernel (`pad_last_dim`), so that the padded copies are saved."""
    query, key, value, width = call.query, call.key, call.value, call.width
    scale = 1 / math.sqrt(width) if call.scale is None else call.scale
    if width % 8:
        query, key, value = (torch.nn.functional.pad(tensor, (0, 8 - width % 8)) for tensor in (query, key, value))
    out = aten._scaled_dot_product_flash_attention(
        query, key, value, call.dropout_p, call.is_causal, False, scale=scale
    )[0]
    return out[..., :width] if width % 8 else out


def _run(call: _Call, card: Card) -> torch.Tensor:
    backend = _choose(call, card)
    query, key, value = call.query, call.key, call.value
    mask = _additive_mask(call.mask, query.dtype, _CUDNN_MINUS_INFINITY if backend == "cudnn" else -math.inf)
    match backend:
        case "flash":
            return _flash(call)
        case "cudnn":
            return aten._scaled_dot_product_cudnn_attention(
                query, key, value, mask, call.tracks_gradients, call.dropout_p, call.is_causal, False, scale=call.scale
            )[0]
        case "efficient":
            bias = None if mask is None else _aligned_mask(mask, query, key)
            return aten._scaled_dot_product_efficient_attention(
                query, key, value, bias, call.tracks_gradients, call.dropout_p, call.is_causal, scale=call.scale
            )[0]
        case "math":
            if call.is_causal and mask is not None:
                raise for_torch(
                    RuntimeError(
                        "_scaled_dot_product_attention: Explicit attn_mask should not be set when is_causal=True"
                    )
                )
            return _plain_attention(call, mask)


def attention_on(card: Card) -> Callable[..., torch.Tensor]:
    """The implementation of `aten::scaled_dot_product_attention` for a card, to be registered under the dispatch keys AutogradCUDA and CUDA."""

    def scaled_dot_product_attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        call = _Call(
            query=query,
            key=key,
            value=value,
            mask=attn_mask,
            dropout_p=dropout_p,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )
        _check_dtypes(call)
        return _run(call, card)

    return scaled_dot_product_attention
