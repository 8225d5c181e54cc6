"""Updates of parameters within a backward pass: the hooks, what they refuse, and how gradients are clipped all the same.

A gradient that is gone cannot be accumulated, unscaled or clipped: whatever asks for that is answered with an error that says so rather than
with a wrong result. For clipping by norm the backward pass runs twice. The first pass keeps the graph and, of each gradient, its norm;
`clip_grad_norm_` gets the norm of them all; the second pass runs when the optimizer is stepped, and scales, updates and frees.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.nn.utils import clip_grad

from tightfit.errors import ApplyError
from tightfit.techniques.optimizer_steps import UpdateOne, groups_by_parameter
from tightfit.techniques.session import Session

_REMEDY = "leave updates in the backward pass out of the plan"


class Updates:
    """The hooks on the parameters of one optimizer, each of which `update` updates by itself.

    Without `clipping`, gradients are used up in the backward pass that makes them.
    """

    def __init__(
        self,
        session: Session,
        optimizer: torch.optim.Optimizer,
        update: UpdateOne,
        clipping: "Clipping | None",
    ) -> None:
        self.session = session
        self.optimizer = optimizer
        self.clipping = clipping
        self._update = update
        self._group_of = groups_by_parameter(optimizer)
        self._updated: dict[torch.Tensor, None] = {}
        self._used: list[dict[str, Any]] = []

    def install(self) -> None:
        """Hooks the parameters and the optimizer, until the session is undone."""
        # Python's collector does not see these hooks of a tensor: if they held the optimizer, it and its parameters would never be freed. The hook
        # of the optimizer's own step keeps this object.
        on_gradient = weakref.WeakMethod(self._gradient_is_there)

        def gradient_is_there(parameter: torch.Tensor) -> None:
            told = on_gradient()
            if told is not None:
                told(parameter)

        handles = [
            parameter.register_post_accumulate_grad_hook(gradient_is_there)
            for parameter in self._group_of
            if parameter.requires_grad
        ]
        handles.append(self.optimizer.register_step_pre_hook(self._before_step))
        for handle in handles:
            self.session.when_undone(handle.remove)
        if self.clipping is None:
            _refuse_clipping(self.session, self._updated)

    def _gradient_is_there(self, parameter: torch.Tensor) -> None:
        if self.clipping is not None and self.clipping.is_first_pass:
            self.clipping.remember(parameter)
            return
        if parameter in self._updated:
            raise ApplyError(
                f"a second backward pass came before the optimizer's step: gradients are accumulated; {_REMEDY}"
            )
        if not self._updated:
            self._used = _hyperparameters(self.optimizer)
        self._updated[parameter] = None
        if self.clipping is not None:
            self.clipping.scale(parameter)
        self._update(parameter, self._group_of[parameter])
        parameter.grad = None
        self.session.statistics["parameters updated in backward"] += 1

    def _before_step(self, _: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self.clipping is not None:
            if any(closure is not None for closure in (*args[1:], kwargs.get("closure"))):
                raise ApplyError(
                    f"the optimizer is stepped with a closure, which clips before the second pass could run; {_REMEDY}"
                )
            self.clipping.run_second_pass()
        if self._updated and _hyperparameters(self.optimizer) != self._used:
            raise ApplyError(f"the optimizer's groups were changed between the backward pass and its step; {_REMEDY}")
        self._updated.clear()


class Clipping:
    """The norm of all gradients in a first backward pass, and what it takes to run it again; one for all optimizers of a session."""

    def __init__(self, session: Session) -> None:
        self.is_first_pass = False
        self._norms: dict[torch.Tensor, torch.Tensor] = {}
        self._coefficient: torch.Tensor | None = None
        self._again: Callable[[], Any] | None = None
        self._is_running = False
        session.set(torch.autograd, "_engine_run_backward", self._twice(torch.autograd._engine_run_backward))
        session.set(clip_grad, "_get_total_norm", self._total_norm(clip_grad._get_total_norm))
        session.set(clip_grad, "_clip_grads_with_norm_", self._clip(clip_grad._clip_grads_with_norm_))

    def remember(self, parameter: torch.Tensor) -> None:
        """Keeps of a gradient its norm."""
        if parameter in self._norms:
            raise ApplyError(
                f"a second backward pass came before the optimizer's step: gradients are accumulated; {_REMEDY}"
            )
        if parameter.grad is not None:
            self._norms[parameter] = torch.linalg.vector_norm(parameter.grad)
            parameter.grad = None

    def scale(self, parameter: torch.Tensor) -> None:
        """Scales a gradient as `clip_grad_norm_` would have."""
        if self._coefficient is not None and parameter.grad is not None:
            parameter.grad.mul_(self._coefficient.to(parameter.grad.device))

    def run_second_pass(self) -> None:
        """Runs the backward pass again, now for the updates; nothing where there has been none since the last step."""
        again, self._again = self._again, None
        if again is not None:
            again()
        self._norms.clear()
        self._coefficient = None

    def _twice(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_backward(roots: Any, gradients: Any, keep_graph: bool, *args: Any, **kwargs: Any) -> Any:
            if self._is_running or not kwargs.get("accumulate_grad"):
                return run(roots, gradients, keep_graph, *args, **kwargs)
            self._is_running = self.is_first_pass = True
            try:
                result = run(roots, gradients, True, *args, **kwargs)
            finally:
                self._is_running = self.is_first_pass = False
            if self._norms:
                self._again = lambda: self._second(run, roots, gradients, keep_graph, *args, **kwargs)
            return result

        return run_backward

    def _second(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        self._is_running = True
        try:
            run(*args, **kwargs)
        finally:
            self._is_running = False

    def _total_norm(self, plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def total_norm(
            tensors: Sequence[torch.Tensor], norm_type: float = 2.0, *args: Any, **kwargs: Any
        ) -> torch.Tensor:
            if len(tensors) or not self._norms:
                return plain(tensors, norm_type, *args, **kwargs)
            if float(norm_type) != 2.0:
                raise ApplyError(
                    f"gradients are clipped by their {norm_type}-norm, and only the 2-norm is known; {_REMEDY}"
                )
            return plain(list(self._norms.values()), norm_type, *args, **kwargs)

        return total_norm

    def _clip(self, plain: Callable[..., None]) -> Callable[..., None]:
        def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **kwargs: Any) -> None:
            given = {parameters} if isinstance(parameters, torch.Tensor) else set(parameters)
            if not given & self._norms.keys():
                return plain(parameters, max_norm, total_norm, *args, **kwargs)
            if not self._norms.keys() <= given:
                raise ApplyError(f"only some of the model's gradients are clipped together; {_REMEDY}")
            # torch/nn/utils/clip_grad.py, `_clip_grads_with_norm_`
            self._coefficient = torch.clamp(float(max_norm) / (total_norm + 1e-6), max=1.0)
            return None

        return clip


def _refuse_clipping(session: Session, updated: dict[torch.Tensor, None]) -> None:
    plain = clip_grad._clip_grads_with_norm_

    def clip(parameters: Any, *args: Any, **kwargs: Any) -> None:
        given = {parameters} if isinstance(parameters, torch.Tensor) else set(parameters)
        if given & updated.keys():
            raise ApplyError(f"gradients are clipped, and were used up in the backward pass; {_REMEDY}")
        plain(parameters, *args, **kwargs)

    session.set(clip_grad, "_clip_grads_with_norm_", clip)


def _hyperparameters(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """What the groups say besides their parameters; a tensor is told from a changed one by its version."""
    return [
        {
            name: (id(value), value._version) if isinstance(value, torch.Tensor) else value
            for name, value in group.items()
            if name != "params"
        }
        for group in optimizer.param_groups
    ]
