"""The linear head and its cross-entropy in one autograd function, chunk by chunk, so that the full logits are never materialised.

Two ways to the gradients. `forward`: each chunk of tokens computes its share of all gradients at once, as the incoming gradient of the loss is
one number that can be multiplied in later; three matrix products, as without chunks. `backward`: the forward pass saves one log-sum-exp per
token and the backward pass recomputes the logits, a slice of the vocabulary at a time; a fourth product, but no gradient of the weight is held
until then, and it is summed over all tokens at once as in the plain model.
"""

import dataclasses
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

import torch
from torch.nn import functional

from tightfit.effects.ambient import Ambient
from tightfit.effects.global_settings import precisions
from tightfit.effects.users_code import is_users_function
from tightfit.effects.values.contents import contents_of, is_any_written
from tightfit.effects.values.value_checks import has_values
from tightfit.errors import ApplyError
from tightfit.techniques.loss_head.loss_options import NUM_WEIGHT_BLOCKS, GradientsIn
from tightfit.techniques.wrappers.first_order import Refuse, first_order
from tightfit.torch_hooks.backward import keeps_graph

_HALVES = (torch.float16, torch.bfloat16)
_SLICE_MULTIPLE = 128  # of rows of the weight in a slice: what matrix kernels read in one go


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Multiplies by `factor`, or divides by it."""

    factor: float
    divides: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tanh:
    """The hyperbolic tangent, of a soft-cap."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """A change of dtype."""

    source: torch.dtype
    target: torch.dtype


Pointwise: TypeAlias = Scale | Tanh | Cast


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """The loss to compute: the arithmetic dtype of the head, the operators on the logits, and the arguments of the cross-entropy.

    `gradients_in` is None where no gradients are wanted.
    """

    head_type: torch.dtype
    num_classes: int
    pointwise: tuple[Pointwise, ...]
    reduction: str
    ignore_index: int
    label_smoothing: float
    num_chunks: int
    gradients_in: GradientsIn | None
    head: Ambient
    """The settings that the head was called with."""
    refuse: Refuse = ApplyError

    def as_head(self) -> AbstractContextManager[None]:
        """Computes logits as the head was asked to, where products are rounded otherwise now."""
        return nullcontext() if self.head.rounds_as_now() else self.head.put_back()

    @property
    def result_type(self) -> torch.dtype:
        """The dtype of the logits that the cross-entropy sees, and so of the loss."""
        casts = [change.target for change in self.pointwise if isinstance(change, Cast)]
        return casts[-1] if casts else self.head_type

    @property
    def wide_type(self) -> torch.dtype:
        """The dtype that probabilities are computed in: float32, or float64 for doubles."""
        return torch.promote_types(self.result_type, torch.float32)

    @property
    def sum_type(self) -> torch.dtype:
        """The dtype that gradients are summed in."""
        return torch.promote_types(self.head_type, torch.float32)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Gradients:
    """The sums that chunks are added to. Gradients in half precision are summed in float32, except the hidden states', which have one term each."""

    hidden: torch.Tensor | None
    weight: torch.Tensor | None
    bias: torch.Tensor | None


class ChunkedCrossEntropy(torch.autograd.Function):
    """`apply(hidden, bias, weight, target, loss)`: `(N, H)`, `(V,)` or None, `(V, H)`, `(N,)` of classes; a scalar, or `(N,)` unreduced.

    The gradient of the bias comes before that of the weight, as from a plain head: hooks on them are called in that order.

    Gradients in the forward pass are the method of Liger-Kernel (Hsu et al. 2024, arXiv:2410.10989); those in the backward pass save what Cut Your
    Losses (Wijmans et al. 2024, arXiv:2411.09009) saves, without its skipping of small gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        bias: torch.Tensor | None,
        weight: torch.Tensor,
        target: torch.Tensor,
        loss: Loss,
    ) -> torch.Tensor:
        """The loss; if `loss.gradients_in` is "forward", the gradients are stored on `ctx` too."""
        ctx.is_cast = torch.is_autocast_enabled(hidden.device.type)
        with torch.autocast(hidden.device.type, enabled=False):
            # Autocast is off: the casts are part of `loss`, taken when the head was called, and in the backward
            # pass autocast may not be on any more.
            rows, log_sums, gradients = _through_tokens(ctx, hidden, weight, bias, target, loss)
            ctx.loss, ctx.precisions = loss, precisions()
            ctx.refuse = loss.refuse
            ctx.gradients = gradients
            if loss.gradients_in is not None:
                ctx.save_for_backward(hidden, weight, bias, target, log_sums)
                ctx.contents = contents_of([hidden, weight, bias, target])
            if loss.reduction == "none":
                return rows
            total = rows.sum(dtype=loss.wide_type)
            if loss.reduction == "mean":
                # Without a clamp: the mean over no targets is NaN, as in torch.
                total = total / (target != loss.ignore_index).sum()
            return total.to(loss.result_type)

    @staticmethod
    @first_order("chunked_loss", "; leave chunked_loss out of the plan")
    def backward(ctx: Any, *grad_outputs: torch.Tensor) -> Any:  # pyrefly: ignore[bad-override]
        """The gradients from the forward pass, or recomputed ones; a retained graph recomputes them in every pass."""
        hidden, weight, bias, target, log_sums = ctx.saved_tensors
        (gradient,) = grad_outputs
        if torch.is_autocast_enabled(hidden.device.type) and not (ctx.is_cast or hidden.dtype in _HALVES):
            raise ctx.refuse("the backward pass runs under autocast and the loss did not; leave chunked_loss out")
        if is_users_function(functional.linear):
            raise ctx.refuse(
                "torch.nn.functional.linear was replaced between forward and backward, and the backward pass runs "
                "the head again; leave chunked_loss out"
            )
        if is_any_written(ctx.contents, [hidden, weight, bias, target]):
            raise ctx.refuse(
                "the head's weight, its input or the targets were modified between forward and backward without "
                "autograd seeing it (through .data); leave chunked_loss out"
            )
        with torch.autocast(hidden.device.type, enabled=False):
            # Where the graph is kept, each pass computes them anew, so that all give the same bits; and so does one that rounds products otherwise than the
            # forward did.
            gradients = None if keeps_graph() or ctx.precisions != precisions() else ctx.gradients
            if gradients is None:
                ctx.gradients = None
                gradients = _through_vocabulary(ctx, hidden, weight, bias, target, log_sums, gradient)
            else:
                ctx.gradients = None
                if ctx.loss.reduction == "mean":
                    gradient = gradient / (target != ctx.loss.ignore_index).sum().clamp(min=1)
                for part in (gradients.hidden, gradients.weight, gradients.bias):
                    if part is not None:
                        part.mul_(gradient)
            return (
                _as_type_of(gradients.hidden, hidden),
                _as_type_of(gradients.bias, bias),
                _as_type_of(gradients.weight, weight),
                None,
                None,
            )


@dataclasses.dataclass(slots=True, kw_only=True)
class _Tokens:
    """The loop over chunks of tokens: `rows` and `log_sums` have one value per token, `places` the class whose logit is looked up.

    Gradients are those of the sum of all losses: the backward pass multiplies by the incoming gradient and the mean's divisor. So nothing
    underflows in half precision, and ignored tokens can be removed from the smaller factor of each product.
    """

    loss: Loss
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    is_counted: torch.Tensor
    places: torch.Tensor
    rows: torch.Tensor
    log_sums: torch.Tensor | None
    gradients: _Gradients | None

    def chunk(self, chunk: slice) -> None:
        """Computes the loss of these tokens, and their share of the gradients if these are computed in the forward pass."""
        part = self.hidden[chunk].to(self.loss.head_type)
        where = self.places[chunk]
        with self.loss.as_head():
            logits = functional.linear(part, self.weight, self.bias)
        logits, kept = _forward(logits, self.loss.pointwise)
        logits = logits.to(self.loss.wide_type)
        logs = functional.log_softmax(logits, -1)
        of_target = logs.gather(1, where)
        if self.log_sums is not None:
            self.log_sums[chunk] = logits.gather(1, where) - of_target
        del logits
        rows = _smoothed(logs, of_target, self.loss)
        self.rows[chunk] = torch.where(self.is_counted[chunk], rows, 0).squeeze(1)
        if self.gradients is not None:
            # In place: log-probabilities become probabilities, without a third tensor of this size.
            slope = _slope(logs.exp_(), where, 1 - self.loss.label_smoothing, self.loss).to(self.loss.result_type)
            del logs
            slope = _backward(slope, self.loss.pointwise, kept)
            self._add(self.gradients, chunk, slope, part, self.is_counted[chunk].to(slope.dtype))

    def _add(
        self, gradients: _Gradients, chunk: slice, slope: torch.Tensor, part: torch.Tensor, counted: torch.Tensor
    ) -> None:
        if gradients.hidden is not None:
            gradients.hidden[chunk] = (slope @ self.weight).mul_(counted)
        if gradients.weight is not None:
            _add_product(gradients.weight, slope.t(), part * counted)
        if gradients.bias is not None:
            gradients.bias.add_((slope.t() @ counted).squeeze(1))


@dataclasses.dataclass(slots=True, kw_only=True)
class _Vocabulary:
    """The loop over slices of the vocabulary."""

    loss: Loss
    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    target: torch.Tensor
    is_counted: torch.Tensor
    log_sums: torch.Tensor
    gradient_of_rows: torch.Tensor
    gradients: _Gradients

    def slice(self, begin: int, end: int) -> None:
        """Adds the contribution of the classes in `range(begin, end)` to the gradients."""
        part = self.weight[begin:end].to(self.loss.head_type)
        bias = None if self.bias is None else self.bias[begin:end].to(self.loss.head_type)
        with self.loss.as_head():
            logits = functional.linear(self.hidden, part, bias)
        logits, kept = _forward(logits, self.loss.pointwise)
        logits = logits.to(self.loss.wide_type)
        probabilities = logits - self.log_sums
        del logits
        inside = self.is_counted & (self.target >= begin) & (self.target < end)
        hit = inside.to(self.loss.wide_type).mul_(1 - self.loss.label_smoothing)
        places = torch.where(inside, self.target - begin, 0)
        slope = _slope(probabilities.exp_(), places, hit, self.loss).mul_(self.gradient_of_rows)
        slope = slope.to(self.loss.result_type)
        del probabilities
        slope = _backward(slope, self.loss.pointwise, kept)
        if self.gradients.weight is not None:
            self.gradients.weight[begin:end] = slope.t() @ self.hidden
        if self.gradients.bias is not None:
            self.gradients.bias[begin:end] = slope.sum(0)
        if self.gradients.hidden is not None:
            _add_product(self.gradients.hidden, slope, part)


def _check_labels(target: torch.Tensor, num_classes: int, ignore_index: int) -> None:
    """Raises the error of torch's own kernel for the host (aten/src/ATen/native/LossNLL.cpp); on a card labels out of bounds are an assertion of the device's in both."""
    if target.device.type != "cpu" or not has_values(target):
        return
    wrong = target[(target != ignore_index) & ((target < 0) | (target >= num_classes))]
    if len(wrong):
        raise IndexError(f"Target {int(wrong[0])} is out of bounds.")


def _through_tokens(
    ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, target: torch.Tensor, loss: Loss
) -> tuple[torch.Tensor, torch.Tensor | None, _Gradients | None]:
    num_tokens, device = len(hidden), hidden.device
    is_counted = (target != loss.ignore_index).unsqueeze(1)
    _check_labels(target, len(weight), loss.ignore_index)
    tokens = _Tokens(
        loss=loss,
        hidden=hidden,
        weight=weight.to(loss.head_type),
        bias=None if bias is None else bias.to(loss.head_type),
        is_counted=is_counted,
        # Ignored targets (-100) are no index: looked up as class 0, and masked afterwards.
        places=torch.where(is_counted, target.unsqueeze(1), 0),
        rows=torch.empty(num_tokens, dtype=loss.result_type, device=device),
        log_sums=torch.empty((num_tokens, 1), dtype=loss.wide_type, device=device) if loss.gradients_in else None,
        gradients=_empty_gradients(ctx, hidden, weight, bias, loss) if loss.gradients_in == "forward" else None,
    )
    size = -(-num_tokens // loss.num_chunks)
    for begin in range(0, num_tokens, size):
        tokens.chunk(slice(begin, begin + size))
    return tokens.rows, tokens.log_sums, tokens.gradients


def _through_vocabulary(
    ctx: Any,
    hidden: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    target: torch.Tensor,
    log_sums: torch.Tensor,
    gradient: torch.Tensor,
) -> _Gradients:
    loss: Loss = ctx.loss
    is_counted = (target != loss.ignore_index).unsqueeze(1)
    needs_hidden, needs_bias, needs_weight = ctx.needs_input_grad[:3]
    vocabulary = _Vocabulary(
        loss=loss,
        hidden=hidden.to(loss.head_type),
        weight=weight,
        bias=bias,
        target=target.unsqueeze(1),
        is_counted=is_counted,
        log_sums=log_sums,
        gradient_of_rows=_gradient_of_rows(is_counted, loss, gradient.to(loss.wide_type)),
        gradients=_Gradients(
            hidden=torch.zeros_like(hidden, dtype=loss.sum_type) if needs_hidden else None,
            weight=torch.empty_like(weight) if needs_weight else None,
            bias=torch.empty_like(bias) if needs_bias and bias is not None else None,
        ),
    )
    size = -(-len(weight) // (loss.num_chunks * _SLICE_MULTIPLE)) * _SLICE_MULTIPLE
    for begin in range(0, len(weight), size):
        vocabulary.slice(begin, min(begin + size, len(weight)))
    return vocabulary.gradients


def _forward(logits: torch.Tensor, changes: tuple[Pointwise, ...]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The logits that the cross-entropy sees, and the outputs of each `Tanh`, which `_backward` needs."""
    kept = []
    for change in changes:
        match change:
            case Scale():
                logits = logits / change.factor if change.divides else logits * change.factor
            case Tanh():
                logits = logits.tanh()
                kept.append(logits)
            case Cast():
                logits = logits.to(change.target)
    return logits, kept


def changed_logits(logits: torch.Tensor, changes: tuple[Pointwise, ...]) -> torch.Tensor:
    """The logits of a head after the pointwise operators."""
    return _forward(logits, changes)[0]


def _backward(slope: torch.Tensor, changes: tuple[Pointwise, ...], kept: list[torch.Tensor]) -> torch.Tensor:
    """The gradient with respect to the head's own output, in its dtype."""
    for change in reversed(changes):
        match change:
            case Scale():
                slope = slope / change.factor if change.divides else slope * change.factor
            case Tanh():
                slope = torch.ops.aten.tanh_backward(slope.to(kept[-1].dtype), kept.pop())
            case Cast():
                slope = slope.to(change.source)
    return slope


def _smoothed(logs: torch.Tensor, of_target: torch.Tensor, loss: Loss) -> torch.Tensor:
    """The loss of each token from its log-probabilities, shape `(N, 1)`, as torch defines `label_smoothing`."""
    if not loss.label_smoothing:
        return -of_target
    return (loss.label_smoothing - 1) * of_target - loss.label_smoothing * logs.mean(-1, keepdim=True)


def _gradient_of_rows(is_counted: torch.Tensor, loss: Loss, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient with respect to each token's loss, shape `(N, 1)`."""
    if loss.reduction == "mean":
        gradient = gradient / is_counted.sum()
    elif loss.reduction == "none":
        gradient = gradient.reshape(-1, 1)
    return torch.where(is_counted, gradient, 0)


def _slope(probabilities: torch.Tensor, places: torch.Tensor, hit: torch.Tensor | float, loss: Loss) -> torch.Tensor:
    """Turns probabilities into the gradient of each token's own loss, in place; `hit` is taken off at `places`."""
    # One place in each row, so nothing is added up and a plain scatter stays deterministic.
    slope = probabilities.scatter_(1, places, probabilities.gather(1, places) - hit)
    if loss.label_smoothing:
        slope.sub_(loss.label_smoothing / loss.num_classes)
    return slope


def _empty_gradients(
    ctx: Any, hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, loss: Loss
) -> _Gradients:
    needs_hidden, needs_bias, needs_weight = ctx.needs_input_grad[:3]
    return _Gradients(
        hidden=torch.empty_like(hidden, dtype=loss.head_type) if needs_hidden else None,
        weight=torch.zeros_like(weight, dtype=loss.sum_type) if needs_weight else None,
        bias=torch.zeros_like(bias, dtype=loss.sum_type) if needs_bias and bias is not None else None,
    )


def _add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
        return
    size = -(-len(left) // NUM_WEIGHT_BLOCKS)
    for begin in range(0, len(left), size):
        # A block of rows at a time: the product in half precision is a temporary of that size.
        total[begin : begin + size].add_(left[begin : begin + size] @ right)


def _as_type_of(gradient: torch.Tensor | None, of: torch.Tensor | None) -> torch.Tensor | None:
    return None if gradient is None or of is None else gradient.to(of.dtype)
