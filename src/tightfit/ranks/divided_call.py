"""One call of a model that was divided over the ranks: its outputs for the whole batch, and its backward pass.

For autograd it is one function of the parameters (and of arguments that want a gradient), the same on all ranks. Its backward pass runs that of this rank's part,
and returns the sums over the ranks: whoever reads a gradient, clips it or scales it has that of the whole batch.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.autograd import grad  # torch's own, whatever the program puts in its place later

from tightfit.effects.values.shared_memory import OneMemory
from tightfit.effects.values.value_checks import bound_for, difference
from tightfit.effects.values.written_past import WrittenPast
from tightfit.engine.weights.streamed_gradient import streamed_gradient_of
from tightfit.errors import ApplyError, TightfitError
from tightfit.ranks.rank_group import RankGroup, number_of
from tightfit.ranks.sharded.streamed_sums import BY_NAME, StreamedSums
from tightfit.ranks.values.content_hash import content_hash
from tightfit.ranks.values.divided_outputs import Kind
from tightfit.techniques.wrappers.first_order import Refuse, first_order
from tightfit.torch_hooks.backward import BackwardPass, keeps_graph, of_a_part

BESIDE_LOSS = (
    "the program asks for the gradient of a model output other than the loss (a hook, retain_grad, "
    "autograd.grad), and here the gradient of the loss does not flow through it"
)
BESIDE_OTHERS = "the program asks for the gradient of one of several results of the model (a hook, retain_grad, autograd.grad), and that of the others does not go through it here"
WRITTEN = "the program writes to what the model has returned, which in a plain run is the memory of another of its results or arguments, and is a copy here"
SPARSE = "a gradient is sparse, and sums over ranks are of dense ones"
# What `register_multi_grad_hook(mode="any")` puts on each of its tensors (torch/autograd/graph.py).
_OF_THE_FIRST = "wrapped_fn"
# A gradient of less than this share of all of them is compared with that share: one that is zero but for rounding differs from itself.
_LEAST_SHARE = 1e-3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Whole:
    """A plain run of the whole batch: its outputs, the loss among them where that is asked for, its arguments that want a gradient, and whether it computed in half precision. Its backward pass is to be
    run inside of `unseen()`, which takes back what it does to the model's state."""

    outputs: list[Any]
    wanting: list[torch.Tensor]
    are_halves: bool
    unseen: Callable[[], contextlib.AbstractContextManager[Any]]
    loss: torch.Tensor | None = None

    def of(self, known: Sequence[int]) -> "Whole":
        """With these outputs alone."""
        return dataclasses.replace(self, outputs=[self.outputs[at] for at in known])

    def compare(self, joined: Sequence[torch.Tensor], kinds: Sequence[Kind], refuse: Refuse) -> None:
        """Refuses where the joined outputs are others."""
        for one, other, kind in zip(joined, self.outputs, kinds, strict=True):
            is_number = one.is_floating_point() and one.shape == other.shape
            if one.shape != other.shape or (is_number and difference(one, other, self.bound(one)) is not None):
                raise refuse(
                    f"the {'loss' if kind.name == 'total' else 'outputs'} of the parts and of the whole batch differ in a step that was compared: the model mixes the examples of a batch"
                )

    def bound(self, tensor: torch.Tensor) -> float:
        """By how much a result may differ that was computed in another order."""
        return bound_for(tensor.bfloat16() if self.are_halves else tensor)


@dataclasses.dataclass(slots=True, kw_only=True)
class DividedCall:
    """`outputs` are this rank's tensors with a known kind, `lengths` the examples of each rank, and `weights` as of `weights_of`.

    `inputs` are the parameters and the leaves of this part, of which the last `num_leaves` are rows of arguments. `whole` is a plain run of the
    whole batch, to compare with, in the first steps.
    """

    group: RankGroup
    refuse: Refuse
    number: int
    begin: int
    end: int
    lengths: Sequence[int]
    kinds: Sequence[Kind]
    weights: Sequence[list[float] | None]
    outputs: list[torch.Tensor]
    inputs: list[torch.Tensor]
    num_leaves: int
    whole: Whole | None
    is_compared: bool
    returned: WrittenPast | None = None
    memory: OneMemory | None = None

    def joined(self) -> list[torch.Tensor]:
        """The outputs for the whole batch."""
        return [self._joined(at) for at in range(len(self.outputs))]

    def _joined(self, at: int) -> torch.Tensor:
        kind, output = self.kinds[at], self.outputs[at].detach()
        if kind.name == "rows":
            return self.group.links.rows_of_all(
                output, [length * kind.num_of_each for length in self.lengths], kind.dim
            )
        if kind.name == "same":
            return output.clone()
        weights = self.weights[at] or [1] * self.group.size
        total: Any = 0
        # In the order of the ranks, on each of them. The mean of no terms is NaN, and counts nothing.
        for weight, part in zip(weights, self.group.links.of_each(output), strict=True):
            wide = part.to(torch.promote_types(part.dtype, torch.float32)) if part.is_floating_point() else part
            total = total + (wide * weight if weight != 0 else torch.zeros_like(wide))
        return total.to(output.dtype)

    @property
    def has_loss(self) -> bool:
        """Whether one of the outputs is a loss, through which gradients reach no other output."""
        return any(kind.name == "total" for kind in self.kinds)

    def gradients(self, grad_outputs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """The gradients of the parameters and arguments for the whole batch."""
        _refuse_first_of_several(self.inputs, self.refuse)
        if self.is_compared or not self.group.on_cards:
            found = content_hash([each for each in grad_outputs if each is not None])
        else:
            found = 0
        which = number_of([each is None for each in grad_outputs])
        self.group.agree("a backward pass", {
            "the order of backward passes": self.number, "the set of outputs that a loss is of": which, "what the loss makes of the model's outputs (its targets, say)": found
        })  # fmt: skip
        if self.returned is not None and self.returned.is_any():
            raise self.refuse(
                "an output of the model was modified without autograd seeing it (through .data, say) before the "
                "backward pass, and the parts that it was joined from were not"
            )
        if self.memory is not None and self.memory.is_any_written():
            raise self.refuse(WRITTEN)
        given = [
            (output, self._of_part(at, gradient))
            for at, (output, gradient) in enumerate(zip(self.outputs, grad_outputs, strict=True))
            if gradient is not None and output.requires_grad
        ]
        streamed = StreamedSums(self.inputs, self.group.links, self.refuse)
        outputs, of_outputs = [output for output, _ in given], [gradient for _, gradient in given]
        try:
            with of_a_part(), self.group.inside(), _without_hooks(self.inputs):
                if streamed:
                    parts = streamed.parts(outputs, of_outputs, keeps_graph=keeps_graph())
                else:
                    parts = grad(outputs, self.inputs, of_outputs, allow_unused=True, retain_graph=keeps_graph())
        except ApplyError as error:
            # Of a block that is run again: the program may swallow it.
            raise self.refuse(str(error)) from None
        except TightfitError:
            raise
        except Exception as error:
            # On one card the gradients up to there would be kept.
            told = " ".join(str(error).split())
            raise self.refuse(f"{type(error).__name__} was raised within the backward pass ({told})") from error
        if any(part is not None and part.layout is not torch.strided for part in parts):
            raise self.refuse(SPARSE)
        self.group.agree(
            "a backward pass",
            {"the set of parameters that have a gradient": number_of([part is None for part in parts])},
        )
        streamed.add_up()
        summed = self._summed(parts, streamed)
        if self.whole is not None:
            self._compare(grad_outputs, summed)
        streamed.hand_over()
        return [None if at in streamed else each for at, each in enumerate(summed)]

    def _of_part(self, at: int, gradient: torch.Tensor) -> torch.Tensor:
        kind = self.kinds[at]
        if kind.name == "rows":
            each = kind.num_of_each
            return gradient.narrow(kind.dim, self.begin * each, (self.end - self.begin) * each)
        if kind.name == "same":
            # It is every rank's own, and its gradient is to be counted once.
            return gradient if self.group.rank == 0 else torch.zeros_like(gradient)
        weights = self.weights[at]
        weight = 1.0 if not weights else weights[self.group.rank]
        return gradient * weight if weight != 0 else torch.zeros_like(gradient)

    def _summed(self, parts: Sequence[torch.Tensor | None], streamed: StreamedSums) -> list[torch.Tensor | None]:
        """Those of parameters summed over the ranks, but for `streamed`, which are; those of arguments of all rows."""
        num_parameters = len(parts) - self.num_leaves
        there = {at: part for at, part in enumerate(parts[:num_parameters]) if part is not None and at not in streamed}
        sums = dict(zip(there, self.group.links.sums(list(there.values())), strict=True))
        of_parameters = [sums.get(at, part) for at, part in enumerate(parts[:num_parameters])]
        of_arguments = [
            None if part is None else self.group.links.rows_of_all(part, self.lengths, 0)
            for part in parts[num_parameters:]
        ]
        return [*of_parameters, *of_arguments]

    def _compare(self, grad_outputs: Sequence[torch.Tensor | None], summed: Sequence[torch.Tensor | None]) -> None:
        """Refuses where the plain backward pass of the whole batch gives other gradients."""
        whole, self.whole = self.whole, None
        assert whole is not None
        given = [(o, g) for o, g in zip(whole.outputs, grad_outputs, strict=True) if g is not None and o.requires_grad]
        trained = self.inputs[: len(self.inputs) - self.num_leaves]
        # A checkpoint of the program's runs its code once more there.
        with whole.unseen(), of_a_part(), self.group.inside(), _without_hooks(trained):
            plain = grad(
                [o for o, _ in given],
                [*trained, *whole.wanting],
                [g for _, g in given],
                allow_unused=True,
                retain_graph=False,
            )
        norms = [each.detach().float().norm() for each in plain if each is not None]
        least = float(torch.stack(norms).max()) * _LEAST_SHARE if norms else 0.0
        for one, other in zip(summed, plain, strict=True):
            is_same = (one is None) == (other is None)
            if not is_same or (one is not None and difference(one, other, whole.bound(one), least) is not None):
                raise self.refuse(
                    "the gradients of the parts do not add up to those of the whole batch in a step that was compared: the model mixes the examples of a batch"
                )


@contextlib.contextmanager
def _without_hooks(leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    """Hooks on weights are called with the gradient of the whole batch, where that of `Joined` arrives, and not with that of a part too."""
    kept = [(hooks, dict(hooks)) for leaf in leaves if (hooks := leaf._backward_hooks)]
    for hooks, _ in kept:
        hooks.clear()
    try:
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


class Joined(torch.autograd.Function):
    """The outputs of a divided call."""

    @staticmethod
    def forward(ctx: Any, call: DividedCall, *inputs: torch.Tensor) -> Any:
        ctx.call, ctx.refuse = call, call.refuse
        ctx.set_materialize_grads(False)
        if len(call.kinds) > 1:
            # Asked before a hook is put on an output (`torch_hooks.tensor_hooks`).
            def before_gradient() -> None:
                raise call.refuse(BESIDE_LOSS if call.has_loss else BESIDE_OTHERS)

            ctx.before_gradient = before_gradient
        results = call.joined()
        ctx.mark_non_differentiable(
            *(result for result, own in zip(results, call.outputs, strict=True) if not own.requires_grad)
        )
        return tuple(results)

    @staticmethod
    @first_order("a run on several ranks")
    def backward(ctx: Any, *grad_outputs: torch.Tensor | None) -> Any:  # pyrefly: ignore[bad-override]
        call: DividedCall = ctx.call
        if all(gradient is None for gradient in grad_outputs):
            return None, *(None for _ in call.inputs)
        return None, *call.gradients(grad_outputs)


class AskedGradients:
    """Looks at backward passes that are asked by name for the gradients of tensors (`torch.autograd.grad`)."""

    def concerned_parameters(self) -> None:
        """As `tightfit.torch_hooks.backward.BackwardOwner`: the pass may lead to no leaf."""

    def around_backward(self, backward: BackwardPass) -> Any:
        """As `tightfit.torch_hooks.backward.BackwardOwner`.

        Raises:
            ApplyError: one is of an output beside a loss.
        """
        if backward.inputs and not backward.is_of_part:
            for node in backward.nodes():
                call = getattr(node, "call", None)
                if isinstance(call, DividedCall) and any(map(streamed_gradient_of, call.inputs)):
                    raise call.refuse(BY_NAME)
        for each in backward.inputs:
            node, number = (
                (each.grad_fn, each.output_nr) if isinstance(each, torch.Tensor) else (each.node, each.output_nr)
            )
            call = getattr(node, "call", None)
            if isinstance(call, DividedCall) and len(call.kinds) > 1 and call.kinds[number].name != "total":
                raise call.refuse(BESIDE_LOSS if call.has_loss else BESIDE_OTHERS)
        return backward.run()


def _refuse_first_of_several(tensors: Iterable[torch.Tensor], refuse: Refuse) -> None:
    """Raises where a hook is for the first gradient of several: the call hands all of them over at once, in an order of its own."""
    for tensor in tensors:
        for hook in (tensor._backward_hooks or {}).values():
            code = getattr(hook, "__code__", None)
            if code is not None and code.co_name == _OF_THE_FIRST and code.co_filename == torch.autograd.graph.__file__:
                raise refuse(
                    "a hook is called with the first gradient of several weights (register_multi_grad_hook with mode any), and which one comes first is not as on one card"
                )
