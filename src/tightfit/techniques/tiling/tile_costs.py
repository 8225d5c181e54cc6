"""The effect of running a module tile by tile on memory and time, from the tape of the plain run.

Memory: the module's intermediate results, in its forward and its backward pass, are gone; those of one tile are allocated while either pass runs,
and the gradients of the weights from the first tile on, beside those of a single tile. Time: one more forward pass, more kernel launches, and a
pass over the gradients of the weights for each tile.
"""

import dataclasses
from collections.abc import Iterable, Iterator

import numpy as np

from tightfit.analysis.modules import ModuleCall, ModuleCalls
from tightfit.analysis.profile import Profile
from tightfit.cost.host_python import HostWork
from tightfit.planner.option import Change
from tightfit.planner.sides import Sides
from tightfit.tape import Category, Column

# Of the largest storage inside: smaller ones are left where they are.
_SMALLEST_STORAGE = 0.01
_SUM_BYTES = 4
_HALF = frozenset({"float16", "bfloat16"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Inside:
    """The intermediate results of one module call: `storages`, with their peaks in its forward and in its backward pass.

    `around` is the call of the enclosing module that may be recomputed, or `call` itself. `weight_gradients` are storages too, as are the gradients
    that are `handed_on`, and storages from before the backward pass that are freed in it, and are `held` to its end by tiles. `sum_bytes` is the
    size of the gradients' sums, `cast_bytes` that of the copies of the weights that autocast makes.
    """

    call: ModuleCall
    around: ModuleCall
    storages: Column
    forward_bytes: int
    backward_bytes: int
    output: int
    output_bytes: int
    weight_gradients: Column
    handed_on: Column
    held: Column
    sum_bytes: int
    cast_bytes: int


def inside_of(profile: Profile, call: ModuleCall, around: ModuleCall | None = None) -> Inside:
    """The intermediate results of `call`, without its output and the gradients that it passes on. `around` is the call of the enclosing module."""
    tape, module_calls, allocations = profile.tape, profile.modules, profile.lifetimes.allocated_at
    freed_at, output = module_calls.lifetimes.freed_at, call.output
    made = module_calls.lifetimes.made_in(call.begin, call.end)
    back = module_calls.lifetimes.made_in(call.back_begin, call.back_end)
    gradients = back[tape.storages.category[back] == Category.GRADIENTS]
    # Temporaries of the backward pass's last operator are freed with the next one.
    storages = np.r_[made[made != output], back[freed_at[back] < call.back_end_event]]
    storages = storages[~np.isin(storages, gradients)]
    handed_on = back[(freed_at[back] >= call.back_end_event) & ~np.isin(back, gradients)]
    held = module_calls.lifetimes.freed_in(call.back_event + 1, call.back_end_event)
    held = held[allocations[held] < call.back_event]
    held = held[~np.isin(held, np.r_[storages, output])]
    sizes = module_calls.lifetimes.block_bytes[storages]
    storages = storages[sizes >= _SMALLEST_STORAGE * sizes.max(initial=0)]
    gradient_bytes = module_calls.lifetimes.bytes_of(gradients)
    names = {tape.strings[n] for n in np.unique(tape.operators.name[call.begin : call.end]).tolist()}
    kinds = {tape.strings[n] for n in np.unique(tape.operators.dtype[call.begin : call.end]).tolist()}
    is_half, casts = bool(kinds & _HALF), "aten._to_copy" in names
    return Inside(
        call=call,
        around=around or call,
        storages=storages,
        forward_bytes=_max_alive(module_calls, allocations, storages, call.begin_event, call.end_event),
        backward_bytes=_max_alive(module_calls, allocations, storages, call.back_event, call.back_end_event),
        output=output,
        output_bytes=int(module_calls.lifetimes.block_bytes[output]) if output >= 0 else 0,
        weight_gradients=gradients,
        handed_on=handed_on,
        held=held,
        sum_bytes=gradient_bytes * (2 if is_half and not casts else 1),
        cast_bytes=gradient_bytes // 2 if is_half and casts else 0,
    )


def _max_alive(module_calls: ModuleCalls, allocations: Column, storages: Column, begin: int, end: int) -> int:
    steps = np.zeros(end - begin + 1, dtype=np.int64)
    sizes = module_calls.lifetimes.block_bytes[storages]
    starts, ends = (
        np.clip(allocations[storages], begin, end),
        np.clip(module_calls.lifetimes.freed_at[storages], begin, end),
    )
    np.add.at(steps, starts - begin, sizes)
    np.subtract.at(steps, ends - begin, sizes)
    return int(steps.cumsum().max(initial=0))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TileAccount:
    """Memory and time of `num_tiles` tiles. If they overlap, each is `share` of the whole, and together they compute `work` times as much."""

    num_tiles: int
    profile: Profile
    share: float = 0.0
    work: float = 1.0

    @property
    def _share(self) -> float:
        return self.share or 1 / self.num_tiles

    def changes(self, one: Inside, *, is_alone: bool) -> Iterator[Change]:
        """The storages that are gone, and the ones that replace them. If not `is_alone`, a recomputed enclosing module accounts for all between the passes."""
        call, around, module_calls = one.call, one.around, self.profile.modules
        passes = [(call.begin_event, call.end_event), (call.back_event, call.back_end_event)]
        windows = [(call.begin_event, around.end_event), (around.back_event, call.back_end_event)]
        for storage in one.storages.tolist():
            size = int(module_calls.lifetimes.block_bytes[storage])
            allocated_at, freed_at = (
                int(self.profile.lifetimes.allocated_at[storage]),
                int(module_calls.lifetimes.freed_at[storage]),
            )
            for begin, end in [(allocated_at, freed_at)] if is_alone else windows:
                if max(allocated_at, begin) < min(freed_at, end):
                    yield Change(begin=max(allocated_at, begin), end=min(freed_at, end), num_bytes=-size)
        # A tile's input, output and input gradient are allocated beside its intermediate results.
        beside = round(self._share * (one.output_bytes + 2 * module_calls.lifetimes.bytes_of(one.handed_on)))
        (begin, end), (back, back_end) = passes
        # The output is there from the first tile on.
        yield Change(begin=begin, end=end, num_bytes=self._tile(one, one.forward_bytes) + one.output_bytes)
        gradients = module_calls.lifetimes.bytes_of(one.weight_gradients)
        extra = one.sum_bytes - gradients + gradients * (self.num_tiles > 1)
        yield Change(begin=back, end=back_end, num_bytes=self._tile(one, one.backward_bytes) + beside + extra)
        if one.output >= 0 and back < module_calls.lifetimes.freed_at[one.output] < back_end:
            # What comes after has used it before, and the module itself keeps it no more.
            yield Change(begin=back, end=int(module_calls.lifetimes.freed_at[one.output]), num_bytes=-one.output_bytes)
        for storage in one.held.tolist():
            yield Change(
                begin=int(module_calls.lifetimes.freed_at[storage]),
                end=back_end,
                num_bytes=int(module_calls.lifetimes.block_bytes[storage]),
            )
        for storage in (*one.weight_gradients.tolist(), *one.handed_on.tolist()):
            if back < self.profile.lifetimes.allocated_at[storage]:
                yield Change(
                    begin=back,
                    end=int(self.profile.lifetimes.allocated_at[storage]),
                    num_bytes=int(module_calls.lifetimes.block_bytes[storage]),
                )

    def _tile(self, one: Inside, max_bytes: int) -> int:
        """The bytes of one tile if the whole module needs `max_bytes`: weights are not split."""
        uncut = min(one.cast_bytes, max_bytes)
        return round(self._share * (max_bytes - uncut)) + uncut

    def added_sides(self, calls: Iterable[Inside]) -> Sides:
        """The extra time of all calls of a module, in a step."""
        return sum(map(self._of_call, calls), Sides()) * (1 / self.profile.num_steps)

    def _of_call(self, one: Inside) -> Sides:
        call, efficiency = one.call, self.profile.costs.efficiency
        once = float(self.profile.costs.seconds[call.begin : call.end].sum())
        again = once * self.work
        more = (once + float(self.profile.costs.seconds[call.back_begin : call.back_end].sum())) * (self.work - 1)
        kernels = self.profile.costs.is_kernel
        in_forward = int(kernels[call.begin : call.end].sum())
        num_kernels = 2 * in_forward + int(kernels[call.back_begin : call.back_end].sum())
        # An output and a gradient of the input are copied into place for each tile, and the gradients of the weights are summed.
        num_more = (self.num_tiles - 1) * (num_kernels + 2 + len(one.weight_gradients))
        is_product = self.profile.costs.is_product
        num_products = 2 * int(is_product[call.begin : call.end].sum())
        num_products += int(is_product[call.back_begin : call.back_end].sum())
        ramps = (self.num_tiles - 1) * num_products * efficiency.ramp_seconds
        traffic = (self.num_tiles - 1) * 3 * one.sum_bytes + 4 * one.output_bytes
        passed = traffic / (self.profile.device.dram_bytes_per_second * efficiency.of_bandwidth["elementwise"])
        return Sides(
            on_card=again + more + num_more * efficiency.launch_seconds + ramps + passed,
            on_host=(in_forward + num_more) * efficiency.issue_seconds
            + HostWork.TILED_CALL.value
            + self.num_tiles * HostWork.TILE.value,
        )
