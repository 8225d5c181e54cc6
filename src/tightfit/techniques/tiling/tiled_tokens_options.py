"""The saving and cost of running token-wise modules in tiles, from the tape of the plain run.

A module is offered twice: alone, where its activations are not saved for backward either, and inside of a recomputed module, where only the
temporaries of its own passes are counted. `tile_costs` computes the numbers.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from tightfit.analysis.modules import Anatomy, Visit
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import input_kept
from tightfit.analysis.sequences import waiting_bytes
from tightfit.cost.classes import operator_class
from tightfit.planner.option import Option
from tightfit.techniques.random_operators import draws
from tightfit.techniques.tiling.tile_costs import Inside, TileAccount, inside_of

SMALLEST_SHARE = 0.01
"""Of all that waits for a backward pass: what a module must hold on the way to be offered."""

NUMBERS_OF_TILES = (4, 16, 64)
_LEAST_TILE_BYTES = 4 << 20  # less does not fill a card
_MORE_THAN_OUTPUT = 1.5  # what a module holds on the way, next to its output
_WAITING = 0.5  # what of it waits for the backward pass, next to its output: a norm keeps next to nothing
_DEEP = 3.0  # the same, to be worth tiles inside a module that is recomputed anyway
_PRODUCTS = frozenset({"mm", "addmm", "_addmm_activation"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_CLASSES = frozenset({"elementwise", "copy", "reduction"})


def tiled_tokens_options(technique: str, profile: Profile) -> Iterator[Option]:
    """The options of all modules of a run."""
    tape, anatomy = profile.tape, profile.modules
    is_token_wise = np.array([keeps_tokens_apart(name) for name in tape.strings], dtype=bool)
    least = SMALLEST_SHARE * waiting_bytes(anatomy)
    for path in anatomy.paths:
        visits = anatomy.visits(path) if "." in path else ()
        if not visits or not all(is_token_wise[tape.operators.name[v.begin : v.end]].all() for v in visits):
            continue
        found = [inside_of(profile, v, around) for v, around in zip(visits, _around(anatomy, visits), strict=True)]
        largest = max(found, key=lambda one: one.backward_bytes)
        if largest.backward_bytes < max(least, _MORE_THAN_OUTPUT * largest.output_bytes):
            continue
        if anatomy.bytes_of(largest.visit.waiting) < _WAITING * largest.output_bytes:
            continue
        modules = anatomy.modules_inside(path)
        for num_tiles in NUMBERS_OF_TILES:
            if num_tiles > NUMBERS_OF_TILES[0] and largest.backward_bytes < num_tiles * _LEAST_TILE_BYTES:
                continue
            account = TileAccount(num_tiles=num_tiles, profile=profile)
            is_deep = largest.backward_bytes >= _DEEP * largest.output_bytes
            for recomputed in (False, True) if is_deep else (False,):
                slots = {f"tiles@{m}" for m in modules} | (
                    {f"activations@{m}" for m in modules} if not recomputed else set()
                )
                settings = {"num_tiles": num_tiles, **({"recomputed": True} if recomputed else {})}
                yield Option(
                    technique=technique,
                    where=path,
                    alike=f"{technique}:{_alike(anatomy, largest)}:{sorted(settings.items())}",
                    settings=settings,
                    changes=(
                        *(change for one in found for change in account.changes(one, is_alone=not recomputed)),
                        *(change for one in found if not recomputed for change in input_kept(anatomy, one.visit)),
                    ),
                    seconds=sum(account.added_seconds(one) for one in found) / profile.num_steps,
                    exact=True,
                    slots=frozenset(slots),
                )


def keeps_tokens_apart(name: str) -> bool:
    """Whether an operator can belong to a token-wise module, judged by its name."""
    base = name.split(".")[1] if name.startswith("aten.") else name
    if base in _PRODUCTS or base in _NORMS:
        return True
    return operator_class(name) in _CLASSES and not draws(name)


def _around(anatomy: Anatomy, visits: Sequence[Visit]) -> Iterator[Visit | None]:
    """For each module call, that of the enclosing module; None if it is in a list or directly in the model."""
    parent, _, last = visits[0].path.rpartition(".")
    candidates = anatomy.visits(parent) if "." in parent and not last.isdigit() else ()
    for visit in visits:
        yield next((c for c in candidates if c.begin <= visit.begin and visit.end <= c.end), None)


def _alike(anatomy: Anatomy, one: Inside) -> str:
    """A key that is equal for modules with equal operators and sizes."""
    names = hashlib.sha1(repr(anatomy.operator_names(one.visit.begin, one.visit.end)).encode()).hexdigest()[:8]
    sizes = anatomy.block_bytes[one.storages].sum()
    return f"{re.sub(r'[0-9]+', '*', one.visit.path)}#{names}:{sizes}"
