"""The table of calls, and its first half: products, convolutions, normalisations, lookups, losses, arithmetic."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

FLOAT, HALF, BFLOAT, DOUBLE = torch.float32, torch.float16, torch.bfloat16, torch.float64
LONG, INT, SHORT, BYTE, BOOL = torch.int64, torch.int32, torch.int16, torch.uint8, torch.bool
COMPLEX = torch.complex64
ALL = (FLOAT, HALF, BFLOAT, DOUBLE, LONG, INT, BYTE, BOOL, COMPLEX)
SEVERAL, THREE, INDICES = (FLOAT, HALF, BFLOAT, LONG, BOOL), (FLOAT, HALF, LONG), (LONG, INT, BYTE, BOOL, FLOAT)

# The size of an argument, the dtypes that it is given, and the one that it has where devices are mixed.
Argument = tuple[tuple[int, ...], tuple[torch.dtype, ...], torch.dtype]
CALLS: dict[str, tuple[Callable[..., Any], tuple[Argument, ...]]] = {}


def call(name: str, function: Callable[..., Any], *arguments: Argument) -> None:
    """Adds a call to the table."""
    CALLS[name] = (function, arguments)


def in_place(name: str, *others: Any) -> Callable[..., Any]:
    """A method that writes to a copy of its tensor."""
    return lambda tensor, *more: getattr(tensor.clone(), name)(*more, *others)


def of_regular(function: Callable[..., Any], matrix: torch.Tensor) -> Any:
    """A function of linear algebra, of a matrix that has an inverse."""
    return function(matrix + 4 * torch.eye(4, device=matrix.device).to(matrix.dtype))


def recurrent(kind: str, inputs: torch.Tensor, weight: torch.Tensor) -> Any:
    """A recurrent net, whose weights are where `weight` is, in its dtype."""
    return getattr(torch.nn, kind)(4, 5).to(weight)(inputs)


def of(*size: int, dtypes: tuple[torch.dtype, ...] = ALL, usual: torch.dtype = FLOAT) -> Argument:
    """An argument of ones."""
    return size, dtypes, usual


call("mm", torch.mm, of(3, 4), of(4, 5))
call("matmul3", torch.matmul, of(2, 3, 4), of(4, 5))
call("matmulv", torch.matmul, of(3, 4), of(4, dtypes=SEVERAL))
call("bmm", torch.bmm, of(2, 3, 4), of(2, 4, 5))
call("addmm", torch.addmm, of(3, 5, dtypes=SEVERAL), of(3, 4, dtypes=SEVERAL), of(4, 5, dtypes=SEVERAL))
call("addmm1", torch.addmm, of(5, dtypes=THREE), of(3, 4, dtypes=THREE), of(4, 5, dtypes=THREE))
call("baddbmm", torch.baddbmm, of(2, 3, 5, dtypes=THREE), of(2, 3, 4, dtypes=THREE), of(2, 4, 5, dtypes=THREE))
call("mv", torch.mv, of(3, 4, dtypes=SEVERAL), of(4, dtypes=SEVERAL))
call("dot", torch.dot, of(4, dtypes=SEVERAL), of(4, dtypes=SEVERAL))
call("outer", torch.outer, of(4, dtypes=SEVERAL), of(4, dtypes=SEVERAL))
call("addmv", torch.addmv, of(3, dtypes=THREE), of(3, 4, dtypes=THREE), of(4, dtypes=THREE))
call("einsum", lambda a, b: torch.einsum("ij,jk->ik", a, b), of(3, 4, dtypes=SEVERAL), of(4, 5, dtypes=SEVERAL))
call("linear", F.linear, of(3, 4), of(5, 4))
call("linear3", F.linear, of(2, 3, 4, dtypes=SEVERAL), of(5, 4, dtypes=SEVERAL), of(5, dtypes=SEVERAL))
call("linear2", F.linear, of(3, 4, dtypes=SEVERAL), of(5, 4, dtypes=SEVERAL), of(5, dtypes=SEVERAL))
call("bilinear", F.bilinear, of(3, 4, dtypes=THREE), of(3, 5, dtypes=THREE), of(2, 4, 5, dtypes=THREE))
call("addr", torch.addr, of(3, 4, dtypes=THREE), of(3, dtypes=THREE), of(4, dtypes=THREE))
call("addbmm", torch.addbmm, of(3, 5, dtypes=THREE), of(2, 3, 4, dtypes=THREE), of(2, 4, 5, dtypes=THREE))
call("chain", lambda a, b: torch.linalg.multi_dot([a, b]), of(3, 4, dtypes=SEVERAL), of(4, 5, dtypes=SEVERAL))
call("kron", torch.kron, of(3, 4, dtypes=SEVERAL), of(4, 5, dtypes=SEVERAL))
call("tensordot", lambda a, b: torch.tensordot(a, b, 1), of(3, 4, dtypes=SEVERAL), of(4, 5, dtypes=SEVERAL))
for n, fn, x, w in (
    ("conv1d", F.conv1d, (2, 3, 8), (4, 3, 3)),
    ("conv2d", F.conv2d, (2, 3, 8, 8), (4, 3, 3, 3)),
    ("conv3d", F.conv3d, (1, 3, 4, 4, 4), (4, 3, 3, 3, 3)),
    ("convT2d", F.conv_transpose2d, (2, 4, 8, 8), (4, 3, 3, 3)),
    ("convT1d", F.conv_transpose1d, (2, 4, 8), (4, 3, 3)),
):
    call(n, fn, of(*x), of(*w))
    call(
        n + "b", fn, of(*x, dtypes=SEVERAL), of(*w, dtypes=SEVERAL), of(w[0] if "T" not in n else w[1], dtypes=SEVERAL)
    )
call(
    "layer_norm",
    lambda x, w, b: F.layer_norm(x, (4,), w, b),
    of(3, 4, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
)
call("layer_norm0", lambda x: F.layer_norm(x, (4,)), of(3, 4))
call("rms_norm", lambda x, w: F.rms_norm(x, (4,), w), of(3, 4), of(4))
call(
    "group_norm",
    lambda x, w, b: F.group_norm(x, 2, w, b),
    of(2, 4, 3, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
)
call("group_norm0", lambda x: F.group_norm(x, 2), of(2, 4, 3))
call(
    "batch_norm_e",
    F.batch_norm,
    of(2, 4, 3, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
)
call(
    "batch_norm_t",
    lambda x, w, b: F.batch_norm(x, None, None, w, b, True),
    of(2, 4, 3, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
)
call(
    "batch_norm_r",
    lambda x, m, v: F.batch_norm(x, m, v, None, None, True),
    of(2, 4, 3, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
    of(4, dtypes=SEVERAL),
)
call("instance_norm", F.instance_norm, of(2, 4, 3))
call("normalize", F.normalize, of(3, 4))
call("lrn", lambda x: F.local_response_norm(x, 2), of(2, 4, 3))
call("embedding", F.embedding, of(2, 3, dtypes=INDICES, usual=LONG), of(5, 4))
call("embedding_bag", F.embedding_bag, of(2, 3, dtypes=INDICES, usual=LONG), of(5, 4))
call("index_select", lambda x, i: x.index_select(0, i), of(3, 4), of(2, dtypes=INDICES, usual=LONG))
call("gather", lambda x, i: x.gather(1, i), of(3, 4), of(3, 2, dtypes=INDICES, usual=LONG))
call("take", torch.take, of(3, 4, dtypes=SEVERAL), of(2, dtypes=INDICES, usual=LONG))
call(
    "take_along",
    lambda x, i: torch.take_along_dim(x, i, 1),
    of(3, 4, dtypes=SEVERAL),
    of(3, 2, dtypes=INDICES, usual=LONG),
)
call(
    "scatter",
    lambda x, i, s: x.scatter(1, i, s),
    of(3, 4, dtypes=SEVERAL),
    of(3, 2, dtypes=INDICES, usual=LONG),
    of(3, 2, dtypes=SEVERAL),
)
call(
    "scatter_add",
    lambda x, i, s: x.scatter_add(1, i, s),
    of(3, 4, dtypes=SEVERAL),
    of(3, 2, dtypes=INDICES, usual=LONG),
    of(3, 2, dtypes=SEVERAL),
)
call(
    "scatter_reduce",
    lambda x, i, s: x.scatter_reduce(1, i, s, "amax"),
    of(3, 4, dtypes=SEVERAL),
    of(3, 2, dtypes=INDICES, usual=LONG),
    of(3, 2, dtypes=SEVERAL),
)
call("scatter_value", lambda x, i: x.scatter(1, i, 1.5), of(3, 4), of(3, 2, dtypes=INDICES, usual=LONG))
call(
    "index_add",
    lambda x, i, s: x.index_add(0, i, s),
    of(3, 4, dtypes=SEVERAL),
    of(2, dtypes=INDICES, usual=LONG),
    of(2, 4, dtypes=SEVERAL),
)
call(
    "index_copy",
    lambda x, i, s: x.index_copy(0, i, s),
    of(3, 4, dtypes=SEVERAL),
    of(2, dtypes=INDICES, usual=LONG),
    of(2, 4, dtypes=SEVERAL),
)
call("index_fill", lambda x, i: x.index_fill(0, i, 1.5), of(3, 4), of(2, dtypes=INDICES, usual=LONG))
call(
    "index_reduce",
    lambda x, i, s: x.index_reduce(0, i, s, "amax"),
    of(3, 4, dtypes=THREE),
    of(2, dtypes=INDICES, usual=LONG),
    of(2, 4, dtypes=THREE),
)
call("index", lambda x, i: x[i], of(3, 4, dtypes=SEVERAL), of(3, dtypes=(*INDICES, HALF), usual=LONG))
call(
    "index_put",
    lambda x, i, s: x.index_put((i,), s),
    of(3, 4, dtypes=SEVERAL),
    of(3, dtypes=INDICES, usual=LONG),
    of(3, 4, dtypes=SEVERAL),
)
call(
    "index_acc",
    lambda x, i, s: x.index_put((i,), s, accumulate=True),
    of(3, 4, dtypes=THREE),
    of(3, dtypes=(LONG,), usual=LONG),
    of(3, 4, dtypes=THREE),
)
call(
    "setitem",
    lambda x, i, s: x.clone().__setitem__(i, s),
    of(3, 4, dtypes=SEVERAL),
    of(3, dtypes=INDICES, usual=LONG),
    of(3, 4, dtypes=SEVERAL),
)
call(
    "setitem0",
    lambda x, i, s: x.clone().__setitem__(i, s),
    of(3, 4, dtypes=THREE),
    of(3, 4, dtypes=(BOOL, BYTE), usual=BOOL),
    of(dtypes=SEVERAL),
)
call("setslice", lambda x, s: x.clone().__setitem__(slice(0, 2), s), of(3, 4), of(2, 4))
call("masked_fill", lambda x, m: x.masked_fill(m, 1.5), of(3, 4), of(3, 4, dtypes=INDICES, usual=BOOL))
call(
    "masked_fill_t",
    lambda x, m, v: x.masked_fill(m, v),
    of(3, 4, dtypes=SEVERAL),
    of(3, 4, dtypes=(BOOL, BYTE), usual=BOOL),
    of(dtypes=SEVERAL),
)
call("masked_select", torch.masked_select, of(3, 4, dtypes=SEVERAL), of(3, 4, dtypes=INDICES, usual=BOOL))
call(
    "masked_scatter",
    lambda x, m, s: x.masked_scatter(m, s),
    of(3, 4, dtypes=SEVERAL),
    of(3, 4, dtypes=(BOOL, BYTE, LONG), usual=BOOL),
    of(3, 4, dtypes=SEVERAL),
)
call("where", torch.where, of(3, 4, dtypes=INDICES, usual=BOOL), of(3, 4, dtypes=SEVERAL), of(3, 4, dtypes=SEVERAL))
call("one_hot", lambda i: F.one_hot(i, 5), of(3, dtypes=ALL, usual=LONG))
call("bucketize", torch.bucketize, of(3, 4, dtypes=SEVERAL), of(4, dtypes=SEVERAL))
call("searchsorted", torch.searchsorted, of(4, dtypes=SEVERAL), of(3, 4, dtypes=SEVERAL))
call("ce", F.cross_entropy, of(3, 5, dtypes=SEVERAL), of(3, dtypes=ALL, usual=LONG))
call("ce_prob", F.cross_entropy, of(3, 5), of(3, 5))
call(
    "ce_w",
    F.cross_entropy,
    of(3, 5, dtypes=SEVERAL),
    of(3, dtypes=(LONG, BYTE, INT), usual=LONG),
    of(5, dtypes=SEVERAL),
)
call("ce2d", F.cross_entropy, of(2, 5, 3, 3, dtypes=SEVERAL), of(2, 3, 3, dtypes=ALL, usual=LONG))
call(
    "ce_smooth",
    lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1),
    of(3, 5, dtypes=SEVERAL),
    of(3, dtypes=ALL, usual=LONG),
)
call("nll", F.nll_loss, of(3, 5, dtypes=SEVERAL), of(3, dtypes=ALL, usual=LONG))
call("multi_margin", F.multi_margin_loss, of(3, 5, dtypes=SEVERAL), of(3, dtypes=INDICES, usual=LONG))
call("multilabel_margin", F.multilabel_margin_loss, of(3, 5, dtypes=SEVERAL), of(3, 5, dtypes=INDICES, usual=LONG))
for n, fn in (
    ("bce", F.binary_cross_entropy),
    ("bce_logits", F.binary_cross_entropy_with_logits),
    ("mse", F.mse_loss),
    ("l1", F.l1_loss),
    ("smooth_l1", F.smooth_l1_loss),
    ("huber", F.huber_loss),
    ("kl", F.kl_div),
    ("poisson", F.poisson_nll_loss),
    ("soft_margin", F.soft_margin_loss),
    ("hinge", F.hinge_embedding_loss),
    ("multilabel_soft", F.multilabel_soft_margin_loss),
    ("cosine", F.cosine_similarity),
    ("pairwise", F.pairwise_distance),
    ("cdist", torch.cdist),
):
    call(n, fn, of(3, 5), of(3, 5))
call("bce_w", F.binary_cross_entropy, of(3, 5, dtypes=THREE), of(3, 5, dtypes=THREE), of(3, 5, dtypes=THREE))
call(
    "bce_pos",
    lambda x, t, w: F.binary_cross_entropy_with_logits(x, t, pos_weight=w),
    of(3, 5, dtypes=SEVERAL),
    of(3, 5, dtypes=SEVERAL),
    of(5, dtypes=SEVERAL),
)
call("triplet", F.triplet_margin_loss, of(3, 5, dtypes=THREE), of(3, 5, dtypes=THREE), of(3, 5, dtypes=THREE))
call("margin_rank", F.margin_ranking_loss, of(3, dtypes=THREE), of(3, dtypes=THREE), of(3, dtypes=THREE))
call("cos_emb", F.cosine_embedding_loss, of(3, 5, dtypes=THREE), of(3, 5, dtypes=THREE), of(3, dtypes=THREE))
call("gnll", F.gaussian_nll_loss, of(3, 5, dtypes=THREE), of(3, 5, dtypes=THREE), of(3, 5, dtypes=THREE))
call(
    "ctc",
    lambda x, t: F.ctc_loss(x, t, torch.tensor([6, 6]), torch.tensor([2, 2])),
    of(6, 2, 5, dtypes=SEVERAL),
    of(2, 2, dtypes=INDICES, usual=LONG),
)
for n in (
    "add",
    "sub",
    "mul",
    "div",
    "pow",
    "remainder",
    "fmod",
    "floor_divide",
    "bitwise_and",
    "bitwise_or",
    "bitwise_left_shift",
    "eq",
    "lt",
    "maximum",
    "minimum",
    "fmax",
    "atan2",
    "logical_and",
    "true_divide",
    "hypot",
    "logaddexp",
    "xlogy",
    "copysign",
    "gcd",
    "heaviside",
):
    fn = getattr(torch, n)
    call(n, fn, of(3, 4), of(3, 4))
for n in (
    "add_",
    "sub_",
    "mul_",
    "div_",
    "pow_",
    "copy_",
    "bitwise_and_",
    "remainder_",
    "logical_and_",
    "eq_",
    "floor_divide_",
    "clamp_max_",
):
    call(n, in_place(n), of(3, 4), of(3, 4))
    call(n + "0", in_place(n), of(3, 4), of())
for n in ("add_", "sub_", "mul_", "div_", "pow_", "fill_", "clamp_", "clamp_min_"):
    call(n + "s", in_place(n, 1.5), of(3, 4))
call("add_is", in_place("add_", 2), of(3, 4))
