"""Selective checkpointing: a block saves the results of its matrix products and attention, and recomputes the cheap rest.

Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv:2205.05198), section 5, with the choice made
per operator: those with more than a few operations per byte are saved.
"""

import copy
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, final

import numpy as np
import torch
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, create_selective_checkpoint_contexts

from tightfit.analysis.modules import ModuleCall
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import recompute_option
from tightfit.cost.classes import operator_class
from tightfit.planner.option import Option
from tightfit.tape import Column
from tightfit.techniques.recomputation.recompute import Recomputed
from tightfit.techniques.session import Session
from tightfit.techniques.technique import AbstractTechnique, Choice, Needs, check_each
from tightfit.torch_hooks.backward import keeps_graph

_PRODUCTS = frozenset({"matmul", "attention", "convolution"})


@final
class SelectiveCheckpointing(AbstractTechnique):
    """Trades the cheap part of a second forward pass for the cheap part of what a block saves for backward."""

    name = "selective_checkpointing"
    exact = True
    needs = Needs.REPEATABLE
    exactness = "bit for bit, random state and autocast included; up to the order of a reduction where a decoder would fill a key-value cache"

    def options(self, profile: Profile) -> Iterable[Option]:
        """One for each block, if saving some differs from saving all or none.

        Of the products, those are saved whose results the plain run saves; they are identified by their number in the block's forward.
        """
        is_product = np.array([operator_class(name) in _PRODUCTS for name in profile.tape.strings], dtype=bool)

        def kept(call: ModuleCall) -> Column:
            return is_product[profile.tape.operators.name[profile.tape.storages.operator[call.saved]]]

        for block in profile.blocks:
            call = block.calls[-1]
            stays = kept(call)
            if stays.any() and not stays.all():
                products = call.begin + np.flatnonzero(is_product[profile.tape.operators.name[call.begin : call.end]])
                keeping = np.flatnonzero(np.isin(products, profile.tape.storages.operator[call.saved[stays]]))
                option = recompute_option(self.name, profile, block, kept)
                outputs = _names(profile, block.path, products[keeping])
                yield dataclasses.replace(option, settings={"keep": keeping.tolist(), "outputs": outputs})

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Wraps the forward of each block."""
        modules = check_each(chosen, lambda c: (session.module(c.where), frozenset(c.settings["keep"])))
        for choice, (module, keep) in zip(chosen, modules, strict=True):
            contexts = functools.partial(_contexts, keep)
            around = Recomputed(
                module,
                where=choice.where,
                technique=self.name,
                verdict=session.verdict,
                check_steps=session.check_steps,
                contexts=contexts,
            )
            session.wrap_forward(module, around)


def _names(profile: Profile, block: str, operators: Column) -> list[str]:
    """What a person calls the results of `operators` of `block`: the submodule (`mlp.c_fc`), `attention`, or the operator of the block itself."""
    texts, columns = profile.tape.strings, profile.tape.operators
    names = []
    for operator, module in zip(columns.name[operators].tolist(), columns.module[operators].tolist(), strict=True):
        path, kind = texts[module].removeprefix(block).lstrip("."), operator_class(texts[operator])
        # A module that computes attention has products of its own, in submodules; its name would say too little.
        own = f"attention ({path})" if path else "attention"
        names.append(own if kind == "attention" else path or texts[operator].removeprefix("aten."))
    return list(dict.fromkeys(names))


def _contexts(keep: frozenset[int]) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    """The contexts of a forward and its second run: each counts its products, and those whose number is in `keep` are saved."""
    counts: Counter[bool] = Counter()

    def policy(context: SelectiveCheckpointContext, operator: torch._ops.OpOverload, *_: Any, **__: Any) -> Any:
        if operator_class(str(operator)) not in _PRODUCTS:
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
    return first, _Later(later, counts)


class _Later:
    """Wraps torch's own `mode` for a second run, which consumes the saved results; if the graph is retained, they are restored for a third run."""

    def __init__(self, mode: Any, counts: Counter[bool]) -> None:
        self._mode = mode
        self._counts = counts
        self._before: dict[Any, Any] | None = None

    def __enter__(self) -> None:
        self._counts[True] = 0
        self._before = {key: copy.copy(kept) for key, kept in self._mode.storage.items()} if keeps_graph() else None
        self._mode.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return self._mode.__exit__(*error)
        finally:
            if self._before is not None:
                self._mode.storage.update(self._before)
                self._before = None
