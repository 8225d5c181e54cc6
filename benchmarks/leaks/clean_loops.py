"""Twenty clean runs whose memory goes up and down: lengths, generation, evaluation, loaders, checkpoints, profilers; six of them on a virtual GPU."""

import itertools
import mmap
import tempfile
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.leaks.script import clean

LENGTHS = (96, 160, 64, 224, 128, 192, 80, 240, 144, 208, 112, 176, 100, 150, 200, 250)


def _model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).to(device)


@clean()
def variable_lengths(device: str) -> Iterator[None]:
    """Batches of lengths that go up and down."""
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for length in itertools.cycle(LENGTHS):
        model(torch.ones(8, length, 64, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@clean()
def generation_with_a_growing_cache(device: str) -> Iterator[None]:
    """A key-value cache grows within one generation, and each step is one generation."""
    project = nn.Linear(64, 64).to(device)
    while True:
        keys = torch.zeros(1, 0, 64, device=device)
        with torch.no_grad():
            for _ in range(12):
                keys = torch.cat((keys, project(torch.ones(1, 64, 64, device=device))), dim=1)
        del keys
        yield


@clean()
def generations_of_other_lengths(device: str) -> Iterator[None]:
    """The cache of the last generation is alive at the step's end, and none is as long as the one before."""
    keys = torch.zeros(0)
    for length in itertools.cycle((5, 9, 3, 12, 7, 10, 4)):
        keys = torch.zeros(1, 0, 64, device=device)
        for _ in range(length):
            keys = torch.cat((keys, torch.ones(1, 128, 64, device=device)), dim=1)
        keys.sum()
        yield


@clean(steps=16)
def evaluation_every_fourth_step(device: str) -> Iterator[None]:
    """Training, and an evaluation that gathers its outputs and drops them."""
    model, step = _model(device), 0
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        model(torch.ones(128, 64, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 4 == 0:
            with torch.no_grad():
                outputs = [model(torch.ones(256, 64, device=device)) for _ in range(5)]
            torch.cat(outputs).mean().item()
            del outputs
        yield


@clean(steps=16)
def evaluation_whose_outputs_stay_until_the_next(device: str) -> Iterator[None]:
    """The outputs of the last evaluation stay in an attribute until the next one replaces them."""
    model, step, outputs = _model(device), 0, []
    while True:
        step += 1
        if step % 4 == 0:
            outputs = []
        with torch.no_grad():
            outputs.append(model(torch.ones(2048, 64, device=device)))
        yield


@clean()
def loader_in_this_process(device: str) -> Iterator[None]:
    """A DataLoader over tensors that were made before."""
    loader = DataLoader(TensorDataset(torch.ones(512, 64)), batch_size=32)
    model = _model(device)
    while True:
        for (batch,) in loader:
            model(batch.to(device)).mean().backward()
            model.zero_grad()
            yield


@clean(steps=10)
def loader_with_workers(device: str) -> Iterator[None]:
    """A DataLoader with a worker, whose batches come through shared memory."""
    loader = DataLoader(TensorDataset(torch.ones(640, 1024)), batch_size=64, num_workers=1)
    model = nn.Linear(1024, 8).to(device)
    for (batch,) in loader:
        model(batch.to(device)).mean().backward()
        model.zero_grad()
        yield


@clean()
def file_that_is_mapped(device: str) -> Iterator[None]:
    """A data set in a mapped file: its pages count as the process's, and the kernel takes them back."""
    with tempfile.TemporaryFile() as file:
        file.truncate(64 * 2**20)
        data = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), dtype=np.float32)
        for at in itertools.count():
            rows = data[at * 524_288 : (at + 1) * 524_288]
            torch.tensor(float(rows.sum()), device=device)
            yield


@clean()
def checkpointed_blocks(device: str) -> Iterator[None]:
    """Activation checkpointing, both kinds."""
    model = _model(device)
    while True:
        x = torch.ones(256, 64, device=device, requires_grad=True)
        for reentrant in (True, False):
            y = checkpoint(model, x, use_reentrant=reentrant)
            y.mean().backward()
        model.zero_grad()
        yield


@clean(steps=10)
def profiled_steps(device: str) -> Iterator[None]:
    """torch.profiler records two steps, and is done."""
    model, step = _model(device), 0
    profiler = None
    while True:
        if step == 3:
            profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
            profiler.__enter__()
        model(torch.ones(128, 64, device=device)).mean().backward()
        model.zero_grad()
        if step == 5 and profiler is not None:
            profiler.__exit__(None, None, None)
        step += 1
        yield


@clean()
def second_derivatives(device: str) -> Iterator[None]:
    """A gradient penalty with autograd.grad(create_graph=True), and gradients set to None."""
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        x = torch.ones(128, 64, device=device, requires_grad=True)
        (gradient,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        gradient.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@clean()
def two_networks_in_turn(device: str) -> Iterator[None]:
    """A generator and a discriminator."""
    generator, judge = nn.Linear(64, 64).to(device), _model(device)
    ours = torch.optim.Adam(generator.parameters()), torch.optim.Adam(judge.parameters())
    while True:
        fake = generator(torch.ones(128, 64, device=device))
        for optimizer, sample in ((ours[1], fake.detach()), (ours[0], fake)):
            optimizer.zero_grad()
            judge(sample).mean().backward()
            optimizer.step()
        yield


@clean()
def errors_that_are_handled(device: str) -> Iterator[None]:
    """A batch of a wrong shape is skipped; the error is not kept."""
    model = _model(device)
    while True:
        try:
            model(torch.ones(256, 65, device=device) * 2)
        except RuntimeError as error:
            str(error)
        model(torch.ones(256, 64, device=device)).mean().backward()
        model.zero_grad()
        yield


@clean()
def features_that_a_hook_replaces(device: str) -> Iterator[None]:
    """A forward hook keeps the activations of the last call."""
    model, features = _model(device), {}
    model[0].register_forward_hook(lambda module, args, output: features.update(layer=output.detach()))
    while True:
        model(torch.ones(512, 64, device=device)).mean().backward()
        model.zero_grad()
        yield


@clean(is_virtual=True)
def virtual_training(device: str) -> Iterator[None]:
    """Adam on the virtual GPU: states in the first step."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        model(torch.empty(512, 1024, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@clean(is_virtual=True)
def virtual_lengths(device: str) -> Iterator[None]:
    """Lengths that go up and down: the largest reserves what all need."""
    model = nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for length in itertools.cycle(LENGTHS):
        model(torch.empty(16, length, 1024, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@clean(is_virtual=True)
def virtual_generation(device: str) -> Iterator[None]:
    """Each step generates with a cache that grows, and drops it."""
    while True:
        keys = torch.empty(8, 16, 64, 64, device=device)
        for _ in range(16):
            keys = torch.cat((keys, torch.empty(8, 16, 1, 64, device=device)), dim=2)
        del keys
        yield


@clean(is_virtual=True)
def virtual_cache_emptied(device: str) -> Iterator[None]:
    """`empty_cache` in each step: reserved memory falls and rises."""
    model = nn.Conv2d(3, 64, 3, padding=1).to(device)
    while True:
        functional.relu(model(torch.empty(8, 3, 224, 224, device=device))).mean().backward()
        model.zero_grad()
        torch.cuda.empty_cache()
        yield


@clean(is_virtual=True)
def virtual_side_stream(device: str) -> Iterator[None]:
    """Copies on one stream that was made before."""
    stream = torch.cuda.Stream()
    while True:
        with torch.cuda.stream(stream):
            batch = torch.empty(64, 3, 224, 224, device=device)
        torch.cuda.current_stream().wait_stream(stream)
        batch.record_stream(torch.cuda.current_stream())
        batch.mul(2).sum()
        del batch
        yield


@clean(is_virtual=True)
def virtual_evaluation(device: str) -> Iterator[None]:
    """Training, and an evaluation with other sizes in every second step."""
    model, step = nn.Conv1d(64, 256, 3, padding=1).to(device), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        model(torch.empty(4, 64, 20_000, device=device)).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 2:
            with torch.no_grad():
                model(torch.empty(2, 64, 50_000, device=device))
        step += 1
        yield
