"""How ranks exchange tensors: gathered, summed, and sent from one to all."""

import datetime
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tightfit.errors import TightfitError
from tightfit.ranks.rank_errors import RankLost, RanksDiffer

BUCKET_BYTES = 25 << 20
"""So many bytes of gradients are summed by one collective, as in DistributedDataParallel."""
_TIMEOUT = datetime.timedelta(minutes=30)
_FORKED = "a process that the script has forked does what all ranks are to do together (a step of an optimizer whose states are sharded, say), and is none of them"


class RankLinks:
    """The connections of this process, `rank` of `size`. Tensors of the host go through gloo, and those of cards through NCCL where `on_cards`.

    The groups are no default group of `torch.distributed`: the program, and libraries that ask for one, see a run on one card.
    """

    def __init__(self, store: Any, rank: int, size: int, *, on_cards: bool) -> None:
        self.rank, self.size = rank, size
        self._failure: TightfitError | None = None
        # A process that is forked from this one says there that it has failed.
        self._process, self._has_forked_failed = os.getpid(), mmap.mmap(-1, mmap.PAGESIZE)
        self._of_host: Any = dist.ProcessGroupGloo(dist.PrefixStore("host", store), rank, size, _TIMEOUT)
        self._of_cards: Any = None
        if on_cards:
            options = dist.ProcessGroupNCCL.Options()
            self._of_cards = dist.ProcessGroupNCCL(dist.PrefixStore("cards", store), rank, size, options)

    @property
    def failure(self) -> TightfitError | None:
        """The first error."""
        if self._failure is None and self._has_forked_failed[0]:
            self._failure = RanksDiffer(_FORKED)
        return self._failure

    def fail(self, error: TightfitError) -> None:
        """Ends all exchange: whatever is asked for next raises it again."""
        self._failure = self._failure or error
        raise error

    def rows_of_all(self, part: torch.Tensor, lengths: Sequence[int], dim: int) -> torch.Tensor:
        """The parts of all ranks, of these lengths along `dim`, one after the other, as bits."""
        moved = part.detach().movedim(dim, 0).contiguous()
        longest = max(lengths)
        if len(moved) < longest:
            moved = torch.cat([moved, moved.new_zeros((longest - len(moved), *moved.shape[1:]))])
        found = self._gathered(moved)
        whole = torch.cat([each[:length] for each, length in zip(found, lengths, strict=True)])
        # No view: the program may write to it (`logits /= temperature`).
        return whole if not dim else whole.movedim(0, dim).clone(memory_format=torch.contiguous_format)

    def of_each(self, value: torch.Tensor) -> list[torch.Tensor]:
        """A tensor of one shape from each rank, in their order."""
        return self._gathered(value.detach().contiguous())

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
            # With the strides of a plain gradient, which kernels of optimizers go by.
            found += [
                torch.empty_like(each).copy_(part.view(each.shape)) for part, each in zip(summed, bucket, strict=True)
            ]
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
        self._wait(lambda: self._of_host.broadcast([length], _broadcast_from(source)))
        held = torch.zeros(int(length), dtype=torch.uint8)
        if self.rank == source and content:
            held = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        if len(held):
            self._wait(lambda: self._of_host.broadcast([held], _broadcast_from(source)))
        return held.numpy().tobytes()

    def _of(self, tensor: torch.Tensor) -> Any:
        return self._of_cards if tensor.is_cuda else self._of_host

    def _gathered(self, value: torch.Tensor) -> list[torch.Tensor]:
        if not value.numel():
            return [value.clone() for _ in range(self.size)]
        # As bytes: what is gathered is copied and not computed with, so any type will do.
        mine = value.reshape(-1).view(torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        self._wait(lambda: self._of(mine).allgather([found], [mine]))
        return [each.view(value.dtype).view(value.shape) for each in found]

    def _wait(self, begin: Callable[[], Any]) -> None:
        if self.failure is not None:
            raise self.failure
        if os.getpid() != self._process:
            # It has the connections too, at whose other ends nobody waits for it.
            self._has_forked_failed[0] = 1
            self.fail(RanksDiffer(_FORKED))
        try:
            begin().wait()
        except RuntimeError as error:
            # Of gloo and NCCL alike: a connection that was closed, or a timeout.
            self.fail(RankLost(f"another rank has ended or does not answer ({str(error).splitlines()[0][:120]})"))


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
