"""Compares outputs and gradients of parts with those of the whole, by value, in the first steps of a real run, within a bound from their dtype.

The proof is by structure (`effects.independence.row_proof`); this is a second check, on real numbers. Weights that are all zero, of a head or an adapter
that starts so, would hide what comes before them: they are replaced by random ones for the check, and the model's own are not touched.
"""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import grad  # torch's own, whatever the program puts in its place later

from tightfit.effects.ambient import saved_apart
from tightfit.effects.values.word_sums import wide_sum

# Well above what another order of summation makes in each dtype; a part that sees other rows is off by far
# more.
_BOUNDS = {torch.float64: 1e-8, torch.float32: 2e-4}
_BOUND_OF_HALVES = 4e-2
_HALF_TYPES = (torch.float16, torch.bfloat16)
_HALVES = 2
_WIDTH = 0.05  # of the numbers that stand in for zeros


def has_values(*tensors: torch.Tensor) -> bool:
    """Whether these are real tensors, and not fake ones of a virtual GPU."""
    return not any(isinstance(tensor, FakeTensor) for tensor in tensors)


def bound_for(tensor: torch.Tensor) -> float:
    """The tolerated difference, relative to the norm, of results computed in another order, for the tensor's dtype or autocast's."""
    if torch.is_autocast_enabled(tensor.device.type):
        return _BOUND_OF_HALVES
    return _BOUNDS.get(tensor.dtype, _BOUND_OF_HALVES)


def difference(one: torch.Tensor | None, other: torch.Tensor | None, bound: float, least: float = 0.0) -> float | None:
    """The norm of the difference over that of the larger (or `least`), if it is more than `bound`; None where both are the same so far.

    NaN on both sides counts as equal.
    """
    if one is None or other is None:
        return None
    wide = torch.promote_types(one.dtype, torch.float32)
    one, other = one.detach().to(wide), other.detach().to(wide)
    scale = torch.maximum(one.norm(), other.norm()).clamp(min=least)
    found = (one - other).norm() / scale
    # Compared this way round, NaN counts as no difference.
    return found.item() if bool(found > bound) else None


@torch.no_grad()
def checksum(tensors: Iterable[torch.Tensor]) -> list[float]:
    """Two sums over each tensor, read back together: they show writes that change no version (through `.data`)."""
    sums = [
        part
        for tensor in tensors
        if tensor.is_floating_point()
        for part in (wide_sum(tensor, torch.float64), torch.linalg.vector_norm(tensor, dtype=_wide(tensor)).double())
    ]
    return torch.stack([part.to(sums[0].device) for part in sums]).nan_to_num().tolist() if sums else []


def sums_differ(one: Sequence[float], other: Sequence[float], tensor: torch.Tensor) -> bool:
    """Whether two checksums of a recomputed tensor differ by more than other kernels of its dtype may."""
    if not (one and other):
        return False
    size = bound_for(tensor) * max(one[1], other[1])
    return abs(one[1] - other[1]) > size or abs(one[0] - other[0]) > size * math.sqrt(tensor.numel())


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


@contextlib.contextmanager
def nothing_hidden(module: torch.nn.Module) -> Iterator[None]:
    """Replaces parameters that are all zero by random ones for a block, drawn from a generator of its own."""
    instead: dict[int, torch.nn.Parameter] = {}
    for parameter in module.parameters():
        if parameter.is_floating_point() and parameter.numel() and not bool(parameter.detach().any()):
            # Of its own, so that neither the program's draws nor recomputed dropout masks move.
            generator = torch.Generator(parameter.device).manual_seed(len(instead))
            drawn = torch.randn(parameter.shape, generator=generator, device=parameter.device, dtype=torch.float32)
            instead[id(parameter)] = torch.nn.Parameter((_WIDTH * drawn).to(parameter.dtype), parameter.requires_grad)
    with _replaced(module, instead):
        yield


@contextlib.contextmanager
def _in_float32(module: torch.nn.Module) -> Iterator[None]:
    """Replaces parameters and buffers in half precision by copies in float32 for a block."""
    held = [*module.parameters(), *module.buffers()]
    instead = {
        id(each): torch.nn.Parameter(each.detach().float(), each.requires_grad)
        if isinstance(each, torch.nn.Parameter)
        else each.detach().float()
        for each in held
        if each.dtype in _HALF_TYPES
    }
    with _replaced(module, instead):
        yield


@contextlib.contextmanager
def _replaced(module: torch.nn.Module, instead: Mapping[int, torch.Tensor]) -> Iterator[None]:
    # Each place once: modules may be listed, and parameters held, more than once.
    places = [
        (holder, name, held)
        for own in module.modules()
        for holder in (own._parameters, own._buffers)
        for name, held in holder.items()
        if id(held) in instead
    ]
    try:
        for holder, name, held in places:
            holder[name] = instead[id(held)]  # type: ignore[assignment]
        yield
    finally:
        for holder, name, held in places:
            holder[name] = held  # type: ignore[assignment]


def halves_differ(
    module: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor, dim: int
) -> str:
    """Runs `part` whole and in two halves along `dim`, forward and backward; the difference in words, or nothing.

    A kernel that sums in half precision may be off by more than any bound: that of the layer norm at the host loses a quarter of the bias's gradient in
    bfloat16. What differs there is run once more in float32, in which nothing but the order of sums is left.
    """
    if part.shape[dim] < _HALVES:
        return ""
    told = _halves_told(module, run, part, dim)
    is_half = bound_for(part) == _BOUND_OF_HALVES
    if not (told and is_half):
        return told
    try:
        with torch.autocast(part.device.type, enabled=False), _in_float32(module):
            return _halves_told(module, run, part.detach().float(), dim)
    # It may not run in another precision.
    except (RuntimeError, TypeError, ValueError):
        return told


def _halves_told(
    module: torch.nn.Module, run: Callable[[torch.Tensor], torch.Tensor], part: torch.Tensor, dim: int
) -> str:
    with nothing_hidden(module), torch.enable_grad(), saved_apart():
        trained = {n: p for n, p in module.named_parameters() if p.requires_grad}
        whole = _passes(run, [part], dim, list(trained.values()))
        halves = _passes(run, part.split(part.shape[dim] // 2, dim), dim, list(trained.values()))
    bound = bound_for(part)
    # A gradient that is nothing but rounding is not compared with itself.
    norms = [float(g.norm()) for g in whole[1:] if g is not None]
    least = 0.1 * max((norm for norm in norms if norm == norm), default=0.0)  # noqa: PLR0124 - not a number
    for what, one, other in zip(("output", "gradient of the input", *trained), whole, halves, strict=True):
        found = difference(one, other, bound, 0.0 if what == "output" else least)
        if found is not None:
            return f"the {what} of half a tile differs from that of a whole one by {found:.2g} of its norm"
    return ""


def _passes(
    run: Callable[[torch.Tensor], torch.Tensor],
    parts: Sequence[torch.Tensor],
    dim: int,
    trained: Sequence[torch.Tensor],
) -> list[torch.Tensor | None]:
    """The concatenated outputs and input gradients, and the summed gradients of the parameters."""
    outputs, inputs = [], []
    sums: list[torch.Tensor | None] = [None] * len(trained)
    for part in parts:
        leaf = part.detach().contiguous().requires_grad_()
        output = run(leaf)
        # A gradient that is not the same everywhere.
        slope = torch.linspace(0.5, 1.5, output.shape[-1], device=output.device, dtype=output.dtype).expand_as(output)
        found = grad(output, [leaf, *trained], slope, allow_unused=True)
        outputs.append(output.detach())
        inputs.append(torch.zeros_like(leaf) if found[0] is None else found[0])
        for number, one in enumerate(found[1:]):
            total = sums[number]
            sums[number] = one if total is None or one is None else total + one
    return [torch.cat(outputs, dim), torch.cat(inputs, dim), *sums]
