"""Puts `selective_checkpointing` on live objects: see `tightfit.techniques.recomputation.selective_checkpointing` for what it is and where it comes from."""

import copy
import functools
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.techniques.recomputation.recompute import Recomputed
from tightfit.techniques.session import Session
from tightfit.techniques.technique import ChosenOption, check_each
from tightfit.torch_hooks.backward import keeps_graph
from tightfit.torch_hooks.manifest import KEPT_RESULT, MADE_AGAIN

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
        session.wrap_forward(module, around)


def keeping_contexts(keep: frozenset[int]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and its second run: each counts its products, and those whose number is in `keep` are saved."""
    counts: Counter[bool] = Counter()

    def policy(context: SelectiveCheckpointContext, operator: torch._ops.OpOverload, *_: Any, **__: Any) -> Any:
        if operator_class(str(operator)) not in TENSOR_CORE_CLASSES:
            return CheckpointPolicy.PREFER_RECOMPUTE
        # Counted apart for each run: a result is identified by its number, which is the same in both.
        number = counts[context.is_recompute]
        counts[context.is_recompute] += 1
        if torch.is_inference_mode_enabled():
            # torch records the versions of tensors that it saves, and inference tensors have none.
            return CheckpointPolicy.PREFER_RECOMPUTE
        # Keeping every product saved 9 % less than keeping those that the plain run keeps (docs/log.md, "The
        # planner, made exact and quick").
        return CheckpointPolicy.MUST_SAVE if number in keep else CheckpointPolicy.PREFER_RECOMPUTE

    first, later = create_selective_checkpoint_contexts(policy)
    # torch 2.14 asks whether what is kept goes to the hooks for saved tensors around it, as it will by default one day. As ever it does not: those of the
    # first run are ours. Older ones do not look.
    setattr(first, "respect_saved_tensors_hooks", False)  # noqa: B010 - no attribute of it that a type checker knows
    return first if torch.compiler.is_compiling() else First(first), _Later(later, counts)


class First:
    """Wraps torch's own `mode` for the first run, which has what was kept in its `storage`."""

    def __init__(self, mode: Any) -> None:
        self._mode = mode
        self.storage = mode.storage

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        found = self._mode.__exit__(*error)
        # Now, and not only before the second run: each holds the memory of a result that another one takes the place of.
        _drop_written(self.storage)
        return found


def _drop_written(storage: dict[Any, Any]) -> None:
    """Has results that were kept and written to in place since (a convolution's, by an activation) made again by the second run, which writes to them as the first one did."""
    for results in storage.values():
        # A list up to torch 2.10, where a result that is missing ends the second run.
        for number, kept in results.items() if isinstance(results, dict) else ():
            if any(is_written(leaf) for leaf in tree_leaves(kept)):
                results[number] = MADE_AGAIN.value()


def is_written(kept: Any) -> bool:
    """Whether a result that is kept has another version than when it was."""
    if not isinstance(kept, KEPT_RESULT.value()) or not isinstance(kept.val, torch.Tensor):
        return False
    return kept.val._version != kept.version


class _Later:
    """Wraps torch's own `mode` for a second run, which consumes the saved results; if the graph is retained, they are restored for a third run."""

    def __init__(self, mode: Any, counts: Counter[bool]) -> None:
        self._mode = mode
        self._counts = counts
        self._before: dict[Any, Any] | None = None

    def __enter__(self) -> None:
        self._counts[True] = 0
        _drop_written(self._mode.storage)
        self._before = {key: copy.copy(kept) for key, kept in self._mode.storage.items()} if keeps_graph() else None
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._mode.__exit__(*error)
        finally:
            if self._before is not None:
                self._mode.storage.update(self._before)
                self._before = None
