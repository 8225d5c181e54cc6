"""What an attack's program trains on: it hands over its model and optimizers, notes what it sees, and says where a step ends.

The same program runs plain and with a technique; all that it noted, and the state after each of its steps, is compared afterwards.
"""

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from tightfit.errors import ApplyError, TightfitError
from tightfit.runtime.apply import apply_choices
from tightfit.techniques.session import Session

from tests.attacks.dressed import dress  # isort: skip
from tests.attacks.places import Variant  # isort: skip

Values = dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """The state between two steps: `weights` and `buffers` by name, plain `attributes` of all modules, `random` states of all generators."""

    weights: Values
    buffers: Values
    attributes: Values
    random: Values


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """An error of tightfit's that reached the program, with the state that it found, after `num_steps` steps."""

    error: TightfitError
    num_steps: int
    snapshot: Snapshot


class Trial:
    """One run of a program, plain where `variant` is None; with `dresses` as in `Variant`."""

    def __init__(self, variant: Variant | None, *, dresses: Sequence[str] = ()) -> None:
        self._variant = variant
        self._dresses = dresses
        self.models: list[nn.Module] = []
        self.applied: list[nn.Module] = []
        self.optimizers: list[torch.optim.Optimizer] = []
        self.sessions: list[Session] = []
        self.snapshots: list[Snapshot] = []
        self.notes: list[tuple[str, Any]] = []
        self.refusals: list[Refusal] = []
        self.num_choices = 0
        self.volatile: tuple[str, ...] = ()
        self.compares_models = True
        """Weights that are shards of a process are not compared; the program notes them whole."""

    def apply(self, model: nn.Module, *optimizers: torch.optim.Optimizer) -> Session | None:
        """Puts the technique on the model with its optimizers, where it has a place there; the session, None in a plain run."""
        dress(model, optimizers, self._dresses)
        self.track(model)
        self.applied.append(model)
        self.optimizers += optimizers
        if self._variant is None:
            return None
        choices = self._variant.find(model, optimizers)
        self.num_choices += len(choices)
        if not choices:
            return None
        session = apply_choices(choices, model, list(optimizers))
        self.sessions.append(session)
        return session

    def track(self, model: nn.Module) -> None:
        """Has the state of one more model compared: before the first technique is put on, where a refusal may come of it."""
        if self.compares_models and not any(model is each for each in self.models):
            self.models.append(model)
        if len(self.snapshots) < 2:
            self.snapshots[:] = [self.snapshot()]

    def writes_within_step(self, *endings: str) -> None:
        """Weights whose names end so are written by the program itself within a step: a refusal in its middle may find them written or not."""
        self.volatile += endings

    def note(self, name: str, value: Any) -> None:
        """Keeps a value that the program sees: a loss, a gradient, what a hook was called with."""
        self.notes.append((name, frozen(value)))

    def end_step(self) -> None:
        """Keeps the state after a step of the program, or after any other point at which weights may have changed."""
        self.snapshots.append(self.snapshot())

    def caught(self, error: BaseException) -> None:
        """An exception that the program swallows."""
        if isinstance(error, TightfitError):
            self.refused(error)
        else:
            self.note("swallowed", f"{type(error).__name__}: {error}")

    def refused(self, error: TightfitError) -> None:
        """An error of tightfit's reached the program."""
        self.refusals.append(Refusal(error=error, num_steps=len(self.snapshots) - 1, snapshot=self.snapshot()))

    def snapshot(self) -> Snapshot:
        """The state of everything now."""
        weights: Values = {}
        buffers: Values = {}
        attributes: Values = {}
        for number, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                weights[f"{number}.{name}"] = frozen(parameter)
            for name, buffer in model.named_buffers():
                buffers[f"{number}.{name}"] = frozen(buffer)
            for path, module in model.named_modules():
                for name, value in vars(module).items():
                    if not name.startswith("_") and _is_plain(value):
                        attributes[f"{number}.{path}.{name}"] = frozen(value)
        kind, keys, position, *rest = np.random.get_state()
        of_numpy = (kind, keys.tobytes(), position, *rest)
        drawn = {"torch": torch.get_rng_state(), "python": random.getstate(), "numpy": of_numpy}
        if torch.cuda.is_initialized():
            drawn["cuda"] = torch.cuda.get_rng_state()
        return Snapshot(weights=weights, buffers=buffers, attributes=attributes, random=drawn)


def frozen(value: Any) -> Any:
    """A copy of a value that later steps do not change."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, Mapping):
        return {str(key): frozen(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [frozen(each) for each in value]
    return value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(each) for each in value)
    if isinstance(value, dict):
        return all(_is_plain(each) for each in value.values())
    return isinstance(value, bool | int | float | str | torch.Tensor | torch.Generator | np.ndarray) or value is None


def refusal_of(errors: Sequence[BaseException]) -> ApplyError | None:
    """The first of these that is one of ours."""
    return next((error for error in errors if isinstance(error, ApplyError)), None)
