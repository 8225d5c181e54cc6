"""How long a search takes, and in how much memory: Llama 405B on 128 to 4,096 H100."""

import resource
import time

from benchmarks.shard.decoders import traced, with_layers
from benchmarks.shard.torchtitan import LLAMAS
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of
from tightfit.layouts.layout_search import LayoutSearch


def measure() -> None:
    """Prints it."""
    started = time.monotonic()
    device = find("h100")
    sizes, layers = LLAMAS["Llama3.1-405B"]
    model = with_layers(traced("llama", **sizes), device, layers, reduced_in_float32=True)
    search = LayoutSearch(model, device, node_of(device), budget_bytes=device.capacity_bytes)
    for num_gpus in (128, 512, 4096):
        begun = time.monotonic()
        plan = search.run(num_gpus, 2048)
        best = plan.best
        speed = "nothing fits" if best is None else f"{best.layout}, {plan.rate(best) / num_gpus:.0f} tokens/s a card"
        print(f"405B on {num_gpus} H100: {time.monotonic() - begun:.1f} s, {plan.num_priced:,} layouts so far: {speed}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"altogether {time.monotonic() - started:.1f} s, {peak:.2f} GiB of host memory")
