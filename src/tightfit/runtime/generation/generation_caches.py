"""Another cache for `generate` of transformers, in a program that names none: static, offloaded, or of 8-bit floats.

In the first call of each kind (greedy, with beams, of a batch ...) of each model the first tokens are made with this cache and with the program's own, from the same random state, and compared. A cache that is
exact must give the same tokens; if it does not, the program keeps its own. Of a lossy one the difference of the logits is said. The program's call runs once, by itself, afterwards.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tightfit.errors import UsageError
from tightfit.torch_hooks.calls import on_generation
from tightfit.torch_hooks.weak_references import WeakTable

CACHES = ("static", "offloaded", "fp8")
_LOSSY = ("fp8",)
# So many tokens are made twice at most.
_TRIED_TOKENS = 64
_DEFAULT_TOKENS = 20
_OWN = ("past_key_values", "cache_params", "cache_implementation")
# Arguments of `generate` that keep a state or show each token to somebody: the calls that are compared are made without them.
_SEEN_OUTSIDE = ("streamer", "stopping_criteria", "logits_processor", "prefix_allowed_tokens_fn")
# Settings of `generate` that change no code path of a cache.
_LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")
# A program that makes more kinds of calls than this compares too often.
_MAX_KINDS = 8
_Kind = tuple[object, ...]


class _OfThread(threading.local):
    """Whether the call under way in this thread uses the cache."""

    uses = False


@dataclasses.dataclass(slots=True, kw_only=True, weakref_slot=True, eq=False)
class ChosenCache:
    """The cache `kind` for programs that name none; `tell` is given what was found."""

    kind: str
    tell: Callable[[str], None]
    checks: bool = True
    used: bool = False
    verdicts: WeakTable[Any, dict[_Kind, bool]] = dataclasses.field(default_factory=WeakTable)
    busy: set[int] = dataclasses.field(default_factory=set)
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)
    told: set[str] = dataclasses.field(default_factory=set)
    call: _OfThread = dataclasses.field(default_factory=_OfThread)

    def around_generate(
        self, model: Any, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The program's own call, with this cache unless it was found to give other tokens."""
        if any(kwargs.get(name) is not None for name in _OWN):
            # It is filled by the call, which may not be made twice.
            self._tell_once(f"{type(model).__name__}.generate names a cache of its own, which it keeps")
            return self._plainly(generate, model, args, kwargs)
        # Two threads that come here at once must not both find that none is under way.
        with self.lock:
            is_busy = id(model) in self.busy
            self.busy.add(id(model))
        if is_busy:
            # A call of another thread, or around this one: transformers keeps one static cache for each model.
            return self._plainly(generate, model, args, kwargs)
        try:
            if not self._is_right(model, generate, args, kwargs):
                return self._plainly(generate, model, args, kwargs)
            return self._run(generate, model, args, kwargs, uses=True)
        finally:
            self.busy.discard(id(model))

    def _plainly(self, generate: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(generate, model, args, kwargs, uses=False)

    def _is_right(
        self, model: Any, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> bool:
        """Whether calls of this kind may use the cache, which is found out in the first."""
        name = type(model).__name__
        config = _config_of(model, args, kwargs)
        if kwargs.get("return_dict_in_generate", getattr(config, "return_dict_in_generate", False)):
            self._tell_once(f"{name}.generate returns its cache (return_dict_in_generate), and keeps the plain one")
            self.used = True
            return False
        if not self.checks:
            return True
        if model not in self.verdicts:
            self.verdicts[model] = {}
        known = self.verdicts[model]
        kind = _kind_of(config, args, kwargs)
        if kind not in known:
            if len(known) == _MAX_KINDS:
                self._tell_once(
                    f"{name}.generate is called in more than {_MAX_KINDS} ways; others keep the plain cache"
                )
                return False
            known[kind] = self._tried(model, generate, args, kwargs)
        return known[kind]

    def before_cache(self, model: Any, generation_config: Any, model_kwargs: dict[str, Any]) -> None:
        """Names the cache where the program names none."""
        if not self.call.uses:
            return
        # Each call has its own: one that was made in inference mode cannot be written to outside of it.
        vars(model).pop("_cache", None)
        has_own = any(model_kwargs.get(name) is not None for name in ("past_key_values", "cache_params"))
        if has_own or generation_config.cache_implementation is not None or generation_config.use_cache is False:
            self._tell_once(f"{type(model).__name__}.generate names a cache of its own, which it keeps")
            return
        device = getattr(model, "device", None)
        if self.kind == "offloaded" and (device is None or device.type != "cuda"):
            raise UsageError("--cache offloaded: the model is not on a GPU, and its cache is at the host already")
        self.used = True
        if self.kind == "fp8":
            generation_config.cache_implementation = "quantized"
            generation_config.cache_config = {"backend": "fp8"}
        else:
            generation_config.cache_implementation = self.kind
        # transformers compiles the model for a static cache, which is another program.
        generation_config.disable_compile = True

    def _tried(self, model: Any, generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the cache may be used: the first tokens, made with it and without."""
        name = type(model).__name__
        if _has_hooks(model):
            # They would see these calls.
            is_lossy = self.kind in _LOSSY
            then = "is used all the same" if is_lossy else "is not used"
            self._tell_once(
                f"{self.kind} cache of {name}: the model has hooks, so it is not compared with the plain one, and {then}"
            )
            self.used = True
            return is_lossy
        short = _short(model, args, kwargs)
        try:
            with _same_random_state():
                plain = self._run(generate, model, args, short, uses=False)
        except torch.OutOfMemoryError as error:
            # Where the plain cache has no room, this one may.
            self._tell_once(f"{self.kind} cache of {name}: not compared with the plain one ({error})")
            return True
        except (RuntimeError, ValueError, TypeError):
            # The program's own call says so too.
            return False
        try:
            with _same_random_state():
                other = self._run(generate, model, args, short, uses=True)
        except (RuntimeError, ValueError, TypeError) as error:
            self._tell_once(f"{self.kind} cache of {name}: it cannot be used, and the plain one is kept ({error})")
            self.used = True
            return False
        return self._judged(name, plain, other)

    def _run(
        self,
        generate: Callable[..., Any],
        model: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        uses: bool,
    ) -> Any:
        before, self.call.uses = self.call.uses, uses
        try:
            return generate(model, *args, **kwargs)
        finally:
            self.call.uses = before
            if uses:
                vars(model).pop("_cache", None)

    def _judged(self, name: str, plain: Any, other: Any) -> bool:
        same = plain.sequences.shape == other.sequences.shape and torch.equal(plain.sequences, other.sequences)
        number = len(plain.logits)
        error = _logit_error(plain, other)
        words = f"logits differ by at most {error[0]:.3g} ({error[1]:.2%} of their spread)"
        if self.kind in _LOSSY:
            tokens = "the same tokens" if same else "other tokens"
            self._tell_once(f"{self.kind} cache of {name}: lossy; {tokens} in the first {number}, {words}")
            return True
        if same:
            self._tell_once(
                f"{self.kind} cache of {name}: the same tokens as the plain one in the first {number}; {words}"
            )
            return True
        self._tell_once(
            f"{self.kind} cache of {name}: other tokens than the plain one in the first {number} ({words}); the plain one is kept"
        )
        return False

    def _tell_once(self, line: str) -> None:
        if line not in self.told:
            self.told.add(line)
            self.tell(line)


@contextlib.contextmanager
def with_cache(kind: str, tell: Callable[[str], None], *, checks: bool = True) -> Iterator[None]:
    """Around a program: its calls of `generate` use the cache `kind`.

    Raises:
        UsageError: there is no such kind; or the program has used no cache of ours.
        ApplyError: this version of transformers lacks what that needs.
    """
    if kind not in CACHES:
        raise UsageError(f"--cache {kind}: one of {', '.join(CACHES)}")
    chosen = ChosenCache(kind=kind, tell=tell, checks=checks)
    leave = on_generation(chosen)
    try:
        yield
    finally:
        leave()
    if not chosen.used:
        tell(f"--cache {kind}: the program has made no cache by generate of transformers, and ran as it is")


def _config_of(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return kwargs.get("generation_config") or (args[1] if len(args) > 1 else None) or model.generation_config


def _has_hooks(model: torch.nn.Module) -> bool:
    return any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def _kind_of(config: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Kind:
    """What decides how a call of `generate` uses its cache: settings that are no lengths or shares, what it is given, one row or several, and padding."""
    of_config = config.to_diff_dict().items() if hasattr(config, "to_diff_dict") else ()
    found: list[object] = [torch.is_inference_mode_enabled(), torch.is_grad_enabled()]
    for name, value in (*of_config, *kwargs.items(), *((f"argument {at}", each) for at, each in enumerate(args))):
        if name in _LENGTHS or value is None:
            continue
        if isinstance(value, torch.Tensor):
            is_padded = "mask" in name and not bool(value.all())
            found.append((name, value.dim(), value.dtype, min(2, len(value) if value.dim() else 0), is_padded))
        else:
            found.append((name, value if isinstance(value, bool | int | str) else type(value).__name__))
    return tuple(sorted(found, key=str))


def _short(model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call for the first tokens alone, with their logits."""
    config = _config_of(model, args, kwargs)
    asked = kwargs.get("max_new_tokens") or getattr(config, "max_new_tokens", None)
    limit = kwargs.get("max_length")
    inputs = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if not asked and limit and isinstance(inputs, torch.Tensor) and not model.config.is_encoder_decoder:
        asked = max(1, limit - inputs.shape[-1])
    number = min(asked or _DEFAULT_TOKENS, _TRIED_TOKENS)
    short = {name: value for name, value in kwargs.items() if name not in ("max_length", *_SEEN_OUTSIDE)}
    least = kwargs.get("min_new_tokens")
    return {
        **short,
        **({"min_new_tokens": min(least, number)} if least else {}),
        "max_new_tokens": number,
        "return_dict_in_generate": True,
        "output_logits": True,
    }


def _logit_error(plain: Any, other: Any) -> tuple[float, float]:
    """The largest difference of logits up to the first token that differs, and over the spread of the plain ones."""
    start = plain.sequences.shape[1] - len(plain.logits)
    most = spread = 0.0
    for at, (first, second) in enumerate(zip(plain.logits, other.logits, strict=False)):
        if first.shape != second.shape:
            break
        finite = torch.isfinite(first) & torch.isfinite(second)
        if finite.any():
            most = max(most, float((first - second)[finite].abs().max()))
            spread = max(spread, float(first[finite].float().std()))
        tokens = [
            run.sequences[:, start + at] if start + at < run.sequences.shape[1] else None for run in (plain, other)
        ]
        if tokens[0] is None or tokens[1] is None or not torch.equal(tokens[0], tokens[1]):
            break
    return most, most / spread if spread else 0.0


@contextlib.contextmanager
def _same_random_state() -> Iterator[None]:
    """The random states of torch, host and cards, are afterwards those of before."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        yield
