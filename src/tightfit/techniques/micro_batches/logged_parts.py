"""Gathers the values that a LightningModule logs while its step runs in micro-batches, and logs them once for the whole batch.

Means are weighted by the examples of each part, and the loss is that of the batch. A metric object has seen every part and is logged as it is.
"""

import dataclasses
import inspect
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

# The reductions of `log` that are no mean.
_REDUCTIONS = {
    **{"sum": torch.sum, torch.sum: torch.sum, sum: torch.sum},
    **{"max": torch.amax, torch.max: torch.amax, max: torch.amax},
    **{"min": torch.amin, torch.min: torch.amin, min: torch.amin},
}


@dataclasses.dataclass(slots=True, kw_only=True)
class _Logged:
    """The calls with one name, by part: the arguments, the number of examples of each, and whether each value was the loss itself."""

    calls: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    weights: list[int] = dataclasses.field(default_factory=list)
    are_losses: list[bool] = dataclasses.field(default_factory=list)


class LoggedParts:
    """Replaces the `log` method of a LightningModule during a step."""

    def __init__(self, module: Any) -> None:
        self._module = module
        self._by_name: dict[str, _Logged] = {}
        self._new: list[dict[str, Any]] = []
        self._is_muted = False
        signature = inspect.signature(module.log)

        def gather(*args: Any, **kwargs: Any) -> None:
            if not self._is_muted:
                self._new.append(dict(signature.bind(*args, **kwargs).arguments))

        # The same object in each step: another one would look like a module that has changed.
        self._gather = gather

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """Gathers the module's logs for a block."""
        self._by_name, self._new = {}, []
        own = vars(self._module)
        before = own.get("log")
        own["log"] = self._gather
        try:
            yield
        finally:
            del own["log"]
            own.update({} if before is None else {"log": before})

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Ignores the module's logs for a block."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def forget(self) -> None:
        """Drops what was logged since the step began."""
        self._by_name, self._new = {}, []

    def end_part(self, loss: Any, num_examples: int) -> None:
        """Assigns the values logged since the last part to a part with this loss and number of examples."""
        for call in self._new:
            value = call["value"]
            is_loss = isinstance(value, torch.Tensor) and isinstance(loss, torch.Tensor) and _is_view(value, loss)
            # As Lightning itself does: a value with a graph would keep the part's activations alive.
            if isinstance(value, torch.Tensor) and not call.get("enable_graph"):
                call["value"] = value.detach()
            logged = self._by_name.setdefault(call["name"], _Logged())
            logged.calls.append(call)
            logged.weights.append(call.get("batch_size") or num_examples)
            logged.are_losses.append(is_loss)
        self._new = []

    def hand_over(self, loss: Any) -> None:
        """Logs each name once, for the batch with this loss."""
        by_name, self._by_name = self._by_name, {}
        for logged in by_name.values():
            call = dict(logged.calls[-1])
            if "batch_size" in call:
                call["batch_size"] = sum(logged.weights)
            # Not a mean of the parts' losses: with ignored targets these have other weights than examples.
            if all(logged.are_losses):
                call["value"] = loss.detach()
            elif isinstance(call["value"], torch.Tensor | numbers.Number):
                call["value"] = _joined(logged, call.get("reduce_fx", "mean"))
            self._module.log(**call)


def _is_view(value: torch.Tensor, loss: torch.Tensor) -> bool:
    return value.dim() == 0 and value.untyped_storage()._cdata == loss.untyped_storage()._cdata


def _joined(logged: _Logged, reduction: Any) -> torch.Tensor:
    values = [torch.as_tensor(call["value"]) for call in logged.calls]
    stacked = torch.stack([value.to(torch.promote_types(value.dtype, torch.float32)) for value in values])
    if reduction in _REDUCTIONS:
        return _REDUCTIONS[reduction](stacked, dim=0)
    weights = torch.tensor(logged.weights, dtype=stacked.dtype, device=stacked.device)
    return (stacked * weights.view(-1, *[1] * (stacked.dim() - 1))).sum(0) / sum(logged.weights)
