"""What a traced script generates with: the model of a call of transformers' `generate`, its type and lengths, and what else is on the card then.

The trace ends there, with `Generates`. Lengths are those that `generate` itself works out.
"""

import gc
import importlib
import json
import threading
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch

from tightfit.capture.child_process.early_end import end_with
from tightfit.capture.observe.attribution import user_line
from tightfit.errors import CaptureError, Generates, MissingExtra
from tightfit.torch_hooks.calls import on_generation

# So many parameters and models are named.
_MOST_NAMES = 3
_kept: list["CallLookedFor"] = []


def prepare(number: int) -> Callable[[], dict[str, int]]:
    """A preparation of a trace (`tightfit.capture.trace.Preparation`) that looks for the call `number` of `generate`; the report of a script without one says how many it had.

    Raises:
        MissingExtra: transformers is not installed.
    """
    try:
        importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "what a script generates with is a call of transformers, which is not installed: pip install 'tightfit[hf]'"
        ) from error
    watch = CallLookedFor(number)
    # Owners are held weakly.
    _kept.append(watch)
    on_generation(watch)
    return lambda: {"num_calls": watch.num_calls}


class CallLookedFor:
    """Waits for one call of `generate`; those before it run as they are."""

    def __init__(self, number: int) -> None:
        self.num_calls = 0
        self._number = number
        self._model: Any = None
        self._inputs: Any = None
        self._depth = 0

    def around_generate(
        self, model: Any, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Ends the trace at the call, as soon as its lengths are known."""
        # A model that has others generate for it calls this again.
        if not self._depth:
            self.num_calls += 1
        self._depth += 1
        try:
            if self.num_calls == self._number and self._model is None:
                self._model, self._inputs = model, _inputs(args, kwargs)
                config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
                given = {**_settings(config or model.generation_config), **kwargs}
                is_followed = threading.current_thread() is threading.main_thread()
                if given.get("max_new_tokens") is not None or not is_followed:
                    self._end(given.get("max_new_tokens"), given)
            return generate(model, *args, **kwargs)
        finally:
            self._depth -= 1

    def before_cache(self, model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        """`generate` has worked out its longest sequence."""
        if self._model is None:
            return
        known = _length(self._inputs) if not self._model.config.is_encoder_decoder else 1
        # Prompts that are given as embeddings are not among the tokens counted.
        counted = known if self._inputs is None or self._inputs.dim() == 2 else 0
        total = generation_config.max_length
        self._end(None if total is None else max(1, total - counted), _settings(generation_config))

    def _end(self, new_tokens: int | None, settings: dict[str, Any]) -> NoReturn:
        model, inputs = self._model, self._inputs
        whole = _around(model)
        config = json.loads(whole.config.to_json_string(use_diff=False))
        is_tokens = inputs is None or inputs.dim() == 2 or not whole.config.is_encoder_decoder
        rows = 1 if inputs is None else int(inputs.shape[0])
        more = max(settings.get("num_beams") or 1, settings.get("num_return_sequences") or 1)
        call = {
            # A thread that begins with `generate` has no line of the program's.
            "where": user_line().removeprefix("a library"),
            "class_name": type(whole).__name__,
            "config": config,
            "name": str(getattr(whole.config, "name_or_path", "") or ""),
            "dtype": _dtype(whole),
            "prompt": _length(inputs) if is_tokens else None,
            "new_tokens": new_tokens,
            "rows": rows * more,
            "changes": "" if config.get("quantization_config") else _changes(whole),
            "others": [[name, size] for name, size in _others(whole)],
        }
        end_with(Generates("the call of generate that was looked for", call=call))


def _inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What the model reads, None if nothing is given."""
    named = [kwargs.get(name) for name in ("inputs", "input_ids", "inputs_embeds", "input_features", "pixel_values")]
    return next((each for each in (*args[:1], *named) if isinstance(each, torch.Tensor)), None)


def _length(inputs: Any) -> int:
    """Tokens of the prompt; nothing is a token that begins."""
    return 1 if inputs is None or inputs.dim() < 2 else int(inputs.shape[1])


def _settings(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name, None) for name in ("max_new_tokens", "num_beams", "num_return_sequences")}


def _dtype(model: torch.nn.Module) -> str:
    """The type of most of its weights."""
    sizes: dict[str, int] = {}
    for each in model.parameters():
        if each.is_floating_point():
            name = str(each.dtype).removeprefix("torch.")
            sizes[name] = sizes.get(name, 0) + each.numel()
    if not sizes:
        raise CaptureError(f"{type(model).__name__} generates without weights")
    return max(sizes, key=lambda name: sizes[name])


def _changes(model: Any) -> str:
    """What the model has that its config does not give, or lacks; empty if it is as its config says."""
    with torch.device("meta"):
        made = type(model)(model.config)
    own, given = (dict(_sizes(each)) for each in (model, made))
    more = [name for name, size in own.items() if given.get(name) != size]
    less = [name for name in given if name not in own]
    words = [f"{word} {_named(names)}" for word, names in (("has", more), ("lacks", less)) if names]
    return " and ".join(words)


def _sizes(model: torch.nn.Module) -> Iterator[tuple[str, tuple[int, ...]]]:
    return ((name, tuple(each.shape)) for name, each in model.named_parameters())


def _named(names: list[str]) -> str:
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"{', '.join(names[:_MOST_NAMES])}{more}"


def _modules() -> list[torch.nn.Module]:
    # By their type, as asking an object for its class may run code of the program.
    return [each for each in gc.get_objects() if issubclass(type(each), torch.nn.Module)]


def _around(model: Any) -> Any:
    """The outermost model of transformers that `model` is a part of, itself if there is none: some have their language model generate."""
    of_library = importlib.import_module("transformers").PreTrainedModel
    found = [
        each
        for each in _modules()
        if isinstance(each, of_library) and each is not model and any(part is model for part in each.modules())
    ]
    return max(found, key=lambda each: sum(1 for _ in each.modules()), default=model)


def _others(model: torch.nn.Module) -> Iterator[tuple[str, int]]:
    """Other models on the card, and the bytes of their weights."""
    gc.collect()
    modules = _modules()
    inner = {id(child) for each in modules for child in each.children()}
    own = {id(each) for each in model.parameters()}
    for root in modules:
        if id(root) in inner or root is model:
            continue
        weights = [each for each in root.parameters() if each.device.type == "cuda" and id(each) not in own]
        size = sum(each.numel() * each.element_size() for each in weights)
        if size:
            yield type(root).__name__, size
