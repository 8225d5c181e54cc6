"""Runs an attack plain and with a technique on it, compares the two runs, and says how the pair ended."""

import dataclasses
import enum
import functools
import gc
import os
import random
import traceback
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.utils.checkpoint
from tests.attacks.compare import Closeness
from tests.attacks.places import VARIANTS, Variant
from tests.attacks.registry import Attack
from tests.attacks.trial import Refusal, Trial
from tests.process_state import forget_default_device
from torch import nn

from tightfit.errors import TightfitError

# What has nothing to do with what an attack of this kind does.
_RERUN = ("selective checkpointing", "nested checkpointing", "sequential checkpointing")
EXCLUDED = {
    "recomputation": ("optimizer kernel", "zero_grad", "8-bit states", "8-bit states in backward", "empty_cache"),
    "parts": (*_RERUN, "optimizer kernel", "zero_grad", "empty_cache", "8-bit states", "8-bit states in backward"),
    "gradients": (*_RERUN, "chunked loss, gradients in forward", "empty_cache"),
    "second order": ("optimizer kernel", "empty_cache"),
    "changes": ("optimizer kernel", "8-bit states in backward"),
    "exceptions": ("chunked loss, gradients in forward", "empty_cache"),
}
# Where programs make their tensors, as torch.set_default_device has it; empty: at the host.
DEVICE = os.environ.get("TIGHTFIT_ATTACKS_DEVICE", "")
# Owners of names in torch, and what the names stand for.
Names = dict[Any, dict[str, Any]]
INTERNAL = "InternalError"


class Outcome(enum.StrEnum):
    """How an attack with a technique on it ended."""

    RIGHT = "right"
    REFUSED = "refused"
    NO_PLACE = "no place"
    WRONG = "wrong"
    CRASHED = "crashed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """`reason` is the refusal's line, or what is wrong; empty where it is right."""

    outcome: Outcome
    reason: str = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    trial: Trial
    error: BaseException | None
    place: str = ""


def run(attack: Attack, variant_name: str) -> Verdict:
    """The verdict on `attack` with the technique `variant_name`, a key of `VARIANTS`, on it."""
    if variant_name in EXCLUDED.get(attack.kind, ()) or (attack.only and variant_name not in attack.only):
        return Verdict(outcome=Outcome.NO_PLACE)
    return tried(attack, VARIANTS[variant_name])


def tried(attack: Attack, variant: Variant) -> Verdict:
    """The verdict on `attack` with a technique, or with several, whatever its kind."""
    # Autocast leaves float64 as it is.
    dtype = torch.float32 if variant.is_lossy or "autocast" in variant.worn else torch.float64
    plain = _plain(attack, dtype, variant.worn)
    # A program that needs the gradients of what is frozen, or the layers that are gone.
    if plain is None:
        return Verdict(outcome=Outcome.NO_PLACE)
    torch_before = _torch_now()
    found = _run(attack, variant, dtype, dresses=variant.worn)
    try:
        if not found.trial.num_choices:
            return Verdict(outcome=Outcome.NO_PLACE)
        return _judged(variant, plain, found, torch_before)
    finally:
        _take_off(found.trial)
        _put_torch_back(torch_before)


# One attack is tried with all techniques before the next: what plain runs leave is not kept longer, for other tests look at all tensors there are.
@functools.lru_cache(maxsize=3)
def _plain(attack: Attack, dtype: torch.dtype, dresses: tuple[str, ...]) -> Trial | None:
    plain = _run(attack, None, dtype, dresses=dresses)
    if plain.error is not None and dresses:
        return None
    if plain.error is not None:
        raise plain.error
    assert plain.trial.num_choices == 0 and len(plain.trial.snapshots) > 1, f"{attack.name} ends no step"
    # Other tests of the process ask which models and optimizers there are.
    plain.trial.models.clear()
    plain.trial.applied.clear()
    plain.trial.optimizers.clear()
    return plain.trial


def runs_plainly(attack: Attack, dresses: tuple[str, ...]) -> bool:
    """Whether a program runs at all on a model that is dressed so."""
    return _plain(attack, torch.float32, dresses) is not None


def _run(attack: Attack, variant: Variant | None, dtype: torch.dtype, *, dresses: Sequence[str]) -> _Run:
    trial = Trial(variant, dresses=dresses)
    before, precision = torch.get_default_dtype(), torch.get_float32_matmul_precision()
    torch.set_default_dtype(dtype)
    torch.default_generator.manual_seed(0)  # torch.manual_seed also notes the stack for each kind of card: 4 ms
    if DEVICE:
        torch.manual_seed(0)
        torch.set_default_device(DEVICE)
    random.seed(0)
    np.random.seed(0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attack.program(trial)
    except TightfitError as error:
        trial.refused(error)
        traceback.clear_frames(error.__traceback__)
        return _Run(trial=trial, error=error)
    except Exception as error:  # noqa: BLE001 - whatever an attack ends with is the verdict
        place = traceback.extract_tb(error.__traceback__)[-1]
        # Up to torch 2.12 a checkpoint's hooks for saved tensors are in effect for as long as the frames are there that an error has left.
        traceback.clear_frames(error.__traceback__)
        return _Run(trial=trial, error=error, place=f"{place.filename.rpartition('/')[2]}:{place.lineno}")
    finally:
        torch.set_default_dtype(before)
        # What a program sets between its passes stays where a refusal comes between them.
        torch.set_float32_matmul_precision(precision)
        _leave_autocast()
        if DEVICE:
            forget_default_device()
    return _Run(trial=trial, error=None)


def _leave_autocast() -> None:
    """A program that enters autocast in one hook and leaves it in another is within it for good where a forward ends with an error between them: casts of
    weights would stay in the cache, for the programs after it too."""
    for _ in range(torch.autocast_increment_nesting()):
        torch.autocast_decrement_nesting()
    torch.clear_autocast_cache()
    torch.set_autocast_enabled("cpu", False)


def repeats(attack: Attack, variant_name: str) -> bool:
    """Whether plain runs of a program are the same to the bit; some kernels of a GPU add up in any order."""
    variant = VARIANTS[variant_name]
    dtype = torch.float32 if variant.is_lossy else torch.float64
    runs = [_run(attack, None, dtype, dresses=variant.worn) for _ in range(4)]
    bitwise = Closeness(is_bitwise=True, is_lossy=False)
    same = not any(_difference(bitwise, runs[0].trial, other.trial) for other in runs[1:])
    return same and not any(each.error for each in runs)


def _judged(variant: Variant, plain: Trial, found: _Run, torch_before: Names) -> Verdict:
    trial = found.trial
    # What a processor updates in place of the card is rounded as a processor rounds.
    is_bitwise = variant.is_bitwise and not (DEVICE and variant.technique == "trained_weight_streaming")
    closeness = Closeness(is_bitwise=is_bitwise, is_lossy=variant.is_lossy)
    if found.error is not None and not isinstance(found.error, TightfitError):
        text = " ".join(str(found.error).split())[:160]
        return Verdict(outcome=Outcome.CRASHED, reason=f"{type(found.error).__name__} at {found.place}: {text}")
    if trial.refusals:
        return _judged_refusal(closeness, plain, trial, torch_before)
    told = _difference(closeness, plain, trial)
    told = told or _take_off(trial) or _left_behind(trial, torch_before)
    return Verdict(outcome=Outcome.WRONG, reason=told) if told else Verdict(outcome=Outcome.RIGHT)


def _judged_refusal(closeness: Closeness, plain: Trial, trial: Trial, torch_before: Names) -> Verdict:
    first = trial.refusals[0]
    told = _trained_wrongly(closeness, plain, trial, first)
    told = told or _take_off(trial) or _left_behind(trial, torch_before)
    message = str(first.error)
    if type(first.error).__name__ == INTERNAL:
        return Verdict(outcome=Outcome.CRASHED, reason=message)
    if told:
        return Verdict(
            outcome=Outcome.WRONG, reason=f"refused after {first.num_steps} steps, but {told}: {message[:100]}"
        )
    if "\n" in message:
        return Verdict(outcome=Outcome.CRASHED, reason=f"a refusal of several lines: {message!r}")
    return Verdict(outcome=Outcome.REFUSED, reason=message)


def _trained_wrongly(closeness: Closeness, plain: Trial, trial: Trial, refusal: Refusal) -> str:
    """Whether weights had been updated wrongly when the refusal came, or were updated after it."""
    begin, number = plain.snapshots[0], refusal.num_steps
    # A refusal may come after an update that was right.
    right = plain.snapshots[max(0, number) : number + 2]
    differences = [closeness.weights_differ(begin, each, refusal.snapshot, trial.volatile) for each in right]
    if all(differences):
        return differences[0]
    after = [*(each.snapshot for each in trial.refusals[1:]), *trial.snapshots[number + 1 :]]
    if any(
        Closeness(is_bitwise=True, is_lossy=False).difference(refusal.snapshot.weights, each.weights, "w")
        for each in after
    ):
        return "the program trained on after it"
    if any(len(o.param_groups) == 0 or not all(g["params"] for g in o.param_groups) for o in trial.optimizers):
        return "the optimizer's groups are empty"
    return ""


def _difference(closeness: Closeness, plain: Trial, trial: Trial) -> str:
    if len(plain.snapshots) != len(trial.snapshots):
        return f"{len(trial.snapshots) - 1} steps ended instead of {len(plain.snapshots) - 1}"
    if [name for name, _ in plain.notes] != [name for name, _ in trial.notes]:
        return f"it saw {[name for name, _ in trial.notes][:12]} instead of {[name for name, _ in plain.notes][:12]}"
    for (name, expected), (_, seen) in zip(plain.notes, trial.notes, strict=True):
        if told := closeness.difference(expected, seen, name):
            return told
    for number, (expected, seen) in enumerate(zip(plain.snapshots, trial.snapshots, strict=True)):
        if told := closeness.difference_of_states(plain.snapshots[0], expected, seen):
            return f"after step {number}, {told}"
    return ""


def _take_off(trial: Trial) -> str:
    """Undoes the sessions that the program left, the last first; what failed in it, as words, or nothing.

    A session that has refused may refuse once more: gradients that it kept aside cannot be made any longer.
    """
    told = ""
    while trial.sessions:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                trial.sessions.pop().undo()
        except Exception as error:  # noqa: BLE001 - it is in the verdict
            if not (trial.refusals and isinstance(error, TightfitError)):
                told = told or f"undo raises {type(error).__name__}: {' '.join(str(error).split())}"
    gc.collect(0)
    return told


def _left_behind(trial: Trial, torch_before: Names) -> str:
    """What an undone session left on the models or in torch."""
    # A copy that the program made may keep its plan.
    for model in trial.applied:
        for path, module in model.named_modules():
            if type(vars(module).get("forward")).__name__ == "WrappedForward":
                return f"the forward of {path or 'the model'} is still wrapped after undo"
    for owner, names in torch_before.items():
        for name, value in names.items():
            if vars(owner).get(name) is not value:
                return f"{owner.__name__}.{name} is not torch's own after undo"
    return ""


_OWNERS = (
    torch.autograd,
    torch.autograd.graph,
    torch.nn.utils.clip_grad,
    torch.nn.utils,
    torch.optim.Optimizer,
    torch.optim.SGD,
    torch.optim.AdamW,
    torch.nn.functional,
    torch.utils.checkpoint,
    torch.Tensor,
    nn.Module,
)


def _torch_now() -> Names:
    """What the names of torch that a session might replace stand for."""
    return {owner: dict(vars(owner)) for owner in _OWNERS}


def _put_torch_back(before: Names) -> None:
    """What a session left in torch is in its own verdict, and not in the next one's."""
    for owner, names in before.items():
        for name, value in names.items():
            if vars(owner).get(name) is not value:
                setattr(owner, name, value)
