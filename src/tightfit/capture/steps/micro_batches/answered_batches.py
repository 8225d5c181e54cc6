"""Answers micro-batches like one that was traced, whose rows it writes to the tape again as they are run forwards and backwards.

What is freed when the program drops it has a storage of its own: what is returned, and what the graph or autocast keeps. All else is rows alone.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from tightfit.capture.dispatch.virtual import VirtualGpu
from tightfit.capture.steps.micro_batches.answered_call import Layout, answer
from tightfit.capture.steps.micro_batches.deferred_results import Gone
from tightfit.capture.steps.micro_batches.graph_entries import entries
from tightfit.capture.steps.micro_batches.micro_batch import Kept, MicroBatch
from tightfit.capture.steps.micro_batches.repeated_rows import RepeatedRows, Whose, write_again


@dataclasses.dataclass(slots=True, kw_only=True)
class _Answered:
    """A call that was answered; its node, with the sequence number `node`, holds this. `held` are the storages of tensors that the graph of a call that is run holds
    until its backward pass frees them, `kept` those that go with it, in the `order` in which they went. `are_gone` is of the results that are not computed.
    """

    micro_batch: MicroBatch
    order: tuple[Kept, ...]
    given: tuple[int, ...]
    first_storage: int
    node: int = -1
    held: list[torch.UntypedStorage] = dataclasses.field(default_factory=list)
    kept: list[torch.UntypedStorage | None] = dataclasses.field(default_factory=list)
    are_gone: Sequence[Gone] = ()
    has_run: bool = False


class AnsweredBatches:
    """The answers; `differs` ends the trace where the program goes on otherwise than it did after the one that was traced."""

    def __init__(self, gpu: VirtualGpu, differs: Callable[[], NoReturn]) -> None:
        self._gpu = gpu
        self._differs = differs
        self._waiting: _Answered | None = None
        self._casts: list[torch.UntypedStorage] = []
        with torch._C._DisableTorchDispatch():
            self._start = torch.zeros((), requires_grad=True, device="cpu")

    @property
    def is_waiting(self) -> bool:
        """Whether the backward pass of a call that was answered has not run."""
        return self._waiting is not None

    def install(self) -> None:
        """Follows the end of autocast contexts, where copies of weights in half precision are freed."""
        self._gpu.casts.when_cleared.append(self._casts.clear)

    def call(self, micro_batch: MicroBatch, order: tuple[Kept, ...], given: Sequence[torch.Tensor]) -> Any:
        """The result of a call like that of `micro_batch`, with these tensors as arguments."""
        first = write_again(self._gpu.recorder, micro_batch.forward)
        answered = _Answered(micro_batch=micro_batch, order=order, given=self.storages_of(given), first_storage=first)
        # Python drops the last of a list first.
        answered.kept = [
            self._storage(micro_batch.forward, number, first) if is_forward else None
            for is_forward, number in reversed(order)
        ]
        self._casts += [self._storage(micro_batch.forward, number, first) for number in sorted(micro_batch.casts)]

        def run_backward(gradients: Sequence[Layout | None]) -> None:
            self._run_backward(answered, tuple(gradients))

        result, answered.node, made, answered.are_gone = answer(
            self._gpu, micro_batch.returned, first, self._start, run_backward, self._differs
        )
        held = zip(made, micro_batch.returned.tensors(), strict=True)
        answered.held = [storage for storage, tensor in held if tensor.storage in micro_batch.ends_with]
        answered.held += [given[number].untyped_storage() for number in micro_batch.backward.freed(Whose.GIVEN)]
        self._waiting = answered
        return result

    def backward(self, roots: Sequence[Any], run: Callable[[], Any], *, is_plain: bool) -> Any:
        """Runs the backward pass of the call that is waited for; `is_plain`: its graph is not kept, and gradients are accumulated."""
        waiting = self._waiting
        assert waiting is not None
        # What is not computed holds memory until it goes, and had gone by now.
        is_over = all(is_gone() for is_gone in waiting.are_gone)
        if not (is_plain and is_over and entries(roots, waiting.node, waiting.node + 1)):
            self._differs()
        out = run()
        self.settle()
        return out

    def settle(self) -> None:
        """Whatever comes next, a call that was answered must have been run backwards by now."""
        waiting, self._waiting = self._waiting, None
        if waiting is not None and not waiting.has_run:
            self._differs()

    def storages_of(self, tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
        """The tape's indices of the storages of tensors, -1 for one that it does not have."""
        found = map(self._gpu.storages.index_of, tensors)
        return tuple(-1 if storage is None else storage for storage in found)

    def _run_backward(self, answered: _Answered, gradients: tuple[Layout | None, ...]) -> None:
        recorder, micro_batch = self._gpu.recorder, answered.micro_batch
        if gradients != micro_batch.gradients or answered.has_run:
            self._differs()
        answered.has_run = True
        first = len(recorder.storages["num_bytes"])
        freed = {answered.first_storage + number for number in micro_batch.ends_with}
        freed |= {first + number for number in micro_batch.between}
        freed |= {answered.given[number] for number in micro_batch.backward.freed(Whose.GIVEN)}
        if self._gpu.storages.unfollow(freed) != freed:
            self._differs()
        write_again(recorder, micro_batch.backward, answered.first_storage, answered.given)
        answered.held.clear()
        for at, (is_forward, number) in enumerate(reversed(answered.order)):
            if not is_forward:
                answered.kept[at] = self._storage(micro_batch.backward, number, first)

    def _storage(self, rows: RepeatedRows, number: int, first: int) -> torch.UntypedStorage:
        """A storage that the tape has as allocated, among `rows` whose first one has the index `first`; it goes when the caller drops it."""
        tensor = self._gpu.empty((rows.num_bytes(number),), (1,), torch.uint8)
        self._gpu.storages.follow(tensor, first + number)
        return tensor.untyped_storage()
