"""Makes a recording of a training run of any length, in the form that torch dumps, by running it through the simulated allocator.

python benchmarks/synthetic_recording.py --events 2000000 -o recording.pickle [--devices 1] [--streams 1] [--depth 40] [--protocol 4]

A step is a stack of layers: activations of changing sequence lengths live until the backward pass frees them in reverse, temporaries die at
once, an optimizer updates at the end, and with more than one stream each layer's gradient is copied on another one. Every allocation has a
call stack; as in torch's own files, a frame is one object wherever it stands, and each event has a list of its own.
"""

import argparse
import pickle
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.pools import Block
from tightfit.allocator.settings import AllocatorSettings

NUM_LAYERS = 24
NUM_SITES = 9
HIDDEN = 1024
SEQUENCES = (384, 512, 640, 1024)
FREE_AFTER = 3
START_US = 1_780_000_000_000_000

Event = dict[str, Any]
Frame = dict[str, Any]


class Stacks:
    """The call stacks of a program: one for each kind of call in each layer, with the outer frames in common."""

    def __init__(self, depth: int) -> None:
        outer = [_frame(f"/opt/train/loop_{at}.py", 10 + at, f"run_{at}") for at in range(depth // 2)]
        inner = [
            _frame(f"/opt/torch/nn/module_{at}.py", 100 + at, "_call_impl") for at in range(depth - depth // 2 - 2)
        ]
        self._common = inner + outer
        self._layers = [_frame("/opt/train/model.py", 200 + layer, "forward") for layer in range(NUM_LAYERS)]
        self._sites = [_frame("/opt/torch/functional.py", 40 + site, f"kernel_{site}") for site in range(NUM_SITES)]

    def of(self, layer: int, site: int) -> list[Frame]:
        """A new list of the frames of one call, from the innermost out."""
        return [self._sites[site], self._layers[layer], *self._common]


def _frame(filename: str, line: int, name: str) -> Frame:
    return {"name": name, "filename": filename, "line": line}


class Recorder:
    """One device: drives an allocator and writes down what torch would."""

    def __init__(self, device: int, stacks: Stacks, settings: AllocatorSettings, num_events: int) -> None:
        self.device = device
        self.stacks = stacks
        self.num_events = num_events
        self.events: list[Event] = []
        self.allocator = CachingAllocator(settings)
        self.log = self.allocator.driver_log = []
        self.streams: dict[int, int] = {}
        self.live: dict[Block, list[Frame]] = {}
        self.waiting: list[tuple[Block, list[Frame]]] = []

    @property
    def is_full(self) -> bool:
        """Whether the requested number of events is reached."""
        return len(self.events) >= self.num_events

    def malloc(self, num_bytes: int, layer: int, site: int, stream: int = 0) -> Block:
        """A block, with its events."""
        num_calls = len(self.log)
        block = self.allocator.malloc(num_bytes, stream)
        frames = self.stacks.of(layer, site)
        for action, address, size in self.log[num_calls:]:
            self._write(action, address, size, stream, frames)
        self._write("alloc", block.address, num_bytes, stream, frames)
        self.live[block] = frames
        return block

    def free(self, block: Block, layer: int = 0, site: int = 0) -> None:
        """The block is given up; it waits where another stream has used it."""
        frames = self.stacks.of(layer, site)
        stream = block.pool.stream
        del self.live[block]
        self._write("free_requested", block.address, block.requested_bytes, stream, frames)
        if block.uses:
            self.waiting.append((block, frames))
        else:
            self._write("free_completed", block.address, block.requested_bytes, stream, frames)
        self.allocator.free(block)

    def complete(self, num_kept: int) -> None:
        """Other streams catch up with all but the latest blocks that they used."""
        while len(self.waiting) > num_kept:
            block, frames = self.waiting.pop(0)
            self._write("free_completed", block.address, block.requested_bytes, block.pool.stream, frames)
            self.allocator.complete(block)

    def snapshot(self) -> list[dict[str, Any]]:
        """The segments as they are now."""
        allocator = self.allocator
        pools = [*allocator.pools.small.values(), *allocator.pools.large.values()]
        known = [b for pool in pools for b in pool.blocks.values()] + list(self.live) + [b for b, _ in self.waiting]
        heads = [block for block in known if block.prev is None or not block.prev.is_mapped]
        return [self._segment(head) for head in sorted(heads, key=lambda head: head.address)]

    def _segment(self, head: Block) -> dict[str, Any]:
        blocks = []
        block: Block | None = head
        while block is not None and block.is_mapped:
            state = "inactive" if block.is_free else "active_allocated" if block.is_live else "active_awaiting_free"
            blocks.append(
                {
                    "address": block.address,
                    "size": block.size,
                    "requested_size": block.requested_bytes,
                    "state": state,
                    "frames": self.live.get(block, []),
                }
            )
            block = block.next
        return {
            "device": self.device,
            "address": head.address,
            "total_size": sum(entry["size"] for entry in blocks),
            "stream": head.pool.stream,
            "segment_type": "small" if head.pool.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": head.segment is not None,
            "frames": [],
            "blocks": blocks,
        }

    def _write(self, action: str, address: int, num_bytes: int, stream: int, frames: list[Frame]) -> None:
        self.events.append(
            {
                "action": action,
                "addr": address,
                "size": num_bytes,
                "stream": stream,
                "time_us": START_US + 3 * len(self.events),
                "compile_context": "N/A",
                "user_metadata": "",
                "frames": frames,
            }
        )


def train(recorder: Recorder, num_streams: int, source: random.Random) -> None:
    """Runs steps until the recorder is full."""
    weights = [recorder.malloc(HIDDEN * HIDDEN * 24, layer, 0) for layer in range(NUM_LAYERS)]
    while not recorder.is_full:
        for _ in step(recorder, num_streams, source):
            if recorder.is_full:
                break
    assert all(block.is_live for block in weights)


def step(recorder: Recorder, num_streams: int, source: random.Random) -> Iterator[None]:
    """One step of training, which may be left wherever it yields."""
    token_bytes = source.choice(SEQUENCES) * HIDDEN * 2
    saved: list[list[Block]] = []
    for layer in range(NUM_LAYERS):
        kept = [recorder.malloc(token_bytes * factor, layer, 1 + at) for at, factor in enumerate((1, 3, 1, 4, 1))]
        kept.append(recorder.malloc(token_bytes // HIDDEN * 2, layer, 6))
        recorder.free(recorder.malloc(token_bytes * 4, layer, 7), layer, 7)
        saved.append(kept)
        yield
    gradients = []
    for layer in reversed(range(NUM_LAYERS)):
        incoming = recorder.malloc(token_bytes, layer, 1)
        for site, block in reversed(list(enumerate(saved.pop()))):
            temporary = recorder.malloc(block.requested_bytes, layer, 1 + site)
            recorder.free(block, layer, 1 + site)
            recorder.free(temporary, layer, 1 + site)
        recorder.free(incoming, layer, 1)
        gradient = recorder.malloc(HIDDEN * HIDDEN * 24, layer, 8)
        gradients.append(gradient)
        if num_streams > 1:
            side = 1 + layer % (num_streams - 1)
            gradient.record_stream(side)
            recorder.free(recorder.malloc(HIDDEN * HIDDEN * 2, layer, 8, stream=side), layer, 8)
            recorder.complete(FREE_AFTER)
        yield
    for layer, gradient in enumerate(gradients):
        recorder.free(recorder.malloc(HIDDEN * HIDDEN * 8, layer, 0), layer, 0)
        recorder.free(gradient, layer, 0)
        yield


def recording(
    num_events: int, *, num_devices: int = 1, num_streams: int = 1, depth: int = 40, conf: str = "", seed: int = 1
) -> dict[str, Any]:
    """About `num_events` events in all, shared out over the devices, as the dict that torch dumps."""
    stacks, settings = Stacks(depth), AllocatorSettings.parse(conf)
    recorders = [Recorder(device, stacks, settings, num_events // num_devices) for device in range(num_devices)]
    for recorder in recorders:
        train(recorder, num_streams, random.Random(seed + recorder.device))
    return {
        "segments": [segment for recorder in recorders for segment in recorder.snapshot()],
        "device_traces": [recorder.events for recorder in recorders],
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": conf},
        "external_annotations": [],
    }


def main() -> None:
    """Writes the recording that the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--events", type=int, default=2_000_000, help="how many events, over all devices")
    parser.add_argument("-o", "--output", type=Path, required=True, help="the file to write")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--depth", type=int, default=40, help="frames in each call stack")
    parser.add_argument("--conf", default="", help="settings as in PYTORCH_CUDA_ALLOC_CONF")
    parser.add_argument("--protocol", type=int, default=4, choices=range(6))
    given = parser.parse_args()
    whole = recording(
        given.events, num_devices=given.devices, num_streams=given.streams, depth=given.depth, conf=given.conf
    )
    with given.output.open("wb") as file:
        pickle.dump(whole, file, protocol=given.protocol)
    print(f"{given.output}: {given.output.stat().st_size / 1e6:,.0f} MB")


if __name__ == "__main__":
    main()
