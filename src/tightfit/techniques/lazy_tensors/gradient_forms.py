"""One number of a gradient that depends on each of its elements and on its place: the product with a vector from the left and one from the right.

A norm and a sum are the same where rows, columns or signs change places. A bilinear form with vectors of irregular numbers is not: two gradients that differ by
a share of their norm have forms that differ by about as much. It takes one product of a matrix and a vector, and no memory to speak of.
"""

import numpy as np
import torch


class GradientForms:
    """The forms of gradients, with the vectors for each device, type and length that was met."""

    def __init__(self) -> None:
        self._vectors: dict[tuple[torch.device, torch.dtype, int, int], torch.Tensor] = {}

    def of(self, gradient: torch.Tensor) -> torch.Tensor:
        """The form as a tensor of no dimension beside the gradient, in float32 or wider."""
        with torch.no_grad():
            rows = _as_rows(gradient.detach())
            wide = torch.promote_types(rows.dtype, torch.float32)
            if not rows.numel():
                return torch.zeros((), dtype=wide, device=rows.device)
            along = torch.mv(rows, self._vector(rows, rows.dtype, 1))
            return torch.dot(along.to(wide), self._vector(rows, wide, 0))

    def _vector(self, rows: torch.Tensor, dtype: torch.dtype, dim: int) -> torch.Tensor:
        key = rows.device, dtype, -1 if dim else rows.shape[0], rows.shape[1]
        if key not in self._vectors:
            length = rows.shape[dim]
            numbers = np.random.default_rng(length).standard_normal(length)
            # Products with the vector for columns are not larger than a row's norm, which the type of a gradient in half precision can hold as a rule.
            numbers *= length**-0.5 if dim else 1.0
            made = torch.from_numpy(numbers).to(device=rows.device, dtype=dtype)
            # Both vectors are of one length where the matrix is square: the other one is not to be the same.
            self._vectors[key] = made if dim else made.flip(0) * float(rows.shape[1]) ** 0.5
        return self._vectors[key]


def _as_rows(gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as a matrix of real numbers, in the order of its memory where that is dense."""
    if gradient.is_complex():
        gradient = torch.view_as_real(gradient)
    if not gradient.is_contiguous():
        places = sorted(range(gradient.dim()), key=lambda dim: -gradient.stride(dim))
        gradient = gradient.permute(places).contiguous()
    return gradient.reshape(-1, gradient.shape[-1]) if gradient.dim() and gradient.numel() else gradient.reshape(1, -1)
