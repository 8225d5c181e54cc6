"""The gradients that a step begins with, so that it can be begun again.

Most steps begin with gradients that they drop or zero before their first backward pass; holding these would take the memory that the step needs. So
nothing is held until the step's first backward pass shows which of them it is going to add to: those are copied, there and then.
"""

import weakref

import torch

from tightfit.torch_hooks.backward import BackwardPass


class StepGradients:
    """The gradients of `leaves`, and whether they take any, at the beginning of a step. Enter it with `torch_hooks.backward.on_backward` while the step runs."""

    def __init__(self, leaves: list[torch.Tensor]) -> None:
        self._leaves = leaves
        self._take_gradients = [leaf.requires_grad for leaf in leaves]
        # References without callbacks: what the step drops is gone.
        self._first = [None if p.grad is None else (weakref.ref(p.grad), p.grad._version) for p in leaves]
        self._copies: dict[int, torch.Tensor] = {}
        self._zeroed: list[torch.Tensor] = []
        self.is_seen = False

    def concerned_parameters(self) -> None:
        """Every pass of the process."""

    def around_backward(self, backward: BackwardPass) -> object:
        """Before the first pass that adds to gradients: copies those that it will add to."""
        if backward.accumulates and not self.is_seen:
            self.is_seen = True
            self._look()
        return backward.run()

    def _look(self) -> None:
        for number, (leaf, first) in enumerate(zip(self._leaves, self._first, strict=True)):
            gradient = leaf.grad
            if first is None or gradient is None or first[0]() is not gradient:
                continue
            if gradient._version == first[1]:
                self._copies[number] = _copy(gradient)
            else:
                # Zeroed in place, which may be done twice. That it was is read if ever it matters: reading it here would wait for the card.
                self._zeroed.append(_largest(gradient))

    def obstacle(self) -> str:
        """Why the gradients cannot be what they were; empty if they can."""
        if not self.is_seen:
            # It came to no backward pass: what it has zeroed until now it will zero again.
            self._look()
            self._copies.clear()
        if any(bool(largest != 0) for largest in self._zeroed):
            return "it changes the gradients of the step before in place"
        return ""

    def restore(self) -> None:
        """Gives each leaf the gradient that the step began with; one that the step had dropped is not there."""
        for number, (leaf, first) in enumerate(zip(self._leaves, self._first, strict=True)):
            former = None if first is None else first[0]()
            copied = self._copies.get(number)
            if copied is not None and former is not None:
                with torch.no_grad():
                    former.copy_(copied)
            leaf.grad = former
            if leaf.requires_grad != self._take_gradients[number]:
                leaf.requires_grad_(self._take_gradients[number])
        self._copies.clear()


def _largest(gradient: torch.Tensor) -> torch.Tensor:
    """The largest absolute value, on the device; 1 where the elements are not one strided range."""
    gradient = gradient.detach()
    if gradient.layout != torch.strided:
        return torch.ones(())
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient.resolve_conj())
    with torch.no_grad():
        # In one pass, without a tensor of that size: there is least memory to spare right before the backward pass.
        return torch.linalg.vector_norm(gradient, float("inf")) if gradient.numel() else torch.zeros(())


def _copy(gradient: torch.Tensor) -> torch.Tensor:
    """A copy beside the gradient, or at the host where the card has no room for it."""
    with torch.no_grad():
        try:
            return gradient.detach().clone()
        except torch.OutOfMemoryError:
            return gradient.detach().to("cpu")
