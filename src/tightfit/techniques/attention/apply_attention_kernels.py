"""Puts `attention` on live objects: see `tightfit.techniques.attention.attention_kernels` for what it is and where it comes from."""

import re
import weakref
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.effects.ambient import dispatch_modes_of_program, modes_of_program
from tightfit.effects.bytecode.class_questions import ClassQuestion
from tightfit.effects.dispatched import dispatched
from tightfit.errors import ApplyError
from tightfit.techniques.attention.deferred_scores import Reads, started
from tightfit.techniques.lazy_tensors.asked_gradients import watch_inputs_of_backward
from tightfit.techniques.lazy_tensors.data_of_stand_ins import refuse_data_of_stand_ins
from tightfit.techniques.lazy_tensors.deferral import name_of
from tightfit.techniques.lazy_tensors.written_since import WrittenSince
from tightfit.techniques.session import Session, Verdict
from tightfit.techniques.technique import ChosenOption
from tightfit.techniques.wrappers.first_order import Refuse, are_transforms_active
from tightfit.techniques.wrappers.forwards import are_forwards_plain
from tightfit.techniques.wrappers.traced_calls import is_looked_at
from tightfit.torch_hooks.backward import BackwardPass, on_backward
from tightfit.torch_hooks.saved_tensor_hooks import packs_by_itself

_NAME = "attention"


def apply_attention_kernels(session: Session, chosen: Sequence[ChosenOption]) -> None:
    """Wraps the `forward` of the modules that the choices name."""
    places = [place for choice in chosen for place in choice.settings["modules"]]
    question, kernels = ClassQuestion(session.model), _Kernels()
    for place, module in [(place, session.module(place)) for place in places]:
        session.wrap_forward(module, _Deferring(place, session.verdict, question, kernels))
    watch_inputs_of_backward(session)
    before = _BeforeBackward(session.model, session.verdict, kernels)
    leave = on_backward(before)

    def end(_: object = before) -> None:  # which keeps it
        leave()

    session.when_undone(end)
    session.when_undone(refuse_data_of_stand_ins())


class _Start(TorchFunctionMode):
    """Intercepts the product of queries and keys."""

    def __init__(self, refuse: Refuse, reads: Reads) -> None:
        super().__init__()
        self._refuse = refuse
        self._reads = reads

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        func = dispatched(func)
        given = dict(kwargs or {})
        if name_of(func) in ("matmul", "__matmul__", "bmm", "einsum") and not are_forwards_plain():
            # Deferred scores among the operands: their own class handles the call, as the product with the
            # values.
            is_plain = not any(hasattr(arg, "_attention") for arg in (*args, *given.values()))
            scores = started(func, tuple(args), given, self._refuse, self._reads) if is_plain else None
            if scores is not None:
                return scores
        return func(*args, **given)


# What torch says of saved tensors that were written to (torch/csrc/autograd/saved_variable.cpp), and what its nodes for attention are called.
_WRITTEN = "has been modified by an inplace operation"
_OF_KERNELS = "of ScaledDotProduct"
# And of a kernel whose backward pass is differentiated (tools/autograd/derivatives.yaml has `not_implemented` there).
_NOT_TWICE = re.compile(r"derivative for aten::_scaled_dot_product\w*_backward is not implemented")


class _Graph:
    """Is alive as long as the node is that has it among its metadata."""


class _Kernels:
    """Those of forwards whose backward pass has not run, if there are any: they read masks and biases again in it."""

    def __init__(self) -> None:
        self.are_in_graph = False
        self._calls: list[tuple[weakref.ref[_Graph], WrittenSince]] = []
        self._num_alive = 0

    def note(self, result: torch.Tensor, tensors: Sequence[torch.Tensor]) -> None:
        """Notes what the kernel with this result reads again."""
        if result.grad_fn is None or not tensors:
            return
        graph, written = _Graph(), WrittenSince()
        for each in tensors:
            written.add(each)
        node: Any = result.grad_fn
        node.metadata[_NAME] = graph
        # No backward pass forgets those of forwards that have none, nor those of a program that retains each graph.
        if len(self._calls) > 2 * self._num_alive:
            self._calls = [each for each in self._calls if each[0]() is not None]
            self._num_alive = len(self._calls)
        self._calls.append((weakref.ref(graph), written))

    def is_any_written(self) -> bool:
        """Whether something that a kernel will read again was written to since."""
        return any(written.is_any_written() for graph, written in self._calls if graph() is not None)

    def forget(self) -> None:
        """Their backward pass has run."""
        self.are_in_graph = False
        self._calls.clear()


class _BeforeBackward:
    """Refuses a backward pass inside of a mode of the program's that the forward was not in, or with other masks."""

    def __init__(self, model: torch.nn.Module, verdict: Verdict, kernels: _Kernels) -> None:
        self._model = weakref.ref(model)
        self._verdict = verdict
        self._kernels = kernels

    def concerned_parameters(self) -> Container[torch.Tensor]:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        model = self._model()
        return dict.fromkeys(model.parameters()) if self._kernels.are_in_graph and model is not None else {}

    def around_backward(self, backward: BackwardPass) -> Any:
        """As `tightfit.torch_hooks.backward.BackwardOwner`."""
        if modes := dispatch_modes_of_program():
            raise self._verdict.refuse(
                f"the backward pass runs under {type(modes[0]).__name__}, a mode that sees every operator, and "
                "attention runs different ones; leave attention out of the plan",
                technique=_NAME,
            )
        if self._kernels.is_any_written():
            raise self._verdict.refuse(
                "the attention mask or bias was modified in place between forward and backward, and the kernel's "
                "backward reads it again; leave attention out of the plan",
                technique=_NAME,
            )
        try:
            result = backward.run()
        except RuntimeError as error:
            if _NOT_TWICE.search(str(error)):
                raise self._verdict.refuse(
                    "the program differentiates through a backward pass (create_graph=True), and the attention "
                    "kernels have no double backward; leave attention out of the plan",
                    technique=_NAME,
                ) from error
            # A product does not read its result in its backward pass, and the kernels do.
            if _OF_KERNELS not in str(error) or _WRITTEN not in str(error):
                raise
            raise self._verdict.refuse(
                "the output of attention is modified in place, and the kernel's backward reads it again; leave "
                "attention out of the plan",
                technique=_NAME,
            ) from error
        if not backward.keeps_graph:
            self._kernels.forget()
        return result


class _Deferring:
    """The wrapper around the forward of one module."""

    def __init__(self, where: str, verdict: Verdict, question: ClassQuestion, kernels: _Kernels) -> None:
        self._where = where
        self._verdict = verdict
        self._question = question
        self._kernels = kernels

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Deferring":
        return _Deferring(self._where, Verdict(), self._question, _Kernels())

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # A function mode and a tensor subclass would end up in the compiled graph, or inside of the transform.
        if torch.compiler.is_compiling() or are_transforms_active() or packs_by_itself() or modes_of_program():
            return forward(*args, **kwargs)
        if is_looked_at(args, kwargs):
            return forward(*args, **kwargs)
        if line := self._question.line():
            raise self._refusal(
                f"{line} compares a tensor's type with torch.Tensor (type(...) is ...), and attention scores that are "
                "not materialised are a subclass; use isinstance, or plan without it: tightfit plan --without "
                "attention"
            )
        self._kernels.are_in_graph = True
        with _Start(self._refusal, self._kernels.note):
            return forward(*args, **kwargs)

    def _refusal(self, why: str) -> ApplyError:
        return self._verdict.refuse(f"{self._where}: {why}", technique=_NAME)
