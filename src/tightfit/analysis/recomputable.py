"""Which modules are worth recomputing, found from the tape alone, and what that saves and costs: for all techniques that recompute.

Candidates are modules that have submodules and save something for backward; the model itself too where it is called several times before a
backward pass, as a policy is in a rollout. Modules with the same operators and the same bytes form an equivalence class, by which a planner
counts them instead of naming them.
"""

import dataclasses
import hashlib
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from tightfit.analysis.lifetimes import StorageLifetimes
from tightfit.analysis.modules import ModuleCall, ModuleCalls
from tightfit.cost.host_python import HostWork
from tightfit.planner.option import Change, Option
from tightfit.planner.sides import Sides
from tightfit.tape import Column

if TYPE_CHECKING:
    from tightfit.analysis.profile import Profile

# A candidate that saves less than this share of what is saved for backward only adds noise to a plan.
SMALLEST_SHARE = 0.002
# But for blocks that are so many that each is as small: what all of one equivalence class save together.
_SMALLEST_SHARE_OF_ALIKE = 0.05

BATCH_NORMS = ("aten.native_batch_norm", "aten._batch_norm", "aten.cudnn_batch_norm", "aten.miopen_batch_norm")
KERNELS_PER_BATCH_NORM = 7
"""Its two statistics and its counter are copied and put back around a second run."""
# A storage is saved by several operators, and as several views; a frozen weight meets no gradient. Of blocks of nine models, 1.0 to 1.5 of each were saved.
_TENSORS_PER_STORAGE = 1.15


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecomputableBlock:
    """A module that could be recomputed, with all its calls; `equivalence_class` is equal for those that differ only in their position.

    `num_saved_weights`: see `ModuleCalls.saved_weights`.
    """

    path: str
    equivalence_class: str
    calls: tuple[ModuleCall, ...]
    slots: frozenset[str]
    num_saved_weights: int


def blocks(module_calls: ModuleCalls) -> list[RecomputableBlock]:
    """The candidates of a run, outermost first."""
    total = module_calls.lifetimes.bytes_of(np.flatnonzero(module_calls.saved_for_backward)) / max(
        1, module_calls.num_rounds
    )
    found: list[RecomputableBlock] = []
    # By equivalence class: small ones that are inside of none of those found, such as the blocks of a model of a thousand.
    small: dict[str, list[RecomputableBlock]] = {}
    inside_of_found: set[str] = set()
    for path in module_calls.paths:
        inside = module_calls.modules_inside(path)
        is_root = "." not in path
        # A leaf module mostly saves its own input, which recomputing it would have to retain.
        if inside == [path] or (not is_root and _is_list(path, inside)) or not module_calls.is_called(path):
            continue
        calls = module_calls.calls(path)
        # Called once per round, the model recomputed as a whole saves nothing at the peak: all of it is back at once in backward.
        if is_root and len(calls) <= module_calls.num_rounds:
            continue
        num_bytes = module_calls.lifetimes.bytes_of(calls[-1].saved) if calls else 0
        is_large = num_bytes >= SMALLEST_SHARE * total
        if not num_bytes or not (is_large or inside_of_found.isdisjoint(inside)):
            continue
        block = _block(module_calls, path, inside, calls)
        if is_large:
            found.append(block)
        else:
            small.setdefault(block.equivalence_class, []).append(block)
        inside_of_found.update(inside)
    for alike in small.values():
        if (
            sum(module_calls.lifetimes.bytes_of(each.calls[-1].saved) for each in alike)
            >= _SMALLEST_SHARE_OF_ALIKE * total
        ):
            found += alike
    return found


def _block(module_calls: ModuleCalls, path: str, inside: list[str], calls: tuple[ModuleCall, ...]) -> RecomputableBlock:
    return RecomputableBlock(
        path=path,
        equivalence_class=_likeness(module_calls, path, calls[-1]),
        calls=calls,
        slots=frozenset(f"activations@{module}" for module in inside),
        num_saved_weights=module_calls.saved_weights[path],
    )


def recompute_option(
    technique: str, profile: "Profile", block: RecomputableBlock, kept: Callable[[ModuleCall], Column] | None = None
) -> Option:
    """The option of recomputing `block`, except for the saved storages that `kept` marks.

    Its sides are the card's second run, and the host's that issues it, with the Python of the wrapper.

    The storages that a call saves for backward are freed from the end of its forward (those in autocast's cache: from where that is emptied) to the beginning
    of its backward pass, where all of them are allocated again. The input is retained until then if the plain run frees it earlier.
    """
    module_calls, seconds = profile.modules, profile.costs.seconds
    changes, added, num_issued = [], 0.0, 0
    for call in block.calls:
        stays = np.zeros(len(call.saved), dtype=bool) if kept is None else kept(call)
        gone = call.saved[~stays]
        changes += freed_between(module_calls.lifetimes, gone, call.end_event, call.back_event)
        changes += input_kept(module_calls, call)
        again = np.ones(call.end - call.begin, dtype=bool)
        if len(gone):
            # The second run ends when it has made the last thing that is missing.
            again[int(module_calls.tape.storages.operator[gone].max()) + 1 - call.begin :] = False
        # Selective checkpointing serves the kept results from its cache instead of computing them again.
        if kept is not None:
            again[module_calls.tape.storages.operator[call.saved[stays]] - call.begin] = False
        num_restoring = KERNELS_PER_BATCH_NORM * int(profile.costs.is_batch_norm[call.begin : call.end].sum())
        added += (
            float(seconds[call.begin : call.end][again].sum()) + num_restoring * profile.costs.efficiency.launch_seconds
        )
        num_issued += int(profile.costs.is_kernel[call.begin : call.end][again].sum()) + num_restoring
    in_python = seconds_in_python(block, keeps_some=kept is not None)
    sides = Sides(
        on_card=added / profile.num_steps,
        on_host=(num_issued * profile.costs.efficiency.issue_seconds + in_python) / profile.num_steps,
    )
    return Option(
        technique=technique,
        where=block.path,
        equivalence_class=f"{technique}:{block.equivalence_class}",
        changes=tuple(changes),
        seconds=profile.step.added(sides),
        sides=sides,
        in_backward=sides,
        exact=True,
        slots=block.slots,
    )


def seconds_in_python(block: RecomputableBlock, *, keeps_some: bool = False) -> float:
    """The processor's time of the wrapper around `block` in all of its calls; it `keeps_some` of the results."""
    of_tensor = HostWork.RECOMPUTED_TENSOR.value + keeps_some * HostWork.SELECTED_TENSOR.value
    num_tensors = _TENSORS_PER_STORAGE * sum(len(call.saved) + block.num_saved_weights for call in block.calls)
    return len(block.calls) * HostWork.RECOMPUTED_CALL.value + num_tensors * of_tensor


def freed_between(lifetimes: StorageLifetimes, storages: Column, begin: int, end: int) -> list[Change]:
    """Storages that nothing but the graph and autocast's cache holds are free between two events; copies of weights from where the cache lets go of them."""
    begins = np.maximum(begin, lifetimes.cached_until[storages])
    return [
        Change(begin=at, end=end, num_bytes=-lifetimes.bytes_of(storages[begins == at]))
        for at in np.unique(begins[begins < end]).tolist()
    ]


def input_kept(module_calls: ModuleCalls, call: ModuleCall) -> list[Change]:
    """The cost of retaining the input of a module call until its backward pass; none where the plain run retains it anyway."""
    freed_at = int(module_calls.lifetimes.freed_at[call.input]) if call.input >= 0 else call.back_event
    if freed_at >= call.back_event:
        return []
    return [
        Change(begin=freed_at, end=call.back_end_event, num_bytes=int(module_calls.lifetimes.block_bytes[call.input]))
    ]


def _is_list(path: str, inside: list[str]) -> bool:
    """Whether `path` looks like a ModuleList, which is never called: no operator of its own, and numbered children."""
    depth = path.count(".") + 1
    return path not in inside and all(module.split(".")[depth].isdigit() for module in inside)


def _likeness(module_calls: ModuleCalls, path: str, call: ModuleCall) -> str:
    tape = module_calls.tape
    content = (
        module_calls.operator_names(call.begin, call.end),
        tape.operators.flops[call.begin : call.end].tolist(),
        module_calls.lifetimes.block_bytes[call.saved].tolist(),
    )
    # Numbers in the path are left out, as layers.0 and layers.7 differ in nothing else; the hash of operators, FLOPs and bytes
    # keeps apart layers of one list that differ (every n-th one a mixture of experts, say).
    return re.sub(r"\d+", "*", path) + "#" + hashlib.sha1(repr(content).encode()).hexdigest()[:8]
