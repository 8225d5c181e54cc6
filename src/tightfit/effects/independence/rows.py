"""The layout of rows in a tensor (their dimension, and what it is merged with), and the corresponding pattern in its storage.

A batch of B rows that is viewed with its T tokens as one dimension of B * T has `outer` 1 and `inner` T; heads and batch merged to H * B have
`outer` H. In memory all of these are one pattern: runs of a fixed number of bytes belong to row 0, 1, 2, ... and again to 0. The pattern
belongs to the storage, so that views (transposed, split, expanded, sliced) need no rule.
"""

import dataclasses

import torch


class Mixes(Exception):
    """Rows are mixed, or it is not known that they are independent; the message says by which operator."""


class Unsteady(Mixes):
    """The code does something else each time it is run with as many rows: something has changed that no snapshot of a state has, and that nobody can put back."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowLayout:
    """Dimension `dim` of a tensor has `outer` times all rows, and `inner` positions of each: `outer * num_rows * inner` in all."""

    dim: int
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> "RowLayout":
        """The same in another dimension."""
        return dataclasses.replace(self, dim=dim)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pattern:
    """Byte `b` of a storage belongs to row `b // run_bytes % num_rows`."""

    run_bytes: int
    num_rows: int

    def layout_in(self, tensor: torch.Tensor) -> RowLayout:
        """The layout of the rows in `tensor`, which shares the storage.

        Raises:
            Mixes: the tensor has some rows only, or not in one dimension of its own.
        """
        item, run, total = tensor.element_size(), self.run_bytes, self.run_bytes * self.num_rows
        offset = tensor.storage_offset() * item
        inside, found = offset % run, None
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
            step = stride * item
            # A step over whole cycles stays in the same row: a dimension outside of the rows.
            if size == 1 or step % total == 0:
                continue
            # A dimension inside of one row's run: positions of the same row.
            if (size - 1) * step < run:
                inside += (size - 1) * step
                continue
            # The dimension of the rows itself, possibly merged: it must walk through runs exactly, all rows of
            # each cycle.
            inner = run // step if step < run else 1
            if inner * step != run or size % (inner * self.num_rows) or found is not None:
                raise Mixes("splits rows")
            inside += (inner - 1) * step
            found = RowLayout(dim=dim, outer=size // (inner * self.num_rows), inner=inner)
        if found is None or inside + item > run or offset // run % self.num_rows:
            raise Mixes("splits rows")
        return found


def pattern_of(tensor: torch.Tensor, layout: RowLayout, num_rows: int) -> Pattern:
    """The pattern of the storage of `tensor` whose rows have this layout.

    Raises:
        Mixes: that is no pattern.
    """
    run_bytes = layout.inner * tensor.stride(layout.dim) * tensor.element_size()
    pattern = Pattern(run_bytes=run_bytes, num_rows=num_rows) if run_bytes else None
    if pattern is None or pattern.layout_in(tensor) != layout:
        raise Mixes("lays rows out in a way that cannot be followed")
    return pattern
