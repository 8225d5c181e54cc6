"""How many allocator events per second the simulation takes: on recordings, on a synthetic trace of 300,000 events, and end to end on a long one.

python benchmarks/replay_speed.py [RECORDING ...]      without arguments: the recordings beside the checkout, where there are any
python benchmarks/replay_speed.py --long [EVENTS]      `tightfit replay` on a synthetic recording with stacks: seconds and peak host memory
"""

import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tightfit.allocator.caching import CachingAllocator
from tightfit.allocator.pools import Block
from tightfit.allocator.settings import AllocatorSettings
from tightfit.recordings.read import read_recording
from tightfit.recordings.replayed import replay
from tightfit.units import MIB, format_bytes

NUM_EVENTS = 300_000
NUM_SIZES = 200
MAX_LIVE = 600
NUM_RUNS = 5
CONFS = ("", "roundup_power2_divisions:4", "max_split_size_mb:64", "expandable_segments:True")

Event = tuple[int, int]
"""The number of a request and its bytes, or 0 bytes where that one is freed."""


def synthetic_events(num_events: int, seed: int = 1) -> list[Event]:
    """Requests and frees of a few hundred sizes, half of them small, with up to `MAX_LIVE` blocks in use."""
    source = random.Random(seed)
    sizes = [source.choice((source.randrange(1, MIB), source.randrange(MIB, 64 * MIB))) for _ in range(NUM_SIZES)]
    events: list[Event] = []
    live: list[int] = []
    num_requests = 0
    while len(events) < num_events:
        if live and (len(live) > MAX_LIVE or source.random() < 0.48):
            events.append((live.pop(source.randrange(len(live))), 0))
        else:
            events.append((num_requests, source.choice(sizes)))
            live.append(num_requests)
            num_requests += 1
    return events


def run(events: list[Event], conf: str) -> None:
    """Feeds the events to a new allocator."""
    allocator = CachingAllocator(AllocatorSettings.parse(conf))
    blocks: dict[int, Block] = {}
    for number, num_bytes in events:
        if num_bytes:
            blocks[number] = allocator.malloc(num_bytes)
        else:
            allocator.free(blocks.pop(number))


def events_per_second(num_events: int, work: Callable[[], object]) -> str:
    """The median over some runs, with the slowest and the fastest."""
    rates = []
    for _ in range(NUM_RUNS):
        began = time.perf_counter()
        work()
        rates.append(num_events / (time.perf_counter() - began))
    return f"{statistics.median(rates):>12,.0f} events/s   ({min(rates):,.0f} to {max(rates):,.0f})"


def long_recording(num_events: int) -> None:
    """Runs `tightfit replay` on a recording of `num_events`, in a process of its own, for two protocols that torch has written."""
    for protocol in (2, 4):
        with tempfile.NamedTemporaryFile(suffix=".pickle") as file:
            maker = [sys.executable, str(Path(__file__).with_name("synthetic_recording.py")), "-o", file.name]
            maker += ["--events", str(num_events), "--protocol", str(protocol)]
            subprocess.run(maker, check=True, stdout=subprocess.DEVNULL)
            num_bytes = Path(file.name).stat().st_size
            command = [sys.executable, __file__, "--replay", file.name]
            answer = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
            print(f"{num_events:,} events, protocol {protocol}, {num_bytes / 1e6:,.0f} MB: {answer[-1]}")


def replay_once(path: Path) -> None:
    """Prints the seconds for reading and for replaying, and the most memory that this process had."""
    began = time.perf_counter()
    recording = read_recording(path)
    read_seconds = time.perf_counter() - began
    result = replay(recording)
    total_seconds = time.perf_counter() - began
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    agrees = "agrees" if result.agrees else "DIFFERS"
    print(f"{total_seconds:.1f} s ({read_seconds:.1f} s reading), peak {format_bytes(peak_bytes)}, {agrees}")


def main(paths: list[Path]) -> None:
    """Prints one line per recording, and one per setting on the synthetic trace."""
    for path in paths:
        recording = read_recording(path)
        num_events = replay(recording).events
        print(f"{path.stem:<40}{events_per_second(num_events, lambda recording=recording: replay(recording))}")
    events = synthetic_events(NUM_EVENTS)
    for conf in CONFS:
        rate = events_per_second(NUM_EVENTS, lambda conf=conf: run(events, conf))
        print(f"{'synthetic, ' + (conf or 'plain settings'):<40}{rate}")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--long"]:
        long_recording(int((sys.argv[2:] or ["2000000"])[0]))
    elif sys.argv[1:2] == ["--replay"]:
        replay_once(Path(sys.argv[2]))
    else:
        beside = Path(__file__).resolve().parents[2] / "shared/data/snapshots"
        main([Path(argument) for argument in sys.argv[1:]] or sorted(beside.glob("*.pickle")))
