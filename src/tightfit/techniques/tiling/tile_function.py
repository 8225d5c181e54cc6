"""An autograd function that computes tile by tile in both passes: intermediate results exist for one tile at a time.

The forward pass saves only its inputs. The backward pass runs each tile again with gradients, writes (or, where tiles overlap, adds) the
gradient of the inputs in place, and sums those of the parameters: in float32 if they are in half precision.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.autograd import grad  # torch's own, whatever the program puts in its place later

from tightfit.capture.observe.host_python import spends
from tightfit.cost.host_python import HostWork
from tightfit.effects.ambient import Ambient
from tightfit.effects.call_trails import CallTrail, Trail, operators_at
from tightfit.effects.graph_shapes import graph_shape
from tightfit.effects.independence.row_proof import dense
from tightfit.effects.state import MOVED
from tightfit.effects.values.contents import checksum_of, contents_of, is_any_written
from tightfit.effects.values.value_checks import checksum, sums_differ
from tightfit.errors import ApplyError, TightfitError
from tightfit.techniques.tiling.first_state import FirstState
from tightfit.techniques.wrappers.first_order import Refuse, check_transforms, first_order

_OTHER_RESULT = "gave another result when a tile was run again in the backward pass"
_MAX_WAYS = 64


class TileRuns:
    """What the second runs of tiles have been like since one proof: whether they gave the bits of the first, and the graph that they made.

    Without gradients some operators have other kernels, so that a tile may not give the same bits in both runs. Where it does in the first calls, which are
    compared within a bound as well, it has to in all later ones.
    """

    def __init__(self) -> None:
        self._gives_same_bits: bool | None = None
        # By tile, since those at the ends of a chain of convolutions pad what those in the middle do not, and by what has a gradient: a
        # discriminator is called with data and with what a generator made, and weights are frozen.
        self._shapes: dict[tuple[int, bool, tuple[bool, ...]], int] = {}
        self.latest: CallTrail | None = None
        """The calls of the last first run."""
        # By tile, the calls of first runs for which the proof holds.
        self._calls: dict[int, set[int]] = {}

    def is_proved(self, number: int, calls: int) -> bool:
        """Whether the proof is one for the first run of tile `number` with these calls: the first that there were, or some that `also_proved` was told of."""
        return calls in self._calls.setdefault(number, {calls})

    def also_proved(self, number: int, calls: int) -> None:
        """The proof was repeated, and holds for these calls too."""
        if len(self._calls[number]) >= _MAX_WAYS:
            self._calls[number].clear()
        self._calls[number].add(calls)

    def check(
        self,
        number: int,
        part: torch.Tensor,
        parameters: Sequence[torch.nn.Parameter],
        first: int | None,
        result: torch.Tensor,
        *,
        is_checked: bool,
        has_own_graph: bool = True,
    ) -> str:
        """Compares the second run of tile `number`, of the input `part` with `parameters`, in words if it differs. `first` is the checksum of the first run, None where it was not read.
        `has_own_graph`: that of the result ends at the tile."""
        shape = graph_shape(result.grad_fn) if has_own_graph else 0
        key = (number, part.requires_grad, tuple(parameter.requires_grad for parameter in parameters))
        if has_own_graph and self._shapes.setdefault(key, shape) != shape:
            return "ran other operators when a tile was run again in the backward pass"
        again = None if first is None else checksum_of(result)
        if again is None:
            return ""
        if is_checked:
            self._gives_same_bits = self._gives_same_bits is not False and again == first
        return "" if again == first or not self._gives_same_bits else _OTHER_RESULT


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """`range(begin, end)` of the input and `range(out_begin, out_end)` of the output, along the tiled dimension."""

    begin: int
    end: int
    out_begin: int
    out_end: int

    def of(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This tile of the input, laid out as an input of its shape would be: modules may view it in another shape."""
        return dense(tensor.narrow(dim, self.begin, self.end - self.begin))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """`run(tile, part)` is the output of one tile; `parameters` are all that may get gradients. `dim` is the same in input and output.

    `first_state` is that of the modules in the forward pass; `refuse` makes the error to raise where it is lost.
    With `is_checked`, values of inputs and results are compared within a bound. `runs` remembers what tiles were like in earlier calls. `prove_again` is
    called with the input where a tile called other functions than the run that was proved, and raises where these mix its rows; without it all code is known.
    """

    run: Callable[[Tile, torch.Tensor], torch.Tensor]
    tiles: Sequence[Tile]
    dim: int
    parameters: Sequence[torch.nn.Parameter]
    first_state: FirstState
    overlap: bool = False
    is_checked: bool = False
    refuse: Refuse = ApplyError
    runs: TileRuns = dataclasses.field(default_factory=TileRuns)
    prove_again: Callable[[torch.Tensor], None] | None = None

    def part(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """The input of tile `number`; images whose channels come last keep them there."""
        tile = self.tiles[number]
        is_last = self.overlap and value.dim() == 4 and not value.is_contiguous()
        if is_last and value.is_contiguous(memory_format=torch.channels_last):
            part = value.narrow(self.dim, tile.begin, tile.end - tile.begin)
            return part.contiguous(memory_format=torch.channels_last)
        return tile.of(value, self.dim)

    def first_run(self, number: int, value: torch.Tensor) -> torch.Tensor:
        """The output of tile `number` in the forward pass."""
        part = self.part(number, value)
        if self.prove_again is None:
            return self.run(self.tiles[number], part)
        trail = Trail()
        trail.calls.lent.give([value])
        with trail, operators_at(value.device, trail.calls):
            result = self.run(self.tiles[number], part)
        self.runs.latest = trail.calls
        calls = trail.calls.number()
        if not self.runs.is_proved(number, calls):
            self.prove_again(value)
            self.runs.also_proved(number, calls)
        return result


def run_tiled(tiling: Tiling, value: torch.Tensor) -> torch.Tensor:
    """The output of all tiles for the input `value`, with one node in the graph.

    Raises:
        ApplyError: torch.func transforms the call. The backward pass raises it for second derivatives, or if the modules have changed since in a way that cannot be undone for it.
    """
    check_transforms("tiles", tiling.refuse)
    if not all(p.is_leaf for p in tiling.parameters):
        raise tiling.refuse(
            "runs with weights that are not its own (functional_call), which its tiles would not find in the "
            "backward pass"
        )
    _check_attributes(value, "input", tiling.refuse)
    trained = [p for p in tiling.parameters if p.requires_grad]
    return _Tiled.apply(tiling, _autocast(value.device.type), value, *trained)


def _check_attributes(tensor: torch.Tensor, what: str, refuse: Refuse) -> None:
    """Refuses a tensor with attributes of the program's own: a tile of it has none, and neither has what tiles are put together to."""
    # Tensors of a virtual GPU, a subclass, have some of their own.
    if type(tensor) is torch.Tensor and (names := list(vars(tensor))):
        raise refuse(f"has an {what} with attributes of its own ({', '.join(names[:3])}), which its tiles would lose")


class _Tiled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tiling: Tiling, autocast: dict[str, Any], value: torch.Tensor, *trained: Any) -> torch.Tensor:
        ctx.tiling, ctx.autocast, ctx.refuse, ctx.ambient = tiling, autocast, tiling.refuse, Ambient.now()
        ctx.checksum = checksum([value, *tiling.parameters]) if tiling.is_checked else None
        ctx.contents = contents_of([value, *tiling.parameters])
        ctx.addresses = _addresses(tiling.parameters)
        # Parameters too, so that autograd checks their versions: an in-place update between the passes raises
        # torch's own error.
        ctx.save_for_backward(value, *trained)
        length = max(tile.out_end for tile in tiling.tiles)
        output = None
        ctx.sums, ctx.results = [], []
        _spends(tiling)
        with torch.autocast(**autocast):
            for number, tile in enumerate(tiling.tiles):
                part = tiling.first_run(number, value)
                _check_attributes(part, "output", tiling.refuse)
                ctx.results.append(checksum_of(part))
                if tiling.is_checked:
                    ctx.sums.append(checksum([part]))
                if output is None:
                    shape = list(part.shape)
                    shape[tiling.dim] = length
                    output = _laid_out_as(part, shape)
                output.narrow(tiling.dim, tile.out_begin, tile.out_end - tile.out_begin).copy_(part)
        assert output is not None
        return output

    @staticmethod
    @first_order("tiles", has_derivative=True)
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        (gradient,) = grad_outputs
        tiling = ctx.tiling
        # The engine runs backward functions with gradients on exactly if create_graph is set: then all tiles keep their graphs.
        is_differentiated = torch.is_grad_enabled()
        _spends(tiling)
        value, *trained = ctx.saved_tensors
        changed = tiling.first_state.lost()
        if not changed and ctx.addresses != _addresses(tiling.parameters):
            changed = "a weight had its data replaced"
        if not changed and not all(parameter.requires_grad for parameter in trained):
            changed = "a weight was frozen"
        read = [value, *tiling.parameters]
        if not changed and (
            is_any_written(ctx.contents, read) or (ctx.checksum is not None and ctx.checksum != checksum(read))
        ):
            changed = "the input or a weight was modified without autograd seeing it (through .data)"
        if changed:
            raise tiling.refuse(f"cannot run its tiles again in the backward pass: {changed} after the forward")
        whole = None
        if ctx.needs_input_grad[2]:
            # Tiles that do not overlap cover the input, so nothing of the gradient stays unwritten.
            whole = torch.zeros_like(value) if tiling.overlap else torch.empty_like(value)
        sums: list[torch.Tensor | None] = [None] * len(trained)
        with tiling.first_state.put_back(tiling.refuse):
            for number, tile in enumerate(tiling.tiles):
                # A leaf for each tile, so that its gradient ends here; but where that is differentiated, by the input too.
                is_of_graph = is_differentiated and whole is not None
                part = tiling.part(number, value if is_of_graph else value.detach())
                if not is_of_graph:
                    part.requires_grad_(whole is not None)
                with (
                    torch.enable_grad(),
                    ctx.ambient.put_back(),
                    torch.autocast(**ctx.autocast),
                    _told_of_errors(tiling.refuse),
                ):
                    result = tiling.run(tile, part)
                told = tiling.runs.check(
                    number,
                    part,
                    tiling.parameters,
                    ctx.results[number],
                    result,
                    is_checked=tiling.is_checked,
                    has_own_graph=not is_of_graph,
                )
                if not told and ctx.sums and sums_differ(ctx.sums[number], checksum([result]), result):
                    told = _OTHER_RESULT
                if told:
                    raise tiling.refuse(told)
                wanted = [part, *trained] if whole is not None else trained
                along = gradient.narrow(tiling.dim, tile.out_begin, tile.out_end - tile.out_begin)
                found: list[torch.Tensor | None] = list(
                    grad(result, wanted, along, allow_unused=True, create_graph=is_differentiated)
                )
                del result
                if whole is not None:
                    _put(whole.narrow(tiling.dim, tile.begin, tile.end - tile.begin), found.pop(0), adds=tiling.overlap)
                _add(sums, found, in_place=not is_differentiated)
        return (None, None, whole, *(_cast(s, p) for s, p in zip(sums, trained, strict=True)))


def _laid_out_as(part: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """An empty tensor whose dimensions are in memory in the order of those of `part`: channels may come last."""
    if part.is_contiguous():
        return part.new_empty(shape)
    order = sorted(range(part.dim()), key=lambda dim: (part.stride(dim), part.shape[dim]), reverse=True)
    places = [order.index(dim) for dim in range(part.dim())]
    return part.new_empty([shape[dim] for dim in order]).permute(places)


def _spends(tiling: Tiling) -> None:
    """Of what a call costs the host, one of its passes has half."""
    spends(HostWork.TILED_CALL, 0.5)
    spends(HostWork.TILE, 0.5 * len(tiling.tiles))


def _addresses(parameters: Iterable[torch.Tensor]) -> list[int]:
    # Weights that are at the host come back to another place.
    return [-1 if parameter in MOVED else parameter.data_ptr() for parameter in parameters]


@contextmanager
def _told_of_errors(refuse: Refuse) -> Iterator[None]:
    """What only the second run of a tile raises is not the program's to catch: it has the results of the first."""
    try:
        yield
    except (TightfitError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        told = " ".join(str(error).split())
        raise refuse(f"raised {type(error).__name__} when its tiles were run again ({told})") from error


def _put(place: torch.Tensor, found: torch.Tensor | None, *, adds: bool) -> None:
    if adds:
        if found is not None:
            place.add_(found)
    elif found is None:
        place.zero_()
    else:
        place.copy_(found)


def _add(sums: list[torch.Tensor | None], found: list[torch.Tensor | None], *, in_place: bool) -> None:
    """Adds to the sums, in place where no graph has saved them, and frees each gradient once it is added."""
    for number in range(len(sums)):
        one, found[number] = found[number], None
        total = sums[number]
        if one is None:
            continue
        if total is not None:
            sums[number] = total.add_(one) if in_place else total + one
        else:
            # The plain run sums over all tokens inside of one product, in float32; partial sums rounded to half
            # precision would be worse.
            sums[number] = one.float() if one.dtype in (torch.float16, torch.bfloat16) else one


def _cast(total: torch.Tensor | None, parameter: torch.Tensor) -> torch.Tensor | None:
    return None if total is None else total.to(parameter.dtype)


def _autocast(device_type: str) -> dict[str, Any]:
    """The current autocast settings, without its cache: casts made without gradients would be found by code that needs them."""
    return {
        "device_type": device_type,
        "dtype": torch.get_autocast_dtype(device_type),
        "enabled": torch.is_autocast_enabled(device_type),
        "cache_enabled": False,
    }
