"""What a step of the user's function reads and writes, taken at its beginning, so that the step can be taken back and run again.

References and versions are taken of everything that the models and the function can reach (`tightfit.effects`), and copies only of tensors that steps
were seen to write, such as the statistics of batch normalisation: of weights and optimizer states none are needed, since nothing writes them before
the optimizer's step, and a step that fails after it is not run again. What cannot be restored is said, and never guessed.
"""

import itertools
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tightfit.effects.ambient import Ambient
from tightfit.effects.random_states import TorchRandom
from tightfit.effects.state import (
    DRAWN,
    RegionState,
    Snapshot,
    StateDifference,
    again,
    differences,
    is_moved,
    restore,
    rewind,
    snapshot_of_arguments,
)
from tightfit.effects.values.contents import SMALL_BYTES
from tightfit.guarding.state.called_hooks import called_hooks
from tightfit.guarding.state.copied_tensors import Copied
from tightfit.guarding.state.drawn_items import DrawnItem, drawn_item, snapshot_of_item
from tightfit.guarding.state.leaf_hooks import LeafHooks
from tightfit.guarding.state.optimizer_settings import OptimizerSettings, states_beside_weights
from tightfit.guarding.state.remembered_results import RememberedResults
from tightfit.guarding.state.step_gradients import StepGradients
from tightfit.guarding.state.tensor_sums import TensorSums

# In the first steps every tensor of the state but weights is copied, up to these bytes: which are written is not yet known.
_FIRST_STEPS = 2
_MOST_BYTES_ON_CARD = 64 << 20
# What a step writes only after these is not copied: it cannot be taken back.
_STEPS_TO_LEARN = 50
_WRITTEN = "was written to"


class StepBeginning:
    """The state at the beginning of one step. It is kept until the step is over."""

    def __init__(
        self,
        snapshots: list[Snapshot],
        copies: Mapping[int, Copied],
        parameters: list[torch.nn.Parameter],
        leaves: list[torch.Tensor],
        settings: OptimizerSettings,
        sums: TensorSums,
        *,
        num_of_named: int,
    ) -> None:
        self.is_learned = False
        self.snapshots = snapshots
        self.of_named = snapshots[:num_of_named]
        """Those of what code names, and of hooks; the others are of modules."""
        self.settings = settings
        self.gradients = StepGradients(leaves)
        self._hooks = LeafHooks(leaves)
        self._remembered = RememberedResults(snapshots)
        self.sums = sums
        self._copies = copies
        self._parameters = {id(parameter) for parameter in parameters}
        # A snapshot leaves out those that a plan streams.
        self._versions = [(parameter, parameter._version) for parameter in parameters]
        self._random = TorchRandom.now()
        self._ambient = Ambient.now()
        self._takes_gradients = torch.is_grad_enabled()
        self.drawn: list[DrawnItem] = []
        """What the step was handed by what is asked for its batches, in order."""

    def changes(self, now: list[Snapshot]) -> list[StateDifference]:
        """What was changed until the snapshots `now`, in all that models and function can reach."""
        found: dict[tuple[str, str], StateDifference] = {}
        for before, after in zip(self.snapshots, now, strict=True):
            for difference in differences(before, after):
                found.setdefault((difference.path, difference.what), difference)
        return list(found.values())

    def obstacle(self, now: list[Snapshot]) -> str:
        """Why the state cannot be what it was; empty if it can be restored."""
        if lost := self._lost(self.changes(now), self._copies):
            return lost
        for item in self.drawn:
            if lost := item.why_not or self._lost(item.changes(), {**self._copies, **item.copies}):
                return lost
        if any(parameter._version != version for parameter, version in self._versions):
            return "weights had been updated in it already"
        if any(c.tensor.layout == torch.strided and c.tensor.shape != c.copy.shape for c in self._copies.values()):
            return "a tensor was given another shape in place, which cannot be taken back"
        return self._written_past() or self._remembered.obstacle() or self.gradients.obstacle()

    def _lost(self, changes: Iterable[StateDifference], copies: Mapping[int, Copied]) -> str:
        """Which of the changes cannot be taken back; empty if all can."""
        for change in changes:
            if not change.is_in_place or change.is_rewound:
                continue
            if change.tensor is not None and id(change.tensor) in self._parameters:
                return f"weights had been updated in it already ({change})"
            if id(change.tensor) not in copies or change.what != _WRITTEN:
                # Of arrays that are too large to be copied both are said: they are looked at as generators are.
                told = str(change).replace(DRAWN, f"{DRAWN} or written to")
                return f"{told}, which cannot be taken back"
        return ""

    def _written_past(self) -> str:
        """Which tensor was written to past its version, and cannot be restored; empty if none."""
        for path, tensor in self.sums.written_past():
            if id(tensor) in self._parameters:
                return "weights had been updated in it already (by their `data`)"
            if id(tensor) not in self._copies:
                return f"{path} was written to by its `data`, which cannot be taken back"
        return ""

    def restore(self) -> None:
        """Restores everything: values, objects, gradients, and random states. Only where there is no `obstacle`."""
        for item in reversed(self.drawn):
            item.restore()
        for snapshot in self.snapshots:
            restore(snapshot)
            rewind(snapshot)
        for copied in self._copies.values():
            copied.put()
        self._remembered.restore()
        self.settings.restore()
        self.gradients.restore()
        self._hooks.restore()
        self._ambient.put()
        torch.set_grad_enabled(self._takes_gradients)
        self._random.put()


class StepStates:
    """Takes the beginnings of the steps of one loop, and learns which tensors its steps write before they update weights."""

    def __init__(self, model: torch.nn.Module | None, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        # Without a model: those that steps reach.
        self._model = model
        self._optimizers = optimizers
        # The regions of all modules that steps were seen to reach, with the modules.
        self._regions: dict[int, tuple[weakref.ref[torch.nn.Module], RegionState]] = {}
        self._written: set[str] = set()
        # Attempts that failed before they had written all that they write do not count.
        self._num_learned = 0
        self._is_updated_by_hand = False

    def begin(
        self, reached: Mapping[str, Any], *, attributes: frozenset[str], names_data: Callable[[], bool]
    ) -> StepBeginning:
        """The state before a step that reaches these values, by name, and names these attributes of Python modules among them.

        `names_data`: whether its code names an attribute `data`.
        """
        of_function = snapshot_of_arguments(reached, attributes=attributes, reads_weights=False, of_libraries=True)
        known = [] if self._model is None else [self._model]
        reached_modules = (reference() for reference in of_function.reach.modules)
        # By identity: a module that was compiled has a length only where the one inside has.
        self._know([*known, *(module for module in reached_modules if module is not None)])
        parameters = self._parameters()
        hooks = called_hooks(parameters, self._optimizers)
        of_hooks = [snapshot_of_arguments(hooks, reads_weights=False, of_libraries=True)] if hooks else []
        of_named = [of_function, *of_hooks]
        snapshots = [*of_named, *self._of_modules()]
        return StepBeginning(
            snapshots,
            self._copies(snapshots, {id(p) for p in parameters}),
            parameters,
            leaves_of(parameters, snapshots),
            OptimizerSettings(self._optimizers),
            self._sums(parameters, snapshots, names_data),
            num_of_named=len(of_named),
        )

    def _sums(
        self,
        parameters: Sequence[torch.nn.Parameter],
        snapshots: Sequence[Snapshot],
        names_data: Callable[[], bool],
    ) -> TensorSums:
        """Of all that the step reaches, where it may write past torch; else of weights at the host."""
        if self._num_learned < _FIRST_STEPS or self._is_updated_by_hand or names_data():
            return TensorSums(_readable(parameters, snapshots, states_beside_weights(self._optimizers)), is_of_all=True)
        return TensorSums(_large_at_host(parameters, snapshots), is_of_all=False)

    def now(self, beginning: StepBeginning) -> list[Snapshot]:
        """The state now, of what the beginning has."""
        return [*(again(each, reads_weights=False) for each in beginning.of_named), *self._of_modules()]

    def drew(self, beginning: StepBeginning, before: list[Snapshot], item: Any) -> DrawnItem:
        """The step has asked for a batch, and got this one; `before` is the state at that time."""
        after = self.now(beginning)
        made = snapshot_of_item(item, before, after)
        copies = self._copies([made], {id(p) for p in self._parameters()})
        return drawn_item(made, copies, before, after)

    def obstacle(self, beginning: StepBeginning) -> str:
        """Why the state at the beginning cannot be restored; empty if it can."""
        if any(snapshot.reach.is_cut for snapshot in beginning.snapshots):
            return "it refers to more objects than can be inspected"
        return beginning.settings.obstacle(self._optimizers) or beginning.obstacle(self.now(beginning))

    def learn(self, beginning: StepBeginning, *, is_update: bool) -> None:
        """Before the first update of a step, or at its end where it has none: remembers which tensors it has written until here. Later steps copy them when they begin."""
        # Later a card would be waited for, and the host would read all weights once more.
        is_read = self._num_learned < _FIRST_STEPS or (
            beginning.sums.is_of_all and not beginning.sums.is_on_card and self._num_learned <= _STEPS_TO_LEARN
        )
        if is_read and (past := list(beginning.sums.written_past())):
            self._is_updated_by_hand = True
            self._written.update(path for path, _ in past)
        # A turn before the first batch is there, while a replay buffer fills, writes nothing of what a step writes.
        if not beginning.is_learned and (is_update or beginning.gradients.is_seen):
            beginning.is_learned = True
            self._num_learned += 1
        if self._num_learned > _STEPS_TO_LEARN:
            return
        of_items = (change for item in beginning.drawn for change in item.changes())
        for change in itertools.chain(beginning.changes(self.now(beginning)), of_items):
            if change.tensor is not None and change.what == _WRITTEN:
                self._written.add(change.path)

    def _know(self, modules: Sequence[torch.nn.Module]) -> None:
        """Takes each module that is not inside of another one."""
        inside = {id(part) for module in modules for part in module.modules() if part is not module}
        inside -= {id(self._model)} if self._model is not None else set()
        outermost = {id(module): module for module in modules if id(module) not in inside}
        if outermost.keys() != self._regions.keys():
            known = self._regions
            self._regions = {
                key: known[key] if key in known else (weakref.ref(module), RegionState())
                for key, module in outermost.items()
            }

    def _of_modules(self) -> list[Snapshot]:
        living = [(reference(), region) for reference, region in self._regions.values()]
        return [region.snapshot(module, reads_weights=False) for module, region in living if module is not None]

    def _parameters(self) -> list[torch.nn.Parameter]:
        held = [p for optimizer in self._optimizers for group in optimizer.param_groups for p in group["params"]]
        modules = [reference() for reference, _ in self._regions.values()]
        held += [p for module in modules if module is not None for p in module.parameters()]
        return list({id(p): p for p in held if not is_lazy(p)}.values())

    def _copies(self, snapshots: list[Snapshot], parameters: set[int]) -> dict[int, Copied]:
        is_first = self._num_learned < _FIRST_STEPS
        copies: dict[int, Copied] = {}
        num_bytes = 0
        for snapshot in snapshots:
            for path, tensor in zip(snapshot.reach.tensor_paths, snapshot.reach.tensors, strict=True):
                if id(tensor) in parameters or id(tensor) in copies or is_lazy(tensor) or tensor.is_inference():
                    continue
                if is_first or path in self._written or _is_statistics(tensor):
                    num_bytes += tensor.nbytes if tensor.layout == torch.strided else 0
                    copies[id(tensor)] = Copied.of(tensor, on_card=num_bytes <= _MOST_BYTES_ON_CARD)
        return copies


def leaves_of(parameters: Sequence[torch.nn.Parameter], snapshots: Sequence[Snapshot]) -> list[torch.Tensor]:
    """All that gradients may be added to: parameters, and what else the step reaches, such as a batch that it takes gradients for."""
    reached = (tensor for snapshot in snapshots for tensor in snapshot.reach.tensors if not is_lazy(tensor))
    floating = (t for t in reached if (t.is_floating_point() or t.is_complex()) and t.is_leaf and not t.is_inference())
    return list({id(tensor): tensor for tensor in (*parameters, *floating)}.values())


def _readable(
    parameters: Sequence[torch.nn.Parameter], snapshots: Sequence[Snapshot], states: Iterable[torch.Tensor]
) -> dict[int, tuple[str, torch.Tensor]]:
    """All tensors that the step reaches and whose bits can be read, and parameters that snapshots leave out, by their numbers, with their paths."""
    found: dict[int, tuple[str, torch.Tensor]] = {id(parameter): ("", parameter) for parameter in parameters}
    found |= {id(state): ("a state of an optimizer", state) for state in states if not state.is_inference()}
    for snapshot in snapshots:
        for path, tensor in zip(snapshot.reach.tensor_paths, snapshot.reach.tensors, strict=True):
            if not is_lazy(tensor) and not tensor.is_inference():
                found.setdefault(id(tensor), (path, tensor))
    return found


def _large_at_host(
    parameters: Sequence[torch.nn.Parameter], snapshots: Sequence[Snapshot]
) -> dict[int, tuple[str, torch.Tensor]]:
    """The weights whose bits snapshots do not read, as a sum of words takes a third of the time."""
    reached = (tensor for snapshot in snapshots for tensor in snapshot.reach.tensors)
    weights = (t for t in itertools.chain(parameters, reached) if t.device.type == "cpu" and t.requires_grad)
    return {id(t): ("", t) for t in weights if t.is_leaf and not is_moved(t) and not _is_small(t)}


def _is_small(tensor: torch.Tensor) -> bool:
    """Whether snapshots read all bits of a tensor at the host."""
    return tensor.layout != torch.strided or tensor.nbytes <= SMALL_BYTES


def _is_statistics(tensor: torch.Tensor) -> bool:
    """Whether it may be a running mean or variance: batch normalisation writes to these without counting it in their versions."""
    return tensor.ndim == 1 and tensor.is_floating_point()
