"""Which results of a block are worth keeping when it is recomputed: those of its matrix products and attention, by their number in its forward."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from tightfit.analysis.modules import ModuleCall
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import RecomputableBlock
from tightfit.analysis.sequences import writes_in_place
from tightfit.cost.classes import TENSOR_CORE_CLASSES, operator_class
from tightfit.tape import Column


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KeptProducts:
    """`is_kept` marks those of the storages that a call saves; `settings` name them, by number and in words."""

    is_kept: Callable[[ModuleCall], Column]
    settings: dict[str, Any]


def kept_products(profile: Profile, block: RecomputableBlock) -> KeptProducts | None:
    """The products of `block` whose results the plain run saves; None where that is nothing of what it saves, or everything.

    Not those that the next operator writes to in place, an activation say, maybe after autograd has copied what it was given: what is saved there is
    another result.
    """
    names, written = profile.tape.operators.name, profile.tape.operators.bytes_written
    is_product = np.array([operator_class(name) in TENSOR_CORE_CLASSES for name in profile.tape.strings], dtype=bool)
    is_copy = np.array([name == "aten.clone" for name in profile.tape.strings], dtype=bool)
    is_in_place = np.array([writes_in_place(name) for name in profile.tape.strings], dtype=bool)

    def is_kept(call: ModuleCall) -> Column:
        operators = profile.tape.storages.operator[call.saved]
        following, behind = (np.minimum(operators + number, len(names) - 1) for number in (1, 2))
        writer = np.where(is_copy[names[following]], behind, following)
        # A counter of batches is written to as well.
        is_written = is_in_place[names[writer]] & (written[writer] >= written[operators])
        return is_product[names[operators]] & ~is_written

    call = block.calls[-1]
    stays = is_kept(call)
    if not stays.any() or stays.all():
        return None
    products = call.begin + np.flatnonzero(is_product[profile.tape.operators.name[call.begin : call.end]])
    keeping = np.flatnonzero(np.isin(products, profile.tape.storages.operator[call.saved[stays]]))
    outputs = _names(profile, block.path, products[keeping])
    return KeptProducts(is_kept=is_kept, settings={"keep": keeping.tolist(), "outputs": outputs})


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
