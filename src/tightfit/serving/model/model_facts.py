"""What a trace of inference says of a model, as plain data: its weights, and how its cache grows with the tokens of a request."""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tightfit.errors import CaptureError

_LAYER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightRow:
    """One parameter or saved buffer. `parts` is in how many it can be cut at most, 0: in any number. `role` is `embedding`, `head`, `linear` (a weight of a matrix product) or `other`; `cut` the style of tensor parallelism in the model's plan, "" if it
    is kept whole. `num_layers` is how many layers there are where it is one of them, else 0. `takes_adapters`: it is of the model that adapters are for, and not of a draft beside it."""

    name: str
    shape: tuple[int, ...]
    item_bytes: int
    role: str
    cut: str
    kind: str
    parts: int = 0
    num_layers: int = 0
    takes_adapters: bool = True

    @property
    def num_elements(self) -> int:
        """Elements of the whole tensor."""
        return math.prod(self.shape)

    @property
    def num_bytes(self) -> int:
        """Bytes of the whole tensor, as it was made."""
        return self.num_elements * self.item_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CacheTensor:
    """One tensor of the cache of a request: `fixed_bytes`, and `token_bytes` for each token up to `max_tokens` (None: without end), or of the tokens of the encoder.

    `heads` is the size of its second dimension, which tensor parallelism cuts.
    """

    path: str
    fixed_bytes: int
    token_bytes: int
    max_tokens: int | None
    encoder_token_bytes: int
    heads: int
    item_bytes: int

    @property
    def layer(self) -> str:
        """The path without its last name: what a layer keeps together."""
        return self.path.rpartition(".")[0]

    def num_bytes(self, num_tokens: int, num_encoder_tokens: int = 0) -> int:
        """Bytes for a request of `num_tokens`."""
        kept = num_tokens if self.max_tokens is None else min(num_tokens, self.max_tokens)
        return self.fixed_bytes + self.token_bytes * kept + self.encoder_token_bytes * num_encoder_tokens


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model as a server sees it. `max_positions` is None where its config names no limit, `left_open` what was assumed where it says nothing;
    `rotary_widths` are numbers of a position in the tables of its rotary embeddings."""

    model_type: str
    dtype: str
    weights: tuple[WeightRow, ...]
    cache: tuple[CacheTensor, ...]
    max_positions: int | None
    is_encoder_decoder: bool
    has_parallel_plan: bool
    quantization: Mapping[str, Any] = dataclasses.field(default_factory=dict, hash=False)
    left_open: tuple[str, ...] = ()
    rotary_widths: tuple[int, ...] = ()

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Self:
        """From the report of `tightfit.capture.inference.inference_run`.

        Raises:
            CaptureError: the model has no cache, or one that grows in a way that is not known.
        """
        lengths = {f"{layers['path']}.": len(layers["kinds"]) for layers in report["layers"]}
        return cls(
            model_type=report["model_type"],
            dtype=report["dtype"],
            weights=tuple(
                WeightRow(
                    name=row["name"],
                    shape=tuple(row["shape"]),
                    item_bytes=row["item_bytes"],
                    role=row["role"],
                    cut=row["cut"],
                    kind=row["kind"],
                    parts=row["parts"],
                    num_layers=next((n for path, n in lengths.items() if row["name"].startswith(path)), 0),
                )
                for row in report["weights"]
            ),
            cache=_of_all_layers(
                _cache(report["caches"], report["model_type"]), report["layers"], report["model_type"]
            ),
            max_positions=report["positions"],
            is_encoder_decoder=report["is_encoder_decoder"],
            has_parallel_plan=report["has_plan"],
            quantization=report.get("quantization") or {},
            left_open=tuple(report.get("left_open", ())),
            rotary_widths=tuple(report.get("rotary", ())),
        )

    @property
    def has_one_pool(self) -> bool:
        """Whether each token of a request adds the same to all of its cache, without end."""
        grows = all(tensor.max_tokens is None and tensor.token_bytes for tensor in self.cache)
        return grows and not self.is_encoder_decoder

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones once."""
        return sum(row.num_elements for row in self.weights if row.kind == "parameter")


def _cache(caches: Mapping[str, Mapping[str, Any]], model_type: str) -> tuple[CacheTensor, ...]:
    lengths = sorted(int(name) for name in caches if name.isdigit())
    if len(lengths) < 4 or not caches[str(lengths[0])]:
        raise CaptureError(
            f"a {model_type} model returns no cache of keys and values, so that its requests have no size"
        )
    encoded = caches.get("encoded", {})
    layouts = [caches[str(length)] for length in lengths]
    return tuple(_tensor(path, lengths, [layout[path] for layout in layouts], encoded.get(path)) for path in layouts[0])


def _of_all_layers(
    traced: tuple[CacheTensor, ...], lists: Sequence[Mapping[str, Any]], model_type: str
) -> tuple[CacheTensor, ...]:
    """The tensors of all layers, from those of the layers that were kept: a layer that was left out has what the last one of its kind has."""
    shortened = [layers for layers in lists if layers["num_kept"] < len(layers["kinds"])]
    if not shortened:
        return traced
    numbered = [(tensor, _LAYER.search(tensor.path)) for tensor in traced]
    if any(found is None for _, found in numbered):
        raise CaptureError(f"a {model_type} model has a cache whose tensors do not say which layer they are of")
    places = {int(found.group()) for _, found in numbered if found is not None}
    # Of an encoder and a decoder, the decoder's are those with a cache.
    fitting = [layers for layers in shortened if max(places) < layers["num_kept"]]
    fitting = [layers for layers in fitting if "decoder" in layers["path"]] or fitting
    if len({tuple(layers["kinds"]) for layers in fitting}) != 1:
        raise CaptureError(
            f"a {model_type} model has several lists of layers, and its cache does not say which of them it is of"
        )
    kinds, num_kept = fitting[0]["kinds"], fitting[0]["num_kept"]
    last_of_kind = {kind: place for place, kind in enumerate(kinds[:num_kept])}
    left_out = [(place, last_of_kind[kind]) for place, kind in enumerate(kinds) if place >= num_kept]
    more = [
        dataclasses.replace(tensor, path=f"{tensor.path[: found.start()]}{place}{tensor.path[found.end() :]}")
        for place, like in left_out
        for tensor, found in numbered
        if found is not None and int(found.group()) == like
    ]
    return (*traced, *more)


def _tensor(
    path: str, lengths: Sequence[int], entries: Sequence[Mapping[str, Any]], encoded: Mapping[str, Any] | None
) -> CacheTensor:
    """From the sizes at two short lengths and two long ones, each pair one token apart."""
    sizes = [math.prod(entry["shape"]) * entry["item_bytes"] for entry in entries]
    token_bytes = sizes[1] - sizes[0]
    fixed = sizes[0] - token_bytes * lengths[0]
    max_tokens = None
    if token_bytes and sizes[3] == sizes[2]:
        max_tokens = (sizes[2] - fixed) // token_bytes
    elif sizes[2] != fixed + token_bytes * lengths[2] or sizes[3] - sizes[2] != token_bytes:
        raise CaptureError(
            f"the cache grows neither by the same for each token nor up to a window: {path}, {sizes} bytes at {list(lengths)} tokens"
        )
    encoder_token_bytes = 0
    if encoded is not None:
        more = math.prod(encoded["shape"]) * encoded["item_bytes"] - sizes[0]
        # The second run has twice as many tokens of the encoder, of which the first had as many as of the decoder.
        encoder_token_bytes = more // lengths[0]
        fixed -= encoder_token_bytes * lengths[0]
    shape = entries[0]["shape"]
    return CacheTensor(
        path=path,
        fixed_bytes=fixed,
        token_bytes=token_bytes,
        max_tokens=max_tokens,
        encoder_token_bytes=encoder_token_bytes,
        heads=shape[1] if len(shape) > 2 else 1,
        item_bytes=entries[0]["item_bytes"],
    )
