"""Runs a model on this rank's part of each batch, and gives the program what it returns for the whole batch.

The split is proved as that of micro-batches is: each example has its own rows in the outputs, or the loss is one mean or sum over them. In the first steps outputs and
gradients are compared with a plain run of the whole batch. Calls without gradients, and batches with fewer examples than there are ranks, run whole on every rank.
"""

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.parameter import is_lazy

from tightfit.effects.ambient import modes_of_program
from tightfit.effects.random_states import TorchRandom
from tightfit.effects.values.fingerprints import paused
from tightfit.effects.values.shared_memory import OneMemory
from tightfit.effects.values.written_past import WrittenPast
from tightfit.errors import ApplyError, TightfitError
from tightfit.ranks.accumulated_part import AccumulatedPart, loss_of
from tightfit.ranks.divided_call import WRITTEN, DividedCall, Joined, Whole
from tightfit.ranks.own_part import OwnPart, PartRun, RaisesInPart
from tightfit.ranks.rank_batch import RankBatch, shares
from tightfit.ranks.rank_group import RankGroup, number_of
from tightfit.ranks.same_memory import Places, one_memory, places_of
from tightfit.ranks.values.content_hash import content_hash
from tightfit.ranks.values.divided_outputs import (
    Unused,
    as_returned,
    means_of,
    numbers_of_terms,
    put_left,
    refuse_marked,
    weights_of,
)
from tightfit.ranks.values.further_weights import FurtherWeights
from tightfit.ranks.values.structures import leaves_of, mapped
from tightfit.techniques.micro_batches.loss_means import LossWatch
from tightfit.techniques.micro_batches.split_forward import (
    OF_MICRO_BATCHES,
    Numbers,
    refuse_code_in_backward,
    refuse_hooks,
)
from tightfit.techniques.wrappers.first_order import Refuse, are_transforms_active
from tightfit.techniques.wrappers.forwards import OnlyHere
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.torch_hooks.node_hooks import moment, on_node_hooks
from tightfit.torch_hooks.saved_tensor_hooks import packs_by_itself

Forward = Callable[..., Any]
# At the host every call is compared between ranks. A card would be waited for: there it is the first calls and then one in so many.
_FIRST_CALLS, _CALLS_BETWEEN = 10, 50
# What is refused so may be for arguments that are read otherwise than they are meant.
_MAY_BE_OF_ARGUMENTS = ("parts of the batch may not give", "the model raises", "the check that parts")
# So often another reading of the arguments is tried where the model raises an exception: a program may catch one in each epoch.
_READINGS = 8


class DividedForward(OnlyHere):
    """The wrapper around a model's forward on one rank of `group`, in micro-batches of at most `micro_batch` examples if that is given. It refers to the model weakly. `refuse` makes the
    error to raise."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: RankGroup,
        *,
        allows_randomness: bool,
        check_steps: int,
        refuse: Refuse,
        micro_batch: int | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._group = group
        self._allows_randomness = allows_randomness
        self._refuse_plainly = refuse
        # What to look at where the call that is under way is refused.
        self._hint = ""
        self._part = OwnPart(model, group, allows_randomness=allows_randomness, refuse=self._refuse)
        self._accumulated: AccumulatedPart | None = None
        if micro_batch is not None:
            self._accumulated = AccumulatedPart(
                model,
                group,
                self._part,
                micro_batch,
                allows_randomness=allows_randomness,
                check_steps=check_steps,
                refuse=self._refuse,
            )
        self._checks_left = self._check_steps = check_steps
        self.has_divided = False
        # How many examples a call but the first had that was too small to be divided; 0 where none was.
        self.fewest = 0
        # The names of arguments that all examples share.
        self._shared: set[str] = set()
        self._num_readings_left = _READINGS
        self._further = FurtherWeights(self._refuse)
        # Of the last call.
        self._memory: OneMemory | None = None
        self._num_calls = 0
        self._begins = moment()
        on_node_hooks(self, is_of_later=True)

    @property
    def model(self) -> torch.nn.Module:
        """The model whose forward this is."""
        model = self._model()
        assert model is not None
        return model

    def before_node_hook(self, hook: object) -> None:
        """Does nothing: `refuse_hooks` asks for them."""

    def __call__(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        # All of these run whole, on every rank alike, which is right and no faster.
        if not torch.is_grad_enabled() or are_transforms_active() or packs_by_itself() or modes_of_program():
            return forward(*args, **kwargs)
        if (
            self._group.is_inside
            or is_looked_at(args, kwargs)
            or not any(p.requires_grad for p in self.model.parameters())
            # Its first forward makes its weights.
            or any(map(is_lazy, self.model.parameters()))
        ):
            return forward(*args, **kwargs)
        try:
            return self._divided(forward, args, kwargs)
        except ApplyError as error:
            raise self._refuse(str(error)) from None

    # torch.compile would take apart the proofs as well: in a model that was compiled as a whole the part runs as it is written.
    @torch._disable_dynamo
    def _divided(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        batch = RankBatch(args, kwargs, shared=self._shared)
        self._num_calls += 1
        self._hint = ""
        if self._memory is not None and self._memory.is_any_written():
            raise self._refuse(WRITTEN)
        self._memory = None
        is_compared = self._agree(batch)
        if batch.num_examples < self._group.size:
            # A first look with one example says nothing of the batches to come.
            self.fewest = batch.num_examples if self._num_calls > 1 else 0
            return forward(*args, **kwargs)
        self._shared |= batch.of_other_rows()
        parts = shares(batch.num_examples, self._group.size)
        try:
            whole = self._whole(forward, batch, args, kwargs) if self._checks_left else None
            if self._accumulated is not None and self._accumulated.is_for(batch.num_examples):
                given = self._accumulated.run(forward, args, kwargs, batch=batch, whole=whole, number=self._num_calls)
                self._end_call()
                return given
            batch, run = self._run_part(forward, batch, parts)
            if self._part.has_proved and whole is None and self._check_steps:
                # Another way through the code, such as a loss that begins later: a proof does not see all of Python's numbers.
                with self._part.state.as_before():
                    whole = self._whole(forward, batch, args, kwargs)
        except RaisesInPart as raised:
            return self._raised(forward, args, kwargs, raised.error)
        if not torch.is_grad_enabled():
            raise self._refuse("the model leaves gradients disabled, and its parts are joined afterwards")
        leaves, own, proved = run.leaves(), parts[self._group.rank], run.proved
        if whole is not None and len(whole.outputs) != len(leaves):
            raise self._refuse("the model returns or leaves behind another number of results for the whole batch")
        if len(leaves) != len(proved.kinds):
            raise self._refuse("the model returns another number of outputs than in the proof")
        places = places_of(leaves, proved.kinds, batch, own, self.model)
        refuse_marked([leaves[at] for at in places.joined], self._refuse)
        call = self._call_of(batch, run, parts, whole, places, is_compared=is_compared)
        refuse_hooks(self.model, self._refuse, since=self._begins, are_on_parts=False)
        code = refuse_code_in_backward(call.outputs, self._refuse)
        if run.is_led and code.checkpoints():
            raise self._refuse(
                "the model decides by values of the batch, in code that a checkpoint of its own runs again: there each part would decide by its own"
            )
        joined = Joined.apply(call, *call.inputs[: len(call.inputs) - call.num_leaves], *batch.wanting)
        call.returned, call.memory = WrittenPast(joined), one_memory(leaves, places, joined, batch)
        self._memory = call.memory
        if call.whole is not None:
            call.whole.compare(joined, call.kinds, self._refuse)
        self._end_call()
        batch.copied.do_to_originals(
            lambda: Unused("the model has put it into an argument (a dict, a list)", self._refuse)
        )
        put_left(
            run.left, proved.kinds, lambda at: places.result(at, joined), len(leaves) - len(run.left), self._refuse
        )
        self._part.end(proved)
        return as_returned(
            run.output, proved.kinds, lambda at: places.result(at, joined), own[1] - own[0], self._refuse
        )

    def _refuse(self, why: str) -> ApplyError:
        is_of_arguments = why.startswith(_MAY_BE_OF_ARGUMENTS)
        return self._refuse_plainly(why.removesuffix(OF_MICRO_BATCHES) + (self._hint if is_of_arguments else ""))

    def _run_part(
        self, forward: Forward, batch: RankBatch, parts: Sequence[tuple[int, int]]
    ) -> tuple[RankBatch, PartRun]:
        """The run of this rank's part. Where parts raise an exception it is tried with arguments shared that have as many rows as there are examples by chance."""
        try:
            self._hint = batch.hint()
            return batch, self._part.run(forward, batch, parts)
        except RaisesInPart as raised:
            if self._num_readings_left <= 0:
                raise
            self._num_readings_left -= 1
            for reading in batch.readings():
                if self._part.state.left:
                    break
                self._hint = reading.hint()
                with contextlib.suppress(RaisesInPart):
                    found = self._part.run(forward, reading, parts)
                    self._shared |= reading.shared
                    return reading, found
            raise raised from None

    def _end_call(self) -> None:
        self._hint = ""
        self.has_divided, self._checks_left = True, max(0, self._checks_left - 1)

    def _raised(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
        """What raises for a part raises for the whole too, with all that the program sees of it, or is refused."""
        told = " ".join(str(error).split())
        if self._part.state.left:
            raise self._refuse(
                f"the model raises {type(error).__name__} ({told}), and by then {self._part.state.left}, which a part of the batch does otherwise than the whole: have it write to no tensor of before"
            ) from error
        forward(*args, **kwargs)
        raise self._refuse(
            f"the model raises {type(error).__name__} for a part of the batch, and not for the whole ({told})"
        ) from error

    def _agree(self, batch: RankBatch) -> bool:
        """Compares the batch, and at times the weights, between the ranks. Whether what follows of this call is compared too."""
        number = self._num_calls
        is_first = number <= _FIRST_CALLS
        is_compared = is_first or not self._group.on_cards or number % _CALLS_BETWEEN == 0
        is_of_weights = is_first or number % _CALLS_BETWEEN == 0
        model = self.model
        tensors = batch.every_tensor()
        shapes = [(tuple(t.shape), t.dtype, t.requires_grad) for t in tensors]
        self._group.agree("a forward pass", {
            "the model that is called, or the order of calls": number_of((type(model).__name__, number, torch.is_grad_enabled(), model.training)),
            "the shape of the batch": number_of(shapes),
            "the batch": content_hash(tensors) if is_compared else 0,
            "what the model is called with besides tensors": number_of(batch.plain),
            "the weights": content_hash([*model.parameters(), *model.buffers(), *self._further.of_before()]) if is_of_weights else 0,
        })  # fmt: skip
        return is_compared

    def _call_of(
        self,
        batch: RankBatch,
        run: PartRun,
        parts: Sequence[tuple[int, int]],
        whole: Whole | None,
        places: Places,
        *,
        is_compared: bool,
    ) -> DividedCall:
        leaves, known, proved = run.leaves(), places.joined, run.proved
        begin, end = parts[self._group.rank]
        counts = numbers_of_terms(proved.kinds, run.watch.terms, end - begin, batch.device)
        of_all = [] if counts is None else self._group.links.of_each(counts)
        assert bool(of_all) == bool(means_of(proved.kinds))
        weights = weights_of(proved.kinds, of_all, run.watch.terms, self._refuse)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        if proved.num_further:
            others = [*self.model.parameters(), *batch.leaves]
            trained += self._further.found([leaves[at] for at in known], others, proved.num_further, run.watch.calls)
        return DividedCall(
            group=self._group,
            refuse=self._refuse,
            number=self._num_calls,
            begin=begin,
            end=end,
            lengths=[stop - start for start, stop in parts],
            kinds=[proved.kinds[at] for at in known],
            weights=[weights[at] for at in known],
            outputs=[leaves[at] for at in known],
            inputs=[*trained, *batch.leaves],
            num_leaves=len(batch.leaves),
            whole=None if whole is None else whole.of(known),
            is_compared=is_compared,
        )

    def _whole(self, forward: Forward, batch: RankBatch, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Whole | None:
        """The outputs of a plain run of the whole batch, at the host, and its arguments that want a gradient; nothing where it cannot be compared."""
        if self._allows_randomness or self._group.on_cards:
            return None
        wanting: list[torch.Tensor] = []

        def leaf(value: Any) -> Any:
            if not (isinstance(value, torch.Tensor) and value.requires_grad):
                # What the model puts on it (`requires_grad_`) is on no tensor of the program's.
                return value.detach() if isinstance(value, torch.Tensor) else value
            wanting.append(value.detach().requires_grad_())
            return wanting[-1]

        drawn, numbers = TorchRandom.now(), Numbers()
        try:
            # With the watch, which refuses what would change by the run: statistics of a batch norm, drawn numbers.
            with (
                self._part.state.unseen() as left_now,
                paused(),
                self._group.inside(),
                LossWatch(1, allows_randomness=False, shares_draws=True) as watch,
                numbers,
            ):
                output = forward(*[mapped(a, leaf) for a in args], **{n: mapped(v, leaf) for n, v in kwargs.items()})
                left = [each.tensor for each in left_now()]
        except TightfitError:
            raise
        except Exception as error:
            raise RaisesInPart(error) from error
        finally:
            drawn.put()
            # What this has cast stays in autocast's cache.
            torch.clear_autocast_cache()
        if watch.failure is not None:
            raise watch.failure
        return Whole(
            outputs=[*leaves_of(output), *left],
            wanting=wanting,
            are_halves=numbers.are_halves,
            unseen=self._part.state.unseen,
            loss=loss_of(output) if self._accumulated is not None else None,
        )
