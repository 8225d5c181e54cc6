"""Puts a plan on a program that knows nothing of it: waits until its model and optimizers are there, and applies just before the first forward.

Two entry points of torch are watched, `Optimizer.__init__` and `Module.__call__`. The outermost module that is called with gradients and has
parameters to train is a root; a program may have several (a generator and a discriminator), and each gets the choices that name its class.
The same code runs in a capture on the virtual GPU (`prepare`) and in a real run (`tightfit run`).
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from tightfit.errors import ApplyError
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import apply_choices, check_inputs, choices_for, input_shapes, is_module, num_parameters
from tightfit.techniques.session import Session


@dataclasses.dataclass(slots=True, kw_only=True)
class Root:
    """A model of the program: its class, the elements of its parameters, the shapes of the inputs of its first step."""

    name: str
    num_parameters: int
    inputs: Mapping[str, Sequence[int]]
    session: Session


class Attachment:
    """Choices that wait for their models. `planned` are the roots as the plan describes them, empty while it is being made.

    `on_apply` is called with each session, before the forward that it was made for.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        planned: Sequence[Mapping[str, Any]] = (),
        on_apply: Callable[[Session], None] | None = None,
    ) -> None:
        self._choices = choices
        self._planned = {root["class"]: root for root in planned}
        self._on_apply = on_apply
        self._seen: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self._optimizers: list[torch.optim.Optimizer] = []
        self._depth = 0
        self.roots: list[Root] = []

    def install(self) -> Callable[[], None]:
        """Begins to watch; returns what ends it."""
        construct, call = torch.optim.Optimizer.__init__, torch.nn.Module.__call__

        def constructed(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
            construct(optimizer, *args, **kwargs)
            if not any(known is optimizer for known in self._optimizers):
                self._optimizers.append(optimizer)

        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            if self._depth or not torch.is_grad_enabled():
                return call(module, *args, **kwargs)
            if module not in self._seen:
                self._meet(module, args, kwargs)
            self._depth += 1
            try:
                return call(module, *args, **kwargs)
            finally:
                self._depth -= 1

        torch.optim.Optimizer.__init__ = constructed  # type: ignore[method-assign]
        torch.nn.Module.__call__ = called  # type: ignore[method-assign]

        def end() -> None:
            torch.optim.Optimizer.__init__ = construct  # type: ignore[method-assign]
            torch.nn.Module.__call__ = call  # type: ignore[method-assign]

        return end

    def _meet(self, module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        # A part of a model is no root of its own when a recomputation calls it in the backward pass.
        for part in module.modules():
            self._seen.add(part)
        trained = {id(p) for p in module.parameters() if p.requires_grad}
        if not trained:
            return
        name = type(module).__name__
        planned = self._planned.get(name)
        if planned is not None and planned["num_parameters"] != num_parameters(module):
            raise ApplyError(
                f"the plan is for a {name} of {planned['num_parameters']:,} parameters, and this one has {num_parameters(module):,}; make a plan for it"
            )
        own = [o for o in self._optimizers if any(id(p) in trained for g in o.param_groups for p in g["params"])]
        choices = choices_for(self._choices, name, is_only=not self.roots)
        session = apply_choices(choices, module, own)
        if planned is not None:
            check_inputs(session, planned["inputs"])
        self.roots.append(
            Root(name=name, num_parameters=num_parameters(module), inputs=input_shapes(args, kwargs), session=session)
        )
        if self._on_apply is not None:
            self._on_apply(session)

    def report(self) -> dict[str, Any]:
        """The roots that were met, and what the sessions have to say.

        Raises:
            ApplyError: the plan names a model that was never called.
        """
        names = {root.name for root in self.roots}
        missing = {c.where.partition(".")[0] for c in self._choices if is_module(c.where)} - names
        if missing:
            raise ApplyError(
                f"the plan names {' and '.join(sorted(missing))}, which the program never called with gradients (it called {', '.join(sorted(names)) or 'no model'}); make a plan for it"
            )
        return {
            "roots": [
                {"class": r.name, "num_parameters": r.num_parameters, "inputs": dict(r.inputs)} for r in self.roots
            ],
            "notes": [note for root in self.roots for note in root.session.notes],
            "statistics": {key: n for root in self.roots for key, n in root.session.statistics.items()},
        }


def prepare(argument: Mapping[str, Any]) -> Callable[[], dict[str, Any]]:
    """As `tightfit.capture.trace.Preparation` has it: attaches the choices, and reports when the run is over."""
    attachment = Attachment([Choice(**choice) for choice in argument["choices"]], argument.get("roots", ()))
    attachment.install()
    return attachment.report
