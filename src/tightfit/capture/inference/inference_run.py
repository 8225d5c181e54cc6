"""One model, run as a server runs it on a virtual GPU: the batch that an engine measures at its start, the growth of the cache, prompts and decoding steps.

The generator yields once per part; `REPORT["steps"]` says what each of them was. What is no trace of memory or time - the rows of
weights, the layout of the cache at several lengths - is in `REPORT` too, which `prepare` hands to the parent process.
"""

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tightfit.capture.inference import paged_attention
from tightfit.capture.inference.alike_layers import shorten
from tightfit.capture.inference.cache_layout import append_in_place, layout_of
from tightfit.capture.inference.call_count import CallCount
from tightfit.capture.inference.inference_model import build, input_width, widest_window
from tightfit.capture.inference.named_positions import refuse_beyond
from tightfit.capture.inference.sampler import sample
from tightfit.capture.inference.weight_rows import cut_layers, plan_of, rotary_widths, weight_rows
from tightfit.capture.targets.huggingface.target import LEFT_OPEN
from tightfit.errors import CaptureError, UsageError

REPORT: dict[str, Any] = {}
# One short request; and one that is longer than every window that the config names, with one token more.
_SHORT, _LONG = 8, 1024
# Of a model that computes token after token in a loop of Python: so many, and what is larger follows from the growth between the last two.
_LONG_IN_A_LOOP = 40
_SIZES_IN_A_LOOP = (48, 96)
_PROMPTS, _PROMPTS_IN_A_LOOP = (64, 256, 1024), (16, 32, 64)
_BATCHES = (2, 16)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InferenceRequest:
    """The largest batches of an engine: with each number of `batched_tokens`, of which each number of `sampled_rows` get a next token (sorted for top-k and top-p, with `sorts`); and
    for each of `ranks`, degrees of tensor parallelism.

    Where no `batched_tokens` are given they are `tokens_chunked` for requests longer than `chunked_above` tokens (None: never), else the longest
    request or `tokens_whole`; the longest request is of `max_model_len` tokens, or of all positions of the model.
    """

    source: str
    dtype: str | None
    batched_tokens: Sequence[int]
    tokens_chunked: int
    tokens_whole: int
    chunked_above: int | None
    max_model_len: int | None
    sampled_rows: Sequence[int]
    sorts: bool
    ranks: Sequence[int] = (1,)

    def profiled_tokens(self, positions: int | None) -> Sequence[int]:
        """Tokens of the largest batches for a model of so many positions (None: it names no limit)."""
        if self.batched_tokens:
            return self.batched_tokens
        longest = self.max_model_len or positions or 0
        if self.chunked_above is not None and longest > self.chunked_above:
            return (self.tokens_chunked,)
        return (max(longest, self.tokens_whole),)


def prepare(_: None) -> Callable[[], dict[str, Any]]:
    """A preparation of the trace (`tightfit.capture.trace.Preparation`), whose report is `REPORT`."""
    return lambda: REPORT


def start_up(**fields: Any) -> Iterator[None]:
    """Loads the model, runs the largest batches of an engine and samples from them, then what shows its speed; a step for each entry of `REPORT["steps"]`.

    With several degrees, one that the model cannot be cut for is left out, and `REPORT["refused"]` says why.
    """
    request = InferenceRequest(**fields)
    run = _Run(request)
    refuse_beyond(request.max_model_len, input_width(run.config))
    REPORT.update(steps=[], refused={})
    with torch.inference_mode():
        run.lengths()
        yield _step("load", 0, 1)
        for ranks in request.ranks:
            try:
                run.cut(request, ranks)
                with _cut_in_vain(run.config, ranks):
                    yield from _probes(run, request, ranks)
            except UsageError as error:
                if len(request.ranks) == 1:
                    raise
                REPORT["refused"][str(ranks)] = str(error)
                REPORT["steps"] = [step for step in REPORT["steps"] if step[2] != ranks or step[0] == "load"]
                yield _step("refused", 0, ranks)


def _probes(run: "_Run", request: InferenceRequest, ranks: int) -> Iterator[None]:
    for num_tokens in run.sizes(request.profiled_tokens(input_width(run.config))):
        hidden = run.batch(num_tokens)
        yield _step("batch", num_tokens, ranks)
        for rows in request.sampled_rows:
            run.next_tokens(hidden[:rows], sorts=request.sorts)
            yield _step("sample", rows, ranks)
        del hidden
    for kind, size in run.speed():
        yield _step(kind, size, ranks)


def _step(kind: str, size: int, ranks: int) -> None:
    REPORT["steps"].append([kind, size, ranks])


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
    """The model on the card, its layers reduced to the first ones of each kind."""

    def __init__(self, request: InferenceRequest) -> None:
        paged_attention.register()
        self._attention: str | None = paged_attention.NAME
        self._ranks = 1
        self._load(request)
        try:
            self._first = self._short_cache()
        except (AttributeError, KeyError, TypeError, ValueError):
            # A model with an attention of its own, which needs its own mask.
            self._attention = None
            self._load(request)
            self._first = self._short_cache()

    def _load(self, request: InferenceRequest) -> None:
        self.model, self.config = build(request.source, request.dtype, attention=self._attention)
        self.is_pair = bool(getattr(self.config, "is_encoder_decoder", False))
        self.body, self.head = self.model.base_model, self.model.get_output_embeddings()
        quantization = getattr(self.config, "quantization_config", None)
        dtype = next(p.dtype for p in self.model.parameters() if p.is_floating_point())
        REPORT.update(
            model_type=self.config.model_type,
            left_open=list(dict.fromkeys(LEFT_OPEN)),
            quantization=quantization if isinstance(quantization, dict) else {},
            has_plan=bool(plan_of(self.model)),
            dtype=str(dtype).removeprefix("torch."),
            positions=input_width(self.config),
            is_encoder_decoder=self.is_pair,
            base=next((path for path, module in self.model.named_modules() if module is self.body), ""),
            weights=weight_rows(self.model),
            rotary=rotary_widths(self.model),
            layers=[dataclasses.asdict(layers) for layers in shorten(self.model, self.config)],
        )
        if self.body is self.model:
            # Its class has no part without the head: the states that the head would have are the outputs of a head that does nothing.
            self.model.set_output_embeddings(torch.nn.Identity())
            self.model.add_module("output_head", self.head)
        self.arguments = inspect.signature(self.body.forward).parameters
        self.model.to_empty(device="cuda")

    def cut(self, request: InferenceRequest, ranks: int) -> None:
        """Leaves one rank's share of the weights, of all that the model had."""
        if self._ranks != 1:
            self._load(request)
        self._ranks = ranks
        if ranks > 1:
            cut_layers(self.model, ranks)

    def _short_cache(self) -> Any:
        with torch.inference_mode(), CallCount() as self._calls:
            return self.cache_of(1, _SHORT)

    def lengths(self) -> None:
        """Runs one request at several lengths and notes what its cache holds."""
        REPORT["caches"] = {str(_SHORT): layout_of(self._first)}
        if self._first is None:
            # Its states are attributes of its layers.
            raise CaptureError(
                f"a {self.config.model_type} model returns no cache of keys and values, so that its requests have no size"
            )
        with CallCount() as more:
            cache = self.cache_of(1, _SHORT + 1)
        REPORT["caches"][str(_SHORT + 1)] = layout_of(cache)
        self.loops = more.number > self._calls.number
        long = max(_no_longer(self.config, _LONG_IN_A_LOOP if self.loops else _LONG), 2 * widest_window(self.config))
        for length in (long, long + 1):
            REPORT["caches"][str(length)] = layout_of(self.cache_of(1, length))
        if self.is_pair:
            outputs = self.forward(1, _SHORT, use_cache=True, encoded=2 * _SHORT)
            REPORT["caches"]["encoded"] = layout_of(_cache(outputs))

    def batch(self, num_tokens: int) -> torch.Tensor:
        """The states behind so many tokens (tokens, width), in as few requests as the model has positions for."""
        rows = -(-num_tokens // (input_width(self.config) or num_tokens))
        length = -(-num_tokens // rows)
        return self.forward(rows, length, use_cache=False, encoded=length)[0].flatten(0, 1)

    def sizes(self, num_tokens: Sequence[int]) -> Sequence[int]:
        """The sizes at which batches of `num_tokens` are traced."""
        return _SIZES_IN_A_LOOP if self.loops and max(num_tokens) > _SIZES_IN_A_LOOP[-1] else num_tokens

    def speed(self) -> Iterator[tuple[str, int]]:
        """Prompts of several lengths, and a token more for batches of several sizes: what was run, and its size."""
        sizes = _PROMPTS_IN_A_LOOP if self.loops else _PROMPTS
        longest = _no_longer(self.config, sizes[-1])
        for num_tokens in (size * longest // sizes[-1] for size in sizes):
            # An encoder reads the prompt, and the decoder begins with one token.
            length = 1 if self.is_pair else num_tokens
            hidden = self.forward(1, length, use_cache=True, encoded=num_tokens)[0]
            self.next_tokens(hidden[:, -1], sorts=False)
            yield "prompt", num_tokens
        for batch in _BATCHES:
            cache = self.cache_of(batch, _SHORT)
            append_in_place(cache)
            yield "fill", batch
            hidden = self.forward(batch, 1, use_cache=True, cache=cache)[0]
            self.next_tokens(hidden[:, -1], sorts=False)
            yield "decode", batch

    def next_tokens(self, hidden: torch.Tensor, *, sorts: bool) -> None:
        """The next token behind each row of `hidden` (rows, width)."""
        # Models that keep their residuals in float32 cast the states for their head.
        weight = getattr(self.head, "weight", None)
        is_cast = weight is not None and weight.is_floating_point() and weight.dtype.itemsize > 1
        sample(self.head(hidden.to(weight.dtype) if is_cast else hidden), restricts=sorts)

    def cache_of(self, batch: int, num_tokens: int) -> Any:
        """The cache of `batch` requests of `num_tokens`; None where the model returns none."""
        return _cache(self.forward(batch, num_tokens, use_cache=True))

    def forward(self, rows: int, length: int, *, use_cache: bool, cache: Any = None, encoded: int | None = None) -> Any:
        """The model's outputs for `rows` of `length` tokens, behind those in `cache`."""
        tokens = torch.zeros(rows, length, dtype=torch.int64, device="cuda")
        arguments: dict[str, Any] = {"input_ids": tokens, "use_cache": use_cache}
        if self.is_pair:
            source = (
                _encoder_inputs(self.model, self.config, rows, encoded or _SHORT)
                if cache is None
                else {"encoder_outputs": (self._encoded,)}
            )
            arguments = {**source, "decoder_input_ids": tokens, "use_cache": use_cache}
        if cache is not None:
            arguments["past_key_values" if "past_key_values" in self.arguments else "cache_params"] = cache
        outputs = self.body(**arguments)
        self._encoded = getattr(outputs, "encoder_last_hidden_state", None)
        return outputs


def _no_longer(config: Any, num_tokens: int) -> int:
    """`num_tokens`, or as many as the model has positions for, with room for one token more."""
    return min(num_tokens, (input_width(config) or num_tokens + 1) - 1)


def _encoder_inputs(model: Any, config: Any, rows: int, length: int) -> dict[str, torch.Tensor]:
    """What the encoder reads: tokens, or the frames of a sound, whose number is the config's."""
    if model.main_input_name == "input_features":
        frames = 2 * config.max_source_positions
        shape, dtype = (rows, config.num_mel_bins, frames), model.dtype
        return {"input_features": torch.zeros(*shape, dtype=dtype, device="cuda")}
    return {"input_ids": torch.zeros(rows, length, dtype=torch.int64, device="cuda")}


def _cache(outputs: Any) -> Any:
    for name in ("past_key_values", "cache_params"):
        if getattr(outputs, name, None) is not None:
            return getattr(outputs, name)
    return None
