"""The screen as lines: a head, the cards, the history of one of them, the processes, and what is to be said. It fits any size: what has no room is left out."""

import dataclasses
import textwrap
import time
from collections.abc import Mapping, Sequence

from rich.text import Text

from tightfit.watch.machine.machine_state import MachineState, firing
from tightfit.watch.store.stored_history import CardHistory
from tightfit.watch.terminal.card_lines import card_line, history_lines
from tightfit.watch.terminal.process_lines import process_lines
from tightfit.watch.terminal.view import HELP, View, selected
from tightfit.watch.terminal.words import warnings

_MIN_FULL_HEIGHT = 32
_MIN_SAID = 4
_KEYS_WIDTH = 22


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScreenContent:
    """What there is to show: the machine, the history of cards (as far as it has been read), and lines of advice about a job."""

    state: MachineState
    histories: Mapping[str, CardHistory]
    advice: Sequence[str]
    now: float


def screen(shown: ScreenContent, view: View, width: int, height: int, *, is_ascii: bool = False) -> list[Text]:
    """Exactly `height` lines, none wider than `width`."""
    if view.is_help:
        lines = _help(width)
    else:
        head = [_head(shown, width)]
        said = _said(shown, view, max(_MIN_SAID, height // 5))
        room = max(0, height - len(head) - len(said))
        cards = _cards(shown, view, width, room // 2, is_ascii=is_ascii)
        history = _history(shown, view, width, height, room - len(cards), is_ascii=is_ascii)
        rest = room - len(cards) - len(history)
        lines = [*head, *cards, *history, *process_lines(shown.state, shown.now, view, width, rest), *said]
    lines = [*lines[:height], *(Text("") for _ in range(height - len(lines)))]
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines


def _head(shown: ScreenContent, width: int) -> Text:
    state = shown.state
    left = f"{state.host}  {state.source}  {time.strftime('%H:%M:%S', time.localtime(shown.now))}"
    keys = "q quit  h help"
    return Text.assemble((left, "bold"), " " * max(2, width - len(left) - len(keys)), (keys, "dim"))


def _said(shown: ScreenContent, view: View, count: int) -> list[Text]:
    """What wants to be read first is what stays when there is little room: a question, what is wrong with the watching, alerts, advice."""
    lines = [Text(view.message, "bold")] if view.message else []
    lines += [Text(f"! {line}", "bold red") for line in warnings(shown.state, shown.now)]
    advice = [Text(line) for line in shown.advice]
    # What was asked for has half of what is left.
    left = max(1, count - len(lines) - min(len(advice), count // 2))
    alerts = [f"! {each.rule}: {each.subject}: {each.message}" for each in firing(shown.state.episodes)]
    if len(alerts) > left:
        alerts = [*alerts[: left - 1], f"! {len(alerts) - left + 1} more alerts (--once shows all)"]
    return [*lines, *(Text(line, "yellow") for line in alerts), *advice][:count]


def _cards(shown: ScreenContent, view: View, width: int, room: int, *, is_ascii: bool) -> list[Text]:
    cards = shown.state.cards
    if not room:
        return []
    # As many as there is room for, with the card of the selected process among them.
    at = next((i for i, card in enumerate(cards) if view.selected and card.reading.uuid == view.selected[0]), 0)
    count = len(cards) if len(cards) <= room else max(1, room - 1)
    first = min(max(0, at - count + 1), max(0, len(cards) - count))
    lines = [
        card_line(card, shown.histories.get(card.reading.uuid), width, is_ascii=is_ascii)
        for card in cards[first : first + count]
    ]
    if count < len(cards) and room > 1:
        lines.append(Text(f"  GPU {first} to {first + count - 1} of {len(cards)}", "dim"))
    return lines


def _history(shown: ScreenContent, view: View, width: int, height: int, room: int, *, is_ascii: bool) -> list[Text]:
    is_full = view.mode == "full" or view.is_detail or (view.mode == "auto" and height >= _MIN_FULL_HEIGHT)
    if view.mode == "compact" or not is_full or not shown.state.cards:
        return []
    process = selected(shown.state, view)
    uuid = view.selected[0] if view.selected else shown.state.cards[0].reading.uuid
    card = next((each for each in shown.state.cards if each.reading.uuid == uuid), shown.state.cards[0])
    # What the processes leave free, and half of the room where they need more than there is.
    spare = room - len(shown.state.processes) - 1
    lines = max(room // 2 if view.is_detail else min(9, room // 2), spare)
    return history_lines(
        card,
        process if view.is_detail else None,
        shown.histories.get(card.reading.uuid),
        width,
        min(lines, 16),
        is_ascii=is_ascii,
    )


def _help(width: int) -> list[Text]:
    """The keys, and what they do beside them, in as many lines as that takes."""
    lines = [Text("tightfit watch: keys", "bold")]
    for keys, words in HELP:
        for number, part in enumerate(textwrap.wrap(words, max(_KEYS_WIDTH, width - _KEYS_WIDTH))):
            lines.append(Text(f"{'' if number else keys:<{_KEYS_WIDTH}}{part}"))
    return lines
