"""Runs a model that returns its loss on this rank's part of a batch in micro-batches, one after another, as a layout with accumulation asks for.

The parts of all ranks are micro-batches of one batch for `micro_batches` (`techniques/micro_batches`), of which a rank runs its own: each with its backward pass at once, within the forward, so that one
micro-batch's activations are alive at a time. Losses, numbers of terms and gradients are added up over the ranks once, at the end; the backward pass of the loss scales them.
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.autograd import grad  # torch's own, whatever the program puts in its place later

from tightfit.effects.values.value_checks import difference
from tightfit.errors import ApplyError
from tightfit.ranks.divided_call import SPARSE, Whole
from tightfit.ranks.own_part import OwnPart
from tightfit.ranks.rank_batch import RankBatch, shares
from tightfit.ranks.rank_group import RankGroup, number_of
from tightfit.ranks.values.content_hash import content_hash
from tightfit.ranks.values.structures import attributes_of
from tightfit.techniques.micro_batches.split_forward import SplitForward
from tightfit.techniques.micro_batches.split_outputs import Outputs, Sums, find_loss
from tightfit.techniques.wrappers.first_order import Refuse
from tightfit.torch_hooks.saved_tensor_hooks import is_of_checkpoint, programs_hooks

Forward = Callable[..., Any]
_LEAST_SHARE = 1e-3


class RankMicroBatches(RankBatch):
    """A batch of which each of `num_ranks` has a part, in micro-batches of at most `micro_batch` examples."""

    def __init__(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        rank: int,
        num_ranks: int,
        micro_batch: int,
        shared: Collection[str] = (),
    ) -> None:
        super().__init__(args, kwargs, shared=shared)
        self._of_ranks = [
            _cut(begin, end, -(-(end - begin) // micro_batch)) for begin, end in shares(self.num_examples, num_ranks)
        ]
        self._rank = rank
        if any(tensor.requires_grad for tensor in self.tensors()):
            raise ApplyError("an argument requires a gradient, which micro-batches do not compute")
        changeable = [
            type(each).__name__
            for each in (*args, *kwargs.values())
            if isinstance(each, Mapping | list) or attributes_of(each) is not None
        ]
        if changeable:
            raise ApplyError(
                f"an argument is a {changeable[0]}, which the model may change, and each micro-batch has a copy of it: give the model its tensors one by one"
            )

    def parts(self, num_parts: int) -> Iterator[tuple[int, int]]:
        """The micro-batches of all ranks."""
        return (part for parts in self._of_ranks for part in parts)

    def own_parts(self, num_parts: int) -> Iterator[tuple[int, int]]:
        """Those of this rank."""
        return iter(self._of_ranks[self._rank])

    @property
    def lengths(self) -> list[int]:
        """The examples of each rank."""
        return [sum(end - begin for begin, end in parts) for parts in self._of_ranks]


def _cut(begin: int, end: int, num_parts: int) -> list[tuple[int, int]]:
    return [(begin + first, begin + last) for first, last in shares(end - begin, num_parts)]


class AccumulatedPart:
    """The calls of one model, which it refers to weakly. `refuse` makes the error to raise."""

    def __init__(
        self,
        model: torch.nn.Module,
        group: RankGroup,
        part: OwnPart,
        micro_batch: int,
        *,
        allows_randomness: bool,
        check_steps: int,
        refuse: Refuse,
    ) -> None:
        self._group, self._part, self._micro_batch = group, part, micro_batch
        self._refuse_plainly = refuse
        self._allows_randomness = allows_randomness
        self._whole: Whole | None = None
        self._lengths: list[int] = []
        self._number = 0
        self._shared: Collection[str] = ()
        self._split = SplitForward(
            model,
            1,
            allows_randomness=allows_randomness,
            counted=lambda: None,
            refuse=self._refuse,
            check_steps=check_steps,
            batch_of=self._batch_of,
            unseen=part.state.unseen,
            elsewhere=self,
        )

    def is_for(self, num_examples: int) -> bool:
        """Whether a rank's part of so many examples is more than one micro-batch."""
        return -(-num_examples // self._group.size) > self._micro_batch

    def run(
        self,
        forward: Forward,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        *,
        batch: RankBatch,
        whole: Whole | None,
        number: int,
    ) -> Any:
        """What the model returns for the whole batch, whose plain run is `whole` in the first steps; `number` is that of the call."""
        self._whole, self._number, self._shared = whole, number, batch.shared
        hooks = programs_hooks()
        if hooks is not None and is_of_checkpoint(hooks[0]):
            # It would run the model again for the backward pass of each micro-batch, within that.
            raise self._refuse("a checkpoint of the program's is around it, which accumulation makes needless")
        try:
            with self._part.alone(batch.device), self._part.drawing_apart():
                return self._split(forward, *args, **kwargs)
        finally:
            self._whole = None

    def _refuse(self, why: str) -> ApplyError:
        return self._refuse_plainly(
            f"the layout accumulates over micro-batches of {self._micro_batch}, for which the model has to return its loss: {why}"
        )

    def _batch_of(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RankMicroBatches:
        batch = RankMicroBatches(
            args,
            kwargs,
            rank=self._group.rank,
            num_ranks=self._group.size,
            micro_batch=self._micro_batch,
            shared=self._shared,
        )
        self._lengths = batch.lengths
        return batch

    def first_other(self, decisions: Sequence[Any], number: int | None) -> int | None:
        """As `tightfit.techniques.micro_batches.split_forward.PartsElsewhere`, as the next one."""
        return self._part.first_other(decisions, number)

    def combine(self, sums: Sums, outputs: Outputs, parameters: Sequence[torch.Tensor]) -> None:
        """Adds the losses and gradients of all ranks, and puts their rows together."""
        group = self._group
        group.agree("a backward pass", {
            "the set of parameters that have a gradient": number_of([each is None for each in sums.gradients]),
            "what the model returns": number_of([(str(key), key in (outputs.none or ())) for key in outputs.keys]),
        })  # fmt: skip
        if any(each is not None and each.layout is not torch.strided for each in sums.gradients):
            raise self._refuse_plainly(SPARSE)
        factor = sums.combine(group.links.of_each)
        there = [each if factor == 1.0 else each * factor for each in sums.gradients if each is not None]
        summed = iter(group.links.sums(there))
        del there
        sums.gradients = [None if each is None else next(summed) for each in sums.gradients]
        outputs.combine(lambda rows: group.links.rows_of_all(rows, self._lengths, 0), group.links.of_each)
        sums.before_backward = _Agreed(group, self._number)
        if self._whole is not None and self._whole.loss is not None:
            self._compare(self._whole, self._whole.loss, sums, parameters)

    def _compare(self, whole: Whole, plain_loss: torch.Tensor, sums: Sums, parameters: Sequence[torch.Tensor]) -> None:
        """Refuses where the plain run of the whole batch has another loss, or other gradients."""
        with whole.unseen():
            plain = grad(plain_loss, list(parameters), allow_unused=True)
        scale = sums.scale()
        norms = [each.detach().float().norm() for each in plain if each is not None]
        least = float(torch.stack(norms).max()) * _LEAST_SHARE if norms else 0.0
        pairs = [(sums.loss(), plain_loss.detach(), 0.0)]
        for own, other in zip(sums.gradients, plain, strict=True):
            if (own is None) != (other is None):
                raise self._refuse(_DIFFER)
            if own is not None and other is not None:
                pairs.append((own * scale, other, least))
        for one, other, smallest in pairs:
            # A loss in float32 rounds the gradients of weights in float64.
            bound = max(whole.bound(other), whole.bound(plain_loss))
            if difference(one.to(other.dtype), other, bound, smallest) is not None:
                raise self._refuse(_DIFFER)


_DIFFER = "its loss or gradients are not those of the whole batch in a step that was compared: the model mixes the examples of a batch"


class _Agreed:
    """Compares what all ranks run backwards. It refers to nothing of the call."""

    def __init__(self, group: RankGroup, number: int) -> None:
        self._group = weakref.ref(group)
        self._number = number

    def __call__(self, gradient: torch.Tensor | None) -> None:
        group = self._group()
        assert group is not None
        found = 0 if gradient is None or gradient.is_cuda else content_hash([gradient])
        group.agree("a backward pass", {
            "the order of backward passes": self._number, "what the program makes of the model's loss": found
        })  # fmt: skip


def loss_of(output: Any) -> torch.Tensor | None:
    """The loss among what a model returns; None where there is none, which is refused later."""
    try:
        return find_loss(output)[1]
    except ApplyError:
        return None
