"""The attacks by name: small programs that do what real training code does, and that a technique might get wrong without a word."""

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable

from tests.attacks import programs
from tests.attacks.trial import Trial

KINDS = {
    "clean": "Nothing unusual: to refuse these would be a fault too",
    "recomputation": "Code that is run again is not pure",
    "parts": "Code that is run in parts is not token-wise or example-wise",
    "gradients": "Gradients and the optimizer's step have other readers and writers",
    "second order": "Derivatives of derivatives",
    "changes": "The model, its modules or its optimizer change later",
    "exceptions": "Exceptions that the program swallows, and refusals that come late",
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attack:
    """One program. `kind` is a key of `KINDS`; `what` is one line for the table; `program` trains on a `Trial`. `only` names the
    techniques that it is tried with, all of them where it is empty."""

    name: str
    kind: str
    what: str
    program: Callable[[Trial], None]
    only: tuple[str, ...] = ()


_ATTACKS: dict[str, Attack] = {}


def attack(
    kind: str, what: str, *, only: tuple[str, ...] = ()
) -> Callable[[Callable[[Trial], None]], Callable[[Trial], None]]:
    """Registers the program under its own name."""
    assert kind in KINDS

    def registered(program: Callable[[Trial], None]) -> Callable[[Trial], None]:
        name = program.__name__
        assert name not in _ATTACKS, f"there are two attacks {name}"
        # The rows of the page are found by these words.
        assert what not in {each.what for each in _ATTACKS.values()}, f"two attacks are called '{what}'"
        _ATTACKS[name] = Attack(name=name, kind=kind, what=what, program=program, only=only)
        return program

    return registered


def attacks() -> dict[str, Attack]:
    """Every attack of `tests/attacks/programs` by its name, in the order of `KINDS`."""
    for module in pkgutil.iter_modules(programs.__path__):
        importlib.import_module(f"{programs.__name__}.{module.name}")
    order = list(KINDS)
    return dict(sorted(_ATTACKS.items(), key=lambda item: order.index(item[1].kind)))
