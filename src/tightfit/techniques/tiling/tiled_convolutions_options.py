"""The saving and cost of running chains of convolutions on slabs, from the tape of the plain run.

A tape has no shapes. The number of output positions of a convolution follows from its FLOPs, two per position and element of its weight; the
length of a side is estimated as the cube root of that (the square root if a pooling or an upsampling is two-dimensional), and kernels as three
wide, with a halo of one position on either side.
"""

from collections.abc import Iterator

import numpy as np

from tightfit.analysis.modules import ModuleCalls, paths_below
from tightfit.analysis.profile import Profile
from tightfit.analysis.sequences import LayerRange, LayerSequence, saved_bytes, segments
from tightfit.cost.classes import operator_class
from tightfit.planner.option import Option
from tightfit.tape import Category, Column
from tightfit.techniques.tiling.tile_costs import TileAccount, inside_of

SMALLEST_SHARE = 0.02
"""Of all that waits for a backward pass: what a chain must hold on the way to be offered."""

NUMBERS_OF_TILES = (4, 16)
_MAX_SHARE = 0.75  # of the whole, that a tile with its halos may be
_MORE_THAN_OUTPUT = 1.5
_WEIGHT_BYTES = 4  # of a number in a gradient: convolutions are trained in float32
_LOCAL = ("max_pool", "avg_pool", "upsample_nearest", "pixel_shuffle")
_FLAT = ("pool2d", "nearest2d", "pixel_shuffle")


def tiled_convolutions_options(technique: str, profile: Profile) -> Iterator[Option]:
    """The options of all chains of a run."""
    module_calls = profile.modules
    least = SMALLEST_SHARE * saved_bytes(module_calls)
    for sequence in profile.sequences:
        for begin, end in _chains(sequence):
            for layer_range in segments(sequence, begin, end):
                found = [inside_of(profile, call) for call in layer_range.calls]
                largest = max(found, key=lambda one: one.backward_bytes)
                if largest.backward_bytes < max(least, _MORE_THAN_OUTPUT * largest.output_bytes):
                    continue
                halo, mean_halo = _halo_shares(module_calls, layer_range, profile.costs.seconds)
                for num_tiles in NUMBERS_OF_TILES:
                    share = 1 / num_tiles + halo
                    if share > _MAX_SHARE:
                        continue
                    account = TileAccount(
                        num_tiles=num_tiles,
                        profile=profile,
                        share=share,
                        # The first and the last tile have one neighbour.
                        work=1 + mean_halo * (num_tiles - 1),
                    )
                    sides = account.added_sides(found)
                    # Tiles inside of a chain would be given those of the chain, and layers of it do not bring their weights for each.
                    modules = {
                        s.removeprefix("activations@") for s in layer_range.slots if s.startswith("activations@")
                    }
                    slots = {f"tiles@{m}" for m in modules}
                    slots |= {f"brings@{m}" for m in paths_below(layer_range.path, modules)}
                    yield Option(
                        technique=technique,
                        where=layer_range.path,
                        equivalence_class=f"{technique}:{layer_range.equivalence_class(module_calls)}:{num_tiles}",
                        settings={**layer_range.settings, "num_tiles": num_tiles},
                        changes=(
                            *(c for one in found for c in account.changes(one, is_alone=True)),
                            *layer_range.inputs,
                        ),
                        seconds=profile.step.added(sides),
                        sides=sides,
                        exact=True,
                        slots=layer_range.slots | slots,
                    )


def _chains(sequence: LayerSequence) -> Iterator[tuple[int, int]]:
    """The longest ranges of children with only local operators, including a convolution."""
    local = [all(map(is_local, sequence.operator_names(position))) for position in range(len(sequence))]
    begin = 0
    while begin < len(sequence):
        end = begin
        while end < len(sequence) and local[end]:
            end += 1
        names = [name for position in range(begin, end) for name in sequence.operator_names(position)]
        if end - begin >= 2 and any(operator_class(name) == "convolution" for name in names):
            yield begin, end
        begin = end + 1


def is_local(name: str) -> bool:
    """Whether an operator works on a neighbourhood of each position, or on each position independently, judged by its name."""
    if any(part in name for part in _LOCAL) and "adaptive" not in name:
        return True
    return operator_class(name) in ("convolution", "elementwise", "copy") and "dropout" not in name


def _halo_shares(module_calls: ModuleCalls, layer_range: LayerRange, seconds: Column) -> tuple[float, float]:
    """The share of the whole that a tile's halos on both sides add: at the output of the first convolution (the halos of all others), and on
    average over convolutions, weighted by time."""
    tape, call = module_calls.tape, layer_range.calls[-1]
    names = module_calls.operator_names(call.begin, call.end)
    num_axes = 2 if any(part in name for name in names for part in _FLAT) else 3
    forward = [call.begin + i for i, name in enumerate(names) if operator_class(name) == "convolution"]
    storages = tape.storages
    back = (storages.operator >= call.back_begin) & (storages.operator < call.back_end)
    gradients = np.flatnonzero(back & (storages.category == Category.GRADIENTS))
    share, added = 0.0, [0.0]
    for operator in reversed(forward[1:]):
        module = tape.operators.module[operator]
        own = gradients[tape.operators.module[storages.operator[gradients]] == module]
        weight = storages.num_bytes[own].max(initial=0) / _WEIGHT_BYTES
        if weight:
            positions = tape.operators.flops[operator] / (2 * weight)
            share += 2 / max(1.0, positions ** (1 / num_axes))
        added.append(share)
    times = seconds[forward[::-1]]
    return share, float((times * added).sum() / max(times.sum(), 1e-12)) if forward else 0.0
