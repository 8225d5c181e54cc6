"""Records the operators that run on the virtual GPU: a row of the tape for each, their outputs, their scratch memory, and what is known of values."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload

from tightfit.capture.dispatch import sparse
from tightfit.capture.dispatch.call_cache import Call, Row
from tightfit.capture.dispatch.device_storages import DeviceStorages
from tightfit.capture.dispatch.operators import OperatorFacts, tensors, written
from tightfit.capture.dispatch.values.data_dependent_conditions import ABOUT_FINITE, DataDependentConditions
from tightfit.capture.dispatch.values.known_values import KnownValues
from tightfit.capture.observe.attribution import Attribution
from tightfit.capture.observe.kernel_memory import KernelMemory
from tightfit.capture.observe.recorder import Recorder
from tightfit.errors import CaptureError, faults

_OPERATORS_BETWEEN_PROGRESS = 1024


class _DtypeNames(dict["torch.dtype | None", int]):
    """The names of dtypes as indices of strings; without a dtype the empty one."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__({None: 0})
        self._recorder = recorder

    def __missing__(self, dtype: torch.dtype | None) -> int:
        index = self[dtype] = self._recorder.strings.intern(str(dtype).removeprefix("torch."))
        return index


class OperatorLog:
    """What is recorded of operators; `kernels` adds the scratch memory of CUDA kernels."""

    def __init__(
        self,
        recorder: Recorder,
        attribution: Attribution,
        storages: DeviceStorages,
        kernels: KernelMemory,
        known_values: KnownValues,
        conditions: DataDependentConditions,
    ) -> None:
        self.progress: Callable[[str, int], None] | None = None
        self.on_write: Callable[[Iterable[torch.Tensor]], None] | None = None
        """Called with each operator's targets."""
        self._recorder = recorder
        self._attribution = attribution
        self._storages = storages
        self._kernels = kernels
        self._known_values = known_values
        self._conditions = conditions
        self._names: dict[OpOverload, int] = {}
        self._dtypes = _DtypeNames(recorder)

    def record(
        self,
        func: OpOverload,
        known: OperatorFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        call: Call | None,
    ) -> None:
        """An operator has run: adds its row, its outputs, its scratch memory and what is known of their values."""
        try:
            self._record(func, known, args, kwargs, out, call)
        except CaptureError:
            raise
        except Exception as error:
            # Nothing of the program's runs here.
            raise faults.internal_error(error, f"the capture of {known.name}") from error

    def _record(
        self,
        func: OpOverload,
        known: OperatorFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        out: Any,
        call: Call | None,
    ) -> None:
        outputs = (
            [out] if isinstance(out, torch.Tensor) else list(tensors(out)) if isinstance(out, list | tuple) else []
        )
        row = None if call is None else call.row
        if row is None:
            row = self._row(func, known, args, kwargs, outputs, out)
            if call is not None:
                call.row = row
        self._note(func, known, row, args, kwargs)
        if known.creates:
            for tensor in outputs:
                self._storages.add(tensor)
        if known.resizes:
            for tensor in written(func, args, kwargs):
                self._storages.resize(tensor)
        if isinstance(out, torch.Tensor) and out.dtype == torch.bool:
            self._conditions.follow(func, args, out)
        # After the outputs: most kernels ask for their scratch memory then (docs/how-it-works/cuda-rules.md).
        self._kernels.add(func, args, kwargs, out, None if call is None else call.scratch)
        if call is None or call.has_small_outputs or known.is_mutable:
            self._known_values.follow(func, known, args, kwargs, outputs)
        if known.is_mutable:
            self._conditions.written(written(func, args, kwargs))
        elif (
            func in ABOUT_FINITE and isinstance(out, torch.Tensor) and self._conditions.counts_nothing(func, args, out)
        ):
            self._adopt_nothing(out)

    def _adopt_nothing(self, out: torch.Tensor) -> None:
        """`out` says whether values are finite, and they are: what is read of it is 0."""
        if not out.dim() and not self._known_values.known(out):
            self._recorder.assume(self._attribution.where(), "values are assumed to be finite: no infinity, no NaN")
            self._known_values.adopt(out, torch.zeros((), dtype=out.dtype, device="cpu"))

    def _row(
        self,
        func: OpOverload,
        known: OperatorFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[torch.Tensor],
        out: Any,
    ) -> Row:
        bytes_read = bytes_written = 0
        dtype = None
        for tensor in tensors(args):
            bytes_read += _bytes_read_of(tensor)
            if dtype is None and tensor.is_floating_point():
                dtype = tensor.dtype
        for tensor in outputs or written(func, args, kwargs):
            bytes_written += sparse.num_bytes(tensor)
            dtype = dtype or tensor.dtype
        return Row(
            dtype=dtype,
            flops=known.flops(*args, **kwargs, out_val=out) if known.flops else 0,
            bytes_read=bytes_read,
            bytes_written=bytes_written,
            sizes=None if known.sizes is None else known.sizes(args, out),
        )

    def _note(
        self, func: OpOverload, known: OperatorFacts, row: Row, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> None:
        name = self._names.get(func)
        if name is None:
            name = self._names[func] = self._recorder.strings.intern(known.name)
        module, line = self._attribution.locate()
        recorder = self._recorder
        recorder.operator(name, module, line, self._dtypes[row.dtype], row.flops, row.bytes_read, row.bytes_written)
        if row.sizes is not None:
            recorder.geometry.append((recorder.num_operators - 1, *row.sizes))
        if self.on_write is not None and known.is_mutable:
            self.on_write(written(func, args, kwargs))
        if self.progress is not None and not recorder.num_operators % _OPERATORS_BETWEEN_PROGRESS:
            self.progress(recorder.spans[-1][0], recorder.num_operators)

    def note(
        self,
        func: OpOverload,
        known: OperatorFacts,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        outputs: Sequence[torch.Tensor],
        out: Any,
    ) -> None:
        """Adds a row to the tape's operators."""
        self._note(func, known, self._row(func, known, args, kwargs, outputs, out), args, kwargs)

    def note_writes(self, targets: Sequence[torch.Tensor]) -> None:
        """Notes that a kernel has written unknown values to `targets`."""
        if self.on_write is not None:
            self.on_write(targets)
        self._known_values.forget_written(targets)
        self._conditions.written(targets)


def _bytes_read_of(tensor: torch.Tensor) -> int:
    """What a kernel loads from memory of `tensor`: of one that is expanded, the elements that there are, which caches hand out again."""
    num_bytes = sparse.num_bytes(tensor)
    if tensor.layout == torch.strided and num_bytes and 0 in tensor.stride():
        repeats = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if not stride)
        return num_bytes // repeats
    return num_bytes
