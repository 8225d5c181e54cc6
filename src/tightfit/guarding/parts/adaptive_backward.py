"""Forward and backward pass of a batch in parts whose size is found while the run goes on: the gradient is that of the whole batch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from tightfit.effects.random_states import AllRandom
from tightfit.effects.state import DRAWN, Snapshot, differences
from tightfit.errors import UsageError
from tightfit.guarding.attempted_step import run_step
from tightfit.guarding.attempts import Attempts
from tightfit.guarding.memory.out_of_memory import is_out_of_memory
from tightfit.guarding.memory.room import room_on
from tightfit.guarding.named_values import attributes_named_by
from tightfit.guarding.parts.part_sizes import PartSizes
from tightfit.guarding.parts.split_batch import examples_of, num_elements_of, num_examples_of, part_of, unlike_examples
from tightfit.guarding.state.leaf_hooks import has_hooks
from tightfit.runtime.apply import has_plan

Loss = Callable[[Any], torch.Tensor]
Weight = Callable[[Any], Any]
# Of the norm of all gradients, by the coarsest type of a loss or a weight: what sums in another order may differ by.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
_COARSE = 5e-2
_NUM_PROJECTIONS = 4
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


class AdaptiveBackward:
    """Runs batches in parts for one model. `in_use` is the size of the parts of the last batch, 0 before the first."""

    def __init__(self, model: torch.nn.Module, attempts: Attempts) -> None:
        self.in_use = 0
        self._model = model
        self._attempts = attempts
        self._sizes = PartSizes()
        self._num_batches, self._next_check = 0, 1
        # Of the part that runs: its size, and the elements of its examples.
        self._failed = (0, 0)
        self._room = room_on(next((p.device for p in model.parameters()), None))

    def run(self, loss_of: Loss, batch: Any, *, weight: Weight | None, draws_anew: bool) -> torch.Tensor:
        """Adds the gradient of the batch's loss to `grad`, and returns the loss.

        Raises:
            UsageError: the batch cannot be split, or the loss of its parts is not that of the whole.
            torch.OutOfMemoryError: one example has no room.
        """
        self._check_model()
        num_examples = num_examples_of(batch)
        of_step: dict[str, Any] = {"the loss": loss_of, "the batch": batch, "the weight": weight}
        self._num_batches += 1
        # What depends on the data (labels that are left out, say) may come later: in the first batch, the second, the fourth and so on.
        if self._num_batches >= self._next_check and num_examples > 1:
            self._check(loss_of, batch, weight, of_step, draws_anew=draws_anew)
        return run_step(
            self._attempts,
            lambda: self._in_parts(loss_of, batch, num_examples, weight),
            of_step,
            names_data=lambda: "data" in attributes_named_by(loss_of),
            lower=self._lower,
        )

    def _check_model(self) -> None:
        """Raises UsageError where parts of any batch would be another training."""
        if has_plan(self._model):
            raise UsageError(
                "guarded.backward takes no plans: one that updates in the backward pass would do so once for each part; leave the plan out, or use guarded.step"
            )
        norm = next((m for m in self._model.modules() if isinstance(m, _BATCH_NORMS) and m.training), None)
        if norm is not None:
            raise UsageError(
                f"guarded.backward runs a batch in parts, and {type(norm).__name__} takes its statistics from the whole batch: another training"
            )
        if any(map(has_hooks, self._model.parameters())):
            raise UsageError(
                "guarded.backward: a weight has a hook, which would be called with the gradient of each part: change the gradient behind the backward pass"
            )

    def _in_parts(self, loss_of: Loss, batch: Any, num_examples: int, weight: Weight | None) -> torch.Tensor:
        total = num_examples if weight is None else weight(batch)
        num_elements = num_elements_of(batch)
        self._failed = (0, num_elements)
        begin, loss = 0, torch.zeros(())
        while begin < num_examples:
            left = num_examples - begin
            size = self._size(left, num_elements)
            part = part_of(batch, begin, begin + size)
            share = _share(size if weight is None else weight(part), total)
            self._failed = (size, num_elements)
            self.in_use = size if not begin else self.in_use
            # The mean of no terms is not a number, and counts for nothing in the whole.
            if share:
                loss = loss + self._of_part(loss_of, part, share, size, num_elements)
            begin += size
        self._sizes.succeed()
        return loss

    def _size(self, num_left: int, num_elements: int) -> int:
        room = self._room
        free_bytes = None if room is None else room.free_bytes()
        size = self._sizes.choose(num_left, num_elements=num_elements, room_bytes=free_bytes)
        if room is not None and not self._sizes.is_settled(size, num_elements=num_elements):
            return size
        # Alike, where nothing is to be measured: ten examples in parts of four are four, three and three.
        return -(-num_left // -(-num_left // size))

    def _of_part(self, loss_of: Loss, part: Any, share: float, size: int, num_elements: int) -> torch.Tensor:
        found: list[torch.Tensor] = []

        def call() -> None:
            loss = loss_of(part) * share
            found.append(loss.detach())
            loss.backward()

        room = self._room
        if room is None or self._sizes.is_settled(size, num_elements=num_elements):
            call()
        else:
            num_bytes, seconds = room.measured(call)
            self._sizes.note(size, num_elements=num_elements, num_bytes=num_bytes, seconds=seconds)
        return found[0]

    def _lower(self, error: BaseException) -> str:
        """After an out-of-memory error: smaller parts, in words; empty if there are none."""
        size, num_elements = self._failed
        if not size or not is_out_of_memory(error) or not self._sizes.fail(size, num_elements=num_elements):
            return ""
        return f"parts of fewer than {size} examples"

    def _check(
        self,
        loss_of: Loss,
        batch: Any,
        weight: Weight | None,
        of_step: dict[str, Any],
        *,
        draws_anew: bool,
    ) -> None:
        """Compares the gradient of two examples with that of one and one.

        Raises:
            UsageError: they differ.
        """
        two = examples_of(batch, *unlike_examples(batch))
        ones = [part_of(two, 0, 1), part_of(two, 1, 2)]
        weights = [1.0, 1.0] if weight is None else [float(weight(one)) for one in ones]
        if not any(weights):
            # The next batch may tell.
            return
        found: list[torch.Tensor] = []
        before = AllRandom.now()
        attempt = self._attempts.begin(of_step, names_data=lambda: True)
        try:
            found.append(self._projected([(loss_of, two, 1)]))
            # What the first call makes and keeps is no matter, and what each call writes is written once for each part.
            first = self._attempts.now(attempt)
            total = 2.0 if weight is None else weight(two)
            shares = [(loss_of, one, _share(each, total)) for one, each in zip(ones, weights, strict=True) if each]
            found.append(self._projected(shares))
            written = _changed(first, self._attempts.now(attempt))
            is_random = not AllRandom.now().is_same(before)
        finally:
            self._attempts.leave(attempt)
            why_not = self._attempts.undo(attempt)
        if why_not:
            raise UsageError(f"guarded.backward cannot try two examples and take that back: {why_not}")
        if written:
            raise UsageError(
                f"guarded.backward: the loss function writes to what is there for the next call ({written}), and would do so once for each part"
            )
        if is_random:
            if not draws_anew:
                raise UsageError(
                    "guarded.backward: the model draws random numbers (dropout), which are others in parts of a batch than in the whole; give draws_anew=True if they may be"
                )
        elif not (off := _distance(*found)) <= _tolerance(self._model):
            raise UsageError(
                f"guarded.backward: the gradient of two examples is not that of one and one ({off:.1e} of its norm): the loss is no mean over examples (give `weight`, which says how many terms a part has), or examples mix"
            )
        self._next_check = 2 * self._num_batches

    def _projected(self, parts: list[tuple[Loss, Any, Any]]) -> torch.Tensor:
        """The gradient of a sum of losses, of which no second copy is held: of each weight's its products with some vectors of ones and minus ones."""
        trained = [p for p in self._model.parameters() if p.requires_grad]
        sums = torch.zeros(len(trained), _NUM_PROJECTIONS, dtype=torch.float64)
        for loss_of, part, share in parts:
            with torch.enable_grad():
                found = torch.autograd.grad(loss_of(part) * share, trained, allow_unused=True)
            for number, gradient in enumerate(found):
                if gradient is not None:
                    sums[number] += _products(gradient.detach(), number)
            del found
        return sums


def _products(gradient: torch.Tensor, seed: int) -> torch.Tensor:
    generator = torch.Generator(gradient.device).manual_seed(seed)
    dense = gradient.to_dense() if gradient.layout != torch.strided else gradient
    kind = torch.float64 if dense.dtype == torch.float64 else torch.float32
    signs = (torch.empty_like(dense, dtype=kind).bernoulli_(generator=generator) for _ in range(_NUM_PROJECTIONS))
    return torch.stack([(2 * each - 1).mul_(dense).sum(dtype=torch.float64).cpu() for each in signs])


def _changed(first: Sequence[Snapshot], second: Sequence[Snapshot]) -> str:
    """The first change between two states, but for random numbers; empty if there is none."""
    found = (str(each) for pair in zip(first, second, strict=True) for each in differences(*pair))
    return next((text for text in found if DRAWN not in text), "")


def _share(weight: Any, total: Any) -> float:
    return float(weight) / float(total) if total else float("nan")


def _distance(one: torch.Tensor, other: torch.Tensor) -> float:
    """How far two gradients are from each other, as a share of the norm of the first."""
    apart, norm = float((one - other).norm()), float(one.norm())
    return apart / norm if norm else float(apart > 0)


def _tolerance(model: torch.nn.Module) -> float:
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    is_coarse = torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")
    return _COARSE if is_coarse else max((_TOLERANCES.get(t, _COARSE) for t in types), default=_COARSE)
