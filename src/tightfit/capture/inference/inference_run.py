"""One model, run as a server runs it on a virtual GPU: the batch that an engine measures at its start, the cache's growth, a prompt, a decoding step.

The generator yields once per part, in the order of `PARTS`. What is no trace of memory or time - the rows of weights, the layout of the cache at
several lengths - is in `REPORT`, which `prepare` hands to the parent process.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tightfit.capture.inference import paged_attention
from tightfit.capture.inference.alike_layers import shorten
from tightfit.capture.inference.cache_layout import layout_of
from tightfit.capture.inference.inference_model import build, input_width, widest_window
from tightfit.capture.inference.sampler import sample
from tightfit.capture.inference.weight_rows import cut_layers, plan_of, weight_rows
from tightfit.errors import UsageError

PARTS = ("load", "profile", "prefill", "decode")
REPORT: dict[str, Any] = {}
# One short request; and one that is longer than every window that the config names, with one token more.
_SHORT, _LONG = 8, 1024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """What is run: the largest batch of an engine, of which `sampled_rows` get a next token (sorted for top-k and top-p, with `sorts`); then a prompt of `prompt`
    tokens, and `batch` requests of `context` tokens that get one more each. `ranks` is the degree of tensor parallelism.

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
    prompt: int
    batch: int
    context: int
    ranks: int = 1

    def profiled_tokens(self, positions: int | None) -> int:
        """Tokens of the largest batch for a model of so many positions (None: it names no limit)."""
        if self.batched_tokens is not None:
            return self.batched_tokens
        longest = self.max_model_len or positions or 0
        if self.chunked_above is not None and longest > self.chunked_above:
            return self.tokens_chunked
        return max(longest, self.tokens_whole)


def prepare(_: None) -> Callable[[], dict[str, Any]]:
    """A preparation of the trace (`tightfit.capture.trace.Preparation`), whose report is `REPORT`."""
    return lambda: REPORT


def inference(**fields: Any) -> Iterator[None]:
    """Runs the parts; see the module."""
    request = InferenceRequest(**fields)
    paged_attention.register()
    model, config = build(request.source, request.dtype)
    REPORT["model_type"] = config.model_type
    quantization = getattr(config, "quantization_config", None)
    REPORT["quantization"] = quantization if isinstance(quantization, dict) else {}
    REPORT["has_plan"] = bool(plan_of(model))
    REPORT["weights"] = weight_rows(model)
    REPORT["dtype"] = str(next(p.dtype for p in model.parameters() if p.is_floating_point())).removeprefix("torch.")
    REPORT["positions"] = input_width(config)
    REPORT["is_encoder_decoder"] = bool(getattr(config, "is_encoder_decoder", False))
    REPORT["caches"] = {}
    lists = shorten(model, config)
    REPORT["layers"] = [dataclasses.asdict(layers) for layers in lists]
    model.to_empty(device="cuda")
    run = _Run(model, config, request)
    with torch.inference_mode():
        run.lengths()
        if request.ranks > 1:
            cut_layers(model, request.ranks)
        yield
        for part in (run.profile, run.prefill, run.decode):
            try:
                part()
            except RuntimeError as error:
                if request.ranks == 1:
                    raise
                # What is left of the layers does not fit together: the plan leaves out some of them.
                raise UsageError(
                    f"--gpus {request.ranks}: the tensor-parallel plan of a {config.model_type} model in transformers does not cut all of its layers ({error})"
                ) from error
            yield


class _Run:
    def __init__(self, model: Any, config: Any, request: InferenceRequest) -> None:
        self.model, self.config, self.request = model, config, request
        self.is_pair = bool(getattr(config, "is_encoder_decoder", False))
        self.cache: Any = None

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

    def profile(self) -> None:
        """The largest batch, as one row of tokens, and the next tokens of some of them."""
        hidden = self._forward(1, self.request.profiled_tokens(input_width(self.config)), use_cache=False)[0]
        head = self.model.get_output_embeddings()
        rows = hidden[0, : self.request.sampled_rows]
        logits = head(rows)
        sample(logits, restricts=self.request.sorts)

    def prefill(self) -> None:
        """The prompt of one request."""
        self._forward(1, self.request.prompt, use_cache=False)

    def decode(self) -> None:
        """One more token of each of a batch of requests, whose cache is made before and not counted."""
        cache = self._cache(self._forward(self.request.batch, self.request.context, use_cache=True))
        REPORT["decode_begins"] = True
        marker = torch.empty(1, device="cuda")
        del marker
        self._forward(self.request.batch, 1, use_cache=True, cache=cache)

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
