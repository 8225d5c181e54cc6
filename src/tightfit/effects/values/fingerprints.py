"""Checks that a recomputation gives the same results: a checksum of the bits of each operator's result, computed on the device.

Nothing is copied, and only a few numbers per operator are kept. The second run may stop early, so it is compared as far as it goes.
Non-deterministic operators are compared within a bound from their dtype instead.
"""

import dataclasses
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from tightfit.effects.values.contents import unwrapped
from tightfit.effects.values.word_sums import PIECE, WORDS, is_of_whole_words, wide_sum

# Casts: autocast keeps those of weights for as long as its context lasts, and the second run may find them or not.
_CASTS = ("_to_copy", "clone", "detach", "alias", "lift_fresh", "copy_", "record_stream")
_UNFILLED = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "resize_")
_NOT_COMPARED = frozenset((*_CASTS, *_UNFILLED))
_WITH_STORAGE = (torch.Tensor, torch.nn.Parameter)
# Besides their result, kernels return reserves and seeds that may stay uninitialised.
_FIRST_RESULT_ONLY = ("attention", "batch_norm", "cudnn", "miopen", "rnn", "lstm", "gru", "dropout")
# Sums in the order in which threads arrive. Source: the list of torch.use_deterministic_algorithms.
_ADDS_IN_ANY_ORDER = (
    "index_add",
    "index_put",
    "scatter",
    "put_",
    "cumsum",
    "bincount",
    "histc",
    "embedding_bag",
    "ctc",
    "kthvalue",
    "median",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fingerprint:
    """One operator's results: `bits` (int64) tells different ones apart, `sums` (float64: sum, and sum of magnitudes) by how much; on the device."""

    operator: str
    shapes: tuple[torch.Size, ...]
    bits: torch.Tensor | None
    sums: torch.Tensor | None
    bound: float


class Fingerprints(TorchDispatchMode):
    """While it is active, the fingerprint of each operator that computes something is appended to `taken`, and what one writes to to `written`."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: list[Fingerprint] = []
        self.written: list[int] = []
        """The addresses of storages, also of those that are written to past torch's versions, through `.data`."""
        self._is_paused = False

    supports_higher_order_operators = True

    def __enter__(self) -> "Fingerprints":
        _entered().append(self)
        return super().__enter__()

    def __exit__(self, exc_type: Any, exc_val: Any, exc_tb: Any) -> None:
        _entered().remove(self)
        super().__exit__(exc_type, exc_val, exc_tb)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Under any other mode torch does not compile, and flex attention, which insists on it, fails."""
        return True

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Runs the operator unchanged, and takes the fingerprint of its result."""
        result = func(*args, **(kwargs or {}))
        if not isinstance(func, OpOverload):
            # A branch or a loop of code (`torch.cond`): its results are compared where they are used.
            return result
        name = func.overloadpacket.__name__
        if func._schema.is_mutable and not self._is_paused:
            self.written += _targets(func, args, kwargs or {})
        if name in _UNFILLED and not self._is_paused and not func._schema.is_mutable:
            _fill(result)
        if not self._is_paused and name not in _NOT_COMPARED and not func.is_view:
            leaves = [unwrapped(leaf) for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
            if any(word in name for word in _FIRST_RESULT_ONLY):
                leaves = leaves[:1]
            if leaves:
                # Other modes must not see this: a selective checkpoint saves what it sees.
                with torch.no_grad(), _disable_current_modes():
                    self.taken.append(_fingerprint(func, name, leaves))
        return result


def _fill(tensor: Any) -> None:
    """Fills new memory with zeros: what writes to it part by part gives the same results in both runs, and no code may ask what it held before."""
    plain = unwrapped(tensor)
    if type(plain) in _WITH_STORAGE and plain.layout is torch.strided and not plain.is_meta:
        # Through the storage: the tensor's version stays what it is.
        storage: Any = plain.untyped_storage()
        with _disable_current_modes():
            storage.fill_(0)


def _targets(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[int]:
    for number, argument in enumerate(func._schema.arguments):
        # `out` is given by its name.
        value = args[number] if number < len(args) else kwargs.get(argument.name)
        if argument.alias_info is not None and argument.alias_info.is_write:
            for leaf in tree_leaves(value):
                if type(leaf) in _WITH_STORAGE and leaf.layout is torch.strided:
                    yield leaf.untyped_storage()._cdata


_of_thread = threading.local()


def _entered() -> list[Fingerprints]:
    return vars(_of_thread).setdefault("entered", [])


@contextmanager
def paused() -> Iterator[None]:
    """Excludes what runs in this thread from the fingerprints of any active run, and from all else that counts operators and asks for `num_paused`: what a
    check of ours runs once, in one run of a block and not in the other, is nothing that the block does."""
    several = [each for each in _entered() if not each._is_paused]
    for each in several:
        each._is_paused = True
    number = num_paused()
    _of_thread.paused = number + 1
    try:
        yield
    finally:
        _of_thread.paused = number
        for each in several:
            each._is_paused = False


def num_paused() -> int:
    """In how many checks of ours, one within the other, this thread is."""
    return vars(_of_thread).get("paused", 0)


def first_mismatch(first: Sequence[Fingerprint], second: Sequence[Fingerprint]) -> str | None:
    """The first difference of the second run from the first, in words; None if they are equal as far as the second went.

    It may leave out results that the first run cached (a table made once by `functools.cache`): what it does run must be found in the first
    one, in the same order and with the same bits.
    """
    with _disable_current_modes():
        bits = _values([each for each in (*first, *second) if each.bits is not None])
    is_loose, position = False, 0
    for other in second:
        at = position
        while at < len(first):
            one = first[at]
            at += 1
            # From a non-deterministic operator on, everything may differ by rounding: results that are computed
            # from its result are compared within the bound as well.
            is_loose |= one.bound > 0
            if (one.operator, one.shapes) == (other.operator, other.shapes) and (
                one.bits is None
                or other.bits is None
                or bits[id(one)] == bits[id(other)]
                or (is_loose and _is_near(one, other))
            ):
                break
        else:
            return _told(first[position] if position < len(first) else None, other)
        position = at
    return None


def _told(one: Fingerprint | None, other: Fingerprint) -> str:
    if one is None:
        return f"ran {other.operator}, which it did not run the first time"
    if one.operator != other.operator:
        return f"ran {other.operator} where it first ran {one.operator}"
    if one.shapes != other.shapes:
        return f"gave {other.operator} results of another shape"
    return f"got another result from {other.operator}"


def _values(fingerprints: Sequence[Fingerprint]) -> dict[int, tuple[int, ...]]:
    """All checksums, read back with one copy per device."""
    found: dict[int, tuple[int, ...]] = {}
    by_device: dict[torch.device, list[Fingerprint]] = {}
    for each in fingerprints:
        assert each.bits is not None
        by_device.setdefault(each.bits.device, []).append(each)
    for several in by_device.values():
        rows = torch.stack([f.bits for f in several if f.bits is not None]).tolist()
        found |= {id(f): tuple(row) for f, row in zip(several, rows, strict=True)}
    return found


def _is_near(one: Fingerprint, other: Fingerprint) -> bool:
    if one.sums is None or other.sums is None:
        return False
    (first, size), (second, _) = one.sums.tolist(), other.sums.tolist()
    if math.isnan(first) or math.isnan(second):
        return math.isnan(first) and math.isnan(second)
    return abs(first - second) <= max(one.bound, 1e-6) * max(size, 1e-30)


def _fingerprint(func: Any, name: str, leaves: Sequence[torch.Tensor]) -> Fingerprint:
    plain = [
        leaf
        for leaf in leaves
        # Tensors without memory have no bits: forward-mode differentiation makes such zeros (ZeroTensor).
        if leaf.layout == torch.strided
        and not leaf.is_meta
        and not leaf._is_zerotensor()
        and type(leaf).__torch_dispatch__ is torch.Tensor.__torch_dispatch__
    ]
    floating = [leaf for leaf in plain if leaf.is_floating_point() and leaf.numel()]
    is_loose = any(leaf.is_cuda for leaf in plain) and (
        torch.Tag.nondeterministic_bitwise in func.tags or any(word in name for word in _ADDS_IN_ANY_ORDER)
    )
    sums = None
    if floating and floating[0].is_cuda:
        sums = torch.stack([wide_sum(floating[0].detach(), torch.float64), _size(floating[0])])
    bits = [_bits(leaf) for leaf in plain if leaf.numel()]
    return Fingerprint(
        operator=str(func),
        shapes=tuple(leaf.shape for leaf in plain),
        bits=torch.stack(bits).sum(0) if bits else None,
        sums=sums,
        bound=64 * torch.finfo(floating[0].dtype).eps if is_loose and floating else 0.0,
    )


def _size(value: torch.Tensor) -> torch.Tensor:
    return torch.linalg.vector_norm(
        value.detach().flatten(), 1, dtype=torch.float32 if value.dtype != torch.float64 else None
    ).double()


def _bits(value: torch.Tensor) -> torch.Tensor:
    """Four checksums of the bits of `value`, two of which change when elements change places. int64, shape (4,)."""
    # Sums of integers wrap around and are exact in any order, so that the checksum of equal bits is equal
    # however many threads add them up; a sum of floats would not be.
    value = value.detach().resolve_conj().resolve_neg()
    if value.is_complex():
        value = torch.view_as_real(value)
    if not value.is_contiguous():
        value = value.contiguous()
    # Seen as rows first: a dimension of one may have any stride, with which no words can be made.
    rows = value.view(-1, value.shape[-1]) if value.dim() else value.view(1, 1)
    rows = rows.view(torch.int64 if is_of_whole_words(value) else WORDS[value.element_size()])
    # In pieces: each is converted to 64 bits by itself.
    pieces = rows.split(max(1, PIECE // rows.shape[1])) if rows.dtype != torch.int64 else [rows]
    down = torch.stack([piece.sum(0, dtype=torch.int64) for piece in pieces]).sum(0)
    along = torch.cat([piece.sum(1, dtype=torch.int64) for piece in pieces])
    return torch.stack([down.sum(), _weighted(down), _weighted(along), down.square().sum()])


def _weighted(sums: torch.Tensor) -> torch.Tensor:
    return (sums * torch.arange(1, len(sums) + 1, device=sums.device)).sum()
