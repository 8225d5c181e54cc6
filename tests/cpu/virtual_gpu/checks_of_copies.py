"""What the tape is told of copies between host and card, of events and of waits of the host."""

import mmap

import torch

from tightfit.capture.observe.streams import VirtualEvent
from tightfit.tape import CopyDirection, WaitKind

KIB = 1 << 10


class _Seen:
    """What was noted in a block: rows of copies as (direction, is_pinned, is_blocking, num_bytes), waits as (kind, stream, event)."""

    def __enter__(self):
        recorder = VirtualEvent.recorder
        self._begins = [len(table["operator"]) for table in (recorder.copies, recorder.waits.columns, recorder.events)]
        return self

    def __exit__(self, *_):
        recorder = VirtualEvent.recorder
        copies = self._rows(recorder.copies, 0, ("direction", "is_pinned", "is_blocking", "num_bytes"))
        self.copies = [(CopyDirection(direction), *rest) for direction, *rest in copies]
        waits = self._rows(recorder.waits.columns, 1, ("kind", "stream", "event"))
        self.waits = [(WaitKind(kind), *rest) for kind, *rest in waits]
        self.num_events = len(recorder.events["operator"]) - self._begins[2]

    def _rows(self, table, number, names):
        return zip(*(table[name][self._begins[number] :] for name in names), strict=True)


def copies_to_the_card_have_their_bytes_and_wait_unless_they_are_pinned():
    host, pinned = torch.zeros(256, 64), torch.zeros(256, 64).pin_memory()
    with _Seen() as seen:
        host.cuda()
        host.cuda(non_blocking=True)
        pinned.cuda()
        pinned.to("cuda", non_blocking=True)
    to_card, num_bytes = CopyDirection.TO_CARD, 64 * KIB
    # 64 KiB of pageable memory are staged by the driver at once.
    assert seen.copies == [
        (to_card, False, True, num_bytes),
        (to_card, False, False, num_bytes),
        (to_card, True, True, num_bytes),
        (to_card, True, False, num_bytes),
    ]
    with _Seen() as seen:
        torch.zeros(256, 65).cuda(non_blocking=True)
        torch.zeros(0).cuda()
    assert seen.copies == [(to_card, False, True, 65 * KIB)]


def what_is_cast_or_expanded_on_the_host_is_copied_from_a_pageable_temporary():
    pinned = torch.zeros(256, 64).pin_memory()
    with _Seen() as seen:
        pinned.to("cuda", torch.float16, non_blocking=True)
        pinned[:1].expand(512, 64).to("cuda", non_blocking=True)
        pinned.t().contiguous().cuda()
        torch.empty(64, 256, device="cuda").copy_(pinned.t(), non_blocking=True)
        # A part of pinned memory that is dense is copied as it lies.
        pinned[128:].to("cuda", non_blocking=True)
    assert [(is_pinned, num_bytes // KIB) for _, is_pinned, _, num_bytes in seen.copies] == [
        (False, 32),
        (False, 128),
        (False, 64),
        (False, 64),
        (True, 32),
    ]


def copies_to_the_host_have_rows_among_the_operators():
    card = torch.zeros(256, 64, device="cuda")
    pinned = torch.empty(256, 64, pin_memory=True)
    recorder = VirtualEvent.recorder
    with _Seen() as seen:
        begin = recorder.num_operators
        card.cpu()
        assert card.to("cpu", non_blocking=True).is_pinned()
        pinned.copy_(card, non_blocking=True)
        torch.empty(256, 64).copy_(card, non_blocking=True)
        assert recorder.num_operators - begin == 4
    to_host, num_bytes = CopyDirection.TO_HOST, 64 * KIB
    assert seen.copies == [
        (to_host, False, True, num_bytes),
        (to_host, True, False, num_bytes),
        (to_host, True, False, num_bytes),
        (to_host, False, True, num_bytes),
    ]
    # The allocator of the card has no part in them.
    assert seen.num_events == 0


def memory_that_the_program_registers_counts_as_pinned():
    slab = torch.empty(1 << 20, dtype=torch.uint8)
    part = slab[4096:8192].view(torch.float32)
    assert not part.is_pinned()
    assert int(torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 1)) == 0
    assert part.is_pinned()
    with _Seen() as seen:
        part.to("cuda", non_blocking=True)
    assert seen.copies == [(CopyDirection.TO_CARD, True, False, 4096)]
    torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
    assert not part.is_pinned()
    # Torch asks where a storage begins, and the driver where the bytes lie.
    torch.cuda.cudart().cudaHostRegister(slab.data_ptr() + 4096, 8192, 1)
    with _Seen() as seen:
        part.to("cuda", non_blocking=True)
        slab[8192:16384].to("cuda", non_blocking=True)
    assert not part.is_pinned()
    assert [is_pinned for _, is_pinned, _, _ in seen.copies] == [True, False]
    torch.cuda.cudart().cudaHostUnregister(slab.data_ptr() + 4096)


def pinned_memory_is_reserved_in_powers_of_two_and_kept():
    host = VirtualEvent.recorder.host
    torch.accelerator.memory.empty_host_cache()
    before, pageable = host.pinned.reserved_bytes, host.num_bytes
    tensor = torch.empty(5 << 20, dtype=torch.uint8, pin_memory=True)
    assert tensor.pin_memory() is tensor
    assert (host.pinned.reserved_bytes - before, host.num_bytes - pageable) == (8 << 20, 0)
    copy = torch.zeros(3 << 20, dtype=torch.uint8).pin_memory()
    assert (host.pinned.reserved_bytes - before, host.num_bytes - pageable) == (12 << 20, 0)
    assert host.peak_bytes >= host.num_bytes + host.pinned.reserved_bytes
    del tensor, copy
    again = torch.empty(8 << 20, dtype=torch.uint8).pin_memory()
    assert host.pinned.reserved_bytes - before == 12 << 20
    del again
    torch.accelerator.memory.empty_host_cache()
    assert host.pinned.reserved_bytes == before


def registered_memory_counts_once_and_exactly():
    host = VirtualEvent.recorder.host
    before = host.num_bytes
    slab = torch.empty(5 << 20, dtype=torch.uint8)
    assert host.num_bytes - before == 5 << 20
    torch.cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.nbytes, 1)
    assert host.num_bytes - before == 5 << 20
    torch.cuda.cudart().cudaHostUnregister(slab.data_ptr())
    own = mmap.mmap(-1, 3 << 20)
    part = torch.frombuffer(own, dtype=torch.uint8)
    torch.cuda.cudart().cudaHostRegister(part.data_ptr(), part.nbytes, 1)
    assert part[100:200].is_pinned()
    assert host.num_bytes - before == 8 << 20
    torch.cuda.cudart().cudaHostUnregister(part.data_ptr())
    assert host.num_bytes - before == 5 << 20


def streams_record_and_wait_on_the_tape():
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    number = side.stream_id
    with _Seen() as seen:
        torch.cuda.current_stream().wait_event(event)  # never recorded: nothing to wait for
        event.record(side)
        event.wait()
        with torch.cuda.stream(side):
            event.record()
        side.wait_stream(torch.cuda.current_stream())
        event.synchronize()
        side.synchronize()
        torch.cuda.synchronize()
    mark = seen.waits[0][2]
    between = seen.waits[3][2]
    assert between != mark
    assert seen.waits == [
        (WaitKind.RECORD, number, mark),
        (WaitKind.STREAM_FOR_EVENT, 0, mark),
        (WaitKind.RECORD, number, mark),
        (WaitKind.RECORD, 0, between),
        (WaitKind.STREAM_FOR_EVENT, number, between),
        (WaitKind.HOST_FOR_EVENT, -1, mark),
        (WaitKind.HOST_FOR_STREAM, number, -1),
        (WaitKind.HOST_FOR_DEVICE, -1, -1),
    ]


def reads_of_the_host_wait_for_the_stream():
    values = torch.zeros(8, device="cuda") * 1
    side = torch.cuda.Stream()
    with _Seen() as seen:
        values.sum().item()
        bool((values > 0).any())
        values.nonzero()
        values[values > 0]
        with torch.cuda.stream(side):
            torch.equal(values, values)
        torch.repeat_interleave(values, torch.ones(8, dtype=torch.int64, device="cuda"), output_size=8)
    assert seen.waits == [(WaitKind.HOST_READS, 0, -1)] * 4 + [(WaitKind.HOST_READS, side.stream_id, -1)]
    assert seen.copies == []


def a_list_of_values_is_one_read():
    values = torch.zeros(100, device="cuda") * 1
    with _Seen() as seen:
        assert values.tolist() == [0.0] * 100
    assert len(seen.waits) == 1, seen.waits
    with _Seen() as seen:
        assert torch.zeros(2, 3).tolist() == [[0.0] * 3] * 2
    assert seen.waits == []


def lists_of_tensors_are_copied_one_by_one():
    on_card = [torch.zeros(64, device="cuda") for _ in range(3)]
    pinned = [torch.zeros(64).pin_memory() for _ in range(3)]
    with _Seen() as seen:
        torch._foreach_copy_(pinned, on_card, non_blocking=True)
        torch._foreach_copy_(on_card, [torch.ones(64) for _ in range(3)])
        torch._foreach_copy_(on_card, on_card)
    assert seen.copies == [
        *[(CopyDirection.TO_HOST, True, False, 256)] * 3,
        *[(CopyDirection.TO_CARD, False, True, 256)] * 3,
    ]
    assert on_card[0].tolist() == [1.0] * 64


def indices_on_the_host_are_copied():
    values = torch.zeros(100, device="cuda") * 1
    with _Seen() as seen:
        assert values[torch.tensor([1, 2, 3])].shape == (3,)
        assert values[torch.arange(100) < 5].shape == (5,)
    assert [(is_blocking, num_bytes) for _, _, is_blocking, num_bytes in seen.copies] == [(True, 24), (True, 40)]


def a_mask_that_was_copied_to_the_host_selects_all_as_on_the_card():
    ids = torch.arange(24).reshape(4, 6)
    mask = torch.rand(1000, 1000, device="cuda")[:4, :6] > 0.5
    host = mask.cpu()
    assert [len(row[kept]) for row, kept in zip(ids, host, strict=True)] == [6] * 4
    assert len(ids[mask.int().bool().cpu()]) == len(ids.masked_select(host)) == len(host.nonzero()) == 24
    assert len(torch.where(host)[0]) == 24
    assert len(ids[~host]) == len(ids[host & (ids > 5)]) == 24
    assert ids.cuda()[host].shape == (24,)
    written = ids.clone()
    written[host] = torch.zeros(24, dtype=torch.int64)
    assert not written.any()


def a_mask_from_the_card_reads_as_false_and_what_the_program_writes_to_it_is_kept():
    host = (torch.rand(1000, 1000, device="cuda")[0, :4] > 0.5).cpu()
    assert not host.any()
    assert not host[0]
    host[:2] = True
    assert len(torch.arange(4)[host]) == 2
    assert len(torch.arange(4)[torch.zeros(4, dtype=torch.bool)]) == 0
    kept = torch.zeros(4, dtype=torch.bool)
    kept.copy_(torch.rand(1000, 1000, device="cuda")[0, :4] > 0.5)
    assert len(torch.arange(4)[kept]) == 4
    kept.fill_(False)
    assert len(torch.arange(4)[kept]) == 0


def what_was_drawn_on_the_host_is_there_when_the_program_reads_it():
    labels = torch.empty(1 << 17, dtype=torch.long).random_(0, 1000)
    assert int(labels.max()) == 999
    inputs = torch.empty(1 << 19).uniform_().mul_(4)
    shifted = inputs[1:] * 2 + 1
    assert 1.9 < inputs.mean().item() < 2.1
    assert (inputs > 2).any()
    assert 0 < inputs[inputs > 2].numel() < inputs.numel()
    assert 4.8 < shifted.mean().item() < 5.2
    whole = (torch.empty(1 << 19).fill_(3) * 2).half() + 1
    assert whole.unique().tolist() == [7]
    drawn = torch.rand(1 << 24)
    assert 0.49 < drawn.mean().item() < 0.51
    weights = torch.empty(1 << 19).normal_()
    assert weights.cuda().is_cuda
