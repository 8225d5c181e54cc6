"""Twenty clean runs whose memory rises for a while and then stays: state made late, caches and buffers with a bound, averages, scalars."""

import collections
import copy
import functools
import gc
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from benchmarks.leaks.script import clean


def _model(device: str) -> nn.Sequential:
    return nn.Sequential(nn.Linear(64, 256), nn.Tanh(), nn.Linear(256, 8)).to(device)


def _train(model: nn.Module, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> torch.Tensor:
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss


@clean()
def plain_training(device: str) -> Iterator[None]:
    """A model, SGD, one loss per step."""
    model = _model(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        _train(model, optimizer, torch.ones(256, 64, device=device))
        yield


@clean()
def states_of_adam(device: str) -> Iterator[None]:
    """Optimizer states appear in the first step."""
    model = _model(device)
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        _train(model, optimizer, torch.ones(256, 64, device=device))
        yield


@clean()
def replay_buffer_with_a_bound(device: str) -> Iterator[None]:
    """A deque with maxlen that is full after a few steps."""
    buffer: collections.deque[torch.Tensor] = collections.deque(maxlen=5)
    while True:
        buffer.append(torch.ones(256, 256, device=device) * 2)
        torch.stack(tuple(buffer)).sum()
        yield


@clean()
def replay_buffer_that_is_not_full_yet(device: str) -> Iterator[None]:
    """A deque with maxlen that is still filling when the run ends: its bound is declared."""
    buffer: collections.deque[torch.Tensor] = collections.deque(maxlen=1000)
    while True:
        buffer.append(torch.ones(256, 256, device=device) * 2)
        yield


@clean()
def ring_buffer_in_a_tensor(device: str) -> Iterator[None]:
    """A preallocated ring of observations."""
    ring, at = torch.zeros(64, 256, 64, device=device), 0
    while True:
        ring[at % 64] = torch.ones(256, 64, device=device) * at
        at += 1
        yield


@clean()
def lru_cache_with_a_bound(device: str) -> Iterator[None]:
    """Position tables by length, at most eight of them; lengths go on changing."""

    @functools.lru_cache(maxsize=4)
    def table(length: int) -> torch.Tensor:
        return torch.arange(length * 1024, device=device, dtype=torch.float32)

    step = 0
    while True:
        table(64 + step).sum()
        step += 1
        yield


@clean()
def cache_that_fills_in_warm_up(device: str) -> Iterator[None]:
    """Masks by length in a plain dict; all lengths have come after four steps."""
    masks: dict[int, torch.Tensor] = {}
    step = 0
    while True:
        length = 128 + 32 * (step % 4)
        if length not in masks:
            masks[length] = torch.ones(length, length, device=device).tril()
        masks[length].sum()
        step += 1
        yield


@clean()
def losses_as_floats(device: str) -> Iterator[None]:
    """`losses.append(loss.item())`."""
    model, losses = _model(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        losses.append(_train(model, optimizer, torch.ones(256, 64, device=device)).item())
        yield


@clean()
def running_loss_that_is_detached(device: str) -> Iterator[None]:
    """`running += loss.detach()`: one scalar."""
    model, running = _model(device), torch.zeros((), device=device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        running += _train(model, optimizer, torch.ones(256, 64, device=device)).detach()
        yield


@clean()
def last_loss_of_each_step(device: str) -> Iterator[None]:
    """The loss and the outputs of the last step live until the next one has its own."""
    model = _model(device)
    outputs = None
    while True:
        outputs = model(torch.ones(256, 64, device=device))
        loss = outputs.square().mean()  # noqa: F841 - it is kept
        yield


@clean()
def exponential_moving_average(device: str) -> Iterator[None]:
    """A copy of the weights, made after a few steps and updated in place."""
    model, average, step = _model(device), None, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        _train(model, optimizer, torch.ones(256, 64, device=device))
        if step == 3:
            average = copy.deepcopy(model)
        if average is not None:
            with torch.no_grad():
                for kept, new in zip(average.parameters(), model.parameters(), strict=True):
                    kept.mul_(0.9).add_(new, alpha=0.1)
        step += 1
        yield


@clean()
def best_weights_so_far(device: str) -> Iterator[None]:
    """A state dict of the best epoch, replaced when a better one comes."""
    model, best, step = _model(device), {}, 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        _train(model, optimizer, torch.ones(256, 64, device=device))
        if step % 3 == 0:
            best = {name: value.detach().clone() for name, value in model.state_dict().items()}
        step += 1 + len(best) * 0
        yield


@clean()
def last_three_checkpoints(device: str) -> Iterator[None]:
    """The weights of the last three steps, in a list that is cut."""
    model, kept = _model(device), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    while True:
        _train(model, optimizer, torch.ones(256, 64, device=device))
        kept.append(copy.deepcopy(model.state_dict()))
        kept[:-3] = []
        yield


@clean()
def lazily_made_modules(device: str) -> Iterator[None]:
    """Modules that get their parameters in their first call, and a second head after some steps."""
    model = nn.Sequential(nn.LazyLinear(256), nn.Tanh(), nn.LazyLinear(8)).to(device)
    heads, step = {}, 0
    while True:
        hidden = model(torch.ones(256, 64, device=device))
        if step in (2, 4):
            heads[step] = nn.Linear(8, 4096).to(device)
        for head in heads.values():
            hidden = hidden + head(hidden).mean()
        hidden.mean().backward()
        step += 1
        yield


@clean()
def metric_that_is_reset(device: str) -> Iterator[None]:
    """List states of a metric, emptied every third step."""
    preds: list[torch.Tensor] = []
    step = 0
    while True:
        preds.append(torch.ones(256, 256, device=device).sigmoid())
        step += 1
        if step % 3 == 0:
            torch.cat(preds).mean()
            preds.clear()
        yield


@clean()
def hidden_state_that_is_detached(device: str) -> Iterator[None]:
    """Truncated backpropagation through time."""
    cell = nn.Linear(256, 256).to(device)
    optimizer = torch.optim.SGD(cell.parameters(), lr=0.1)
    hidden = torch.zeros(64, 256, device=device)
    while True:
        hidden = torch.tanh(cell(hidden.detach()))
        hidden.mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        yield


@clean()
def accumulated_gradients(device: str) -> Iterator[None]:
    """Four micro-batches per optimizer step, each a step of the loop."""
    model, step = _model(device), 0
    optimizer = torch.optim.Adam(model.parameters())
    while True:
        (model(torch.ones(128, 64, device=device)).square().mean() / 4).backward()
        step += 1
        if step % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
        yield


@clean(steps=18)
def cycles_that_are_collected(device: str) -> Iterator[None]:
    """Cycles with tensors, which the loop collects itself every third step."""
    step = 0
    while True:
        sample: dict[str, object] = {"x": torch.ones(256, 256, device=device) * 2}
        sample["self"] = sample
        step += 1
        if step % 3 == 0:
            gc.collect()
        yield


@clean(steps=18)
def cycles_of_which_many_are_made(device: str) -> Iterator[None]:
    """Cycles with tensors beside many small objects: Python's collector runs by itself in nearly every step."""

    def cycle() -> None:
        sample: dict[str, object] = {"x": torch.ones(128, 128, device=device) * 2}
        sample["self"] = sample

    while True:
        cycle()
        others = [[at] for at in range(3000)]
        others.sort(key=len)
        yield


@clean()
def arrays_of_the_last_epoch(device: str) -> Iterator[None]:
    """Predictions as arrays, which each epoch of four steps gathers anew."""
    model, predictions, step = nn.Linear(64, 1024).to(device), [], 0
    while True:
        if step % 4 == 0:
            predictions = []
        with torch.no_grad():
            predictions.append(np.array(model(torch.ones(512, 64, device=device)).cpu().numpy()))
        functional.relu(torch.ones(8, device=device))
        step += 1
        yield
