"""The second half of the table of calls: what writes in place, one argument, images, attention, recurrent nets, linear algebra, Python's operators."""

import functools

import torch
import torch.nn.functional as F
from called import (
    BFLOAT,
    BYTE,
    DOUBLE,
    FLOAT,
    HALF,
    SEVERAL,
    THREE,
    call,
    in_place,
    of,
    of_regular,
    recurrent,
)

for n in (
    "zero_",
    "normal_",
    "uniform_",
    "exponential_",
    "bernoulli_",
    "random_",
    "relu_",
    "sigmoid_",
    "exp_",
    "neg_",
    "sqrt_",
    "round_",
    "abs_",
    "cauchy_",
    "log_normal_",
    "tanh_",
    "floor_",
    "sign_",
    "rsqrt_",
    "logical_not_",
):
    call(n + "u", in_place(n), of(3, 4))
call("geometric_pu", in_place("geometric_", 0.5), of(3, 4))
call("lerp", torch.lerp, of(3, 4, dtypes=THREE), of(3, 4, dtypes=THREE), of(3, 4, dtypes=THREE))
call("lerps", lambda a, b: torch.lerp(a, b, 0.5), of(3, 4), of(3, 4))
call("lerp_", lambda a, b: a.clone().lerp_(b, 0.5), of(3, 4), of(3, 4))
call("addcmul", torch.addcmul, of(3, 4, dtypes=SEVERAL), of(3, 4, dtypes=SEVERAL), of(3, 4, dtypes=SEVERAL))
call(
    "addcmul_",
    lambda a, b, c: a.clone().addcmul_(b, c),
    of(3, 4, dtypes=SEVERAL),
    of(3, 4, dtypes=SEVERAL),
    of(3, 4, dtypes=SEVERAL),
)
call("addcdiv", torch.addcdiv, of(3, 4, dtypes=SEVERAL), of(3, 4, dtypes=SEVERAL), of(3, 4, dtypes=SEVERAL))
call(
    "addcdiv_",
    lambda a, b, c: a.clone().addcdiv_(b, c),
    of(3, 4, dtypes=SEVERAL),
    of(3, 4, dtypes=SEVERAL),
    of(3, 4, dtypes=SEVERAL),
)
call("clamp_t", lambda a, b: torch.clamp(a, min=b), of(3, 4), of(3, 4))
call("cat", lambda a, b: torch.cat([a, b]), of(3, 4), of(3, 4))
call("stack", lambda a, b: torch.stack([a, b]), of(3, 4), of(3, 4))
call("cross", torch.linalg.cross, of(4, 3, dtypes=SEVERAL), of(4, 3, dtypes=SEVERAL))
call("isclose", torch.isclose, of(3, 4, dtypes=SEVERAL), of(3, 4, dtypes=SEVERAL))
call("allclose", torch.allclose, of(3, 4, dtypes=THREE), of(3, 4, dtypes=THREE))
call("equal", torch.equal, of(3, 4), of(3, 4))
call("complex", torch.complex, of(3, dtypes=SEVERAL), of(3, dtypes=SEVERAL))
call("polar", torch.polar, of(3, dtypes=SEVERAL), of(3, dtypes=SEVERAL))
call("prelu", F.prelu, of(3, 4), of(1))
call("glu", F.glu, of(3, 4))
for n in (
    "exp",
    "log",
    "sqrt",
    "rsqrt",
    "sin",
    "tanh",
    "sigmoid",
    "erf",
    "erfinv",
    "floor",
    "ceil",
    "round",
    "trunc",
    "abs",
    "neg",
    "sign",
    "logical_not",
    "bitwise_not",
    "reciprocal",
    "square",
    "isnan",
    "isfinite",
    "log1p",
    "expm1",
    "lgamma",
    "digamma",
    "relu",
    "frac",
    "angle",
    "conj_physical",
    "real",
    "view_as_real",
    "imag",
    "sum",
    "mean",
    "var",
    "std",
    "norm",
    "prod",
    "max",
    "min",
    "argmax",
    "amax",
    "median",
    "nanmean",
    "nansum",
    "logsumexp1",
    "cumsum1",
    "cumprod1",
    "cummax1",
    "logcumsumexp1",
    "sort",
    "argsort",
    "unique",
    "nonzero",
    "count_nonzero",
    "all",
    "any",
    "tril",
    "triu",
    "diag",
    "trace",
    "bincount1",
    "multinomial",
    "bernoulli",
    "diff",
    "flip0",
    "roll1",
    "cov",
    "corrcoef",
    "mode",
    "kthvalue2",
    "topk2",
    "aminmax",
    "var_mean",
    "std_mean",
    "msort",
    "fft",
    "rfft",
    "nan_to_num",
    "histc",
    "quantile",
    "sinc",
    "i0",
    "softmax1",
    "log_softmax1",
    "renorm",
    "vander1",
    "trapezoid",
    "rot90",
    "clone",
    "isinf",
    "signbit",
    "logit",
    "poisson",
    "dropout_",
    "rand_like",
    "randn_like",
    "randint_like",
    "zeros_like",
    "full_like_",
):
    special = {
        "logsumexp1": lambda a: torch.logsumexp(a, 1),
        "cumsum1": lambda a: torch.cumsum(a, 1),
        "cumprod1": lambda a: torch.cumprod(a, 1),
        "cummax1": lambda a: torch.cummax(a, 1),
        "logcumsumexp1": lambda a: torch.logcumsumexp(a, 1),
        "bincount1": lambda a: torch.bincount(a[0]),
        "multinomial": lambda a: torch.multinomial(a, 2),
        "flip0": lambda a: a.flip(0),
        "roll1": lambda a: a.roll(1),
        "kthvalue2": lambda a: a.kthvalue(2),
        "topk2": lambda a: a.topk(2),
        "fft": torch.fft.fft,
        "rfft": torch.fft.rfft,
        "quantile": lambda a: torch.quantile(a, 0.5),
        "softmax1": lambda a: torch.softmax(a, 1),
        "log_softmax1": lambda a: torch.log_softmax(a, 1),
        "renorm": lambda a: a.renorm(2, 0, 1.0),
        "vander1": lambda a: torch.vander(a[0]),
        "trapezoid": torch.trapezoid,
        "dropout_": lambda a: F.dropout(a, 0.5),
        "randint_like": lambda a: torch.randint_like(a, 5),
        "full_like_": lambda a: torch.full_like(a, 1.5),
        "amax": lambda a: a.amax(1),
    }
    call("u_" + n, special.get(n) or getattr(torch, n), of(4, 4))
for n in (
    "gelu",
    "silu",
    "elu",
    "selu",
    "celu",
    "leaky_relu",
    "hardtanh",
    "hardswish",
    "hardsigmoid",
    "softplus",
    "logsigmoid",
    "mish",
    "relu6",
    "softsign",
    "tanhshrink",
    "threshold_",
    "rrelu",
    "hardshrink",
    "softshrink",
    "alpha_dropout",
    "feature_dropout",
    "gumbel_softmax",
):
    call(
        "f_" + n,
        {"threshold_": lambda a: F.threshold(a, 0.1, 1.0), "feature_dropout": lambda a: F.dropout2d(a[None])}.get(n)
        or getattr(F, n),
        of(4, 4),
    )
call("sum_dt", lambda a: a.sum(1, dtype=HALF), of(3, 4))
call("mean_dt", lambda a: a.mean(1, dtype=FLOAT), of(3, 4))
call("softmax_dt", lambda a: a.softmax(1, dtype=FLOAT), of(3, 4))
call("norm1", lambda a: torch.linalg.vector_norm(a, 1), of(3, 4))
call("normdt", lambda a: torch.linalg.vector_norm(a, dtype=FLOAT), of(3, 4))
call("max_pool2d", lambda a: F.max_pool2d(a, 2), of(2, 3, 8, 8))
call("max_pool1d", lambda a: F.max_pool1d(a, 2), of(2, 3, 8))
call("avg_pool2d", lambda a: F.avg_pool2d(a, 2), of(2, 3, 8, 8))
call("aavg2d", lambda a: F.adaptive_avg_pool2d(a, 2), of(2, 3, 8, 8))
call("aavg1", lambda a: F.adaptive_avg_pool2d(a, 1), of(2, 3, 8, 8))
call("amax2d", lambda a: F.adaptive_max_pool2d(a, 2), of(2, 3, 8, 8))
call("lp", lambda a: F.lp_pool2d(a, 2, 2), of(2, 3, 8, 8))
for m in ("nearest", "bilinear", "bicubic", "area", "nearest-exact"):
    call("interp_" + m, functools.partial(F.interpolate, scale_factor=2, mode=m), of(2, 3, 8, 8))
call("interp_aa", lambda a: F.interpolate(a, size=4, mode="bilinear", antialias=True), of(2, 3, 8, 8))
for m in ("constant", "reflect", "replicate", "circular"):
    call("pad_" + m, functools.partial(F.pad, pad=(1, 1, 1, 1), mode=m), of(2, 3, 8, 8))
call(
    "grid_sample",
    lambda a, g: F.grid_sample(a, g, align_corners=False),
    of(2, 3, 8, 8, dtypes=SEVERAL),
    of(2, 4, 4, 2, dtypes=SEVERAL),
)
call("affine_grid", lambda t: F.affine_grid(t, (2, 3, 4, 4), align_corners=False), of(2, 2, 3))
call("unfold", lambda a: F.unfold(a, 3), of(2, 3, 8, 8))
call("fold", lambda a: F.fold(a, (8, 8), 3), of(2, 27, 36))
call("pixel_shuffle", lambda a: F.pixel_shuffle(a, 2), of(2, 4, 8, 8))
call("tensor_unfold", lambda a: a.unfold(1, 2, 1), of(3, 4))
call(
    "sdpa",
    F.scaled_dot_product_attention,
    of(1, 2, 4, 8, dtypes=SEVERAL),
    of(1, 2, 4, 8, dtypes=SEVERAL),
    of(1, 2, 4, 8, dtypes=SEVERAL),
)
call("sdpa_mask", lambda q, m: F.scaled_dot_product_attention(q, q, q, m), of(1, 2, 4, 8, dtypes=SEVERAL), of(4, 4))
call("sdpa_causal", lambda q: F.scaled_dot_product_attention(q, q, q, is_causal=True), of(1, 2, 4, 8))


for k in ("LSTM", "GRU", "RNN", "LSTMCell", "GRUCell"):
    call(
        k,
        functools.partial(recurrent, k),
        of(*((2, 3, 4) if "Cell" not in k else (3, 4))),
        of(1, dtypes=(FLOAT, HALF, BFLOAT, DOUBLE)),
    )
for n in (
    "inv",
    "svd",
    "cholesky",
    "qr",
    "eigh",
    "det",
    "slogdet",
    "pinv",
    "matrix_exp",
    "eigvals",
    "matrix_norm",
    "matrix_rank",
    "lu_factor",
    "svdvals",
    "cond",
):
    call(
        "l_" + n,
        functools.partial(of_regular, getattr(torch.linalg, n)),
        of(4, 4),
    )
call("l_solve", torch.linalg.solve, of(4, 4, dtypes=SEVERAL), of(4, 2, dtypes=SEVERAL))
call("l_lstsq", torch.linalg.lstsq, of(4, 4, dtypes=SEVERAL), of(4, 2, dtypes=SEVERAL))
call(
    "l_tri",
    lambda a, b: torch.linalg.solve_triangular(a, b, upper=True),
    of(4, 4, dtypes=SEVERAL),
    of(4, 2, dtypes=SEVERAL),
)
call("chol_solve", torch.cholesky_solve, of(4, 2, dtypes=SEVERAL), of(4, 4, dtypes=SEVERAL))
for n, fn in (
    ("adds", lambda a: a + 1.5),
    ("addi", lambda a: a + 1),
    ("rsubs", lambda a: 1 - a),
    ("divs", lambda a: a / 2),
    ("fdivs", lambda a: a // 2),
    ("pows", lambda a: a**2),
    ("powf", lambda a: a**0.5),
    ("rpow", lambda a: 2**a),
    ("negs", lambda a: -a),
    ("inv", lambda a: ~a),
    ("ands", lambda a: a & 1),
    ("mods", lambda a: a % 2),
    ("gts", lambda a: a > 0.5),
    ("bool", lambda a: bool(a.all())),
    ("item", lambda a: a.sum().item()),
    ("int", lambda a: int(a.sum())),
    ("tolist", lambda a: a.tolist()),
    ("numpy", lambda a: a.numpy()),
    ("index_py", lambda a: [1, 2, 3, 4, 5, 6, 7, 8, 9, 10][a.flatten()[0]]),
    ("range", lambda a: torch.arange(a.flatten()[0], a.flatten()[0] + 3)),
    ("grad", lambda a: a.requires_grad_()),
    ("format", lambda a: f"{a.flatten()[0]:.3f}"),
    ("float", lambda a: a.float()),
    ("long", lambda a: a.long()),
    ("viewint", lambda a: a.view(torch.int16)),
    ("viewu8", lambda a: a.view(BYTE)),
):
    call("s_" + n, fn, of(3, 4))
