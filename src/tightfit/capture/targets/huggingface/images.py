"""Images for any Hugging Face model: the layout that it takes and the number of tokens per image.

Four layouts exist: plain (rows, channels, height, width), with a dimension of frames or tiles in front of the
channels, patches cut out by the processor with a grid of their positions, and patches padded to a fixed
number. Which of them, and how many placeholder tokens the text needs, is found by running the model's own
`get_image_features` on a twin that has shapes only, so that nothing is allocated and no figure is copied here.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from tightfit.errors import CaptureError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

DEFAULT_SIDE = 224
"""Pixels a side where neither the config nor the user says: the ImageNet crop."""
# The tile counts that `_probe` tries.
MAX_TILES = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Images:
    """One image per row: `fields` make the arguments of `forward`; each image is `num_tokens` tokens of text."""

    fields: Mapping[str, Callable[[], Any]]
    num_tokens: int
    side: int


def images(model: Any, config: Any, names: set[str], rows: int, side: int | None) -> Images:
    """The images of a batch of `rows`, `side` pixels a side (None: what the config says).

    Raises:
        CaptureError: no layout of images is one that the model takes.
    """
    torch = importlib.import_module("torch")
    vision = _vision(config)
    side = side or _side(vision)
    channels = next(
        (getattr(vision, name) for name in ("num_channels", "in_channels", "in_chans") if hasattr(vision, name)), 3
    )
    frames = next((getattr(config, name) for name in ("num_frames", "frames_per_clip") if hasattr(config, name)), None)
    # Told apart by the names of `forward`'s arguments, which models of one family share: qwen-vl's grid,
    # siglip2's padded patches, mllama's tiles.
    if "image_grid_thw" in names:
        return _grid(vision, rows, side, channels)
    if "spatial_shapes" in names:
        return _padded_patches(vision, rows, channels)
    if "aspect_ratio_mask" in names:
        return _tiles(vision, rows, side, channels)
    if frames is not None:
        name = "pixel_values" if "pixel_values" in names else "pixel_values_videos"
        shape = (rows, frames, channels, side, side)
        return Images(fields={name: functools.partial(torch.randn, shape)}, num_tokens=0, side=side)
    tiles, num_tokens, extra = None, 0, {}
    if _has_placeholder(config) and "input_ids" in names and (helper := _helper(model)) is not None:
        asked = inspect.signature(helper).parameters.get("image_sizes")
        if asked is not None and asked.default is inspect.Parameter.empty:
            extra = {"image_sizes": torch.tensor([[side, side]])}
        tiles, num_tokens = _probe(model, config, (channels, side, side), extra)
    shape = (rows, *([tiles] if tiles else []), channels, side, side)
    fields: dict[str, Callable[[], Any]] = {"pixel_values": functools.partial(torch.randn, shape)}
    fields |= {name: functools.partial(value.repeat, rows, 1) for name, value in extra.items()}
    return Images(fields=fields, num_tokens=num_tokens, side=side)


def _vision(config: Any) -> Any:
    """The part of a config that describes images: the one named for it, else the whole."""
    named = (getattr(config, name, None) for name in ("vision_config", "encoder", "backbone_config"))
    return next((part for part in named if hasattr(part, "to_diff_dict")), config)


def _side(vision: Any) -> int:
    size = getattr(vision, "image_size", None) or getattr(vision, "input_size", None) or DEFAULT_SIDE
    if isinstance(size, dict):
        size = size["height"]
    return size if isinstance(size, int) else max(size)


def _has_placeholder(config: Any) -> bool:
    return any(getattr(config, name, None) is not None for name in ("image_token_id", "image_token_index"))


def _grid(vision: Any, rows: int, side: int, channels: int) -> Images:
    """The concatenated patches of all images, and the number of each image's patches in time, height and width.

    The still image is repeated to fill `temporal_patch_size` frames (Qwen2VLImageProcessor).
    """
    torch = importlib.import_module("torch")
    merge = getattr(vision, "spatial_merge_size", 1)
    cells = max(side // (vision.patch_size * merge), 1) * merge
    depth = channels * getattr(vision, "temporal_patch_size", 1) * vision.patch_size**2
    grid = torch.tensor([[1, cells, cells]])
    return Images(
        fields={
            "pixel_values": functools.partial(torch.randn, (rows * cells**2, depth)),
            "image_grid_thw": functools.partial(grid.repeat, rows, 1),
        },
        num_tokens=(cells // merge) ** 2,
        side=side,
    )


def _padded_patches(vision: Any, rows: int, channels: int) -> Images:
    """The largest number of patches that the model takes, none of them padding."""
    torch = importlib.import_module("torch")
    cells = int(getattr(vision, "num_patches", 256) ** 0.5)
    shape = (rows, cells**2, channels * vision.patch_size**2)
    return Images(
        fields={
            "pixel_values": functools.partial(torch.randn, shape),
            "pixel_attention_mask": functools.partial(torch.ones, shape[:2], dtype=torch.long),
            "spatial_shapes": functools.partial(torch.full, (rows, 2), cells),
        },
        num_tokens=0,
        side=cells * vision.patch_size,
    )


def _tiles(vision: Any, rows: int, side: int, channels: int) -> Images:
    """One image with the largest number of tiles, read by cross attention: the text has no placeholders."""
    torch = importlib.import_module("torch")
    tiles = vision.max_num_tiles
    return Images(
        fields={
            "pixel_values": functools.partial(torch.randn, (rows, 1, tiles, channels, side, side)),
            "aspect_ratio_ids": functools.partial(torch.ones, (rows, 1), dtype=torch.long),
            "aspect_ratio_mask": functools.partial(torch.ones, (rows, 1, tiles), dtype=torch.long),
        },
        num_tokens=0,
        side=side,
    )


def _helper(model: Any) -> Callable[..., Any] | None:
    """`get_image_features` of the model or of the one inside its head."""
    inner = getattr(model, "model", None)
    return getattr(model, "get_image_features", None) or getattr(inner, "get_image_features", None)


def _probe(model: Any, config: Any, image: tuple[int, ...], extra: Mapping[str, Any]) -> tuple[int | None, int]:
    """The number of tiles (None: the layout has no such dimension) and of tokens per image that the model takes."""
    torch = importlib.import_module("torch")
    with torch.device("meta"):
        # A second model on the meta device: the first one may hold real weights, and running it would cost time
        # and host memory.
        get_image_features = _helper(type(model)(copy.deepcopy(config)).eval())
    assert get_image_features is not None  # the twin has what the model has
    dtype = next(parameter.dtype for parameter in model.parameters())
    arguments = dict(extra)
    for name in inspect.signature(get_image_features).parameters:
        if name.startswith("vision_feature"):
            arguments[name] = getattr(config, name)
    refusals = []
    for tiles in (None, *range(1, MAX_TILES + 1)):
        pixels = torch.empty((1, *([tiles] if tiles else []), *image), device="meta", dtype=dtype)
        try:
            with torch.no_grad():
                features = get_image_features(pixel_values=pixels, **arguments)
        except (RuntimeError, ValueError, IndexError, TypeError, AttributeError) as refusal:
            if isinstance(refusal, NotImplementedError) or "meta tensor" in str(refusal):
                # The layout is right: the model went on to look at the pixels, which a twin does not have.
                return tiles, _num_tokens_by_config(config, image[-1])
            refusals.append(f"{type(refusal).__name__}: {refusal}")
            continue
        return tiles, sum(tensor.numel() // tensor.shape[-1] for tensor in _features(features))
    raise CaptureError(f"no layout of images suits this {config.model_type} model: {refusals[0].splitlines()[0]}")


def _num_tokens_by_config(config: Any, side: int) -> int:
    """The queries of a resampler (BLIP-2), else the patches of a square image, merged some to a side.

    The factor is `scale_factor` (Idefics 3) or `spatial_merge_size` (Mistral 3).
    """
    if hasattr(config, "num_query_tokens"):
        return config.num_query_tokens
    merge = getattr(config, "scale_factor", None) or getattr(config, "spatial_merge_size", 1)
    return (side // _vision(config).patch_size // merge) ** 2


def _features(result: Any) -> Iterator[Any]:
    """The tensors that replace placeholder tokens, out of what versions of `get_image_features` return."""
    pooled = getattr(result, "pooler_output", None)
    if pooled is not None:
        yield from _features(pooled)
    elif hasattr(result, "last_hidden_state"):
        yield result.last_hidden_state
    elif hasattr(result, "numel"):
        yield result
    else:
        for item in result:
            yield from _features(item)
