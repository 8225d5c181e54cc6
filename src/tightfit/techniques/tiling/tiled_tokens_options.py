"""The saving and cost of running token-wise modules in tiles, from the tape of the plain run.

A module is offered twice: alone, where its activations are not saved for backward either, and inside of a recomputed module, where only the
temporaries of its own passes are counted. `tile_costs` computes the numbers.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence

import numpy as np

from tightfit.analysis.modules import ModuleCall, ModuleCalls, paths_below
from tightfit.analysis.profile import Profile
from tightfit.analysis.recomputable import input_kept
from tightfit.analysis.sequences import saved_bytes
from tightfit.cost.classes import operator_class
from tightfit.planner.option import Option
from tightfit.techniques.tiling.tile_costs import Inside, TileAccount, inside_of

SMALLEST_SHARE = 0.01
"""Of all that waits for a backward pass: what a module must hold on the way to be offered."""

NUMBERS_OF_TILES = (4, 16, 64)
_MIN_TILE_BYTES = 4 << 20  # less does not fill a card
_MORE_THAN_OUTPUT = 1.5  # what a module holds on the way, next to its output
_WAITING = 0.5  # what of it waits for the backward pass, next to its output: a norm keeps next to nothing
_DEEP = 3.0  # the same, to be worth tiles inside a module that is recomputed anyway
_PRODUCTS = frozenset({"mm", "addmm", "_addmm_activation"})
_NORMS = frozenset({"native_layer_norm", "_fused_rms_norm"})
_CLASSES = frozenset({"elementwise", "copy", "reduction"})


def tiled_tokens_options(technique: str, profile: Profile) -> Iterator[Option]:
    """The options of all modules of a run."""
    tape, module_calls = profile.tape, profile.modules
    is_token_wise = np.array(
        [keeps_tokens_apart(name) and name not in tape.random_operators for name in tape.strings], dtype=bool
    )
    least = SMALLEST_SHARE * saved_bytes(module_calls)
    for path in module_calls.paths:
        calls = module_calls.calls(path) if "." in path and module_calls.is_called(path) else ()
        if not calls or not all(is_token_wise[tape.operators.name[v.begin : v.end]].all() for v in calls):
            continue
        # Most modules are too small, which all that they allocate shows faster than what of it is there at once.
        if max(_allocated_bytes(module_calls, v) for v in calls) < least:
            continue
        found = [inside_of(profile, v, around) for v, around in zip(calls, _around(module_calls, calls), strict=True)]
        largest = max(found, key=lambda one: one.backward_bytes)
        if largest.backward_bytes < max(least, _MORE_THAN_OUTPUT * largest.output_bytes):
            continue
        if module_calls.lifetimes.bytes_of(largest.call.saved) < _WAITING * largest.output_bytes:
            continue
        modules = module_calls.modules_inside(path)
        for num_tiles in NUMBERS_OF_TILES:
            if num_tiles > NUMBERS_OF_TILES[0] and largest.backward_bytes < num_tiles * _MIN_TILE_BYTES:
                continue
            account = TileAccount(num_tiles=num_tiles, profile=profile)
            is_deep = largest.backward_bytes >= _DEEP * largest.output_bytes
            for recomputed in (False, True) if is_deep else (False,):
                # A forward in tiles is not run in segments besides, and blocks inside do not bring their weights for parts of it.
                slots = {f"tiles@{m}" for m in modules} | {f"brings@{m}" for m in paths_below(path, modules)}
                slots |= {f"segments@{m}" for m in modules if m.rpartition(".")[0] == path}
                if not recomputed:
                    slots |= {f"activations@{m}" for m in modules}
                settings = {"num_tiles": num_tiles, **({"recomputed": True} if recomputed else {})}
                sides = account.added_sides(found)
                yield Option(
                    technique=technique,
                    where=path,
                    equivalence_class=f"{technique}:{_equivalence_class(module_calls, largest)}:{sorted(settings.items())}",
                    settings=settings,
                    changes=(
                        *(change for one in found for change in account.changes(one, is_alone=not recomputed)),
                        *(change for one in found if not recomputed for change in input_kept(module_calls, one.call)),
                    ),
                    seconds=profile.step.added(sides),
                    sides=sides,
                    exact=True,
                    slots=frozenset(slots),
                )


def _allocated_bytes(module_calls: ModuleCalls, call: ModuleCall) -> int:
    """The bytes of all storages that a call allocates in its forward and its backward pass."""
    passes = (call.begin, call.end), (call.back_begin, call.back_end)
    return sum(module_calls.lifetimes.bytes_of(module_calls.lifetimes.made_in(begin, end)) for begin, end in passes)


def keeps_tokens_apart(name: str) -> bool:
    """Whether an operator can belong to a token-wise module, judged by its name; one that draws random numbers cannot, whatever its name."""
    base = name.split(".")[1] if name.startswith("aten.") else name
    if base in _PRODUCTS or base in _NORMS:
        return True
    return operator_class(name) in _CLASSES


def _around(module_calls: ModuleCalls, calls: Sequence[ModuleCall]) -> Iterator[ModuleCall | None]:
    """For each module call, that of the enclosing module; None if it is in a list or directly in the model."""
    parent, _, last = calls[0].path.rpartition(".")
    candidates = module_calls.calls(parent) if "." in parent and not last.isdigit() else ()
    for call in calls:
        yield next((c for c in candidates if c.begin <= call.begin and call.end <= c.end), None)


def _equivalence_class(module_calls: ModuleCalls, one: Inside) -> str:
    """A key that is equal for modules with equal operators and sizes."""
    names = hashlib.sha1(repr(module_calls.operator_names(one.call.begin, one.call.end)).encode()).hexdigest()[:8]
    sizes = module_calls.lifetimes.block_bytes[one.storages].sum()
    return f"{re.sub(r'[0-9]+', '*', one.call.path)}#{names}:{sizes}"
