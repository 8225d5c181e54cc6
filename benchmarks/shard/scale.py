"""How long a search takes, and in how much memory: Llama 405B on 128 to 4,096 H100, and a mixture of experts of 10^12 weights, of the sizes of Kimi K2 (its config.json) with plain attention, on 4,096."""

import resource
import time

from benchmarks.shard.decoders import traced, with_layers
from benchmarks.shard.torchtitan import LLAMAS
from tightfit.devices.catalogue import find
from tightfit.devices.nodes import node_of
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model.model_parts import ModelParts


def measure() -> None:
    """Prints it."""
    started = time.monotonic()
    device = find("h100")
    sizes, layers = LLAMAS["Llama3.1-405B"]
    model = with_layers(traced("llama", **sizes), device, layers, reduced_in_float32=True)
    _search("405B", model, (128, 512, 4096), 2048)
    tape = traced("experts", width=7168, heads=64, kv_heads=8, hidden=2048, number=384, chosen=8)
    model = with_layers(tape, device, 60, reduced_in_float32=True)
    _search(f"{model.parameter_bytes / 2e12:.2f}T", model, (4096,), 16384)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"altogether {time.monotonic() - started:.1f} s, {peak:.2f} GiB of host memory")


def _search(name: str, model: ModelParts, numbers: tuple[int, ...], examples: int) -> None:
    device = find("h100")
    search = LayoutSearch(model, device, node_of(device), budget_bytes=device.capacity_bytes)
    for num_gpus in numbers:
        begun = time.monotonic()
        plan = search.run(num_gpus, examples)
        best = plan.best
        speed = (
            "nothing fits"
            if best is None
            else f"{best.layout}, {plan.rate(best) / num_gpus:.0f} tokens/s a card, {best.worst.total_bytes / 2**30:.1f} GiB"
        )
        print(
            f"{name} on {num_gpus} H100: {time.monotonic() - begun:.1f} s, {plan.num_priced:,} layouts so far: {speed}"
        )
