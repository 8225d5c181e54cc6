"""Optimizers that a program makes when others have trained: what a plan has for optimizers is put on them too, or left out where they cannot have it.

A script that goes on with SGD after Adam, or fits a small model by LBFGS on the outputs of a large one, would lose what it has trained to a refusal, and needs
nothing of what is left out but its memory or its time. So would one that prunes its model, unfreezes blocks or builds the model anew before it makes a new
optimizer: the plan is put on that model without what it cannot have any longer.
"""

from collections.abc import Sequence

import torch

from tightfit.errors import ApplyError, apply_errors_said, forget_apply_errors_since
from tightfit.planner.plan import Choice
from tightfit.runtime.apply import OF_OPTIMIZERS, apply_choices
from tightfit.runtime.input_shapes import Tell
from tightfit.techniques.session import Session
from tightfit.torch_hooks.weak_references import WeakTable


class LaterOptimizers:
    """The optimizers of a program that were made later; `tell` is called with what is left out for one."""

    def __init__(self, tell: Tell, check_steps: int, disk_folder: str | None) -> None:
        self._tell = tell
        self._check_steps = check_steps
        self._disk_folder = disk_folder
        self._made_later: WeakTable[torch.optim.Optimizer, None] = WeakTable()

    def add(self, optimizer: torch.optim.Optimizer) -> None:
        """It was made when a session had others already."""
        self._made_later[optimizer] = None

    def applied(
        self,
        choices: Sequence[Choice],
        model: torch.nn.Module,
        optimizers: Sequence[torch.optim.Optimizer],
        *,
        is_planned: bool,
        is_anew: bool = False,
    ) -> tuple[Session, list[Choice]]:
        """The session of `apply_choices`, with the choices that it has: all of them, unless there is a later optimizer and the plan `is_planned` already. Left out is what
        concerns optimizers, and anything where the model, or one of its class, had a session before (`is_anew`).

        Raises:
            ApplyError: some cannot be applied.
        """
        left = list(choices)
        may_leave_out = is_planned and any(optimizer in self._made_later for optimizer in optimizers)
        said = apply_errors_said()
        while True:
            try:
                session = apply_choices(
                    left, model, optimizers, check_steps=self._check_steps, disk_folder=self._disk_folder
                )
                return session, left
            except ApplyError as error:
                of_technique = [c for c in left if c.technique == error.technique]
                refused = [c for c in of_technique if c.where in error.places] or of_technique
                if not refused or not may_leave_out or not (is_anew or all(c.where in OF_OPTIMIZERS for c in refused)):
                    raise
                # These are no refusals that the program has swallowed; there is one for each place.
                forget_apply_errors_since(said)
                self._tell(f"{error}; the {type(model).__name__} goes on without it, as its optimizer was made later")
                left = [choice for choice in left if choice not in refused]
