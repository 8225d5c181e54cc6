"""Puts `selective_checkpointing` on live objects: see `tightfit.techniques.recomputation.selective_checkpointing` for what it is and where it comes from."""

import copy
import functools
from collections import Counter, defaultdict
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, cast

import torch
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.effects.values.fingerprints import num_paused
from tightfit.techniques.recomputation.large_calls import large_calls
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
        session.wrap_forward(module, large_calls(session, _NAME, choice).only(around))


def keeping_contexts(keep: frozenset[int]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and its second run: each counts its products, and those whose number is in `keep` are saved."""
    kept = _KeptProducts(keep)
    first, later = create_selective_checkpoint_contexts(kept.policy)
    if not torch.compiler.is_compiling():
        for mode in (first, later):
            mode.__class__ = _without_checks(type(mode))
    kept.storage = cast(Any, first).storage
    # torch 2.14 asks whether what is kept goes to the hooks for saved tensors around it, as it will by default one day. As ever it does not: those of the
    # first run are ours. Older ones do not look.
    setattr(first, "respect_saved_tensors_hooks", False)  # noqa: B010 - no attribute of it that a type checker knows
    return first if torch.compiler.is_compiling() else First(first, kept), _Later(later, kept)


@functools.cache
def _without_checks(kind: Any) -> Any:
    """torch's mode, which numbers the operators that it sees, and does not see those of our checks: a technique within the block may check one of its runs and not the other."""

    class WithoutChecks(kind):
        # Of torch.cond and its kin: what they run is computed again as one.
        supports_higher_order_operators = True

        def __enter__(self) -> Any:
            self._num_paused = num_paused()
            return super().__enter__()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if num_paused() > self._num_paused or not isinstance(func, OpOverload):
                return func(*args, **(kwargs or {}))
            return super().__torch_dispatch__(func, types, args, kwargs)

    return WithoutChecks


class _KeptProducts:
    """Which products of a block are kept, in torch's `storage`: by operator, a result under each number of its calls; up to torch 2.12 a list of those kept alone."""

    def __init__(self, keep: frozenset[int]) -> None:
        self._keep = keep
        self.storage: dict[Any, Any] = {}
        # Counted apart for each run: a result is identified by its number, which is the same in both.
        self._counts: Counter[bool] = Counter()
        self._numbers: defaultdict[Any, list[int]] = defaultdict(list)
        # Those of lists that the second run makes again.
        self._missing: set[int] = set()
        # The operator whose result was the last one of all, if it is kept.
        self._last: Any = None
        # Results that the program has under another shape, with a version of its own.
        self._reshaped: list[Any] = []

    def policy(self, context: SelectiveCheckpointContext, operator: torch._ops.OpOverload, *_: Any, **__: Any) -> Any:
        """torch's question about each operator: whether its result is kept."""
        before, self._last = self._last, None
        if operator is torch.ops.aten._unsafe_view.default and before is not None and not context.is_recompute:
            results = self.storage[before]
            self._reshaped.append(list(results.values())[-1] if isinstance(results, dict) else results[-1])
            return CheckpointPolicy.MUST_SAVE
        if operator_class(str(operator)) not in TENSOR_CORE_CLASSES:
            return CheckpointPolicy.PREFER_RECOMPUTE
        number = self._counts[context.is_recompute]
        self._counts[context.is_recompute] += 1
        # torch records the versions of tensors that it saves, and inference tensors have none.
        if torch.is_inference_mode_enabled() or number not in self._keep or number in self._missing:
            return CheckpointPolicy.PREFER_RECOMPUTE
        if not context.is_recompute:
            self._last = operator
            self._numbers[operator].append(number)
        # Keeping every product saved 9 % less than keeping those that the plain run keeps (docs/log.md, "The
        # planner, made exact and quick").
        return CheckpointPolicy.MUST_SAVE

    def end_first_run(self) -> None:
        """What a product of several dimensions gives the program is another tensor (`_unsafe_view`), and writes to that are not counted by the one that is kept:
        it is kept as a view of the other.
        """
        if self._reshaped:
            views = self.storage.pop(torch.ops.aten._unsafe_view.default)
            if isinstance(views, dict):
                again = MADE_AGAIN.value()
                self.storage[torch.ops.aten._unsafe_view.default] = dict.fromkeys(views, again)
                views = [each for each in views.values() if each is not again]
            for product, view in zip(self._reshaped, views, strict=True):
                # Detached, it has the same version and does not hold the other one.
                product.val, product.version = view.val.view(product.val.shape).detach(), view.version
            self._reshaped.clear()
        self.drop_written()

    def begin_second_run(self) -> None:
        """Called before each."""
        self._counts[True] = 0
        self.drop_written()

    def drop_written(self) -> None:
        """Has results that were kept and written to in place since (a convolution's, by an activation) made again by the second run, which writes to them as the first one did."""
        for operator, results in self.storage.items():
            if isinstance(results, dict):
                for number, kept in results.items():
                    if _is_any_written(kept):
                        results[number] = MADE_AGAIN.value()
            elif numbers := self._numbers[operator]:
                # A second run takes them from the front.
                left = list(zip(numbers[len(numbers) - len(results) :], results, strict=True))
                written = {number for number, kept in left if _is_any_written(kept)}
                self._missing |= written
                numbers[:] = [number for number in numbers if number not in written]
                results[:] = [kept for number, kept in left if number not in written]


class First:
    """Wraps torch's own `mode` for the first run, which has what was `kept` in its `storage`."""

    def __init__(self, mode: Any, kept: _KeptProducts) -> None:
        self._mode = mode
        self._kept = kept
        self.storage = mode.storage

    def __enter__(self) -> None:
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        found = self._mode.__exit__(*error)
        # Now, and not only before the second run: each holds the memory of a result that another one takes the place of.
        if error[0] is None:
            self._kept.end_first_run()
        return found


def _is_any_written(kept: Any) -> bool:
    return any(is_written(leaf) for leaf in tree_leaves(kept))


@functools.cache
def _kind_of_kept() -> Any:
    """Torch's class of what is kept; it is asked for with each operator of a block."""
    return KEPT_RESULT.value()


def is_written(kept: Any) -> bool:
    """Whether a result that is kept has another version than when it was."""
    if not isinstance(kept, _kind_of_kept()) or not isinstance(kept.val, torch.Tensor):
        return False
    return kept.val._version != kept.version


class _Later:
    """Wraps torch's own `mode` for a second run, which consumes the saved results; if the graph is retained, they are restored for a third run."""

    def __init__(self, mode: Any, kept: _KeptProducts) -> None:
        self._mode = mode
        self._kept = kept
        self._before: dict[Any, Any] | None = None

    def __enter__(self) -> None:
        self._kept.begin_second_run()
        self._before = {key: copy.copy(kept) for key, kept in self._mode.storage.items()} if keeps_graph() else None
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._mode.__exit__(*error)
        finally:
            if self._before is not None:
                self._mode.storage.update(self._before)
                self._before = None
