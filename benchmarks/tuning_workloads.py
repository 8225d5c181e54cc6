"""Twenty programs that fragment memory, made by rule from a seed: what each asks of the allocator, as a recording.

Sizes follow models of ordinary shape (bf16, a few layers), and what varies is what varies in practice: lengths, shapes, caches that grow,
batches that are ragged, evaluation in between. Requests and frees alone are written; the tuner places them anew in any case.
"""

import pickle
import random
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from tightfit.recordings.read import Recording, read_recording
from tightfit.units import KIB, MIB

_HALF = 2
_SINGLE = 4


class Program:
    """Writes down requests and frees; a block is a number."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.events: list[dict[str, object]] = []
        self.live: dict[int, tuple[int, int]] = {}
        self.num_blocks = 0

    def malloc(self, num_bytes: int, stream: int = 0) -> int:
        """A new block."""
        self.num_blocks += 1
        self.live[self.num_blocks] = (num_bytes, stream)
        self._write("alloc", self.num_blocks)
        return self.num_blocks

    def free(self, *blocks: int) -> None:
        """Blocks that are needed no more."""
        for block in blocks:
            self._write("free_requested", block)
            self._write("free_completed", block)
            del self.live[block]

    def all(self, sizes: Iterable[int]) -> list[int]:
        """A block of each size."""
        return [self.malloc(size) for size in sizes]

    def recording(self, path: Path) -> Recording:
        """What was written down, by way of a file at `path`."""
        content = {"segments": [], "device_traces": [self.events], "allocator_settings": {}}
        path.write_bytes(pickle.dumps(content, protocol=4))
        return read_recording(path)

    def _write(self, action: str, block: int) -> None:
        num_bytes, stream = self.live[block]
        # No two blocks of a recording share an address: where they lie is for the tuner to say.
        address = block << 40
        self.events.append(
            {"action": action, "addr": address, "size": num_bytes, "stream": stream, "time_us": len(self.events)}
        )


def _layer_sizes(tokens: int, hidden: int) -> list[int]:
    """What a transformer layer keeps for its backward: norms, queries to values, attention's output and statistics, the wide part twice."""
    row = tokens * hidden * _HALF
    return [row, tokens * 8, 3 * row, row, tokens * 16 * _SINGLE, row, row, tokens * 8, 4 * row, 4 * row, row]


class Model:
    """A transformer with its weights, and gradients and optimizer state once they exist."""

    def __init__(self, program: Program, *, hidden: int = 1024, layers: int = 8, vocabulary: int = 32_000) -> None:
        self.program, self.hidden, self.layers, self.vocabulary = program, hidden, layers, vocabulary
        square = hidden * hidden * _HALF
        self.sizes = [hidden * vocabulary * _HALF]
        for _ in range(layers):
            self.sizes += [hidden * _HALF, 3 * square, square, hidden * _HALF, 4 * square, 4 * square]
        self.weights = program.all(self.sizes)
        self.state: list[int] = []

    def forward(self, tokens: int) -> list[int]:
        """The blocks kept for the backward."""
        kept = []
        for _ in range(self.layers):
            for size in _layer_sizes(tokens, self.hidden):
                kept.append(self.program.malloc(size))
            scratch = self.program.malloc(tokens * self.hidden * _HALF)
            self.program.free(scratch)
        return kept

    def loss(self, tokens: int) -> list[int]:
        """Logits, in half and single precision."""
        return self.program.all((tokens * self.vocabulary * _HALF, tokens * self.vocabulary * _SINGLE))

    def backward(self, kept: list[int], tokens: int, gradients: list[int] | None = None) -> list[int]:
        """Frees what was kept, last first; new gradients unless they are accumulated into `gradients`."""
        found = [] if gradients is None else gradients
        sizes = iter(reversed(self.sizes))
        flowing = self.program.malloc(tokens * self.hidden * _HALF)
        for at, block in enumerate(reversed(kept)):
            following = self.program.malloc(tokens * self.hidden * _HALF)
            self.program.free(block, flowing)
            flowing = following
            if at % 2 and gradients is None:
                found += [self.program.malloc(size) for size in (next(sizes, 0),) if size]
        if gradients is None:
            found += self.program.all(sizes)
        self.program.free(flowing)
        return found

    def update(self, gradients: list[int]) -> None:
        """An optimizer step; the first makes its state."""
        if not self.state:
            self.state = self.program.all(2 * size for size in self.sizes for _ in range(2))
        self.program.free(*reversed(gradients))

    def step(self, tokens: int) -> None:
        """One training step."""
        kept = self.forward(tokens)
        logits = self.loss(tokens)
        self.program.free(logits[1])
        kept.append(logits[0])
        self.update(self.backward(kept, tokens))

    def infer(self, tokens: int) -> None:
        """A forward pass that keeps nothing."""
        flowing = self.program.malloc(tokens * self.hidden * _HALF)
        for _ in range(self.layers):
            layer = self.program.all(_layer_sizes(tokens, self.hidden)[2:])
            self.program.free(flowing, *layer[:-1])
            flowing = layer[-1]
        logits = self.loss(tokens)
        self.program.free(flowing, *logits)


def _lengths_uniform(p: Program) -> None:
    model = Model(p)
    for _ in range(12):
        model.step(8 * p.random.randrange(64, 1024))


def _lengths_bucketed(p: Program) -> None:
    model = Model(p)
    for _ in range(12):
        model.step(8 * p.random.choice((128, 256, 384, 512, 768, 1024)))


def _lengths_long_tail(p: Program) -> None:
    model = Model(p)
    for _ in range(12):
        model.step(4 * min(4096, int(p.random.lognormvariate(6.3, 0.7))))


def _alternating_shapes(p: Program) -> None:
    model = Model(p)
    for at in range(12):
        model.step((3000, 7000, 4500)[at % 3] + p.random.randrange(0, 64))


def _evaluation_between(p: Program) -> None:
    model = Model(p)
    for at in range(12):
        model.step(4096)
        if at % 3 == 2:
            for _ in range(2):
                model.infer(p.random.randrange(6000, 9000))


def _late_optimizer(p: Program) -> None:
    model = Model(p, hidden=1536)
    gradients: list[int] | None = None
    for at in range(10):
        tokens = p.random.randrange(2000, 5000)
        gradients = model.backward(model.forward(tokens), tokens, gradients)
        if at % 4 == 3:
            model.update(gradients)
            gradients = None


def _accumulation_short_last(p: Program) -> None:
    model = Model(p)
    for _ in range(4):
        gradients: list[int] | None = None
        for part in range(3):
            tokens = p.random.randrange(3600, 4200) if part < 2 else p.random.randrange(300, 3000)
            kept = model.forward(tokens) + model.loss(tokens)
            gradients = model.backward(kept, tokens, gradients)
        model.update(gradients or [])


def _checkpointed(p: Program) -> None:
    model = Model(p, layers=12)
    for _ in range(8):
        tokens = 8 * p.random.randrange(200, 1500)
        row = tokens * model.hidden * _HALF
        inputs = []
        for _ in range(model.layers):
            inputs.append(p.malloc(row))
            p.free(*p.all(_layer_sizes(tokens, model.hidden)))
        logits = model.loss(tokens)
        flowing = p.malloc(row)
        p.free(*logits)
        gradients = []
        for kept in reversed(inputs):
            again = p.all(_layer_sizes(tokens, model.hidden))
            gradients += p.all(model.sizes[1:7])
            p.free(*reversed(again), kept)
        p.free(flowing)
        model.update(gradients)


def _cache_by_concatenation(p: Program) -> None:
    model = Model(p, layers=12)
    for _ in range(4):
        row = 2 * 8 * model.hidden * _HALF
        length = p.random.randrange(100, 700)
        caches = p.all(row * length for _ in range(model.layers))
        for _ in range(60):
            length += 1
            for layer in range(model.layers):
                new = p.malloc(row)
                joined = p.malloc(row * length)
                p.free(new, caches[layer])
                caches[layer] = joined
        p.free(*caches)


def _serving(p: Program) -> None:
    model = Model(p, layers=4)
    requests: list[tuple[int, list[int]]] = []
    row = 2 * model.hidden * _HALF
    for _ in range(120):
        if len(requests) < 12 and p.random.random() < 0.5:
            length = p.random.randrange(200, 6000)
            requests.append((length, p.all(row * length for _ in range(model.layers))))
            model.infer(min(length, 1024))
        grown = []
        for length, caches in requests:
            if p.random.random() < 0.05:
                p.free(*caches)
                continue
            longer = []
            for cache in caches:
                longer.append(p.malloc(row * (length + 16)))
                p.free(cache)
            grown.append((length + 16, longer))
        requests = grown


def _beam_search(p: Program) -> None:
    model = Model(p, layers=8)
    for _ in range(4):
        row, length = 5 * 2 * model.hidden * _HALF, p.random.randrange(100, 1500)
        caches = p.all(row * length for _ in range(model.layers))
        for _ in range(40):
            length += 1
            appended = []
            for cache in caches:
                appended.append(p.malloc(row * length))
                p.free(cache)
            caches = p.all(row * length for _ in appended)
            p.free(*appended)
        p.free(*caches)


def _ragged_experts(p: Program) -> None:
    model = Model(p, layers=6)
    for _ in range(8):
        kept = []
        for _ in range(model.layers):
            shares = [p.random.expovariate(1) for _ in range(8)]
            for share in shares:
                routed = max(1, int(8192 * share / sum(shares)))
                kept += p.all((routed * model.hidden * _HALF, 4 * routed * model.hidden * _HALF))
        model.update(model.backward(kept, 4096))


def _graphs(p: Program) -> None:
    weights = p.all(p.random.randrange(64 * KIB, 4 * MIB) for _ in range(40))
    for _ in range(60):
        nodes = int(p.random.lognormvariate(9.5, 0.8))
        edges = int(nodes * p.random.uniform(3, 20))
        kept = []
        for _ in range(5):
            messages = p.malloc(edges * 64 * _SINGLE)
            kept += p.all((nodes * 128 * _SINGLE, edges * 8, nodes * 128 * _SINGLE))
            p.free(messages)
        for block in reversed(kept):
            gradient = p.malloc(edges * 64 * _SINGLE)
            p.free(block, gradient)
    p.free(*weights)


def _detection(p: Program) -> None:
    weights = p.all(p.random.randrange(64 * KIB, 9 * MIB) for _ in range(80))
    for _ in range(25):
        height, width = (32 * p.random.randrange(15, 42) for _ in range(2))
        kept = []
        for depth in range(5):
            pixels = 2 * (height >> depth) * (width >> depth)
            kept += p.all(pixels * (32 << depth) * _HALF for _ in range(4))
        proposals = p.random.randrange(50, 2000)
        kept += p.all((proposals * 256 * 49 * _HALF, proposals * 1024 * _HALF, proposals * 80 * _SINGLE))
        for block in reversed(kept):
            scratch = p.malloc(p.random.choice((2, 8, 24)) * MIB)
            p.free(block, scratch)
    p.free(*weights)


def _image_sizes(p: Program) -> None:
    weights = p.all(p.random.randrange(256 * KIB, 24 * MIB) for _ in range(60))
    for _ in range(25):
        side = 8 * p.random.choice((64, 72, 80, 96, 104, 128))
        pixels = side * side * 4 // 64
        kept = []
        for depth in (0, 1, 2, 2, 1, 0):
            part = (pixels >> (2 * depth)) * (320 << depth) * _HALF
            scores = min((pixels >> (2 * depth)) ** 2 // 16, 256 * MIB)
            attention = p.malloc(scores)
            kept += p.all((part, part, 4 * part))
            p.free(attention)
        p.free(*reversed(kept))
    p.free(*weights)


def _progressive_resizing(p: Program) -> None:
    weights = p.all(p.random.randrange(256 * KIB, 9 * MIB) for _ in range(60))
    for at in range(24):
        side = 128 + 16 * (at // 2) + p.random.randrange(0, 3)
        kept = []
        for depth in range(5):
            pixels = 64 * (side >> depth) ** 2
            kept += p.all(pixels * (16 << depth) * _HALF for _ in range(3))
        for block in reversed(kept):
            p.free(block)
    p.free(*weights)


def _speech(p: Program) -> None:
    model = Model(p, hidden=768, layers=8, vocabulary=5000)
    for _ in range(10):
        frames = p.random.randrange(8_000, 60_000)
        features = p.all((frames * 80 * _SINGLE, frames * 512 * _HALF, frames // 2 * 512 * _HALF))
        kept = model.forward(frames // 4)
        model.update(model.backward(features + kept, frames // 4))


def _small_and_large(p: Program) -> None:
    held: list[int] = []
    for _ in range(4000):
        if len(held) > 150 or (held and p.random.random() < 0.47):
            p.free(held.pop(p.random.randrange(len(held))))
        else:
            is_small = p.random.random() < 0.6
            held.append(p.malloc(p.random.randrange(512, MIB) if is_small else p.random.randrange(MIB, 90 * MIB)))
    p.free(*held)


def _loading_and_quantising(p: Program) -> None:
    quantised = []
    for _ in range(60):
        size = p.random.choice((16, 24, 50, 64, 86, 128)) * MIB + p.random.randrange(0, 64) * KIB
        full = p.malloc(size)
        scales = p.malloc(size // 64)
        low = p.malloc(size // 4)
        p.free(full)
        quantised += [scales, low]
    for _ in range(20):
        tokens = p.random.randrange(100, 4000)
        p.free(*p.all(tokens * 4096 * _HALF * factor for factor in (1, 3, 1, 4, 4, 1)))
    p.free(*quantised)


def _prefetch_stream(p: Program) -> None:
    model = Model(p, layers=6)
    waiting: list[int] = []
    for _ in range(10):
        while len(waiting) < 3:
            waiting.append(p.malloc(p.random.randrange(4, 120) * MIB, stream=7))
        model.step(8 * p.random.randrange(100, 800))
        p.free(waiting.pop(0))


WORKLOADS: Mapping[str, Callable[[Program], None]] = {
    "lengths, uniform": _lengths_uniform,
    "lengths, bucketed": _lengths_bucketed,
    "lengths, long tail": _lengths_long_tail,
    "alternating shapes": _alternating_shapes,
    "evaluation between steps": _evaluation_between,
    "optimizer state mid-run": _late_optimizer,
    "accumulation, short last batch": _accumulation_short_last,
    "checkpointed, variable length": _checkpointed,
    "cache grown by concatenation": _cache_by_concatenation,
    "serving, caches come and go": _serving,
    "beam search, caches reordered": _beam_search,
    "ragged experts": _ragged_experts,
    "graphs of any size": _graphs,
    "detection, any image shape": _detection,
    "diffusion, several image sizes": _image_sizes,
    "progressive resizing": _progressive_resizing,
    "speech, any length": _speech,
    "small and large, random": _small_and_large,
    "loading and quantising": _loading_and_quantising,
    "prefetch on a second stream": _prefetch_stream,
}


def recording_of(name: str, seed: int, folder: Path) -> Recording:
    """The workload of that name, as a recording written into `folder`."""
    program = Program(seed)
    WORKLOADS[name](program)
    return program.recording(folder / f"{name.replace(', ', '-').replace(' ', '-')}-{seed}.pickle")
