"""Runs a model that returns its loss over micro-batches, one after another, so that only one part's activations are alive at a time.

The backward pass of each part runs at once, inside the forward, and its gradients are summed separately; the caller gets a loss whose backward
pass only scales those sums and returns them. The caller's loop sees one forward, one loss and one backward pass.
"""

import contextlib
import copy
import threading
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

import torch
from torch.autograd import backward  # torch's own, whatever the program puts in its place later
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from tightfit.capture.observe.host_python import spends
from tightfit.cost.host_python import HostWork
from tightfit.effects.ambient import modes_of_program
from tightfit.effects.call_trails import CallTrail, operators_at
from tightfit.effects.graph_shapes import graph_shape
from tightfit.effects.independence.row_proof import are_all_hooked_backward
from tightfit.effects.outside_calls import without_outside_calls
from tightfit.effects.random_states import TorchRandom
from tightfit.effects.reads import Reads
from tightfit.effects.values.fingerprints import paused
from tightfit.effects.values.shared_memory import OneMemory
from tightfit.effects.values.value_checks import has_values, nothing_hidden
from tightfit.errors import ApplyError, TightfitError
from tightfit.techniques.lazy_tensors.code_in_graphs import CodeInGraph
from tightfit.techniques.micro_batches.batches import AbstractBatch, Batch
from tightfit.techniques.micro_batches.example_wise_check import BatchProofs, beside, put_back
from tightfit.techniques.micro_batches.led_parts import DecidesOtherwise, values_read
from tightfit.techniques.micro_batches.loss_means import Decision, LossWatch
from tightfit.techniques.micro_batches.saved_by_parts import Unchanged
from tightfit.techniques.micro_batches.split_outputs import WRITTEN, Outputs, Sums, find_loss
from tightfit.techniques.micro_batches.whole_batches import TakeBack, WholeBatches
from tightfit.techniques.wrappers.first_order import Refuse, are_transforms_active
from tightfit.techniques.wrappers.put_gradients import put_gradient
from tightfit.techniques.wrappers.repeated_proofs import RepeatedProofs
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.torch_hooks.backward import nodes_behind, of_a_part
from tightfit.torch_hooks.node_hooks import is_any_node_hooked, moment, on_node_hooks
from tightfit.torch_hooks.saved_tensor_hooks import packs_by_itself

WRAPPERS = frozenset({"OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"})
"""Modules that do their own work around the forward and the backward pass of the one inside."""
OF_MICRO_BATCHES = "; leave micro_batches out"
"""What a refusal says of this technique."""

ASKS_FOR_GRADIENT = "the model asks for the gradient of an argument (requires_grad_ on what it is called with)"
Forward = Callable[..., Any]


class PartsElsewhere(Protocol):
    """The parts of the batch that other processes run."""

    def first_other(self, decisions: Sequence[Any], number: int | None) -> int | None:
        """The number of the first decision that is not the same in all parts, of which `number` is known here, or -1 where it is not known which; None where all are."""
        ...

    def combine(self, sums: Sums, outputs: Outputs, parameters: Sequence[torch.Tensor]) -> None:
        """Adds theirs."""
        ...


# Two orders of summation differ by less than this; a loss that parts of a batch do not make up differs by more.
_TOLERANCE = {torch.float32: 2e-3, torch.float64: 1e-6}
_TOLERANCE_OF_HALVES = 2e-2
# Torch's error (torch/csrc/autograd/saved_variable.cpp, `ERR_BACKWARD_TWICE`).
_GONE_THROUGH = "backward through the graph a second time"


class SplitForward:
    """The wrapper around a root's forward; at most `num_parts` parts, `allows_randomness` as in `LossWatch`. `counted` is called once per part.

    `batch_of` makes the batch from the arguments, `scaled` is the scaling of the `GradScaler` that scales the loss outside. Proofs and comparisons
    run inside of `unseen()`. `takes_back` is as in `WholeBatches`. `forget` is called where parts that have run are run once more. `of_loop` are attributes of the model that the training loop sets for itself. `refuse` makes the error to raise; `check_steps` batches are compared by value. It refers to the model weakly, and a
    copy of the model gets a copy of it.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        num_parts: int,
        *,
        allows_randomness: bool,
        counted: Callable[[], None],
        refuse: Refuse = ApplyError,
        check_steps: int = 0,
        batch_of: Callable[[Sequence[Any], Mapping[str, Any]], AbstractBatch] | None = None,
        scaled: Callable[[torch.Tensor], torch.Tensor] | None = None,
        unseen: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        forget: Callable[[], None] = lambda: None,
        of_loop: Collection[str] = (),
        notes: list[str] | None = None,
        elsewhere: PartsElsewhere | None = None,
        takes_back: Callable[[], TakeBack] | None = None,
    ) -> None:
        self._model = weakref.ref(model)
        self._num_parts = num_parts
        self._allows_randomness = allows_randomness
        self._counted = counted
        self._refuse = refuse
        self._check_steps = check_steps
        self._batch_of = batch_of or Batch
        self._scaled = scaled
        self._forget = forget
        self._elsewhere = elsewhere
        self._unseen = unseen
        self._proofs = BatchProofs(
            model,
            allows_randomness=allows_randomness,
            refuse=refuse,
            unseen=unseen,
            of_loop=of_loop,
            repeats=RepeatedProofs("micro_batches", [] if notes is None else notes),
        )
        self._whole = WholeBatches(takes_back)
        self._checks_left = check_steps
        # On a card the graph is walked in the first steps alone.
        self._runs_again = False
        self._latest: Callable[[], Unchanged | None] = lambda: None
        self._memory: OneMemory | None = None
        # What the latest part has called, until the batch is done.
        self._calls: CallTrail | None = None
        # What parts have done outside of the process's memory nobody takes back: the batch is not run whole then.
        self._has_reached_outside = False
        self._begins = moment()
        on_node_hooks(self, is_of_later=True)

    @property
    def model(self) -> torch.nn.Module:
        """The module that is trained."""
        model = self._model()
        assert model is not None
        return model

    def __deepcopy__(self, memo: dict[int, Any]) -> "SplitForward":
        return SplitForward(
            copy.deepcopy(self.model, memo),
            self._num_parts,
            allows_randomness=self._allows_randomness,
            counted=self._counted,
            check_steps=self._check_steps,
            batch_of=self._batch_of,
            scaled=self._scaled,
        )

    def before_node_hook(self, hook: object) -> None:
        """Does nothing: `is_any_node_hooked` is asked before the backward pass of each part."""

    def __call__(self, forward: Forward, /, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or are_transforms_active() or packs_by_itself() or modes_of_program():
            return forward(*args, **kwargs)
        if is_looked_at(args, kwargs):
            return forward(*args, **kwargs)
        if not any(parameter.requires_grad for parameter in self.model.parameters()):
            return forward(*args, **kwargs)
        try:
            return self._in_parts(forward, args, kwargs)
        except ApplyError as error:
            may_run = not self._has_reached_outside and self._whole.may_run(
                error, self.model.parameters(), lambda: put_back(self._proofs, self._calls)
            )
            # Its weak references to tensors would be in the way of `torch.utils.swap_tensors`.
            self._calls = None
            if not may_run:
                raise self._refuse(str(error)) from None
        return forward(*args, **kwargs)

    # torch.compile would take apart the proofs as well: in a model that was compiled as a whole the parts run as they are written.
    @torch._disable_dynamo
    def _in_parts(self, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._memory is not None and self._memory.is_any_written():
            raise self._refuse(f"{WRITTEN}, and with micro_batches it is a copy; leave it out")
        self._memory = self._calls = None
        self._whole.begin()
        batch = self._batch_of(args, kwargs)
        if not batch.num_examples:
            # There is nothing to hold, and a mean of nothing is what torch says.
            return forward(*args, **kwargs)
        # The last batch of an epoch may be one example; only a run that begins with one has nothing to split.
        if batch.num_examples < 2 and not self._whole.has_split:
            raise self._refuse("the batch has one example, which cannot be split; leave micro_batches out")
        if self._scaled is None:
            _refuse_float16(batch.device)
        is_checked = False
        is_watched = has_values(*self.model.parameters()) and (batch.device.type == "cpu" or self._proofs.names_outside)
        with (
            without_outside_calls(self._refuse_outside, is_on=is_watched),
            _GradientsAside(self.model) as aside,
            no_steps(self._refuse, self.model),
        ):
            checks_before = self._checks_left
            sums, outputs = self._run_led(forward, batch, aside)
            if not torch.is_grad_enabled():
                raise self._refuse(
                    "the model leaves gradients disabled, and its parts are joined afterwards; leave micro_batches out"
                )
            is_checked = checks_before > self._checks_left or (checks_before == 0 and self._checks_left > 0)
            sums.gradients = [p.grad for p in aside.parameters]
            if self._elsewhere is not None:
                self._elsewhere.combine(sums, outputs, aside.parameters)
                _refuse_other_shares(sums, self._refuse)
        sums.refuse = self._refuse
        self._runs_again |= sums.saved.runs_again
        sums.unchanged = Unchanged(aside.parameters, batch.tensors(), sums.saved, has_checksum=is_checked)
        self._latest = weakref.ref(sums.unchanged)
        self.end_forward()
        joined = outputs.joined(sums, aside.parameters)
        self._memory = sums.memory
        self._whole.has_split = True
        return joined

    def end_forward(self) -> None:
        """What changes of the model's state from now on is changed between the forward and the backward pass. For callers that do something of the forward's afterwards."""
        latest = self._latest()
        if latest is not None and self._runs_again:
            latest.state = self._proofs.changes_from_now()

    def _refuse_outside(self, why: str) -> ApplyError:
        self._has_reached_outside = True
        return self._refuse(f"the model {why}; leave micro_batches out")

    def _run_led(self, forward: Forward, batch: AbstractBatch, aside: "_GradientsAside") -> tuple[Sums, Outputs]:
        """All parts; where they decide otherwise than each other, once more, led by what the whole decides."""
        led: tuple[Decision, ...] = ()
        while True:
            number: int | None = None
            try:
                sums, outputs, decisions = self._run(forward, batch, aside, led)
            except DecidesOtherwise as error:
                sums = outputs = None
                decisions, number = error.decisions, error.number
            if self._elsewhere is not None:
                number = self._elsewhere.first_other(decisions, number)
            if number is None and sums is not None and outputs is not None:
                return sums, outputs
            aside.forget()
            self._forget()
            found = None if number is None or number < 0 else self._proofs.decisions_of_whole(forward, batch, number)
            if found is None or len(found) <= len(led):
                raise self._refuse(
                    "the model branches on values of the batch, and takes different branches for different parts; "
                    "leave micro_batches out"
                )
            led = found

    def _run(
        self, forward: Forward, batch: AbstractBatch, aside: "_GradientsAside", led: Sequence[Decision]
    ) -> tuple[Sums, Outputs, Sequence[Any]]:
        """The parts that are run here, and what each of them has decided."""
        num_modules = sum(1 for _ in self.model.modules())
        spends(HostWork.MICRO_BATCHED_MODULE, num_modules)
        sums = Sums(1.0 if self._scaled is None else self._scaled(torch.ones((), device=batch.device)))
        outputs, parts = Outputs(refuse=self._refuse), list(batch.parts(self._num_parts))
        proved = self._proofs.of(batch, parts)
        self._whole.begin_parts(self.model.parameters(), are_led=bool(led))
        decisions: list[Any] | None = None
        for number, (begin, end) in enumerate(batch.own_parts(self._num_parts)):
            args, kwargs = batch.part(begin, end)
            spends(HostWork.MODULE_IN_PART, num_modules)
            watch = LossWatch(end - begin, allows_randomness=self._allows_randomness, led=led, given=batch.tensors())
            self._calls = watch.calls
            is_new = proved is None or proved.is_of_first
            try:
                # Operators are noted as they are called, and not as another mode hands them on.
                with watch, _reads_if(is_new) as reads, operators_at(batch.device, watch.calls):
                    output = forward(*args, **kwargs)
            except Exception as error:
                if is_new and not isinstance(error, TightfitError):
                    self._refuse_parts_that_raise(forward, batch, error)
                raise
            if watch.failure is not None:
                raise watch.failure
            _refuse_asked_gradients((args, kwargs), batch, self._refuse)
            decisions = _the_same(decisions, watch.decisions)
            # A plan may be applied to inner modules by their first forward, and change which parameters are
            # trained.
            refuse_hooks(self.model, self._refuse, since=self._begins)
            aside.take()
            loss_key, loss = find_loss(output)
            _refuse_own_code(loss, self._refuse, is_on=is_new)
            # What was proved of parts that are led holds for no others: they may read what depends on the rows.
            decided, is_other_way, values = [len(led), *decisions], False, None if reads is None else reads.values
            shape = (end - begin, graph_shape(loss.grad_fn), watch.calls.number())
            # Another way through the code, for which nothing may be proved: a switch in a file, say.
            if proved is not None and not is_new and not proved.holds_for(decided, shape):
                proved = self._proofs.with_decisions(batch, parts, decided, shape)
                is_new = is_other_way = proved is None
                values = values_read(forward, batch, (begin, end), led, unseen=self._unseen) if is_new else None
            if proved is None or is_new:
                # After the first part has run for real, so that lazy modules and caches are made; what that run
                # has left behind is part of the proof.
                with looking(self._refuse):
                    proved = self._proofs.prove(
                        forward, batch, parts, decided, values, shape, may_leave=not number, led=led
                    )
                # Two runs that draw anew differ.
                if self._proofs.has_left and not self._allows_randomness and has_values(loss, *aside.parameters):
                    _refuse_what_is_left(
                        forward, batch, (begin, end), loss, led, self._refuse, beside(self._proofs, self._unseen)
                    )
                self._checks_left = self._check_steps
            outputs.add(output, (begin, end), loss_key, proved.joined, batch)
            weight = sums.weight_of(proved.means, watch.terms, end - begin, loss)
            del output, watch
            # Before the backward pass, which nobody takes back: a batch that is refused here may run whole.
            if self._checks_left and _has_pairs(batch, aside) and (not number or is_other_way):
                self._checks_left -= 1
                with looking(self._refuse), beside(self._proofs, self._unseen), nothing_hidden(self.model):
                    self._check(forward, batch, proved.means, led)
            self._run_backward(loss, weight, sums, batch, aside)
            del loss
        _refuse_other_shares(sums, self._refuse)
        return sums, outputs, decisions or ()

    def _run_backward(
        self, loss: torch.Tensor, weight: torch.Tensor, sums: Sums, batch: AbstractBatch, aside: "_GradientsAside"
    ) -> None:
        # To walk the graph takes milliseconds, which are more for a card than at the host.
        # In a trace too: what is refused in a run is in no plan.
        is_walked = batch.device.type == "cpu" or self._checks_left or not has_values(*aside.parameters)
        if is_walked:
            sums.saved.add(loss, self.model, [*aside.parameters, *batch.tensors()])
        self._whole.begin_backward()
        self._proofs.at_call = None
        self._calls = None
        # As a program runs `backward` outside of its autocast context. `inputs=` keeps the pass from
        # accumulating into anything but the trained parameters.
        with torch.autocast(batch.device.type, enabled=False), of_a_part(), _told_of_shared_graphs(self._refuse):
            backward(loss, (weight * sums.loss_scale).to(loss.dtype), inputs=aside.parameters)
        sums.add(loss.detach(), weight)
        self._counted()

    @torch.no_grad()
    def _refuse_parts_that_raise(self, forward: Forward, batch: AbstractBatch, error: Exception) -> None:
        """Refuses if a part of the batch raises an error that the whole does not; an error of the whole is the program's own."""
        changed = self._proofs.changed()
        if not changed:
            args, kwargs = batch.part(0, batch.num_examples)
            try:
                with self._unseen(), paused():
                    forward(*args, **kwargs)
            except Exception:  # noqa: BLE001 - that of the part is raised
                return
        told = " ".join(str(error).split()) + (f"; {changed}" if changed else "")
        raise self._refuse(
            f"the model raises {type(error).__name__} for a part of the batch, and may not for the whole ({told}); leave micro_batches out"
        ) from error

    @torch.no_grad()
    def _check(self, forward: Forward, batch: AbstractBatch, means: frozenset[int], led: Sequence[Decision]) -> None:
        """Checks that two examples together and one by one give the same loss; a loss that compares or mixes examples does not."""
        was_training = [module for module in self.model.modules() if module.training]
        # Two runs with dropout differ by their masks: they are compared in evaluation mode.
        if self._allows_randomness:
            self.model.eval()
        results, comparable, numbers = [], True, Numbers()
        for ranges in (((0, 2),), ((0, 1), (1, 2))):
            sums = Sums()
            decided = led
            for begin, end in ranges:
                args, kwargs = batch.part(begin, end)
                watch = LossWatch(end - begin, allows_randomness=self._allows_randomness, led=decided)
                with watch, numbers:
                    output = forward(*args, **kwargs)
                if end - begin == 2:
                    # One by one they may decide otherwise, as parts may that are led by the whole.
                    led = watch.known_decisions()
                _, loss = find_loss(output)
                sums.add(loss, sums.weight_of(means, watch.terms, end - begin, loss))
            comparable = comparable and sums.are_shares_equal()
            results.append(sums.loss())
        for module in was_training:
            module.training = True
        # What this has cast stays in autocast's cache: a part that finds it there casts less than a block of it that is run again would.
        torch.clear_autocast_cache()
        together, apart = results
        tolerance = _TOLERANCE_OF_HALVES if numbers.are_halves else _TOLERANCE.get(together.dtype, _TOLERANCE_OF_HALVES)
        if comparable and bool((together - apart).abs() > tolerance * together.abs()):
            self._proofs.is_unsteady |= not _gives_the_same_twice(self._proofs, forward, batch)
            raise self._refuse(
                f"the loss of two examples is {together.item():.6g} together and {apart.item():.6g} one by one: it depends on the rest of the batch; leave micro_batches out"
            )


def _the_same(before: list[Any] | None, decisions: list[Any]) -> list[Any]:
    """What a part has decided, which is what the parts before it have."""
    if before is not None and decisions != before:
        raise DecidesOtherwise(before, decisions)
    return decisions


@torch.no_grad()
def _refuse_what_is_left(
    forward: Forward,
    batch: AbstractBatch,
    part: tuple[int, int],
    loss: torch.Tensor,
    led: Sequence[Decision],
    refuse: Refuse,
    unseen: contextlib.AbstractContextManager[Any],
) -> None:
    """Refuses if what a part has left behind (a count that stays) changes the next one: it must have the same loss once more, from the state after it."""
    args, kwargs = batch.part(*part)
    watch = LossWatch(part[1] - part[0], allows_randomness=False, led=led)
    with looking(refuse), unseen, watch, Numbers() as numbers:
        again = find_loss(forward(*args, **kwargs))[1]
    torch.clear_autocast_cache()
    tolerance = _TOLERANCE_OF_HALVES if numbers.are_halves else _TOLERANCE.get(loss.dtype, _TOLERANCE_OF_HALVES)
    if bool((again - loss).abs() > tolerance * loss.abs()):
        raise refuse(
            f"the first part of a batch has the loss {loss.item():.6g}, and {again.item():.6g} if it runs again: it leaves behind what "
            "changes the next part; leave micro_batches out"
        )


def _gives_the_same_twice(proofs: BatchProofs, forward: Forward, batch: AbstractBatch) -> bool:
    """Whether two examples have the same loss twice, with the state put back before each: else there is one that is in no snapshot, and that has moved on."""
    losses, random = list[torch.Tensor](), TorchRandom.now()
    for _ in range(2):
        if put_back(proofs, None):
            return False
        args, kwargs = batch.part(0, 2)
        losses.append(find_loss(forward(*args, **kwargs))[1].detach().clone())
        random.put()
    return torch.equal(*losses)


def _refuse_other_shares(sums: Sums, refuse: Refuse) -> None:
    if not sums.are_shares_equal():
        raise refuse(
            "the loss adds means over different numbers of terms (ignored targets), and their shares differ between "
            "parts of the batch; leave micro_batches out"
        )


def _reads_if(is_new: bool) -> contextlib.AbstractContextManager[Reads | None]:
    return Reads() if is_new else contextlib.nullcontext()


class Numbers(TorchFunctionMode):
    """Notes whether a forward computes in half precision, whatever the type of its loss: under autocast, or cast at its ends."""

    def __init__(self) -> None:
        super().__init__()
        self.are_halves = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and result.is_floating_point() and result.dtype not in _TOLERANCE:
            self.are_halves = True
        return result


@contextlib.contextmanager
def no_steps(refuse: Refuse, model: torch.nn.Module) -> Iterator[None]:
    """Refuses optimizer steps inside: they would run once for each part, with the gradients of some. Another thread's steps are of its own models."""
    thread = threading.get_ident()

    def refuse_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() != thread:
            own = {id(parameter) for parameter in model.parameters()}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                return
        raise refuse("an optimizer is stepped within the forward of the model; leave micro_batches out")

    handle = register_optimizer_step_pre_hook(refuse_step)
    try:
        yield
    finally:
        handle.remove()


@contextlib.contextmanager
def looking(refuse: Refuse) -> Iterator[None]:
    """Around runs that are ours alone. What they raise is not the program's to catch: one that skips a batch for it would skip each next one too."""
    try:
        yield
    except TightfitError:
        raise
    except Exception as error:
        told = " ".join(str(error).split())
        raise refuse(
            f"the check that parts of the batch give the same result as the whole ended with {type(error).__name__} "
            f"({told}); leave micro_batches out"
        ) from error


@contextlib.contextmanager
def _told_of_shared_graphs(refuse: Refuse) -> Iterator[None]:
    """Converts torch's error about a graph that is gone: the plain run goes through it once, for all parts."""
    try:
        yield
    except RuntimeError as error:
        if _GONE_THROUGH not in str(error):
            raise
        raise refuse(
            "parts of the batch share a graph, which the backward pass of one has freed (weights kept by "
            "parametrize.cached, or a tensor computed before the forward); leave micro_batches out"
        ) from error


class _GradientsAside:
    """Removes the gradients of the trainable parameters when `take` is first called, and restores them at the end."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self._gradients: list[torch.Tensor | None] = []
        self.parameters: list[torch.Tensor] = []

    def take(self) -> None:
        if self.parameters:
            return
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self._gradients = [p.grad for p in self.parameters]
        for parameter in self.parameters:
            parameter.grad = None

    def forget(self) -> None:
        """Drops what parts have left."""
        for parameter in self.parameters:
            parameter.grad = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for parameter, gradient in zip(self.parameters, self._gradients, strict=True):
            put_gradient(parameter, gradient)


def refuse_hooks(model: torch.nn.Module, refuse: Refuse, *, since: int, are_on_parts: bool = True) -> None:
    """Refuses hooks that would see parts; those on weights do where `are_on_parts`."""
    for name, parameter in model.named_parameters() if are_on_parts else ():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise refuse(
                f"{name} has a hook on its gradient, which would see each part's instead of the batch's; leave micro_batches out"
            )
    if are_all_hooked_backward():
        raise refuse(
            "all modules have a backward hook, which would see each part's gradients instead of the batch's; leave micro_batches out"
        )
    # Such as those of gradient accumulation, which stay from batch to batch.
    if is_any_node_hooked(since):
        raise refuse(
            "a node of a graph has a hook, which would see each part's gradients instead of the batch's; leave micro_batches out"
        )


def is_gradient_asked(given: Any, whole: Sequence[torch.Tensor]) -> bool:
    """Whether code has asked for the gradient of a tensor that it was `given`, a part of one of `whole` of which nobody had: that would be the whole one's."""
    asked = [leaf for leaf in tree_leaves(given) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return bool(asked) and not any(tensor.requires_grad for tensor in whole)


def _refuse_asked_gradients(given: Any, batch: AbstractBatch, refuse: Refuse) -> None:
    if is_gradient_asked(given, batch.tensors()):
        raise refuse(f"{ASKS_FOR_GRADIENT}, and each part has a copy of it{OF_MICRO_BATCHES}")


def _refuse_own_code(loss: torch.Tensor, refuse: Refuse, *, is_on: bool) -> None:
    """Refuses what the program runs in a backward pass, which parts have several of, and a loss that has none."""
    if not is_on:
        return
    if not loss.requires_grad:
        raise refuse("the loss has no gradient although weights are trained; leave micro_batches out")
    refuse_code_in_backward([loss], refuse)


def refuse_code_in_backward(results: Sequence[torch.Tensor], refuse: Refuse) -> CodeInGraph:
    """Refuses what the program runs in the backward pass of `results`, which a part would run for itself; what it runs otherwise is returned."""
    within = CodeInGraph()
    for node in nodes_behind([each for each in results if each.requires_grad]):
        if reason := within.reason_of_hooks(node):
            raise refuse(f"{reason}, and would do so for each part; leave micro_batches out")
    if within.has_own_contexts():
        raise refuse(
            "a checkpoint of the program has a context_fn, whose contexts each part would enter; leave "
            "micro_batches out"
        )
    return within


def _has_pairs(batch: AbstractBatch, aside: "_GradientsAside") -> bool:
    """Whether two examples can be compared with one and one."""
    return batch.num_examples > 1 and has_values(*aside.parameters)


def _refuse_float16(device: torch.device) -> None:
    if torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16:
        raise ApplyError(
            "under autocast in float16 gradients need the scale of a GradScaler, which is not known in the forward; use bfloat16, or leave micro_batches out"
        )
