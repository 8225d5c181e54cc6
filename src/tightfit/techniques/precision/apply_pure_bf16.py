"""Puts `pure_bf16` on live objects: see `tightfit.techniques.precision.pure_bf16` for what it is and where it comes from."""

import functools
import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Never, Protocol

import torch
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from tightfit.capture.processes.process_role import is_simulated
from tightfit.effects.reachable.reach import reach_of
from tightfit.effects.values.value_checks import has_values
from tightfit.errors import ApplyError
from tightfit.techniques.lazy_tensors.asked_gradients import watch_inputs_of_backward
from tightfit.techniques.optimizer.updates.optimizer_steps import check_separable, update_within_step
from tightfit.techniques.precision.casts import cast, cast_results, told_of_types
from tightfit.techniques.precision.counting_buffers import CountingBuffers
from tightfit.techniques.precision.stochastic_rounding import LowPrecisionUpdate, WideStates
from tightfit.techniques.session import Session, Verdict
from tightfit.techniques.technique import ChosenOption, the_only
from tightfit.techniques.wrappers.reduced_gradients import ReducedGradients
from tightfit.techniques.wrappers.tensors_of_tensors import check_plain
from tightfit.torch_hooks.backward import BackwardPass, on_backward
from tightfit.torch_hooks.manifest import STORAGE_USES
from tightfit.torch_hooks.optimizer_step_hooks import is_stepped

_NAME = "pure_bf16"
# What a reference from Python to a storage counts, beside those of its tensors.
_USES_OF_A_NAME = 1
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)


class MasterWeights(Protocol):
    """What updates parameters in bfloat16, and knows more of them than their 16 bits."""

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether it does."""
        ...

    def whole(self, parameter: torch.Tensor) -> torch.Tensor:
        """The parameter in float32."""
        ...


class _Refusing:
    """Refuses for one technique, as `Verdict.refuse`; `is_over` once the weights are in float32 again."""

    def __init__(self, verdict: Verdict, technique: str) -> None:
        self._verdict, self.technique = verdict, technique
        self.is_over = False

    def __call__(self, message: str) -> ApplyError:
        return self._verdict.refuse(message, technique=self.technique)

    def check(self) -> None:
        """Raises if the plan was taken off since the forward, whose graph has saved weights that are in float32 by now."""
        if self.is_over:
            raise ApplyError(
                f"{self.technique} was removed between forward and backward, and the backward pass needs its "
                "bfloat16 weights; run the forward again"
            )


class _PassesUnderWay:
    """Calls a function when no backward pass to some parameters is under way: one goes on with the weights that it has begun with."""

    def __init__(self, parameters: Mapping[torch.Tensor, None]) -> None:
        self._parameters = parameters
        self._num = 0
        self._waiting: list[Callable[[], None]] = []

    def concerned_parameters(self) -> Mapping[torch.Tensor, None]:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        return self._parameters

    def around_backward(self, backward: BackwardPass) -> Any:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        self._num += 1
        try:
            return backward.run()
        finally:
            self._num -= 1
            self._go_on()

    def when_ended(self, function: Callable[[], None]) -> None:
        """Calls it now, or at the end of the pass."""
        self._waiting.append(function)
        self._go_on()

    def _go_on(self) -> None:
        while self._waiting and not self._num:
            self._waiting.pop(0)()


def apply_pure_bf16(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Casts parameters, buffers, and the model's inputs and outputs, and takes over the optimizers' updates."""
    choice = the_only(chosen)
    updates: list[LowPrecisionUpdate] = []

    def update_of(optimizer: torch.optim.Optimizer) -> LowPrecisionUpdate:
        updates.append(LowPrecisionUpdate(optimizer, choice.settings["rounding"]))
        return updates[-1]

    lower_model(session, _NAME, update_of)
    for optimizer, update in zip(session.optimizers, updates, strict=True):
        update_within_step(session, optimizer, update)


def lower_model(
    session: Session,
    technique: str,
    update_of: Callable[[torch.optim.Optimizer], MasterWeights],
) -> None:
    """Casts parameters, buffers, and the model's inputs and outputs to bfloat16 until the session is undone. `update_of` makes what updates the parameters of an
    optimizer, which are not cast yet; it is asked for their values in float32 when they are cast back. The states that are loaded stay in float32.

    Raises:
        ApplyError: the model has no float32 parameter, something refers to the memory of one, or an optimizer is not known to update each parameter by itself.
    """
    remedy = f"leave {technique} out of the plan"
    for optimizer in session.optimizers:
        check_separable(optimizer, technique)
        # This step would be torch's, with states in float32 and weights in bfloat16.
        if optimizer.state and is_stepped(optimizer):
            raise ApplyError(
                f"the plan is applied within a step of its optimizer, by a closure; apply it before, or {remedy}"
            )
    lowered: dict[torch.Tensor, None] = {p: None for p in session.model.parameters() if p.dtype == torch.float32}
    if not lowered:
        raise ApplyError(f"{type(session.model).__name__} has no float32 parameter; {remedy}")
    check_plain(lowered, technique)
    # `.data` of another dtype gives such a tensor that dtype and leaves its values in their own.
    if compressed := next((n for n, b in session.model.named_buffers() if b.layout in _COMPRESSED), ""):
        raise ApplyError(
            f"the buffer {compressed} is a compressed sparse tensor, which cannot be cast in place; {remedy}"
        )
    # DistributedDataParallel's buckets and hand-written flat buffers: the optimizer would read another
    # gradient than the buffer's owner.
    if any(p.grad is not None and p.grad._is_view() for p in lowered):
        raise ApplyError(f"gradients are views of a buffer of the script, which stays in float32; {remedy}")
    if shared := _shared(session, lowered):
        raise ApplyError(f"{shared} shares its memory with a tensor that is not cast with it; {remedy}")
    # Setting `.data` of another dtype drops the parameter's AccumulateGrad node (`VariableHooks::set_data`,
    # torch/csrc/autograd/variable.cpp): hooks on the old one would never be called again.
    if _are_accumulators_held(lowered):
        raise ApplyError(
            "the program holds gradient accumulators of parameters (register_multi_grad_hook, or a hook on the "
            f"node), which a cast replaces; {remedy}"
        )
    # It holds them too, in C++, and would go on without a word: each process would train by itself.
    if ReducedGradients().is_any_of(lowered):
        raise ApplyError(
            "DistributedDataParallel wrapped the model before the plan was applied, and would not average the "
            f"gradients of weights that are cast; wrap it afterwards, or {remedy}"
        )
    refuse = _Refusing(session.verdict, technique)
    counting = CountingBuffers(session.model.named_buffers())
    _lower(session, lowered, [update_of(optimizer) for optimizer in session.optimizers], refuse)
    for optimizer in session.optimizers:
        wide = WideStates()
        session.hook(optimizer.register_load_state_dict_pre_hook, wide.before)
        session.hook(optimizer.register_load_state_dict_post_hook, wide.after)
    for module in session.model.modules():
        # Scripts call parts of a model as well.
        if module is not session.model and any(p in lowered for p in module.parameters(recurse=False)):
            session.wrap_forward(module, functools.partial(_part_in_bfloat16, refuse), is_of_model=True)
    session.wrap_forward(session.model, functools.partial(_whole_in_bfloat16, refuse, counting), is_of_model=True)
    watch_inputs_of_backward(session)
    for optimizer in session.optimizers:
        session.set(optimizer, "__deepcopy__", functools.partial(_refuse_copy, remedy))
        session.set(optimizer, "__reduce_ex__", functools.partial(_refuse_copy, remedy))
    session.notes.append(
        f"checkpoints and copies of the model are in bfloat16 while {technique} is on: an average of weights that the program keeps in a copy, or in the model "
        "itself (EMA, a momentum encoder), loses changes below 0.4 % of a weight; keep it in float32"
    )


def _shared(session: Session, lowered: Mapping[torch.Tensor, None]) -> str:
    """The first parameter or buffer whose memory another tensor reads: an optimizer's flat parameter, or a view that the model keeps."""
    model = session.model
    cast_too = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    held = [p for o in session.optimizers for group in o.param_groups for p in group["params"]]
    held += reach_of(model).tensors
    others = {_address(tensor) for tensor in held if id(tensor) not in cast_too and has_values(tensor)} - {0}
    named = [(n, p) for n, p in model.named_parameters() if p in lowered]
    named += [(n, b) for n, b in model.named_buffers() if b.dtype == torch.float32]
    valued = [(n, tensor) for n, tensor in named if has_values(tensor)]
    found = next((n for n, tensor in valued if _address(tensor) in others), "")
    return found or ("" if is_simulated() else _held_elsewhere(valued))


def _held_elsewhere(named: Sequence[tuple[str, torch.Tensor]]) -> str:
    """The first tensor whose memory is held by more than the tensors that are `named`: an alias or a numpy array of the program's, through which it may write."""
    # A view keeps the tensor that it was taken from: a mask, often, made by `torch.ones(n, n).tril().view(1, 1, n, n)`.
    bases = {id(base): base for _, tensor in named if (base := tensor._base) is not None}
    of_storage = Counter(_address(tensor) for tensor in (*(tensor for _, tensor in named), *bases.values()))
    for name, tensor in named:
        if address := _address(tensor):
            storage = tensor.untyped_storage()
            if STORAGE_USES.call(storage._cdata) > of_storage[address] + _USES_OF_A_NAME:
                return name
    return ""


def _address(tensor: torch.Tensor) -> int:
    """Where the storage of a tensor lies; 0 for what has none of torch's own."""
    return tensor.untyped_storage().data_ptr() if tensor.layout == torch.strided and not is_lazy(tensor) else 0


def _in_bfloat16(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    args, kwargs = cast((args, kwargs), torch.float32, torch.bfloat16)
    return cast(forward(*args, **kwargs), torch.bfloat16, torch.float32)


def _whole_in_bfloat16(
    refuse: _Refusing, counting: CountingBuffers, forward: Callable[..., Any], /, *args: Any, **kwargs: Any
) -> Any:
    # A forward may switch gradients on or off by itself, and casts are a part of its graph in both cases.
    with torch.enable_grad():
        args, kwargs = cast((args, kwargs), torch.float32, torch.bfloat16)
    with told_of_types(refuse, "in bfloat16", refuse.technique):
        result = forward(*args, **kwargs)
    counting.check(refuse, refuse.technique)
    with torch.enable_grad():
        return cast_results(result, torch.float32, refuse, refuse.check)


def _part_in_bfloat16(refuse: _Refusing, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Casts only if there are float32 inputs: bfloat16 inputs come from the model itself."""
    if any(isinstance(leaf, torch.Tensor) and leaf.dtype == torch.float32 for leaf in tree_leaves((args, kwargs))):
        with told_of_types(refuse, "in bfloat16", refuse.technique):
            return _in_bfloat16(forward, *args, **kwargs)
    return forward(*args, **kwargs)


def _refuse_copy(remedy: str, *_: object) -> Never:
    raise ApplyError(
        "a copy of this optimizer would train in bfloat16 without the bits that the cast removed; copy its "
        f"state_dict, or {remedy}"
    )


def _lower(
    session: Session, lowered: Mapping[torch.Tensor, None], updates: Sequence[MasterWeights], refuse: _Refusing
) -> None:
    """Casts parameters and buffers to bfloat16 in place, so that all references see it."""
    # A number without dimensions decides no operator's dtype and takes no memory, and is what a program keeps its own statistics in.
    buffers = [b for b in session.model.buffers() if b.dtype == torch.float32 and b.dim()]
    # The truncated bits, in case the plan cannot be applied in the end.
    before = session.before

    own = WeakTensorKeyDictionary({p: None for p in session.model.parameters() if p.dtype == torch.bfloat16})
    # Not the session's, which the session would keep itself by.
    model_of = weakref.ref(session.model)

    def raise_again() -> None:
        refuse.is_over = True
        model = model_of()
        # What the program has made of them (a head that grows) as well.
        made = (
            [p for p in model.parameters() if p.dtype == torch.bfloat16 and p not in own] if model is not None else []
        )
        for parameter in dict.fromkeys([*lowered, *made]):
            values = [update.whole(parameter) for update in updates if update.holds(parameter)]
            _raise(parameter, before, values[0] if values else None)
        for buffer in buffers:
            _raise(buffer, before, None)

    passes = _PassesUnderWay(lowered)
    leave = on_backward(passes)
    session.when_undone(lambda: passes.when_ended(raise_again))
    session.when_undone(leave)
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
        found = [p.view_as(p).grad_fn.next_functions[0][0] for p in parameters if p.requires_grad]  # pyrefly: ignore[missing-attribute]
    # Of a list Python 3.13 makes a tuple for the call, and counts that as a holder.
    nodes = tuple(found)
    del found
    return any(holder is not nodes for holder in gc.get_referrers(*nodes))


def _set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
    # A gradient has its parameter's dtype: torch refuses to assign one of another type.
    gradient, tensor.grad = tensor.grad, None
    tensor.data = value
    if gradient is not None:
        tensor.grad = gradient.to(value.dtype)
