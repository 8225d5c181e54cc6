"""Runs hand-written or eager attention with the kernels of `scaled_dot_product_attention`, which do not materialise the scores.

While the `forward` of a chosen module runs, the product of queries and keys returns deferred scores (`deferred_scores`); where the module
multiplies their softmax with the values, one fused call replaces all of it. Nothing is specific to a model: Hugging Face's and a plain one are
treated alike.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, final

import torch
from torch.overrides import TorchFunctionMode

from tightfit.analysis.profile import Profile
from tightfit.effects.class_questions import ClassQuestion
from tightfit.errors import ApplyError
from tightfit.planner.option import Advice, Option
from tightfit.techniques.attention.deferred_scores import started
from tightfit.techniques.attention.score_options import attention_options, math_attention_bytes
from tightfit.techniques.lazy_tensors.asked_gradients import watch_inputs_of_backward
from tightfit.techniques.lazy_tensors.deferral import name_of
from tightfit.techniques.session import Session, Verdict
from tightfit.techniques.technique import AbstractTechnique, Choice
from tightfit.techniques.wrappers.first_order import Refuse, are_transforms_active
from tightfit.techniques.wrappers.forwards import are_forwards_plain


@final
class Attention(AbstractTechnique):
    """Replaces the products, masks and softmax of an attention by one fused kernel."""

    name = "attention"
    exact = True
    exactness = "the same up to the order of sums; in half precision with fewer roundings, as scores are never rounded"

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option for all modules whose attention materialises its scores."""
        yield from attention_options(self.name, profile)

    def apply(self, session: Session, chosen: Sequence[Choice]) -> None:
        """Wraps the `forward` of the modules that the choices name."""
        places = [place for choice in chosen for place in choice.settings["modules"]]
        question = ClassQuestion(session.model)
        for place, module in [(place, session.module(place)) for place in places]:
            session.wrap_forward(module, _Deferring(place, session.verdict, question))
        watch_inputs_of_backward(session)

    def advice(self, profile: Profile) -> Iterable[Advice]:
        """Advice on calls of `scaled_dot_product_attention` that only the plain kernel can run."""
        num_bytes = math_attention_bytes(profile)
        if num_bytes:
            yield Advice(
                technique=self.name,
                what="scaled_dot_product_attention runs its plain kernel here, which holds all scores: half precision, heads that are "
                "not grouped (repeat keys and values), and no torch.nn.attention.sdpa_kernel that rules others out let it do without",
                saves_bytes=num_bytes,
                is_exact=True,
            )


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
        if torch.compiler.is_compiling() or are_transforms_active():
            return forward(*args, **kwargs)
        if line := self._question.line():
            raise self._refusal(
                f"{line} asks whether a tensor's class is torch.Tensor (type(...) is ...), which that of scores that are not computed is not; "
                "ask by isinstance, or go on without it: tightfit plan --without attention"
            )
        with _Start(self._refusal):
            return forward(*args, **kwargs)

    def _refusal(self, why: str) -> ApplyError:
        return self._verdict.refuse(f"{self._where}: {why}", technique=Attention.name)
