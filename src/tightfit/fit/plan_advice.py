"""What a person could do that a plan does not do for them: a larger card, a second one, a smaller batch, a shorter sequence, a lighter model, what
lossy techniques would save."""

from collections.abc import Iterable, Sequence

import numpy as np

from tightfit.analysis.trained_parts import TrainedParts
from tightfit.devices.catalogue import all_devices
from tightfit.devices.device import Device
from tightfit.errors.faults import answering
from tightfit.fit.search import Found
from tightfit.fit.traced_runs import TracedRun
from tightfit.planner.option import Advice, Change, Option
from tightfit.simulate.estimate import Estimate
from tightfit.tape import Column
from tightfit.techniques.registry import techniques
from tightfit.units import format_bytes, format_bytes_change

_NUM_CARDS = 2
_NUM_DIMENSIONS_OF_TOKENS = 2  # a batch of sequences
_SHORTEST = 64  # tokens, below which a shorter sequence is no advice
_PART_OF_BLOCKS = 4


def advice(found: Found, card: Device, *, is_whole_card: bool) -> tuple[str, ...]:
    """Sentences: first what costs neither time nor exactness, those that save most before others; then what changes the training or the model.

    `is_whole_card`: the budget is all that the card has.
    """
    own = sorted(_from_techniques(found), key=lambda row: (not row.is_exact, -row.saves_bytes))
    rows = [_sentence(row) for row in own if row.is_exact]
    if not found.fits or found.best.options:
        rows += _batch(found.base.estimate)
        rows += _sequence(found.base)
    rows += _lossy(found.forbidden)
    rows += [_sentence(row) for row in own if not row.is_exact]
    if not found.fits or found.best.options:
        rows += _blocks(found.base)
    if not found.fits and is_whole_card:
        rows += _cards(found, card)
    return tuple(rows)


def _lossy(forbidden: Sequence[Option]) -> Iterable[str]:
    """Each lossy technique that was not allowed, with its largest predicted saving, the largest first."""
    saved: dict[str, int] = {}
    for option in forbidden:
        most = -min((c.num_bytes for c in option.changes), default=0)
        saved[option.technique] = max(most, saved.get(option.technique, 0))
    for name, num_bytes in sorted(saved.items(), key=lambda item: -item[1]):
        if num_bytes > 0:
            yield f"{name} would save up to {format_bytes(num_bytes)}, but changes results: --allow {name}"


def _from_techniques(found: Found) -> Iterable[Advice]:
    for technique in techniques().values():
        with answering(f"technique {technique.name}", technique=technique.name):
            rows = list(technique.advice(found.base.profile))
        yield from rows


def _sentence(row: Advice) -> str:
    saved = f" (up to {format_bytes_change(-row.saves_bytes)})" if row.saves_bytes > 0 else ""
    return f"{row.what}{saved}"


def _batch(base: Estimate) -> Iterable[str]:
    """Half the batch halves what the forward pass leaves; weights, gradients and states stay."""
    held = base.at_peak
    grows = held["activations"] + held["temporaries"] + held["inputs"]
    if grows > base.peak.device_bytes // 20:
        yield f"half the batch size would need about {format_bytes(base.peak.device_bytes - grows // 2)} without any technique"


def _sequence(base: TracedRun) -> Iterable[str]:
    """Half the tokens leave at most half of what the forward pass leaves; scores of attention, if there are any, fall by more."""
    held = base.estimate.at_peak
    grows = held["activations"] + held["temporaries"] + held["inputs"]
    sizes = [
        shape for root in base.roots for shape in root["inputs"].values() if len(shape) == _NUM_DIMENSIONS_OF_TOKENS
    ]
    length = max((shape[1] for shape in sizes), default=0)
    reads_tokens = "aten.embedding" in base.tape.strings
    if reads_tokens and length >= _SHORTEST and grows > base.estimate.peak.device_bytes // 20:
        left = format_bytes(base.estimate.peak.device_bytes - grows // 2)
        yield f"half the sequence length ({length // 2} of {length} tokens) would need about {left} or less without any technique"


def _blocks(base: TracedRun) -> Iterable[str]:
    """A model with fewer of its repeated blocks: their parameters, gradients, states and activations are gone."""
    run, parts = base.profile.optimizer, base.profile.trained_parts
    blocks = parts.blocks
    if blocks is None or not run.step_ranges or not len(parts.gradients):
        return
    trained_bytes = int(run.block_bytes[run.gradients(run.step_ranges[-1])].sum())
    if 2 * trained_bytes < base.estimate.at_peak["parameters"]:
        return  # of weights that are frozen a tape does not tell whose they are
    number = max(1, blocks.number // _PART_OF_BLOCKS)
    # Counted without the first ones, which wait longest: the backward pass of the last is often where the peak is.
    paths = [f"{blocks.path}.{i}" for i in range(number)]
    inside = {name for path in paths for name in parts.module_calls.modules_inside(path)}
    gone = np.array([name in inside for name in parts.modules_of(parts.gradients)], dtype=bool)
    weight_bytes = int(run.block_bytes[_one_for_each_weight(parts, gone)].sum())
    weights = Change(begin=0, end=len(base.profile.tape.events), num_bytes=-weight_bytes)
    calls = [call for path in paths for call in parts.module_calls.calls(path)]
    saved = [
        Change(begin=v.end_event, end=v.back_event, num_bytes=-parts.module_calls.bytes_of(v.saved)) for v in calls
    ]
    left = parts.peak_with((weights, *parts.untrained(gone), *saved))
    yield (
        f"a smaller model, with {blocks.number - number} instead of {blocks.number} blocks in {blocks.path}, would reduce allocated memory from "
        f"{format_bytes(parts.peak_with(()))} to about {format_bytes(left)} without any technique"
    )


def _one_for_each_weight(parts: TrainedParts, gone: Column) -> Column:
    """Of the gradients that `gone` marks, those that live when the last optimizer step begins: one for each weight, and as large."""
    return np.intersect1d(parts.gradients[gone], parts.run.gradients(parts.run.step_ranges[-1]))


def _cards(found: Found, card: Device) -> Iterable[str]:
    others = [d for d in all_devices() if d.name != card.name]
    plain = _smallest(found.base.needed_bytes, others)
    planned = _smallest(found.best.needed_bytes, others)
    if planned:
        yield f"with this plan it fits {_names(planned)}"
    if plain:
        yield f"without any technique it fits {_names(plain)}"
    held = found.base.estimate.at_peak
    shared = held["parameters"] + held["gradients"] + held["optimizer_state"]
    left = found.best.needed_bytes - shared // 2
    if left <= card.capacity_bytes:
        yield f"on two of these GPUs, sharded as by FSDP, each would need about {format_bytes(left)}"


def _smallest(needed_bytes: int, cards: Iterable[Device]) -> list[Device]:
    fitting = sorted((c for c in cards if c.capacity_bytes >= needed_bytes), key=lambda c: (c.capacity_bytes, c.name))
    return fitting[:_NUM_CARDS]


def _names(cards: Sequence[Device]) -> str:
    return " or ".join(f"{c.name} ({format_bytes(c.capacity_bytes)})" for c in cards)
