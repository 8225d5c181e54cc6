"""Suggestions for a workload that is planned for, from its profile: what a person could do that a plan does not do for them. The techniques' own advice,
a smaller batch, a shorter sequence, a lighter model, what lossy techniques would save, a larger GPU or a second one."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from tightfit.analysis.profile import Profile
from tightfit.analysis.trained_parts import TrainedParts
from tightfit.devices.catalogue import all_devices
from tightfit.devices.device import Device
from tightfit.diagnosis.suggestions.from_loading import suggestions_on_loading
from tightfit.diagnosis.suggestions.from_sizes import suggestions_on_sizes
from tightfit.errors.faults import answering
from tightfit.planner.option import Change, Option
from tightfit.planner.suggestion import Suggestion, in_order
from tightfit.simulate.estimate import Estimate
from tightfit.tape import Column
from tightfit.techniques.registry import techniques
from tightfit.units import format_bytes

_NUM_CARDS = 2
_NUM_DIMENSIONS_OF_TOKENS = 2  # a batch of sequences
_NUM_DIMENSIONS_OF_ADJACENCY = 2  # nodes by nodes
_SHORTEST = 64  # tokens, below which a shorter sequence is no advice
_PART_OF_BLOCKS = 4
_PLAIN = "without any technique"
# Of the peak: who needs memory is not helped by less, and a longer list hides what helps.
_LEAST_SHARE = 100


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlannedWorkload:
    """A workload and what was planned for it: the profile and the estimate of its plain run, the models that it calls (`roots`), the bytes that it needs
    plain and planned, whether that fits, the techniques of the plan, the lossy options that were not allowed, and what a program that predicts with gradients
    enabled would save without.
    """

    profile: Profile
    estimate: Estimate
    roots: Sequence[Mapping[str, Any]]
    needed_bytes: int
    planned_bytes: int
    fits: bool
    techniques: frozenset[str]
    forbidden: Sequence[Option]
    saved_without_gradients: int = 0


def suggestions_for(planned: PlannedWorkload, card: Device, *, is_whole_card: bool) -> tuple[str, ...]:
    """Sentences, what saves most for nothing first.

    `is_whole_card`: the budget is all that the card has.
    """
    rows = [*_from_techniques(planned.profile), *_lossy(planned.forbidden)]
    if planned.saved_without_gradients > 0:
        what = "call the model within `torch.no_grad()` or `torch.inference_mode()`, since no gradient is computed"
        rows.append(Suggestion(what=what, saves_bytes=planned.saved_without_gradients, is_one_line=True))
    for_speed = {name for name in planned.techniques if techniques()[name].is_for_speed}
    rows += suggestions_on_loading(planned.estimate.input_pipeline, has_copies_beside=bool(for_speed))
    rows += suggestions_on_sizes(planned.profile)
    rows = [row for row in rows if row.saves_bytes * _LEAST_SHARE >= planned.needed_bytes or not row.saves_bytes]
    if not planned.fits or planned.techniques - for_speed:
        rows += [*_batch(planned.estimate), *_sequence(planned), *_blocks(planned)]
    if not planned.fits and is_whole_card:
        rows += _cards(planned, card)
    if not _has_halves(planned.roots):
        rows = [row for row in rows if not row.splits_batch]
    return tuple(row.sentence for row in in_order(rows))


def _has_halves(roots: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the inputs of the models are a batch of examples, as far as their shapes tell: of more than one, and no nodes of one graph."""
    sizes = {shape[0] for root in roots for shape in root["inputs"].values() if shape}
    return sizes != {1} and not any(map(_is_of_a_graph, roots))


def _is_of_a_graph(root: Mapping[str, Any]) -> bool:
    """Whether one input is the adjacency of the rows of another (N by N beside N): half of the nodes would be another graph."""
    shapes = [shape for shape in root["inputs"].values() if shape]
    num_inputs = Counter(shape[0] for shape in shapes)
    squares = [s for s in shapes if len(s) == _NUM_DIMENSIONS_OF_ADJACENCY and s[0] == s[1] > 1]
    return any(num_inputs[square[0]] > 1 for square in squares)


def _lossy(forbidden: Sequence[Option]) -> Iterable[Suggestion]:
    """Each lossy technique that was not allowed, with its largest predicted saving."""
    saved: dict[str, int] = {}
    for option in forbidden:
        most = -min((c.num_bytes for c in option.changes), default=0)
        saved[option.technique] = max(most, saved.get(option.technique, 0))
    for name, num_bytes in saved.items():
        if num_bytes > 0:
            effect = f"would save up to {format_bytes(num_bytes)}, but changes results: --allow {name}"
            yield Suggestion(what=name, changes="results", saves_bytes=num_bytes, effect=effect)


def _from_techniques(profile: Profile) -> Iterable[Suggestion]:
    for technique in techniques().values():
        with answering(f"technique {technique.name}", technique=technique.name):
            rows = list(technique.advice(profile))
        yield from rows


def _batch(base: Estimate) -> Iterable[Suggestion]:
    """Half the batch halves what the forward pass leaves; weights, gradients and states stay."""
    held = base.at_peak
    grows = held["activations"] + held["temporaries"] + held["inputs"]
    if grows > base.peak.device_bytes // 20:
        # Of the cached blocks, too, which are many where sizes vary, there are fewer.
        effect = f"would need about {format_bytes(base.peak.device_bytes - grows // 2)} or less {_PLAIN}"
        yield Suggestion(
            what="half the batch size", changes="batch", saves_bytes=grows // 2, effect=effect, splits_batch=True
        )


def _sequence(base: PlannedWorkload) -> Iterable[Suggestion]:
    """Half the tokens leave at most half of what the forward pass leaves; scores of attention, if there are any, fall by more."""
    held = base.estimate.at_peak
    grows = held["activations"] + held["temporaries"] + held["inputs"]
    sizes = [
        shape for root in base.roots for shape in root["inputs"].values() if len(shape) == _NUM_DIMENSIONS_OF_TOKENS
    ]
    length = max((shape[1] for shape in sizes), default=0)
    reads_tokens = "aten.embedding" in base.profile.tape.strings
    if reads_tokens and length >= _SHORTEST and grows > base.estimate.peak.device_bytes // 20:
        left = format_bytes(base.estimate.peak.device_bytes - grows // 2)
        yield Suggestion(
            what=f"half the sequence length ({length // 2} of {length} tokens)",
            changes="batch",
            saves_bytes=grows // 2,
            effect=f"would need about {left} or less {_PLAIN}",
        )


def _blocks(base: PlannedWorkload) -> Iterable[Suggestion]:
    """A model with fewer of its repeated blocks: their parameters, gradients, states and activations are gone."""
    run, parts = base.profile.optimizer, base.profile.optimizer.trained_parts
    blocks = parts.blocks
    if blocks is None or not run.step_ranges or not len(parts.gradients):
        return
    trained_bytes = int(run.block_bytes[run.gradients(run.step_ranges[-1])].sum())
    if 2 * trained_bytes < base.estimate.at_peak["parameters"]:
        return  # of weights that are frozen a tape does not tell whose they are
    if not _are_alike(parts, blocks.path, blocks.number):
        return
    number = max(1, blocks.number // _PART_OF_BLOCKS)
    # Counted without the first ones, which wait longest: the backward pass of the last is often where the peak is.
    paths = [f"{blocks.path}.{i}" for i in range(number)]
    inside = {name for path in paths for name in parts.module_calls.modules_inside(path)}
    gone = np.array([name in inside for name in parts.modules_of(parts.gradients)], dtype=bool)
    weight_bytes = int(run.block_bytes[_one_for_each_weight(parts, gone)].sum())
    weights = Change(begin=0, end=len(base.profile.tape.events), num_bytes=-weight_bytes)
    calls = [call for path in paths for call in parts.module_calls.calls(path)]
    saved = [
        Change(begin=v.end_event, end=v.back_event, num_bytes=-parts.module_calls.lifetimes.bytes_of(v.saved))
        for v in calls
    ]
    now, left = parts.peak_with(()), parts.peak_with((weights, *parts.untrained(gone), *saved))
    if (now - left) * _LEAST_SHARE < now:
        return
    yield Suggestion(
        what=f"a smaller model, with {blocks.number - number} instead of {blocks.number} blocks in {blocks.path},",
        changes="model",
        saves_bytes=now - left,
        effect=f"would reduce allocated memory from {format_bytes(now)} to about {format_bytes(left)} {_PLAIN}",
    )


def _are_alike(parts: TrainedParts, path: str, number: int) -> bool:
    """Whether the children have weights of the same sizes, as the blocks of a model do, and the layers of a small `Sequential` do not."""
    modules, gradients = parts.modules_of(parts.gradients), parts.tape.storages.num_bytes[parts.gradients].tolist()
    sizes = []
    for i in range(number):
        inside = set(parts.module_calls.modules_inside(f"{path}.{i}"))
        sizes.append({num_bytes for name, num_bytes in zip(modules, gradients, strict=True) if name in inside})
    return all(own and own == sizes[0] for own in sizes)


def _one_for_each_weight(parts: TrainedParts, gone: Column) -> Column:
    """Of the gradients that `gone` marks, those that live when the last optimizer step begins: one for each weight, and as large."""
    return np.intersect1d(parts.gradients[gone], parts.run.gradients(parts.run.step_ranges[-1]))


def _cards(planned: PlannedWorkload, card: Device) -> Iterable[Suggestion]:
    others = [d for d in all_devices() if d.name != card.name]
    plan, plain = _smallest(planned.planned_bytes, others), _smallest(planned.needed_bytes, others)
    sentences = [f"with this plan it fits {_names(plan)}"] if plan else []
    sentences += [f"{_PLAIN} it fits {_names(plain)}"] if plain else []
    held = planned.estimate.at_peak
    shared = held["parameters"] + held["gradients"] + held["optimizer_state"]
    left = planned.planned_bytes - shared // 2
    if left <= card.capacity_bytes:
        sentences.append(f"on two of these GPUs, sharded as by FSDP, each would need about {format_bytes(left)}")
    return [Suggestion(what=sentence, changes="GPU", saves_bytes=0) for sentence in sentences]


def _smallest(needed_bytes: int, cards: Iterable[Device]) -> list[Device]:
    fitting = sorted((c for c in cards if c.capacity_bytes >= needed_bytes), key=lambda c: (c.capacity_bytes, c.name))
    return fitting[:_NUM_CARDS]


def _names(cards: Sequence[Device]) -> str:
    return " or ".join(f"{c.name} ({format_bytes(c.capacity_bytes)})" for c in cards)
