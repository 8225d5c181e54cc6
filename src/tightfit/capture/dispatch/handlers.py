"""Operators that torch's fake tensors do not run as a card does: copies between host and device, and data-dependent operators."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from tightfit.capture.dispatch import sparse
from tightfit.capture.dispatch.arguments.argument_checks import check_indices
from tightfit.capture.dispatch.on_host import host_copies
from tightfit.capture.dispatch.operators import facts, is_dense
from tightfit.capture.dispatch.passed_checks import passing_answer
from tightfit.capture.dispatch.values.known_values import Unknown, limit
from tightfit.capture.dispatch.virtual import Handler, VirtualGpu
from tightfit.capture.kernels.rule import bind
from tightfit.errors import CaptureError
from tightfit.errors.faults import for_torch
from tightfit.tape import Category, WaitKind

aten = torch.ops.aten

_SPREAD = "values that are counted in bins (tokens by their expert) are assumed to be spread evenly"


def _to_copy(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    device = kwargs.get("device")
    to_device = device is None or torch.device(device).type == "cuda"
    if isinstance(source, FakeTensor) and source.device.type == "cuda":
        if to_device:
            copy = gpu.run(func, args, kwargs)
            gpu.casts.note(source, copy)
            return copy
        if torch.device(device).type == "meta":
            gpu.operators.note(func, facts(func), args, {}, (), None)
            strides = _stride_of_copy(source, kwargs.get("memory_format"))
            return torch.empty_strided(source.size(), strides, dtype=kwargs.get("dtype") or source.dtype, device="meta")
        return _to_host(
            gpu, source, kwargs.get("dtype") or source.dtype, host_copies.is_non_blocking(func, args, kwargs)
        )
    gpu.operators.note(func, facts(func), args, {}, (), None)
    if source.layout not in (torch.strided, torch.sparse_coo):
        return _refuse_compressed(gpu, func, args, kwargs)
    if source.layout != torch.strided:
        return sparse.virtual_of(gpu, source, lambda part: _to_card(gpu, part, part.dtype, None))
    dtype = kwargs.get("dtype") or source.dtype
    copy = _to_card(gpu, source, dtype, kwargs.get("memory_format"))
    non_blocking = host_copies.is_non_blocking(func, args, kwargs)
    host_copies.note_to_card(gpu, source, copy, dtype, non_blocking=non_blocking)
    return copy


def _to_card(
    gpu: VirtualGpu, source: torch.Tensor, dtype: torch.dtype, memory_format: torch.memory_format | None
) -> torch.Tensor:
    # A copy that a module makes in its forward pass (position ids, a mask) is not a batch that the program
    # loads.
    category = Category.TEMPORARIES if gpu.attribution.modules else Category.INPUTS
    out = gpu.new(source.size(), _stride_of_copy(source, memory_format), dtype, category)
    if not isinstance(source, FakeTensor) and not gpu.host.is_blank(source):
        gpu.known_values.adopt(out, source)
    return out


def _to_host(gpu: VirtualGpu, source: torch.Tensor, dtype: torch.dtype, non_blocking: bool) -> torch.Tensor:
    _synchronize(gpu)
    host = _values_on_host(gpu, source, dtype)
    if non_blocking:
        # torch makes what it copies to without waiting in pinned memory (`pin_out` in TensorConversions.cpp, `_to_copy`).
        host = gpu.host.storages.pinned(host)
    host_copies.note_to_host(gpu, source, host, non_blocking=non_blocking)
    return host


def _values_on_host(gpu: VirtualGpu, source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if source.layout != torch.strided:
        return sparse.host_of(source).to(dtype)
    try:
        return gpu.known_values.values(source).to(dtype, copy=True)
    except Unknown:
        host = gpu.reads.fill(gpu.host.new_blank(source.size(), dtype))
        if gpu.conditions.holds(source):
            return host.fill_(1)
        gpu.host.unknown_masks.add(host)
        return host


def _stride_of_copy(source: torch.Tensor, memory_format: torch.memory_format | None) -> tuple[int, ...]:
    if memory_format in (None, torch.preserve_format) and is_dense(source):
        return source.stride()
    shape = torch.empty(source.size(), dtype=source.dtype, device="meta")
    if memory_format is not None and memory_format in (torch.channels_last, torch.channels_last_3d):
        shape = shape.contiguous(memory_format=memory_format)
    return shape.stride()


def _copy_(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    target, source = args[0], args[1]
    if isinstance(target, FakeTensor) and isinstance(source, FakeTensor):
        return gpu.run(func, args, kwargs)
    if isinstance(target, FakeTensor):
        gpu.operators.note(func, facts(func), args, {}, (target,), None)
        non_blocking = host_copies.is_non_blocking(func, args, kwargs)
        host_copies.note_to_card(gpu, source, target, target.dtype, non_blocking=non_blocking)
        if gpu.known_values.known(target) and not gpu.host.is_blank(source):
            gpu.known_values.values(target).copy_(source)
        else:
            gpu.known_values.forget(target.untyped_storage()._cdata)
        return target
    _synchronize(gpu)
    host_copies.note_to_host(gpu, source, target, non_blocking=host_copies.is_non_blocking(func, args, kwargs))
    try:
        target.copy_(gpu.known_values.values(source))
    except Unknown:
        gpu.host.unknown_masks.add(gpu.reads.fill(target))
    return target


def _foreach_copy_(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Lists that lie on both sides are copied one tensor after another (`foreach_tensor_copy_list_kernel_slow_`)."""
    if all(isinstance(tensor, FakeTensor) for side in args[:2] for tensor in side):
        return gpu.run(func, args, kwargs)
    for target, source in zip(*args[:2], strict=True):
        _copy_(gpu, aten.copy_.default, (target, source, *args[2:]), kwargs)
    return None


def _item(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    _read(gpu)
    try:
        return gpu.known_values.values(args[0]).item()
    except Unknown:
        passing = passing_answer(sys._getframe(1)) if args[0].dtype == torch.bool else None
        if passing is not None:
            return gpu.reads.passes(passing)
        if gpu.conditions.holds(args[0]):
            return True
        return gpu.reads.scalar(args[0].dtype)


def _equal(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    _read(gpu)
    try:
        return bool(gpu.known_values.run(func, args, kwargs))
    except Unknown:
        passing = passing_answer(sys._getframe(1))
        return bool(gpu.reads.scalar(torch.bool)) if passing is None else gpu.reads.passes(passing)


def _synchronize(gpu: VirtualGpu) -> None:
    # With one stream nothing waits for an event: freed blocks can be reused at once, and a synchronisation
    # would only add an event to the tape.
    if gpu.has_side_streams:
        gpu.recorder.synchronize()


def _read(gpu: VirtualGpu) -> None:
    """The host reads a value that the current stream has computed."""
    gpu.recorder.waits.add(WaitKind.HOST_READS, stream=gpu.recorder.stream)
    _synchronize(gpu)


def _shaped_by_data(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operator with a data-dependent output size: the true size where the values are known, else the largest possible."""
    _synchronize(gpu)
    try:
        values = gpu.known_values.run(func, args, kwargs)
    except Unknown:
        gpu.recorder.assume(
            gpu.attribution.where(),
            _SPREAD
            if func is aten.bincount.default
            else f"{facts(func).name}: the size of the result depends on data; assumed to be as large as possible",
        )
        values = _all_places(args[0]) if func is aten.nonzero.default else _largest(func, args, kwargs)
    results = values if isinstance(values, tuple) else (values,)
    gpu.operators.note(func, facts(func), args, kwargs, (), None)
    if not _knows_size(func, args, kwargs):
        gpu.recorder.waits.add(WaitKind.HOST_READS, stream=gpu.recorder.stream)
    out = []
    for value in results:
        tensor = gpu.new(value.size(), value.stride(), value.dtype)
        if value.device.type == "cpu":
            gpu.known_values.adopt(tensor, value)
        out.append(tensor)
    found = tuple(out) if isinstance(values, tuple) else out[0]
    gpu.kernels.add(func, args, kwargs, found)
    return found


def _knows_size(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether the host need not read how large the result is: `repeat_interleave` may be given it."""
    return func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None


def _all_places(source: torch.Tensor) -> torch.Tensor:
    """`nonzero` where nothing is zero. Its values are then known too, so that a loop over the experts that have tokens visits each of them."""
    if source.numel() * source.dim() * torch.int64.itemsize <= limit(torch.int64):
        return torch.ones(source.shape, device="cpu").nonzero()
    # CUDA's nonzero writes the columns one after the other.
    return torch.empty(source.dim(), source.numel(), dtype=torch.int64, device="meta").t()


def _largest(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    source = args[0]
    numel = source.numel()

    def meta(*size: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device="meta")

    if func is aten.masked_select.default:
        return meta(torch.broadcast_shapes(source.shape, args[1].shape).numel(), dtype=source.dtype)
    if func is aten.bincount.default:
        num_bins = max(1, kwargs.get("minlength", args[2] if len(args) > 2 else 0))
        is_weighted = kwargs.get("weights", args[1] if len(args) > 1 else None) is not None
        return meta(num_bins) if is_weighted else _even_counts(numel, num_bins)
    if func is aten.repeat_interleave.Tensor:
        return meta(kwargs.get("output_size") or numel)
    call = bind(func, args, kwargs)
    # What is not asked for is empty (UniqueCub.cu, Unique.cu).
    rows = source.shape[call["dim"]] if call.get("dim") is not None else None
    values = meta(numel, dtype=source.dtype) if rows is None else meta(*source.shape, dtype=source.dtype)
    inverse = (source.shape if rows is None else (rows,)) if call["return_inverse"] else (0,)
    return (values, meta(*inverse), meta(numel if rows is None else rows) if call["return_counts"] else meta(0))


def _even_counts(number: int, num_bins: int) -> torch.Tensor:
    """How many of `number` values are in each bin, where they are spread evenly: routers of experts are trained to it, and the counts have their sum."""
    counts = torch.full((num_bins,), number // num_bins, device="cpu")
    counts[: number % num_bins] += 1
    return counts


def _histc(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    out = gpu.run(func, args, kwargs)
    if not gpu.known_values.known(out) and out.nbytes <= limit(out.dtype):
        gpu.recorder.assume(gpu.attribution.where(), _SPREAD)
        gpu.known_values.adopt(out, _even_counts(args[0].numel(), out.numel()).to(out.dtype))
    return out


def _moved(gpu: VirtualGpu, index: torch.Tensor) -> torch.Tensor:
    """An index on the host, on the card."""
    return _to_copy(gpu, aten._to_copy.default, (index,), {"device": torch.device("cuda", 0)})


def _where(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """A condition of bytes is cast first (TensorCompare.cpp, `where`, which calls it deprecated)."""
    condition = args[0]
    if condition.dtype == torch.uint8 and isinstance(condition, FakeTensor):
        condition = gpu.run(aten._to_copy.default, (condition,), {"dtype": torch.bool})
    return gpu.run(func, (condition, *args[1:]), kwargs)


def _put_on_host(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Places on the card where something is put into a tensor on the host are read there, which reads of it do not take (TensorAdvancedIndexing.cpp, `make_info`)."""

    def on_host(tensor: torch.Tensor | None) -> torch.Tensor | None:
        if not isinstance(tensor, FakeTensor):
            return tensor
        return _to_copy(gpu, aten._to_copy.default, (tensor,), {"device": torch.device("cpu")})

    values = on_host(args[2]) if args[2].dim() == 0 else args[2]
    return gpu.host.run(func, (args[0], [on_host(index) for index in args[1]], values, *args[3:]), kwargs)


def _mask_to_fill(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.Tensor | None:
    """The mask behind which one number of the host is put: such a call fills, and reads no places (TensorAdvancedIndexing.cpp, `canDispatchToMaskedFill`)."""
    _, indices, values = args[:3]
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    given = [index for index in indices if index is not None]
    if accumulates or values.numel() != 1 or isinstance(values, FakeTensor) or len(given) != 1:
        return None
    mask = given[0]
    return mask if mask.dtype in (torch.bool, torch.uint8) and isinstance(mask, FakeTensor) else None


def _fill(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], mask: torch.Tensor) -> Any:
    target, indices, value = args[:3]
    if func is aten.index_put.default:
        target = gpu.run(aten.clone.default, (target,), {})
    num_indexed = mask.dim() + len(indices) - 1
    for _ in range(num_indexed, target.dim()):
        mask = gpu.run(aten.unsqueeze.default, (mask, -1), {})
    return gpu.run(aten.masked_fill_.Scalar, (target, mask, value.item()), {})


def _index(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Masks among the indices become positions first, as the CUDA kernels do it."""
    indices = args[1]
    if func is aten.index.Tensor:
        check_indices(args[0], indices)
    elif not isinstance(args[0], FakeTensor) and not (isinstance(args[2], FakeTensor) and args[2].dim()):
        return _put_on_host(gpu, func, args, kwargs)
    mask = None if func is aten.index.Tensor else _mask_to_fill(args, kwargs)
    if mask is not None:
        return _fill(gpu, func, args, mask)
    if isinstance(args[0], FakeTensor):
        # The kernel takes indices on the host too, and moves them first (TensorAdvancedIndexingUtils.h, `make_info`).
        indices = [
            _moved(gpu, i)
            if i is not None and not isinstance(i, FakeTensor) and i.dtype not in (torch.bool, torch.uint8)
            else i
            for i in indices
        ]
    if not any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices):
        return gpu.run(func, (args[0], indices, *args[2:]), kwargs)
    positions: list[torch.Tensor | None] = []
    for index in indices:
        if index is None or index.dtype not in (torch.bool, torch.uint8):
            positions.append(index)
        elif isinstance(index, FakeTensor):
            found = _shaped_by_data(gpu, aten.nonzero.default, (index,), {})
            positions.extend(gpu.run(aten.select.int, (found, 1, column), {}) for column in range(index.dim()))
        else:
            found = gpu.host.unknown_masks.all_of(index).nonzero().unbind(1)
            positions.extend(_moved(gpu, p) if isinstance(args[0], FakeTensor) else p for p in found)
    return gpu.run(func, (args[0], positions, *args[2:]), kwargs)


def _pack_padded(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The batch sizes of the time steps are computed from lengths on the host, and stay there."""
    padded, lengths, batch_first = args
    # The host kernel runs on one feature per step, for the batch sizes alone; the packed data itself lies on
    # the card.
    narrow = torch.empty(*padded.shape[:2], 1, device="cpu")
    packed, batch_sizes = func(narrow, lengths, batch_first)
    gpu.operators.note(func, facts(func), args, kwargs, (), None)
    size = (packed.size(0), *padded.shape[2:])
    return gpu.new(size, torch.empty(size, device="meta").stride(), padded.dtype), batch_sizes


def _never(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """cuDNN takes a CTC loss only with int32 targets on the host (LossCTC.cpp, `_use_cudnn_ctc_loss`); torch's own kernel the others."""
    return False


def _ctc_loss(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The loss of each row and the forward variables, two for each label of the longest target and one more (LossCTC.cu)."""
    log_probs, longest = args[0], max(args[3])
    steps, batch = log_probs.shape[:2]
    _check_lengths(steps, batch, args[1], args[2], args[3])
    gpu.operators.note(func, facts(func), args, kwargs, (), None)
    width = 2 * longest + 1
    variables = gpu.new((batch, steps, width), (steps * width, width, 1), log_probs.dtype)
    return gpu.new((batch,), (1,), log_probs.dtype), variables


def _check_lengths(
    steps: int, batch: int, targets: torch.Tensor, input_lengths: Sequence[int], target_lengths: Sequence[int]
) -> None:
    """`ctc_loss_allocate_outputs` (LossCTC.cu)."""
    longest = max(input_lengths)
    if longest > steps:
        words = f"Expected input_lengths to have value at most {steps}, but got value {longest} (while checking arguments for ctc_loss_gpu)"
        raise for_torch(RuntimeError(words))
    for name, lengths in {"input_lengths": input_lengths, "target_lengths": target_lengths}.items():
        if len(lengths) != batch:
            raise for_torch(RuntimeError(f"{name} must be of size batch_size"))
    if targets.dim() > 1 and targets.size(0) != batch:
        words = f"Expected tensor to have size {batch} at dimension 0, but got size {targets.size(0)} for argument #2 'targets' (while checking arguments for ctc_loss_gpu)"
        raise for_torch(RuntimeError(words))


def _ctc_loss_backward(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """The gradient of the log-probabilities, beside backward variables that are as many as the forward ones (LossCTC.cu)."""
    log_probs, log_alpha = args[1], args[6]
    gpu.operators.note(func, facts(func), args, kwargs, (), None)
    log_beta = gpu.new(log_alpha.size(), log_alpha.stride(), log_alpha.dtype)
    gradient = gpu.new(log_probs.size(), log_probs.stride(), log_probs.dtype)
    del log_beta
    return gradient


def _set_storage(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`copy.deepcopy` of a tensor gives a new one a copy of its storage. Torch's cache of shapes would keep that among its keys (`_prep_args_for_hash` in
    torch/_subclasses/fake_tensor.py), and it were never freed.
    """
    is_enabled, gpu.fake.cache_enabled = gpu.fake.cache_enabled, False
    try:
        return gpu.run(func, args, kwargs)
    finally:
        gpu.fake.cache_enabled = is_enabled


def _refuse_compressed(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    raise CaptureError(
        f"{gpu.attribution.where()}: compressed sparse tensors (CSR, CSC, BSR, BSC) have no virtual kind in torch {torch.__version__}; use COO for the estimate"
    )


def _unscale(gpu: VirtualGpu, func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """GradScaler's check for infinities: none are found in the traced run."""
    # `found_inf` was filled with zero by the caller (torch/amp/grad_scaler.py, `unscale_`) and stays zero, so
    # `_maybe_opt_step` steps the optimizer. A skipped step would leave the optimizer state out of the tape.
    known = facts(func)
    gpu.operators.note(func, known, args, kwargs, (), None)
    gpu.recorder.assume(gpu.attribution.where(), "gradients are assumed to be finite: GradScaler skips no step")


_CTC_LIBRARIES = [
    getattr(getattr(aten, name), overload)
    for name in ("_use_cudnn_ctc_loss", "_use_miopen_ctc_loss")
    if hasattr(aten, name)
    for overload in ("default", "Tensor")
]

HANDLERS: dict[OpOverload, Handler] = {
    aten._to_copy.default: _to_copy,
    aten.copy_.default: _copy_,
    aten._foreach_copy_.default: _foreach_copy_,
    aten._local_scalar_dense.default: _item,
    aten.equal.default: _equal,
    aten._pack_padded_sequence.default: _pack_padded,
    aten.histc.default: _histc,
    aten.set_.source_Storage: _set_storage,
    aten.set_.source_Storage_storage_offset: _set_storage,
    **dict.fromkeys(_CTC_LIBRARIES, _never),
    aten._ctc_loss.default: _ctc_loss,
    aten._ctc_loss_backward.default: _ctc_loss_backward,
    aten._sparse_compressed_tensor_unsafe.default: _refuse_compressed,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
    aten.where.self: _where,
    **dict.fromkeys(
        (aten.index.Tensor, aten.index_put.default, aten.index_put_.default, aten._index_put_impl_.default), _index
    ),
    **dict.fromkeys(
        (
            aten.nonzero.default,
            aten.masked_select.default,
            aten.bincount.default,
            aten.repeat_interleave.Tensor,
            aten._unique2.default,
            aten.unique_consecutive.default,
            aten.unique_dim.default,
        ),
        _shaped_by_data,
    ),
}
