"""A card in one line, and its history as a chart with the forecast behind it."""

import math

import numpy as np
from rich.text import Text

from tightfit.watch.machine.machine_state import CardState, Outlook, ProcessState
from tightfit.watch.store.stored_history import CardHistory
from tightfit.watch.terminal.charts import ASCII_BLOCKS, BLOCKS, chart, resampled, sparkline
from tightfit.watch.terminal.words import bound, memory, percent, share, size

_BAR, _MIN_SPARK = 12, 14
_SHARE_OF_FORECAST = 0.2
"""Of a chart's width, that of the next hour."""


def card_line(card: CardState, history: CardHistory | None, width: int, *, is_ascii: bool) -> Text:
    """As much of a card as fits `width`, the most wanted first; what is left is its last hour."""
    reading, used = card.reading, share(card.reading)
    watts, celsius = reading.power_watts, reading.temperature_celsius
    style = _style(used)
    parts = {
        "index": Text(f"{reading.index:>2}", "bold"),
        "memory": Text(f" {memory(reading):>11}", style),
        "share": Text(f" {percent(used):>4}", style),
        "bound": Text(f"  {bound(card.outlook):>13}", _style(_share_of(card.outlook, reading.total_bytes))),
        "busy": Text(f"  {percent(reading.utilization):>4} busy"),
        "bar": Text(" " + _bar(used, is_ascii=is_ascii), style),
        "name": Text(f" {reading.name[:22]:<22}"),
        "power": Text(f"  {'-' if watts is None else f'{watts:.0f} W':>6}"),
        "heat": Text(f" {'-' if celsius is None else f'{celsius:.0f} °C':>6}"),
    }
    has_history = history is not None and bool(reading.total_bytes)
    chosen, left = [], width
    for name in ("index", "memory", "bound", "share", "busy", "bar", "power", "name", "heat"):
        # A short history is worth more than a bar of what the figures say, or the name.
        kept = _MIN_SPARK if has_history and name in ("bar", "power", "name", "heat") else 0
        if parts[name].cell_len <= left - kept:
            chosen.append(name)
            left -= parts[name].cell_len
    order = ("index", "name", "bar", "memory", "share", "busy", "power", "heat", "bound")
    line = Text.assemble(*(parts[name] for name in order if name in chosen))
    if history is not None and reading.total_bytes and left >= _MIN_SPARK:
        blocks = ASCII_BLOCKS if is_ascii else BLOCKS
        line.append("  " + sparkline(history.used, left - 2, reading.total_bytes, blocks), "dim")
    return line


def history_lines(
    card: CardState,
    process: ProcessState | None,
    history: CardHistory | None,
    width: int,
    count: int,
    *,
    is_ascii: bool,
) -> list[Text]:
    """The last hour of a card, or of a process on it, over `count` lines: a heading, bars, and at the right the band of the next hour."""
    values, outlook, capacity = history.used if history is not None else None, card.outlook, card.reading.total_bytes
    subject = f"GPU {card.reading.index}"
    if process is not None:
        subject, outlook = f"process {process.facts.pid}", process.outlook
        layers = history.layers if history is not None else ()
        values = next((layer.values for layer in layers if layer.pid == process.facts.pid), None)
    if values is None or count < 3 or width < 20:
        return []
    peak = float(np.nanmax(values)) if not np.isnan(values).all() else 0.0
    highest = max(peak, outlook.upper_bytes if outlook else 0)
    top = float(capacity if process is None and capacity else highest) or 1.0
    label = f"{size(round(top)):>7} "
    columns = width - len(label)
    ahead = int(columns * _SHARE_OF_FORECAST) if outlook is not None else 0
    blocks = ASCII_BLOCKS if is_ascii else BLOCKS
    past = chart(resampled(values, columns - ahead), count - 1, top, blocks)
    lines = [Text(f"{subject}: the last hour, peak {size(round(peak))}{_words(outlook)}", "bold")]
    for row, bars in enumerate(past):
        low, high = ((count - 2 - row + part) / (count - 1) * top for part in (0.0, 1.0))
        line = Text(label if row == 0 else " " * len(label))
        line.append(bars, "cyan")
        if outlook is not None:
            line.append(_band(outlook, low, high, is_ascii=is_ascii) * ahead, "yellow")
        lines.append(line)
    return lines


def _band(outlook: Outlook, low: float, high: float, *, is_ascii: bool) -> str:
    """The sign of the forecast between two heights: solid below the median, light up to the bound."""
    solid, light = ("o", ".") if is_ascii else ("▓", "░")
    middle = (low + high) / 2
    if outlook.median_bytes >= middle:
        return solid
    return light if outlook.upper_bytes > low or math.isclose(outlook.upper_bytes, low) else " "


def _words(outlook: Outlook | None) -> str:
    if outlook is None:
        return ""
    return f"; the next: {size(outlook.median_bytes)}, {100 * outlook.quantile:g} % within {size(outlook.upper_bytes)}"


def _bar(used: float | None, *, is_ascii: bool) -> str:
    full, empty = ("#", ".") if is_ascii else ("█", "░")
    count = round(_BAR * (used or 0.0))
    return full * count + empty * (_BAR - count)


def _share_of(outlook: Outlook | None, total: int | None) -> float | None:
    return outlook.upper_bytes / total if outlook is not None and total else None


def _style(part: float | None) -> str:
    if part is None:
        return ""
    return "red" if part >= 0.95 else "yellow" if part >= 0.8 else "green"
