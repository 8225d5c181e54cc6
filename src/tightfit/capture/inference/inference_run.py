"""One model, run as a server runs it on a virtual GPU: the batch that an engine measures at its start and the cache's growth; or a prompt and a decoding step.

The generators yield once per part. What is no trace of memory or time - the rows of weights, the layout of the cache at
several lengths - is in `REPORT`, which `prepare` hands to the parent process.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tightfit.capture.inference import paged_attention
from tightfit.capture.inference.alike_layers import shorten
from tightfit.capture.inference.cache_layout import append_in_place, layout_of
from tightfit.capture.inference.inference_model import build, input_width, widest_window
from tightfit.capture.inference.sampler import sample
from tightfit.capture.inference.weight_rows import cut_layers, plan_of, weight_rows
from tightfit.errors import UsageError

REPORT: dict[str, Any] = {}
# One short request; and one that is longer than every window that the config names, with one token more.
_SHORT, _LONG = 8, 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """The largest batch of an engine, of which `sampled_rows` get a next token (sorted for top-k and top-p, with `sorts`). `ranks` is the degree of tensor parallelism.

    The largest batch has `batched_tokens`. Where that is None it is `tokens_chunked` for requests longer than `chunked_above` tokens (None: never), else the longest
    request or `tokens_whole`; the longest request is of `max_model_len` tokens, or of all positions of the model.
    """

    source: str
    dtype: str | None
    batched_tokens: int | None
    tokens_chunked: int
    tokens_whole: int
    chunked_above: int | None
    max_model_len: int | None
    sampled_rows: int
    sorts: bool
    ranks: int = 1

    def profiled_tokens(self, positions: int | None) -> int:
        """Tokens of the largest batch for a model of so many positions (None: it names no limit)."""
        if self.batched_tokens is not None:
            return self.batched_tokens
        longest = self.max_model_len or positions or 0
        if self.chunked_above is not None and longest > self.chunked_above:
            return self.tokens_chunked
        return max(longest, self.tokens_whole)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeedRequest:
    """A prompt of `prompt` tokens, and `batch` requests of `context` tokens that get one more each."""

    source: str
    dtype: str | None
    prompt: int
    batch: int
    context: int
    ranks: int = 1


def prepare(_: None) -> Callable[[], dict[str, Any]]:
    """A preparation of the trace (`tightfit.capture.trace.Preparation`), whose report is `REPORT`."""
    return lambda: REPORT


def start_up(**fields: Any) -> Iterator[None]:
    """Loads the model, and runs the largest batch of an engine: two steps."""
    request = InferenceRequest(**fields)
    model, config = _loaded(request.source, request.dtype)
    run = _Run(model, config)
    REPORT["weights"] = weight_rows(model)
    run.shorten()
    with torch.inference_mode():
        run.lengths()
        run.cut(request.ranks)
        yield
        with _cut_in_vain(config, request.ranks):
            run.profile(
                request.profiled_tokens(input_width(config)), sampled_rows=request.sampled_rows, sorts=request.sorts
            )
        yield


def speed(**fields: Any) -> Iterator[None]:
    """Loads the model, runs a prompt, makes the cache of a batch of requests, and a token for each of them: four steps."""
    request = SpeedRequest(**fields)
    model, config = _loaded(request.source, request.dtype)
    run = _Run(model, config)
    run.shorten()
    with torch.inference_mode():
        run.cut(request.ranks)
        yield
        with _cut_in_vain(config, request.ranks):
            run.prefill(request.prompt)
            yield
            cache = run.cache_of(request.batch, request.context)
            yield
            run.decode(request.batch, cache)
            yield


def _loaded(source: str, dtype: str | None) -> tuple[Any, Any]:
    paged_attention.register()
    model, config = build(source, dtype)
    REPORT["model_type"] = config.model_type
    quantization = getattr(config, "quantization_config", None)
    REPORT["quantization"] = quantization if isinstance(quantization, dict) else {}
    REPORT["has_plan"] = bool(plan_of(model))
    REPORT["dtype"] = str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")
    REPORT["positions"] = input_width(config)
    REPORT["is_encoder_decoder"] = bool(getattr(config, "is_encoder_decoder", False))
    REPORT["base"] = model.base_model_prefix if model.base_model is not model else ""
    REPORT["caches"] = {}
    return model, config


@contextlib.contextmanager
def _cut_in_vain(config: Any, ranks: int) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if ranks == 1:
            raise
        # What is left of the layers does not fit together: the plan leaves out some of them.
        raise UsageError(
            f"--gpus {ranks}: the tensor-parallel plan of a {config.model_type} model in transformers does not cut all of its layers ({error})"
        ) from error


class _Run:
    def __init__(self, model: Any, config: Any) -> None:
        self.model, self.config = model, config
        self.is_pair = bool(getattr(config, "is_encoder_decoder", False))

    def shorten(self) -> None:
        """Leaves the first layers of each kind, on the card."""
        REPORT["layers"] = [dataclasses.asdict(layers) for layers in shorten(self.model, self.config)]
        self.model.to_empty(device="cuda")

    def cut(self, ranks: int) -> None:
        """Leaves one rank's share of the weights."""
        if ranks > 1:
            cut_layers(self.model, ranks)

    def lengths(self) -> None:
        """Runs one request at several lengths and notes what its cache holds."""
        long = max(_LONG, 2 * widest_window(self.config))
        for length in (_SHORT, _SHORT + 1, long, long + 1):
            cache = self._cache(self._forward(1, length, use_cache=True))
            REPORT["caches"][str(length)] = layout_of(cache)
            if cache is None:
                return
        if self.is_pair:
            cache = self._cache(self._forward(1, _SHORT, use_cache=True, encoded=2 * _SHORT))
            REPORT["caches"]["encoded"] = layout_of(cache)

    def profile(self, num_tokens: int, *, sampled_rows: int, sorts: bool) -> None:
        """The largest batch, as one row of tokens, and the next tokens of some of them."""
        hidden = self._forward(1, num_tokens, use_cache=False)[0]
        self._next_tokens(hidden[0, :sampled_rows], sorts=sorts)

    def prefill(self, num_tokens: int) -> None:
        """The prompt of one request, and its first token."""
        hidden = self._forward(1, num_tokens, use_cache=False)[0]
        self._next_tokens(hidden[:, -1], sorts=False)

    def cache_of(self, batch: int, context: int) -> Any:
        """The cache of a batch of requests, to which a token is added in its place, as engines do that keep it in pages."""
        cache = self._cache(self._forward(batch, context, use_cache=True))
        append_in_place(cache)
        return cache

    def decode(self, batch: int, cache: Any) -> None:
        """One more token of each request of a batch."""
        hidden = self._forward(batch, 1, use_cache=True, cache=cache)[0]
        self._next_tokens(hidden[:, -1], sorts=False)

    def _next_tokens(self, hidden: torch.Tensor, *, sorts: bool) -> None:
        sample(self.model.get_output_embeddings()(hidden), restricts=sorts)

    def _forward(
        self, rows: int, length: int, *, use_cache: bool, cache: Any = None, encoded: int | None = None
    ) -> Any:
        tokens = torch.zeros(rows, length, dtype=torch.int64, device="cuda")
        arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": use_cache}
        if self.is_pair:
            source = torch.zeros(rows, encoded or _SHORT, dtype=torch.int64, device="cuda")
            arguments = {"input_ids": source, "decoder_input_ids": tokens, "use_cache": use_cache}
        if cache is not None:
            arguments["past_key_values"] = cache
        return self.model.base_model(**arguments)

    def _cache(self, outputs: Any) -> Any:
        for name in ("past_key_values", "cache_params"):
            if getattr(outputs, name, None) is not None:
                return getattr(outputs, name)
        return None
