"""The result of a search of allocator settings as text: a table of settings to paste, the bounds, and the recommendation."""

import shlex

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.text import Text

from tightfit.tuning.candidate_settings import keys_of
from tightfit.tuning.search_settings import TriedSettings, Tuning
from tightfit.tuning.settings_search import NUM_COPIES
from tightfit.units import format_bytes

VARIABLE = "PYTORCH_CUDA_ALLOC_CONF"
_DEFAULT = "(torch's default)"


class TuningText:
    """One result in full."""

    def __init__(self, tuning: Tuning) -> None:
        self._tuning = tuning

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        tuning = self._tuning
        yield Group(*_table(tuning), *(Text(line) for line in lines(tuning)))


def lines(tuning: Tuning) -> list[str]:
    """Everything but the table, a sentence each; the recommendation comes last."""
    static, default = tuning.static, tuning.default
    share = (
        "" if static.num_placed == static.num_blocks else f" ({static.num_placed:,} of {static.num_blocks:,} blocks)"
    )
    # A static placement is what no allocator can do without knowing the future; it shows how much of the waste is avoidable at all.
    proof = "no placement is lower" if static.is_optimal else f"none is below {format_bytes(static.bound_bytes)}"
    found = [
        "Each was replayed from an empty cache, with the blocks that were live at the start allocated again;"
        " the cache is emptied where the recording shows it.",
        f"Live at the peak: {format_bytes(tuning.live_bytes)}, the lower bound for every setting."
        + ("" if not default.fits else f" The default reserves {_above(default, tuning)} more."),
        f"A placement planned with all lifetimes known would reach {format_bytes(static.height_bytes)}{share}; {proof}.",
    ]
    if not tuning.is_complete:
        found.append(
            f"The time limit ended the search after {tuning.num_trials} replays; there may be better settings."
        )
    found += [f"Refused: {one.settings} ({one.reason})." for one in tuning.refused]
    return [*found, recommendation(tuning)]


def recommendation(tuning: Tuning) -> str:
    """The recommendation in one line, from which the setting can be pasted."""
    row = tuning.recommended
    if row is None:
        return f"Recommended: none. {tuning.reason[0].upper()}{tuning.reason[1:]}."
    if not row.settings:
        return f"Recommended: {tuning.reason}."
    cost = ""
    if tuning.num_copies is not None and tuning.num_copies < NUM_COPIES:
        number = f"on {tuning.num_copies} of {NUM_COPIES} copies" if tuning.num_copies else "on no copy"
        cost = f" Checked {number} with other sizes: time ran out, or the other copies do not fit with the default settings."
    # Expandable segments are the one setting without a value that was chosen for these sizes.
    if any(key != "expandable_segments" for key in keys_of(row.settings)):
        cost += " Values fitted to one recording: check them on another."
    # Collected segments are allocated again in the next step; cudaMalloc and cudaFree synchronise the device.
    if row.driver_calls > tuning.default.driver_calls and "garbage_collection_threshold" in row.settings:
        more = row.driver_calls - tuning.default.driver_calls
        cost += f" It costs {more:,} extra driver calls, again in each step."
    elif row.settings.startswith("expandable_segments:True"):
        cost += " Its pages stay mapped, so there is no extra time per step."
    needs = f" Needs {' and '.join(row.needs)}." if row.needs else ""
    return f"Recommended: {VARIABLE}={shlex.quote(row.settings)}  {tuning.reason}.{cost}{needs}"


def _table(tuning: Tuning) -> list[Text]:
    """One line per row; the settings come last and are never wrapped, so that they can be copied."""
    heading = _cells("reserved", "saved", "recovered", "driver calls")
    found = [Text(f"{heading}{VARIABLE}", style="bold")]
    for row in tuning.rows:
        is_default = not row.settings
        reserved = f"{'> ' if row.is_at_least else ''}{format_bytes(row.peak_reserved_bytes)}"
        saved = "" if row.saved_bytes is None or is_default else format_bytes(row.saved_bytes)
        share = "" if row.recovered_share is None or is_default else f"{row.recovered_share:.0%}"
        cells = _cells(reserved if row.fits else "out of memory", saved, share, f"{row.driver_calls:,}")
        remarks = "; ".join(_remarks(row, tuning))
        is_recommended = tuning.recommended is not None and row.settings == tuning.recommended.settings
        # Quoted: the brackets of roundup_power2_divisions are patterns to a shell, and > would redirect.
        settings = _DEFAULT if is_default else shlex.quote(row.settings)
        found.append(
            Text(f"{cells}{settings}{f'  ({remarks})' if remarks else ''}", style="green" if is_recommended else "")
        )
    return found


def _cells(reserved: str, saved: str, share: str, calls: str) -> str:
    return f"{reserved:>13}  {saved:>10}  {share:>9}  {calls:>12}  "


def _remarks(row: TriedSettings, tuning: Tuning) -> list[str]:
    found = []
    if tuning.as_recorded is not None and row.settings == tuning.as_recorded.settings:
        found.append("as recorded")
    if tuning.given is not None and row.settings == tuning.given.settings:
        found.append("as given")
    if any(row.settings == one.settings for one in tuning.refused):
        found.append("known to be bad")
    if row.alloc_retries:
        found.append("1 allocation retry" if row.alloc_retries == 1 else f"{row.alloc_retries:,} allocation retries")
    if row.needs:
        found.append(f"needs {', '.join(row.needs)}")
    if row.note is not None:
        found.append(row.note)
    return found


def _above(row: TriedSettings, tuning: Tuning) -> str:
    more_bytes = row.peak_reserved_bytes - tuning.live_bytes
    return f"{format_bytes(more_bytes)} ({more_bytes / row.peak_reserved_bytes:.1%})"
