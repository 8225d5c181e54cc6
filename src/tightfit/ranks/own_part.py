"""Runs a model on the rows of one rank, with a proof that it gives for them what it gives in the whole batch."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from tightfit.effects.call_trails import operators_at
from tightfit.effects.graph_shapes import graph_shape
from tightfit.effects.independence.left_tensors import LeftTensor
from tightfit.effects.outside_calls import without_outside_calls
from tightfit.effects.random_states import TorchRandom
from tightfit.effects.reads import Reads
from tightfit.errors import TightfitError
from tightfit.ranks.rank_batch import RankBatch
from tightfit.ranks.rank_group import RankGroup, number_of
from tightfit.ranks.values.divided_outputs import ProvedCall, judged
from tightfit.ranks.values.part_state import PartState
from tightfit.ranks.values.structures import leaves_of
from tightfit.techniques.micro_batches.example_wise_check import BatchProofs, Proved
from tightfit.techniques.micro_batches.led_parts import values_read
from tightfit.techniques.micro_batches.loss_means import Decision, LossWatch
from tightfit.techniques.micro_batches.split_forward import (
    ASKS_FOR_GRADIENT,
    is_gradient_asked,
    looking,
    no_steps,
)
from tightfit.techniques.wrappers.first_order import Refuse

Forward = Callable[..., Any]
_COMPARED_DECISIONS = 16
# No number of a decision; each rank has another, so that it is one in which they differ.
_APART = -2
_HAS_RAISED = -3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PartRun:
    """The output of a part, its watch and its proof, what it has left behind, and whether it was led by what the whole batch decides."""

    output: Any
    watch: LossWatch
    proved: ProvedCall
    left: list[LeftTensor]
    is_led: bool

    def leaves(self) -> list[Any]:
        """What it has returned, and then what it has left behind."""
        return [*leaves_of(self.output), *(each.tensor for each in self.left)]


class RaisesInPart(Exception):
    """The program's code has raised an exception, the cause of this one, in a run that was not of the whole batch, or beside the program."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class OwnPart:
    """The runs of one model on this rank's rows. It refers to the model weakly. `refuse` makes the error to raise."""

    def __init__(self, model: torch.nn.Module, group: RankGroup, *, allows_randomness: bool, refuse: Refuse) -> None:
        self._model = weakref.ref(model)
        self._group = group
        self._allows_randomness = allows_randomness
        self._refuse = refuse
        self.state = PartState(model, refuse)
        # Whether the last run went a way that was not proved before.
        self.has_proved = False
        self._proofs = BatchProofs(
            model,
            allows_randomness=allows_randomness,
            refuse=refuse,
            unseen=self.state.unseen,
            judge=judged,
            is_alone=True,
        )

    @property
    def model(self) -> torch.nn.Module:
        """The model that is run."""
        model = self._model()
        assert model is not None
        return model

    def run(self, forward: Forward, batch: RankBatch, parts: Sequence[tuple[int, int]]) -> PartRun:
        """The run of the rank's part; where parts decide otherwise than each other it is run once more, led by what the whole batch decides."""
        with self.alone(batch.device), self.drawing_apart():
            return self._run_led(forward, batch, parts)

    def _run_led(self, forward: Forward, batch: RankBatch, parts: Sequence[tuple[int, int]]) -> PartRun:
        led: tuple[Decision, ...] = ()
        self.has_proved = False
        while True:
            self.state.begin()
            try:
                output, watch, values, known = self._once(forward, batch, parts, led)
            except RaisesInPart as error:
                # The others may have run through: all go on as one that has not.
                self.first_other([], has_raised=True)
                self.state.put_back(has_raised=True)
                raise error from None
            number = self.first_other(watch.decisions)
            if number is None:
                left = self.state.left_tensors()
                proved = self._proved(forward, batch, parts, led, output, watch, values, known, left)
                return PartRun(output=output, watch=watch, proved=proved, left=left, is_led=bool(led))
            del output
            self.state.put_back(has_raised=number == _HAS_RAISED)
            if number == _HAS_RAISED:
                raise RaisesInPart(RuntimeError("as another rank's part does"))
            found = None if number < 0 else self._proofs.decisions_of_whole(forward, batch, number)
            if found is None or len(found) <= len(led):
                raise self._refuse(
                    "the model branches on values of the batch, and takes different branches for different parts"
                )
            led = found

    def first_other(
        self, decisions: Sequence[Any], number: int | None = None, *, has_raised: bool = False
    ) -> int | None:
        """The number of the first decision that is not the same on all ranks; None where all are, -1 where it comes after those that are looked at one by one, and -3 where a rank's
        part `has_raised` an exception. `number` is that of one that is not the same in all parts of this rank."""
        self._group.agree("the end of a forward pass", {})
        found = [number_of(each) for each in decisions[:_COMPARED_DECISIONS]]
        row = [*found, *[-1] * (_COMPARED_DECISIONS - len(found)), number_of(list(decisions))]
        if number is not None:
            row[min(number, _COMPARED_DECISIONS)] = _APART - self._group.rank
        row.append(int(has_raised))
        rows = [each.tolist() for each in self._group.links.of_each(torch.tensor(row, dtype=torch.int64))]
        if any(each.pop() for each in rows):
            return _HAS_RAISED
        if all(each == rows[0] for each in rows):
            return None
        differing = (at for at in range(_COMPARED_DECISIONS) if len({each[at] for each in rows}) > 1)
        return next(differing, -1)

    def _once(
        self,
        forward: Forward,
        batch: RankBatch,
        parts: Sequence[tuple[int, int]],
        led: Sequence[Decision],
    ) -> tuple[Any, LossWatch, list[Any] | None, Proved | None]:
        """The output of the part, its watch, and a proof that may hold for it, or else the values that it has read."""
        begin, end = parts[self._group.rank]
        known = self._proofs.of(batch, parts)
        args, kwargs = batch.own_part(begin, end)
        watch = LossWatch(
            end - begin,
            allows_randomness=self._allows_randomness,
            led=led,
            given=batch.tensors(),
            shares_draws=True,
            has_divisors=True,
        )
        reading = Reads() if known is None else contextlib.nullcontext()
        try:
            # Operators are noted as they are called, and not as another mode hands them on.
            with watch, reading as reads, operators_at(batch.device, watch.calls):
                output = forward(*args, **kwargs)
        except TightfitError:
            raise
        except Exception as error:
            raise RaisesInPart(error) from error
        if watch.failure is not None:
            raise watch.failure
        if is_gradient_asked((args, kwargs), batch.tensors()):
            raise self._refuse(f"{ASKS_FOR_GRADIENT}, and has rows of it: have it ask for that of x.detach()")
        return output, watch, None if reads is None else reads.values, known

    def _proved(
        self,
        forward: Forward,
        batch: RankBatch,
        parts: Sequence[tuple[int, int]],
        led: Sequence[Decision],
        output: Any,
        watch: LossWatch,
        values: list[Any] | None,
        proved: Proved | None,
        left: Sequence[LeftTensor],
    ) -> ProvedCall:
        begin, end = parts[self._group.rank]
        # What was proved of parts that are led holds for no others: they may read what depends on the rows.
        decided = [len(led), *watch.decisions, *(each.path for each in left)]
        graphs = [graph_shape(leaf.grad_fn) for leaf in leaves_of(output) if isinstance(leaf, torch.Tensor)]
        way = (end - begin, hash(tuple(graphs)), watch.calls.number())
        if proved is not None and not proved.holds_for(decided, way):
            proved = self._proofs.with_decisions(batch, parts, decided, way)
            if proved is None:
                # What it draws, it has to draw again, and what it counts begins where it did.
                again = self.state.as_before() if self.state.has_moved() else contextlib.nullcontext()
                with looking(self._refuse), again:
                    values = values_read(forward, batch, (begin, end), led, unseen=self.state.unseen)
        if proved is None:
            self.has_proved = True
            # What a forward leaves behind that is not made of the examples is left once on each rank, as it is in the run on one card.
            with looking(self._refuse):
                proved = self._proofs.prove(forward, batch, parts, decided, values, way, may_leave=True, led=led)
        assert isinstance(proved, ProvedCall)
        if list(proved.left) != [each.path for each in left]:
            raise self._refuse("the model leaves other tensors behind in a part of the batch than in the whole")
        return proved

    def end(self, proved: ProvedCall) -> None:
        """What the part has left behind was put together."""
        self.state.end()
        if proved.left and not proved.is_of_first:
            self._proofs.begin_anew()

    @contextlib.contextmanager
    def alone(self, device: torch.device) -> Iterator[None]:
        """Around a run of the model: models inside are not divided once more, and what each rank would do to files and optimizers is refused."""
        is_watched = device.type == "cpu" or self._proofs.names_outside
        outside = without_outside_calls(lambda why: self._refuse(f"the model {why}"), is_on=is_watched)
        with outside, no_steps(self._refuse, self.model), self._group.inside():
            yield

    @contextlib.contextmanager
    def drawing_apart(self) -> Iterator[None]:
        """Where random numbers may be drawn anew, each rank draws its own, and all go on with the same afterwards."""
        if not self._allows_randomness:
            yield
            return
        seed = int(torch.randint(0, 2**62, ()))
        after = TorchRandom.now()
        torch.manual_seed(seed + self._group.rank)
        try:
            yield
        finally:
            after.put()
