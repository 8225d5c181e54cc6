"""`tightfit devices`: the GPUs of the catalogue, one of them in full, and the GPUs of this machine."""

import dataclasses
import json as json_module
import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from tightfit.cli.shared.local_cards import local_cards
from tightfit.devices.catalogue import all_devices, find
from tightfit.devices.device import Device
from tightfit.units import format_bytes

# rich takes 80 columns where stdout is no terminal, and would cut the table's columns.
_PIPED_WIDTH = 160
_WIDTH_FOR_ALL = 130


def devices(name: str | None = None, /, *, json: bool = False) -> int:
    """List the known GPUs and those of this machine; with NAME, show one GPU and the sources of its figures.

    Args:
        name: a GPU, such as 4090, "A100 40GB" or mycard.toml.
        json: print JSON instead of a table.
    """
    if name is not None:
        device = find(name)
        if json:
            _print_json({"schema": 1, "device": as_json(device)})
        else:
            _console().print(_card_table(device))
        return 0
    here = local_cards()
    if json:
        cards = [as_json(device) for device in all_devices()]
        _print_json({"schema": 1, "devices": cards, "here": [dataclasses.asdict(card) for card in here]})
        return 0
    console = _console()
    console.print(_catalogue_table(all_devices(), console.width))
    for card in here:
        known = f"known as {card.known_as}" if card.known_as else "not in the catalogue"
        console.print(f"this machine: {card.name}, {format_bytes(card.total_bytes)} ({known})", highlight=False)
    return 0


def as_json(device: Device) -> dict[str, Any]:
    """The device as plain JSON types; sizes in bytes, rates per second."""
    return dataclasses.asdict(device)


def _console() -> Console:
    return Console() if sys.stdout.isatty() else Console(width=_PIPED_WIDTH)


def _print_json(content: dict[str, Any]) -> None:
    print(json_module.dumps(content, indent=2))


def _catalogue_table(cards: tuple[Device, ...], width: int) -> Table:
    # In a narrow terminal rich would cut every figure; what is left out here is in the answer for one card.
    is_narrow = width < _WIDTH_FOR_ALL
    table = Table(box=None, header_style="bold", pad_edge=False)
    table.add_column("GPU", no_wrap=not is_narrow)
    headings = ("memory", "usable", "GB/s", "bf16 TFLOP/s", "fp16 TFLOP/s", "context", "link")
    shown = len(headings) - 3 if is_narrow else len(headings)
    for heading in headings[:shown]:
        table.add_column(heading, justify="left" if heading == "link" else "right", no_wrap=True)
    for card in cards:
        figures = (
            format_bytes(card.nominal_bytes),
            format_bytes(card.capacity_bytes),
            f"{card.dram_bytes_per_second / 1e9:,.0f}",
            *(f"{card.flops[dtype] / 1e12:,.0f}" if dtype in card.flops else "-" for dtype in ("bfloat16", "float16")),
            format_bytes(card.context_bytes),
            str(card.link),
        )
        table.add_row(card.name, *figures[:shown])
    if is_narrow:
        table.caption, table.caption_justify = "tightfit devices NAME shows all of one", "left"
    return table


def _card_table(card: Device) -> Table:
    table = Table(
        box=None, show_header=False, pad_edge=False, title=card.name, title_justify="left", title_style="bold"
    )
    table.add_column(no_wrap=True)
    table.add_column()
    context, l2_speed = card.context, card.l2_bytes_per_second
    origin = "readings" if context.is_measured else "modelled"
    rows = {
        "also called": ", ".join(card.aliases) or "-",
        "architecture": f"{card.architecture}, {card.isa}, {card.kind}",
        "multiprocessors": f"{card.num_multiprocessors} of {card.max_threads_per_multiprocessor} threads, "
        f"up to {card.max_clock_hertz / 1e6:,.0f} MHz",
        "memory": f"{format_bytes(card.nominal_bytes)} of {card.dram}, usable {format_bytes(card.capacity_bytes)}",
        "context": f"{format_bytes(context.num_bytes)}, from {format_bytes(context.low_bytes)} to "
        f"{format_bytes(context.high_bytes)} ({origin})",
        "memory bandwidth": f"{card.dram_bytes_per_second / 1e9:,.0f} GB/s",
        "L2": format_bytes(card.l2_bytes) + (f", {l2_speed / 1e9:,.0f} GB/s" if l2_speed else ""),
        "per multiprocessor": f"{format_bytes(card.register_file_bytes)} of registers, "
        f"{format_bytes(card.shared_memory_bytes)} of shared memory and L1",
        "dense TFLOP/s": ", ".join(f"{dtype} {flops / 1e12:,.4g}" for dtype, flops in card.flops.items()),
        "link to the host": f"{card.link}, {card.link.bytes_per_second / 1e9:,.1f} GB/s each way",
        "sources": "\n".join(card.source),
    }
    for key, value in rows.items():
        table.add_row(key, value)
    return table
