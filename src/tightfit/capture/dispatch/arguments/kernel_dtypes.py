"""The dtypes that a kernel of a card lacks, by operator: whole numbers in most activations and losses, half precision in linear algebra.

The table was measured: each operator was called with tensors of nine dtypes on an H200 under torch 2.11, and is here with those that it refused
and torch's kernels for shapes alone do not. Complex numbers are left out where networks have none. Numbers of eight bits, which were not among them, can be
cast, moved and given to scaled products; no kernel that computes with numbers takes them (https://github.com/aredden/flux-fp8-api/issues/44).
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.kernels.refusals import Check, name, refuse_unless

aten = torch.ops.aten

_SIGNED = frozenset({torch.int8, torch.int16, torch.int32, torch.int64})
_NUMBERS = _SIGNED | {torch.uint8}
_BOOL = frozenset({torch.bool})
_WHOLE = _NUMBERS | _BOOL
_HALVES = frozenset({torch.float16, torch.bfloat16})
_FLOATING = _HALVES | {torch.float32, torch.float64}
_EIGHTS = frozenset({torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz})
_COMPLEX = frozenset({torch.complex64, torch.complex128})
# The kernel's name, what it lacks, and the operators, of which the first argument counts.
_OF_FIRST: tuple[tuple[str, frozenset[torch.dtype], tuple[OpOverload, ...]], ...] = (
    ("ufunc_add_CUDA", frozenset(), (aten.add.Tensor, aten.add_.Tensor, aten.sub.Tensor, aten.sub_.Tensor)),
    ("mul_cuda", frozenset(), (aten.mul.Tensor, aten.mul_.Tensor)),
    ("div_true_cuda", frozenset(), (aten.div.Tensor, aten.div_.Tensor)),
    ("abs_cuda", frozenset(), (aten.abs.default,)),
    ("addmm_cuda", _WHOLE, (aten.mm.default,)),
    ("baddbmm_cuda", _WHOLE, (aten.bmm.default,)),
    ("addmv_impl_cuda", _WHOLE, (aten.mv.default,)),
    ("dot", _WHOLE, (aten.dot.default,)),
    ("elu_cuda", _WHOLE, (aten.celu.default, aten.celu_.default)),
    ("leaky_relu_cuda", _WHOLE, (aten.rrelu_with_noise.default,)),
    ("hardshrink_cuda", _WHOLE, (aten.hardshrink.default,)),
    ("hardswish_cuda", _WHOLE, (aten.hardswish.default, aten.hardswish_.default)),
    ("hardsigmoid_cuda", _WHOLE, (aten.hardsigmoid.default, aten.hardsigmoid_.default)),
    ("softplus_cuda", _WHOLE, (aten.softplus.default,)),
    ("mish_cuda", _WHOLE, (aten.mish.default, aten.mish_.default)),
    ("log_sigmoid_forward_cuda", _NUMBERS, (aten.log_sigmoid_forward.default,)),
    ("log_sigmoid_forward_cuda", _NUMBERS, (aten.binary_cross_entropy_with_logits.default,)),
    ("glu_cuda", _WHOLE, (aten.glu.default,)),
    ("prelu_cuda", _WHOLE, (aten._prelu_kernel.default,)),
    ("host_softmax", _WHOLE, (aten._softmax.default, aten._log_softmax.default)),
    ("GeluCUDAKernelImpl", _WHOLE, (aten.gelu.default,)),
    ("silu_cuda", _WHOLE, (aten.silu.default,)),
    ("adaptive_max_pool2d_cuda", _WHOLE, (aten.adaptive_max_pool2d.default,)),
    ("adaptive_avg_pool2d_cuda", _WHOLE, (aten._adaptive_avg_pool2d.default,)),
    ("max_pool2d_with_indices_out_cuda_frame", _WHOLE, (aten.max_pool2d_with_indices.default,)),
    ("avg_pool2d_out_cuda_frame", _SIGNED | _BOOL, (aten.avg_pool2d.default,)),
    (
        "upsample_nearest2d_out_frame",
        _SIGNED | _BOOL,
        (aten.upsample_nearest2d.default, aten._upsample_nearest_exact2d.default),
    ),
    (
        "upsample_bilinear2d_out_frame",
        _WHOLE,
        (aten.upsample_bilinear2d.default, aten._upsample_bilinear2d_aa.default),
    ),
    ("upsample_bicubic2d_out_frame", _WHOLE, (aten.upsample_bicubic2d.default,)),
    ("grid_sampler_2d_cuda", _SIGNED | _BOOL, (aten.grid_sampler_2d.default,)),
    ("im2col_out_cuda", _NUMBERS, (aten.im2col.default,)),
    ("col2im_out_cuda", _NUMBERS, (aten.col2im.default,)),
    ("binary_cross_entropy_out_cuda", _NUMBERS, (aten.binary_cross_entropy.default,)),
    (
        "nll_loss_forward_reduce_cuda_kernel_2d",
        _SIGNED,
        (aten.nll_loss_forward.default, aten.nll_loss2d_forward.default),
    ),
    ("multi_margin_loss_cuda", _SIGNED | _BOOL, (aten.multi_margin_loss.default,)),
    ("multilabel_margin_loss_forward_kernel", _SIGNED | _BOOL, (aten.multilabel_margin_loss_forward.default,)),
    ("ctc_loss_cuda", _SIGNED, (aten._ctc_loss.default,)),
    ("check_uniform_bounds", _WHOLE, (aten.uniform_.default, aten.rand_like.default)),
    ("poisson_cuda", _WHOLE, (aten.poisson.default,)),
    ("frac_cuda", _NUMBERS, (aten.frac.default,)),
    ("logcumsumexp_cuda", _WHOLE, (aten.logcumsumexp.default,)),
    ("lerp_cuda", _WHOLE, (aten.lerp.Scalar, aten.lerp_.Scalar, aten.lerp.Tensor, aten.lerp_.Tensor)),
    ("bitwise_not_cuda", _FLOATING | _COMPLEX, (aten.bitwise_not.default, aten.bitwise_not_.default)),
    ("bincount_cuda", _FLOATING | _COMPLEX | _BOOL, (aten.bincount.default,)),
    ("round_cuda", _BOOL, (aten.round.default, aten.round_.default)),
    ("floor_cuda", _BOOL, (aten.floor.default, aten.floor_.default)),
    ("ceil_cuda", _BOOL, (aten.ceil.default, aten.ceil_.default)),
    ("trunc_cuda", _BOOL, (aten.trunc.default, aten.trunc_.default)),
    ("kthvalue_cuda", _BOOL, (aten.kthvalue.default,)),
    ("reflection_pad2d_out_template", _BOOL, (aten.reflection_pad2d.default,)),
    ("cross_cuda", _BOOL, (aten.linalg_cross.default,)),
    ("cdist_cuda", _HALVES, (aten._cdist_forward.default,)),
    ("svd_cuda_gesvdjBatched", _HALVES, (aten._linalg_svd.default,)),
    ("lu_factor_cusolver", _HALVES, (aten._linalg_solve_ex.default, aten._linalg_det.default)),
    ("lu_factor_cusolver", _HALVES | _NUMBERS, (aten.linalg_lu_factor_ex.default,)),
    ("triangular_solve_cuda", _HALVES | _SIGNED | _BOOL, (aten.linalg_solve_triangular.default,)),
    ("cholesky_cuda_potrs", _HALVES | _SIGNED | _BOOL, (aten.cholesky_solve.default,)),
    ("cholesky_cusolver", _HALVES, (aten.linalg_cholesky_ex.default,)),
    ("geqrf_cuda", _HALVES, (aten.linalg_qr.default,)),
    ("linalg_eigh_cuda", _HALVES | _NUMBERS, (aten._linalg_eigh.default,)),
    ("linalg_eig_cuda", _HALVES, (aten.linalg_eig.default,)),
)
# Those of which the type of the result of two arguments counts.
_OF_BOTH: tuple[tuple[str, frozenset[torch.dtype], tuple[OpOverload, ...]], ...] = (
    ("remainder_cuda", _BOOL, (aten.remainder.Tensor, aten.remainder_.Tensor)),
    ("fmod_cuda", _BOOL, (aten.fmod.Tensor, aten.fmod_.Tensor)),
    ("lshift_cuda", _FLOATING | _BOOL, (aten.bitwise_left_shift.Tensor,)),
    ("hypot_cuda", _WHOLE, (aten.hypot.default,)),
    ("logaddexp_cuda", _NUMBERS, (aten.logaddexp.default,)),
    ("gcd_cuda", _FLOATING | _BOOL, (aten.gcd.default,)),
    ("smooth_l1_cuda", _NUMBERS, (aten.smooth_l1_loss.default,)),
    ("huber_cuda", _NUMBERS, (aten.huber_loss.default,)),
    ("compare_cuda", _COMPLEX, (aten.lt.Tensor, aten.le.Tensor, aten.gt.Tensor, aten.ge.Tensor)),
)


def _refuse(kernel: str, dtype: torch.dtype, lacking: frozenset[torch.dtype]) -> None:
    is_taken = dtype not in lacking and dtype not in _EIGHTS
    refuse_unless(is_taken, f"\"{kernel}\" not implemented for '{name(dtype)}'", NotImplementedError)


def _of_first(args: Sequence[Any], _: Mapping[str, Any], *, kernel: str, lacking: frozenset[torch.dtype]) -> None:
    _refuse(kernel, args[0].dtype, lacking)


def _of_both(args: Sequence[Any], _: Mapping[str, Any], *, kernel: str, lacking: frozenset[torch.dtype]) -> None:
    _refuse(kernel, torch.result_type(*args[:2]), lacking)


def _of_products(args: Sequence[Any], _: Mapping[str, Any], *, kernel: str) -> None:
    # What is added to it has been found to be of the same dtype.
    _refuse(kernel, args[1].dtype, _WHOLE)


def _floating_statistics(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    is_right = args[0].is_floating_point() or args[0].is_complex()
    refuse_unless(is_right, "std and var only support floating point and complex dtypes")


def _bits(args: Sequence[Any], _: Mapping[str, Any], *, kernel: str) -> None:
    result = torch.result_type(*args[:2])
    is_right = not (result.is_floating_point or result.is_complex)
    refuse_unless(is_right, f"\"{kernel}\" not implemented for '{name(result)}'", NotImplementedError)


def _bits_of(word: str) -> dict[OpOverload, Check]:
    check = functools.partial(_bits, kernel="_".join(("bitwise", word, "cuda")))
    packet = getattr(aten, f"bitwise_{word}")
    in_place = getattr(aten, f"bitwise_{word}_")
    return {each.Tensor: check for each in (packet, in_place)} | {each.Scalar: check for each in (packet, in_place)}


def _probabilities(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    found = name(args[0].dtype)
    refuse_unless(args[0].is_floating_point(), f"expected probabilities tensor to have floating type, got {found}")


def _chances(args: Sequence[Any], _: Mapping[str, Any]) -> None:
    found = name(args[0].dtype)
    refuse_unless(
        args[0].is_floating_point(), f"multinomial only supports floating-point dtypes for input, got: {found}"
    )


def _no_bool(args: Sequence[Any], _: Mapping[str, Any], *, words: str) -> None:
    refuse_unless(args[0].dtype != torch.bool, words)


KERNELS: dict[OpOverload, Check] = {
    **{
        operator: functools.partial(_of_first, kernel=kernel, lacking=lacking)
        for kernel, lacking, operators in _OF_FIRST
        for operator in operators
    },
    **{
        operator: functools.partial(_of_both, kernel=kernel, lacking=lacking)
        for kernel, lacking, operators in _OF_BOTH
        for operator in operators
    },
    aten.addmm.default: functools.partial(_of_products, kernel="addmm_cuda"),
    aten.baddbmm.default: functools.partial(_of_products, kernel="baddbmm_cuda"),
    aten.addmv.default: functools.partial(_of_products, kernel="addmv_impl_cuda"),
    aten.var.correction: _floating_statistics,
    aten.std.correction: _floating_statistics,
    aten.bernoulli.default: _probabilities,
    aten.multinomial.default: _chances,
    aten.argmax.default: functools.partial(_no_bool, words="argmax(): does not support bool input"),
    aten.relu.default: functools.partial(_no_bool, words="Boolean inputs not supported for relu"),
    aten.relu_.default: functools.partial(_no_bool, words="Boolean inputs not supported for relu"),
    **_bits_of("and"),
    **_bits_of("or"),
    **_bits_of("xor"),
}
"""The check of each operator whose kernel lacks dtypes."""
