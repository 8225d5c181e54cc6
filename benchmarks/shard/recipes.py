"""Published recipes against the planner: the layout that it finds on the same cards for the same batch, and whether the published one is among its candidates.

Both are priced alike, so the comparison says what the search finds, not how true the seconds are.
"""

import csv
import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.shard.decoders import of_length, traced, with_layers
from benchmarks.shard.mpt import SIZES
from benchmarks.shard.torchtitan import LLAMAS, Llamas, card_of, layout_of
from tightfit.devices.catalogue import find
from tightfit.devices.device import Device
from tightfit.devices.nodes import node_of
from tightfit.layouts.layout import Layout
from tightfit.layouts.layout_search import LayoutSearch
from tightfit.layouts.model.model_parts import ModelParts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A published run: the model, the cards, and its layout."""

    name: str
    model: ModelParts
    device: Device
    layout: Layout

    @property
    def examples(self) -> int:
        """The examples of a step of all cards."""
        return self.layout.dp * self.layout.micro_batch * self.layout.accumulation


def compare(data: Path) -> None:
    """Prints the comparison."""
    for recipe in _recipes(data):
        search = LayoutSearch(
            recipe.model, recipe.device, node_of(recipe.device), budget_bytes=recipe.device.capacity_bytes
        )
        begun = time.monotonic()
        plan = search.run(recipe.layout.num_gpus, recipe.examples)
        took = time.monotonic() - begun
        published = search.priced_layout(recipe.layout)
        is_candidate = search.candidates.has(recipe.layout, recipe.examples)
        best = plan.best
        if best is None:
            print(f"  {recipe.name}: nothing fits")
            continue
        print(
            f"  {recipe.name}: published {recipe.layout} {published.seconds.total:.2f} s"
            f"{'' if published.fits else ', said not to fit'}, {'a' if is_candidate else 'no'} candidate;"
            f" planned {best.layout} {best.seconds.total:.2f} s ({published.seconds.total / best.seconds.total - 1:+.1%} faster), {took:.1f} s to find"
        )


def _recipes(data: Path) -> Iterator[Recipe]:
    llamas = Llamas()
    wanted = {
        ("Llama3.1-8B", "8", "FSDP2"), ("Llama3.1-8B", "128", "FSDP2"), ("Llama3-8B", "64", "FSDP2"), ("Llama3-70B", "64", "FSDP2"),
        ("Llama3-70B", "256", "FSDP2+TP vanilla"),
    }  # fmt: skip
    with (data / "published" / "torchtitan.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = (row["model"], row["n_gpu"], row["parallel"])
            if row["precision"] == "bf16" and key in wanted and "layer" not in row["ac"]:
                wanted.remove(key)
                device = card_of(row)
                model = llamas.parts(row["model"], device, int(row["seq"]))
                layout = layout_of(row, len(model.order))
                yield Recipe(
                    name=f"{row['model']}, {row['n_gpu']} {row['gpu'][:4]}", model=model, device=device, layout=layout
                )
    device = dataclasses.replace(find("H100"), capacity_bytes=95 * 2**30)
    # torchtitan's 405B: tp 8, pp 8, FSDP over 8; as many micro-batches as stages.
    layout = Layout(
        dp=8, tp=8, pp=8, sharded_over=8, micro_batch=4, accumulation=8, schedule="1f1b", recompute="full",
        num_recomputed=-(-LLAMAS["Llama3.1-405B"][1] // 8),
    )  # fmt: skip
    yield Recipe(
        name="Llama3.1-405B, 512 H100", model=llamas.parts("Llama3.1-405B", device, 8192), device=device, layout=layout
    )
    device = find("A100-40GB")
    width, heads, layers = SIZES["30b"]
    model = with_layers(traced("mpt", width=width, heads=heads), device, layers, reduced_in_float32=False)
    layout = Layout(dp=128, sharded_over=128, micro_batch=6, accumulation=1, recompute="full", num_recomputed=layers)
    yield Recipe(name="MPT-30B, 128 A100-40", model=of_length(model, 2048), device=device, layout=layout)
    # GPT-NeoX-20B (Black et al. 2022, section 2): tp 2, pp 4, 12 ranks of data with ZeRO-1, micro-batches of 4, 1,538 examples rounded to 32 micro-batches.
    model = with_layers(traced("mpt", width=6144, heads=64), device, 44, reduced_in_float32=False)
    layout = Layout(
        dp=12, tp=2, pp=4, zero_stage=1, sharded_over=12, micro_batch=4, accumulation=32, schedule="1f1b", recompute="full", num_recomputed=11,
    )  # fmt: skip
    yield Recipe(name="GPT-NeoX-20B, 96 A100-40", model=of_length(model, 2048), device=device, layout=layout)
