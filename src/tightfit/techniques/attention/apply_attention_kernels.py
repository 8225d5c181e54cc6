"""Puts `attention` on live objects: see `tightfit.techniques.attention.attention_kernels` for what it is and where it comes from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tightfit.effects.ambient import modes_of_program
from tightfit.effects.class_questions import ClassQuestion
from tightfit.effects.dispatched import dispatched
from tightfit.errors import ApplyError
from tightfit.techniques.attention.deferred_scores import started
from tightfit.techniques.lazy_tensors.asked_gradients import watch_inputs_of_backward
from tightfit.techniques.lazy_tensors.deferral import name_of
from tightfit.techniques.session import Session, Verdict
from tightfit.techniques.technique import Choice
from tightfit.techniques.wrappers.first_order import Refuse, are_transforms_active
from tightfit.techniques.wrappers.forwards import are_forwards_plain
from tightfit.torch_hooks.saved_tensor_hooks import packs_by_itself

_NAME = "attention"


def apply_attention_kernels(session: Session, chosen: Sequence[Choice]) -> None:
    """Wraps the `forward` of the modules that the choices name."""
    places = [place for choice in chosen for place in choice.settings["modules"]]
    question = ClassQuestion(session.model)
    for place, module in [(place, session.module(place)) for place in places]:
        session.wrap_forward(module, _Deferring(place, session.verdict, question))
    watch_inputs_of_backward(session)


class _Start(TorchFunctionMode):
    """Intercepts the product of queries and keys."""

    def __init__(self, refuse: Refuse) -> None:
        super().__init__()
        self._refuse = refuse

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
            scores = started(func, tuple(args), given, self._refuse) if is_plain else None
            if scores is not None:
                return scores
        return func(*args, **given)


class _Deferring:
    """The wrapper around the forward of one module."""

    def __init__(self, where: str, verdict: Verdict, question: ClassQuestion) -> None:
        self._where = where
        self._verdict = verdict
        self._question = question

    def __deepcopy__(self, memo: dict[int, Any]) -> "_Deferring":
        return _Deferring(self._where, Verdict(), self._question)

    def __call__(self, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        # A function mode and a tensor subclass would end up in the compiled graph, or inside of the transform.
        if torch.compiler.is_compiling() or are_transforms_active() or packs_by_itself() or modes_of_program():
            return forward(*args, **kwargs)
        if line := self._question.line():
            raise self._refusal(
                f"{line} asks whether a tensor's class is torch.Tensor (type(...) is ...), which that of scores that are not computed is not; "
                "ask by isinstance, or go on without it: tightfit plan --without attention"
            )
        with _Start(self._refusal):
            return forward(*args, **kwargs)

    def _refusal(self, why: str) -> ApplyError:
        return self._verdict.refuse(f"{self._where}: {why}", technique=_NAME)
