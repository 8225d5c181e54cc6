"""Watches a forward for its loss functions and what they average over, and for obstacles to micro-batches: batch norm, randomness.

A mean over a batch is the mean of its parts' means, each weighted by its number of terms. That number is taken from the call of the loss function,
so that nothing is assumed about labels: ignored targets, class weights and `reduction="sum"` count as in that call.
"""

import dataclasses
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from tightfit.effects.call_trails import HANDLERS, SAYS_WHAT_IT_IS_LIKE, CallTrail
from tightfit.effects.dispatched import OF_C, dispatched
from tightfit.effects.random_operators import draws
from tightfit.effects.reads import is_called_by_us
from tightfit.errors import ApplyError
from tightfit.techniques.micro_batches.divisors import Divisor, Divisors

# Means over classes that have an index to ignore, and means over all elements.
_OF_CLASSES = {functional.cross_entropy, functional.nll_loss}
_OF_ELEMENTS = {
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
}
_DECIDES = frozenset(
    {"__bool__", "__contains__", "item", "__int__", "__float__", "__index__", "equal", "allclose", "is_nonzero"}
)
# Answers that are a text or a list, which nobody is led by: where they differ between parts, that is all there is to know.
_TELLS = frozenset({"tolist", "__repr__", "__format__"})
_DROPOUTS = frozenset(
    {"dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout", "dropout_"}
)


Decision = tuple[str, Any]
"""What code read off a tensor to go on by: the name of the function, and the value."""


class DecidedEnough(BaseException):
    """Ends a forward that is run for its decisions alone; not the program's to catch."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One call of a loss function: its result (None where it is kept), the number of terms of its mean (None: it is a sum), and the largest possible number.
    Of a loss that the code divides itself the `divisor`."""

    loss: torch.Tensor | None
    num_terms: torch.Tensor | int | None
    max_terms: int
    is_contrastive: bool
    divisor: Divisor | None = None


class LossWatch(TorchFunctionMode):
    """Collects the losses that are computed while it is active. Code that decides is given the decisions `led`, in place of its own, as far as they go;
    after `num_wanted` of them the forward is ended. `given` is what the code is called with.

    Raises:
        ApplyError: a batch norm in training, or (unless `allows_randomness` or `shares_draws`) something that draws random numbers.
    """

    def __init__(
        self,
        num_examples: int,
        *,
        allows_randomness: bool,
        led: Sequence[Decision] = (),
        num_wanted: int | None = None,
        given: Sequence[torch.Tensor] = (),
        shares_draws: bool = False,
        has_divisors: bool = False,
    ) -> None:
        super().__init__()
        self.terms: list[Term] = []
        # What the code read off tensors, to go on by, and by which functions.
        self.decisions: list[Any] = []
        self.asked: list[str] = []
        self._led, self._num_wanted = led, num_wanted
        # The first error that it raised, for code that swallows it.
        self.failure: ApplyError | None = None
        self.num_examples = num_examples
        self.calls = CallTrail()
        self.calls.lent.give(given)
        # With `shares_draws` the proof decides: what is drawn alike for any rows, all parts draw alike.
        self._divisors = Divisors() if has_divisors else None
        self._allows_draws = allows_randomness or shares_draws

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        # Most calls are of these two kinds, and each is the processor's time of a step.
        if func in SAYS_WHAT_IT_IS_LIKE:
            return func(*args, **kwargs) if kwargs else func(*args)
        self.calls.note(func, args, kwargs)
        if func in _OF_NO_INTEREST or _is_of_no_interest(func):
            result = self.calls.made(func(*args, **kwargs) if kwargs else func(*args))
            if self._divisors is not None and (found := self._divisors.look(func, args, kwargs or {}, result)):
                self.terms.append(
                    Term(loss=None, num_terms=found.value, max_terms=1, is_contrastive=False, divisor=found)
                )
                self.divided(args[0], found, result)
            return result
        func = dispatched(func)
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if name in ("batch_norm", "instance_norm") and uses_batch_statistics(func, args, kwargs):
            raise self._refusal(
                "a batch norm in training takes its statistics from the whole batch, which parts of it do not have; leave micro_batches out"
            )
        if not self._allows_draws and draws_random_numbers(func, args, kwargs) and not is_called_by_us():
            raise self._refusal(
                f"{name} draws random numbers, which differ in parts of the batch; --allow micro_batches accepts that"
            )
        asks = name in _DECIDES or name in _TELLS
        if asks and len(self.decisions) < len(self._led) and not is_called_by_us():
            return self._lead(name)
        result = self.calls.made(func(*args, **kwargs))
        if func in _OF_CLASSES or func in _OF_ELEMENTS:
            self._note(func, args, kwargs, result)
        elif asks and isinstance(result, bool | int | float | str | list) and not is_called_by_us():
            is_number = isinstance(result, bool | int | float) and result == result  # noqa: PLR0124 - not a number
            self._decided(name, result if is_number else (repr(result),))
        return result

    def known_decisions(self) -> tuple[Decision, ...]:
        """All that was decided, up to what is not a number."""
        pairs = zip(self.asked, self.decisions, strict=True)
        return tuple(itertools.takewhile(lambda pair: not isinstance(pair[1], tuple), pairs))

    def _lead(self, name: str) -> Any:
        asked, value = self._led[len(self.decisions)]
        if asked != name:
            raise self._refusal(
                "the model branches on values that differ between a part of the batch and the whole; leave "
                "micro_batches out"
            )
        self._decided(name, value)
        return value

    def _decided(self, name: str, value: Any) -> None:
        self.decisions.append(value)
        self.asked.append(name)
        if len(self.decisions) == self._num_wanted:
            raise DecidedEnough

    def _refusal(self, message: str) -> ApplyError:
        self.failure = self.failure or ApplyError(message)
        return self.failure

    def _note(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], loss: Any) -> None:
        call = _bound(func, args, kwargs)
        has_old_arguments = call.get("size_average") is not None or call.get("reduce") is not None
        # `reduction="none"` gives a value for each row, whose mean the program takes itself: that is followed
        # by `effects.totals`.
        if has_old_arguments or call["reduction"] not in ("mean", "sum"):
            return
        # Over the sum of weights, which may be none in a part: what it is made of is followed.
        if func is functional.mse_loss and call["reduction"] == "mean" and call.get("weight") is not None:
            return
        scores, target = call["input"], call["target"]
        is_contrastive = (
            func in _OF_CLASSES and scores.dim() == 2 and tuple(scores.shape) == (self.num_examples,) * 2
        ) and self.num_examples > 1
        num_terms: torch.Tensor | int | None = None
        if call["reduction"] == "mean" and func in _OF_ELEMENTS:
            num_terms = torch.broadcast_shapes(scores.shape, target.shape).numel()
        elif call["reduction"] == "mean":
            num_terms = _num_targets(scores, target, call["weight"], call["ignore_index"])
        term = Term(loss=loss, num_terms=num_terms, max_terms=max(1, target.numel()), is_contrastive=is_contrastive)
        self.noted(term, call, is_of_classes=func in _OF_CLASSES)

    def run(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a loss function that is not torch's."""
        return func(*args, **kwargs)

    def divided(self, loss: torch.Tensor, divisor: Divisor, result: torch.Tensor) -> None:
        """A number was divided by a sum, or what is made of one; the last of the terms is of it."""

    def noted(self, term: Term, inputs: Mapping[str, Any], *, is_of_classes: bool) -> None:
        """Keeps a term; `inputs` are the arguments of the loss function."""
        # Without its graph: a block that is run again keeps the modes around its first run, and its graph would keep itself.
        self.terms.append(dataclasses.replace(term, loss=None))


HANDLERS.add(LossWatch.__torch_function__.__code__)


# Of torch's own functions, which stay: those that are bound to a tensor would keep it.
_OF_NO_INTEREST: set[Callable[..., Any]] = set()


def _is_of_no_interest(func: Callable[..., Any]) -> bool:
    """Whether a function of torch in C is no norm, no loss, draws nothing, and reads nothing that code goes on by."""
    if not isinstance(func, OF_C) or not _is_name_of_no_interest(func.__name__):
        return False
    if isinstance(func, types.MethodDescriptorType) or isinstance(
        getattr(func, "__self__", None), types.ModuleType | type
    ):
        _OF_NO_INTEREST.add(func)
    return True


@functools.cache
def _is_name_of_no_interest(name: str) -> bool:
    losses = {function.__name__ for function in (*_OF_CLASSES, *_OF_ELEMENTS)}
    others = (
        "batch_norm",
        "instance_norm",
        "scaled_dot_product_attention",
        "gumbel_softmax",
        *_DROPOUTS,
        *_DECIDES,
        *_TELLS,
    )
    return name not in losses and name not in others and not draws(name)


def active_watch() -> LossWatch | None:
    """The innermost active watch, if there is one."""
    modes = _get_current_function_mode_stack()
    return next((mode for mode in reversed(modes) if isinstance(mode, LossWatch)), None)


def _num_targets(
    scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int
) -> torch.Tensor | int:
    """The divisor of the mean in `cross_entropy`."""
    # Class probabilities as targets: the mean is over all rows, whatever they sum to, and nothing is ignored.
    if target.is_floating_point():
        return scores.numel() // scores.shape[min(1, scores.dim() - 1)]
    counts = target != ignore_index
    if weight is None:
        return counts.sum()
    # torch divides by the sum of the weights of the targets, not by their number (LossNLL.cpp).
    return (weight[target.clamp(0, len(weight) - 1)] * counts).sum()


def uses_batch_statistics(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of `batch_norm` or `instance_norm` depends on the rest of the batch, or writes it to running statistics."""
    if func is functional.batch_norm:
        return bool(_bound(func, args, kwargs)["training"])
    if func is functional.instance_norm:
        call = _bound(func, args, kwargs)
        return bool(call["use_input_stats"]) and call["running_mean"] is not None
    return False


def draws_random_numbers(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call of torch draws from a random generator."""
    name = getattr(func, "__name__", "")
    if name == "scaled_dot_product_attention":
        return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))
    if name in _DROPOUTS:
        rate = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return bool(rate) and bool(args[2] if len(args) > 2 else kwargs.get("training", kwargs.get("train", True)))
    return name == "gumbel_softmax" or draws(name)


def _bound(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    call = inspect.signature(func).bind(*args, **kwargs)
    call.apply_defaults()
    return call.arguments
