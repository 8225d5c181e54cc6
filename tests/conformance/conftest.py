"""Tapes of the models on a virtual card, each traced once, and what the techniques offer on them."""

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from tests.conformance import large_models, models
from tests.conformance.large_models import LARGE
from tests.conformance.training import choice_of

from tightfit.analysis.profile import Profile
from tightfit.capture.targets.target_kinds import GeneratorFunction
from tightfit.capture.trace import Preparation, trace
from tightfit.devices.catalogue import find
from tightfit.planner.option import Option
from tightfit.tape import Tape
from tightfit.techniques.registry import technique, techniques

CARD = "RTX 4090"

# The tensors are small: more threads than one cost more than they bring.
torch.set_num_threads(1)


class Tapes:
    """Tapes by model and options."""

    def __init__(self) -> None:
        self._tapes: dict[tuple[str, frozenset[str]], Tape] = {}
        self._offers: dict[tuple[str, str], list[Option]] = {}

    def of(self, model: str, options: Sequence[Option] = ()) -> Tape:
        """The tape of two or three steps of `model`, one of `models.py` or of `large_models.py`, with `options` on it."""
        key = (model, frozenset(option.key for option in options))
        if key not in self._tapes:
            self._tapes[key] = trace(
                _target(model),
                label=model,
                device=CARD,
                num_steps=LARGE.get(model, 2),
                preparation=Preparation(
                    function="tightfit.runtime.attach:prepare",
                    argument={"choices": [dataclasses.asdict(choice_of(option)) for option in options]},
                    imports=("tightfit.runtime.attach", "tightfit.techniques.registry:import_ours"),
                ),
            ).tape
        return self._tapes[key]

    def offered(self, name: str, model: str) -> list[Option]:
        """What the technique `name` offers on the plain run of `model`."""
        if (name, model) not in self._offers:
            self._offers[name, model] = list(technique(name).options(Profile(self.of(model), find(CARD))))
        return self._offers[name, model]

    def together(self, name: str, model: str) -> list[Option]:
        """As many of these as go together, those that save most first."""
        return compatible(sorted(self.offered(name, model), key=max_saved, reverse=True))

    def all_exact(self, model: str) -> list[Option]:
        """What all exact techniques offer."""
        return [o for name, t in techniques().items() if t.exact for o in self.offered(name, model) if o.exact]


def _target(model: str) -> GeneratorFunction:
    if model in LARGE:
        return GeneratorFunction(location=large_models.__file__, function=model, parameters={})
    return GeneratorFunction(location=models.__file__, function="workload", parameters={"model": model})


def max_saved(option: Option) -> int:
    """The most that the option takes from any moment."""
    return max((-change.num_bytes for change in option.changes), default=0)


def compatible(options: Sequence[Option]) -> list[Option]:
    """The options in order, without those that share a slot with an earlier one."""
    taken: set[str] = set()
    chosen = []
    for option in options:
        if not taken & option.slots:
            chosen.append(option)
            taken |= option.slots
    return chosen


@pytest.fixture(scope="session")
def tapes() -> Tapes:
    """One set of tapes for all tests."""
    return Tapes()
