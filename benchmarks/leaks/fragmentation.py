"""Eight runs whose reserved memory grows while what they have allocated does not, on a (virtual) GPU."""

from collections.abc import Iterator

import torch
from torch import nn

from benchmarks.leaks.script import leaking

FRAGMENTATION = "allocator fragmentation"
MIB = 2**20


@leaking(FRAGMENTATION, is_virtual=True)
def each_request_larger_than_the_last(device: str) -> Iterator[None]:
    """pytorch/pytorch#42815, #42557: sizes that increase with every step, so that no cached block is large enough."""
    length = 24
    while True:
        batch = torch.empty(length * MIB, dtype=torch.uint8, device=device)  # leaks here
        del batch
        length += 4
        yield


@leaking(FRAGMENTATION, is_virtual=True)
def large_segment_with_small_tenants(device: str) -> Iterator[None]:
    """pytorch/pytorch#35901: once a large segment is free, small long-lived tensors settle in it, and the next large tensor needs another one."""
    longest, tenant = 64, torch.empty(2 * MIB, dtype=torch.uint8, device=device)
    while True:
        large = torch.empty(longest * MIB, dtype=torch.uint8, device=device)  # leaks here
        del large
        # As much lives as before: one tensor is replaced, and the new one settles where the large one was.
        tenant = torch.empty(2 * MIB, dtype=torch.uint8, device=device) + tenant[:1]
        longest += 3
        yield


@leaking(FRAGMENTATION, is_virtual=True)
def weights_converted_in_turn(device: str) -> Iterator[None]:
    """vllm-project/vllm#41268: converted weights of half the size settle in segments of the originals; the rest is too small for the next, wider layer."""
    width, converted = 26, []
    while True:
        original = torch.empty(2 * width * MIB, dtype=torch.uint8, device=device)  # leaks here
        half = torch.empty(width * MIB, dtype=torch.uint8, device=device)  # leaks here
        del original
        # Of the converted weights two are on the device at a time.
        converted = [*converted[-1:], half[:MIB].clone()]
        del half
        width += 3
        yield


@leaking(FRAGMENTATION, is_virtual=True)
def stream_of_each_step(device: str) -> Iterator[None]:
    """PrimeIntellect-ai/prime-rl#3200: a new stream in each step, and each has segments of its own."""
    while True:
        with torch.cuda.stream(torch.cuda.Stream()):
            work = torch.empty(24 * MIB, dtype=torch.uint8, device=device)  # leaks here
            work.add_(1)
            del work
        yield


@leaking(FRAGMENTATION, is_virtual=True)
def variable_lengths_in_rising_order(device: str) -> Iterator[None]:
    """sgl-project/SpecForge#739: micro-batches of variable length, sorted by length."""
    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    length = 6000
    while True:
        loss = model(torch.empty(length, 256, device=device)).mean()  # leaks here
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        del loss
        length += 600
        yield


@leaking(FRAGMENTATION, is_virtual=True)
def cache_that_is_copied_when_it_grows(device: str) -> Iterator[None]:
    """huggingface/transformers#25930, #30536: a cache is replaced by a longer copy for each token, and each sample goes on where the last one ended."""
    tokens = 11
    while True:
        cache = torch.empty(tokens * MIB, dtype=torch.uint8, device=device)
        for _ in range(3):
            tokens += 1
            cache = torch.empty(tokens * MIB, dtype=torch.uint8, device=device)  # leaks here
        del cache
        yield


@leaking(FRAGMENTATION, is_virtual=True)
def evaluation_between_steps(device: str) -> Iterator[None]:
    """mlcommons/algorithmic-efficiency#497: evaluation batches that are longer in each round than any before."""
    model = nn.Conv1d(64, 256, 3, padding=1).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    length = 20_000
    while True:
        model(torch.empty(1, 64, 20_000, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        with torch.no_grad():
            model(torch.empty(1, 64, length, device=device))  # leaks here
        length += 5_000
        yield


@leaking(FRAGMENTATION, is_virtual=True)
def samples_pinned_between_batches(device: str) -> Iterator[None]:
    """meta-pytorch/torchtune#2830: batches of varying sizes, and a small state that is replaced between two of them, right behind the last one."""
    state = torch.empty(3 * MIB, dtype=torch.uint8, device=device)
    size = 30
    while True:
        batch = torch.empty(size * MIB, dtype=torch.uint8, device=device)  # leaks here
        state = torch.empty(3 * MIB, dtype=torch.uint8, device=device) + state[:1]
        size += 3
        del batch
        yield
