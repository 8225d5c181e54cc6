"""Optimizers that step by another one: SAM, Lookahead and others hold it as an attribute, and need not step themselves."""

import torch


def holds_another(optimizer: torch.optim.Optimizer) -> bool:
    """Whether an optimizer has another one, or a list of them, among its attributes: a step of it may be one of theirs alone."""
    for value in vars(optimizer).values():
        held = value if isinstance(value, list | tuple) else (value,)
        if any(isinstance(one, torch.optim.Optimizer) for one in held):
            return True
    return False
