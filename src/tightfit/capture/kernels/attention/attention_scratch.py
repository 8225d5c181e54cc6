"""Scratch memory of the fused attention kernels.

Flash attention accumulates the gradient of the queries in float32 and, for grouped queries, writes the gradients of keys and values per query
head before it sums them. The memory-efficient kernels (CUTLASS) keep tiles of gradients in a float32 workspace. cuDNN states its workspace at
run time; its known part is the float32 gradient of the queries, or the scores of one layer where they are small.
Sources under aten/src/ATen/native/transformers/cuda: flash_attn/flash_api.cpp, attention.cu, attention_backward.cu,
mem_eff_attention/kernel_backward.h and generate_kernels.py; for cuDNN: cudnn-frontend, node/scaled_dot_product_flash_attention.h.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.architecture import Card
from tightfit.capture.kernels.rule import Arguments, Outputs, Rule, Uncertain, ceil_div, num_bytes, round_up

aten = torch.ops.aten

_MAX_SPLITS = 128


def _num_splits(blocks: int, num_multiprocessors: int, num_key_blocks: int) -> int:
    """`num_splits_heuristic`, flash_api.cpp: the fewest splits of the keys that reach 85 % of the best occupancy."""
    if blocks >= 0.8 * num_multiprocessors:
        return 1
    most = min(_MAX_SPLITS, num_multiprocessors, num_key_blocks)
    efficiency: dict[int, float] = {}
    for splits in range(1, most + 1):
        if splits == 1 or ceil_div(num_key_blocks, splits) != ceil_div(num_key_blocks, splits - 1):
            waves = blocks * splits / num_multiprocessors
            efficiency[splits] = waves / ceil_div(blocks * splits, num_multiprocessors)
    best = max(efficiency.values())
    return next(splits for splits, value in efficiency.items() if value >= 0.85 * best)


def _flash_forward(arguments: Arguments, _outputs: Outputs, card: Card) -> Iterator[int]:
    """`mha_fwd` and `set_params_splitkv`: few queries and many keys are split, each split with its own output in float32."""
    query, key = arguments["query"], arguments["key"]
    batch, heads, length, width = query.shape
    key_heads, key_length = key.shape[1], key.shape[2]
    if arguments["dropout_p"] > 0:
        yield 16  # the state of the generator is made anew
        return
    # `seqlenq_ngroups_swapped`, flash_api.cpp: while decoding, the queries of one key head are run as if they
    # were positions.
    if length == 1 and heads > key_heads:
        length, heads = heads // key_heads, key_heads
    # `block_n` and the 64 queries of a block in `set_params_splitkv`; the factor 2 is its `num_sm * 2`.
    block = 256 if width <= 64 else 128 if width <= 128 else 64
    splits = _num_splits(
        batch * heads * ceil_div(length, 64), card.num_multiprocessors * 2, ceil_div(key_length, block)
    )
    if splits > 1:
        rounded = round_up(width, 32) if round_up(width, 32) < 224 else 256
        # `softmax_lse_accum`, then `out_accum`: both are combined by a second kernel.
        yield splits * batch * heads * length * 4
        yield splits * batch * heads * length * rounded * 4


def _flash_backward(arguments: Arguments, _outputs: Outputs, card: Card) -> Iterator[int]:
    """`_flash_attention_backward` and `mha_bwd`."""
    query, key, grad, out = (arguments[name] for name in ("query", "key", "grad_out", "out"))
    batch, heads, length, width = query.shape
    key_heads, key_length = key.shape[1], key.shape[2]
    # The kernel takes (batch, length, heads, width); the composite hands over transposed views, which are
    # contiguous only if the model's own tensors lay that way.
    for tensor in (grad, out):
        if not tensor.transpose(1, 2).is_contiguous():
            yield num_bytes(tensor)
    rounded_length = round_up(length, 128)
    rounded_width = round_up(width, 32) if width <= 192 else 256
    # `softmax_d`, the row sums of dO * O.
    yield batch * heads * rounded_length * 4
    splits = 1
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        # Deterministic mode gives each split of the keys a `dq_accum` of its own instead of atomic additions,
        # and sums them afterwards.
        splits = ceil_div(card.num_multiprocessors, batch * heads)
    yield splits * batch * heads * rounded_length * rounded_width * 4
    if key_heads != heads:
        # `dk_expanded` and `dv_expanded`, summed over the queries of each key head at the end.
        expanded = batch * heads * key_length * width * query.element_size()
        yield expanded
        yield expanded


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tile:
    """One compiled backward kernel of mem_eff_attention: queries by keys in a block, and the widest head it takes."""

    queries: int
    keys: int
    width: int
    in_registers: bool  # keeps the gradients of keys and values in registers
    whole_blocks: bool = False  # only for lengths that are multiples of the block


def _backward_tiles(card: Card, dtype: torch.dtype) -> list[_Tile]:
    """The kernels in the order in which they are tried (`BwdKernel.get_all`, generate_kernels.py)."""
    half = dtype in (torch.float16, torch.bfloat16)
    ampere = card.compute_capability >= (8, 0)
    big = ampere or (card.compute_capability >= (7, 0) and half)
    tiles = []
    for width in (32, 64, 96, 128, 65536):
        # Made for the heads of Stable Diffusion (width 80): it alone keeps its outputs in registers on 8.6 and
        # 8.9, and it takes only lengths that fill its blocks.
        if width == 96:
            if half and ampere:
                tiles.append(_Tile(queries=128, keys=64, width=96, in_registers=True, whole_blocks=True))
            continue
        for queries in (128, 64) if big and width > 64 else (64,):
            in_registers = half and width <= queries
            keys = 128 if in_registers and ampere and width > 64 else 64
            tiles.append(_Tile(queries=queries, keys=keys, width=width, in_registers=in_registers))
    return tiles


def _tile_shared_memory(tile: _Tile, element_bytes: int) -> int:
    """An estimate of a kernel's shared memory: operand tiles in three stages and the tile of scores, in bytes."""
    depth = min(tile.width, 128)
    return (tile.queries + tile.keys) * depth * element_bytes + tile.queries * tile.keys * (element_bytes + 4) // 2


def _backward_tile(card: Card, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> _Tile:
    width = max(query.shape[3], value.shape[3])
    for tile in _backward_tiles(card, query.dtype):
        misaligned = tile.whole_blocks and (query.shape[2] % tile.queries or key.shape[2] % tile.keys)
        fits = _tile_shared_memory(tile, query.element_size()) <= card.shared_memory_per_block_bytes
        if tile.width >= width and not misaligned and fits:
            return tile
    # torch raises where no kernel fits; the smallest one stands in for that, as the shared memory here is an
    # estimate.
    return _Tile(queries=64, keys=64, width=65536, in_registers=False)


def _efficient_forward(arguments: Arguments, _outputs: Outputs, _card: Card) -> Iterator[int]:
    """`_efficient_attention_forward`: half-precision heads wider than 128 accumulate in float32 outside the registers."""
    query, value = arguments["query"], arguments["value"]
    if query.element_size() == 2 and max(query.shape[3], value.shape[3]) > 128:
        yield query.shape[:3].numel() * value.shape[3] * 4


def _efficient_backward(arguments: Arguments, _outputs: Outputs, card: Card) -> Iterator[int]:
    """`_efficient_attention_backward`: delta, then the workspace (`workspace_size`, kernel_backward.h)."""
    query, key, value, grad = (arguments[name] for name in ("query", "key", "value", "grad_out_"))
    batch, heads, length, width = query.shape
    key_length, value_width = key.shape[2], value.shape[3]
    blocks = 0
    if not grad.transpose(1, 2).is_contiguous():
        yield num_bytes(grad)
        blocks += 1
    tile = _backward_tile(card, query, key, value)
    rows = batch * heads * length * 4
    half = query.element_size() == 2
    # `kKernelComputesDelta`, kernel_backward.h.
    if half and (tile.in_registers or card.compute_capability != (7, 0)):
        yield rows
    else:  # (grad.float() * out.float()).sum(-1).transpose(-2, -1).contiguous()
        full = batch * heads * length * value_width * 4
        for _ in range(3 if half else 1):
            yield full
            blocks += 1
        yield rows
        yield rows
        yield -(blocks + 1)
        for index in range(3 if half else 1):
            yield -(blocks - index)
    splits = ceil_div(key_length, tile.keys)
    # `num_splits_key`, attention_backward.cu: enough blocks without splitting the keys; and a staging area for
    # the gradients of keys and values (`kNeedsAccumGradK`) is kept small.
    if batch * heads * splits >= 256 and key_length <= 2 * tile.keys:
        splits = 1
    accumulates = half and not tile.in_registers
    if accumulates:
        splits = min(splits, 200 // (batch * heads))
    splits = max(splits, 1)
    if torch.are_deterministic_algorithms_enabled() and not torch.is_deterministic_algorithms_warn_only_enabled():
        splits = 1
    # `workspace_elements_gk`, `_gv` and `_gq`, in float32, per batch and head.
    elements = 0
    if accumulates:
        elements += splits * tile.keys * (round_up(width, tile.queries) + round_up(value_width, tile.queries))
    elements += ceil_div(length, tile.queries) * ceil_div(width, tile.keys) * (16 + 4 * tile.queries * tile.keys) // 4
    yield batch * heads * round_up(elements, 4) * 4


_SCORES_LIMIT = 256 * 1024 * 1024  # max_dp_workspace_bytes, cudnn-frontend


def cudnn_backward_workspace_bytes(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, card: Card
) -> tuple[int, int, int]:
    """The workspace of cuDNN's attention backward as (likely, low, high) bytes.

    Every engine needs the row sums of dO * O and, on cards before compute capability 9.0 or where the scores of one layer exceed 256 MiB, the
    gradient of the queries in float32. Grouped queries add the gradients of keys and values for every query head. cuDNN 9 chooses by itself
    on newer cards; the larger of both is likely, because its engines there accumulate the queries' gradient too.
    """
    batch, heads, length, width = query.shape
    key_length = key.shape[2]
    sums = batch * heads * round_up(length, 64) * 4
    accumulated = batch * heads * round_up(length, 64) * width * 4
    scores = batch * heads * round_up(length, 64) * round_up(key_length, 64) * 2
    grouped = 0
    if key.shape[1] != heads:
        grouped = batch * heads * key_length * (width + value.shape[3]) * query.element_size()
    likely = sums + accumulated + grouped
    if card.compute_capability >= (9, 0) and scores <= _SCORES_LIMIT:
        return likely, min(sums + grouped, likely), max(likely, sums + scores + grouped)
    return likely, sums + grouped, likely


def _cudnn_backward(arguments: Arguments, _outputs: Outputs, card: Card) -> Iterator[int]:
    """`run_cudnn_SDP_bprop` (aten/src/ATen/native/cudnn/MHA.cpp)."""
    grad: torch.Tensor = arguments["grad_out"]
    if grad.stride(-1) != 1:
        yield num_bytes(grad)
    yield Uncertain.between(
        *cudnn_backward_workspace_bytes(arguments["query"], arguments["key"], arguments["value"], card)
    )


_FAMILIES: tuple[tuple[Rule, Sequence[OpOverload]], ...] = (
    (_flash_forward, (aten._scaled_dot_product_flash_attention.default,)),
    (_flash_backward, (aten._scaled_dot_product_flash_attention_backward.default,)),
    (_efficient_forward, (aten._scaled_dot_product_efficient_attention.default,)),
    (_efficient_backward, (aten._scaled_dot_product_efficient_attention_backward.default,)),
    (_cudnn_backward, (aten._scaled_dot_product_cudnn_attention_backward.default,)),
)

RULES: dict[OpOverload, Rule] = {operator: rule for rule, operators in _FAMILIES for operator in operators}
