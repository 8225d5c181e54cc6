"""Suggestions from the history of a run: memory that it shows to be wasted or easy to save.

Every saving is computed on the memory timeline: the blocks in question are removed for as long as they need not be allocated, and the saving is how
much lower the peak of the whole run becomes. It is therefore 0 where another time step is as high, and two savings do not add up.
"""

import dataclasses
import re
from collections.abc import Iterable

import numpy as np

from tightfit.analysis.optimizer_algorithm import UPDATES_EACH_ALONE
from tightfit.diagnosis.growth import growing_sites
from tightfit.diagnosis.step_spans import NO_STEP, saved_bytes, step_numbers, steps_of
from tightfit.diagnosis.suggestions.from_growth import suggestions_on_growth
from tightfit.planner.suggestion import Suggestion
from tightfit.recordings.frames import AllocationSite
from tightfit.simulate.history import CATEGORIES, History
from tightfit.tape import Category, Column, Phase
from tightfit.units import MIB

MIN_SHARE = 0.005
"""Suggestions that save less than this share of the peak are left out."""
_NUM_KEPT = 3
_NUM_CHUNKS = 8
# The first number of a path: the index of the layer, not of an expert inside of it.
_NUMBERED = re.compile(r"^(.*?\.)(\d+)(?=\.|$)")
_MIN_STATE_ELEMENTS = 4096
"""bitsandbytes keeps the state of tensors with fewer elements (`min_8bit_size`) in float32."""
_STATE_BYTES = 4  # of an element, where a recording does not say
_PASSING = (Category.ACTIVATIONS, Category.TEMPORARIES, Category.INPUTS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What only a tape knows: for each block of its history the seconds of the operator that allocated it, the bytes of an element, and seconds by module.

    `element_bytes` are 0 where they are not known. `optimizers` are the classes of those that have stepped. `forward_seconds` are those of one step's forward pass, by the module's path.
    """

    block_seconds: Column
    element_bytes: Column
    optimizers: tuple[str, ...]
    forward_seconds: dict[str, float]

    def forward_seconds_of(self, group: str) -> float:
        """The seconds of the modules of one group, numbered children of one module."""
        return sum(seconds for module, seconds in self.forward_seconds.items() if _group_of(module) == group)


def suggestions_of(
    history: History, places: tuple[AllocationSite, ...], phases: Column, costs: Costs | None
) -> list[Suggestion]:
    """Suggestions that lower the allocated peak, in no order. `places` has an entry per stack, `phases` (`Phase`) one per block."""
    if not len(history.blocks) or not history.num_events:
        return []
    seen = _Seen(history, places, phases, costs)
    found = [
        *seen.kept(),
        *seen.gradients(),
        *seen.optimizer_temporaries(),
        *seen.loss(),
        *seen.checkpointing(),
        *seen.step_in_backward(),
        *seen.optimizer_state(),
    ]
    min_bytes = max(MIB, int(MIN_SHARE * int(history.allocated.max())))
    # What grows is said however little it is in a recording of a few steps.
    return [*suggestions_on_growth(history, places, phases), *(one for one in found if one.saves_bytes >= min_bytes)]


class _Seen:
    """A history prepared for the checks behind each suggestion."""

    def __init__(
        self, history: History, places: tuple[AllocationSite, ...], phases: Column, costs: Costs | None
    ) -> None:
        self.history, self.places, self.phases, self.costs = history, places, phases, costs
        self.blocks = history.blocks
        self.steps = steps_of(history, kinds=("step",))
        numbers = np.append(step_numbers(history, self.steps), NO_STEP)
        self.step_of = numbers[self.blocks.allocated_at]
        self.operators = np.array([place.operator for place in places])[self.blocks.stack]
        known = () if costs is None else costs.optimizers
        # LBFGS, say, works on all parameters at once, and its history is no state of each.
        self.updates_each_alone = not known or not UPDATES_EACH_ALONE.isdisjoint(known)
        # Gradients that something keeps from every step are a leak, which no other use of the optimizer mends.
        self.gradients_in_use = self.blocks.category == Category.GRADIENTS
        for site in growing_sites(history, places, self.steps):
            self.gradients_in_use[site.blocks] = False

    def saved(self, chosen: Column, begin: Column | None = None, *, kept_bytes: int = 0) -> int:
        """How much the peak falls without the chosen blocks, from `begin` (by default their allocation) until they are freed."""
        blocks = self.blocks
        begins = blocks.allocated_at if begin is None else begin
        return saved_bytes(
            self.history, blocks.block_bytes[chosen], begins[chosen], blocks.freed_at[chosen], kept_bytes=kept_bytes
        )

    def place_of(self, block: int) -> AllocationSite:
        """The allocation site of a block."""
        return self.places[int(self.blocks.stack[block])]

    def kept(self) -> Iterable[Suggestion]:
        """Blocks of one step that outlive it: outputs in a variable that the next step rebinds only after it has made new ones."""
        blocks = self.blocks
        ends = np.array([step.end for step in self.steps] + [self.history.num_events], dtype=np.int64)[self.step_of]
        passing = np.isin(blocks.category, _PASSING) & (self.step_of != NO_STEP)
        # Blocks that are never freed and allocated anew in every step are growth, which is reported as such.
        chosen = passing & (blocks.freed_at > ends) & (blocks.freed_at < self.history.num_events)
        keys = np.array([place.name for place in self.places])[blocks.stack]
        sizes = {str(key): int(blocks.block_bytes[chosen & (keys == key)].sum()) for key in np.unique(keys[chosen])}
        for key in sorted(sizes, key=lambda key: -sizes[key])[:_NUM_KEPT]:
            yield Suggestion(
                what="`del` the variable at the end of the step, or detach what is stored",
                where=key,
                saves_bytes=self.saved(chosen & (keys == key), ends),
                adds_seconds=0.0,
                note="what this line allocates stays allocated until the next step replaces it",
                is_one_line=True,
            )

    def gradients(self) -> Iterable[Suggestion]:
        """Gradients that stay allocated through the next forward pass."""
        blocks, steps = self.blocks, self.steps
        chosen = np.flatnonzero(self.gradients_in_use & (self.step_of != NO_STEP))
        rows = [
            # From the next step's begin until backward would allocate it anyway, at the same age as in its own step.
            (int(blocks.block_bytes[b]), later.begin, min(int(blocks.freed_at[b]), later.begin + age, later.end))
            for b in chosen.tolist()
            for own in [int(self.step_of[b])]
            for age in [int(blocks.allocated_at[b]) - steps[own].begin]
            for later in steps[own + 1 :]
            if later.begin < blocks.freed_at[b]
        ]
        if rows:
            num_bytes, begin, end = np.asarray(rows, dtype=np.int64).T
            yield Suggestion(
                what="optimizer.zero_grad() right after optimizer.step(), with set_to_none=True (the default)",
                saves_bytes=saved_bytes(self.history, num_bytes, begin, end),
                adds_seconds=0.0,
                note="gradients stay allocated through the next forward pass; not where they are accumulated over steps",
                is_one_line=True,
            )

    def optimizer_temporaries(self) -> Iterable[Suggestion]:
        """Temporaries that foreach optimizers allocate for a whole list of tensors at once."""
        blocks = self.blocks
        chosen = (blocks.category == Category.TEMPORARIES) & np.char.startswith(self.operators, "aten._foreach")
        # Clipping, and averages of weights, are the program's own calls.
        chosen &= self.phases == Phase.OPTIMIZER
        if chosen.any():
            yield Suggestion(
                what="fused=True in the optimizer, or foreach=False where it has none",
                where=self.place_of(int(np.flatnonzero(chosen)[0])).name,
                # A for-loop optimizer still has the temporary of one parameter, at most the largest.
                saves_bytes=self.saved(chosen, kept_bytes=int(blocks.block_bytes[chosen].max())),
                adds_seconds=0.0,
                changes="results",
                note="the foreach optimizer allocates temporaries for all parameters at once; the order of operations differs",
            )

    def step_in_backward(self) -> Iterable[Suggestion]:
        """Gradients that could be freed one by one, as soon as the optimizer has used them."""
        blocks = self.blocks
        chosen = self.gradients_in_use
        if chosen.any() and self.updates_each_alone:
            yield Suggestion(
                what="step each parameter in the backward pass (register_post_accumulate_grad_hook)",
                # The gradient that is being used is still there, at most the largest.
                saves_bytes=self.saved(chosen, kept_bytes=int(blocks.block_bytes[chosen].max())),
                adds_seconds=None if self.costs is None else 0.0,
                note="not with gradient clipping, accumulation or a gradient scaler",
            )

    def optimizer_state(self) -> Iterable[Suggestion]:
        """Optimizer states in 8 bits instead of 32 or 16."""
        blocks = self.blocks
        known = np.zeros(len(blocks), dtype=np.int64) if self.costs is None else self.costs.element_bytes
        each_bytes = np.where(known, known, _STATE_BYTES)
        chosen = (
            (blocks.category == Category.OPTIMIZER_STATE)
            & (blocks.num_bytes > _MIN_STATE_ELEMENTS * each_bytes)
            & (each_bytes > 1)
        )
        if chosen.any() and self.updates_each_alone:
            # Of float32 states a quarter is left, 8 bits of 32; the scales of the blocks are neglected.
            spared = np.flatnonzero(chosen)
            of_float32 = "for float32 states; " if (each_bytes[spared] == _STATE_BYTES).all() else ""
            yield Suggestion(
                what="an optimizer with 8-bit state",
                saves_bytes=saved_bytes(
                    self.history,
                    blocks.block_bytes[spared] * (each_bytes[spared] - 1) // each_bytes[spared],
                    blocks.allocated_at[spared],
                    blocks.freed_at[spared],
                ),
                adds_seconds=None,
                changes="results",
                note=f"{of_float32}block-wise 8-bit, Dettmers et al. 2021, arXiv:2110.02861",
            )

    def loss(self) -> Iterable[Suggestion]:
        """Logits and the tensors that the loss derives from them, which a chunked loss never allocates as a whole."""
        blocks = self.blocks
        # Above 1 MiB: the heads of small classifiers are not worth chunking.
        softmax = np.char.startswith(self.operators, "aten._log_softmax") & (blocks.num_bytes > MIB)
        # What only predicts has no loss, whatever it takes the softmax of.
        if not softmax.any() or not (self.phases == Phase.BACKWARD).any():
            return
        whole_bytes = int(blocks.num_bytes[softmax].max())
        # Half the bytes: log_softmax runs in float32 also where the logits are in 16 bits.
        same_size = np.isin(blocks.num_bytes, (whole_bytes, whole_bytes // 2)) & np.isin(blocks.category, _PASSING)
        makes = (
            same_size
            & (self.phases == Phase.FORWARD)
            & np.isin(self.operators, ("aten.mm", "aten.addmm", "aten.bmm", "aten.linear"))
        )
        is_forward = same_size & (self.phases == Phase.FORWARD)
        if not makes.any() and np.char.startswith(self.operators[is_forward], "aten.convolution").any():
            # Classes of pixels: there are no tokens, and no product to compute again.
            return
        seconds = None
        if self.costs is not None:
            steps = max(1, len(np.unique(self.step_of[makes])))
            seconds = float(self.costs.block_seconds[makes].sum()) / steps
        # Logits, log-probabilities and the gradient of one chunk exist at once.
        kept_bytes = int(blocks.block_bytes[same_size].max()) * 3 // _NUM_CHUNKS
        yield Suggestion(
            what=f"the loss in {_NUM_CHUNKS} chunks of tokens, with the logits recomputed in the backward pass",
            where=self.place_of(int(np.flatnonzero(softmax)[0])).name,
            saves_bytes=self.saved(same_size, kept_bytes=kept_bytes),
            adds_seconds=seconds,
            note="exact up to the order of sums",
        )

    def checkpointing(self) -> Iterable[Suggestion]:
        """Activations inside repeated modules, of which only the outputs would be saved; or all activations, where modules are not known."""
        blocks = self.blocks
        waits = blocks.category == Category.ACTIVATIONS
        names = [_repeated(module) for module in self.history.modules]
        groups = sorted({name[0] for name in names if name})
        for group in groups:
            member = np.array([-1 if name is None or name[0] != group else name[1] for name in names])[blocks.module]
            inside = waits & (member >= 0)
            outputs, largest_bytes = self._outputs(inside, member)
            yield Suggestion(
                what="checkpoint each of these modules (torch.utils.checkpoint)",
                where=f"{group}*",
                saves_bytes=self.saved(inside & ~outputs, kept_bytes=largest_bytes),
                adds_seconds=None if self.costs is None else self.costs.forward_seconds_of(group),
                note="runs their forward pass twice",
            )
        # A recording without modules: the saving is an upper bound, and says so.
        if not groups and waits.any() and self.costs is None:
            yield Suggestion(
                what="checkpoint the layers (torch.utils.checkpoint)",
                saves_bytes=self.saved(waits, kept_bytes=int(blocks.block_bytes[waits].max())),
                adds_seconds=None,
                note=f"an upper bound, all {CATEGORIES[Category.ACTIVATIONS]}: a recording does not name their layers",
            )

    def _outputs(self, inside: Column, member: Column) -> tuple[Column, int]:
        """The last block of each member in each step, which is retained as the next one's input; and the largest sum of the others."""
        outputs = np.zeros(len(inside), dtype=bool)
        visits: dict[tuple[int, int], list[int]] = {}
        for block in np.flatnonzero(inside).tolist():
            visits.setdefault((int(self.step_of[block]), int(member[block])), []).append(block)
        largest_bytes = 0
        for visit in visits.values():
            # Blocks are in the order of allocation, and a module allocates its output last.
            outputs[visit[-1]] = True
            largest_bytes = max(largest_bytes, int(self.blocks.block_bytes[visit[:-1]].sum()))
        return outputs, largest_bytes


def _repeated(module: str) -> tuple[str, int] | None:
    """Splits `layers.3.mlp` into `layers.` and 3; None for a path without a number."""
    match = _NUMBERED.match(module)
    return (match[1], int(match[2])) if match else None


def _group_of(module: str) -> str:
    found = _repeated(module)
    return found[0] if found else ""
