"""Puts `selective_checkpointing` on live objects: see `tightfit.techniques.recomputation.selective_checkpointing` for what it is and where it comes from."""

import functools
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.techniques.recomputation.kept_results import GivesResults, KeepsResults
from tightfit.techniques.recomputation.large_calls import large_calls
from tightfit.techniques.recomputation.recompute import Recomputed
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, check_each

_NAME = "selective_checkpointing"


def apply_selective_checkpointing(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps the forward of each block."""
    modules = check_each(chosen, lambda c: (session.module(c.where), frozenset(c.settings["keep"])))
    for choice, (module, keep) in zip(chosen, modules, strict=True):
        contexts = functools.partial(keeping_contexts, keep)
        around = Recomputed(
            module,
            where=choice.where,
            technique=_NAME,
            verdict=session.verdict,
            check_steps=session.check_steps,
            contexts=contexts,
        )
        session.wrap_forward(module, large_calls(session, _NAME, choice).only(around))


def keeping_contexts(keep: frozenset[int]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and its second run: each counts its products, and those whose number is in `keep` are saved."""
    if torch.compiler.is_compiling():
        # The compiler reads which results are kept from torch's own contexts.
        return create_selective_checkpoint_contexts(_Numbered(keep).policy)
    first = KeepsResults(keep)
    return first, GivesResults(first)


class _Numbered:
    """Which products of a block that is compiled are kept."""

    def __init__(self, keep: frozenset[int]) -> None:
        self._keep = keep
        # Counted apart for each run: a result is identified by its number, which is the same in both.
        self._counts: Counter[bool] = Counter()

    def policy(self, context: SelectiveCheckpointContext, operator: torch._ops.OpOverload, *_: Any, **__: Any) -> Any:
        """torch's question about each operator: whether its result is kept."""
        if operator_class(str(operator)) not in TENSOR_CORE_CLASSES:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = self._counts[context.is_recompute]
        self._counts[context.is_recompute] += 1
        return CheckpointPolicy.MUST_SAVE if number in self._keep else CheckpointPolicy.PREFER_RECOMPUTE
