"""Receptive fields of convolutions, poolings and upsamplings along one axis: the range of the input that a range of the output needs.

A convolution or pooling needs `(begin * stride - padding, (end - 1) * stride - padding + dilation * (kernel - 1) + 1)`; positions outside of the
input are the layer's own padding, all others are real neighbours (Dumoulin and Visin, "A guide to convolution arithmetic", arXiv:1603.07285).
A layer that enlarges its input by an integer factor needs every position that its range touches.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tightfit.errors import ApplyError
from tightfit.techniques.tiling.tile_function import Tile

Function = Callable[..., torch.Tensor]

_POINTWISE = (
    *(
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.PReLU,
        nn.ELU,
        nn.CELU,
        nn.SELU,
        nn.GELU,
        nn.SiLU,
        nn.Mish,
        nn.Sigmoid,
        nn.Tanh,
        nn.Softplus,
    ),
    *(
        nn.Hardtanh,
        nn.Hardswish,
        nn.Hardsigmoid,
        nn.Hardshrink,
        nn.Softshrink,
        nn.Softsign,
        nn.LogSigmoid,
        nn.Threshold,
        nn.Identity,
    ),
)
_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
_CONVOLUTIONS: Mapping[type[nn.Module], Function] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
_MAX_POOLS: Mapping[type[nn.Module], Function] = {
    nn.MaxPool1d: functional.max_pool1d,
    nn.MaxPool2d: functional.max_pool2d,
    nn.MaxPool3d: functional.max_pool3d,
}
_AVERAGE_POOLS: Mapping[type[nn.Module], Function] = {
    nn.AvgPool1d: functional.avg_pool1d,
    nn.AvgPool2d: functional.avg_pool2d,
    nn.AvgPool3d: functional.avg_pool3d,
}
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

Interval = tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AxisLayer:
    """A layer along one axis. `grows` is the factor of an upsampling layer, which has kernel 1 and stride 1 then."""

    module: Any
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    padding: Interval = (0, 0)
    grows: int = 1

    @property
    def reach(self) -> int:
        """The receptive field: positions of the input that one position of the output depends on."""
        return self.dilation * (self.kernel - 1) + 1

    def length(self, length: int) -> int:
        """The output length for an input of `length`."""
        return ((length + sum(self.padding) - self.reach) // self.stride + 1) * self.grows

    def needs(self, begin: int, end: int) -> Interval:
        """The range of the input that `range(begin, end)` of the output needs; it may reach beyond both ends of the input."""
        if self.grows > 1:
            return begin // self.grows, math.ceil(end / self.grows)
        before = self.padding[0]
        return begin * self.stride - before, (end - 1) * self.stride - before + self.reach


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileStep:
    """One layer on one tile: `before` and `after` are positions of padding; the result is cropped to `range(skip, skip + keep)`."""

    layer: AxisLayer
    before: int
    after: int
    skip: int
    keep: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Path:
    """A tile with all its steps."""

    tile: Tile
    steps: tuple[TileStep, ...]


def flat(children: Iterable[nn.Module]) -> Iterator[nn.Module]:
    """The modules of a chain, with nested Sequentials flattened."""
    for child in children:
        if type(child).forward is nn.Sequential.forward:
            yield from flat(child._modules.values())  # type: ignore[arg-type]
        else:
            yield child


def layers_along(children: Iterable[nn.Module], axis: int) -> list[AxisLayer]:
    """The layers of a chain along the spatial axis `axis`, 0 being the first after batch and channels.

    Raises:
        ApplyError: one of them looks at more than a neighbourhood, or in a way that is not known here.
    """
    return [_layer(module, axis) for module in flat(children)]


def check_dimensions(children: Iterable[nn.Module], value: torch.Tensor) -> None:
    """Raises ApplyError where a chain is called with one image, without a dimension for the batch: its axes are others then."""
    # As in Conv2d, MaxPool1d, BatchNorm3d.
    ends = (type(module).__name__[-2:] for module in flat(children))
    num_axes = next((int(end[0]) for end in ends if end[0].isdigit() and end[1] == "d"), 1)
    if value.dim() < 2 + num_axes:
        raise ApplyError(
            f"the chain is called with {value.dim()} dimensions (one image without a batch dimension); leave "
            "tiled_convolutions out"
        )


def _layer(module: Any, axis: int) -> AxisLayer:
    found = (
        AxisLayer(module=module)
        if _is_pointwise(module)
        else _convolution(module, axis) or _pool(module, axis) or _growing(module, axis)
    )
    # Padding as wide as the receptive field makes outputs that see padding alone, and a tile there would have
    # no input at all.
    if found is None or max(found.padding) >= found.reach:
        raise ApplyError(
            f"a {type(module).__name__} ({module.extra_repr()}) cannot be run in tiles; leave tiled_convolutions out"
        )
    return found


def _convolution(module: Any, axis: int) -> AxisLayer | None:
    if type(module) not in _CONVOLUTIONS or module.padding_mode != "zeros":
        return None
    kernel, dilation = module.kernel_size[axis], module.dilation[axis]
    around = dilation * (kernel - 1)
    if module.padding == "same":
        padding = around // 2, around - around // 2
    else:
        padding = (0, 0) if module.padding == "valid" else (module.padding[axis],) * 2
    return AxisLayer(module=module, kernel=kernel, stride=module.stride[axis], dilation=dilation, padding=padding)


def _pool(module: Any, axis: int) -> AxisLayer | None:
    is_max = type(module) in _MAX_POOLS
    if not is_max and type(module) not in _AVERAGE_POOLS:
        return None
    counts_all = is_max or (module.count_include_pad and getattr(module, "divisor_override", None) is None)
    # Ceil mode adds a window that lies partly outside of the input, and returned indices count positions of the
    # whole: both differ in a tile. So does an average that divides by the real elements of a window only.
    if module.ceil_mode or getattr(module, "return_indices", False) or not counts_all:
        return None
    return AxisLayer(
        module=module,
        kernel=_along(module.kernel_size, axis),
        stride=_along(module.stride, axis),
        dilation=_along(getattr(module, "dilation", 1), axis),
        padding=(_along(module.padding, axis),) * 2,
    )


def _growing(module: Any, axis: int) -> AxisLayer | None:
    if not _is_of_torch(module):
        return None
    if isinstance(module, _TRANSPOSED):
        # Only where windows do not overlap is a transposed convolution a function of each position by itself.
        is_apart = module.kernel_size == module.stride and not any((*module.padding, *module.output_padding))
        return AxisLayer(module=module, grows=module.stride[axis]) if is_apart and set(module.dilation) == {1} else None
    factor = module.upscale_factor if type(module) is nn.PixelShuffle else _nearest_factor(module, axis)
    return AxisLayer(module=module, grows=factor) if factor else None


def _is_pointwise(module: Any) -> bool:
    """Whether each position is computed independently: an activation, or a dropout or batch norm in evaluation mode."""
    if not _is_of_torch(module):
        return False
    if isinstance(module, _DROPOUTS):
        return not module.training or module.p == 0
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return not module.training and module.running_mean is not None
    return type(module) in _POINTWISE


def _is_of_torch(module: nn.Module) -> bool:
    """Whether the class is torch's own, and not a subclass, which may do anything."""
    return type(module).__module__.startswith("torch.nn.modules.")


def _nearest_factor(module: Any, axis: int) -> int:
    if not isinstance(module, nn.Upsample) or module.mode != "nearest" or module.scale_factor is None:
        return 0
    factor = _along(module.scale_factor, axis)
    return int(factor) if float(factor).is_integer() else 0


def _along(value: Any, axis: int) -> Any:
    return value[axis] if isinstance(value, tuple | list) else value


def paths(layers: Sequence[AxisLayer], length: int, num_tiles: int) -> list[Path]:
    """The tiles of an input of `length` positions, by equal parts of the output."""
    lengths = [length]
    for layer in layers:
        lengths.append(layer.length(lengths[-1]))
    num_tiles = min(num_tiles, lengths[-1])
    borders = [lengths[-1] * number // num_tiles for number in range(num_tiles + 1)]
    return [_path(layers, lengths, b, e) for b, e in itertools.pairwise(borders)]


def _path(layers: Sequence[AxisLayer], lengths: Sequence[int], out_begin: int, out_end: int) -> Path:
    begin, end, steps = out_begin, out_end, []
    for layer, length in zip(reversed(layers), reversed(lengths[:-1]), strict=True):
        first, last = layer.needs(begin, end)
        clipped = max(first, 0), min(last, length)
        skip = begin - first * layer.grows if layer.grows > 1 else 0
        steps.append(
            TileStep(layer=layer, before=clipped[0] - first, after=last - clipped[1], skip=skip, keep=end - begin)
        )
        begin, end = clipped
    tile = Tile(begin=begin, end=end, out_begin=out_begin, out_end=out_end)
    return Path(tile=tile, steps=tuple(reversed(steps)))


def length_within(layers: Sequence[AxisLayer], length: int) -> int:
    """The number of positions at the start of a chain's output that depend only on the first `length` positions of its input."""
    lengths = [length]
    for layer in layers:
        lengths.append(layer.length(lengths[-1]))
    end = lengths[-1]
    while end > 0:
        needed = end
        for layer, available in zip(reversed(layers), reversed(lengths[:-1]), strict=True):
            needed = layer.needs(0, needed)[1]
            if needed > available:
                break
        else:
            return end
        end -= 1
    return 0


def run_step(step: TileStep, value: torch.Tensor, dim: int) -> torch.Tensor:
    """One layer on a tile; `dim` is the tiled dimension of `value`."""
    module, axis = step.layer.module, dim - 2
    if step.before or step.after:
        # The padding of a maximum is minus infinity, which no real element loses against.
        filling = -math.inf if type(module) in _MAX_POOLS else 0.0
        value = functional.pad(value, (0, 0) * (value.dim() - 1 - dim) + (step.before, step.after), value=filling)
    if type(module) in _CONVOLUTIONS:
        padding: Any = [_own_padding(module, other) for other in range(value.dim() - 2)]
        # `padding="same"` with an even kernel pads one more on the right; the functional form takes only
        # symmetric padding.
        uneven = [other for other, (first, last) in enumerate(padding) if first != last and other != axis]
        for other in uneven:
            value = functional.pad(value, (0, 0) * (value.dim() - 3 - other) + padding[other])
        around = [0 if other == axis or other in uneven else pair[0] for other, pair in enumerate(padding)]
        return _CONVOLUTIONS[type(module)](
            value, module.weight, module.bias, module.stride, around, module.dilation, module.groups
        )
    if type(module) in _MAX_POOLS or type(module) in _AVERAGE_POOLS:
        num_axes = value.dim() - 2
        around = [0 if other == axis else _along(module.padding, other) for other in range(num_axes)]
        if type(module) in _MAX_POOLS:
            return _MAX_POOLS[type(module)](value, module.kernel_size, module.stride, around, module.dilation)
        return _AVERAGE_POOLS[type(module)](value, module.kernel_size, module.stride, around)
    result = module(value)
    return result.narrow(dim, step.skip, step.keep) if step.layer.grows > 1 else result


def _own_padding(module: Any, axis: int) -> Interval:
    return _layer(module, axis).padding
