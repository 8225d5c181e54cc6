"""Recomputes only calls with large inputs: a plan that is made for the largest batch leaves those batches alone that fit as they are.

What a block saves grows with its input, so most batches of a data set whose samples differ in length need no second run. Which call is run twice is decided by
the call itself, and not by the batch of the step: several models, threads and micro-batches need no common state. Mimose (arXiv:2209.02478) has the idea.
"""

import copy
import itertools
import operator
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from tightfit.techniques.recomputation.call_arguments import tensors_in
from tightfit.techniques.recomputation.only_above import SETTING, CallSizes, key_of
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption
from tightfit.techniques.wrappers.forwards import Around


@final
class LargeCalls:
    """Which calls of one choice are recomputed: those with a tensor of more elements than `most` has for its place, as a decoder's with a short target and a long
    source has, and those with other tensors; all where `most` is empty. `sizes` is told of each call, under `key`."""

    def __init__(self, most: Sequence[int], key: str, sizes: CallSizes | None) -> None:
        self._most = most
        self._key = key
        self._sizes = sizes

    def __deepcopy__(self, memo: dict[int, Any]) -> "LargeCalls":
        # What a copy of the model is called with is no part of the plan's run.
        return LargeCalls(self._most, self._key, None)

    def has(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether this call is recomputed."""
        # A compiler would make the number of elements a condition of its code, which is then compiled anew for each length.
        if torch.compiler.is_compiling():
            return True
        sizes = [tensor.numel() for tensor in tensors_in((*args, *kwargs.values()))]
        if self._sizes is not None and torch.is_grad_enabled():
            known = self._sizes.get(self._key, [])
            self._sizes[self._key] = [max(pair) for pair in itertools.zip_longest(known, sizes, fillvalue=0)]
        return not self._most or len(sizes) != len(self._most) or any(map(operator.gt, sizes, self._most))

    def only(self, inside: Around) -> Around:
        """`inside`, for these calls alone."""
        return inside if not self._most and self._sizes is None else _Only(self, inside)


class _Only:
    """The wrapper around a forward. A copy of the module gets a copy of it."""

    def __init__(self, calls: LargeCalls, inside: Around) -> None:
        self._calls = calls
        self._inside = inside

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Only":
        return _Only(copy.deepcopy(self._calls, memo), copy.deepcopy(self._inside, memo))

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        if self._calls.has(args, kwargs):
            return self._inside(forward, *args, **kwargs)
        return forward(*args, **kwargs)


def large_calls(session: Session, technique: str, choice: ChosenOption) -> LargeCalls:
    """Those of `choice`, which are all of them if it does not say; on the virtual GPU their sizes are noted in the session's `CallSizes`."""
    sizes = None if session.check_steps else session.shared.setdefault(CallSizes, CallSizes())
    return LargeCalls(choice.settings.get(SETTING, ()), key_of(technique, choice), sizes)
