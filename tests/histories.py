"""Histories made up for the tests of what reads them: training steps that allocate, forward, and free in reverse, backward."""

import dataclasses

import numpy as np
from tests.timelines import Copy, Kernel, priced_steps, read

from tightfit.allocator.settings import AllocatorSettings
from tightfit.devices.catalogue import find
from tightfit.simulate.history import CATEGORIES, Blocks, History, HistorySpan
from tightfit.simulate.step_tracks import step_tracks
from tightfit.tape import Assumption

MIB = 1 << 20
PARAMETERS, ACTIVATIONS, TEMPORARIES = (CATEGORIES.index(name) for name in ("parameters", "activations", "temporaries"))
STACKS = (
    ("train.py:3 build",),
    ("/usr/lib/python3/site-packages/torch/nn/functional.py:20 linear", "model.py:8 forward", "train.py:41 main"),
    ("/usr/lib/python3/site-packages/torch/nn/functional.py:30 gelu", "model.py:9 forward", "train.py:41 main"),
)
MODULES = ("", "net.layers.0.linear", "net.layers.0.act", "net.layers.1.linear", "net.layers.1.act")


def training(
    num_steps: int = 3,
    num_layers: int = 200,
    *,
    stacks: tuple[tuple[str, ...], ...] = STACKS,
    modules: tuple[str, ...] = MODULES,
    seed: int = 0,
) -> History:
    """One parameter of 64 MiB that lives before the first event, and steps of `2 * num_layers` events; the highest step is the second."""
    random = np.random.default_rng(seed)
    num_blocks, layer = num_steps * num_layers, np.tile(np.arange(num_layers), num_steps)
    step = np.repeat(np.arange(num_steps), num_layers)
    sizes = 512 * random.integers(1, 4096, num_layers)[layer] + np.where(step == 1, 512 * (layer % 3 == 0), 0)
    allocated_at, freed_at = step * 2 * num_layers + layer, (step + 1) * 2 * num_layers - 1 - layer
    num_events = 2 * num_layers * num_steps
    change = np.zeros(num_events, dtype=np.int64)
    change[allocated_at], change[freed_at] = sizes, -sizes
    allocated = 64 * MIB + np.cumsum(change)

    def with_parameter(first: int, rest: np.ndarray) -> np.ndarray:
        return np.concatenate([[first], rest]).astype(np.int64)

    return History(
        label="train.py",
        origin="recording",
        device="NVIDIA GeForce RTX 4090",
        capacity_bytes=24 << 30,
        context_bytes=300 * MIB,
        settings=AllocatorSettings(),
        allocated=allocated,
        reserved=-(-np.maximum.accumulate(allocated) // (2 * MIB)) * 2 * MIB,
        time_us=np.arange(num_events, dtype=np.int64) * 7,
        blocks=Blocks(
            num_bytes=with_parameter(64 * MIB, sizes - 8),
            block_bytes=with_parameter(64 * MIB, sizes),
            address=with_parameter(0, np.arange(num_blocks) * MIB),
            lane=np.zeros(num_blocks + 1, dtype=np.int64),
            allocated_at=with_parameter(-1, allocated_at),
            freed_at=with_parameter(num_events, freed_at),
            category=with_parameter(PARAMETERS, np.where(layer % 4 == 3, TEMPORARIES, ACTIVATIONS)),
            stack=with_parameter(0, 1 + layer % (len(stacks) - 1)),
            module=with_parameter(0, 1 + layer % (len(modules) - 1)),
        ),
        stacks=stacks,
        modules=modules,
        spans=tuple(
            HistorySpan(name=f"step {i + 1}", kind="step", begin=i * 2 * num_layers, end=(i + 1) * 2 * num_layers)
            for i in range(num_steps)
        ),
        assumptions=(Assumption(where="train.py:44", what="a value read back from the GPU is assumed to be 1.0"),),
    )


def history_with(text: str) -> History:
    """A training run whose file, lines, functions, modules, card and assumptions are named by `text`."""
    stacks = ((f"{text}.py:1 {text}",), (f"{text}.py:2 f", f"y.py:3 {text}"), ("z.py:4 z",))
    return dataclasses.replace(
        training(stacks=stacks, modules=("", text, f"net.{text}")),
        label=f"{text}.pickle",
        device=text,
        assumptions=(Assumption(where=f"{text}.py:4", what=text),),
    )


def nothing() -> History:
    """A recording in which nothing happened and nothing lives."""
    empty = np.zeros(0, dtype=np.int64)
    columns = ("num_bytes", "block_bytes", "address", "lane", "allocated_at", "freed_at", "category", "stack", "module")
    return History(
        label="empty.pickle",
        origin="recording",
        device="",
        capacity_bytes=None,
        context_bytes=None,
        settings=AllocatorSettings(),
        allocated=empty,
        reserved=empty,
        time_us=empty,
        blocks=Blocks(**dict.fromkeys(columns, empty)),
        stacks=(),
        modules=(),
        spans=(),
        assumptions=(),
    )


def with_a_predicted_step() -> History:
    """A run whose last step is predicted: a copy for the next step beside two kernels, and a value that is read back."""
    rows = (Copy(stream=1, seconds=0.002), Kernel(seconds=0.005), Kernel(seconds=0.003), read())
    return dataclasses.replace(training(), step_tracks=step_tracks(priced_steps(rows), find("RTX 4090")))
