"""What a model returns for its part of a batch, and how the parts of all ranks make up what it returns for the whole.

A tensor with a row for each example is put together from all; a loss that is one mean or sum over the examples is summed with the weights of the parts;
what does not depend on the examples is every rank's own, and a number is that of the whole where it was so in the proof. What is none of these may be returned, but not used.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Never

import torch

from tightfit.effects.independence.left_tensors import LeftTensor
from tightfit.effects.independence.row_flow import Flow
from tightfit.effects.independence.row_proof import FollowedRun, check_graph
from tightfit.effects.independence.rows import Mixes
from tightfit.effects.independence.totals import ROWS, Total
from tightfit.ranks.values.further_weights import number_of_further
from tightfit.ranks.values.structures import leaves_of, mapped
from tightfit.techniques.micro_batches.divisors import Divisor
from tightfit.techniques.micro_batches.example_wise_check import Proved
from tightfit.techniques.micro_batches.loss_means import Term
from tightfit.techniques.micro_batches.split_outputs import LeftOut
from tightfit.techniques.wrappers.first_order import Refuse

_PLAIN = (bool, int, float, str, torch.dtype, torch.device, type(None))
# By how much shares of whole numbers, and of sums of class weights, may differ.
_EXACT, _ROUNDED = 1e-12, 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What an output is: `rows` along `dim`, so many of each example next to each other; a `total` over the examples with the means that it is over, to which something besides was added where it `has_constants`; the `same` for any examples; or `unknown`, for `reason`.
    What is no tensor has its `value` for the whole batch in the proof, and by the number of examples those for parts."""

    name: Literal["rows", "total", "same", "unknown"]
    dim: int = 0
    num_of_each: int = 1
    means: frozenset[int] = frozenset()
    has_constants: bool = False
    value: Any = None
    of_parts: Mapping[int, Any] = dataclasses.field(default_factory=dict)
    reason: str = ""

    def of_whole(self, own: Any, num_examples: int) -> Any:
        """What is no tensor, for the whole batch, where a part of so many examples has its `own`: a temperature is that of this call, and a number of examples that of the proof. None where neither is known."""
        values = [self.value, *self.of_parts.values()]
        if all(type(each) is type(own) for each in values) and not any(each != self.value for each in values):
            return own
        known = self.of_parts.get(num_examples)
        return self.value if type(known) is type(own) and known == own else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ProvedCall(Proved):
    """The result of a proof: the kind of each output, and of each tensor that was `left` where it can be reached, by its path; and how many weights are trained that the model does not have as parameters."""

    kinds: tuple[Kind, ...] = ()
    left: tuple[str, ...] = ()
    num_further: int = 0


def judged(proof: FollowedRun, model: torch.nn.Module) -> ProvedCall:
    """The kinds of the outputs of a run that was followed.

    Raises:
        Mixes: gradients flow to others than the model and its inputs, or no output with a gradient is known.
    """
    output, _ = proof.result
    leaves = list(leaves_of(output))
    of_parts = {size: list(leaves_of(result[0])) for size, result in proof.of_parts.items()}
    if any(len(each) != len(leaves) for each in of_parts.values()):
        raise Mixes("it returns another number of results for a part of the batch")
    left = [each.tensor for each in proof.left]
    kinds = (
        *(
            _kind_of(proof.flow, leaf, {size: each[at] for size, each in of_parts.items()})
            for at, leaf in enumerate(leaves)
        ),
        *(_kind_of(proof.flow, leaf, {}) for leaf in left),
    )
    known = [
        leaf
        for leaf, kind in zip([*leaves, *left], kinds, strict=True)
        if isinstance(leaf, torch.Tensor) and kind.name != "unknown"
    ]
    own = [*proof.inputs, *model.parameters()]
    check_graph(known, own, since=proof.first_node)
    num_further = number_of_further(proof.flow, known, own)
    if not any(leaf.requires_grad for leaf in known):
        reasons = [kind.reason for kind in kinds if kind.name == "unknown"]
        raise Mixes(reasons[0] if reasons else "it returns nothing that has a gradient")
    return ProvedCall(
        joined=frozenset(),
        means=frozenset(),
        kinds=kinds,
        left=tuple(each.path for each in proof.left),
        num_further=num_further,
    )


def _kind_of(flow: Flow, leaf: Any, of_parts: Mapping[int, Any]) -> Kind:
    if not isinstance(leaf, torch.Tensor):
        is_plain = isinstance(leaf, _PLAIN)
        known = {size: each for size, each in of_parts.items() if isinstance(each, _PLAIN)}
        return (
            Kind(name="same", value=leaf, of_parts=known)
            if is_plain
            else _unknown(
                f"it returns a {type(leaf).__name__}: have it return tensors, in tuples, dicts or dataclasses"
            )
        )
    state = flow.rows.state(leaf)
    if isinstance(state, Total):
        return Kind(name="total", means=state.means, has_constants=state.has_constants)
    if state is not None or flow.rows.depends(leaf):
        return _rows_of(flow, leaf)
    return Kind(name="same")


def _rows_of(flow: Flow, leaf: torch.Tensor) -> Kind:
    try:
        layout = None if flow.rows.is_uniform(leaf) else flow.rows.layout(leaf)
    except Mixes as error:
        return _unknown(f"what it returns is not each example's own ({error})")
    if layout is None or layout.outer != 1:
        return _unknown("what it returns has the examples of the batch in an order that is not followed")
    return Kind(name="rows", dim=layout.dim, num_of_each=layout.inner)


def _unknown(reason: str) -> Kind:
    return Kind(name="unknown", reason=reason)


class Unused(LeftOut):
    """Stands for an output that ranks cannot put together: any use of it is refused."""

    def __init__(self, reason: str, refuse: Refuse) -> None:
        super().__init__(reason, refuse)
        self.why = f"the program uses what ranks cannot put together: {reason}"

    def __copy__(self) -> "Unused":
        return self

    def __deepcopy__(self, _: Any) -> "Unused":
        # Of the model that keeps it: nobody has used it yet.
        return self

    def __reduce_ex__(self, _: Any) -> Never:
        self._refuse()

    def _refuse(self, *_: Any) -> Never:
        raise self._error(self.why)


def put_left(left: Sequence[LeftTensor], kinds: Sequence[Kind], result: Callable[[int], torch.Tensor], first: int, refuse: Refuse) -> None:  # fmt: skip
    """Puts what the whole has left, with its positions from `first` on, in the place of what a part has left."""
    for at, each in enumerate(left, first):
        kind = kinds[at]
        if kind.name == "same" and not each.tensor.requires_grad:
            continue
        other = Unused(f"{each.path} ({kind.reason})", refuse) if kind.name == "unknown" else result(at)
        if other is not each.tensor and not each.put(other):
            raise refuse(f"{each.path} was made of the rows, and nothing else can be put in its place")


def refuse_marked(parts: Sequence[torch.Tensor], refuse: Refuse) -> None:
    """Refuses where the model has put something on a tensor that another one takes the place of, the whole batch's."""
    for part in parts:
        if part.retains_grad and not part.is_leaf:
            raise refuse(
                "the model asks for the gradient of one of its own results (retain_grad), and gets that of a part: ask for it outside of the model"
            )
        if getattr(part, "__dict__", None):
            raise refuse(
                "the model puts an attribute on a tensor that it returns, which that of the whole batch does not have: return it beside the tensor"
            )


def as_returned(output: Any, kinds: Sequence[Kind], result: Callable[[int], torch.Tensor], num_examples: int, refuse: Refuse) -> Any:  # fmt: skip
    """What the model has returned for a part of so many examples, with what it returns for the whole: `result` has the tensors by their positions."""
    left = iter(enumerate(kinds))

    def put(leaf: Any) -> Any:
        at, kind = next(left)
        if kind.name == "unknown":
            return Unused(kind.reason, refuse)
        if isinstance(leaf, torch.Tensor):
            return result(at)
        found = kind.of_whole(leaf, num_examples)
        if found is None and leaf is not None:
            return Unused("it returns a number that depends on how many examples there are", refuse)
        return found

    return mapped(output, put)


def numbers_of_terms(
    kinds: Sequence[Kind], terms: Sequence[Term], num_examples: int, device: torch.device
) -> torch.Tensor | None:
    """For each mean that an output is over, the number of this rank's terms, and the sum that it is made of; None where there is no mean."""
    means = means_of(kinds)
    if not means:
        return None
    found = [num_examples if mean == ROWS else terms[mean].num_terms for mean in means]
    found += [0 if (divisor := _divisor_of(mean, terms)) is None else divisor.base for mean in means]
    return torch.stack([torch.as_tensor(each, dtype=torch.float64, device=device) for each in found])


def means_of(kinds: Sequence[Kind]) -> list[int]:
    """All means that outputs are over."""
    return sorted({mean for kind in kinds for mean in kind.means})


def _divisor_of(mean: int, terms: Sequence[Term]) -> Divisor | None:
    return None if mean == ROWS else terms[mean].divisor


def weights_of(kinds: Sequence[Kind], counts: Sequence[torch.Tensor], terms: Sequence[Term], refuse: Refuse) -> list[list[float] | None]:  # fmt: skip
    """For each output that is a total the weight of each rank's part, from the `counts` of all ranks; None for the others.

    Raises:
        ApplyError: a loss adds up means over other numbers of terms, of which one part has another share than of the rest.
    """
    means = means_of(kinds)
    table = torch.stack(list(counts)).double().cpu() if means else torch.empty(0)
    of_all = {mean: _shares_of(table[:, at], table[:, at + len(means)], _divisor_of(mean, terms), refuse) for at, mean in enumerate(means)}  # fmt: skip
    is_rounded = any(isinstance(t.num_terms, torch.Tensor) and t.num_terms.is_floating_point() for t in terms)
    found: list[list[float] | None] = []
    for kind in kinds:
        if kind.name != "total":
            found.append(None)
            continue
        if not kind.means:
            found.append([])
            continue
        shares = torch.stack([of_all[mean] for mean in sorted(kind.means)], 1)
        if not bool(((shares - shares[:, :1]).abs() <= (_ROUNDED if is_rounded else _EXACT)).all()) and not bool(shares.isnan().all()):  # fmt: skip
            raise refuse(
                "the loss adds means over different numbers of terms (ignored targets), and their shares differ "
                "between parts of the batch"
            )
        if kind.has_constants and bool((shares[:, 0].sum() - 1).abs() > _ROUNDED):
            raise refuse(
                "the loss is divided by a sum with something besides (+ 1e-8, clamp), and a number is added to it: add that to the loss outside of the model"
            )
        found.append(shares[:, 0].tolist())
    return found


def _shares_of(own: torch.Tensor, sums: torch.Tensor, divisor: Divisor | None, refuse: Refuse) -> torch.Tensor:
    """The share of each rank in a mean, of which it has so many terms."""
    if divisor is None:
        return own / own.sum(0)
    if not divisor.is_as_made():
        raise refuse("the loss is divided by a number that was written to in the meantime")
    whole = divisor.of(sums.sum().to(divisor.base.dtype).to(divisor.base.device)).double().cpu()
    if bool((own == 0).any()):
        raise refuse(
            "the loss is divided by a sum that is zero for one part of the batch (all of it is masked): divide by sum.clamp(min=1)"
        )
    return own / whole
