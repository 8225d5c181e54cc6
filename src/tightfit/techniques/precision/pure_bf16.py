"""Parameters, gradients and activations in bfloat16, with updates that are not lost: stochastic rounding, or compensated summation.

See `tightfit.techniques.precision.stochastic_rounding` for both. Optimizer states stay in float32: an average of squares that changes by a
thousandth per step would not change at all with eight significant bits.
"""

import contextlib
import functools
import gc
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Never, final

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from tightfit.analysis.intervals import changes, levels
from tightfit.analysis.optimizer import OptimizerProfile, seconds_of_kernels, seconds_of_update
from tightfit.analysis.profile import Profile
from tightfit.errors import ApplyError
from tightfit.planner.option import Change, Option
from tightfit.tape import Category
from tightfit.techniques.lazy_tensors.asked_gradients import watch_inputs_of_backward
from tightfit.techniques.optimizer.optimizer_steps import check_separable, update_within_step
from tightfit.techniques.precision.casts import (
    born_in_float32,
    can_be_lowered,
    cast,
    cast_results,
    seconds_saved_in_bfloat16,
)
from tightfit.techniques.precision.stochastic_rounding import LowPrecisionUpdate, Rounding, WideStates
from tightfit.techniques.session import Session
from tightfit.techniques.technique import AbstractTechnique, Choice, Needs

# float32 tensors of the size of one parameter while it is updated: itself, its gradient, and the optimizer's two intermediate results.
_NUM_COPIES_IN_UPDATE = 4
# What errors of torch's and numpy's say where an operator does not know a type, or two do not go together.
_ABOUT_TYPES = re.compile(r"bfloat16|dtype|scalar ?type", re.IGNORECASE)
_KERNELS_PER_UPDATE = 8  # to float32 and back, and the random numbers, besides the optimizer's own


@final
class PureBf16(AbstractTechnique):
    """Trades the lower 16 bits of everything except optimizer states for half of its bytes and the speed of bfloat16."""

    name = "pure_bf16"
    exact = False
    needs = Needs.STEPS
    exactness = "lossy: forward and backward pass in 8 significant bits; updates in float32, rounded at random (right on average) or kept to 16 bits"
    tolerance = 0.4

    def options(self, profile: Profile) -> Iterable[Option]:
        """Two options for a run in float32: stochastic rounding, and compensated summation, which needs two bytes more per parameter."""
        run = profile.optimizer
        if not can_be_lowered(run) or not run.stretches:
            return []
        saved_seconds = seconds_saved_in_bfloat16(profile, everything=True)
        roundings: tuple[Rounding, ...] = ("stochastic", "compensated")
        return [
            Option(
                technique=self.name,
                where="precision",
                settings={"rounding": rounding},
                changes=_changes(run, rounding),
                seconds=_update_seconds(run) - run.seconds - saved_seconds,
                exact=self.exact,
                slots=frozenset({"precision", "optimizer"}),
                needs_new_trace=True,
            )
            for rounding in roundings
        ]

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Casts parameters, buffers, and the model's inputs and outputs, and takes over the optimizers' updates."""
        (choice,) = chosen
        for optimizer in session.optimizers:
            check_separable(optimizer, self.name)
        lowered: dict[torch.Tensor, None] = {p: None for p in session.model.parameters() if p.dtype == torch.float32}
        if not lowered:
            raise ApplyError(
                f"{type(session.model).__name__} has no float32 parameter; leave pure_bf16 out of the plan"
            )
        # DistributedDataParallel's buckets and hand-written flat buffers: the optimizer would read another
        # gradient than the buffer's owner.
        if any(p.grad is not None and p.grad._is_view() for p in lowered):
            raise ApplyError(
                "gradients are views of a buffer of the script's own, which stays in float32; leave pure_bf16 out of the plan"
            )
        # Setting `.data` of another dtype drops the parameter's AccumulateGrad node (`VariableHooks::set_data`,
        # torch/csrc/autograd/variable.cpp): hooks on the old one would never be called again.
        if _are_accumulators_held(lowered):
            raise ApplyError(
                "the program holds on to where gradients of parameters arrive (register_multi_grad_hook, or a hook on such a node), which a cast "
                "replaces; leave pure_bf16 out of the plan"
            )
        updates = [LowPrecisionUpdate(o, lowered, choice.settings["rounding"]) for o in session.optimizers]
        _lower(session, lowered, updates)
        for optimizer, update in zip(session.optimizers, updates, strict=True):
            update_within_step(session, optimizer, update)
            wide = WideStates()
            session.hook(optimizer.register_load_state_dict_pre_hook, wide.before)
            session.hook(optimizer.register_load_state_dict_post_hook, wide.after)

        refuse = functools.partial(session.verdict.refuse, technique=self.name)
        for module in session.model.modules():
            # Scripts call parts of a model as well.
            if module is not session.model and any(p in lowered for p in module.parameters(recurse=False)):
                session.wrap_forward(module, functools.partial(_part_in_bfloat16, refuse))
        session.wrap_forward(session.model, functools.partial(_whole_in_bfloat16, refuse))
        watch_inputs_of_backward(session)
        for optimizer in session.optimizers:
            session.set(optimizer, "__deepcopy__", _refuse_copy)
            session.set(optimizer, "__reduce_ex__", _refuse_copy)
        session.notes.append("checkpoints of the model are in bfloat16 while pure_bf16 is on")


def _in_bfloat16(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast((args, kwargs), torch.float32, torch.bfloat16)
    return cast(forward(*args, **kwargs), torch.bfloat16, torch.float32)


def _whole_in_bfloat16(
    refuse: Callable[[str], ApplyError], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    args, kwargs = cast((args, kwargs), torch.float32, torch.bfloat16)
    with _told_of_types(refuse):
        result = forward(*args, **kwargs)
    return cast_results(result, torch.float32, refuse)


@contextlib.contextmanager
def _told_of_types(refuse: Callable[[str], ApplyError]) -> Iterator[None]:
    """Converts errors about dtypes, which the model would not raise in float32, to a refusal that explains them."""
    try:
        yield
    except (RuntimeError, TypeError, ValueError) as error:
        if not _ABOUT_TYPES.search(str(error)):
            raise
        why = str(error).splitlines()[0]
        raise refuse(f"the model does not run in bfloat16 ({why}); leave pure_bf16 out of the plan") from error


def _part_in_bfloat16(
    refuse: Callable[[str], ApplyError], forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    """Casts only if there are float32 inputs: bfloat16 inputs come from the model itself."""
    if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves((args, kwargs))):
        with _told_of_types(refuse):
            return _in_bfloat16(forward, *args, **kwargs)
    return forward(*args, **kwargs)


def _refuse_copy(*_: object) -> Never:
    raise ApplyError(
        "a copy of this optimizer would train in bfloat16 without the bits that are cut off; copy its state_dict, or leave pure_bf16 out of the plan"
    )


def _lower(session: Session, lowered: Mapping[torch.Tensor, None], updates: Sequence[LowPrecisionUpdate]) -> None:
    """Casts parameters and buffers to bfloat16 in place, so that all references see it."""
    buffers = [b for b in session.model.buffers() if b.dtype == torch.float32]
    # The truncated bits, in case the plan cannot be applied in the end.
    before = session.before

    def raise_again() -> None:
        for parameter in lowered:
            values = [update.whole(parameter) for update in updates if update.holds(parameter)]
            _raise(parameter, before, values[0] if values else None)
        for buffer in buffers:
            _raise(buffer, before, None)

    session.when_undone(raise_again)
    for tensor in (*lowered, *buffers):
        plain = tensor.detach()
        # Not seen by the version of the tensor: only what writes to it is.
        before[tensor] = plain, tensor._version
        _set_data(tensor, plain.to(torch.bfloat16))


def _raise(
    tensor: torch.Tensor, before: Mapping[torch.Tensor, tuple[torch.Tensor, int]], value: torch.Tensor | None
) -> None:
    if tensor.dtype != torch.bfloat16:
        return
    plain, version = before.get(tensor, (None, -1))
    if plain is not None and version == tensor._version:
        value = plain
    _set_data(tensor, tensor.detach().float() if value is None else value)


def _are_accumulators_held(parameters: Iterable[torch.Tensor]) -> bool:
    """Whether the program itself refers to the AccumulateGrad node of a parameter, and not only a graph does."""
    with torch.enable_grad():
        # A view's graph leads to the node that is there, or to a new one.
        nodes = [p.view_as(p).grad_fn.next_functions[0][0] for p in parameters if p.requires_grad]  # pyrefly: ignore[missing-attribute]
    return any(holder is not nodes for holder in gc.get_referrers(*nodes))


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    # A gradient has its parameter's dtype: torch refuses to assign one of another type.
    gradient, tensor.grad = tensor.grad, None
    tensor.data = value
    if gradient is not None:
        tensor.grad = gradient.to(value.dtype)


def _changes(run: OptimizerProfile, rounding: Rounding) -> tuple[Change, ...]:
    storages, num_events = run.tape.storages, len(run.tape.events)
    parameters = storages.category == Category.PARAMETERS
    halved = np.flatnonzero(parameters | (storages.category == Category.GRADIENTS) | born_in_float32(run.tape))
    found = list(changes(levels(run.born[halved], run.died[halved], run.block_bytes[halved]), -0.5))
    for stretch in run.stretches:
        found += changes(run.held(stretch), -1.0)
        largest = int(run.block_bytes[run.gradients(stretch)].max(initial=0))
        found.append(
            Change(begin=stretch.begin_event, end=stretch.end_event, num_bytes=_NUM_COPIES_IN_UPDATE * largest)
        )
    if rounding == "compensated":
        first = run.stretches[0]
        rest_bytes = int(run.block_bytes[run.gradients(first)].sum()) // 2
        found.append(Change(begin=first.end_event, end=num_events, num_bytes=rest_bytes))
    return tuple(change for change in found if change.end > change.begin)


def _update_seconds(run: OptimizerProfile) -> float:
    """The time to cast each tensor to float32, update it by itself, and round it."""
    total = 0.0
    for stretch in run.steady:
        gradients = run.gradients(stretch)
        kernels = sum(len(gradients) if "_foreach_" in name else 1 for name in run.names(stretch))
        casts = seconds_of_update(
            run, _KERNELS_PER_UPDATE * int(run.block_bytes[gradients].sum()), _KERNELS_PER_UPDATE * len(gradients)
        )
        total += seconds_of_kernels(run, stretch, kernels) + casts
    return total
