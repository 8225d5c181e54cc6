"""Runs hand-written or eager attention with the kernels of `scaled_dot_product_attention`, which do not materialise the scores.

While the `forward` of a chosen module runs, the product of queries and keys returns deferred scores (`deferred_scores`); where the module
multiplies their softmax with the values, one fused call replaces all of it. Nothing is specific to a model: Hugging Face's and a plain one are
treated alike.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, final

from tightfit.analysis.profile import Profile
from tightfit.cost.attention_plans import SETTING, made_plans
from tightfit.planner.option import Option
from tightfit.planner.suggestion import Suggestion
from tightfit.techniques.attention.score_options import attention_options, math_attention_bytes
from tightfit.techniques.technique import AbstractTechnique, ChosenOption
from tightfit.units import format_seconds

if TYPE_CHECKING:
    from tightfit.techniques.session import Session


@final
class Attention(AbstractTechnique):
    """Replaces the products, masks and softmax of an attention by one fused kernel."""

    name = "attention"
    exact = True
    exactness = "the same up to the order of sums; in half precision with fewer roundings, as scores are never rounded"

    def options(self, profile: Profile) -> Iterable[Option]:
        """One option for all modules whose attention materialises its scores."""
        yield from attention_options(self.name, profile)

    def apply(self, session: "Session", chosen: Sequence[ChosenOption]) -> None:
        """Wraps the `forward` of the modules that the choices name."""
        from tightfit.techniques.attention.apply_attention_kernels import apply_attention_kernels

        apply_attention_kernels(session, chosen)

    def advice(self, profile: Profile) -> Iterable[Suggestion]:
        """Advice on calls of `scaled_dot_product_attention` that only the plain kernel can run, and that cuDNN plans anew for each shape."""
        made = made_plans(profile.tape, profile.device)
        if made is not None and made.is_in_time:
            yield Suggestion(
                what=f"set {SETTING} at the start of the program: cuDNN otherwise builds an attention plan for each "
                f"shape, {made.number} here",
                changes="results",
                saves_bytes=0,
                effect=f"(about −{format_seconds(made.seconds)} of the host's time)",
                note="other kernels round differently",
            )
        num_bytes = math_attention_bytes(profile)
        if num_bytes:
            yield Suggestion(
                what="scaled_dot_product_attention runs its math kernel here, which materialises all scores; for a "
                "fused kernel use half precision, repeat grouped keys and values, and do not exclude fused kernels "
                "by torch.nn.attention.sdpa_kernel",
                saves_bytes=num_bytes,
            )
