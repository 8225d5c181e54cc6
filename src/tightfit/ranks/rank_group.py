"""The ranks of one run, which all do the same in the same order, and what they exchange.

The group is no default group of `torch.distributed`: the program, and libraries that ask for one, see a run on one card.
"""

import contextlib
import datetime
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tightfit.errors import TightfitError
from tightfit.ranks.rank_errors import RankLost, RanksDiffer

BUCKET_BYTES = 25 << 20
"""So many bytes of gradients are summed by one collective, as in DistributedDataParallel."""
_NUM_FIELDS = 8
# What ranks may be about to do when they meet, by the number that stands for it.
_ALL_MEETINGS = ("a forward pass", "the end of a forward pass", "a backward pass", "an optimizer's step", "the states of an optimizer", "the end of the script")  # fmt: skip
_TIMEOUT = datetime.timedelta(minutes=30)


class RankGroup:
    """This process among `size` ranks. Small messages go through gloo; tensors through NCCL where `on_cards`."""

    def __init__(self, store: Any, rank: int, size: int, *, on_cards: bool) -> None:
        self.rank, self.size, self.on_cards = rank, size, on_cards
        self._control: Any = dist.ProcessGroupGloo(dist.PrefixStore("control", store), rank, size, _TIMEOUT)
        self._data: Any = self._control
        if on_cards:
            self._data = dist.ProcessGroupNCCL(
                dist.PrefixStore("data", store), rank, size, dist.ProcessGroupNCCL.Options()
            )
        self._failure: TightfitError | None = None
        self._num_inside = 0

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Within a part: models that are called there have its rows, and are not divided once more."""
        self._num_inside += 1
        try:
            yield
        finally:
            self._num_inside -= 1

    @property
    def is_inside(self) -> bool:
        """Whether a part is under way."""
        return bool(self._num_inside)

    @property
    def failure(self) -> TightfitError | None:
        """The first error, which a program may have swallowed."""
        return self._failure

    def agree(self, meeting: str, fields: Mapping[str, int]) -> None:
        """Waits for all ranks, and compares these numbers, whose names say what they are of.

        Raises:
            RanksDiffer: on all ranks, if one has other numbers, or is elsewhere.
            RankLost: one has ended.
        """
        names = list(fields)
        assert len(names) < _NUM_FIELDS
        numbers = [_ALL_MEETINGS.index(meeting), *fields.values()]
        mine = torch.tensor(numbers + [0] * (_NUM_FIELDS - len(numbers)), dtype=torch.int64)
        rows = [row.tolist() for row in self._gathered(mine, self._control)]
        for rank, row in enumerate(rows):
            if row[0] != rows[0][0]:
                self._fail(RanksDiffer(
                    f"the ranks went different ways: rank 0 is at {_ALL_MEETINGS[rows[0][0]]}, rank {rank} at {_ALL_MEETINGS[row[0]]}; "
                    "each must run the same steps, and not by the time, its process or numbers that are not seeded"
                ))  # fmt: skip
            for name, number, first in zip(names, row[1:], rows[0][1:], strict=False):
                if number != first:
                    self._fail(RanksDiffer(
                        f"{name} must be the same on all ranks, and rank {rank} has not what rank 0 has: seed what draws random numbers, "
                        "with what is no time and no number of a process"
                    ))  # fmt: skip

    def rows_of_all(self, part: torch.Tensor, lengths: Sequence[int], dim: int) -> torch.Tensor:
        """The parts of all ranks, of these lengths along `dim`, one after the other, as bits."""
        moved = part.detach().movedim(dim, 0).contiguous()
        longest = max(lengths)
        if len(moved) < longest:
            moved = torch.cat([moved, moved.new_zeros((longest - len(moved), *moved.shape[1:]))])
        found = self._gathered(moved, self._of(moved))
        whole = torch.cat([each[:length] for each, length in zip(found, lengths, strict=True)])
        return whole.movedim(0, dim)

    def of_each(self, value: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of one shape from each rank, in their order."""
        return self._gathered(value.detach().contiguous(), self._of(value))

    def sums(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sum of each of the tensors over the ranks, which all of them get bit for bit; the tensors themselves stay as they are."""
        found: list[torch.Tensor] = []
        for bucket in _buckets(tensors):
            flat = torch.cat([each.detach().reshape(-1) for each in bucket])
            # Sums of half precision are rounded once.
            wide = flat.float() if flat.dtype in (torch.float16, torch.bfloat16) and not flat.is_cuda else flat
            self._wait(lambda wide=wide: self._of(wide).allreduce([wide]))
            summed = wide.to(flat.dtype).split([each.numel() for each in bucket])
            # Copies: a gradient that is a view of a bucket would keep all of it, and could not be detached in place.
            found += [part.view(each.shape).clone() for part, each in zip(summed, bucket, strict=True)]
        return found

    def send_from(self, source: int, tensors: Sequence[torch.Tensor]) -> None:
        """Overwrites the tensors of all other ranks by those of `source`."""
        for bucket in _buckets(tensors):
            flat = torch.cat([each.detach().reshape(-1) for each in bucket]).view(torch.uint8)
            self._wait(lambda flat=flat: self._of(flat).broadcast([flat], _broadcast_from(source)))
            if self.rank == source:
                continue
            flat, at = flat.view(bucket[0].dtype), 0
            for each in bucket:
                each.copy_(flat[at : at + each.numel()].view(each.shape))
                at += each.numel()

    def bytes_from(self, source: int, content: bytes) -> bytes:
        """What `source` has as `content`, on all ranks."""
        length = torch.tensor([len(content)], dtype=torch.int64)
        self._wait(lambda: self._control.broadcast([length], _broadcast_from(source)))
        held = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source and content:
            held = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if len(held):
            self._wait(lambda: self._control.broadcast([held], _broadcast_from(source)))
        return held.numpy().tobytes()

    def _of(self, tensor: torch.Tensor) -> Any:
        return self._data if tensor.is_cuda else self._control

    def _gathered(self, value: torch.Tensor, group: Any) -> list[torch.Tensor]:
        if not value.numel():
            return [value.clone() for _ in range(self.size)]
        # As bytes: what is gathered is copied and not computed with, so any type will do.
        mine = value.reshape(-1).view(torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: group.allgather([found], [mine]))
        return [each.view(value.dtype).view(value.shape) for each in found]

    def _wait(self, begin: Any) -> None:
        if self._failure is not None:
            raise self._failure
        try:
            begin().wait()
        except RuntimeError as error:
            # Of gloo and NCCL alike: a connection that was closed, or a timeout.
            self._fail(RankLost(f"another rank has ended or does not answer ({str(error).splitlines()[0][:120]})"))

    def _fail(self, error: TightfitError) -> None:
        self._failure = self._failure or error
        raise error


def _broadcast_from(source: int) -> Any:
    options = dist.BroadcastOptions()
    options.rootRank, options.rootTensor = source, 0
    return options


def _buckets(tensors: Sequence[torch.Tensor]) -> list[list[torch.Tensor]]:
    """The tensors in their order, in groups of one type that are not too large."""
    found: list[list[torch.Tensor]] = []
    num_bytes = 0
    for tensor in tensors:
        size = tensor.numel() * tensor.element_size()
        if (
            not found
            or (found[-1][0].dtype, found[-1][0].device) != (tensor.dtype, tensor.device)
            or num_bytes + size > BUCKET_BYTES
        ):
            found.append([])
            num_bytes = 0
        found[-1].append(tensor)
        num_bytes += size
    return found


def number_of(text: object) -> int:
    """A number for what can be written as text, the same in all processes."""
    return zlib.crc32(repr(text).encode())
