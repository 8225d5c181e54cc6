"""Gives a parameter a gradient back that was taken off it, whatever the program has made of its type meanwhile."""

import torch


def put_gradient(parameter: torch.Tensor, gradient: torch.Tensor | None) -> None:
    """Sets the gradient of a parameter to one that it has had."""
    # A program may allow gradients of another dtype, or of any (torch 2.10 and newer); of leaves alone (`functional_call` puts others in a model).
    allowed = getattr(parameter, "grad_dtype", parameter.dtype) if parameter.is_leaf else parameter.dtype
    if gradient is None or allowed is None or gradient.dtype == allowed:
        parameter.grad = gradient
        return
    # A program can set the data of a gradient to another dtype, which torch takes from nobody as a gradient.
    parameter.grad = torch.empty_like(parameter, dtype=allowed)
    parameter.grad.data = gradient.detach()
