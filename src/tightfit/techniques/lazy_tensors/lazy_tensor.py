"""Lazy tensors: wrapper subclasses without storage, whose elements are computed when an operator reads them.

Shape, dtype and device are known, and every operator on it reaches `__torch_dispatch__`, whoever calls it. So a tensor that a technique keeps in
another form, or not at all, is never silently read as something else.
"""

import abc
import copy
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from tightfit.effects.ambient import dispatch_modes_of_program, is_shown_to_function_modes
from tightfit.effects.dispatched import dispatched
from tightfit.errors import ApplyError, apply_errors_said, forget_apply_errors
from tightfit.techniques.lazy_tensors.seen_as_tensor import SeenAsTensor, leave_to_python
from tightfit.torch_hooks.manifest import NOT_TRACED

NOT_ANSWERED = object()
# From where the compiler asks what a tensor is made of (torch/_dynamo/variables/builder.py) over torch's own functions.
_FRAMES_TO_COMPILER = 40
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
_REQUIRE_GRAD = (torch.Tensor.requires_grad_, torch.Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
_IS_SPARSE = torch.Tensor.is_sparse.__get__  # type: ignore[attr-defined]


class AbstractElementSource(abc.ABC):
    """The source of a lazy tensor's elements, shared by all of its aliases."""

    refused_in_modes: Callable[[], ApplyError] | None = None
    """The error for a function of torch's that is given a tensor of this source, where a mode of the program's sees its operators; None where they are those of plain tensors."""

    @abc.abstractmethod
    def whole(self) -> torch.Tensor:
        """The elements, as an ordinary tensor.

        Raises:
            ElementsNeeded: they cannot be made within an operator.
        """

    def make(self) -> None:  # noqa: B027 - most have nothing to make
        """Computes the elements outside of any operator, so that `whole` returns them; called after it has raised `ElementsNeeded`."""

    def form_is_read(self) -> None:  # noqa: B027 - most have nothing to do with it
        """Called when `is_sparse` is read."""

    def was_written(self, whole: torch.Tensor) -> None:  # noqa: B027 - most have nothing to make of it
        """Called after an operator has written to the result of `whole`."""

    def sets_data(self, tensor: "LazyTensor", value: torch.Tensor) -> bool:
        """Has `tensor`, of this source, show the memory of `value`, an ordinary tensor of its form, from now on; False where elements are to be written instead."""
        return False

    def alias(self, tensor: "LazyTensor") -> "LazyTensor":
        """Called with a new alias (`detach()`, `.data`) of a lazy tensor of this source, which it returns."""
        return tensor

    def held(self) -> Sequence[torch.Tensor]:
        """The tensors that hold its memory."""
        return ()

    def answers(self, operator: Any, others: Sequence[Any]) -> bool:
        """Whether `answer` can compute an operator with these arguments after the lazy tensor."""
        return False

    def answer(self, operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The result of an operator on a lazy tensor, its first argument, without the elements; `NOT_ANSWERED` if they are needed."""
        return NOT_ANSWERED


class ElementsNeeded(ApplyError):
    """An operator reads a lazy tensor whose elements need a backward pass, which cannot run inside of an operator."""

    def __init__(self, source: AbstractElementSource) -> None:
        before = apply_errors_said()
        super().__init__(
            "a gradient that is not kept is passed to code that needs its memory (torch.func, torch.tensor, a "
            "nested tensor); clone it first (p.grad.clone()), or leave updates in the backward pass out of the plan"
        )
        self.source = source
        self._was_said = str(self) in before

    def make(self) -> None:
        """Computes the elements. It is no error then that a program has swallowed, as one that was said before may be."""
        if not self._was_said:
            forget_apply_errors(str(self))
        self.source.make()


class LazyTensor(torch.Tensor, metaclass=SeenAsTensor):
    """A tensor whose elements come from `source`."""

    source: AbstractElementSource

    @staticmethod
    def __new__(
        cls,
        source: AbstractElementSource,
        like: torch.Tensor,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> "LazyTensor":
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, like.shape, strides=like.stride(), dtype=dtype or like.dtype, device=device or like.device
        )
        made.source = source
        # C++ code that reads memory without a call that reaches us (`torch.utils.dlpack.to_dlpack`) gets an error, not an address of nothing.
        torch._C._set_throw_on_mutable_data_ptr(made)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        func = dispatched(func)
        # Optimizers ask for it first, of every gradient (torch/optim/adam.py, `_init_group`), before they read
        # or write anything.
        if func == _IS_SPARSE:
            args[0].source.form_is_read()
        if func == _SET_DATA and isinstance(args[0], LazyTensor):
            return args[0]._set_data(func, args[1])
        if func in _REQUIRE_GRAD and all((*args[1:], *(kwargs or {}).values())):
            # A leaf is to be the tensor that the program finds in this place from now on. (`zero_grad` says False to each gradient.)
            return func(args[0].whole(), *args[1:], **(kwargs or {}))
        if func.__name__ != "__get__":
            _refuse_in_modes([*args, *(kwargs or {}).values()])
        # Here autograd still works, which it does not within an operator.
        while True:
            try:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **(kwargs or {}))
            except ElementsNeeded as needed:
                needed.make()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        # `.data` and `.detach()` are aliases of the same memory: one source for all of them.
        if func is torch.ops.aten.detach.default:
            return args[0].source.alias(LazyTensor(args[0].source, args[0]))
        if (apart := one_by_one(func, args, kwargs)) is not NOT_ANSWERED:
            return apart
        if isinstance(args[0], LazyTensor):
            answer = args[0].source.answer(func, args, kwargs)
            if answer is not NOT_ANSWERED:
                return answer
        return _on_elements(func, args, kwargs)

    def _set_data(self, func: Any, value: torch.Tensor) -> None:
        if isinstance(value, LazyTensor) and not self.source.held():
            # Also of another form: a model that is cast or moved takes its gradients along.
            with torch._C.DisableTorchFunctionSubclass():
                func(self, value)
            self.source = value.source
            return
        given = value.whole() if isinstance(value, LazyTensor) else value
        mine, other = ((t.shape, t.dtype, t.device, t.layout) for t in (self, given))
        if mine != other:
            raise ApplyError(
                "the .data of a tensor that is not materialised is set to a tensor of another shape, dtype or "
                f"device ({tuple(given.shape)}, {given.dtype}, {given.device}); read it first (p.grad.clone()), or "
                "leave the technique out of the plan"
            )
        if not self.source.sets_data(self, given.detach()):
            self.detach().copy_(given)

    def whole(self) -> torch.Tensor:
        """The elements, as a tensor of torch's own."""
        try:
            return self.source.whole()
        except ElementsNeeded as needed:
            needed.make()
            return self.source.whole()

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """A copy is an ordinary tensor: it does not belong to the session."""
        if id(self) not in memo:
            memo[id(self)] = copy.deepcopy(self.whole().detach(), memo)
        return memo[id(self)]

    def __reduce_ex__(self, proto: Any) -> Any:
        return self.whole().detach().__reduce_ex__(proto)

    # The interface of torch's wrapper subclasses for their inner tensors, which tools that count memory use.

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        # Tools that measure memory (torch.distributed's memory trackers, and our own recorder) look inside of
        # wrapper subclasses by these names. So does the compiler, to trace through them.
        _keep_from_compiler(sys._getframe(1))
        return ["first_held", "second_held"][: len(self.source.held())], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> torch.Tensor:
        raise NotImplementedError("a lazy tensor belongs to one parameter, and is not made from parts")

    @property
    def first_held(self) -> torch.Tensor:
        """The first of the tensors that hold its memory."""
        return self.source.held()[0]

    @property
    def second_held(self) -> torch.Tensor:
        """The second of the tensors that hold its memory."""
        return self.source.held()[1]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return self.whole().__repr__(tensor_contents=tensor_contents)

    # What reads memory past the dispatcher.

    def apply_(self, callable: Any) -> torch.Tensor:  # noqa: A002 - torch's own name
        """As `torch.Tensor.apply_`."""
        self.copy_(self.whole().clone().apply_(callable))
        return self

    def map_(self, other: torch.Tensor, callable: Any) -> torch.Tensor:  # noqa: A002 - torch's own name
        """As `torch.Tensor.map_`."""
        given = other.whole() if isinstance(other, LazyTensor) else other
        self.copy_(self.whole().clone().map_(given, callable))
        return self

    def numpy(self, *, force: bool = False) -> Any:
        """As `torch.Tensor.numpy`."""
        return self.whole().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.whole().__array__(dtype)

    def tolist(self) -> Any:
        """As `torch.Tensor.tolist`."""
        return self.whole().tolist()

    def data_ptr(self) -> int:
        """As `torch.Tensor.data_ptr`."""
        return self.whole().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        """As `torch.Tensor.untyped_storage`."""
        # It describes the gradients of all weights that it meets, also where the code reads none.
        _keep_from_compiler(sys._getframe(1))
        return self.whole().untyped_storage()

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.whole().__dlpack__(**kwargs)


def _keep_from_compiler(caller: types.FrameType) -> None:
    """Has the compiler leave the code to Python, which it does for whatever it cannot trace."""
    if _is_asked_by_compiler(caller):
        leave_to_python()
        raise NOT_TRACED.value()(
            "a tensor that is not materialised is passed to code that torch.compile compiles; pass a copy "
            "(p.grad.clone()), or leave the technique out of the plan"
        )


def _is_asked_by_compiler(frame: types.FrameType | None) -> bool:
    for _ in range(_FRAMES_TO_COMPILER):
        if frame is None:
            return False
        name = frame.f_globals.get("__name__") or ""
        # Calls of functions that are compiled, or kept from it as torch's own are, go through `eval_frame`: nothing is being compiled by that.
        if name.startswith("torch._dynamo.") and name != "torch._dynamo.eval_frame":
            return True
        frame = frame.f_back
    return False


def is_in_compiled_code() -> bool:
    """Whether a caller is a function that torch.compile was given, whatever part of it the compiler has left to Python."""
    frame: types.FrameType | None = sys._getframe(1)
    while frame is not None:
        # Functions that are kept from the compiler have a wrapper of another name there (torch/_dynamo/eval_frame.py).
        if frame.f_code.co_name == "compile_wrapper" and frame.f_globals.get("__name__", "").startswith(
            "torch._dynamo."
        ):
            return True
        frame = frame.f_back
    return False


def carry_attributes(tensor: torch.Tensor | None, to: torch.Tensor | None) -> None:
    """Sets on `to` what the program has set on a lazy tensor that it replaces."""
    if isinstance(tensor, LazyTensor) and to is not None and to is not tensor and len(vars(tensor)) > 1:
        for name, value in vars(tensor).items():
            if name != "source":
                setattr(to, name, value)


# The foreach operators that are answered for each tensor alone, with the operator that does the same to one.
_aten = torch.ops.aten
_EACH: dict[Any, Any] = {
    _aten._foreach_norm.Scalar: _aten.linalg_vector_norm.default,
    _aten._foreach_mul_.Scalar: _aten.mul_.Scalar,
    _aten._foreach_mul_.Tensor: _aten.mul_.Tensor,
    _aten._foreach_div_.Scalar: _aten.div_.Scalar,
    _aten._foreach_div_.Tensor: _aten.div_.Tensor,
    _aten._foreach_zero_.default: _aten.zero_.default,
}


def _refuse_in_modes(given: Sequence[Any]) -> None:
    """Raises what a source refuses that a function of torch's is given a tensor of, at any place, while a mode of the program's sees its operators."""
    tensors = [one for each in given for one in (each if isinstance(each, list | tuple) else (each,))]
    refused = [one.source.refused_in_modes for one in tensors if isinstance(one, LazyTensor)]
    raised = next(filter(None, refused), None)
    if raised is not None and (dispatch_modes_of_program() or is_shown_to_function_modes()):
        raise raised()


def one_by_one(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The result of a foreach operator whose single-tensor form may be answered without elements."""
    single: Callable[..., Any] | None = _EACH.get(func)
    if single is None or kwargs:
        return NOT_ANSWERED
    for each in args[0]:
        if isinstance(each, LazyTensor) and not each.source.answers(single, args[1:]):
            each.source.whole()  # before anything is changed
    results = [single(each, *args[1:]) for each in args[0]]
    return results if func is _aten._foreach_norm.Scalar else None


def _on_elements(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    lazy: dict[int, LazyTensor] = {}

    def whole(tensor: LazyTensor) -> torch.Tensor:
        made = tensor.source.whole()
        lazy[id(made)] = tensor
        return made

    # One by one: a lazy tensor that stands twice among the arguments is one tensor in both places.
    known: dict[int, torch.Tensor] = {}
    given = tree_map_only(LazyTensor, lambda t: known.setdefault(id(t.source), whole(t)), (tuple(args), kwargs))
    result = func(*given[0], **given[1])
    for tensor in written_by(func, given[0], given[1]):
        if id(tensor) in lazy:
            lazy[id(tensor)].source.was_written(tensor)
    return tree_map_only(torch.Tensor, lambda t: lazy.get(id(t), t), result)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors among the arguments that an operator writes to, by its schema."""
    found: list[torch.Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = args[index] if index < len(args) else kwargs.get(argument.name)
        found += [v for v in (value if isinstance(value, list | tuple) else (value,)) if isinstance(v, torch.Tensor)]
    return found
