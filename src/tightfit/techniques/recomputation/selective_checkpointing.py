"""Selective checkpointing: a block saves the results of its matrix products and attention, and recomputes the cheap rest.

Korthikanti et al., "Reducing activation recomputation in large transformer models" (arXiv:2205.05198), section 5, with the choice made
per operator: those with more than a few operations per byte are saved.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

import numpy as np

from tightfit.analysis.modules import ModuleCall
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import recompute_option
from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.planner.option import Option
from tightfit.tape import Column
from tightfit.techniques.technique import AbstractTechnique, Choice, Needs

if TYPE_CHECKING:
    from tightfit.techniques.session import Session


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
        is_product = np.array(
            [operator_class(name) in TENSOR_CORE_CLASSES for name in profile.tape.strings], dtype=bool
        )

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

    def apply(self, session: "Session", chosen: Sequence[Choice]) -> None:
        """Wraps the forward of each block."""
        from tightfit.techniques.recomputation.apply_selective_checkpointing import apply_selective_checkpointing

        apply_selective_checkpointing(session, chosen)


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
