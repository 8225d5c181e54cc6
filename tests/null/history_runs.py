"""Small runs for the tests of histories, doctor and diff: a tape of given sizes, and a recording of a training loop with stacks."""

import pickle
from pathlib import Path

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.settings import AllocatorSettings
from tightfit.devices.catalogue import find
from tightfit.tape import Category, EventKind, Events, Operators, Phase, Source, SpanKind, Spans, Storages, Tape
from tightfit.units import MIB

CARD = find("RTX 4090")


def tape_of(sizes, events, *, categories=None, sources=None, lines=None, spans=None) -> Tape:
    """A tape of one operator per storage; `events` are storage numbers, negative ones (minus one) for frees."""
    num = len(sizes)
    lines = lines or ["train.py:7"] * num
    strings = ("", "aten.mm", "net.0", "step 1", "step 2", "step 3", "step 4", "setup", *dict.fromkeys(lines))
    kinds = [EventKind.ALLOCATE if e >= 0 else EventKind.FREE for e in events]
    issued, counts = 0, []
    for kind in kinds:
        issued = min(num, issued + (kind == EventKind.ALLOCATE))
        counts.append(issued)
    spans = spans or [("step 1", SpanKind.STEP, 0, len(events))]
    return Tape(
        target="toy.py:workload",
        versions={"torch": "2.13.0"},
        traced_for=CARD.name,
        strings=strings,
        operators=Operators.from_columns(
            dict.fromkeys(("dtype", "stream"), [0] * num)
            | {"name": [1] * num, "module": [2] * num, "line": [strings.index(line) for line in lines]}
            | {"flops": [1e9] * num, "bytes_read": sizes, "bytes_written": sizes, "phase": [Phase.FORWARD] * num}
        ),
        storages=Storages.from_columns(
            dict.fromkeys(("num_bytes", "low_bytes", "high_bytes"), sizes)
            | {"category": categories or [Category.TEMPORARIES] * num, "source": sources or [Source.TENSOR] * num}
            | {"operator": list(range(num)), "stream": [0] * num}
        ),
        events=Events.from_columns(
            {
                "kind": kinds,
                "storage": [e if e >= 0 else -e - 1 for e in events],
                "operator": counts,
                "value": [0] * len(events),
            }
        ),
        spans=Spans.from_columns(
            {
                "name": [strings.index(name) for name, _, _, _ in spans],
                "kind": [kind for _, kind, _, _ in spans],
                "begin": [begin for _, _, begin, _ in spans],
                "end": [end for _, _, _, end in spans],
            }
        ),
        assumptions=(),
        host_peak_bytes=0,
    )


ENGINE = "??:0 torch::autograd::Engine::evaluate_function(torch::autograd::Node*)"
BACKWARD = (
    "??:0 at::_ops::mm::call(at::Tensor const&)",
    "x.cpp:0 torch::autograd::generated::MmBackward0::apply(int)",
    ENGINE,
)
FORWARD = (
    "??:0 at::_ops::mm::call(at::Tensor const&)",
    "/env/lib/python3.11/site-packages/torch/nn/modules/linear.py:9 forward",
    "model.py:7 forward",
    "/env/lib/python3.11/site-packages/torch/nn/modules/module.py:9 _call_impl",
    "train.py:20 main",
)
NORM = ("??:0 at::_ops::exp::call(at::Tensor const&)", "model.py:8 forward", *FORWARD[3:])
LEAK = ("??:0 at::_ops::clone::call(at::Tensor const&)", "train.py:24 main")
LOADER = ("??:0 at::_ops::to_device::call(at::Tensor const&)", "train.py:18 main")
STATE = (
    "??:0 at::_ops::zeros_like::call(at::Tensor const&)",
    "/env/lib/python3.11/site-packages/torch/optim/adamw.py:5 _init_group",
    "train.py:22 main",
)
SCRATCH = ("??:0 at::_ops::_foreach_sqrt::call(at::TensorList)", *STATE[1:])


class Recorder:
    """Writes down what torch would of requests with their stacks; `before` are the bytes of blocks that are there already."""

    def __init__(self, conf: str = "", before=()):
        self.conf, self.events, self.segments, self.live = conf, [], {}, {}
        self.allocator = CachingAllocator(AllocatorSettings.parse(conf))
        for num_bytes in before:
            self.live[len(self.live)] = (self.allocator.malloc(num_bytes), ())
        self.allocator.driver_log = []

    def write(self, action, address, num_bytes, stream, stack):
        frames = [_frame(frame) for frame in stack]
        at = {"addr": address, "size": num_bytes, "stream": stream, "time_us": 1_000 + 10 * len(self.events)}
        self.events.append({"action": action, "frames": frames} | at)

    def malloc(self, num_bytes, stack, stream=0) -> int:
        since = len(self.allocator.driver_log)
        block = self.allocator.malloc(num_bytes, stream)
        for action, address, size in self.allocator.driver_log[since:]:
            self.write(action, address, size, stream, stack)
        self.write("alloc", block.address, num_bytes, stream, stack)
        number = 1 + max(self.live, default=0)
        self.live[number] = (block, stack)
        return number

    def free(self, *numbers):
        for number in numbers:
            block, _ = self.live.pop(number)
            for action in ("free_requested", "free_completed"):
                self.write(action, block.address, block.requested_bytes, block.pool.stream, ())
            self.allocator.free(block)

    def save(self, path: Path, **extra) -> Path:
        value = {
            "device_traces": [self.events],
            "segments": self._segments(),
            "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": self.conf},
        }
        path.write_bytes(pickle.dumps(value | extra))
        return path

    def _segments(self):
        stacks = {block.address: stack for block, stack in self.live.values()}
        pools = [*self.allocator.pools.small.values(), *self.allocator.pools.large.values()]
        known = [block for pool in pools for block in pool.free_blocks()] + [b for b, _ in self.live.values()]
        heads = {}
        for block in known:
            head = block
            while head.prev is not None:
                head = head.prev
            heads[head.address] = head
        return [self._segment(head, stacks) for _, head in sorted(heads.items())]

    def _segment(self, block, stacks):
        head, blocks = block, []
        while block is not None and block.is_mapped:
            state = "active_allocated" if block.is_live else "inactive"
            frames = [_frame(frame) for frame in stacks.get(block.address, ())]
            blocks.append(
                {"address": block.address, "size": block.size, "state": state, "frames": frames}
                | {"requested_size": block.requested_bytes if block.is_live else 0}
            )
            block = block.next
        return {
            "device": 0,
            "address": head.address,
            "total_size": sum(block["size"] for block in blocks),
            "stream": head.pool.stream,
            "segment_type": "small" if head.pool.is_small else "large",
            "segment_pool_id": (0, 0),
            "is_expandable": head.segment is not None,
            "blocks": blocks,
        }


def _frame(frame: str) -> dict[str, object]:
    place, _, name = frame.partition(" ")
    filename, _, line = place.rpartition(":")
    return {"filename": filename, "line": int(line), "name": name}


def training(path: Path, *, num_steps=3, leak_bytes=0, conf="", width=4 * MIB, num_layers=2) -> Path:
    """A recording of a loop: a parameter and its gradient of `width` a layer, Adam's two copies from the first step on, and a leak."""
    recorder = Recorder(conf, before=[width] * num_layers)
    has_state = False
    for _ in range(num_steps):
        batch = recorder.malloc(3 * MIB, LOADER)
        activations = []
        for _ in range(num_layers):
            scratch = recorder.malloc(2 * MIB, NORM)
            activations.append(recorder.malloc(6 * MIB, FORWARD))
            recorder.free(scratch)
        if leak_bytes:
            recorder.malloc(leak_bytes, LEAK)
        gradients = []
        for activation in reversed(activations):
            scratch = recorder.malloc(5 * MIB, BACKWARD)
            gradients.append(recorder.malloc(width, BACKWARD))
            recorder.free(scratch, activation)
        for _ in range(num_layers):
            if not has_state:
                recorder.malloc(width, STATE)
                recorder.malloc(width, STATE)
            recorder.free(recorder.malloc(width, SCRATCH))
        has_state = True
        recorder.free(*gradients, batch)
    return recorder.save(path)
