"""What a person could do that a plan does not do for them: a larger card, a second one, a smaller batch, what lossy techniques would save."""

from collections.abc import Iterable, Sequence

from tightfit.devices.catalogue import all_devices
from tightfit.devices.device import Device
from tightfit.fit.planning import Found
from tightfit.planner.option import Option
from tightfit.simulate.estimate import Estimate
from tightfit.techniques.catalogue import techniques
from tightfit.units import format_bytes

_NUM_CARDS = 2


def advice(found: Found, card: Device, *, is_whole_card: bool) -> tuple[str, ...]:
    """Sentences, the cheapest to follow first. `is_whole_card`: the budget is all that the card has."""
    rows = [*_lossy(found.forbidden, found.base.estimate), *_from_techniques(found, card)]
    if not found.fits or found.best.options:
        rows += _batch(found.base.estimate)
    if not found.fits and is_whole_card:
        rows += _cards(found, card)
    return tuple(rows)


def _lossy(forbidden: Sequence[Option], base: Estimate) -> Iterable[str]:
    """Each lossy technique that was not allowed, by the most that it promises."""
    by_name: dict[str, list[Option]] = {}
    for option in forbidden:
        by_name.setdefault(option.technique, []).append(option)
    for name, options in by_name.items():
        saved = max(-min((c.num_bytes for c in option.changes), default=0) for option in options)
        if saved > 0:
            yield f"{name} would save up to {format_bytes(saved)} of {format_bytes(base.peak.device_bytes)}, but changes results: --allow {name}"


def _from_techniques(found: Found, card: Device) -> Iterable[str]:
    for technique in techniques().values():
        for row in technique.advice(found.base.tape, card):
            saved = f" (saves {format_bytes(row.saves_bytes)})" if row.saves_bytes > 0 else ""
            yield f"{row.what}{saved}"


def _batch(base: Estimate) -> Iterable[str]:
    """Half the batch halves what the forward pass leaves; weights, gradients and states stay."""
    held = base.at_peak
    grows = held["activations"] + held["temporaries"] + held["inputs"]
    if grows > base.peak.device_bytes // 20:
        yield f"half the batch would hold about {format_bytes(base.peak.device_bytes - grows // 2)} without any technique"


def _cards(found: Found, card: Device) -> Iterable[str]:
    others = [d for d in all_devices() if d.name != card.name]
    plain = _smallest(found.base.high_bytes, others)
    planned = _smallest(found.best.high_bytes, others)
    if planned:
        yield f"with these choices it fits {_names(planned)}"
    if plain:
        yield f"without any technique it fits {_names(plain)}"
    held = found.base.estimate.at_peak
    shared = held["parameters"] + held["gradients"] + held["optimizer_state"]
    left = found.best.high_bytes - shared // 2
    if left <= card.capacity_bytes:
        yield f"on two of these cards, sharded as FSDP does, each would hold about {format_bytes(left)}"


def _smallest(needed_bytes: int, cards: Iterable[Device]) -> list[Device]:
    fitting = sorted((c for c in cards if c.capacity_bytes >= needed_bytes), key=lambda c: (c.capacity_bytes, c.name))
    return fitting[:_NUM_CARDS]


def _names(cards: Sequence[Device]) -> str:
    return " or ".join(f"{c.name} ({format_bytes(c.capacity_bytes)})" for c in cards)
